"""HLA2 forward on a TPU in one kernel: the effective keys never leave VMEM."""

from typing import Any

from jaxmix_kernels.decays import Array, ChunkDecays
from jaxmix_kernels.links import HLA2 as LINKS
from jaxmix_kernels.tpu_chain import chain_forward


def hla2_forward(
    q: Array,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    squared: ChunkDecays | None,
    initial_s: Array | None,
    initial_f: Array | None,
    *,
    keep: bool = False,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """LA(q, kt, v; a^2) with kt = LA(q, k, k; a), which is rounded to the dtype of k as an operand.

    Args:
        q: queries, [B, T, H, D], bfloat16 or float32; all of one dtype. T is a multiple of the chunk length.
        k: keys, [B, T, Hk, D]; head h reads head h // (H / Hk), and so on for all head counts, which divide H.
        v: values, [B, T, Hv, E].
        decays: those of a; None for no decay and no segments.
        squared: those of a^2.
        initial_s: S = sum c(s, T) k_s k_s^T before the first token, [B, Hs, D, D], float32; None for zeros.
        initial_f: F = sum c(s, T)^2 kt_s v_s^T likewise, [B, Hf, D, E].
        keep: asks for what the gradients need as well.
        interpret: as of `pl.pallas_call`.

    Returns:
        out [B, T, H, E] in the dtype of v, and the final S [B, H, D, D] and F [B, H, D, E], float32; with `keep`
        states and results for the gradients, as of `chain_forward`.

    Raises:
        NotImplementedError: for dtypes, head sizes or lengths without a kernel.
    """
    out, finals, kept = chain_forward(
        "hla2", LINKS, q, k, v, {1: decays, 2: squared}, (initial_s, initial_f), keep=keep, interpret=interpret
    )
    return out, *finals, *kept
