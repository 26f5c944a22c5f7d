"""Chunks that begin with their documents, streams cut anywhere, and pages that are shared by heads."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.mixers.natsl import ChunkLayout, NAtSLState, count_chunks, natsl_attention
from jaxmix.mixers.segments import find_segments
from tests.contract.agreement import F64
from tests.contract.packing import documents
from tests.contract.spec import precision
from tests.mixers.natsl import (
    BATCH,
    CAPACITY,
    CHUNK,
    FLOATS,
    GROUP,
    HEADS,
    IMPLEMENTATIONS,
    INSIDE,
    MAX_DOCUMENTS,
    ONE,
    TOKENS,
    chunk_pairs,
    cleared,
    draw_call,
    draw_inputs,
    earlier_state,
    evaluate,
    evaluate_parts,
    fresh_state,
    packed_call,
    run_packed,
    softmax_first,
    token_chunks,
)
from tests.tolerances import FORMS, assert_close, assert_same_bits

LAYOUTS = {
    "two documents": INSIDE,
    "documents of whole chunks": [[1] * 8 + [2] * 14, [1] * 2 + [2] * 20],
    "documents of one token": [[*range(1, 7), *[9] * 16], [1, 2] + [3] * 19 + [4]],
    "an id that comes back": [[1] * 8 + [2] * 8 + [1] * 6, [2, 1] * 3 + [2] * 16],
    "padding in front": [[0] * 7 + [1] * 15, [0] * 21 + [4]],
    "padding at the end": [[1] * 17 + [0] * 5, [1] + [0] * 21],
    "padding between and inside": [[1] * 6 + [0] * 5 + [1] * 7 + [2] * 4, [0] + [1] * 9 + [0] * 8 + [2] * 3 + [0]],
    "nothing but padding": [[0] * 22, [1] * 5 + [2] * 17],
}
"""Rows of at most `MAX_DOCUMENTS` documents, which the state's open chunks of three and two tokens continue."""


def turns(ids):
    """The documents of both rows in turn, as masks [B, T]."""
    rows = [documents(row) for row in ids]
    masks = []
    for turn in range(max(map(len, rows))):
        masks.append(np.zeros((BATCH, TOKENS), bool))
        for row, found in enumerate(rows):
            if turn < len(found):
                masks[-1][row, found[turn]] = True
    return masks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("continued", [False, True], ids=["new", "continued"])
def test_chunks_begin_where_their_documents_begin(layout, continued):
    ids, filled = np.array(LAYOUTS[layout]), np.array([3, 2]) * continued
    chunks = count_chunks(TOKENS, CHUNK, packed=True, continued=continued, max_documents=MAX_DOCUMENTS)
    segments = find_segments(jnp.asarray(ids, jnp.int32))
    made = ChunkLayout.of(BATCH, TOKENS, CHUNK, chunks, segments, jnp.asarray(filled, jnp.int32) if continued else None)
    x = np.arange(1.0, 1 + BATCH * TOKENS).reshape(BATCH, TOKENS)
    aligned = np.asarray(made.align(jnp.asarray(x), -jnp.ones((BATCH, CHUNK))))
    for row in range(BATCH):
        expected = token_chunks(ids[row], filled[row])
        assert np.array_equal(np.where(ids[row] == 0, -1, made.chunk[row]), expected)
        waiting = aligned[row, 0, : filled[row]]
        assert np.array_equal(waiting, [-1.0] * filled[row])
        for chunk in range(chunks):
            slots = aligned[row, chunk][np.asarray(made.valid[row, chunk])]
            assert np.array_equal(slots[slots > 0], x[row, expected == chunk])
        assert made.last[row] == max(expected.max(), 0)
    assert np.array_equal(made.complete, np.asarray(made.valid).all(axis=-1))
    assert np.array_equal(made.restore(jnp.asarray(aligned)), np.where(ids == 0, 0, x))


def test_count_chunks():
    assert count_chunks(22, 4, packed=False, continued=False) == 6
    assert count_chunks(24, 4, packed=False, continued=False) == 6
    assert count_chunks(22, 4, packed=False, continued=True) == 7
    assert count_chunks(22, 4, packed=True, continued=False, max_documents=3) == 8
    assert count_chunks(22, 4, packed=True, continued=False) == 11
    assert count_chunks(5, 4, packed=True, continued=True, max_documents=9) == 5
    assert count_chunks(1, 4, packed=True, continued=True) == 1


