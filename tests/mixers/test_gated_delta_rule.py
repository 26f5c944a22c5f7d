import numpy as np
import pytest

from jaxmix.mixers import DeltaState
from tests.contract import MixerContract
from tests.contract.agreement import DOCUMENTS, F32, F64, STRONG_DECAYS
from tests.contract.spec import BATCH, SCAN, SERIAL, TOKENS, Form, draw_case, evaluate
from tests.mixers.delta import DELTA_RULE, GATED_DELTA_RULE, MORE_VALUES, PER_TOKEN, DeltaErrors, printed_recurrence
from tests.tolerances import BRUTE_FORCE, FORMS, STRONG_DECAY_FLOOR, assert_close, rms_ratio

FORMS_UNDER_TEST = pytest.mark.parametrize("form", [SERIAL, SCAN], ids=["serial", "scan"])


HARD_KEYS = {
    "long keys, weak writes": lambda unit: (3 * unit, np.full(unit.shape[:3], 0.1)),
    "one key again and again": lambda unit: (np.broadcast_to(unit[:, :1], unit.shape), np.ones(unit.shape[:3])),
    "reflections": lambda unit: (unit, np.full(unit.shape[:3], 2.0)),
    "one key, reflected again and again": lambda unit: (
        np.broadcast_to(unit[:, :1], unit.shape),
        np.full(unit.shape[:3], 2.0),
    ),
}
"""Unit keys to keys and beta for which the matrix that is solved with is far from the identity."""


class TestGatedDeltaRule(DeltaErrors, MixerContract):
    spec = GATED_DELTA_RULE

    def test_outputs_and_states_follow_the_printed_recurrence_from_any_state(self, any_variant):
        case = draw_case(self.spec, any_variant, segment_ids=DOCUMENTS)
        case = case._replace(state=DeltaState(np.random.default_rng(11).normal(size=case.state.S.shape)))
        actual = evaluate(self.spec, any_variant, case, SERIAL)
        assert_close((actual.out, actual.state), printed_recurrence(case, any_variant), BRUTE_FORCE)

    def test_a_decay_of_zero_is_the_delta_rule(self):
        case = draw_case(self.spec, PER_TOKEN, segment_ids=DOCUMENTS)
        case.inputs["log_decay"] = np.zeros((BATCH, TOKENS, 2))
        plain = case._replace(inputs={name: x for name, x in case.inputs.items() if name != "log_decay"})
        for form in (SERIAL, SCAN):
            expected = evaluate(DELTA_RULE, DELTA_RULE.main, plain, form)
            actual = evaluate(self.spec, PER_TOKEN, case, form)
            actual.input_gradients.pop("log_decay")
            assert_close(actual, expected, BRUTE_FORCE, str(form))

    def test_decay_per_head_is_the_same_decay_at_every_token(self):
        case = draw_case(self.spec, MORE_VALUES)
        tokens = np.broadcast_to(case.inputs["log_decay"], (BATCH, TOKENS, 4))
        expected = evaluate(self.spec, MORE_VALUES, case, SCAN)
        actual = evaluate(self.spec, MORE_VALUES, case._replace(inputs=case.inputs | {"log_decay": tokens}), SCAN)
        actual.input_gradients["log_decay"] = actual.input_gradients["log_decay"].sum(axis=(0, 1))
        assert_close(actual, expected, BRUTE_FORCE)

    @FORMS_UNDER_TEST
    def test_nothing_written_leaves_the_decayed_state(self, form):
        case = draw_case(self.spec, PER_TOKEN)
        case.inputs["beta"] = np.zeros((BATCH, TOKENS, 2))
        decay = np.exp(np.cumsum(case.inputs["log_decay"], axis=1))[..., None, None]
        expected = decay * case.state.S[:, None]
        actual = evaluate(self.spec, PER_TOKEN, case, form)
        assert rms_ratio(actual.state.S, expected[:, -1]) <= BRUTE_FORCE
        out = 5**-0.5 * np.einsum("bthd,bthde->bthe", case.inputs["q"], expected)
        assert rms_ratio(actual.out, out) <= BRUTE_FORCE

    @pytest.mark.parametrize("chunk_size", [16, 32, 64])
    def test_a_thousand_tokens_with_every_gradient(self, chunk_size):
        case = draw_case(self.spec, PER_TOKEN, 1000)
        expected = evaluate(self.spec, PER_TOKEN, case, SERIAL)
        assert_close(evaluate(self.spec, PER_TOKEN, case, Form("scan", chunk_size)), expected, FORMS[F64])

    @FORMS_UNDER_TEST
    @pytest.mark.parametrize("dtype", [F64, F32], ids=str)
    def test_a_unit_key_reads_back_what_was_just_written(self, form, dtype):
        case = draw_case(self.spec, PER_TOKEN)
        k = case.inputs["k"] / np.linalg.norm(case.inputs["k"], axis=-1, keepdims=True)
        case = case._replace(inputs=case.inputs | {"q": k, "k": k, "beta": np.ones((BATCH, TOKENS, 2))})
        out = evaluate(self.spec, PER_TOKEN, case, form, dtype).out
        assert rms_ratio(5**0.5 * out, case.inputs["v"]) <= (BRUTE_FORCE if dtype == F64 else FORMS[F32])

    @pytest.mark.parametrize("keys", HARD_KEYS)
    def test_the_triangular_solve_is_stable_in_float32(self, keys):
        case = draw_case(self.spec, PER_TOKEN, 130)
        k, beta = HARD_KEYS[keys](case.inputs["k"] / np.linalg.norm(case.inputs["k"], axis=-1, keepdims=True))
        gates = {"beta": beta, "log_decay": 1e-2 * case.inputs["log_decay"]}
        case = case._replace(inputs=case.inputs | {"k": k} | gates)
        expected = evaluate(self.spec, PER_TOKEN, self.spec.rounded(case, F32), SERIAL)
        assert_close(evaluate(self.spec, PER_TOKEN, case, Form("scan", 64), F32), expected, FORMS[F32])

    @pytest.mark.parametrize("decay", STRONG_DECAYS)
    def test_rates_keep_their_gradient_in_float32(self, decay):
        """Of the rate that multiplies every log decay of a head: steps that decay to nothing weigh most in it."""
        case = draw_case(self.spec, PER_TOKEN, 130)
        log_decay = STRONG_DECAYS[decay](np.random.default_rng(2), case.inputs["log_decay"].shape)
        case.inputs["log_decay"] = log_decay
        expected, actual = (
            np.sum(log_decay * result.input_gradients["log_decay"], axis=(0, 1))
            for result in (
                evaluate(self.spec, PER_TOKEN, self.spec.rounded(case, F32), SERIAL),
                evaluate(self.spec, PER_TOKEN, case, Form("scan", 64), F32),
            )
        )
        assert rms_ratio(actual, expected, STRONG_DECAY_FLOOR) <= FORMS[F32]
