from typing import ClassVar

from jaxmix import linear_attention
from jaxmix.mixers import LinearAttentionState
from tests.contract import MixerContract
from tests.mixers import brute_force, recurrences
from tests.mixers.attention_contract import AttentionContract
from tests.mixers.families import make_spec


class TestLinearAttention(AttentionContract, MixerContract):
    one_head = staticmethod(brute_force.linear_attention)
    step = staticmethod(recurrences.linear_attention_step)
    spec = make_spec(linear_attention, LinearAttentionState, one_head)
    fields: ClassVar = {"P": ("shared", "D", "E"), "m": ("shared", "D")}
    read_outs = ({"normalize": True}, {"normalize": True, "eps": 0.5})
