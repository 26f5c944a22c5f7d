"""The write mask of the delta rules, whose chunks are those of the call: [B, ceil(T / chunk_size), H]."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmix import delta_rule, gated_delta_rule
from jaxmix.parallel import make_mesh
from tests.contract import Variant
from tests.contract.agreement import DOCUMENTS, F32, F64, STRONG_DECAYS
from tests.contract.packing import documents
from tests.contract.sharding import sharded
from tests.contract.spec import BATCH, TOKENS, Form, draw_case, evaluate, moved, precision
from tests.mixers.delta import GATED_DELTA_RULE, MASKED, PER_TOKEN, Spread, printed_recurrence
from tests.tolerances import (
    BRUTE_FORCE,
    FINITE_DIFFERENCE,
    FORMS,
    STRONG_DECAY_FLOOR,
    assert_close,
    assert_same_bits,
    rms_ratio,
)

SERIAL, SCAN = Form("serial"), Form("scan")
LONG = 130
LAYOUTS = {
    "one document": np.ones((BATCH, TOKENS), np.int32),
    "documents": DOCUMENTS,
    # With chunks of 5: chunks of padding only, borders at and inside chunks, padding inside a document.
    "documents and padding": np.array(
        [[0] * 7 + [1] * 3 + [2] * 4 + [0] * 6 + [2] * 4, [1] * 5 + [2] * 2 + [0] * 11 + [1] * 6], np.int32
    ),
}


def masked(chunk_size, *, decay_masked=True, gate="token", shape=PER_TOKEN.shape) -> Variant:
    return Variant({"chunk_size": chunk_size, "decay_masked": decay_masked}, shape, gate)


VARIANTS = {
    "decay kept": masked(5),
    "decay dropped": masked(5, decay_masked=False),
    "decay dropped, per head, more value heads": masked(
        5, decay_masked=False, gate="head", shape=Spread(4, q_heads=2, k_heads=2, v_heads=4, key_size=4)
    ),
    "no decay": masked(5, gate="none"),
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
KEPT_OR_DROPPED = pytest.mark.parametrize("variant", list(VARIANTS.values())[:2], ids=["decay kept", "decay dropped"])


@EVERY_VARIANT
@pytest.mark.parametrize("layout", LAYOUTS)
def test_serial_is_the_printed_recurrence(variant, layout):
    case = draw_case(MASKED, variant, segment_ids=LAYOUTS[layout])
    actual = evaluate(MASKED, variant, case, SERIAL)
    assert_close((actual.out, actual.state), printed_recurrence(case, variant), BRUTE_FORCE)


@EVERY_VARIANT
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scan_is_serial_with_every_gradient(variant, layout):
    case = draw_case(MASKED, variant, segment_ids=LAYOUTS[layout])
    assert_close(evaluate(MASKED, variant, case, SCAN), evaluate(MASKED, variant, case, SERIAL), FORMS[F64])


@pytest.mark.parametrize(("chunk_size", "decay_masked"), [(1, True), (1, False), (8, False), (64, True)])
def test_scan_is_serial_at_other_chunk_sizes(chunk_size, decay_masked):
    variant = masked(chunk_size, decay_masked=decay_masked)
    case = draw_case(MASKED, variant, segment_ids=DOCUMENTS)
    expected = evaluate(MASKED, variant, case, SERIAL)
    assert_close((expected.out, expected.state), printed_recurrence(case, variant), BRUTE_FORCE)
    assert_close(evaluate(MASKED, variant, case, SCAN), expected, FORMS[F64])


@KEPT_OR_DROPPED
def test_gradients_are_finite_differences(variant):
    case = draw_case(MASKED, variant, segment_ids=DOCUMENTS)
    gradients = evaluate(MASKED, variant, case, SERIAL).input_gradients
    rng, step = np.random.default_rng(1), 1e-5
    for name in ("write_mask", "log_decay", "k"):
        direction = rng.normal(size=gradients[name].shape)
        above, below = (loss(variant, moved(case, name, sign * step * direction)) for sign in (1, -1))
        scale = np.linalg.norm(gradients[name]) * np.linalg.norm(direction) / np.sqrt(direction.size)
        difference = (above - below) / (2 * step) - np.sum(gradients[name] * direction)
        assert abs(difference) <= FINITE_DIFFERENCE * scale, name


def loss(variant, case):
    result = evaluate(MASKED, variant, case, SERIAL)
    return np.sum(result.out * case.out_cotangent) + np.sum(result.state.S * case.state_cotangent.S)


@KEPT_OR_DROPPED
@pytest.mark.parametrize("form", [SERIAL, SCAN], ids=["serial", "scan"])
def test_a_mask_of_zeros_leaves_the_initial_state(variant, form):
    case = draw_case(MASKED, variant)
    case.inputs["write_mask"] = np.zeros_like(case.inputs["write_mask"])
    kept = np.exp(case.inputs["log_decay"].sum(axis=1))[..., None, None] if variant.options["decay_masked"] else 1
    actual = evaluate(MASKED, variant, case, form)
    assert rms_ratio(actual.state.S, kept * case.state.S) <= BRUTE_FORCE


@KEPT_OR_DROPPED
def test_a_mask_of_zeros_shows_each_chunk_to_itself_only(variant):
    case = draw_case(MASKED, variant)
    case.inputs["write_mask"] = np.zeros_like(case.inputs["write_mask"])
    first = case._replace(inputs={name: np.array(x) for name, x in case.inputs.items()})
    first.inputs["v"][:, 5:10] *= -3.0
    before, after = (evaluate(MASKED, variant, x, SCAN).out for x in (case, first))
    assert not np.any(after[:, 5:10] == before[:, 5:10])
    assert_same_bits(np.delete(after, range(5, 10), axis=1), np.delete(before, range(5, 10), axis=1))


@KEPT_OR_DROPPED
@pytest.mark.parametrize("form", [SERIAL, SCAN], ids=["serial", "scan"])
def test_a_mask_of_ones_is_no_mask(variant, form):
    case = draw_case(MASKED, variant, segment_ids=DOCUMENTS)
    case.inputs["write_mask"] = np.ones_like(case.inputs["write_mask"])
    plain = case._replace(inputs={name: x for name, x in case.inputs.items() if name != "write_mask"})
    actual = evaluate(MASKED, variant, case, form)
    actual.input_gradients.pop("write_mask")
    expected = evaluate(GATED_DELTA_RULE, PER_TOKEN, plain, Form(form.implementation, 5))
    assert_close(actual, expected, BRUTE_FORCE if form == SERIAL else FORMS[F64])


@KEPT_OR_DROPPED
def test_each_head_and_row_has_its_own_mask(variant):
    case = draw_case(MASKED, variant)
    other = case._replace(inputs={name: np.array(x) for name, x in case.inputs.items()})
    other.inputs["write_mask"][1, 2, 0] += 0.5
    before, after = (evaluate(MASKED, variant, x, SCAN) for x in (case, other))
    moved_out = after.out != before.out
    # Row 1, head 0, from the chunk after the third on.
    expected = np.zeros((BATCH, TOKENS, 2), bool)
    expected[1, 15:, 0] = True
    assert np.array_equal(moved_out.any(axis=-1), expected)
    assert np.array_equal((after.state.S != before.state.S).any(axis=(2, 3)), expected[:, -1])


@KEPT_OR_DROPPED
def test_packed_documents_do_not_see_each_other(variant):
    case = draw_case(MASKED, variant, segment_ids=LAYOUTS["documents and padding"])
    for form in (SERIAL, SCAN):
        before = evaluate(MASKED, variant, case, form)
        for row, ids in enumerate(case.segment_ids):
            first, *others = documents(ids)
            changed = case._replace(inputs={name: np.array(x) for name, x in case.inputs.items()})
            for name in ("q", "k", "v", "beta"):
                changed.inputs[name][row, first] *= -3.0
                changed.inputs[name][case.segment_ids == 0] = np.nan
            after = evaluate(MASKED, variant, changed, form)
            for rest in others:
                assert_same_bits(after.out[row, rest], before.out[row, rest])
                for name in ("q", "k", "v", "beta", "log_decay"):
                    actual, expected = (result.input_gradients[name][row, rest] for result in (after, before))
                    assert_same_bits(actual, expected, name)
            assert_same_bits(after.state, before.state)


@KEPT_OR_DROPPED
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_strong_decay_stays_finite_and_exact(variant, dtype):
    variant = masked(64, decay_masked=variant.options["decay_masked"])
    ids = [[1] * LONG, [1] * 30 + [2] * 75 + [3] * (LONG - 105)]
    case = draw_case(MASKED, variant, LONG, segment_ids=ids)
    for decay in STRONG_DECAYS.values():
        case.inputs["log_decay"] = decay(np.random.default_rng(2), case.inputs["log_decay"].shape)
        expected = evaluate(MASKED, variant, MASKED.rounded(case, dtype), SERIAL)
        assert_close(evaluate(MASKED, variant, case, SCAN, dtype), expected, FORMS[dtype], floor=STRONG_DECAY_FLOOR)


@pytest.mark.parametrize("dtype", [F32, np.dtype(jnp.bfloat16)], ids=str)
def test_lower_precision(dtype):
    variant = VARIANTS["decay kept"]
    case = draw_case(MASKED, variant, segment_ids=DOCUMENTS)
    expected = evaluate(MASKED, variant, MASKED.rounded(case, dtype), SERIAL)
    actual = evaluate(MASKED, variant, case, SCAN, dtype)
    assert actual.input_gradients["write_mask"].dtype == np.float32
    assert_close(actual, expected, FORMS[dtype])


@pytest.mark.parametrize("form", [SERIAL, SCAN, Form(None)], ids=["serial", "scan", "default"])
def test_one_token_has_a_mask_too(form):
    variant = VARIANTS["decay kept"]
    case = draw_case(MASKED, variant, 1)
    actual = evaluate(MASKED, variant, case, form)
    assert_close((actual.out, actual.state), printed_recurrence(case, variant), BRUTE_FORCE)


def test_the_delta_rule_has_the_same_mask():
    variant = VARIANTS["no decay"]
    case = draw_case(MASKED, variant)
    with precision():
        inputs, state = jax.tree.map(jnp.asarray, (case.inputs, case.state))
        for implementation in ("serial", "scan"):
            options = {"chunk_size": 5, "implementation": implementation, "initial_state": state}
            expected = gated_delta_rule(**inputs, log_decay=None, **options)
            assert_same_bits(delta_rule(**inputs, **options), expected)


@KEPT_OR_DROPPED
def test_tokens_over_devices(variant):
    variant = masked(3, decay_masked=variant.options["decay_masked"])
    mesh = make_mesh(sequence=4, batch=2)
    run = sharded(MASKED, variant, mesh, P("batch", "sequence"), P("batch"), SCAN, sequence_axis="sequence")
    for layout in ([[1] * TOKENS] * BATCH, [[1] * 8 + [2] * 16, [0] * 7 + [3] * 9 + [1] * 8]):
        case = draw_case(MASKED, variant, segment_ids=layout)
        with precision():
            actual = jax.device_get(run(MASKED.cast(case, np.float64)))
        assert_close(actual, evaluate(MASKED, variant, case, SERIAL), FORMS[F64])


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_decay_masked_is_a_flag(value):
    x = jnp.ones((1, 4, 1, 2))
    gates = jnp.zeros((1, 4, 1))
    with pytest.raises(ValueError, match=rf"decay_masked: expected .*got .*{value}"):
        gated_delta_rule(x, x, x, gates, gates, decay_masked=value)


def test_a_mask_of_another_chunk_size_is_refused():
    x, gates = jnp.ones((1, 100, 1, 2)), jnp.zeros((1, 100, 1))
    with pytest.raises(ValueError, match=r"write_mask: expected .*\[1, 7, 1\], got shape \[1, 2, 1\]"):
        gated_delta_rule(x, x, x, gates, gates, write_mask=jnp.ones((1, 2, 1)), chunk_size=16)
