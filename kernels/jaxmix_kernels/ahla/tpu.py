"""AHLA forward on a TPU in one kernel: the effective values never leave VMEM."""

from typing import Any

from jaxmix_kernels.decays import Array, ChunkDecays
from jaxmix_kernels.tpu_forward import States, Tiles, forward
from jaxmix_kernels.tpu_tiles import TILE, Decays, attend, rounded, scores


def ahla_forward(
    q: Array,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    initial_p: Array | None,
    initial_e: Array | None,
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """LA(q, k, vt; a) with vt = LA(q, k, v; a), which is rounded to the dtype of v as an operand.

    Args:
        q: queries, [B, T, H, D], bfloat16 or float32; all of one dtype. T is a multiple of the chunk length.
        k: keys, [B, T, Hk, D]; head h reads head h // (H / Hk), and so on for all head counts, which divide H.
        v: values, [B, T, Hv, E].
        decays: those of a; None for no decay and no segments.
        initial_p: P = sum c(s, T) k_s v_s^T before the first token, [B, Hp, D, E], float32; None for zeros.
        initial_e: E = sum c(s, T) k_s vt_s^T likewise, [B, He, D, E].
        interpret: as of `pl.pallas_call`.

    Returns:
        out [B, T, H, E] in the dtype of v, and the final P and E [B, H, D, E], float32.

    Raises:
        NotImplementedError: for dtypes, head sizes or lengths without a kernel.
    """
    d, e = q.shape[3], v.shape[3]
    out, (p, second) = forward(
        "ahla",
        _step,
        q,
        k,
        v,
        (decays,),
        (initial_p, initial_e),
        ((d, e), (d, e)),
        products=TILE * TILE * (d + 2 * e) + 4 * TILE * d * e,
        interpret=interpret,
    )
    return out, p, second


def _step(q: Tiles, k: Tiles, v: Tiles, decays: list[list[Decays]], states: States) -> tuple[Tiles, States]:
    (once,), (p, e) = decays, states
    weights = scores(q, k, once)
    vt, p = attend(q, k, v, once, p, weights)
    out, e = attend(q, k, rounded(vt, v), once, e, weights)
    return out, (p, e)
