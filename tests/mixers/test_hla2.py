from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import hla2
from jaxmix.mixers import HLA2State
from tests.contract import MixerContract, Shape, Variant
from tests.mixers import brute_force, recurrences
from tests.mixers.attention_contract import AttentionContract
from tests.mixers.families import GROUPED, make_spec

RIDGE, PRINTED = "ridge, normalised, shared heads", "printed decay, normalised, shared heads"
REPRESENTATIVES = (PRINTED,)
VARIANTS = {
    "unmasked": Variant({"masked": False}, gate="token"),
    RIDGE: Variant({"ridge": 0.7, "normalize": True}, shape=GROUPED, gate="shared token", positive=True),
    "ridge, unmasked, normalised": Variant(
        {"ridge": 0.7, "masked": False, "normalize": True}, shape=Shape(key_size=3, value_size=2), positive=True
    ),
    "printed decay": Variant({"decay_form": "printed"}, gate="token"),
    PRINTED: Variant(
        {"decay_form": "printed", "normalize": True, "eps": 1e-2}, shape=GROUPED, gate="shared head", positive=True
    ),
}


class TestHLA2(AttentionContract, MixerContract):
    one_head = staticmethod(brute_force.hla2)
    step = staticmethod(recurrences.hla2_step)
    spec = make_spec(hla2, HLA2State, one_head, VARIANTS, REPRESENTATIVES)
    fields: ClassVar = {
        "S": ("shared", "D", "D"),
        "C": ("own", "D", "E"),
        "m": ("own", "D"),
        "G": ("own", "D", "E"),
        "h": ("own", "D"),
    }
    read_outs = ({"normalize": True}, {"normalize": True, "eps": 0.5}, {"ridge": 0.3}, {"masked": False})

    def test_printed_and_masked_decay_agree_only_without_decay(self):
        inputs = self.correct_call()
        undecayed = {name: inputs[name] for name in ("q", "k", "v")}
        same = [hla2(**undecayed, decay_form=form)[0] for form in ("masked", "printed")]
        assert np.allclose(same[0], same[1], rtol=1e-4)
        differ = [hla2(**inputs, decay_form=form)[0] for form in ("masked", "printed")]
        assert not np.allclose(differ[0], differ[1], rtol=1e-2)

    @pytest.mark.parametrize(
        ("option", "value"), [("ridge", -0.5), ("decay_form", "exact"), ("masked", "yes"), ("normalize", 3)]
    )
    def test_options_out_of_range(self, option, value):
        with pytest.raises(ValueError, match=rf"(?s)\b{option}\b.*{value}"):
            hla2(**self.correct_call(), **{option: value})

    def test_a_ridge_is_added_to_the_key_moment(self):
        inputs = self.correct_call()
        plain, _ = hla2(**inputs)
        more, _ = hla2(**inputs, ridge=2.0)
        half, _ = hla2(**inputs, ridge=1.0)
        assert np.allclose(more - plain, 2 * (half - plain), rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(plain))))
