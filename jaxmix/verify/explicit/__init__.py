"""Every recurrent mixer as the sum that defines it, in numpy float64 and without any code of the mixers.

These are the slow references: no recurrence over tokens, no state, no chunk. Their arguments are those of the mixer of
the same name.
"""

from jaxmix.verify.explicit.delta import delta_rule, gated_delta_rule
from jaxmix.verify.explicit.hippo import interdomain_ideal
from jaxmix.verify.explicit.modes import interdomain_attention, s4d
from jaxmix.verify.explicit.products import ahla, decay_matrix, hla2, hla3, linear_attention, ssd

__all__ = [
    "ahla",
    "decay_matrix",
    "delta_rule",
    "gated_delta_rule",
    "hla2",
    "hla3",
    "interdomain_attention",
    "interdomain_ideal",
    "linear_attention",
    "s4d",
    "ssd",
]