@IMPLEMENTATIONS
@pytest.mark.parametrize("ids", [ONE, INSIDE], ids=["one document", "two documents"])
def test_any_split_equals_one_pass_with_every_gradient(ids, implementation):
    call = packed_call(ids)
    expected = run_packed(call, "serial")
    place = np.arange(TOKENS)
    # Every length modulo the chunk size, and another in each row.
    for first, second in [(1, 10), (4, 5), (6, 15), (11, 8), (21, 20)]:
        early = place < [[first], [second]]
        actual = evaluate_parts(call, [early, ~early], implementation, max_documents=MAX_DOCUMENTS)
        assert_close(actual, expected, FORMS[F64], f"{first} and {second} tokens")


@pytest.mark.parametrize(
    "options",
    [
        {"own_chunk": "softmax", "decay_through_softmax": False},
        {"own_chunk": "linear", "rule": "ssd"},
    ],
    ids=["softmax, no decay through softmax", "linear, ssd"],
)
def test_streams_continue_with_every_option(options):
    call = packed_call(INSIDE)
    if "rule" in options:
        call = call._replace(inputs=call.inputs | {"beta": None})
    expected = evaluate(call, "serial", max_documents=MAX_DOCUMENTS, **options)
    assert_close(evaluate(call, "scan", max_documents=MAX_DOCUMENTS, **options), expected, FORMS[F64])
    early = np.arange(TOKENS) < [[7], [15]]
    actual = evaluate_parts(call, [early, ~early], "scan", max_documents=MAX_DOCUMENTS, **options)
    assert_close(actual, expected, FORMS[F64])


def test_counterfactual_gradients_of_the_linear_branch_are_exact_over_parts():
    call = packed_call(INSIDE)
    options = {"max_documents": MAX_DOCUMENTS, "counterfactual_router_grad": True}
    whole = evaluate(call, "scan", **options)
    early = np.arange(TOKENS) < [[7], [15]]
    parts = evaluate_parts(call, [early, ~early], "scan", **options)
    plain = run_packed(call, "scan")
    assert_same_bits(whole._replace(gradients={}), plain._replace(gradients={}))
    chosen = call.inputs["choice"] == 1
    choices = [result.gradients.pop("choice") for result in (whole, parts, plain)]
    assert_close(whole.gradients, plain.gradients, FORMS[F64])
    assert_close(parts.gradients, plain.gradients, FORMS[F64])
    assert_close(choices[0][chosen], choices[2][chosen], FORMS[F64])
    assert_close(choices[1][..., 1], choices[0][..., 1], FORMS[F64])
    assert np.any(choices[0][..., 1][~chosen[..., 1]])


def test_many_parts_in_both_forms_equal_one_pass_with_every_gradient():
    call = packed_call(INSIDE)
    borders = [0, 1, 4, 7, 8, 14, 19, 22]
    place = np.broadcast_to(np.arange(TOKENS), (BATCH, TOKENS))
    parts = [(place >= a) & (place < b) for a, b in itertools.pairwise(borders)]
    for implementation in ("scan", "serial"):
        actual = evaluate_parts(call, parts, implementation, max_documents=MAX_DOCUMENTS)
        assert_close(actual, run_packed(call, "serial"), FORMS[F64], implementation)


@IMPLEMENTATIONS
def test_single_tokens_in_arrays_of_their_own(implementation):
    call = packed_call(ONE)
    expected = run_packed(call, implementation)
    state, results = call.state, []
    for t in range(TOKENS):
        (row, _, first), (_, _, second) = list(chunk_pairs(call, np.where(np.arange(TOKENS) == t, 1, 0) * ONE, state))
        choice = np.stack([call.inputs["choice"][row, first], call.inputs["choice"][1, second]])
        inputs = {name: x[:, t : t + 1] for name, x in call.inputs.items()} | {"choice": choice}
        out = tuple(x[:, t : t + 1] for x in call.out_cotangent)
        results.append(call._replace(inputs=inputs, segment_ids=None, out_cotangent=out, state=state))
        state = evaluate(results[-1], None).state
    assert_close(state, expected.state, FORMS[F64])
    cotangent, gradients = call.state_cotangent, {name: [] for name in call.inputs}
    outs = []
    for piece in reversed(results):
        result = evaluate(piece._replace(state_cotangent=cotangent), None)
        cotangent = result.state_gradient
        outs.insert(0, result.out)
        for name, gradient in result.gradients.items():
            gradients[name].insert(0, gradient)
    assert_close(tuple(np.concatenate(x, axis=1) for x in zip(*outs, strict=True)), expected.out, FORMS[F64])
    assert_close(cotangent, expected.state_gradient, FORMS[F64])
    for name in gradients.keys() - {"choice"}:
        assert_close(np.concatenate(gradients[name], axis=1), expected.gradients[name], FORMS[F64], name)
    total = np.zeros_like(call.inputs["choice"])
    for row in range(BATCH):
        chunk = token_chunks(ONE[row], call.state.filled[row])
        np.add.at(total[row], chunk, np.concatenate(gradients["choice"], axis=1)[row])
    assert_close(total, expected.gradients["choice"], FORMS[F64])


