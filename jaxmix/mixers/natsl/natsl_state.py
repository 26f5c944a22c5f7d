"""What a NAtS-L stream remembers."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, Dtype, expand_to
from jaxmix.mixers.state import State


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NAtSLState(State):
    """The linear state, the chunk that is not full yet, and pages of the chunks that were routed to softmax attention.

    All heads of a stream share its pages: what one head does not keep is room for another. Keys and values of softmax
    attention are a record of inputs and keep their dtype; all else is float32 or better.

    A state of zeros is a stream that has seen nothing.

    Attributes:
        S_start: linear state at the start of the open chunk, [B, H, D, E].
        S_cur: linear state after the last token, [B, H, D, E].
        log_decay: accumulated in the open chunk, [B, H].
        own_k: keys of softmax attention in the open chunk, [B, C, Hs, Ds].
        own_v: their values, [B, C, Hs, Es].
        filled: tokens in the open chunk, int32 [B], below C.
        page_k: keys, [B, P, G, C, Ds]; a page is one chunk of the G softmax heads of one linear head.
        page_v: values, [B, P, G, C, Es].
        weight: the choice that committed each page, 1, [B, P]: through it a router has gradients from later calls.
        table: pages of each linear head in the order of their chunks, int32 [B, H, P].
        count: how many of them there are, int32 [B, H].
        used: pages that the stream has needed, int32 [B]. Above P it has outgrown them.
    """

    S_start: Array
    S_cur: Array
    log_decay: Array
    own_k: Array
    own_v: Array
    filled: Array
    page_k: Array
    page_v: Array
    weight: Array
    table: Array
    count: Array
    used: Array

    @property
    def capacity(self) -> int:
        """The number of pages P."""
        return self.page_k.shape[1]

    @classmethod
    def init(
        cls,
        batch: int,
        heads: int,
        key_size: int,
        value_size: int,
        *,
        softmax_heads: int,
        softmax_key_size: int,
        softmax_value_size: int,
        chunk_size: int,
        capacity: int,
        dtype: Dtype = jnp.float32,
        cache_dtype: Dtype = jnp.float32,
    ) -> Self:
        """The state of streams that have seen nothing, with room for `capacity` pages each."""
        group = softmax_heads // heads
        linear = jnp.zeros((batch, heads, key_size, value_size), dtype)
        own, page = (batch, chunk_size, softmax_heads), (batch, capacity, group, chunk_size)
        return cls(
            S_start=linear,
            S_cur=linear,
            log_decay=jnp.zeros((batch, heads), dtype),
            own_k=jnp.zeros((*own, softmax_key_size), cache_dtype),
            own_v=jnp.zeros((*own, softmax_value_size), cache_dtype),
            filled=jnp.zeros((batch,), jnp.int32),
            page_k=jnp.zeros((*page, softmax_key_size), cache_dtype),
            page_v=jnp.zeros((*page, softmax_value_size), cache_dtype),
            weight=jnp.zeros((batch, capacity), dtype),
            table=jnp.zeros((batch, heads, capacity), jnp.int32),
            count=jnp.zeros((batch, heads), jnp.int32),
            used=jnp.zeros((batch,), jnp.int32),
        )


def commit_pages(
    state: NAtSLState, pages_k: Array, pages_v: Array, weight: Array, keep: Array, continued: Array
) -> NAtSLState:
    """The state with those of the pages [B, N, H, G, C, ...] that are to keep (bool [B, N, H]) behind its own.

    `weight` [B, N, H] comes with them. Where `continued` [B] does not hold, the pages that the state had are given up.
    """
    batch, chunks, heads = keep.shape
    used = jnp.where(continued, state.used, 0)
    count = jnp.where(continued[:, None], state.count, 0)
    flat = keep.reshape(batch, -1)
    page = used[:, None] + jnp.cumsum(flat, axis=1, dtype=jnp.int32) - 1
    at = (jnp.arange(batch)[:, None], jnp.where(flat, page, state.capacity))

    def write(old: Array, new: Array) -> Array:
        old = jnp.where(expand_to(continued, old.ndim), old, 0)
        return old.at[at].set(new.reshape(batch, chunks * heads, *new.shape[3:]).astype(old.dtype), mode="drop")

    kept = jnp.arange(state.capacity) < count[..., None]
    present = jnp.concatenate([kept, jnp.moveaxis(keep, 1, 2)], axis=-1)
    pages = jnp.concatenate([state.table, jnp.moveaxis(page.reshape(keep.shape), 1, 2)], axis=-1)
    order = jnp.argsort(~present, axis=-1, stable=True)
    table = jnp.where(jnp.take_along_axis(present, order, axis=-1), jnp.take_along_axis(pages, order, axis=-1), 0)
    return dataclasses.replace(
        state,
        page_k=write(state.page_k, pages_k),
        page_v=write(state.page_v, pages_v),
        weight=write(state.weight, weight),
        table=table[..., : state.capacity],
        count=count + jnp.sum(keep, axis=1, dtype=jnp.int32),
        used=used + jnp.sum(flat, axis=1, dtype=jnp.int32),
    )
