"""Second-order higher-order linear attention on Hopper: two chained linear attentions in one kernel."""

from typing import Any

from jaxmix_kernels.decays import Array, ChunkDecays
from jaxmix_kernels.gpu_chain import chain_forward
from jaxmix_kernels.links import HLA2 as LINKS


def hla2_forward(
    q: Array,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    initial_s: Array | None,
    initial_f: Array | None,
    *,
    keep: bool = False,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """LA(q, kt, v; a^2) with kt = LA(q, k, k; a), which is rounded to the dtype of k as an operand.

    Args:
        q: queries [B, T, H, D], bfloat16, D in {64, 128}; T is a multiple of 64.
        k: keys [B, T, Hk, D]; head h reads head h // (H / Hk), as for all head counts.
        v: values [B, T, Hv, E], E in {32, 64, 128}.
        decays: chunk decays of a, which the kernel squares, and segments; None for neither.
        initial_s: S before the first chunk, [B, Hs, D, D], float32; None for zeros.
        initial_f: F before the first chunk, [B, Hs, D, E], float32; None for zeros.
        keep: asks for what the gradients need as well.
        interpret: True, or `plgpu.InterpretGPUParams(...)`, runs on a CPU, for tests.

    Returns:
        out [B, T, H, E] in the dtype of v, S [B, H, D, D] and F [B, H, D, E] after the last chunk, float32; with
        `keep` states and results for the gradients, as of `chain_forward`.

    Raises:
        NotImplementedError: the kernel does not take these dtypes or sizes.
    """
    out, finals, kept = chain_forward(LINKS, q, k, v, decays, (initial_s, initial_f), keep=keep, interpret=interpret)
    return out, *finals, *kept
