"""AHLA forward on a TPU in one kernel: the effective values never leave VMEM."""

from typing import Any

from jaxmix_kernels.decays import Array, ChunkDecays
from jaxmix_kernels.links import AHLA as LINKS
from jaxmix_kernels.tpu_chain import chain_forward


def ahla_forward(
    q: Array,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    initial_p: Array | None,
    initial_e: Array | None,
    *,
    keep: bool = False,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """LA(q, k, vt; a) with vt = LA(q, k, v; a), which is rounded to the dtype of v as an operand.

    Args:
        q: queries, [B, T, H, D], bfloat16 or float32; all of one dtype. T is a multiple of the chunk length.
        k: keys, [B, T, Hk, D]; head h reads head h // (H / Hk), and so on for all head counts, which divide H.
        v: values, [B, T, Hv, E].
        decays: those of a; None for no decay and no segments.
        initial_p: P = sum c(s, T) k_s v_s^T before the first token, [B, Hp, D, E], float32; None for zeros.
        initial_e: E = sum c(s, T) k_s vt_s^T likewise, [B, He, D, E].
        keep: asks for what the gradients need as well.
        interpret: as of `pl.pallas_call`.

    Returns:
        out [B, T, H, E] in the dtype of v, and the final P and E [B, H, D, E], float32; with `keep`
        states and results for the gradients, as of `chain_forward`.

    Raises:
        NotImplementedError: for dtypes, head sizes or lengths without a kernel.
    """
    out, finals, kept = chain_forward(
        "ahla", LINKS, q, k, v, {1: decays}, (initial_p, initial_e), keep=keep, interpret=interpret
    )
    return out, *finals, *kept
