"""What every Hopper kernel of this package shares: products on the tensor cores, and decayed scores inside a chunk.

Values in registers have the layout of a wgmma accumulator; a vector [C] goes along its rows or its columns. Dimension
letters as in `decays`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmix_kernels.decays import CHUNK, SIZES, ChunkDecays
from jaxmix_kernels.gpu_operands import Operand

Array = jax.Array

COLUMNS = 64
"""Columns of a state that one warpgroup keeps in registers, at most."""

WGMMA_ROWS = 64
"""A product has a multiple of so many rows."""

LARGEST_GRID = 2**31 - 1
"""Most programs of one launch."""

VECTORS = ("enter", "leave", "high", "low", "run")
"""Vectors of a chunk that describe its decays and segments, as `ChunkDecays` has them."""

COPYING_REGISTERS = 24
"""Registers per thread of a warpgroup that only copies."""

_LOG2_E = 1.4426950408889634
_REGISTERS = 65_536
_WARPGROUP = 128
_MOST_REGISTERS = 232
_Accumulator = plgpu.WGMMAAccumulatorRef
_Tiling: Any = plgpu.TilingTransform
_Swizzle: Any = plgpu.SwizzleTransform


def refuse(arrays: list[Array], key_size: int, value_size: int, dtypes: tuple[str, ...] = ("bfloat16",)) -> None:
    """Raises for operands that the kernels do not take."""
    for x in arrays:
        if x.dtype not in dtypes or x.dtype != arrays[0].dtype:
            taken = " or ".join(dtypes)
            raise NotImplementedError(f"this Hopper kernel takes operands of one dtype, {taken}, got {x.dtype}")
    if key_size not in SIZES or value_size not in SIZES:
        raise NotImplementedError(f"the Hopper kernels take sizes {SIZES}, got D = {key_size} and E = {value_size}")
    if arrays[0].shape[1] % CHUNK or not arrays[0].shape[1]:
        raise ValueError(f"the number of tokens must be a positive multiple of {CHUNK}, got {arrays[0].shape[1]}")


def layout_of_tiles(width: int, dtype: Any) -> tuple[Any, ...]:
    """How tiles of bfloat16 lie in shared memory; all operands of one product must agree. `width` is the narrowest."""
    swizzle = plgpu.find_swizzle(width * dtype.itemsize * 8)
    return _Tiling((8, swizzle // dtype.itemsize)), _Swizzle(swizzle)


def reads_low(dtype: Any) -> bool:
    """Whether kernels with operands of `dtype` read `low` of `ChunkDecays`: all but those of bfloat16."""
    return jnp.dtype(dtype) != jnp.bfloat16


def decay_arrays(decays: ChunkDecays, dtype: Any) -> dict[str, Array]:
    """`VECTORS` and `kept`, as far as a kernel with operands of that dtype reads them.

    Without `low`, where log decays accumulated in a chunk reach thousands, decays are up to some thousandths off. The
    caller bounds the log decay of a step.
    """
    names = [name for name in (*VECTORS, "kept") if name != "low" or reads_low(dtype)]
    return {name: getattr(decays, name) for name in names if getattr(decays, name) is not None}


def interpreter(interpret: Any) -> Any:
    """The `interpret` of `plgpu.kernel`."""
    return plgpu.InterpretGPUParams() if interpret is True else interpret or None


def computing_registers(count: int) -> int:
    """Registers per thread of `count` warpgroups that compute, beside one that copies.

    A program starts with equally many for all, in steps of 8. What one warpgroup asks for, others must have given up:
    asking for more than there is would wait for ever.
    """
    at_start = _REGISTERS // (_WARPGROUP * (count + 1)) // 8 * 8
    left = at_start * (count + 1) - COPYING_REGISTERS
    return min(_MOST_REGISTERS, left // count // 8 * 8)


def split_index(program: Any, heads: int, blocks: int) -> tuple[Any, Any, Any]:
    """Batch, head and block; the blocks of one head are neighbours, which share reads in the cache."""
    rest, block = lax.div(program, jnp.int32(blocks)), lax.rem(program, jnp.int32(blocks))
    return lax.div(rest, jnp.int32(heads)), lax.rem(rest, jnp.int32(heads)), block


def group_of_head(head: Any, heads: int, groups: int) -> Any:
    """Which of `groups` arrays head number `head` of `heads` reads."""
    return head if groups == heads else lax.div(head, jnp.int32(heads // groups))


@dataclasses.dataclass(frozen=True)
class Products:
    """Matrix products on the tensor cores; `scratch` [C, C] holds left operands where registers cannot.

    Operands are in shared memory, left ones possibly in registers: single matrices of bfloat16, or `Operand`.
    """

    scratch: Operand | None

    @classmethod
    def named(cls, ref: dict[str, Any], name: str) -> "Products":
        """With the scratch of that name, if there is one."""
        scratch = Operand.named(ref, name)
        return cls(scratch if scratch.parts else None)

    def new(self, shape: tuple[int, int], left: Any, right: Any) -> Array:
        """left @ right, float32."""
        return self._scoped(shape, self._factors(left, right))

    def together(self, *factors: tuple[tuple[int, int], Any, Any]) -> list[Array]:
        """`new` of several products, which run side by side on a device: for each its shape, left and right."""
        if self.scratch is not None:
            return [self.new(*each) for each in factors]

        def products(*accumulators: Any) -> list[Array]:
            for accumulator, (_, left, right) in zip(accumulators, factors, strict=True):
                _multiply(accumulator, self._factors(left, right))
            plgpu.wgmma_wait(0)
            return [accumulator[...] for accumulator in accumulators]

        return pl.run_scoped(products, *(_Accumulator(shape, jnp.float32) for shape, _, _ in factors))

    def add(self, total: Array, left: Any, right: Any, *, carried: bool = False) -> Array:
        """total + left @ right; `carried` from chunk to chunk, so that rounding gathers.

        The tensor cores cut off what does not fit, always towards zero. In bfloat16 that is far below the rounding of
        operands. In float32 a sum that is carried is added up outside of them.
        """
        factors = self._factors(left, right)
        if self.scratch is not None or (carried and len(factors) > 1):
            return total + self._scoped(total.shape, factors)
        accumulate: Any = pl.run_state(lambda accumulator: _multiply(accumulator, factors))
        return accumulate(_Accumulator.init(total))

    def add_together(self, *sums: tuple[Array, Any, Any]) -> Any:
        """`add` of several totals, which run side by side on a device: for each the total, left and right."""
        if self.scratch is not None:
            return tuple(self.add(*each) for each in sums)

        def multiply(accumulators: tuple[Any, ...]) -> None:
            for accumulator, (_, left, right) in zip(accumulators, sums, strict=True):
                _multiply(accumulator, self._factors(left, right))

        accumulate: Any = pl.run_state(multiply)
        return accumulate(tuple(_Accumulator.init(total) for total, _, _ in sums))

    def _factors(self, left: Any, right: Any) -> list[tuple[Any, Any]]:
        """What is multiplied, the small products first."""
        lefts, rights = (x.parts if isinstance(x, Operand) else (x,) for x in (left, right))
        if self.scratch is not None and isinstance(lefts[0], jax.Array):
            for part, x in zip(self.scratch.parts, lefts, strict=True):
                part[...] = x
            plgpu.commit_smem()
            lefts = self.scratch.parts
        # Low halves, which come last, first: a sum is rounded at its own size.
        return [(left, right) for left in reversed(lefts) for right in reversed(rights)]

    @staticmethod
    def _scoped(shape: Any, factors: list[tuple[Any, Any]]) -> Array:
        def product(accumulator: Any) -> Array:
            _multiply(accumulator, factors)
            plgpu.wgmma_wait(0)
            return accumulator[...]

        return pl.run_scoped(product, _Accumulator(shape, jnp.float32))


def _multiply(accumulator: Any, factors: list[tuple[Any, Any]]) -> None:
    for left, right in factors:
        plgpu.wgmma(accumulator, left, right)


def attend_chunk(
    products: Products,
    queries: Any,
    keys: Any,
    values: Any,
    state: Array,
    vectors: dict[str, Any],
    kept: Array | None,
    *,
    rounded_state: Any = None,
    scaled: Any = None,
    power: int = 1,
    overlap: bool = False,
) -> tuple[Array, Array]:
    """Decayed linear attention of one chunk: enter (queries X) + P values, and kept X + keys^T (leave values).

    Args:
        products: how to multiply.
        queries: tile [C, D] in shared memory.
        keys: tile [C, D].
        values: tile [C, columns].
        state: X before the chunk, [D, columns].
        vectors: `enter`, `leave`, `high`, `low` and `run` of the chunk in shared memory; empty without decays.
        kept: decay of the whole chunk, a number; None for 1.
        rounded_state: X in shared memory [D, columns], in the dtype of the tiles.
        scaled: room for leave times values, [C, columns]; None without decays.
        power: exponent of all decays.
        overlap: the products with queries run together, which takes more registers.

    Returns:
        Outputs [C, columns], and the state after the chunk; float32.
    """
    dtype, width = values.dtype, state.shape[1]
    segments = "run" in vectors
    if "leave" in vectors:
        leave = rows(vectors["leave"], width, power)
        scaled[...] = decayed(tile(values).astype(jnp.float32), leave, segments=segments).astype(dtype)
        plgpu.commit_smem()
    else:
        scaled = values
    transposed = keys.transpose((1, 0))

    def weighted(scores: Array) -> Array:
        return masked(scores, vectors, power=power).astype(dtype)

    def entering(out: Array) -> Array:
        if "enter" not in vectors:
            return out
        return decayed(out, rows(vectors["enter"], width, power), segments=segments)

    def carried() -> Array:
        return state if kept is None else decayed(state, raised(kept, power), segments=segments)

    def together(scores: Any, entered: Any) -> tuple[Array, Array]:
        plgpu.wgmma(scores, queries, transposed)
        plgpu.wgmma(entered, queries, rounded_state)
        weights = weighted(plgpu.wgmma_accumulator_load(scores, wait_n=1))
        return weights, entering(plgpu.wgmma_accumulator_load(entered, wait_n=0))

    square, shape = (CHUNK, CHUNK), (CHUNK, width)
    if overlap and products.scratch is None:
        weights, out = pl.run_scoped(together, *(_Accumulator(each, jnp.float32) for each in (square, shape)))
    else:
        weights = weighted(products.new(square, queries, transposed))
        out = entering(products.new(shape, queries, rounded_state))
    return products.add_together((out, weights, values), (carried(), transposed, scaled))


def masked(scores: Array, vectors: dict[str, Any], *, power: int = 1) -> Array:
    """M^power * scores, [C, C]; M from `high`, perhaps `low`, and `run` of the chunk, or causal without them."""
    return masked_together([scores], vectors, power=power)[0]


def masked_together(
    several: list[Array], vectors: dict[str, Any], *, power: int = 1, reverse: bool = False
) -> list[Array]:
    """`masked` of several arrays, with decays that are computed once; with `reverse` M is transposed."""
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, (CHUNK, CHUNK), layout=plgpu.Layout.WGMMA)
    seen = iota(0) <= iota(1) if reverse else iota(0) >= iota(1)
    if "high" not in vectors:
        return [jnp.where(seen, x, 0.0) for x in several]
    scale = _LOG2_E * (-power if reverse else power)
    high = vectors["high"]
    if "low" in vectors:
        exponents = rows(high) - columns(high) + (rows(vectors["low"]) - columns(vectors["low"]))
        exponents = exponents * scale
    else:
        exponents = rows(high, factor=scale) - columns(high, factor=scale)
    if "run" in vectors:
        seen = seen & (rows(vectors["run"]) == columns(vectors["run"]))
    decays = jnp.exp2(jnp.where(seen, exponents, -jnp.inf))
    return [x * decays for x in several]


def pair_sums(x: Array) -> Array:
    """Sums of the rows of x [C, C] without its diagonal: over the pairs of different tokens, [C]."""
    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, (CHUNK, CHUNK), layout=plgpu.Layout.WGMMA)
    return jnp.sum(jnp.where(iota(0) == iota(1), 0.0, x), axis=1)


def tile(ref: Any) -> Array:
    """A matrix of shared memory in registers."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)


