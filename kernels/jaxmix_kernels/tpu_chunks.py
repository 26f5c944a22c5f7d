"""What every TPU kernel of this package shares: the walk over chunks, and decayed linear attention inside a chunk.

A kernel visits the chunks of one head one after another and carries its states from chunk to chunk in VMEM. Arrays are
[B, H, T, D] here, tokens along the sublanes and features along the lanes. Dimension letters as in `decays`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxmix_kernels.decays import CHUNK, Array, ChunkDecays

SIZES = (32, 64, 128)
"""Key and value sizes that the kernels serve."""

CHUNKS_PER_STEP = 8
"""At most so many chunks share a grid step, which costs about as much time as a chunk."""

_ROWS = 8

Part = tuple[Any, pl.BlockSpec] | None
"""An array, or the shape of an output, with its blocks."""

Parts = dict[str, Part]


def check_arrays(name: str, *arrays: Array) -> None:
    """Raises if a kernel cannot serve the arrays [B, T, H', D]."""
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise NotImplementedError(f"{name}: the TPU kernel takes arrays all bfloat16 or all float32, not {found}")
    for x in arrays:
        if x.shape[3] not in SIZES:
            raise NotImplementedError(f"{name}: the TPU kernel takes head sizes {SIZES}, not {x.shape[3]}")
        if x.shape[1] % CHUNK:
            raise NotImplementedError(f"{name}: the TPU kernel takes multiples of {CHUNK} tokens, not {x.shape[1]}")


@dataclasses.dataclass(frozen=True)
class Walk:
    """How a kernel walks: grid (B, H, steps), chunks one after another, several a step.

    Attributes:
        batch: B.
        heads: H, heads of the output; an array with fewer heads Hx is read at head h // (H / Hx).
        chunks: N, chunks before padding.
        reverse: last chunk first.
    """

    batch: int
    heads: int
    chunks: int
    reverse: bool = False

    @property
    def steps(self) -> int:
        """Grid steps along the sequence."""
        return pl.cdiv(self.chunks, CHUNKS_PER_STEP)

    @property
    def per_step(self) -> int:
        """Chunks of a grid step."""
        return pl.cdiv(self.chunks, self.steps)

    @property
    def padded(self) -> int:
        """Chunks with padding, which leaves states alone."""
        return self.steps * self.per_step

    @property
    def order(self) -> list[int]:
        """Chunks of a grid step in the order of the walk."""
        order = range(self.per_step)
        return list(reversed(order)) if self.reverse else list(order)

    def tokens(self, x: Array | None) -> Part:
        """[B, T, Hx, D] as a kernel reads it: [B, Hx, T', D], padded with zeros."""
        if x is None:
            return None
        padding = (self.padded - self.chunks) * CHUNK
        x = jnp.transpose(x, (0, 2, 1, 3))
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) if padding else x
        return x, self._blocks(x.shape[1], (self.per_step * CHUNK, x.shape[3]))

    def rows(self, decays: ChunkDecays | None) -> Part:
        """Decays as a kernel reads them, [B, Hd, N', 8, C] float32: a tile a chunk, see `Decays.unpack`."""
        if decays is None:
            return None
        sign, enter, leave = (-1.0, decays.leave, decays.enter) if self.reverse else (1.0, decays.enter, decays.leave)
        shape = enter.shape
        run = jnp.zeros(shape, jnp.int32) if decays.run is None else jnp.broadcast_to(decays.run[:, None], shape)
        kept = jnp.broadcast_to(decays.kept[..., None], shape)
        rows = [sign * decays.high, sign * decays.low, enter, leave, run, kept]
        packed = jnp.stack([row.astype(jnp.float32) for row in rows], axis=3)
        packed = jnp.pad(packed, ((0, 0),) * 3 + ((0, _ROWS - len(rows)), (0, 0)))
        if self.padded > self.chunks:
            # Padding keeps the state: kept is 1, and the zeros of padded arrays add nothing.
            padding = ((0, 0), (0, 0), (0, self.padded - self.chunks), (0, 0), (0, 0))
            packed = jnp.pad(packed, padding, constant_values=1.0)
        return packed, self._blocks(shape[1], (self.per_step, _ROWS, CHUNK))

    def state(self, x: Array | jax.ShapeDtypeStruct | None) -> Part:
        """States [B, Hs, D, E], one block for the whole walk of a head."""
        if x is None:
            return None
        repeats = self.heads // x.shape[1]
        return x, pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h, n: (b, _group(h, repeats), 0, 0))

    def token_output(self, size: int, dtype: Any) -> Part:
        """Shape and blocks of an output that `join` makes [B, T, H, size]."""
        shape = (self.batch, self.heads, self.padded * CHUNK, size)
        return jax.ShapeDtypeStruct(shape, dtype), self._blocks(self.heads, (self.per_step * CHUNK, size))

    def number_output(self) -> Part:
        """Shape and blocks of an output that `join` makes [B, H, T], float32."""
        shape = (self.batch, self.heads, self.padded, 1, CHUNK)
        return jax.ShapeDtypeStruct(shape, jnp.float32), self._blocks(self.heads, (self.per_step, 1, CHUNK))

    def state_output(self, key_size: int, value_size: int) -> Part:
        """Shape and block of final states [B, H, D, E], float32."""
        return self.state(jax.ShapeDtypeStruct((self.batch, self.heads, key_size, value_size), jnp.float32))

    def join(self, x: Array | None) -> Any:
        """An output of the kernel without padding, in the layout of the caller."""
        if x is None:
            return None
        length = self.chunks * CHUNK
        if x.ndim == 5:
            return x.reshape(self.batch, self.heads, -1)[:, :, :length]
        return jnp.transpose(x[:, :, :length], (0, 2, 1, 3))

    def call(
        self, kernel: Any, inputs: Parts, outputs: Parts, scratch: list[Any], *, products: int, **options: Any
    ) -> Any:
        """`pl.pallas_call` of `kernel(inputs, outputs, *scratch)`, both by name; `products` multiply-adds a chunk."""
        programs = self.batch * self.heads * self.padded
        parts = [part for part in (*inputs.values(), *outputs.values()) if part is not None]
        cost = pl.CostEstimate(
            flops=2 * products * programs,
            transcendentals=CHUNK
            * CHUNK
            * programs
            * sum(inputs[name] is not None for name in inputs if "rows" in name),
            bytes_accessed=sum(x.size * x.dtype.itemsize for x, _ in parts),
        )
        return pl.pallas_call(
            kernel,
            grid=(self.batch, self.heads, self.steps),
            in_specs=[_second(inputs)],
            out_specs=_second(outputs),
            out_shape=_first(outputs),
            scratch_shapes=scratch,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            cost_estimate=cost,
            **options,
        )(_first(inputs))

    def _blocks(self, heads: int, block: tuple[int, ...]) -> pl.BlockSpec:
        """Blocks of [B, Hx, ...] that follow the walk along the third axis."""
        repeats, last, reverse = self.heads // heads, self.steps - 1, self.reverse
        zeros = (0,) * (len(block) - 1)
        return pl.BlockSpec(
            (None, None, *block), lambda b, h, n: (b, _group(h, repeats), last - n if reverse else n, *zeros)
        )


