"""One token on Hopper: a warpgroup walks over the states of one sequence and one group of heads, in place.

Nothing is multiplied by the tensor cores and nothing waits in shared memory but vectors: a block of a matrix is loaded
into registers, 16 bytes a thread and access, used, and stored where it came from. What hides the latency of memory is
that several such programs share a multiprocessor.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmix_kernels.decode.steps import OPERATORS, Vector
from jaxmix_kernels.gpu_chunks import LARGEST_GRID

Array = jax.Array

_BLOCK = 4096
"""Numbers of a matrix in registers at once: 32 a thread."""

_Tiling: Any = plgpu.Tiling


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
    value_size = v.shape[2]
    if batch * groups > LARGEST_GRID:
        raise NotImplementedError(f"B * G must be at most {LARGEST_GRID}, got {batch * groups}")
    names = ("q", "k", "v", *(() if decay is None else ("decay",)), *operator.fields)

    def kernel(*refs: Any) -> None:
        given = dict(zip((*names, "numerator", "denominator", "vectors"), refs, strict=True))
        operator.step(_Tiles(given, operator.fields), **options)

    call = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((batch, groups, heads, value_size), jnp.float32),
            jax.ShapeDtypeStruct((batch, groups, heads), jnp.float32),
        ),
        grid=(batch * groups,),
        grid_names=("program",),
        scratch_types=(plgpu.SMEM((2 + 4 * heads, max(key_size, value_size)), jnp.float32),),
        kernel_name=f"{name}_decode",
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret or None,
    )
    inputs = (q, k, v) if decay is None else (q, k, v, decay)
    references = tuple(map(jax.new_ref, states))
    numerator, denominator = call(*inputs, *references)
    return numerator, denominator, tuple(map(jax.freeze, references))


class _Tiles:
    """The `Tiles` of one program. Vectors that weigh rows wait in shared memory."""

    def __init__(self, refs: dict[str, Any], fields: dict[str, str]) -> None:
        _, groups, heads, self._size = refs["q"].shape
        program = lax.axis_index("program")
        sequence, group = lax.div(program, jnp.int32(groups)), lax.rem(program, jnp.int32(groups))
        shared = refs["k"].shape[1]
        of_key = group if shared == groups else lax.div(group, jnp.int32(groups // shared))
        self._place = sequence, group
        self._refs = refs
        self._used = 0
        self.decay = refs["decay"][sequence, group] if "decay" in refs else 1.0
        # All of them before the first wait, so that their latencies overlap.
        self.v = _load_row(refs["v"].at[sequence, of_key])
        key = _load_row(refs["k"].at[sequence, of_key])
        queries = [_load_row(refs["q"].at[sequence, group, r]) for r in range(heads)]
        self._loaded = {
            name: _load_row(refs[name].at[sequence, group, 0])
            for name, axes in fields.items()
            if axes == "D" and refs[name].shape[2] == 1
        }
        self.k = self.stand(key)
        self.q = [self.stand(query) for query in queries]

    def _new(self, width: int) -> Any:
        """Room for a vector in shared memory."""
        self._used += 1
        return self._refs["vectors"].at[self._used - 1, pl.ds(0, width)]

    @staticmethod
    def dot(x: Any, y: Any) -> Any:
        return jnp.sum(x * y)

    def stand(self, row: Any) -> Vector:
        ref = self._new(self._size)
        ref[...] = row
        return Vector(row, ref)

    def read(self, name: str, head: Any = 0) -> Any:
        return self._loaded[name] if name in self._loaded else _load_row(self._refs[name].at[*self._place, head])

    def write(self, name: str, row: Any, head: Any = 0) -> None:
        self._refs[name].at[*self._place, head][...] = row

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
        matrix = self._refs[name].at[*self._place, head]
        height, width = self._refs[name].shape[3:]
        layout, block = _layout(width), min(height, _BLOCK // width)
        columns = [self._new(height) for _ in right]

        def step(n: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            rows = pl.ds(n * block, block)
            tile = plgpu.load(matrix.at[rows], layout=layout, optimized=False)

            def beside(vector: Vector) -> Array:
                column = plgpu.load(vector.column.at[rows], layout=layout.reduce(1), optimized=False)
                return lax.broadcast_in_dim(column, tile.shape, [0])

            def along(row: Array) -> Array:
                return lax.broadcast_in_dim(row, tile.shape, [1])

            sums = tuple(total + jnp.sum(tile * beside(w), axis=0) for total, w in zip(sums, left, strict=True))
            for w, column in zip(right, columns, strict=True):
                column.at[rows][...] = jnp.sum(tile * along(w.row), axis=1)
            matrix.at[rows][...] = keep * tile + beside(x) * along(y)
            return sums

        zeros = plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout.reduce(0))
        sums = lax.fori_loop(0, height // block, step, (zeros,) * len(left))
        return [*sums, *map(_load_row, columns)]

    def each_head(self, step: Callable[..., None], *reads: Sequence[Any]) -> None:
        if len(self.q) == 1:
            step(0, self.q[0], *(rows[0] for rows in reads))
            return
        vectors, first = self._refs["vectors"], self._used
        for row in itertools.chain.from_iterable(reads):
            self._new(row.shape[0])[...] = row

        @pl.loop(0, len(self.q))
        def _(head: Any) -> None:
            column = vectors.at[1 + head, pl.ds(0, self._size)]
            rows = (
                _load_row(vectors.at[first + i * len(self.q) + head, pl.ds(0, row.shape[0])])
                for i, (row, *_) in enumerate(reads)
            )
            step(head, Vector(_load_row(column), column), *rows)

    def emit(self, head: Any, numerator: Any, denominator: Any) -> None:
        self._refs["numerator"].at[*self._place, head][...] = numerator
        self._refs["denominator"].at[*self._place, head][...] = denominator


@functools.cache
def _layout(width: int) -> Any:
    """How a block of a matrix lies in registers: a thread has four neighbours of a row, a row lies in one warp."""
    lanes = width // 4
    if lanes == 32:
        return plgpu.Layout.TILED(_Tiling(((4, width), (4,))), (-3,), (-2,), -1)
    rows = 32 // lanes
    return plgpu.Layout.TILED(_Tiling(((4 * rows, width), (rows, width), (4,))), (-5,), (-3, -2), -1)


def _load_row(ref: Any) -> Array:
    """A vector in registers, in the layout of the columns of a matrix; float32."""
    return plgpu.load(ref, layout=_layout(ref.shape[-1]).reduce(0), optimized=False).astype(jnp.float32)
