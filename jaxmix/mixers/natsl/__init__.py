"""NAtS-L: chunks routed to softmax attention or to a linear state."""

from jaxmix.mixers.natsl.layout import ChunkLayout, count_chunks
from jaxmix.mixers.natsl.natsl_attention import natsl_attention
from jaxmix.mixers.natsl.natsl_state import NAtSLState

__all__ = ["ChunkLayout", "NAtSLState", "count_chunks", "natsl_attention"]
