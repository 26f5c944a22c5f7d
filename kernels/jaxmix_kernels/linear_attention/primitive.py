"""Decayed linear attention of a target, over `jax.vmap` and several devices, and the states that pieces start from."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix_kernels.decays import BackwardArguments, BackwardResult, ChunkDecays, Result
from jaxmix_kernels.linear_attention.partition import spread
from jaxmix_kernels.linear_attention.pieces import split_decays, starts_of_pieces
from jaxmix_kernels.target import Target

Array = jax.Array


def attend(
    target: Target,
    a: Array | None,
    b: Array,
    c: Array,
    decays: ChunkDecays | None,
    initial: Array | None,
    **options: bool,
) -> Result:
    """`target.decayed_attention`."""
    kernel = functools.partial(target.decayed_attention, **options)
    return spread(kernel, (a, b, c, decays, initial), (2, 2, 2, 1, 1), (2, 1, 1), splits=target.splits)


def gradients(target: Target, arguments: BackwardArguments) -> BackwardResult:
    """`target.decayed_attention_backward`."""

    def kernel(*arrays: Any) -> BackwardResult:
        return target.decayed_attention_backward(BackwardArguments(*arrays))

    return spread(kernel, arguments, (2, 2, 2, 2, 1, 1, 1, 2, 2), (2, 2, 2, 1, 1), splits=target.splits)


def piece_starts(
    target: Target, k: Array, v: Array, decays: ChunkDecays | None, initial: Array | None, heads: int, pieces: int
) -> Array | None:
    """The state at the start of every piece, [B P, H, D, E]; `initial` itself for one piece.

    Args:
        target: what the kernels are made for.
        k: keys of B P pieces, [B P, T / P, Hk, D].
        v: values, likewise.
        decays: of the whole sequences.
        initial: the state before the first token, [B, Hs, D, E]; None for zeros.
        heads: H.
        pieces: P.
    """
    if pieces == 1:
        return initial
    added = attend(target, None, repeat_heads(k, heads), v, split_decays(decays, pieces), None, outputs=False).final
    return starts_of_pieces(decays, added, initial, pieces)[0]


def piece_ends(
    target: Target, q: Array, d_out: Array, decays: ChunkDecays | None, d_final: Array, pieces: int
) -> Array:
    """The gradient of the state at the end of every piece, [B P, H, D, E]; `d_final` itself for one piece.

    Args:
        target: what the kernels are made for.
        q: queries of B P pieces, [B P, T / P, H, D].
        d_out: gradients of outputs, likewise.
        decays: of the whole sequences.
        d_final: gradient of the state after the last token, [B, Hf, D, E].
        pieces: P.
    """
    if pieces == 1:
        return d_final
    cut = split_decays(decays, pieces)
    added = attend(target, None, q, d_out, cut, None, reverse=True, outputs=False).final
    return starts_of_pieces(decays, added, d_final, pieces, reverse=True)[0]


def state_heads(key_heads: int, value_heads: int, decays: ChunkDecays | None, initial: Array | None) -> int:
    """How many heads have a state of their own: the largest of the head counts of what a state is made of.

    Args:
        key_heads: Hk.
        value_heads: Hv.
        decays: those of Hd heads; None for neither decay nor segments.
        initial: the state before the first token, [B, Hs, D, E]; None for zeros.

    Raises:
        ValueError: a count does not divide a larger one, so that heads would share neither all nor nothing.
    """
    others = (None if decays is None else decays.kept), initial
    counts = key_heads, value_heads, *(x.shape[1] for x in others if x is not None)
    ordered = sorted(counts)
    for few, more in itertools.pairwise(ordered):
        if more % few:
            raise ValueError(f"head counts of keys, values, decays and states must divide one another, got {counts}")
    return ordered[-1]


def repeat_heads(x: Array, heads: int) -> Array:
    """x [B, T, H', D] with every head repeated so that there are `heads`."""
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)