def rows(ref: Any, width: int = CHUNK, power: int = 1, factor: float | None = None) -> Array:
    """A vector [C], to some power or times a factor, along the rows of a matrix of products [C, width]."""
    vector = raised(plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1)), power)
    return lax.broadcast_in_dim(vector if factor is None else vector * factor, (CHUNK, width), [0])


def decayed(x: Array, factors: Array, *, segments: bool) -> Array:
    """x times factors, of its shape or a number; `stopped`."""
    return stopped(x * factors, factors, segments=segments)


def stopped(x: Array, factors: Array, *, segments: bool) -> Array:
    """x; with segments 0 where factors are 0, as they are behind a border, whatever x is there."""
    return jnp.where(jnp.broadcast_to(factors, x.shape) > 0, x, 0.0) if segments else x


def reached(kept: Array) -> Array:
    """Chunks that a state gets to, the first included, before decays leave nothing of it: int32 [B, Hd].

    Args:
        kept: decay of every chunk in the order of the walk, [B, Hd, N].
    """
    return 1 + jnp.sum(jnp.cumprod(kept, axis=2)[:, :, :-1] != 0, axis=2, dtype=jnp.int32)


def raised(x: Array, power: int) -> Array:
    """x^power for a positive power, by products."""
    return x if power == 1 else x * raised(x, power - 1)


def columns(ref: Any, factor: float | None = None) -> Array:
    """A vector [C], perhaps times a factor, along the columns of a matrix of products [C, C].

    A vector is loaded for rows as well. Loads that differ in nothing become one, for which no layout serves both.
    """
    vector = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(vector if factor is None else vector * factor, (CHUNK, CHUNK), [1])
