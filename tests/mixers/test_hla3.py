from typing import ClassVar

import numpy as np
import pytest

from jaxmix import hla3
from jaxmix.mixers import HLA3State
from tests.contract import SingleDeviceContract, Variant
from tests.mixers import brute_force, recurrences
from tests.mixers.attention_contract import AttentionContract
from tests.mixers.families import GROUPED, make_spec

PRINTED = "printed mask, normalised, shared heads"
VARIANTS = {
    "printed mask": Variant({"mask": "printed"}),
    PRINTED: Variant({"mask": "printed", "normalize": True}, shape=GROUPED, positive=True),
}


class TestHLA3(AttentionContract, SingleDeviceContract):
    one_head = staticmethod(brute_force.hla3)
    step = staticmethod(recurrences.hla3_step)
    spec = make_spec(hla3, HLA3State, one_head, VARIANTS, (PRINTED,))
    fields: ClassVar = {
        "S": ("shared", "D", "D"),
        "Q": ("own", "D", "D"),
        "P": ("shared", "D", "E"),
        "m": ("shared", "D"),
        "F": ("own", "D", "E"),
        "f": ("own", "D"),
    }
    read_outs = ({"normalize": True}, {"normalize": True, "eps": 0.5})

    @pytest.mark.parametrize("implementation", ["serial", "scan", None])
    def test_the_printed_mask_has_no_decayed_form(self, implementation):
        with pytest.raises(NotImplementedError, match=r"(?s)printed.*log_decay|log_decay.*printed"):
            hla3(**self.correct_call(), mask="printed", implementation=implementation)

    def test_an_unknown_mask(self):
        with pytest.raises(ValueError, match=r"(?s)\bmask\b.*strict"):
            hla3(**self.correct_call(), mask="strict")

    def test_printed_and_exact_masks_differ_from_the_first_token_that_has_a_past(self):
        inputs = {name: x for name, x in self.correct_call().items() if name != "log_decay"}
        exact, printed = (hla3(**inputs, mask=mask)[0] for mask in ("exact", "printed"))
        assert np.allclose(exact[:, 0], printed[:, 0], rtol=1e-5)
        assert not np.allclose(exact[:, 1:], printed[:, 1:], rtol=1e-2)
