"""What the kernels of decayed linear attention share: decays and segment borders of a sequence cut into chunks.

Dimension letters: B batch, T tokens, H heads, Hd heads of the decays (Hd divides H), C chunk length, N = T / C chunks,
D key size, E value size.
"""

import dataclasses
from typing import NamedTuple

import jax

Array = jax.Array

CHUNK = 64
"""Tokens per chunk of every kernel, C."""
SIZES = (32, 64, 128)
"""Key and value sizes that the kernels have."""
DTYPES = ("bfloat16", "float32")
"""Dtypes of queries, keys and values that they take."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkDecays:
    """Decays inside and across the chunks, float32, and segment borders.

    The log decay accumulated from the start of its chunk and segment to each token, itself included, is `high + low`,
    two numbers so that differences of large sums stay exact; bfloat16 kernels on Hopper read `high` alone
    (`Target.reads_low`). From token s to token t >= s of one chunk and segment it is
    (high_t - high_s) + (low_t - low_s) <= 0; before a border the difference may be positive, so mask before exp.

    Attributes:
        high: rounded log decays from the start, natural log, [B, Hd, N, C].
        low: what `high` misses, [B, Hd, N, C]; of no account where kernels do not read it.
        enter: decay from the state before the chunk to each token, in [0, 1], 0 behind a border, [B, Hd, N, C].
        leave: decay from each token to the end of the chunk, in [0, 1], 0 where a border follows, [B, Hd, N, C].
        kept: decay of the whole chunk, in [0, 1], 0 with a border inside, [B, Hd, N].
        run: int32, number of segment starts inside the chunk up to each token, [B, N, C]; None for no segments.
        steps: log decay of each token, <= 0, [B, Hd, N, C], which the gradient of all others goes to; None for none.
    """

    high: Array
    low: Array
    enter: Array
    leave: Array
    kept: Array
    run: Array | None
    steps: Array | None


class Result(NamedTuple):
    """What one decayed attention gives.

    Attributes:
        out: outputs [B, T, H, E] in the dtype of the values; None where none were asked for.
        final: state after the last chunk walked, [B, H, D, E], float32.
        states: state before every chunk, [B, H, N, D, E], or as a kernel of gradients reads it, rounded to the dtype
            of the values, which is how outputs read it; None where none were asked for.
    """

    out: Array | None
    final: Array
    states: Array | None = None


class BackwardArguments(NamedTuple):
    """What the gradients of one decayed attention, walked forward in time, are computed from.

    Head h of H, the largest head count, reads head h // (H / Hx) of every array.

    Attributes:
        q: queries [B, T, H, D], bfloat16 or float32, as all arrays of tokens; T is a multiple of `CHUNK`.
        k: keys [B, T, Hk, D].
        v: values [B, T, Hv, E]; None where they are the keys.
        d_out: gradient of the outputs, [B, T, H, E].
        decays: decays and segments; None for neither.
        states: the states that `decayed_attention(..., states=True)` of the same platform gives, [B, Hs, N', D, E].
        d_final: gradient of the final state, [B, Hf, D, E], float32; None for zeros.
        more_dq: is added to dq, [B, T, H, D].
        more_dk: is added to dk, likewise, for every one of H heads.
    """

    q: Array
    k: Array
    v: Array | None
    d_out: Array
    decays: ChunkDecays | None
    states: Array
    d_final: Array | None = None
    more_dq: Array | None = None
    more_dk: Array | None = None


class BackwardResult(NamedTuple):
    """Gradients of one decayed attention, for each of its heads.

    Attributes:
        dq: [B, T, H, D] in the dtype of the operands.
        dk: [B, T, H, D], likewise.
        dv: [B, T, H, E], likewise; None where keys are the values as well, and dk is the gradient of both.
        d_initial: of the state before the first chunk, [B, H, D, E], float32.
        d_steps: of the log decay of each token, [B, H, N, C], float32; None without decays.
    """

    dq: Array
    dk: Array
    dv: Array | None
    d_initial: Array
    d_steps: Array | None
