"""The sequence cut into chunks, and decayed linear attention over it: the one building block of every chunked form.

Chunked arrays are [B, N, G, R, C, D] per query head, or [B, N, G, C, D] when the R query heads of a key/value group
share them; every function here accepts both and keeps shared arrays shared.
"""

import dataclasses

import jax.numpy as jnp

from jaxmix.arrays import Array, Dtype, einsum
from jaxmix.mixers.decay import LogDecay
from jaxmix.mixers.prefix import decayed_sum, prefix_scan
from jaxmix.mixers.segments import Segments
from jaxmix_kernels.links import Link, Links, follow


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


def count_starts(segments: Segments, size: int) -> Array:
    """Number of segment starts inside the chunk up to each token, [B, N, C]."""
    resets = split_chunks(segments.reset[..., None, None], size)[:, :, 0, :, 0]
    return jnp.cumsum(resets, axis=-1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Decays and segment borders of a chunked sequence.

    Attributes:
        log_decay: log decay accumulated inside each chunk and segment, [B, N, G, C]; None for no decay.
        run: number of segment starts inside the chunk up to each token, [B, N, C]; None for no segments.
        size: chunk length C.
        sequence_axis: shard_map axis over which the chunks are split, or None.
        fresh: nothing came before the first chunk, so that initial states are zeros.
    """

    log_decay: LogDecay | None
    run: Array | None
    size: int
    sequence_axis: str | None
    fresh: bool = False

    beside = staticmethod(beside)
    apart = staticmethod(apart)

    @classmethod
    def cut(
        cls,
        log_decay: Array | None,
        segments: Segments | None,
        size: int,
        sequence_axis: str | None = None,
        *,
        fresh: bool = False,
    ) -> "Chunks":
        """From `log_decay` [B, T, G] and `segments` of [B, T]."""
        cumulative = None
        run = None if segments is None else count_starts(segments, size)
        if log_decay is not None:
            cumulative = LogDecay.accumulate(split_chunks(log_decay[..., None], size)[..., 0], run)
        return cls(cumulative, run, size, sequence_axis, fresh)

    def scores(self, q: Array, k: Array, *, power: int = 1, strict: bool = False) -> Array:
        """(q_t . k_s) c(s, t)^power for s <= t in one segment, else 0: [B, N, G, (R,) C, C].

        With `strict`, s < t and the decay runs only to t - 1: what token t sees before it is added.
        """
        return self.decayed(_product("td,sd->ts", q, k), power=power, strict=strict)

    def decayed(self, products: Array, *, power: int = 1, strict: bool = False) -> Array:
        """What `scores` makes of q_t . k_s, [B, N, G, (R,) C, C]."""
        keep, gap = self._seen(strict)
        keep = _to_rank(keep, products.ndim) if keep.ndim > 2 else keep
        scores = jnp.where(keep, products, 0)
        if self.log_decay is None:
            return scores
        exponents = self._exponents(keep, gap, strict, products.ndim, scores.dtype)
        return scores * jnp.exp(exponents) ** power

    def decays(self, dtype: Dtype) -> Array:
        """c(s, t) for s <= t in one segment, else 0: [B, N, G, C, C], or with fewer axes what has no decay."""
        keep, gap = self._seen(False)
        if self.log_decay is None:
            return keep.astype(dtype)
        return jnp.where(keep, jnp.exp(self._exponents(keep, gap, False, 5, dtype)), 0)

    def edges(self, dtype: Dtype) -> tuple[Array, Array, Array]:
        """Decays from the chunk's start state to every token, from there to the chunk's end, and from start to end.

        [B, N, G, C, 1] twice and [B, N, G, 1, 1], or shapes that broadcast to them; 0 where a segment border is
        between.
        """
        start = kept = jnp.ones((1,) * 5, dtype)
        end = jnp.zeros((1,) * 5, dtype)
        if self.log_decay is not None:
            sums = self.log_decay.from_start()
            start, kept = jnp.exp(sums)[..., None], jnp.exp(sums[..., -1])[..., None, None]
            end = self.log_decay.to_end()[..., None]
        if self.run is None:
            return start, jnp.exp(end), kept
        # Before the last segment the exponent is the difference of two segments' decays: positive, it may overflow.
        last = (self.run == self.run[..., -1:])[:, :, None, :, None]
        end = jnp.where(last, jnp.exp(jnp.where(last, end, 0)), 0)
        start = jnp.where((self.run == 0)[:, :, None, :, None], start, 0)
        kept = jnp.where((self.run[..., -1] == 0)[:, :, None, None, None], kept, 0)
        return start, end, kept

    def _seen(self, strict: bool) -> tuple[Array, Array]:
        """Which s token t sees, [C, C] or [B, N, 1, C, C], and how many steps of decay are between them, [C, C]."""
        steps = jnp.arange(self.size)
        gap = steps[:, None] - steps[None, :] - int(strict)
        keep = gap >= 0
        if self.run is not None:
            keep = keep & (self.run[..., :, None] == self.run[..., None, :])[:, :, None]
        return keep, gap

    def _exponents(self, keep: Array, gap: Array, strict: bool, ndim: int, dtype: Dtype) -> Array:
        """Log decays between the pairs of `keep`, -inf elsewhere."""
        assert self.log_decay is not None
        reached = self.log_decay.before() if strict else self.log_decay
        difference = _to_rank(reached.since(self.log_decay), ndim)
        # The mask comes before exp: above the diagonal the difference is positive and may overflow. On it there is no
        # decay, and no gradient whose rounding would outlast that of vanishing decays.
        no_step = jnp.where(gap == 0, 0.0, -jnp.inf).astype(dtype)
        return jnp.where(keep & (gap > 0), difference, no_step)

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

    def chain(
        self, links: Links, q: Array, k: Array, v: Array, initials: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        """The links one after the other: the result of the last, and the final states of all.

        Args:
            links: the chain.
            q: queries.
            k: keys.
            v: values.
            initials: for every link the state before the first token.
        """
        shared: dict[tuple[str, int], Array] = {}

        def attend(link: Link, keys: Array, values: Array, initial: Array) -> tuple[Array, Array]:
            pair = link.keys, link.power
            if pair not in shared:
                shared[pair] = self.scores(q, keys, power=link.power)
            return self.linear(q, keys, values, initial, power=link.power, scores=shared[pair])

        return follow(links, k, v, initials, attend)


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
