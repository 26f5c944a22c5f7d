"""The delta rule, with and without decay."""

from jaxmix.mixers.delta.delta_rule import DeltaState, delta_rule, gated_delta_rule
from jaxmix.mixers.delta.delta_summary import DeltaSummary

__all__ = ["DeltaState", "DeltaSummary", "delta_rule", "gated_delta_rule"]