def _group(head: Any, repeats: int) -> Any:
    """head // repeats; both are natural, and floor division lowers to something that asks for the chip."""
    return jax.lax.div(head, jnp.asarray(repeats, head.dtype)) if repeats > 1 else head


def _first(parts: Parts) -> dict[str, Any]:
    return {name: None if part is None else part[0] for name, part in parts.items()}


def _second(parts: Parts) -> dict[str, Any]:
    return {name: None if part is None else part[1] for name, part in parts.items()}


class Decays(NamedTuple):
    """Decays of one chunk inside a kernel, float32; None where nothing decays.

    Attributes:
        mask: decay from token s to token t where t reads s, else 0, [C, C] (t, s).
        enter: from the state before the chunk to each token, [C, 1].
        leave: from each token to the state after the chunk, [C, 1].
        kept: from state to state, [1, 1].
    """

    mask: Array
    enter: Array | None
    leave: Array | None
    kept: Array | None

    @classmethod
    def unpack(cls, packed: Any, chunk: int, reverse: bool) -> "Decays":
        """From the tile [8, C] of a chunk in `Walk.rows`: log decays high and low, enter, leave, run, kept."""
        reader = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
        read = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
        seen = read >= reader if reverse else read <= reader
        if packed is None:
            return cls(seen.astype(jnp.float32), None, None, None)
        rows = packed[chunk]
        columns = rows.T
        seen = seen & (columns[:, 4:5] == rows[4:5])
        exponents = (columns[:, 0:1] - rows[0:1]) + (columns[:, 1:2] - rows[1:2])
        mask = jnp.exp(jnp.where(seen, exponents, -jnp.inf))
        return cls(mask, columns[:, 2:3], columns[:, 3:4], rows[5:6, 0:1])


def product(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Product of matrices over one axis of each, accumulated in float32; float32 operands in full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def scores(a: Array, b: Array, decays: Decays) -> Array:
    """M_ts (a_t . b_s), [C, C] in the dtype of a."""
    return (decays.mask * product(a, b, (1, 1))).astype(a.dtype)


def read(a: Array, c: Array, weights: Array, state: Array, decays: Decays) -> Array:
    """enter_t (a_t^T X) + sum_s weights_ts c_s, [C, E] float32; X [D, E] is the state before the chunk."""
    carried = product(a, state.astype(a.dtype), (1, 0))
    if decays.enter is not None:
        carried = decays.enter * carried
    return carried + product(weights, c, (1, 0))


def add(state: Array, b: Array, c: Array, decays: Decays) -> Array:
    """Kept X + sum_s leave_s b_s c_s^T, the state after the chunk, [D, E] float32."""
    if decays.leave is None or decays.kept is None:
        return state + product(b, c, (0, 0))
    return decays.kept * state + product((decays.leave * b.astype(jnp.float32)).astype(b.dtype), c, (0, 0))


def row_sums(x: Array) -> Array:
    """Sums over the lanes of [C, E], float32, as a row [1, C]."""
    ones = jnp.ones((_ROWS, x.shape[1]), jnp.float32)
    return product(ones, x, (1, 1))[:1]


def start(carried: Any, initial: Any) -> None:
    """Sets the carried state [D, E] before the first step of a walk: to the initial state, or to zeros."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        carried[...] = jnp.zeros_like(carried) if initial is None else initial[...]


def finish(carried: Any, final: Any) -> None:
    """Writes the carried state to the output `final` after the last step of a walk."""

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        final[...] = carried[...]