def test_single_tokens_with_padding_and_new_documents():
    ids = np.array([[1, 0, 1, 2, 2, 0, 2, 2, 2, 3], [0, 0, 4, 4, 4, 4, 4, 0, 0, 4]], np.int32)
    whole = draw_call(np.pad(ids, [(0, 0), (0, TOKENS - 10)]), state=fresh_state(), max_documents=MAX_DOCUMENTS)
    expected = run_packed(whole, "scan")
    chunks = np.array([token_chunks(row) for row in ids])
    state = whole.state
    with precision():
        step = jax.jit(
            lambda inputs, ids, state: natsl_attention(
                **inputs, segment_ids=ids, initial_state=state, chunk_size=CHUNK, implementation="scan"
            )
        )
        for t in range(10):
            if t == 3:
                # A call's first real token continues the stream, whatever its id; a new document needs a reset.
                state = jax.tree.map(jnp.asarray, state).reset(jnp.array([True, False]))
            if t == 9:
                state = state.reset(jnp.array([True, False]))
            choice = np.take_along_axis(whole.inputs["choice"], chunks[:, t, None, None, None], axis=1)
            inputs = {name: x[:, t : t + 1] for name, x in whole.inputs.items()} | {"choice": choice}
            inputs = {
                name: x if name == "choice" else np.where(expand(ids[:, t : t + 1], x) == 0, np.nan, x)
                for name, x in inputs.items()
            }
            before = state
            out, state = step(inputs, ids[:, t : t + 1], state)
            assert_close(out, tuple(x[:, t : t + 1] for x in expected.out), FORMS[F64])
            padded = ids[:, t] == 0
            for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
                assert np.array_equal(a[padded], b[padded])
    assert_close(state, expected.state, FORMS[F64])


def expand(ids, x):
    return ids.reshape(*ids.shape, *[1] * (x.ndim - 2))


