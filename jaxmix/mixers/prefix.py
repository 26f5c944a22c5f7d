"""Associative scans over segment summaries, across chunks (or tokens) and across devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, expand_to
from jaxmix.parallel.collectives import gather_axis

Combine = Callable[[Any, Any], Any]


def decayed_sum(a: tuple[Array, Any], b: tuple[Array, Any]) -> tuple[Array, Any]:
    """The first-order operator: summaries (rho, X) compose to (rho_a rho_b, rho_b X_a + X_b), leaf by leaf of X."""
    (rho_a, x_a), (rho_b, x_b) = a, b
    return rho_a * rho_b, jax.tree.map(lambda xa, xb: expand_to(rho_b, xb.ndim) * xa + xb, x_a, x_b)


def segmented(combine: Combine) -> Combine:
    """Lift an associative operator to pairs (reset, summary), reset bool: what starts anew forgets all before it.

    The lifted operator is associative whenever `combine` is. The reset is structural: where `b` holds a reset the
    result is b's summary itself, not a product with zero.
    """

    def lifted(a: tuple[Array, Any], b: tuple[Array, Any]) -> tuple[Array, Any]:
        (reset_a, summary_a), (reset_b, summary_b) = a, b
        merged = jax.tree.map(
            lambda m, later: jnp.where(expand_to(reset_b, m.ndim), later, m),
            combine(summary_a, summary_b),
            summary_b,
        )
        return reset_a | reset_b, merged

    return lifted


def prefix_scan(
    combine: Combine, summaries: Any, resets: Array | None, initial: Any, sequence_axis: str | None
) -> tuple[Any, Any, Any]:
    """All prefixes of `summaries` along axis 1, continued from `initial` and from the devices before this one.

    Args:
        combine: associative operator on summaries, earlier argument first.
        summaries: pytree of arrays [B, N, ...].
        resets: bool [B, N], True where a summary holds the start of a new segment; None for no segments.
        initial: summary of all that came before, arrays [B, 1, ...]; the operator's identity for nothing.
        sequence_axis: shard_map axis over which N is split, or None.

    Returns:
        What came before the first summary here [B, 1, ...]; the inclusive prefixes [B, N, ...]; and the summary of
        everything [B, 1, ...], which is the same on all devices.
    """
    if resets is not None:
        combine, summaries = segmented(combine), (resets, summaries)
        initial = (jnp.zeros((resets.shape[0], 1), jnp.bool_), initial)
    if sequence_axis is None:
        # What came before joins the first summary, which costs less than joining every prefix.
        first = combine(initial, jax.tree.map(lambda x: x[:, :1], summaries))
        summaries = jax.tree.map(lambda x, rest: jnp.concatenate([x, rest[:, 1:]], axis=1), first, summaries)
        prefixes = jax.lax.associative_scan(combine, summaries, axis=1)
        before, total = initial, _last(prefixes)
    else:
        prefixes = jax.lax.associative_scan(combine, summaries, axis=1)
        pieces = gather_axis(_last(prefixes), sequence_axis)
        pieces = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), initial, pieces)
        composed = jax.lax.associative_scan(combine, pieces)
        before = jax.tree.map(lambda x: x[jax.lax.axis_index(sequence_axis)], composed)
        prefixes = combine(before, prefixes)
        total = jax.tree.map(lambda x: x[-1], composed)
    return (before, prefixes, total) if resets is None else (before[1], prefixes[1], total[1])


def _last(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[:, -1:], tree)
