"""Chains of linear attentions with their gradients: forward one kernel, backward the links one after the other.

The fused kernel keeps what one link hands to the next on the chip. The gradients need it: backward all links but the
last are computed again, each by a kernel of its own, and of the last its states where the target keeps them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxmix_kernels.decays import CHUNK, ChunkDecays
from jaxmix_kernels.linear_attention.partition import spread
from jaxmix_kernels.linear_attention.pieces import choose_pieces, pad_sizes
from jaxmix_kernels.linear_attention.vjp import linear_attention, recalled
from jaxmix_kernels.links import AHLA, HLA2, HLA3, Link, Links, follow
from jaxmix_kernels.target import Target

Array = jax.Array
Decays = dict[int, ChunkDecays | None]
"""Decays by their power."""


def is_fused(
    links: Links, q: Array, k: Array, v: Array, decays: Decays, initials: tuple[Array, ...], *, target: Target
) -> bool:
    """Whether one kernel serves the forward pass of `chain`: it exists, takes the sizes, and no time is cut."""
    programs = q.shape[0] * q.shape[2] * target.blocks(v.shape[3])
    if _kernel(links, target) is None or choose_pieces(programs, q.shape[1], target.programs) > 1:
        return False
    try:
        jax.eval_shape(functools.partial(_fused, links, target), q, k, v, decays, initials)
    except NotImplementedError:
        return False
    return True


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chain(
    links: Links, target: Target, q: Array, k: Array, v: Array, decays: Decays, initials: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    """The result of the last link and the final states of all, by one kernel; where `is_fused`.

    Differentiable in q, k, v, `initials` and the `steps` of decays, as `linear_attention` is.

    Args:
        links: HLA2, AHLA or HLA3 of `jaxmix_kernels.links`.
        target: what the kernels are made for.
        q: queries [B, T, H, D], bfloat16 or float32; all of one dtype.
        k: keys [B, T, Hk, D]. Head h reads head h // (H / Hk), and so on for all head counts, which divide H.
        v: values [B, T, Hv, E].
        decays: for every power of the links those of ceil(T / 64) chunks; None for no decay and no segments.
        initials: for every link the state before the first token [B, Hs, D, D or E], float32.

    Returns:
        out [B, T, H, E] in the dtype of v, and the final states as `linear_attention` gives them.
    """
    return _fused(links, target, q, k, v, decays, initials)


def _forward(links: Links, target: Target, *arrays: Any) -> tuple[Any, Any]:
    out, finals = _fused(links, target, *arrays)
    return (out, finals), (arrays, finals[-1])


def _backward(links: Links, target: Target, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    arrays, last = residuals

    def composition(q: Array, k: Array, v: Array, decays: Decays, initials: tuple[Array, ...]) -> Any:
        def attend(link: Link, keys: Array, values: Array, initial: Array) -> tuple[Array, Array]:
            arguments = q, keys, values, decays[link.power], initial
            if link is links[-1]:
                return recalled(*arguments, last, target=target)
            return linear_attention(*arguments, target=target)

        return follow(links, k, v, initials, attend)

    return jax.vjp(composition, *arrays)[1](cotangents)


chain.defvjp(_forward, _backward)


def _fused(
    links: Links, target: Target, q: Array, k: Array, v: Array, decays: Decays, initials: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    length, heads, sizes = q.shape[1], q.shape[2], {"k": k.shape[3], "v": v.shape[3]}
    counts = {"k": k.shape[2], "v": v.shape[2]}
    kernel = _kernel(links, target)
    assert kernel is not None
    padded = tuple(pad_sizes(x, (3,), CHUNK) for x in (q, k, v))
    # The GPU kernel takes the powers of decays itself.
    given = [x if power == 1 or target.platform == "tpu" else None for power, x in sorted(decays.items())]
    given = [None if x is None else dataclasses.replace(x, steps=None) for x in given]
    starts = [pad_sizes(x, (2, 3)) for x in initials]

    def run(*arrays: Any) -> tuple[Array, ...]:
        return kernel(*arrays, interpret=target.interpret)

    axes = (2,) * 3 + (1,) * (len(given) + len(starts))
    results = (2,) + (1,) * len(starts)
    out, *states = spread(run, (*padded, *given, *starts), axes, results, splits=target.splits)
    finals = []
    for link, initial, state in zip(links, initials, states, strict=True):
        sizes[link.result], counts[link.result] = sizes[link.values], heads
        decayed = decays[link.power]
        kept = max(
            counts[link.keys], counts[link.values], initial.shape[1], 1 if decayed is None else decayed.kept.shape[1]
        )
        finals.append(state[:, :: heads // kept, : sizes["k"], : sizes[link.values]])
    return out[:, :length, :, : sizes["v"]], tuple(finals)


def _kernel(links: Links, target: Target) -> Callable[..., tuple[Array, ...]] | None:
    """The fused kernel: a function of q, k, v, decays by their power, and initial states."""
    if target.platform == "gpu":
        from jaxmix_kernels.ahla.gpu import ahla_forward
        from jaxmix_kernels.hla2.gpu import hla2_forward
        from jaxmix_kernels.hla3.gpu import hla3_forward
    elif target.platform == "tpu":
        from jaxmix_kernels.ahla.tpu import ahla_forward
        from jaxmix_kernels.hla2.tpu import hla2_forward
        from jaxmix_kernels.hla3.tpu import hla3_forward
    else:
        return None
    return {HLA2: hla2_forward, AHLA: ahla_forward, HLA3: hla3_forward}.get(links)
