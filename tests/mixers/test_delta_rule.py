import numpy as np
import pytest

from tests.contract import SingleDeviceContract
from tests.contract.spec import BATCH, SCAN, SERIAL, TOKENS, draw_case, evaluate
from tests.mixers.delta import DELTA_RULE, DeltaErrors
from tests.tolerances import assert_same_bits


class TestDeltaRule(DeltaErrors, SingleDeviceContract):
    spec = DELTA_RULE
    # There is no decay.
    test_strong_decay_stays_finite_and_exact = None
    test_a_gate_that_amplifies = None

    @pytest.mark.parametrize("form", [SERIAL, SCAN], ids=["serial", "scan"])
    def test_nothing_written_leaves_the_state(self, form):
        case = draw_case(self.spec, self.spec.main)
        case.inputs["beta"] = np.zeros((BATCH, TOKENS, 2))
        actual = evaluate(self.spec, self.spec.main, case, form)
        assert_same_bits(actual.state, case.state)
