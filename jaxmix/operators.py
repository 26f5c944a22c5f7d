"""The associative operators behind the scans, for users who test them or run scans of their own.

Every summary is a registered frozen dataclass over any leading axes, with `token_summary(q, k, v, log_decay)`,
`combine(a, b)` (a is earlier), `identity(shape, key_size, value_size)` and `read(q)`. Those of state-space models
(`DiagonalSummary`, `TransitionSummary`) take their transition with the token and have no `read`; that of the delta rule
takes `beta` as well. That of `ssd` is `LinearSummary`. Example:

    summaries = HLA2Summary.token_summary(q, k, v, log_decay)          # [B, T, H, ...]
    prefixes = jax.lax.associative_scan(HLA2Summary.combine, summaries, axis=1)
    numerator, denominator = prefixes.read(q)
"""

from jaxmix.mixers.delta import DeltaSummary
from jaxmix.mixers.diagonal import DiagonalSummary
from jaxmix.mixers.hla import AHLASummary, HLA2PrintedSummary, HLA2Summary, HLA3PrintedSummary, HLA3Summary
from jaxmix.mixers.interdomain import TransitionSummary
from jaxmix.mixers.linear_attention import LinearSummary
from jaxmix.mixers.prefix import segmented

__all__ = [
    "AHLASummary",
    "DeltaSummary",
    "DiagonalSummary",
    "HLA2PrintedSummary",
    "HLA2Summary",
    "HLA3PrintedSummary",
    "HLA3Summary",
    "LinearSummary",
    "TransitionSummary",
    "segmented",
]
