"""Chains of linear attentions with their gradients: forward one kernel, backward the links one after the other.

What one link hands to the next stays on the chip, but the gradients need it: the fused kernel of a call that is
differentiated also writes it, and the states of all links.

A long sequence of few heads is cut into pieces, as `linear_attention.pieces` has it. The fused kernel then walks over
pieces, between a pass that finds where they start in the links that read inputs only, and one that adds what the start
of a piece gives in the last link. All links are cut into the same pieces, forward and backward.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from jaxmix_kernels.decays import CHUNK, ChunkDecays
from jaxmix_kernels.linear_attention.partition import spread
from jaxmix_kernels.linear_attention.pieces import (
    choose_pieces,
    join_pieces,
    last_piece,
    pad_chunks,
    pad_sizes,
    split_decays,
    split_tokens,
    starts_of_pieces,
)
from jaxmix_kernels.linear_attention.primitive import piece_starts, state_heads
from jaxmix_kernels.linear_attention.vjp import known_gradients
from jaxmix_kernels.links import Links
from jaxmix_kernels.target import Target

Array = jax.Array
Decays = dict[int, ChunkDecays | None]
"""Decays by their power."""


def is_fused(
    links: Links, q: Array, k: Array, v: Array, decays: Decays, initials: tuple[Array | None, ...], *, target: Target
) -> bool:
    """Whether a fused kernel serves the forward pass of `chain`: it exists, and takes the sizes."""
    if target.fused(links) is None:
        return False
    try:
        jax.eval_shape(functools.partial(_fused, links, target), q, k, v, decays, initials)
    except NotImplementedError:
        return False
    return True


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chain(
    links: Links, target: Target, q: Array, k: Array, v: Array, decays: Decays, initials: tuple[Array | None, ...]
) -> tuple[Array, tuple[Array, ...]]:
    """The result of the last link and the final states of all, by the fused kernel; where `is_fused`.

    Differentiable in q, k, v, `initials` and the `steps` of decays, as `linear_attention` is.

    Args:
        links: a chain of `jaxmix_kernels.links`.
        target: what the kernels are made for.
        q: queries [B, T, H, D], bfloat16 or float32; all of one dtype.
        k: keys [B, T, Hk, D]. Head h reads head h // (H / Hk), and so on for all head counts, which divide one another.
        v: values [B, T, Hv, E].
        decays: for every power of the links those of ceil(T / 64) chunks; None for no decay and no segments.
        initials: for every link the state before the first token [B, Hs, D, D or E], float32; None for zeros.

    Returns:
        out [B, T, H, E] in the dtype of v, and the final states as `linear_attention` gives them.

    Raises:
        ValueError: head counts do not divide one another.
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
    initials: tuple[Array | None, ...],
    *,
    keep: bool = False,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...], dict[str, Array]]:
    """The result of the last link, the final states of all; with `keep` their states, and the other results.

    States are those of B P pieces.
    """
    length, sizes = q.shape[1], {"k": k.shape[3], "v": v.shape[3]}
    programs = q.shape[0] * q.shape[2] * target.blocks(v.shape[3])
    pieces = choose_pieces(programs, length, target.programs)
    tokens = {name: pad_sizes(x, (3,), pieces * CHUNK) for name, x in {"q": q, "k": k, "v": v}.items()}
    tokens = {name: split_tokens(x, pieces) for name, x in tokens.items()}
    whole = {
        power: None if x is None else dataclasses.replace(pad_chunks(x, pieces), steps=None)
        for power, x in decays.items()
    }
    heads = _state_heads(links, q, k, v, decays, initials)
    starts = [None if x is None else pad_sizes(x, (2, 3)) for x in initials]
    if pieces == 1:
        walk = _walk(links, target, tokens, whole, starts, keep=keep)
    else:
        walk = _walk_pieces(links, target, tokens, whole, starts, heads, pieces, keep=keep)
    finals, states = list(walk.finals), list(walk.states)
    for i, link in enumerate(links):
        sizes[link.result], group = sizes[link.values], q.shape[2] // heads[i]
        finals[i] = finals[i][:, ::group, : sizes["k"], : sizes[link.values]]
        if keep:
            states[i] = states[i][:, ::group]
    out, *results = (join_pieces(x, pieces)[:, :length] for x in (walk.out, *walk.results))
    results = {link.result: x[..., : sizes[link.result]] for link, x in zip(links, results, strict=False)}
    return out[..., : sizes["v"]], tuple(finals), tuple(states), results


