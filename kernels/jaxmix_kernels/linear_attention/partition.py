"""How arrays of a kernel are split over devices: batches and heads, each device by itself.

Under plain `jax.jit` a compiler that meets a kernel does not know that sequences and heads are independent, and refuses
to split it. The rule here says so. On one device and inside `jax.shard_map` it has no part, and TPUs do not know such
rules.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmix_kernels.decays import ChunkDecays

Array = jax.Array

Axes = tuple[int, ...]
"""The axis that counts heads, one for each array, or tree of arrays, of a tuple; in `ChunkDecays` it is 1."""


def spread(
    kernel: Callable[..., tuple[Any, ...]], arrays: tuple[Any, ...], axes: Axes, results: Axes, *, splits: bool
) -> Any:
    """`kernel(*arrays)`; under `jax.vmap` the new axis joins the batch, and devices share batch and heads.

    Args:
        kernel: a function of the arrays, all of which count the batch in front, as its results do.
        arrays: its arguments, None for those that are not there.
        axes: those of the arguments; read only if `splits`.
        results: those of the results; read only if `splits`.
        splits: whether a compiler may split the kernel under plain `jax.jit`.
    """

    @custom_vmap
    def call(*arrays: Any) -> Any:
        return partitioned(kernel, arrays, axes, results) if splits else kernel(*arrays)

    @call.def_vmap
    def _(size: int, batched: Any, *arrays: Any) -> tuple[Any, Any]:
        def fold(x: Array, has_axis: bool) -> Array:
            x = x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        result = call(*jax.tree.map(fold, arrays, tuple(batched)))
        unfolded = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), result)
        return unfolded, jax.tree.map(lambda _: True, unfolded)

    return call(*arrays)


def partitioned(
    kernel: Callable[..., tuple[Any, ...]], arrays: tuple[Any, ...], axes: Axes, results: Axes
) -> tuple[Any, ...]:
    """`kernel(*arrays)`, split over devices along batch and heads.

    Heads are split where every array has H heads, or G, or one, for one G > 1, and over numbers of devices that divide
    G: a device then has whole groups.

    Args:
        kernel: a function of the arrays.
        arrays: its arguments, None for those that are not there.
        axes: those of the arguments.
        results: those of the results.
    """
    leaves, structure = jax.tree.flatten(arrays)
    result = jax.eval_shape(kernel, *arrays)
    shapes, result_structure = jax.tree.flatten(result)
    head_axes, result_axes = _mark(arrays, axes), _mark(result, results)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(kernel(*jax.tree.unflatten(structure, leaves)))

    counts = {x.shape[axis] for x, axis in zip(leaves + shapes, head_axes + result_axes, strict=True) if axis} - {1}
    groups, heads = (min(counts), max(counts)) if counts and len(counts) <= 2 else (0, 0)
    fixed: list[str] = []

    def factors(x: Any, axis: int) -> str:
        names = []
        for i, size in enumerate(x.shape):
            if i == 0:
                names.append("b")
            elif i == axis and size in (groups, heads):
                names.append("g" if size == groups else "(g r)")
            else:
                fixed.append(f"i{len(fixed)}")
                names.append(fixed[-1])
        return " ".join(names)

    rule = ", ".join(map(factors, leaves, head_axes)) + " -> " + ", ".join(map(factors, shapes, result_axes))

    def partition(mesh: Mesh, arguments: Any, results: Any) -> tuple[Any, ...]:
        def devices(names: Any) -> int:
            names = names if isinstance(names, tuple) else (names,)
            return math.prod(mesh.shape[name] for name in names if name is not None)

        batch = split = None
        for x, axis in zip(arguments, head_axes, strict=True):
            spec = (*x.sharding.spec, *[None] * len(x.shape))
            batch = batch or (spec[0] if x.shape[0] % devices(spec[0]) == 0 else None)
            if axis and x.shape[axis] in (groups, heads):
                split = split or (spec[axis] if groups % devices(spec[axis]) == 0 else None)

        def place(x: Any, axis: int) -> NamedSharding:
            spec = [batch, *[None] * (len(x.shape) - 1)]
            if axis and x.shape[axis] in (groups, heads):
                spec[axis] = split
            return NamedSharding(mesh, PartitionSpec(*spec))

        return mesh, flat, list(map(place, results, result_axes)), tuple(map(place, arguments, head_axes))

    call = custom_partitioning(flat)
    order = re.findall(r"\w+", rule)
    sizes: dict[str, Any] = {"r": heads // groups} if "r" in order else {}
    unsplit = tuple(sorted({*fixed, *sizes}, key=order.index))
    call.def_partition(partition, sharding_rule=rule, need_replication_factors=unsplit, **sizes)
    return jax.tree.unflatten(result_structure, call(*leaves))


def _mark(arrays: tuple[Any, ...], axes: Axes) -> list[int]:
    """The axis that counts heads, of every leaf; 0 where there is none."""

    def mark(x: Any, axis: int) -> Any:
        marked = jax.tree.map(lambda _: axis, x)
        if isinstance(x, ChunkDecays):
            marked = dataclasses.replace(marked, run=None if x.run is None else 0)
        return marked

    return jax.tree.leaves([mark(x, axis) for x, axis in zip(arrays, axes, strict=True)])
