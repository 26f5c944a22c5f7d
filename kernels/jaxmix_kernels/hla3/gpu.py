"""Third-order higher-order linear attention on Hopper: all three linear attentions in one kernel, or two of them."""

from typing import Any

from jaxmix_kernels.decays import Array, ChunkDecays
from jaxmix_kernels.gpu_chain import chain_forward
from jaxmix_kernels.links import HLA3 as LINKS
from jaxmix_kernels.links import HLA3_TAIL as TAIL

_KEY_SIZE = 64


def hla3_forward(
    q: Array,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    initial_s: Array | None,
    initial_p: Array | None,
    initial_f: Array | None,
    *,
    keep: bool = False,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """LA(q, kt, vt; a^3) with kt = LA(q, k, k; a) and vt = LA(q, k, v; a), rounded to the dtype of v as operands.

    Args:
        q: queries [B, T, H, D], bfloat16, D = 64; T is a multiple of 64.
        k: keys [B, T, Hk, D]; head h reads head h // (H / Hk), as for all head counts.
        v: values [B, T, Hv, E], E in {32, 64, 128}.
        decays: chunk decays of a, whose third power the kernel takes, and segments; None for neither.
        initial_s: S before the first chunk, [B, Hs, D, D], float32; None for zeros.
        initial_p: P before the first chunk, [B, Hs, D, E], float32; None for zeros.
        initial_f: F before the first chunk, likewise.
        keep: asks for what the gradients need as well.
        interpret: True, or `plgpu.InterpretGPUParams(...)`, runs on a CPU, for tests.

    Returns:
        out [B, T, H, E] in the dtype of v, S [B, H, D, D], P and F [B, H, D, E] after the last chunk, float32; with
        `keep` states and results for the gradients, as of `chain_forward`.

    Raises:
        NotImplementedError: the kernel does not take these dtypes or sizes; D is 64 only,
            for larger keys leave too few registers and too little shared memory.
    """
    if k.shape[3] != _KEY_SIZE:
        raise NotImplementedError(f"the fused kernel of HLA3 takes keys of size {_KEY_SIZE}, got {k.shape[3]}")
    initials = initial_s, initial_p, initial_f
    out, finals, kept = chain_forward(LINKS, q, k, v, decays, initials, keep=keep, interpret=interpret)
    return out, *finals, *kept


def hla3_tail_forward(
    q: Array,
    k: Array,
    vt: Array,
    decays: ChunkDecays | None,
    initial_s: Array | None,
    initial_f: Array | None,
    *,
    keep: bool = False,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """LA(q, kt, vt; a^3) with kt = LA(q, k, k; a), where vt is there already: what keys of size 128 leave room for.

    Args:
        q: queries [B, T, H, D], bfloat16, D in {64, 128}; T is a multiple of 64.
        k: keys [B, T, Hk, D]; head h reads head h // (H / Hk), as for all head counts.
        vt: LA(q, k, v; a), [B, T, H, E], E in {32, 64, 128}.
        decays: as of `hla3_forward`, like what follows.
        initial_s: S before the first chunk.
        initial_f: F before the first chunk.
        keep: asks for what the gradients need as well.
        interpret: runs on a CPU, for tests.

    Returns:
        out, S and F as `hla3_forward` gives them; with `keep` states and results of both links.

    Raises:
        NotImplementedError: the kernel does not take these dtypes or sizes.
    """
    initials = initial_s, initial_f
    out, finals, kept = chain_forward(TAIL, q, k, vt, decays, initials, keep=keep, interpret=interpret)
    return out, *finals, *kept