class _Walk(NamedTuple):
    """What the fused kernel gives for all H heads; `states` and `results` are those that gradients need."""

    out: Array
    finals: tuple[Array, ...]
    states: tuple[Array, ...]
    results: tuple[Array, ...]


def _walk(
    links: Links, target: Target, tokens: dict[str, Array], decays: Decays, starts: list[Any], *, keep: bool
) -> _Walk:
    """The fused kernel, over sequences or pieces."""
    kernel = target.fused(links)
    assert kernel is not None
    # The GPU kernel takes the powers of decays itself.
    given = [x for power, x in sorted(decays.items()) if power == 1 or target.platform == "tpu"]

    def run(*arrays: Any) -> tuple[Array, ...]:
        return kernel(*arrays, interpret=target.interpret, keep=keep)

    count = len(links)
    axes = (2,) * 3 + (1,) * (len(given) + count)
    results = (2,) + (1,) * count + ((1,) * count + (2,) * (count - 1) if keep else ())
    out, *rest = spread(run, (*tokens.values(), *given, *starts), axes, results, splits=target.splits)
    return _Walk(out, tuple(rest[:count]), tuple(rest[count : 2 * count]), tuple(rest[2 * count :]))


def _walk_pieces(
    links: Links,
    target: Target,
    tokens: dict[str, Array],
    decays: Decays,
    initials: list[Array | None],
    heads: list[int],
    pieces: int,
    *,
    keep: bool,
) -> _Walk:
    """`_walk` of tokens of B P pieces, with decays and initial states of the whole sequences.

    All links but the last read inputs, so that a first pass over these finds where their pieces start, for as many
    heads as have a state of their own. The last one reads what they give, and starts from zeros: what its pieces add is
    known then, with it where they start, and that is added afterwards, as a linear attention is linear in its state.
    States are those of pieces, final states those of the sequences.
    """
    starts: list[Any] = [
        piece_starts(target, tokens[link.keys], tokens[link.values], decays[link.power], initial, count, pieces)
        for link, initial, count in zip(links[:-1], initials, heads, strict=False)
    ]
    cut = {power: split_decays(x, pieces) for power, x in decays.items()}
    walk = _walk(links, target, tokens, cut, [*starts, None], keep=keep)
    last, decayed = links[-1], cut[links[-1].power]
    start, final = starts_of_pieces(decays[last.power], walk.finals[-1], initials[-1], pieces)
    edges = (None, None) if decayed is None else (decayed.enter, decayed.kept)
    arrays = tokens["q"], walk.out, start, *edges, walk.states[-1] if keep else None
    out, *states = spread(target.add_starts, arrays, (2, 2, 1, 1, 1, 1), (2, 1)[: 1 + keep], splits=target.splits)
    finals = *(last_piece(x, pieces) for x in walk.finals[:-1]), final
    return _Walk(out, finals, (*walk.states[:-1], *states), walk.results)


def _state_heads(
    links: Links, q: Array, k: Array, v: Array, decays: Decays, initials: tuple[Array | None, ...]
) -> list[int]:
    """How many heads have a state of their own, for every link."""
    counts, found = {"k": k.shape[2], "v": v.shape[2]}, []
    for link, initial in zip(links, initials, strict=True):
        found.append(state_heads(counts[link.keys], counts[link.values], decays[link.power], initial))
        counts[link.result] = q.shape[2]
    return found
