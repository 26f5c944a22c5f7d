"""Every form computes the explicit sums: outputs, final states and each gradient by itself."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract.spec import (
    SCAN,
    SERIAL,
    TOKEN_SCAN,
    TOKENS,
    Form,
    draw_case,
    evaluate,
    fill_up,
    forward,
    is_per_token,
    moved,
    state_fields,
    take_tokens,
    zero_state,
)
from tests.contract.suite import Suite
from tests.tolerances import BRUTE_FORCE, FINITE_DIFFERENCE, FORMS, STRONG_DECAY_FLOOR, assert_close, rms_ratio

F64 = np.dtype(np.float64)
F32 = np.dtype(np.float32)
BF16 = np.dtype(jnp.bfloat16)
LONG = 130
DOCUMENTS = np.array([[1] * 9 + [2] * 15, [3] * 1 + [2] * 11 + [3] * 12], np.int32)
"""Two packed rows; an id that comes back after another document is a new document."""
SHORT_DOCUMENTS = np.array([[1, 1, 1, 2, 2], [3, 0, 3, 1, 3]], np.int32)

STRONG_DECAYS = {
    "-80 at every step": lambda rng, shape: np.full(shape, -80.0),
    "one step of -500": lambda rng, shape: (
        np.where(np.arange(shape[1])[:, None] % 40 == 12, -500.0, -0.01) + np.zeros(shape)
    ),
    "twenty steps of -80, then -0.01": lambda rng, shape: (
        np.where(np.arange(shape[1])[:, None] % 64 < 20, -80.0, -0.01) + np.zeros(shape)
    ),
    "steps from -1e-6 to -80": lambda rng, shape: -np.exp(rng.uniform(np.log(1e-6), np.log(80.0), shape)),
}


def padded_serial(spec, variant, case, length):
    """Serial evaluation of the first `length` tokens, the rest being padding: one compiled function for all lengths."""
    segment_ids = np.where(np.arange(case.segment_ids.shape[1]) < length, case.segment_ids, 0)
    whole = evaluate(spec, variant, case._replace(segment_ids=segment_ids), SERIAL)
    return whole._replace(
        out=whole.out[:, :length],
        input_gradients={name: x[:, :length] if is_per_token(x) else x for name, x in whole.input_gradients.items()},
    )


class Agreement(Suite):
    """Forms against explicit sums and against each other."""

    def test_serial_is_the_explicit_sum(self, any_variant):
        case = draw_case(self.spec, any_variant)._replace(state=zero_state(self.spec, any_variant))
        expected = self.spec.brute_force(case.inputs, case.segment_ids, any_variant)
        assert rms_ratio(evaluate(self.spec, any_variant, case, SERIAL).out, expected) <= BRUTE_FORCE

    def test_serial_is_the_explicit_sum_of_each_packed_document(self, any_variant):
        case = draw_case(self.spec, any_variant, segment_ids=DOCUMENTS)._replace(
            state=zero_state(self.spec, any_variant)
        )
        expected = self.spec.brute_force(case.inputs, case.segment_ids, any_variant)
        assert rms_ratio(evaluate(self.spec, any_variant, case, SERIAL).out, expected) <= BRUTE_FORCE

    def test_as_many_tokens_as_heads(self):
        variant, heads = self.spec.main, self.spec.main.shape.heads
        case = draw_case(self.spec, variant, heads)._replace(state=zero_state(self.spec, variant))
        expected = self.spec.brute_force(case.inputs, case.segment_ids, variant)
        for form in (SERIAL, Form("scan", 8)):
            assert rms_ratio(evaluate(self.spec, variant, case, form).out, expected) <= BRUTE_FORCE

    def test_scan_equals_serial_with_every_gradient(self, any_variant):
        case = draw_case(self.spec, any_variant, segment_ids=DOCUMENTS)
        expected = evaluate(self.spec, any_variant, case, SERIAL)
        assert_close(evaluate(self.spec, any_variant, case, SCAN), expected, FORMS[F64])

    def test_token_scan_equals_serial_with_every_gradient(self, variant):
        case = draw_case(self.spec, variant, segment_ids=SHORT_DOCUMENTS, tokens=SHORT_DOCUMENTS.shape[1])
        expected = evaluate(self.spec, variant, case, SERIAL)
        assert_close(evaluate(self.spec, variant, case, TOKEN_SCAN), expected, FORMS[F64])

    def test_serial_gradients_are_finite_differences(self, variant):
        case = draw_case(self.spec, variant, segment_ids=DOCUMENTS)
        result = evaluate(self.spec, variant, case, SERIAL)
        gradients = {**result.input_gradients, **state_fields(result.state_gradient)}
        rng, step = np.random.default_rng(1), 1e-5
        for name, gradient in gradients.items():
            direction = rng.normal(size=gradient.shape)
            above, below = (self._loss(variant, moved(case, name, sign * step * direction)) for sign in (1, -1))
            expected = np.sum(gradient * direction)
            scale = np.linalg.norm(gradient) * np.linalg.norm(direction) / np.sqrt(gradient.size)
            rounding = 4 * np.finfo(np.float64).eps * max(abs(above), abs(below)) / step
            assert abs((above - below) / (2 * step) - expected) <= FINITE_DIFFERENCE * scale + rounding, name

    def _loss(self, variant, case):
        result = evaluate(self.spec, variant, case, SERIAL)
        cotangents = state_fields(case.state_cotangent)
        from_state = sum(np.sum(x * cotangents[name]) for name, x in state_fields(result.state).items())
        return np.sum(result.out * case.out_cotangent) + from_state

    def test_a_chunk_longer_than_the_sequence(self):
        self.check_forward(self.spec.main, draw_case(self.spec, self.spec.main, LONG), Form("scan", 200))

    @pytest.mark.parametrize("chunk_size", [17, 64])
    def test_chunks_with_every_gradient(self, chunk_size):
        case = draw_case(self.spec, self.spec.main, LONG)
        expected = evaluate(self.spec, self.spec.main, case, SERIAL)
        assert_close(evaluate(self.spec, self.spec.main, case, Form("scan", chunk_size)), expected, FORMS[F64])

    def test_every_length_to_sixteen(self, own_length):
        case = take_tokens(draw_case(self.spec, self.spec.main), 0, own_length)
        self.check_forward(self.spec.main, case, Form("scan", 8))

    @pytest.mark.parametrize("length", [1, 2, 3, 16])
    def test_short_lengths_with_every_gradient(self, length):
        case = draw_case(self.spec, self.spec.main)
        actual = evaluate(self.spec, self.spec.main, take_tokens(case, 0, length), Form("scan", 8))
        assert_close(actual, padded_serial(self.spec, self.spec.main, case, length), FORMS[F64])

    @pytest.mark.parametrize("length", [63, 64, 127])
    def test_lengths_around_the_chunk(self, length):
        case = take_tokens(draw_case(self.spec, self.spec.main, LONG), 0, length)
        self.check_forward(self.spec.main, case, Form("scan"))

    def test_one_token_more_than_a_chunk_with_every_gradient(self):
        case = draw_case(self.spec, self.spec.main, LONG)
        actual = evaluate(self.spec, self.spec.main, take_tokens(case, 0, 65), Form("scan"))
        assert_close(actual, padded_serial(self.spec, self.spec.main, case, 65), FORMS[F64])

    def test_a_thousand_tokens(self):
        case = draw_case(self.spec, self.spec.main, 1000)
        scan, serial = (forward(self.spec, self.spec.main, case, form) for form in (Form("scan"), SERIAL))
        assert_close(scan, serial, FORMS[F64])

    def check_forward(self, variant, case, form):
        """Output and final state of the scan against those of the serial form, which sees the rest as padding."""
        length = case.segment_ids.shape[1]
        whole = TOKENS if length <= TOKENS else LONG
        expected = evaluate(self.spec, variant, fill_up(case, whole), SERIAL)
        assert_close(forward(self.spec, variant, case, form), (expected.out[:, :length], expected.state), FORMS[F64])

    @pytest.mark.parametrize("decay", STRONG_DECAYS)
    @pytest.mark.parametrize("dtype", [F64, F32], ids=str)
    def test_strong_decay_stays_finite_and_exact(self, decay, dtype):
        if not self.spec.decay_signs:
            pytest.skip("this mixer has no decay")
        # Documents that begin inside chunks: decays of one may not meet those of another, not even as 0 * inf.
        ids = [[1] * LONG, [1] * 30 + [2] * 75 + [3] * (LONG - 105)]
        case = draw_case(self.spec, self.spec.main, LONG, segment_ids=ids)
        rng = np.random.default_rng(2)
        gates = {
            name: sign * np.abs(STRONG_DECAYS[decay](rng, case.inputs[name].shape))
            for name, sign in self.spec.decay_signs.items()
        }
        case = case._replace(inputs=case.inputs | gates)
        expected = evaluate(self.spec, self.spec.main, self.spec.rounded(case, dtype), SERIAL)
        for form in (SERIAL, Form("scan", 64)):
            actual = evaluate(self.spec, self.spec.main, case, form, dtype)
            assert_close(actual, expected, FORMS[dtype], f"{form}", floor=STRONG_DECAY_FLOOR)

    def test_float32(self, variant):
        self.check_lower_precision(variant, SCAN, F32)

    @pytest.mark.parametrize("form", [SERIAL, SCAN], ids=["serial", "scan"])
    def test_bfloat16(self, form):
        self.check_lower_precision(self.spec.main, form, BF16)

    def check_lower_precision(self, variant, form, dtype):
        case = draw_case(self.spec, variant, segment_ids=DOCUMENTS)
        expected = evaluate(self.spec, variant, self.spec.rounded(case, dtype), SERIAL)
        assert_close(evaluate(self.spec, variant, case, form, dtype), expected, FORMS[dtype])

    @pytest.mark.parametrize("form", [SERIAL, Form("scan", 64)], ids=["serial", "chunk 64"])
    def test_float32_over_more_tokens(self, form):
        case = draw_case(self.spec, self.spec.main, LONG)
        expected = evaluate(self.spec, self.spec.main, self.spec.rounded(case, F32), SERIAL)
        assert_close(evaluate(self.spec, self.spec.main, case, form, F32), expected, FORMS[F32])
