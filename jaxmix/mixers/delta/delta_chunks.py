"""The delta rule chunk by chunk: forward, and its explicit backward that keeps the states at chunk borders only.

Arrays are [B, N, H, C, D]. With D_ij = exp(G_i - G_j), G the log decay accumulated in the chunk, one chunk is

    A  = strict_lower(beta_i (k_i . k_j) D_ij)          (I + A) [u, w] = beta [v, exp(G) k]
    o  = exp(G) (q S) + lower(q k^T D) (u - w S)        S' = exp(G_C) S + (exp(G_C - G) k)^T (u - w S)

where S is the state at the chunk's start. The map S -> S' is affine, so an associative scan gives every S.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, einsum
from jaxmix.mixers.chunking import Chunks
from jaxmix.mixers.decay import LogDecay
from jaxmix.mixers.delta.delta_summary import DeltaSummary
from jaxmix.mixers.prefix import prefix_scan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaChunks:
    """A sequence cut into chunks.

    Attributes:
        q: scaled queries, [B, N, H, C, D].
        k: keys, [B, N, H, C, D].
        v: values, [B, N, H, C, E].
        beta: write strengths, [B, N, H, C, 1].
        log_decay: of every token, [B, N, H, C]; None for no decay.
        write_mask: share of each chunk's update that its successors see, [B, N, H]; None for all of it.
        run: number of segment starts inside the chunk up to each token, [B, N, C]; None for no segments.
    """

    q: Array
    k: Array
    v: Array
    beta: Array
    log_decay: Array | None
    write_mask: Array | None
    run: Array | None


class _Local(NamedTuple):
    """What one chunk gives without knowing its start state."""

    decay: Array
    """D where token i sees token j, else 0, [..., C, C]."""
    keys: Array
    """k_i . k_j where i comes after j in a segment, else 0."""
    erase: Array
    """A."""
    scores: Array
    """lower(q k^T D)."""
    start: Array
    """exp(G) before the first segment start, then 0, [..., C, 1]."""
    end: Array
    """exp(G_C - G) in the last segment, else 0, [..., C, 1]."""
    kept: Array
    """exp(G_C), or 0 where a segment starts in the chunk, [..., 1, 1]."""
    u: Array
    w: Array


@dataclasses.dataclass(frozen=True)
class DeltaOptions:
    """What does not change from chunk to chunk.

    Attributes:
        decay_masked: a chunk whose update is masked decays the state all the same.
        erase: writes first take back what the key had stored; without, u = beta v and w = 0: a linear attention.
    """

    decay_masked: bool = True
    erase: bool = True


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def delta_chunks(
    options: DeltaOptions, chunks: DeltaChunks, initial: Array, offset: Array | None
) -> tuple[Array, Array, Array]:
    """Outputs [B, N, H, C, E], states at the starts of chunks [B, N, H, D, E] and final state [B, H, D, E].

    Args:
        options: see `DeltaOptions`.
        chunks: the sequence.
        initial: state before the first token, [B, H, D, E].
        offset: where the first chunk goes on with one that began in an earlier call: the state without that chunk's
            update, decayed so far, less `initial`. None for a chunk of its own; not without a write mask.
    """
    return run_chunks(options, chunks, initial, offset, None)


def run_chunks(
    options: DeltaOptions, chunks: DeltaChunks, initial: Array, offset: Array | None, sequence_axis: str | None
) -> tuple[Array, Array, Array]:
    """The forward pass of `delta_chunks`, with chunks that may be split over devices."""
    local = _prepare(options, chunks)
    written = local.end * chunks.k
    update = DeltaSummary(-_product("cd,ce->de", written, local.w), _product("cd,ce->de", written, local.u))
    summary = _committed(options, chunks, local, update)
    if offset is not None:
        left = _left_behind(options, chunks, local) * offset
        summary = dataclasses.replace(summary, W=summary.W.at[:, 0].add(left))
    start = DeltaSummary.of_state(initial[:, None])
    before, after, total = prefix_scan(DeltaSummary.combine, summary, _resets(chunks), start, sequence_axis)
    states = jnp.concatenate([before.W, after.W[:, :-1]], axis=1)
    news = local.u - _product("cd,de->ce", local.w, states)
    out = _product("cd,de->ce", local.start * chunks.q, states) + _product("cs,se->ce", local.scores, news)
    return out, states, total.W[:, 0]


def _forward(options: DeltaOptions, chunks: DeltaChunks, initial: Array, offset: Array | None) -> Any:
    out, states, final = run_chunks(options, chunks, initial, offset, None)
    return (out, states, final), (chunks, states, offset)


def _backward(options: DeltaOptions, saved: Any, cotangents: tuple[Array, Array, Array]) -> Any:
    chunks, states, offset = saved
    d_out, d_starts, d_final = cotangents
    q, k, beta = chunks.q, chunks.k, chunks.beta
    local = _prepare(options, chunks)
    written, reading = local.end * k, local.start * q
    news = local.u - _product("cd,de->ce", local.w, states)

    # The cotangent of every chunk's end state, by the transposed affine maps run backwards.
    d_news_out = _product("sc,se->ce", local.scores, d_out)
    d_states = d_starts + _product("cd,ce->de", reading, d_out) - _product("cd,ce->de", local.w, d_news_out)
    update = DeltaSummary(-_product("cd,ce->de", written, local.w), d_states)
    summary = _committed(options, chunks, local, update)
    reverse = DeltaSummary(jnp.flip(jnp.swapaxes(summary.Phi, -1, -2), axis=1), jnp.flip(d_states, axis=1))
    last = DeltaSummary.of_state(d_final[:, None])
    resets = _resets(chunks)
    resets = None if resets is None else jnp.flip(resets, axis=1)
    before, after, total = prefix_scan(DeltaSummary.combine, reverse, resets, last, None)
    d_ends = jnp.flip(jnp.concatenate([before.W, after.W[:, :-1]], axis=1), axis=1)

    masked = d_ends if chunks.write_mask is None else chunks.write_mask[..., None, None] * d_ends
    d_news = d_news_out + _product("cd,de->ce", written, masked)
    d_scores = jnp.where(local.decay != 0, _product("ce,se->cs", d_out, news), 0)
    d_products = d_scores * local.decay
    d_written = _product("ce,de->cd", news, masked)
    d_reading = _product("ce,de->cd", d_out, states)
    d_w = -_product("ce,de->cd", d_news, states)

    strict = jnp.tri(q.shape[-2], k=-1, dtype=jnp.bool_)
    if options.erase:
        # Through the triangular solve: (I + A)^T [b_v, b_k] = [du, dw] and dA = -strict_lower(b u^T).
        b_v, b_k = (_solve(local.erase, x, transpose=True) for x in (d_news, d_w))
        d_erase = -_product("ce,se->cs", b_v, local.u) - _product("cd,sd->cs", b_k, local.w)
        d_erase = jnp.where(strict & (local.decay != 0), d_erase, 0)
    else:
        b_v, b_k, d_erase = d_news, jnp.zeros_like(k), jnp.zeros_like(local.erase)
    d_keys = d_erase * local.decay

    started = local.start * jnp.sum(b_k * k, axis=-1, keepdims=True)
    weighed = beta * d_keys
    d_k = (
        _product("sc,sd->cd", d_products, q)
        + local.end * d_written
        + local.start * beta * b_k
        + _product("cs,sd->cd", weighed, k)
        + _product("sc,sd->cd", weighed, k)
    )
    d_beta = jnp.sum(b_v * chunks.v, axis=-1, keepdims=True) + started + jnp.sum(d_keys * local.keys, -1, keepdims=True)
    d_chunks = DeltaChunks(
        q=local.start * d_reading + _product("cs,sd->cd", d_products, k),
        k=d_k,
        v=beta * b_v,
        beta=d_beta,
        log_decay=None,
        write_mask=None,
        run=None,
    )
    d_offset = None if offset is None else _left_behind(options, chunks, local) * d_ends[:, 0]
    if chunks.write_mask is not None:
        base = _base(options, chunks, local)
        effect = _product("cd,ce->de", written, news)
        if not options.decay_masked:
            effect = effect + (local.kept - base) * states
        d_mask = jnp.sum(d_ends * effect, axis=(-2, -1))
        if offset is not None:
            base = jnp.broadcast_to(base, (*d_mask.shape, 1, 1))[:, 0, :, 0, 0]
            d_mask = d_mask.at[:, 0].add(-base * jnp.sum(d_ends[:, 0] * offset, axis=(-2, -1)))
        d_chunks = dataclasses.replace(d_chunks, write_mask=d_mask)
    if chunks.log_decay is not None:
        # Token r decays what passes it: the state read at r or later, the pairs (i, j) with j < r <= i, what is written
        # before r. Each sum by itself: as differences of sums of pairs they would keep the rounding of all pairs.
        pairs = jnp.where(strict, d_scores * local.scores, 0) + d_erase * local.erase
        read = jnp.sum(reading * d_reading, axis=-1) + (beta * started)[..., 0]
        passed = jnp.sum(states * (d_ends if options.decay_masked else masked), axis=(-2, -1))
        if offset is not None and options.decay_masked:
            assert chunks.write_mask is not None
            behind = (1 - chunks.write_mask[:, 0]) * jnp.sum(d_ends[:, 0] * offset, axis=(-2, -1))
            passed = passed.at[:, 0].add(behind)
        up_to = jnp.tri(q.shape[-2], dtype=q.dtype)
        d_log_decay = (
            einsum("...ir,...i->...r", up_to, read)
            + jnp.sum(jnp.where(strict, _product("ir,ij->rj", up_to, pairs), 0), axis=-1)
            + einsum("...rj,...j->...r", jnp.where(strict, up_to, 0), jnp.sum(written * d_written, axis=-1))
            + local.kept[..., 0] * passed[..., None]
        )
        d_chunks = dataclasses.replace(d_chunks, log_decay=d_log_decay)
    return d_chunks, total.W[:, 0], d_offset


delta_chunks.defvjp(_forward, _backward)


def _prepare(options: DeltaOptions, chunks: DeltaChunks) -> _Local:
    q, k, beta = chunks.q, chunks.k, chunks.beta
    size = q.shape[-2]
    cumulative = None if chunks.log_decay is None else LogDecay.accumulate(chunks.log_decay, chunks.run)
    borders = Chunks(cumulative, chunks.run, size, None)
    decay = borders.decays(q.dtype)
    seen = decay != 0
    strict = seen & jnp.tri(size, k=-1, dtype=jnp.bool_)
    scores = jnp.where(seen, _product("cd,sd->cs", q, k), 0) * decay
    start, end, kept = borders.edges(q.dtype)
    if not options.erase:
        none = jnp.zeros_like(scores)
        return _Local(decay, none, none, scores, start, end, kept, beta * chunks.v, jnp.zeros_like(k))
    keys = jnp.where(strict, _product("cd,sd->cs", k, k), 0)
    erase = beta * keys * decay
    # Two solves run side by side on a CPU, where one with twice the columns would not.
    u, w = _solve(erase, beta * chunks.v), _solve(erase, beta * start * k)
    return _Local(decay, keys, erase, scores, start, end, kept, u, w)


def _left_behind(options: DeltaOptions, chunks: DeltaChunks, local: _Local) -> Array:
    """How much of an offset the first chunk leaves to its successors, [B, H, 1, 1]."""
    assert chunks.write_mask is not None
    base = jnp.broadcast_to(_base(options, chunks, local), (*chunks.write_mask.shape, 1, 1))[:, 0]
    return (1 - chunks.write_mask[:, 0, :, None, None]) * base


def _base(options: DeltaOptions, chunks: DeltaChunks, local: _Local) -> Array:
    """What a chunk without its update does to the state: a factor, [..., 1, 1]."""
    if options.decay_masked:
        return local.kept
    resets = _resets(chunks)
    one = jnp.ones((), local.kept.dtype)
    return one if resets is None else jnp.where(resets, 0, one)[:, :, None, None, None]


def _committed(options: DeltaOptions, chunks: DeltaChunks, local: _Local, update: DeltaSummary) -> DeltaSummary:
    """The chunk's map with the update weighed by the write mask: b I + m ((kept - b) I + update), b without update."""
    one = jnp.eye(chunks.k.shape[-1], dtype=chunks.k.dtype)
    if chunks.write_mask is None:
        return DeltaSummary(local.kept * one + update.Phi, update.W)
    mask = chunks.write_mask[..., None, None]
    base = _base(options, chunks, local)
    return DeltaSummary((base + mask * (local.kept - base)) * one + mask * update.Phi, mask * update.W)


def _resets(chunks: DeltaChunks) -> Array | None:
    return None if chunks.run is None else chunks.run[..., -1] > 0


def _solve(erase: Array, right: Array, *, transpose: bool = False) -> Array:
    """x with (I + A) x = right, or with its transpose; A [..., C, C] strictly lower."""
    return jax.lax.linalg.triangular_solve(
        erase, right, left_side=True, lower=True, transpose_a=transpose, unit_diagonal=True
    )


def _product(spec: str, a: Array, b: Array) -> Array:
    """einsum over the last two axes of [B, N, H, ...]."""
    left, rest = spec.split(",")
    right, out = rest.split("->")
    return einsum(f"...{left},...{right}->...{out}", a, b)
