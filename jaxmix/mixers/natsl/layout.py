"""Tokens brought to chunks that begin where their documents begin, whatever lies where in the arrays."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, expand_to
from jaxmix.mixers.positions import count_resets, find_places
from jaxmix.mixers.segments import Segments


def count_chunks(length: int, size: int, *, packed: bool, continued: bool, max_documents: int | None = None) -> int:
    """The number of chunks N that one call has, full or not: axis 1 of `choice`.

    Args:
        length: tokens T of the call.
        size: tokens per chunk C.
        packed: the call has segment ids; every document begins a chunk of its own.
        continued: the call has an initial state, whose last chunk may not be full.
        max_documents: documents that a row of a packed call may hold; by default ceil(T / C). With more, the outputs of
            tokens that do not fit are NaN.
    """
    if length == 1:
        return 1
    chunks = -(-(length + (size - 1 if continued else 0)) // size)
    if not packed:
        return chunks
    documents = -(-length // size) if max_documents is None else max_documents
    return min(chunks + documents - 1, length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkLayout:
    """Where tokens are in the chunks of their documents.

    Attributes:
        chunk: chunk of every token, int32 [B, T]; N where it has none.
        slot: its place in the chunk, int32 [B, T].
        source: for every slot its token, int32 [B, N, C], counted from 0 over C tokens that the stream had waiting and
            then T of the call; C + T for none.
        valid: slots that hold a token, bool [B, N, C].
        document: number of the document in the call, int32 [B, N]; 0 is that which the state belongs to.
        fits: real tokens that have a slot or are padding, bool [B, T].
        plain: tokens stand in order from the first slot on.
    """

    chunk: Array
    slot: Array
    source: Array
    valid: Array
    document: Array
    fits: Array
    plain: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(
        cls, batch: int, length: int, size: int, chunks: int, segments: Segments | None, filled: Array | None
    ) -> Self:
        """The layout of a call.

        Args:
            batch: rows.
            length: tokens T.
            size: tokens per chunk C.
            chunks: chunks N.
            segments: None for one document without padding.
            filled: tokens that wait in the stream's open chunk, int32 [B]; None for new streams.
        """
        plain = segments is None and filled is None
        everywhere = jnp.ones((batch, length), jnp.bool_)
        segments = Segments(everywhere, ~everywhere) if segments is None else segments
        filled = jnp.zeros((batch,), jnp.int32) if filled is None else filled
        place = find_places(segments, filled)
        begins = segments.valid & (place % size == 0)
        chunk = jnp.cumsum(begins, axis=1, dtype=jnp.int32) - (filled == 0)[:, None]
        fits = chunk < chunks
        chunk = jnp.where(segments.valid & fits, chunk, chunks)
        slot = jnp.where(segments.valid, place % size, 0)
        rows = jnp.arange(batch)[:, None]
        waiting = jnp.where(jnp.arange(size) < filled[:, None], jnp.arange(size), size + length)
        source = jnp.full((batch, chunks, size), size + length, jnp.int32).at[:, 0].set(waiting.astype(jnp.int32))
        source = source.at[rows, chunk, slot].set(size + jnp.arange(length, dtype=jnp.int32), mode="drop")
        document = jnp.zeros((batch, chunks), jnp.int32)
        document = document.at[rows, chunk].max(count_resets(segments), mode="drop")
        document = jax.lax.cummax(document, axis=1)
        return cls(chunk, slot, source, source < size + length, document, ~segments.valid | fits, plain)

    @property
    def complete(self) -> Array:
        """Chunks whose every slot holds a token, bool [B, N]."""
        return jnp.all(self.valid, axis=-1)

    @property
    def begins(self) -> Array:
        """Chunks that begin another document than that before, bool [B, N]; not the first chunk."""
        before = jnp.pad(self.document[:, :-1], [(0, 0), (1, 0)])
        return self.document != before

    @property
    def last(self) -> Array:
        """The last chunk that holds a token, int32 [B]."""
        used = jnp.any(self.valid, axis=-1)
        return jnp.max(jnp.where(used, jnp.arange(used.shape[1]), 0), axis=1)

    def align(self, x: Array, waiting: Array | None = None) -> Array:
        """x [B, T, ...], and what waits [B, C, ...], by chunk: [B, N, C, ...], zeros in empty slots."""
        batch, chunks, size = self.source.shape
        if self.plain:
            x = jnp.pad(x, [(0, 0), (0, chunks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
            return x.reshape(batch, chunks, size, *x.shape[2:])
        rest = x.shape[2:]
        before = jnp.zeros((batch, size, *rest), x.dtype) if waiting is None else waiting.astype(x.dtype)
        rows = jnp.concatenate([before, x, jnp.zeros((batch, 1, *rest), x.dtype)], axis=1)
        return jax.vmap(lambda row, at: row[at])(rows, self.source)

    def restore(self, x: Array) -> Array:
        """x [B, N, C, ...] by token, [B, T, ...]: zeros at padding, NaN where a token had no slot."""
        batch, chunks, size = self.source.shape
        length = self.chunk.shape[1]
        flat = x.reshape(batch, chunks * size, *x.shape[3:])
        if self.plain:
            return flat[:, :length]
        at = jnp.minimum(self.chunk * size + self.slot, chunks * size - 1)
        out = jax.vmap(lambda row, at: row[at])(flat, at)
        out = jnp.where(expand_to(self.chunk < chunks, out.ndim), out, 0)
        return jnp.where(expand_to(self.fits, out.ndim), out, jnp.nan)

    def by_token(self, x: Array) -> Array:
        """x [B, N, ...], one value a chunk, by token: [B, T, ...]."""
        return jax.vmap(lambda row, at: row[at])(x, jnp.minimum(self.chunk, x.shape[1] - 1))


def take_chunk(x: Array, at: Array) -> Any:
    """x [B, N, ...] at chunk `at` [B]: [B, ...]."""
    return jax.vmap(lambda row, i: row[i])(x, at)
