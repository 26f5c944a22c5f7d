"""HLA3 forward (exact mask) on a TPU in one kernel: the effective keys and values never leave VMEM."""

from typing import Any

from jaxmix_kernels.decays import Array, ChunkDecays
from jaxmix_kernels.tpu_forward import States, Tiles, forward
from jaxmix_kernels.tpu_tiles import TILE, Decays, attend, rounded, scores


def hla3_forward(
    q: Array,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    cubed: ChunkDecays | None,
    initial_s: Array | None,
    initial_p: Array | None,
    initial_f: Array | None,
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array]:
    """LA(q, kt, vt; a^3) with kt = LA(q, k, k; a) and vt = LA(q, k, v; a), rounded to the dtype of v as operands.

    Args:
        q: queries, [B, T, H, D], bfloat16 or float32; all of one dtype. T is a multiple of the chunk length.
        k: keys, [B, T, Hk, D]; head h reads head h // (H / Hk), and so on for all head counts, which divide H.
        v: values, [B, T, Hv, E].
        decays: those of a; None for no decay and no segments.
        cubed: those of a^3.
        initial_s: S = sum c(s, T) k_s k_s^T before the first token, [B, Hs, D, D], float32; None for zeros.
        initial_p: P = sum c(s, T) k_s v_s^T likewise, [B, Hp, D, E].
        initial_f: F = sum c(s, T)^3 kt_s vt_s^T likewise, [B, Hf, D, E].
        interpret: as of `pl.pallas_call`.

    Returns:
        out [B, T, H, E] in the dtype of v, and the final S [B, H, D, D], P and F [B, H, D, E], float32.

    Raises:
        NotImplementedError: for dtypes, head sizes or lengths without a kernel.
    """
    d, e = q.shape[3], v.shape[3]
    out, (s, p, f) = forward(
        "hla3",
        _step,
        q,
        k,
        v,
        (decays, cubed),
        (initial_s, initial_p, initial_f),
        ((d, d), (d, e), (d, e)),
        products=TILE * TILE * (3 * d + 2 * e) + 2 * TILE * d * d + 4 * TILE * d * e,
        interpret=interpret,
    )
    return out, s, p, f


def _step(q: Tiles, k: Tiles, v: Tiles, decays: list[list[Decays]], states: States) -> tuple[Tiles, States]:
    (once, thrice), (s, p, f) = decays, states
    weights = scores(q, k, once)
    kt, s = attend(q, k, k, once, s, weights)
    vt, p = attend(q, k, v, once, p, weights)
    out, f = attend(q, rounded(kt, k), rounded(vt, v), thrice, f)
    return out, (s, p, f)
