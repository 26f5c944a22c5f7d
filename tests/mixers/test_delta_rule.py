"""delta_rule is gated_delta_rule without decay, whose suite has a variant for it; here is what is its own."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import delta_rule, gated_delta_rule
from tests.contract.agreement import DOCUMENTS, F64
from tests.contract.errors import Errors
from tests.contract.spec import BATCH, SCAN, SERIAL, TOKENS, Form, draw_case, evaluate, precision
from tests.mixers.delta import DELTA_RULE, DeltaErrors
from tests.tolerances import BRUTE_FORCE, FORMS, assert_close, assert_same_bits

FORMS_UNDER_TEST = pytest.mark.parametrize("form", [SERIAL, SCAN], ids=["serial", "scan"])


class TestDeltaRule(DeltaErrors, Errors):
    spec = DELTA_RULE
    # There is no decay.
    test_a_gate_that_amplifies = None

    def test_serial_is_the_explicit_sum_of_each_document(self):
        case = draw_case(self.spec, self.spec.main, segment_ids=DOCUMENTS)
        zeros = case._replace(state=type(case.state)(S=np.zeros_like(case.state.S)))
        expected = self.spec.brute_force(case.inputs, case.segment_ids, self.spec.main)
        error = evaluate(self.spec, self.spec.main, zeros, SERIAL).out - expected
        assert np.linalg.norm(error) <= BRUTE_FORCE * np.linalg.norm(expected)

    def test_scan_equals_serial_with_every_gradient(self):
        case = draw_case(self.spec, self.spec.main, segment_ids=DOCUMENTS)
        expected = evaluate(self.spec, self.spec.main, case, SERIAL)
        for form in (SCAN, Form("scan", 1)):
            assert_close(evaluate(self.spec, self.spec.main, case, form), expected, FORMS[F64])

    @FORMS_UNDER_TEST
    def test_nothing_written_leaves_the_state(self, form):
        case = draw_case(self.spec, self.spec.main)
        case.inputs["beta"] = np.zeros((BATCH, TOKENS, 2))
        actual = evaluate(self.spec, self.spec.main, case, form)
        assert_same_bits(actual.state, case.state)

    @FORMS_UNDER_TEST
    def test_it_is_the_gated_rule_without_decay(self, form):
        case = draw_case(self.spec, self.spec.main)
        with precision():
            inputs = {name: jnp.asarray(x) for name, x in case.inputs.items()}
            options = {"initial_state": case.state, "implementation": form.implementation}
            expected = gated_delta_rule(**inputs, log_decay=None, **options)
            assert_same_bits(delta_rule(**inputs, **options), expected)
