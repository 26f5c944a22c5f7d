"""The composed gradient of the log decays of a linear attention, from what its other gradients leave behind."""

import jax
import jax.numpy as jnp

from jaxmix_kernels.decays import ChunkDecays
from jaxmix_kernels.linear_attention.pieces import join_chunks, split_decays

Array = jax.Array


def steps_gradient(
    decays: ChunkDecays,
    pieces: int,
    q_dots: Array,
    k_dots: Array,
    starts: Array,
    ends: Array,
    final: Array,
) -> Array:
    """dg_r = sum over t >= r of one segment of (q_t . dq_t - k_t . dk_t), and <dX, X> at the end of the last one.

    Sums start anew in every piece, from the inner product there of the state and its gradient. Inside a chunk both
    dots hold the same rounded products of pairs, which cancel exactly; what crosses chunks keeps the rounding of the
    operands, and a sum over tokens collects it.

    Args:
        decays: of the whole sequences, heads Hd, N chunks.
        pieces: number of pieces P of every sequence.
        q_dots: q_t . dq_t, [B P, H, T / P], float32.
        k_dots: k_t . dk_t, [B P, H, T / P], float32.
        starts: state at the start of every piece, [B P, H, D, E]; [B, Hs, D, E] where P is one.
        ends: gradient of the state at the end of every piece, [B P, H, D, E]; with fewer heads, where P is one, each
            counts for the heads that share it.
        final: state at the end of the sequences [B, Hf, D, E].

    Returns:
        The gradient of `decays.steps`, [B, Hd, N, C].
    """
    batch, decay_heads, _, chunk = decays.high.shape
    heads = q_dots.shape[1]
    cut = split_decays(decays, pieces)
    assert cut is not None
    change = _sum_groups(q_dots - k_dots, decay_heads)
    change = change.reshape(*change.shape[:2], -1, chunk)

    final = jnp.repeat(final, heads // final.shape[1], axis=1)
    reached = final
    if pieces > 1:
        reached = starts.reshape(batch, pieces, *starts.shape[1:])
        reached = jnp.concatenate([reached[:, 1:], final[:, None]], axis=1).reshape(starts.shape)
    ends = jnp.repeat(ends, heads // ends.shape[1], axis=1)
    at_end = _sum_groups(jnp.sum(ends * reached, axis=(-2, -1)), decay_heads)

    # [B P, (1,) N, C (r), C (t)]: the tokens t >= r of r's segment.
    counted = jnp.triu(jnp.ones((chunk, chunk), change.dtype))
    run = cut.run
    if run is None:
        inside = jnp.einsum("rt,bhnt->bhnr", counted, change, precision=jax.lax.Precision.HIGHEST)
        after = _sums_after(jnp.sum(change, axis=-1), None, at_end)
        d_steps = inside + after[..., None]
    else:
        counted = jnp.where(run[..., :, None] == run[..., None, :], counted, 0)
        inside = jnp.einsum("bnrt,bhnt->bhnr", counted, change, precision=jax.lax.Precision.HIGHEST)
        continued = jnp.sum(jnp.where((run == 0)[:, None], change, 0), axis=-1)
        after = _sums_after(continued, run[..., -1] == 0, at_end)
        is_last = (run == run[..., -1:])[:, None]
        d_steps = inside + jnp.where(is_last, after[..., None], 0)
        # The decay of a token that starts a segment meets no state.
        begins = run != jnp.pad(run[..., :-1], ((0, 0), (0, 0), (1, 0)))
        d_steps = jnp.where(begins[:, None], 0, d_steps)
    return join_chunks(d_steps, pieces)


def _sums_after(sums: Array, goes_on: Array | None, at_end: Array) -> Array:
    """What comes after every chunk in the segment of its last token.

    Args:
        sums: of every chunk, over the tokens that continue the segment of the chunk before, [B, Hd, N].
        goes_on: whether that segment goes on behind the chunk, [B, N]; None where all do.
        at_end: what comes after the last chunk, [B, Hd].
    """
    sums = jnp.concatenate([sums[..., 1:], at_end[..., None]], axis=-1)
    if goes_on is None:
        return jnp.cumsum(sums[..., ::-1], axis=-1)[..., ::-1]
    on = jnp.concatenate([goes_on[:, 1:], jnp.zeros_like(goes_on[:, :1])], axis=-1)[:, None]
    on = jnp.broadcast_to(on, sums.shape)

    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        (on_later, sum_later), (on_earlier, sum_earlier) = later, earlier
        return on_later & on_earlier, sum_earlier + jnp.where(on_earlier, sum_later, 0)

    return jax.lax.associative_scan(join, (on, sums), axis=2, reverse=True)[1]


def _sum_groups(x: Array, heads: int) -> Array:
    """[B, H, ...] summed over the heads of each group: [B, heads, ...]."""
    return x if x.shape[1] == heads else jnp.sum(x.reshape(x.shape[0], heads, -1, *x.shape[2:]), axis=2)
