from typing import ClassVar

from jaxmix import ahla
from jaxmix.mixers import AHLAState
from tests.contract import SingleDeviceContract
from tests.mixers import brute_force, recurrences
from tests.mixers.attention_contract import AttentionContract
from tests.mixers.families import make_spec


class TestAHLA(AttentionContract, SingleDeviceContract):
    one_head = staticmethod(brute_force.ahla)
    step = staticmethod(recurrences.ahla_step)
    spec = make_spec(ahla, AHLAState, one_head)
    fields: ClassVar = {"P": ("shared", "D", "E"), "m": ("shared", "D"), "E": ("own", "D", "E"), "n": ("own", "D")}
    read_outs = ({"normalize": True}, {"normalize": True, "eps": 0.5})