def test_parts_in_arrays_of_their_own_equal_one_pass():
    inputs = draw_inputs(np.random.default_rng(0))
    routed = np.random.default_rng(1).random((BATCH, 6, HEADS)) < 0.5
    options = {"chunk_size": CHUNK, "capacity": CAPACITY}
    with precision():
        inputs = jax.tree.map(jnp.asarray, inputs)
        expected, final = natsl_attention(**inputs, choice=jnp.asarray(softmax_first(routed)), **options)
        length = 5
        parts = [jax.tree.map(lambda x, at=at: x[:, at], inputs) for at in (slice(length), slice(length, None))]
        first, state = natsl_attention(
            **parts[0], choice=jnp.asarray(softmax_first(routed[:, : -(-length // CHUNK)])), **options
        )
        chunks = count_chunks(TOKENS - length, CHUNK, packed=False, continued=True)
        rest = np.pad(routed[:, length // CHUNK :], [(0, 0), (0, chunks), (0, 0)])[:, :chunks]
        second, state = natsl_attention(
            **parts[1], choice=jnp.asarray(softmax_first(rest)), initial_state=state, **options
        )
        joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)
        assert_close(joined, expected, FORMS[F64])
        assert_close(state, final, FORMS[F64])


def test_every_gradient_of_scan_is_that_of_serial_from_any_state():
    for name, ids in LAYOUTS.items():
        call = packed_call(ids)
        assert_close(run_packed(call, "scan"), run_packed(call, "serial"), FORMS[F64], name)


@IMPLEMENTATIONS
def test_packed_equals_separate_with_every_gradient(implementation):
    for name, ids in LAYOUTS.items():
        call = packed_call(ids)
        expected = evaluate_parts(
            call, turns(call.segment_ids), implementation, separate=True, max_documents=MAX_DOCUMENTS
        )
        assert_close(run_packed(call, implementation), expected, FORMS[F64], name)


@IMPLEMENTATIONS
def test_what_stands_in_padding_does_not_move_a_bit(implementation):
    for name, ids in LAYOUTS.items():
        call = packed_call(ids)
        padded = call.segment_ids == 0
        results = []
        for value in (0.0, np.nan, -np.inf):
            inputs = {
                name: x if name == "choice" else np.where(padded.reshape(*padded.shape, *[1] * (x.ndim - 2)), value, x)
                for name, x in call.inputs.items()
            }
            results.append(run_packed(call._replace(inputs=inputs), implementation))
        assert_same_bits(results[1], results[0], name)
        assert_same_bits(results[2], results[0], name)
        for x in (*results[0].out, *(g for name, g in results[0].gradients.items() if name != "choice")):
            assert not np.any(x[padded])


@IMPLEMENTATIONS
@pytest.mark.parametrize("factor", [-3.0, 1e6])
def test_changing_one_document_does_not_move_the_next_by_a_bit(implementation, factor):
    call = packed_call([[1] * 11 + [2] * 11, [1] * 3 + [0] * 8 + [2] * 11])
    inputs = {name: np.array(x) for name, x in call.inputs.items()}
    for name in inputs.keys() - {"choice"}:
        inputs[name][:, :11] *= 2.0 if name in ("log_decay", "beta") else factor
    before, after = run_packed(call, implementation), run_packed(call._replace(inputs=inputs), implementation)
    assert_same_bits([x[:, 11:] for x in after.out], [x[:, 11:] for x in before.out])
    assert_same_bits(after.state, before.state)
    for name in inputs.keys() - {"choice"}:
        assert_same_bits(after.gradients[name][:, 11:], before.gradients[name][:, 11:], name)
    for row, ids in enumerate(call.segment_ids):
        own = np.unique(token_chunks(ids, call.state.filled[row])[11:])
        assert_same_bits(after.gradients["choice"][row, own], before.gradients["choice"][row, own])


@IMPLEMENTATIONS
def test_a_document_gets_no_gradient_from_the_next(implementation):
    call = packed_call([[1] * 11 + [2] * 11] * BATCH)
    cotangent = tuple(np.where(np.arange(TOKENS)[:, None, None] < 11, 0, x) for x in call.out_cotangent)
    result = run_packed(call._replace(out_cotangent=cotangent), implementation)
    for name in result.gradients.keys() - {"choice"}:
        assert not np.any(result.gradients[name][:, :11]), name
    assert not any(np.any(x) for x in result.state_gradient)
    for row, ids in enumerate(call.segment_ids):
        assert not np.any(result.gradients["choice"][row, : token_chunks(ids, call.state.filled[row])[11]])


def test_a_broken_document_does_not_reach_the_next():
    call = packed_call([[1] * 11 + [2] * 11] * BATCH)
    before = run_packed(call, "serial")
    for value in (np.inf, np.nan):
        inputs = {name: np.array(x) for name, x in call.inputs.items()}
        for name in ("q", "k", "v", "q_softmax", "k_softmax", "v_softmax"):
            inputs[name][:, :11] = value
        after = run_packed(call._replace(inputs=inputs), "serial")
        assert_same_bits([x[:, 11:] for x in after.out], [x[:, 11:] for x in before.out])
        assert_same_bits(after.state, before.state)


def test_pages_hold_the_chunks_that_each_head_keeps():
    call = draw_call(ONE, state=fresh_state(), max_documents=MAX_DOCUMENTS)
    state = run_packed(call, "scan").state
    for row in range(BATCH):
        for head in range(HEADS):
            kept = np.flatnonzero(call.inputs["choice"][row, : TOKENS // CHUNK, head, 0])
            assert state.count[row, head] == len(kept)
            for place, chunk in enumerate(kept):
                page = state.table[row, head, place]
                for name, pages in (("k_softmax", state.page_k), ("v_softmax", state.page_v)):
                    heads = slice(GROUP * head, GROUP * (head + 1))
                    tokens = call.inputs[name][row, CHUNK * chunk : CHUNK * (chunk + 1), heads]
                    assert np.array_equal(pages[row, page], tokens.swapaxes(0, 1))
                assert state.weight[row, page] == 1
        used = np.concatenate([state.table[row, head, : state.count[row, head]] for head in range(HEADS)])
        assert sorted(used) == list(range(state.used[row]))
    assert np.array_equal(state.filled, [2, 2])
    assert np.array_equal(state.own_k[:, :2], call.inputs["k_softmax"][:, 20:])
    assert not np.any(state.own_k[:, 2:])


def test_reset_starts_only_the_named_streams_anew():
    state = earlier_state()
    with precision():
        reset = jax.device_get(jax.tree.map(jnp.asarray, state).reset(jnp.array([True, False])))
        broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == np.float64 else x, state)
        mended = jax.device_get(broken.reset(jnp.array([True, False])))
    assert_same_bits(reset, cleared(state, np.array([True, False])))
    for actual, fresh in zip(jax.tree.leaves(mended), jax.tree.leaves(fresh_state()), strict=True):
        assert np.array_equal(actual[0], fresh[0])


def test_a_state_is_a_frozen_dataclass_and_a_pytree():
    state = fresh_state()
    assert [f.name for f in dataclasses.fields(state) if getattr(state, f.name).dtype == np.float64] == list(FLOATS)
    assert isinstance(state, NAtSLState)
    assert len(jax.tree.leaves(state)) == len(dataclasses.fields(state))
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.filled = state.used
