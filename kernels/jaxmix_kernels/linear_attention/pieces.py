"""The split schedule: a long sequence cut into pieces that are walked side by side as if they were sequences.

A kernel walks over the chunks of a head one after the other, so that one program serves a head. Where there are fewer
heads than a device has cores, a first pass computes what every piece adds to the state, a scan gives the state
at the start of every piece, and the main pass starts all pieces from there.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmix_kernels.decays import CHUNK, SIZES, ChunkDecays

Array = jax.Array

SHORTEST_PIECE = 16 * CHUNK
"""Fewest tokens of a piece: below, the first pass and the padding cost more than the cores they occupy."""
UNROLLED = 16
"""Most pieces whose states are computed without a loop."""


def choose_pieces(heads: int, length: int, programs: int) -> int:
    """Number of pieces P: the largest power of two with P * heads <= programs, while pieces have >= 1024 tokens.

    Args:
        heads: programs of uncut sequences: heads of all, B * H, times blocks of value columns of each.
        length: tokens, T.
        programs: programs that a device runs side by side.
    """
    pieces = 1
    while 2 * pieces * heads <= programs and length >= 2 * pieces * SHORTEST_PIECE:
        pieces *= 2
    return pieces


def pad_sizes(x: Array, axes: tuple[int, ...], tokens: int | None = None) -> Array:
    """x filled up with zeros to the next of SIZES along `axes`, and to a multiple of `tokens` along axis 1."""
    widths = [(0, 0)] * x.ndim
    for axis in axes:
        widths[axis] = (0, next(size for size in SIZES if size >= x.shape[axis]) - x.shape[axis])
    if tokens is not None:
        widths[1] = (0, -x.shape[1] % tokens)
    return jnp.pad(x, widths) if any(width != (0, 0) for width in widths) else x


def pad_chunks(decays: ChunkDecays, pieces: int) -> ChunkDecays:
    """Decays with chunks behind the last one that change nothing, up to a multiple of `pieces`."""
    missing = -decays.enter.shape[2] % pieces
    if not missing:
        return decays

    def fill(x: Array, value: float, axis: int = 2) -> Array:
        return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=value)

    return ChunkDecays(
        **{name: fill(getattr(decays, name), 0) for name in ("high", "low")},
        **{name: fill(getattr(decays, name), 1) for name in ("enter", "leave", "kept")},
        run=None if decays.run is None else fill(decays.run, 0, axis=1),
        steps=None if decays.steps is None else fill(decays.steps, 0),
    )


def split_tokens(x: Array, pieces: int) -> Array:
    """[B, T, ...] to [B P, T / P, ...]."""
    return x if pieces == 1 else x.reshape(x.shape[0] * pieces, -1, *x.shape[2:])


def join_pieces(x: Array, pieces: int) -> Array:
    """The inverse of `split_tokens`."""
    return x if pieces == 1 else x.reshape(x.shape[0] // pieces, -1, *x.shape[2:])


def split_decays(decays: ChunkDecays | None, pieces: int) -> ChunkDecays | None:
    """Decays of [B, Hd, N, ...] as those of B P sequences of N / P chunks."""
    if decays is None or pieces == 1:
        return decays

    def split(x: Array) -> Array:
        x = x.reshape(*x.shape[:2], pieces, -1, *x.shape[3:])
        return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], *x.shape[3:])

    by_head = jax.tree.map(split, dataclasses.replace(decays, run=None))
    return dataclasses.replace(by_head, run=None if decays.run is None else split_tokens(decays.run, pieces))


def join_chunks(x: Array, pieces: int) -> Array:
    """[B P, H, N / P, C] of all pieces as [B, H, N, C]."""
    if pieces == 1:
        return x
    x = jnp.moveaxis(x.reshape(-1, pieces, *x.shape[1:]), 1, 2)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def last_piece(x: Array, pieces: int, *, reverse: bool = False) -> Array:
    """Of the states [B P, H, D, E] of all pieces, those of the last one walked, [B, H, D, E]."""
    return x.reshape(-1, pieces, *x.shape[1:])[:, 0 if reverse else -1]


def starts_of_pieces(
    decays: ChunkDecays | None, added: Array, initial: Array | None, pieces: int, *, reverse: bool = False
) -> tuple[Array, Array]:
    """The state that every piece starts from, and the one after the last piece walked, by a scan over pieces.

    Args:
        decays: of the whole sequences.
        added: what each piece adds to the state, [B P, H, D, E].
        initial: the state before the first piece walked, [B, Hs, D, E]; None for zeros.
        pieces: P.
        reverse: pieces are walked last to first.

    Returns:
        States [B P, H, D, E] and [B, H, D, E].
    """
    heads = added.shape[1]
    added = jnp.moveaxis(added.reshape(-1, pieces, *added.shape[1:]), 1, 0)
    initial = jnp.zeros_like(added[0]) if initial is None else jnp.repeat(initial, heads // initial.shape[1], axis=1)
    if decays is None:
        kept = jnp.ones((pieces, 1, 1), added.dtype)
    else:
        kept = jnp.prod(decays.kept.reshape(*decays.kept.shape[:2], pieces, -1), axis=-1)
        kept = jnp.moveaxis(jnp.repeat(kept, heads // kept.shape[1], axis=1), 2, 0)

    def follow(state: Array, piece: tuple[Array, Array]) -> tuple[Array, Array]:
        kept, added = piece
        factor = kept[..., None, None]
        # Nothing that a border stops is multiplied by zero.
        return jnp.where(factor > 0, factor * state, 0) + added, state

    # On a GPU a loop starts kernels anew for every piece, which unrolled is fused into a few.
    final, starts = jax.lax.scan(follow, initial, (kept, added), reverse=reverse, unroll=min(pieces, UNROLLED))
    return jnp.moveaxis(starts, 0, 1).reshape(-1, *added.shape[2:]), final
