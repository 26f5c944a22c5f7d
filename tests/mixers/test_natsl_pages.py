"""The pages of NAtS-L streams: shared by heads, full, and grown; and documents that are too many."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.mixers.natsl import count_chunks, natsl_attention
from tests.contract.agreement import F64
from tests.mixers.natsl import (
    BATCH,
    CAPACITY,
    CHUNK,
    HEADS,
    IMPLEMENTATIONS,
    INSIDE,
    MAX_DOCUMENTS,
    ONE,
    draw_call,
    draw_inputs,
    forward,
    fresh_state,
    packed_call,
    softmax_first,
    token_chunks,
)
from tests.tolerances import FORMS, assert_close, assert_same_bits


def call_with(capacity, routed, state=None, seed=0, tokens=8, **options):
    """A call of two chunks in float32; `routed` [H] is what its heads choose."""
    options |= {"chunk_size": CHUNK, "capacity": capacity, "initial_state": state}
    inputs = {name: jnp.asarray(x, jnp.float32) for name, x in draw_inputs(np.random.default_rng(seed), tokens).items()}
    chunks = count_chunks(tokens, CHUNK, packed=False, continued=state is not None)
    choice = jnp.asarray(softmax_first(np.broadcast_to(routed, (BATCH, chunks, HEADS))), jnp.float32)
    return natsl_attention(**inputs, choice=choice, **options)


def test_one_head_may_fill_all_pages():
    _, state = call_with(4, [True, False])
    _, state = call_with(4, [True, False], state)
    assert np.array_equal(state.count, [[4, 0]] * BATCH)
    assert np.array_equal(state.used, [4] * BATCH)
    (_, softmax), _ = call_with(4, [False, False], state)
    assert np.all(np.isfinite(softmax))


def test_more_pages_than_there_is_room_for_are_an_error_where_that_is_known():
    with pytest.raises(ValueError, match=r"^capacity: expected room for 4 pages .*, got 3$"):
        call_with(3, [True, True])
    _, state = call_with(3, [True, False])
    with pytest.raises(ValueError, match=r"^capacity: expected room for 4 pages .*, got 3$"):
        call_with(3, [True, False], state)


@pytest.mark.parametrize(("routed", "lost"), [((True, False), False), ((True, True), True)])
def test_in_compiled_code_later_softmax_outputs_are_nan_and_nothing_else(routed, lost):
    @jax.jit
    def two_calls():
        first, state = call_with(3, routed)
        second, _ = call_with(3, [False, False], state, seed=1)
        return first, second, state.used

    first, second, used = two_calls()
    assert np.array_equal(used, [2 * sum(routed)] * BATCH)
    assert all(np.all(np.isfinite(x)) for x in (*first, second[0]))
    assert np.array_equal(np.isnan(second[1]), np.full(second[1].shape, lost))


def test_in_compiled_code_the_serial_form_loses_the_tokens_after_the_page_that_is_missing():
    (linear, softmax), state = jax.jit(lambda: call_with(1, [True, True], implementation="serial"))()
    assert np.array_equal(state.used, [4] * BATCH)
    assert np.all(np.isfinite(linear))
    assert np.all(np.isfinite(softmax[:, :CHUNK]))
    assert np.all(np.isnan(softmax[:, CHUNK:]))


@IMPLEMENTATIONS
def test_a_new_document_is_right_after_a_stream_has_outgrown_its_pages(implementation):
    call = packed_call(INSIDE)
    full = dataclasses.replace(call.state, used=call.state.used + CAPACITY)
    (expected, expected_state), (actual, state) = (
        forward(x, implementation, max_documents=MAX_DOCUMENTS) for x in (call, call._replace(state=full))
    )
    old = call.segment_ids == 1
    assert_same_bits(actual[0], expected[0])
    assert np.all(np.isnan(actual[1][old]))
    assert_same_bits(actual[1][~old], expected[1][~old])
    assert_same_bits(state, expected_state)


def test_capacity_grows_with_the_state_in_use():
    call = packed_call(ONE)
    expected, state = forward(call, "scan", max_documents=MAX_DOCUMENTS)
    out, grown = forward(call, "scan", max_documents=MAX_DOCUMENTS, capacity=CAPACITY + 3)
    assert grown.capacity == CAPACITY + 3
    assert_same_bits(out, expected)
    for field in dataclasses.fields(grown):
        old = getattr(state, field.name)
        new = getattr(grown, field.name)[tuple(slice(size) for size in old.shape)]
        assert_same_bits(new, old, field.name)
    with pytest.raises(ValueError, match=rf"capacity: expected at least the {CAPACITY} pages of initial_state, got 3"):
        forward(call, "scan", max_documents=MAX_DOCUMENTS, capacity=3)


@IMPLEMENTATIONS
def test_tokens_of_documents_that_do_not_fit_are_nan_and_the_others_right(implementation):
    # With room for two documents: 22 tokens in 7 chunks. The first row needs 6 + 1, the second 2 + 5 chunks of 8.
    ids = [[1] * 9 + [2] * 13, [1, 2, 3, 4, 5, 6] + [7] * 16]
    few, many = draw_call(ids, max_documents=2), draw_call(ids, state=fresh_state(), max_documents=MAX_DOCUMENTS)
    few.inputs["choice"][:] = many.inputs["choice"][:, : few.inputs["choice"].shape[1]]
    chunks = few.inputs["choice"].shape[1]
    actual, _ = forward(few, implementation, max_documents=2)
    expected, _ = forward(many, implementation, max_documents=MAX_DOCUMENTS)
    lost = np.array([token_chunks(row) >= chunks for row in np.array(ids)])
    assert lost.any(axis=1).tolist() == [False, True]
    for a, b in zip(actual, expected, strict=True):
        assert np.all(np.isnan(a[lost]))
        assert_close(a[~lost], b[~lost], FORMS[F64])
