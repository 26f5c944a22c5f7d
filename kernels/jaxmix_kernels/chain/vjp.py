"""Chains of linear attentions with their gradients: forward one kernel, backward the links one after the other.

What one link hands to the next stays on the chip, but the gradients need it: the fused kernel of a call that is
differentiated also writes it, and the states of all links.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxmix_kernels.decays import CHUNK, ChunkDecays
from jaxmix_kernels.linear_attention.partition import spread
from jaxmix_kernels.linear_attention.pieces import choose_pieces, pad_sizes
from jaxmix_kernels.linear_attention.vjp import known_gradients
from jaxmix_kernels.links import AHLA, HLA2, HLA3, Links
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
    out, finals, _, _ = _fused(links, target, q, k, v, decays, initials)
    return out, finals


def _forward(links: Links, target: Target, *arrays: Any) -> tuple[Any, Any]:
    out, finals, states, results = _fused(links, target, *arrays, keep=True)
    return (out, finals), (arrays, states, results)


def _backward(links: Links, target: Target, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    (q, k, v, decays, initials), states, results = residuals
    d_out, d_finals = cotangents
    values = {"k": k, "v": v} | results
    found: dict[str, Any] = {"q": None, links[-1].result: d_out}
    d_steps: dict[int, Any] = {}
    d_initials = []
    for link, initial, kept, d_final in reversed(list(zip(links, initials, states, d_finals, strict=True))):
        result = known_gradients(
            q,
            values[link.keys],
            None if link.keys == link.values else values[link.values],
            decays[link.power],
            initial,
            kept,
            found.pop(link.result),
            d_final,
            more_dq=found["q"],
            more_dk=found.get(link.keys),
            target=target,
        )
        found |= {"q": result.q, link.keys: result.k}
        if result.v is not None:
            found[link.values] = _add(found.get(link.values), result.v)
        d_steps[link.power] = _add(d_steps.get(link.power), result.steps)
        d_initials.append(result.initial)
    constant: dict[str, Any] = dict.fromkeys(("high", "low", "enter", "leave", "kept", "run"))
    d_decays = {power: None if x is None else ChunkDecays(**constant, steps=x) for power, x in d_steps.items()}
    return found["q"], found["k"], found["v"], d_decays, tuple(reversed(d_initials))


def _add(x: Array | None, y: Array | None) -> Array | None:
    return y if x is None else x if y is None else x + y


chain.defvjp(_forward, _backward)


def _fused(
    links: Links,
    target: Target,
    q: Array,
    k: Array,
    v: Array,
    decays: Decays,
    initials: tuple[Array, ...],
    *,
    keep: bool = False,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...], dict[str, Array]]:
    """The result of the last link, the final states of all; with `keep` their states, and the other results."""
    length, heads, sizes = q.shape[1], q.shape[2], {"k": k.shape[3], "v": v.shape[3]}
    counts = {"k": k.shape[2], "v": v.shape[2]}
    kernel = _kernel(links, target)
    assert kernel is not None
    padded = tuple(pad_sizes(x, (3,), CHUNK) for x in (q, k, v))
    # The GPU kernel takes the powers of decays itself.
    given = [x for power, x in sorted(decays.items()) if power == 1 or target.platform == "tpu"]
    given = [None if x is None else dataclasses.replace(x, steps=None) for x in given]
    starts = [pad_sizes(x, (2, 3)) for x in initials]

    def run(*arrays: Any) -> tuple[Array, ...]:
        return kernel(*arrays, interpret=target.interpret, keep=keep)

    count = len(links)
    axes = (2,) * 3 + (1,) * (len(given) + count)
    results = (2,) + (1,) * count + ((1,) * count + (2,) * (count - 1) if keep else ())
    out, *rest = spread(run, (*padded, *given, *starts), axes, results, splits=target.splits)
    finals, states, outs = rest[:count], rest[count : 2 * count], rest[2 * count :]
    for i, (link, initial) in enumerate(zip(links, initials, strict=True)):
        sizes[link.result], counts[link.result] = sizes[link.values], heads
        decayed = decays[link.power]
        kept = max(
            counts[link.keys], counts[link.values], initial.shape[1], 1 if decayed is None else decayed.kept.shape[1]
        )
        group = heads // kept
        finals[i] = finals[i][:, ::group, : sizes["k"], : sizes[link.values]]
        if keep:
            states[i] = states[i][:, ::group]
    kept = {link.result: x[:, :length, :, : sizes[link.result]] for link, x in zip(links, outs, strict=False)}
    return out[:, :length, :, : sizes["v"]], tuple(finals), tuple(states), kept


def _kernel(links: Links, target: Target) -> Callable[..., tuple[Array, ...]] | None:
    """The fused kernel: a function of q, k, v, decays (on a TPU those of every power), and initial states."""
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
