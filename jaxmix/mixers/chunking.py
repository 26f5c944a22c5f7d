"""The sequence cut into chunks, and decayed linear attention over it: the one building block of every chunked form.

Chunked arrays are [B, N, G, R, C, D] per query head, or [B, N, G, C, D] when the R query heads of a key/value group
share them; every function here accepts both and keeps shared arrays shared.
"""

import dataclasses

import jax.numpy as jnp

from jaxmix.arrays import Array, einsum
from jaxmix.mixers.decay import LogDecay
from jaxmix.mixers.prefix import decayed_sum, prefix_scan
from jaxmix.mixers.segments import Segments


def split_chunks(x: Array, size: int) -> Array:
    """[B, T, G, (R,) D] cut into [B, N, G, (R,) C, D], the ragged last chunk filled with zeros."""
    batch, length = x.shape[:2]
    chunks = -(-length // size)
    x = jnp.pad(x, [(0, 0), (0, chunks * size - length)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, chunks, size, *x.shape[2:]), 2, -2)


def join_chunks(x: Array, length: int) -> Array:
    """The inverse of `split_chunks`."""
    x = jnp.moveaxis(x, -2, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def beside(matrix: Array, vector: Array) -> Array:
    """Values and their normaliser, or the moments of both, in one array: [..., E] and [...] to [..., E + 1]."""
    return jnp.concatenate([matrix, vector[..., None]], axis=-1)


def apart(x: Array) -> tuple[Array, Array]:
    """The inverse of `beside`."""
    return x[..., :-1], x[..., -1]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Decays and segment borders of a chunked sequence.

    Attributes:
        log_decay: log decay accumulated inside each chunk and segment, [B, N, G, C]; None for no decay.
        run: number of segment starts inside the chunk up to each token, [B, N, C]; None for no segments.
        size: chunk length C.
        sequence_axis: shard_map axis over which the chunks are split, or None.
    """

    log_decay: LogDecay | None
    run: Array | None
    size: int
    sequence_axis: str | None

    @classmethod
    def cut(
        cls, log_decay: Array | None, segments: Segments | None, size: int, sequence_axis: str | None = None
    ) -> "Chunks":
        """From `log_decay` [B, T, G] and `segments` of [B, T]."""
        cumulative = run = None
        if segments is not None:
            resets = split_chunks(segments.reset[..., None, None], size)[:, :, 0, :, 0]
            run = jnp.cumsum(resets, axis=-1, dtype=jnp.int32)
        if log_decay is not None:
            cumulative = LogDecay.accumulate(split_chunks(log_decay[..., None], size)[..., 0], run)
        return cls(cumulative, run, size, sequence_axis)

    def scores(self, q: Array, k: Array, *, power: int = 1, strict: bool = False) -> Array:
        """(q_t . k_s) c(s, t)^power for s <= t in one segment, else 0: [B, N, G, (R,) C, C].

        With `strict`, s < t and the decay runs only to t - 1: what token t sees before it is added.
        """
        scores = _product("td,sd->ts", q, k)
        steps = jnp.arange(self.size)
        gap = steps[:, None] - steps[None, :] - int(strict)
        keep = gap >= 0
        if self.run is not None:
            keep = keep & (self.run[..., :, None] == self.run[..., None, :])[:, :, None]
        keep = _to_rank(keep, scores.ndim) if keep.ndim > 2 else keep
        scores = jnp.where(keep, scores, 0)
        if self.log_decay is None:
            return scores
        reached = self.log_decay.before() if strict else self.log_decay
        difference = _to_rank(reached.since(self.log_decay), scores.ndim)
        # The mask comes before exp: above the diagonal the difference is positive and may overflow. On it there is no
        # decay, and no gradient whose rounding would outlast that of vanishing decays.
        no_step = jnp.where(gap == 0, 0.0, -jnp.inf).astype(scores.dtype)
        return scores * jnp.exp(jnp.where(keep & (gap > 0), difference, no_step)) ** power

    def outer(self, k: Array, v: Array, *, power: int = 1) -> Array:
        """sum_s c(s, C)^power k_s v_s^T over the last segment of each chunk: [B, N, G, (R,) D, E]."""
        keep = None if self.run is None else (self.run == self.run[..., -1:])[:, :, None, :]
        if self.log_decay is not None:
            to_end = power * self.log_decay.to_end()
            # Before the last segment it is the difference of two segments' decays: positive, it may overflow.
            to_end = jnp.exp(to_end if keep is None else jnp.where(keep, to_end, 0))
            k = k * _to_rank(to_end[..., None], k.ndim)
        if keep is not None:
            k = jnp.where(_to_rank(keep[..., None], k.ndim), k, 0)
        return _product("td,te->de", k, v)

    def read(self, q: Array, before: Array, *, power: int = 1, strict: bool = False) -> Array:
        """c(start, t)^power q_t^T X, X [B, N, G, (R,) D, E] the state at each chunk's start: [B, N, G, (R,) C, E]."""
        out = _product("td,de->te", q, before)
        if self.log_decay is not None:
            reached = self.log_decay.before() if strict else self.log_decay
            out = out * _to_rank(jnp.exp(power * reached.from_start())[..., None], out.ndim)
        if self.run is not None:
            out = jnp.where(_to_rank((self.run == 0)[:, :, None, :, None], out.ndim), out, 0)
        return out

    def carry(self, outer: Array, initial: Array, *, power: int = 1) -> tuple[Array, Array]:
        """The state at the start of every chunk and after the last, by an associative scan over chunk summaries.

        `initial` [B, G, (R,) D, E] is the state before the first chunk.
        """
        if self.log_decay is None:
            rho = jnp.ones((1, outer.shape[1], 1), outer.dtype)
        else:
            rho = jnp.exp(power * self.log_decay.from_start()[..., -1])
        resets = None if self.run is None else self.run[..., -1] > 0
        if resets is not None:
            rho = jnp.broadcast_to(rho, (*resets.shape, rho.shape[-1]))
        start = (jnp.ones((rho.shape[0], 1, rho.shape[2]), rho.dtype), initial[:, None])
        before, after, total = prefix_scan(decayed_sum, (rho, outer), resets, start, self.sequence_axis)
        return jnp.concatenate([before[1], after[1][:, :-1]], axis=1), total[1][:, 0]

    def linear(
        self,
        q: Array,
        k: Array,
        v: Array,
        initial: Array,
        *,
        power: int = 1,
        strict: bool = False,
        scores: Array | None = None,
    ) -> tuple[Array, Array]:
        """Causal linear attention LA(q, k, v; a^power) and its final state X_T = sum_s c(s, T)^power k_s v_s^T.

        Args:
            q: queries.
            k: keys.
            v: values.
            initial: state before the first token.
            power: power of the decay.
            strict: the current token is left out, and so is its decay.
            scores: `self.scores(q, k, ...)` where the caller has it already.
        """
        if scores is None:
            scores = self.scores(q, k, power=power, strict=strict)
        before, final = self.carry(self.outer(k, v, power=power), initial, power=power)
        carried = self.read(q, before, power=power, strict=strict)
        return _product("ts,se->te", scores, v) + carried, final

    def final(self, k: Array, v: Array, initial: Array, *, power: int = 1) -> Array:
        """The final state of `linear` alone."""
        return self.carry(self.outer(k, v, power=power), initial, power=power)[1]


def _product(spec: str, a: Array, b: Array) -> Array:
    """einsum over the last two axes; a leading R axis is kept where either operand has one."""
    left, rest = spec.split(",")
    right, out = rest.split("->")
    heads = {5: "bng", 6: "bngr"}
    out_heads = heads[max(a.ndim, b.ndim)]
    return einsum(f"{heads[a.ndim]}{left},{heads[b.ndim]}{right}->{out_heads}{out}", a, b)


def _to_rank(x: Array, ndim: int) -> Array:
    """[B, N, G, ...] with the R axis inserted when the other operand has one."""
    return x if x.ndim == ndim else jnp.expand_dims(x, 3)
