from typing import ClassVar

from jaxmix import linear_attention
from jaxmix.mixers import LinearAttentionState
from tests.contract import MixerContract
from tests.mixers import brute_force, recurrences
from tests.mixers.attention_contract import AttentionContract
from tests.mixers.families import NORMALISED, PLAIN, make_spec


class TestLinearAttention(AttentionContract, MixerContract):
    one_head = staticmethod(brute_force.linear_attention)
    step = staticmethod(recurrences.linear_attention_step)
    # The cheapest mixer to compile stands for the code that all of them share: chunking, packing and devices.
    spec = make_spec(
        linear_attention,
        LinearAttentionState,
        one_head,
        representatives=(NORMALISED,),
        sharded_variants=(PLAIN, NORMALISED),
        lengths=(*range(4, 8), *range(9, 16)),
    )
    fields: ClassVar = {"P": ("shared", "D", "E"), "m": ("shared", "D")}
    read_outs = ({"normalize": True}, {"normalize": True, "eps": 0.5})
