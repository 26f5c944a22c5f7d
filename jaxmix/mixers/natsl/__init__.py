"""NAtS-L: chunks routed to softmax attention or to a linear state."""

from jaxmix.mixers.natsl.block_attention import block_softmax_attention
from jaxmix.mixers.natsl.layout import ChunkLayout, count_chunks
from jaxmix.mixers.natsl.natsl_attention import natsl_attention
from jaxmix.mixers.natsl.natsl_state import NAtSLState

__all__ = ["ChunkLayout", "NAtSLState", "block_softmax_attention", "count_chunks", "natsl_attention"]
