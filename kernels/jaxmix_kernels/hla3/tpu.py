"""HLA3 forward (exact mask) on a TPU in one kernel: the effective keys and values never leave VMEM."""

from typing import Any

from jaxmix_kernels.decays import Array, ChunkDecays
from jaxmix_kernels.links import HLA3 as LINKS
from jaxmix_kernels.tpu_chain import chain_forward


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
    keep: bool = False,
    interpret: Any = False,
) -> tuple[Array, ...]:
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
        keep: asks for what the gradients need as well.
        interpret: as of `pl.pallas_call`.

    Returns:
        out [B, T, H, E] in the dtype of v, and the final S [B, H, D, D], P and F [B, H, D, E], float32; with `keep`
        states and results for the gradients, as of `chain_forward`.

    Raises:
        NotImplementedError: for dtypes, head sizes or lengths without a kernel.
    """
    out, finals, kept = chain_forward(
        "hla3", LINKS, q, k, v, {1: decays, 3: cubed}, (initial_s, initial_p, initial_f), keep=keep, interpret=interpret
    )
    return out, *finals, *kept
