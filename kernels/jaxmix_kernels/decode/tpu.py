"""One token on a TPU: the states of some groups of heads at a time pass through VMEM, in place."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxmix_kernels.decode.steps import OPERATORS, Vector

Array = jax.Array

_MOST_GROUPS = 8
"""Groups of one grid step; a step has a fixed cost."""
_VMEM_BYTES = 8 * 2**20
"""What the states of a grid step may take, before and after, double-buffered."""
_ROWS, _COLUMNS = 8, 128
"""A float32 tile."""


def decode(
    name: str,
    q: Array,
    k: Array,
    v: Array,
    decay: Array | None,
    states: tuple[Array, ...],
    *,
    interpret: Any = False,
    **options: Any,
) -> tuple[Array, Array, tuple[Array, ...]]:
    """One token; arguments and results are those of `jaxmix_kernels.decode.call.decode`, states [B, G, R or 1, ...]."""
    operator = OPERATORS[name]
    batch, groups, heads, key_size = q.shape
    value_size, count = v.shape[2], batch * groups

    def rows(x: Array) -> Array:
        """[B, Gk, D] as float32 [B G, 1, D]."""
        x = x if x.shape[1] == groups else jnp.repeat(x, groups // x.shape[1], axis=1)
        return x.astype(jnp.float32).reshape(count, 1, x.shape[2])

    inputs = {"q": q.astype(jnp.float32).reshape(count, heads, key_size), "k": rows(k), "v": rows(v)}
    if decay is not None:
        inputs["decay"] = decay.reshape(count, 1, 1)
    merged = {n: x.reshape(count, *x.shape[2:]) for n, x in zip(operator.fields, states, strict=True)}
    outputs = {
        n: jax.ShapeDtypeStruct((count, heads, width), jnp.float32)
        for n, width in (("numerator", value_size), ("denominator", 1))
    }
    size = _groups_of_a_step(count, sum(_padded_bytes(x) for x in states) // count)

    def block(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((size, *x.shape[1:]), lambda i: (i, *[0] * (len(x.shape) - 1)))

    def kernel(*refs: Any) -> None:
        before = dict(zip((*inputs, *merged), refs[: len(inputs) + len(merged)], strict=True))
        after = dict(zip((*outputs, *merged), refs[len(before) :], strict=True))

        @pl.loop(0, size)
        def _(group: Any) -> None:
            operator.step(_Tiles(before, after, group), **options)

    results = pl.pallas_call(
        kernel,
        out_shape=tuple(outputs.values()) + tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in merged.values()),
        grid=(count // size,),
        in_specs=[block(x) for x in (*inputs.values(), *merged.values())],
        out_specs=tuple(block(x) for x in (*outputs.values(), *merged.values())),
        input_output_aliases={len(inputs) + i: len(outputs) + i for i in range(len(merged))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=6 * sum(x.size for x in states),
            transcendentals=0,
            bytes_accessed=2 * sum(x.size * x.dtype.itemsize for x in states),
        ),
        interpret=interpret,
        name=f"{name}_decode",
    )(*inputs.values(), *merged.values())
    numerator, denominator, *after = results
    return (
        numerator.reshape(batch, groups, heads, value_size),
        denominator.reshape(batch, groups, heads),
        tuple(x.reshape(before.shape) for x, before in zip(after, states, strict=True)),
    )


def _padded_bytes(x: Array) -> int:
    """Bytes of tiles of 8 rows and 128 columns that hold the matrices or vectors of a state."""
    *leading, rows, columns = x.shape
    return 4 * math.prod(leading) * (-(-rows // _ROWS) * _ROWS) * (-(-columns // _COLUMNS) * _COLUMNS)


def _groups_of_a_step(count: int, state_bytes: int) -> int:
    most = max(1, min(_MOST_GROUPS, _VMEM_BYTES // (4 * state_bytes)))
    return next(size for size in range(most, 0, -1) if count % size == 0)


class _Tiles:
    """The `Tiles` of one group of a grid step; rows are [1, D] and columns [D, 1]."""

    def __init__(self, before: dict[str, Any], after: dict[str, Any], group: Any) -> None:
        self._before, self._after, self._group = before, after, group
        self.decay = before["decay"][group] if "decay" in before else 1.0
        self.q = [self.stand(self._row(before["q"], head)) for head in range(before["q"].shape[1])]
        self.k = self.stand(self._row(before["k"], 0))
        self.v = self._row(before["v"], 0)

    def _row(self, ref: Any, head: Any) -> Array:
        return ref[self._group, pl.ds(head, 1)]

    @staticmethod
    def dot(x: Any, y: Any) -> Any:
        return jnp.sum(x * y, axis=1, keepdims=True)

    @staticmethod
    def stand(row: Any) -> Vector:
        return Vector(row, jnp.broadcast_to(row, (_ROWS, row.shape[1])).T[:, :1])

    def read(self, name: str, head: Any = 0) -> Any:
        return self._row(self._before[name], head)

    def write(self, name: str, row: Any, head: Any = 0) -> None:
        self._after[name][self._group, pl.ds(head, 1)] = row

    def advance(
        self,
        name: str,
        keep: Any,
        x: Vector,
        y: Any,
        *,
        left: Sequence[Vector] = (),
        right: Sequence[Vector] = (),
        head: Any = 0,
    ) -> list[Any]:
        matrix = self._before[name][self._group, head]
        self._after[name][self._group, head] = keep * matrix + x.column * y
        columns = (jnp.sum(matrix * w.row, axis=1, keepdims=True) for w in right)
        return [
            *(jnp.sum(w.column * matrix, axis=0, keepdims=True) for w in left),
            *(jnp.broadcast_to(column, (column.shape[0], _ROWS)).T[:1] for column in columns),
        ]

    def each_head(self, step: Callable[..., None], *reads: Sequence[Any]) -> None:
        for head, (q, *rows) in enumerate(zip(self.q, *reads, strict=True)):
            step(head, q, *rows)

    def emit(self, head: Any, numerator: Any, denominator: Any) -> None:
        self._after["numerator"][self._group, pl.ds(head, 1)] = numerator
        self._after["denominator"][self._group, pl.ds(head, 1)] = denominator
