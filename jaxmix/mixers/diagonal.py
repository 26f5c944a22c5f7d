"""Recurrences X_t = Lam X_{t-1} + Bbar z_t^T with constant complex modes: their operator and their chunked form.

S4D and interdomain attention are made of them. No negative power of Lam is ever taken: inside a chunk the powers form
a Toeplitz table, so that nothing can overflow whatever the poles.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, Dtype, einsum, expand_to
from jaxmix.mixers import pairs
from jaxmix.mixers.modes import Modes
from jaxmix.mixers.prefix import prefix_scan
from jaxmix.mixers.segments import Segments
from jaxmix.parallel.collectives import vary_like


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DiagonalSummary:
    """What a segment does to a diagonal recurrence: X [..., 2, M, F] and the product of its decays Lam [..., 2, M].

    A then B: X = Lam_B X_A + X_B, Lam = Lam_B Lam_A, complex numbers as pairs.
    """

    X: Array
    Lam: Array

    @classmethod
    def token_summary(cls, z: Array, lam: Array, gain: Array) -> Self:
        """The summary of single tokens: z [..., F], lam and gain [..., 2, M]."""
        shape = jnp.broadcast_shapes(lam.shape[:-2], z.shape[:-1])
        return cls(gain[..., None] * z[..., None, None, :], jnp.broadcast_to(lam, (*shape, *lam.shape[-2:])))

    @classmethod
    def identity(cls, shape: tuple[int, ...], modes: int, size: int, dtype: Dtype = jnp.float32) -> Self:
        """The summary of an empty segment with leading axes `shape`, M = modes and F = size."""
        one = jnp.stack([jnp.ones((*shape, modes), dtype), jnp.zeros((*shape, modes), dtype)], axis=-2)
        return cls(jnp.zeros((*shape, 2, modes, size), dtype), one)

    @staticmethod
    def combine(a: "DiagonalSummary", b: "DiagonalSummary") -> "DiagonalSummary":
        """The summary of a's segment followed by b's."""
        return DiagonalSummary(pairs.scale_rows(b.Lam, a.X) + b.X, pairs.multiply(a.Lam, b.Lam))


@dataclasses.dataclass(frozen=True)
class DiagonalChunks:
    """A sequence cut into N chunks of C tokens, with the powers of Lam that its chunked form needs.

    Real tokens stand at the front of their chunk; padding, which does not count as time, behind them.

    Attributes:
        responses: Bbar Lam^s, what is left of an input s tokens later, [G, C, 2, M].
        reach: Lam^(t+1), what is left of the chunk's start state after token t, [G, C, 2, M].
        total: Lam to the number of real tokens of each chunk, [B or 1, N, G, 2, M].
        run: number of segment starts inside the chunk up to each token, [B, N, C]; None for no segments.
        order: where each token of a chunk was before padding went to the end, [B, N, C]; None for no segments.
        shift: places by which tokens move to end at the chunk's end, [B or 1, N]; None where all chunks are full.
        sequence_axis: shard_map axis over which the chunks are split, or None.
    """

    responses: Array
    reach: Array
    total: Array
    run: Array | None
    order: Array | None
    shift: Array | None
    sequence_axis: str | None

    @classmethod
    def cut(
        cls, modes: Modes, segments: Segments | None, length: int, size: int, sequence_axis: str | None
    ) -> "DiagonalChunks":
        """The chunks of `length` tokens, `size` each."""
        steps = jnp.arange(size)
        powers = jnp.moveaxis(modes.powers(steps), 0, 1)
        reach = pairs.multiply(powers, modes.powers(jnp.asarray(1))[:, None])
        responses = pairs.multiply(powers, modes.gain[:, None])
        chunks = -(-length // size)
        run = order = shift = None
        if segments is None:
            counts = jnp.clip(length - size * jnp.arange(chunks), 0, size)[None]
        else:
            cut = [(0, 0), (0, chunks * size - length)]
            valid, reset = (jnp.pad(x, cut).reshape(-1, chunks, size) for x in (segments.valid, segments.reset))
            order = jnp.argsort(~valid, axis=-1, stable=True)
            run = jnp.cumsum(jnp.take_along_axis(reset, order, axis=-1), axis=-1, dtype=jnp.int32)
            counts = jnp.sum(valid, axis=-1)
        if segments is not None or length % size:
            shift = size - counts
        return cls(responses, reach, modes.powers(counts), run, order, shift, sequence_axis)

    @property
    def size(self) -> int:
        """Chunk length C."""
        return self.responses.shape[1]

    def pack(self, x: Array) -> Array:
        """x [B, N, G, (R,) C, F] with the real tokens of every chunk in front."""
        return x if self.order is None else _take(x, self.order)

    def unpack(self, x: Array) -> Array:
        """The inverse of `pack`."""
        return x if self.order is None else _take(x, jnp.argsort(self.order, axis=-1))

    def toeplitz(self, responses: Array) -> Array:
        """responses[t - j] for j <= t, else 0: [G, C, ...] to [G, C (t), C (j), ...]."""
        return _skew(responses)

    def by_place(self, x: Array) -> Array:
        """x [B, N, G, R, C, F] as [G, C, B, N, R, F], the order in which products with a Toeplitz table are batched."""
        return einsum("bngrcf->gcbnrf", x)

    def by_chunk(self, x: Array) -> Array:
        """The inverse of `by_place`."""
        return einsum("gcbnrf->bngrcf", x)

    def causal(self, scores: Array) -> Array:
        """scores [B, N, G, (R,) C, C] with zeros where the second token is later or of another segment."""
        keep = jnp.tri(self.size, dtype=jnp.bool_)
        if self.run is not None:
            keep = keep & (self.run[..., :, None] == self.run[..., None, :])
            keep = keep.reshape(*keep.shape[:2], *(1,) * (scores.ndim - 4), *keep.shape[2:])
        return jnp.where(keep, scores, 0)

    def from_start(self, x: Array) -> Array:
        """x [B, N, G, (R,) C, F], what the start states gave, with zeros from the first segment start on."""
        if self.run is None:
            return x
        first = (self.run == 0)[:, :, None, :, None]
        return jnp.where(first if x.ndim == first.ndim else first[:, :, None], x, 0)

    def outer(self, z: Array) -> Array:
        """What the last segment of each chunk leaves at its end, sum_j Bbar Lam^(C-1-j) z_j: [B, N, G, 2, M, F]."""
        if self.run is not None:
            z = jnp.where((self.run == self.run[..., -1:])[:, :, None, :, None], z, 0)
        if self.shift is not None:
            place = jnp.arange(self.size) - self.shift[..., None]
            z = jnp.where((place >= 0)[:, :, None, :, None], _take(z, jnp.maximum(place, 0)), 0)
        # A head is one product of its responses with the tokens of all chunks; rows of F, not elements, move after it.
        outer = einsum("gcpm,bngcf->gpmbnf", jnp.flip(self.responses, axis=1), z)
        return einsum("gpmbnf->bngpmf", outer)

    def carry(self, outer: Array, initial: Array) -> tuple[Array, Array]:
        """The state at the start of every chunk and after the last, from `initial` [B, G, 2, M, F].

        By an associative scan, which has few steps; on a CPU from chunk to chunk, which moves every state once.
        """
        resets = None if self.run is None else self.run[..., -1] > 0
        if self.sequence_axis is None and jax.default_backend() == "cpu":
            return self._walk(outer, resets, initial)
        batch, chunks = outer.shape[:2]
        total = jnp.broadcast_to(self.total, (batch, chunks, *self.total.shape[2:]))
        summaries = DiagonalSummary(outer, total)
        start = DiagonalSummary.identity(total[:, :1].shape[:3], total.shape[-1], outer.shape[-1], outer.dtype)
        start = dataclasses.replace(start, X=initial[:, None])
        before, after, final = prefix_scan(DiagonalSummary.combine, summaries, resets, start, self.sequence_axis)
        return jnp.concatenate([before.X, after.X[:, :-1]], axis=1), final.X[:, 0]

    def _walk(self, outer: Array, resets: Array | None, initial: Array) -> tuple[Array, Array]:
        def step(x: Array, chunk: Any) -> tuple[Array, Array]:
            outer, total, reset = chunk
            kept = x if reset is None else jnp.where(expand_to(reset, x.ndim), 0, x)
            return pairs.scale_rows(total, kept) + outer, x

        chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (outer, self.total, resets))
        final, before = jax.lax.scan(step, vary_like(initial, outer), chunks)
        return jnp.moveaxis(before, 0, 1), final


def _take(x: Array, places: Array) -> Array:
    """x [B, N, G, (R,) C, F] at `places` [B or 1, N, C] along C."""
    places = places[:, :, None, :, None] if x.ndim == 5 else places[:, :, None, None, :, None]
    return jnp.take_along_axis(x, places, axis=-2)


def _skew(x: Array) -> Array:
    """The lower triangular Toeplitz matrix of x along its second axis, without a gather.

    Row t of it is the periodic sequence x_0, 0 (C times), x_{C-1}, ..., x_1 of length 2C, moved by t places; repeating
    the sequence and cutting rows of 2C - 1 makes the move.
    """
    groups, size, *rest = x.shape
    period = jnp.concatenate([x[:, :1], jnp.zeros_like(x), jnp.flip(x[:, 1:], axis=1)], axis=1)
    rows = jnp.tile(period, (1, size) + (1,) * len(rest))[:, : size * (2 * size - 1)]
    return rows.reshape(groups, size, 2 * size - 1, *rest)[:, :, :size]
