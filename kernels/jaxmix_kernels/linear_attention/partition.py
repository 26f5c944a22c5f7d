"""How arrays of the primitive are split over devices: batches and heads, each device by itself.

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
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmix_kernels.decays import Result


def partitioned(primitive: Callable[..., Result], arrays: tuple[Any, ...]) -> Result:
    """`primitive(*arrays)`, split over devices along batch and heads.

    Heads are split where every array has H heads, or G, or one, for one G > 1, and over numbers of devices that divide
    G: a device then has whole groups.

    Args:
        primitive: a function of the arrays.
        arrays: a, b, c, decays, initial and weights of the primitive, None for those that are not there.
    """
    leaves, structure = jax.tree.flatten(arrays)
    shapes, result_structure = jax.tree.flatten(jax.eval_shape(primitive, *arrays))
    head_axes, result_axes = _head_axes(arrays, result_structure)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(primitive(*jax.tree.unflatten(structure, leaves)))

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


def _head_axes(arrays: tuple[Any, ...], results: Any) -> tuple[list[int], list[int]]:
    """The axis that counts heads, of every array and of every result; 0 where there is none."""
    a, b, c, decays, initial, weights = arrays

    def mark(x: Any, axis: int) -> Any:
        return jax.tree.map(lambda _: axis, x)

    of_decays = mark(decays, 1)
    if decays is not None:
        of_decays = dataclasses.replace(of_decays, run=mark(decays.run, 0))
    marked = mark((a, b, c), 2), of_decays, mark(initial, 1), mark(weights, 2)
    given = jax.tree.unflatten(results, range(results.num_leaves))
    return jax.tree.leaves(marked), jax.tree.leaves((mark(given.out, 2), mark(given.final, 1), mark(given.dots, 1)))
