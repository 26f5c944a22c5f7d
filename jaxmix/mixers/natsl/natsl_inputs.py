"""Options, sizes and arrays of one NAtS-L call, once they are checked."""

import dataclasses
from typing import Any, Literal

import jax

from jaxmix.arrays import Array
from jaxmix.mixers.natsl.natsl_state import NAtSLState
from jaxmix.mixers.natsl.paged_attention import PagedOptions

OwnChunk = Literal["both", "softmax", "linear"]
LinearRule = Literal["gated_delta", "ssd"]


@dataclasses.dataclass(frozen=True)
class NAtSLOptions:
    """Options of a call and its sizes, fixed when the code is compiled."""

    batch: int
    length: int
    heads: int
    group: int
    key_size: int
    value_size: int
    softmax_key_size: int
    softmax_value_size: int
    chunk_size: int
    chunks: int
    capacity: int
    dtype: Any
    cache_dtype: Any
    out_dtypes: tuple[Any, Any]
    scale: float
    softmax_scale: float
    own_chunk: OwnChunk
    rule: LinearRule
    decay_through_softmax: bool
    counterfactual_router_grad: bool
    detach_own_chunk: bool

    @property
    def paged(self) -> PagedOptions:
        """Those of the softmax branch."""
        return PagedOptions(self.softmax_scale, self.own_chunk != "linear", self.detach_own_chunk)

    def fresh(self) -> NAtSLState:
        """The state of streams that have seen nothing."""
        return NAtSLState.init(
            self.batch,
            self.heads,
            self.key_size,
            self.value_size,
            softmax_heads=self.heads * self.group,
            softmax_key_size=self.softmax_key_size,
            softmax_value_size=self.softmax_value_size,
            chunk_size=self.chunk_size,
            capacity=self.capacity,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NAtSLInputs:
    """[B, T, heads, size] of both branches, gates [B, T, H] in the compute dtype, padding cleared."""

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array
    q_softmax: Array
    k_softmax: Array
    v_softmax: Array


def by_list(options: NAtSLOptions, x: Array) -> Array:
    """x [..., Hs, S] with the softmax heads of each linear head together: [..., H, G, S]."""
    return x.reshape(*x.shape[:-2], options.heads, options.group, x.shape[-1])


def routed(choice: Array) -> Array:
    """Where softmax attention was chosen."""
    return choice[..., 0] > choice[..., 1]
