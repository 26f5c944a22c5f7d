"""Decayed linear attention, and chains of it, by Pallas kernels, with the methods of `Chunks` that chunked forms use.

Arrays are [B, T, G, R, D], or [B, T, G, D] where the R query heads of a group share them. Queries, keys, values and
what linear attentions give stay in the dtype of the inputs; states, decays and normalisers are float32. A normaliser
has a column of its own that no kernel takes: XLA computes it in float32, and drops it where nothing reads it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.arrays import Array, Dtype, einsum
from jaxmix.mixers.chunking import Chunks, join_chunks, split_chunks
from jaxmix.mixers.decay import LogDecay
from jaxmix.mixers.dispatch import KERNEL_CHUNK
from jaxmix.mixers.segments import Segments
from jaxmix_kernels.chain.vjp import chain, is_fused
from jaxmix_kernels.decays import ChunkDecays
from jaxmix_kernels.linear_attention.vjp import final_state, linear_attention
from jaxmix_kernels.links import Link, Links, follow, values_first
from jaxmix_kernels.target import Target


class Moments(NamedTuple):
    """Values or states and those of the normaliser, which have one column: [..., E] and [..., 1]."""

    matrix: Any
    vector: Any


@dataclasses.dataclass(frozen=True)
class KernelChunks:
    """Decays and segment borders of a sequence that a kernel walks over.

    Attributes:
        chunks: the same for XLA.
        sums: log decays accumulated inside each chunk and segment, [B, Hd, N, C], as exact as the kernels of the target
            read them; None for no decay.
        edges: what `Chunks.edges` gives, [B, Hd, N, C] twice and [B, Hd, N]; None for neither decay nor segments.
        groups: heads that keep a state of their own, G.
        dtype: dtype of states.
        target: what kernels are made for.
        fused: chains may be one kernel; not where normalisers read what that keeps for itself.
    """

    chunks: Chunks
    sums: LogDecay | None
    edges: tuple[Array, Array, Array] | None
    groups: int
    dtype: Dtype
    target: Target
    fused: bool

    @property
    def fresh(self) -> bool:
        """Nothing came before the first token: all initial states are zeros, and the kernels read none."""
        return self.chunks.fresh

    @classmethod
    def cut(
        cls,
        log_decay: Array | None,
        segments: Segments | None,
        groups: int,
        dtype: Dtype,
        target: Target,
        *,
        operand_dtype: Dtype,
        fused: bool,
        fresh: bool,
    ) -> "KernelChunks":
        """From `log_decay` [B, T, G] and `segments` of [B, T], for queries, keys and values of `operand_dtype`."""
        chunks = Chunks.cut(log_decay, segments, KERNEL_CHUNK, fresh=fresh)
        sums, edges = _by_head(log_decay, chunks.run, dtype, rounded=not target.reads_low(operand_dtype))
        return cls(chunks, sums, edges, groups, dtype, target, fused)

    @staticmethod
    def beside(matrix: Array, vector: Array) -> Moments:
        """Values and their normaliser, or the moments of both: [..., E] and [...]."""
        return Moments(matrix, vector[..., None])

    @staticmethod
    def apart(x: Moments) -> tuple[Array, Array]:
        """The inverse of `beside`."""
        return x.matrix, x.vector[..., 0]

    def linear(self, q: Array, k: Array, v: Any, initial: Any, *, power: int = 1) -> tuple[Any, Any]:
        """Causal linear attention LA(q, k, v; a^power) and its final state, as `Chunks.linear`."""
        if isinstance(v, Moments):
            out, final = self.linear(q, k, v.matrix, initial.matrix, power=power)
            parts = self._cut(q), self._cut(k), self._cut(v.vector)
            den, vector = self.chunks.linear(*parts, initial.vector, power=power)
            return Moments(out, join_chunks(den, q.shape[1])), Moments(final, vector)
        arrays = _merge_heads(q), _merge_heads(k), _merge_heads(v), self._decays(power), self._start(initial)
        out, final = linear_attention(*arrays, target=self.target)
        return out.reshape(*q.shape[:-1], v.shape[-1]), final.reshape(initial.shape)

    def final(self, k: Array, v: Any, initial: Any, *, power: int = 1) -> Any:
        """The final state of `linear` alone."""
        if isinstance(v, Moments):
            vector = self.chunks.final(self._cut(k), self._cut(v.vector), initial.vector, power=power)
            return Moments(self.final(k, v.matrix, initial.matrix, power=power), vector)
        arrays = _merge_heads(k), _merge_heads(v), self._decays(power), self._start(initial)
        return final_state(*arrays, target=self.target).reshape(initial.shape)

    def chain(
        self, links: Links, q: Array, k: Array, v: Moments, initials: tuple[Any, ...]
    ) -> tuple[Moments, tuple[Any, ...]]:
        """The result of the last link and the final states of all, as `Chunks.chain`: fused where that serves.

        Where no kernel fuses all links, that which makes the values of the last may come first, and the rest be fused.
        The normaliser follows the links by itself, and computes anew the keys that the kernel keeps for itself.
        """
        decays = {link.power: self._decays(link.power) for link in links}
        matrices = tuple(x.matrix if isinstance(x, Moments) else x for x in initials)
        starts = tuple(self._start(x) for x in matrices)
        arrays = _merge_heads(q), _merge_heads(k), _merge_heads(v.matrix), decays, starts
        fused = self.fused and is_fused(links, *arrays, target=self.target)
        parts = values_first(links) if self.fused and not fused else None
        if parts is not None:
            number, others = parts
            values, state = self.linear(q, k, v, initials[number], power=links[number].power)
            out, states = self.chain(others, q, k, values, (*initials[:number], *initials[number + 1 :]))
            return out, (*states[:number], state, *states[number:])
        if not fused:
            return follow(links, k, v, initials, lambda link, *x: self.linear(q, *x, power=link.power))
        out, states = chain(links, self.target, *arrays)
        queries = self._cut(q)

        def attend(link: Link, keys: Any, values: Any, initial: Any) -> tuple[Any, Any]:
            if not isinstance(initial, Moments):
                return self.linear(q, keys, values, initial, power=link.power)
            return self.chunks.linear(queries, self._cut(keys), values, initial.vector, power=link.power)

        den, vectors = follow(links, k, self._cut(v.vector), initials, attend)
        finals = []
        for initial, matrix, state, vector in zip(initials, matrices, states, vectors, strict=True):
            final = state.reshape(matrix.shape)
            finals.append(Moments(final, vector) if isinstance(initial, Moments) else final)
        return Moments(out.reshape(*q.shape[:-1], -1), join_chunks(den, q.shape[1])), tuple(finals)

    def _cut(self, x: Array) -> Array:
        """What XLA takes: chunks in the dtype of states, with a head for every state."""
        if x.ndim == 4 and x.shape[2] != self.groups:
            x = jnp.repeat(x, self.groups // x.shape[2], axis=2)
        return split_chunks(x.astype(self.dtype), KERNEL_CHUNK)

    def _start(self, initial: Array) -> Array | None:
        """[B, G, (R,) D, E] as [B, H, D, E]; None for zeros."""
        return None if self.fresh else initial.reshape(initial.shape[0], -1, *initial.shape[-2:])

    def _decays(self, power: int) -> ChunkDecays | None:
        """Those of a^power; None without decay and segments."""
        if self.edges is None:
            return None
        enter, leave, kept = (jax.lax.stop_gradient(x) ** power for x in self.edges)
        high = low = jnp.zeros_like(enter)
        steps = None
        if self.sums is not None:
            scaled = self.sums.times(power)
            high, low = jax.lax.stop_gradient((scaled.high, scaled.low))
            steps = scaled.steps
        return ChunkDecays(high=high, low=low, enter=enter, leave=leave, kept=kept, run=self.chunks.run, steps=steps)


def _by_head(log_decay: Array | None, run: Array | None, dtype: Dtype, *, rounded: bool) -> tuple[LogDecay | None, Any]:
    """`sums` and `edges` of `KernelChunks` from `log_decay` [B, T, Hd] and `run` [B, N, C].

    Every head of every sequence is cut by itself, in the order in which kernels read them: only the log decays are
    transposed, and no axis is joined with another that devices may split.
    """
    if log_decay is None and run is None:
        return None, None
    sums, heads = None, 1
    if log_decay is not None:
        # Below this a step leaves nothing either way. Kernels that read a sum as one number tell later steps apart.
        log_decay = jnp.maximum(log_decay, 1.5 * jnp.log(jnp.finfo(dtype).tiny))
        sums, heads = (_rounded if rounded else _exact)(log_decay, run), log_decay.shape[2]

    def edges(sums: LogDecay | None, run: Array | None) -> tuple[Array, Array, Array]:
        one = jax.tree.map(lambda x: x[None, :, None], sums), None if run is None else run[None]
        start, end, kept = Chunks(*one, KERNEL_CHUNK, None).edges(dtype)
        return start[0, :, 0, :, 0], end[0, :, 0, :, 0], kept[0, :, 0, 0, 0]

    return sums, _for_every_head(edges, heads)(sums, run)


def _for_every_head(function: Any, heads: int) -> Any:
    """A function of arrays of one head and of one sequence, over [B, Hd, ...] and [B, ...]."""
    return jax.vmap(jax.vmap(function, in_axes=(0, None), axis_size=heads))


def _exact(log_decay: Array, run: Array | None) -> LogDecay:
    """Sums for kernels that read both numbers."""

    def accumulate(log_decay: Array, run: Array | None) -> LogDecay:
        steps = split_chunks(log_decay[None, :, None, None], KERNEL_CHUNK)[..., 0]
        sums = LogDecay.accumulate(steps, None if run is None else run[None])
        return jax.tree.map(lambda x: x[0, :, 0], sums)

    return _for_every_head(accumulate, log_decay.shape[2])(jnp.swapaxes(log_decay, 1, 2), run)


def _rounded(log_decay: Array, run: Array | None) -> LogDecay:
    """Sums for kernels that read `high` alone, by one product, which also transposes."""
    batch, length, heads = log_decay.shape
    steps = jnp.pad(log_decay, ((0, 0), (0, -length % KERNEL_CHUNK), (0, 0)))
    steps = steps.reshape(batch, -1, KERNEL_CHUNK, heads)
    # A constant, where jnp.triu is one more kernel.
    upto = jnp.asarray(np.triu(np.ones((KERNEL_CHUNK, KERNEL_CHUNK), log_decay.dtype)))
    if run is None:
        high = einsum("bnsh,st->bhnt", steps, upto)
    else:
        same = run[..., :, None] == run[..., None, :]
        high = einsum("bnsh,bnst->bhnt", steps, jnp.where(same, upto, 0))
    # Behind the barrier XLA computes all that follows from the sums in one kernel, else in one kernel for each.
    high = jax.lax.optimization_barrier(jax.lax.stop_gradient(high))
    return LogDecay(high, jnp.zeros_like(high), jnp.transpose(steps, (0, 3, 1, 2)))


def _merge_heads(x: Array) -> Array:
    """[B, T, G, (R,) D] as [B, T, H, D]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
