"""What every TPU kernel of this package shares: the walk over a sequence, and decayed linear attention in its tiles.

A kernel visits the tiles of one head one after another and carries its states from tile to tile in VMEM. Arrays are
[B, H, T, D] here, tokens along the sublanes and features along the lanes. Dimension letters as in `decays`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxmix_kernels.decays import CHUNK, DTYPES, SIZES, Array, ChunkDecays

TILE = 2 * CHUNK
"""Tokens that a kernel works on at a time: two chunks, which fill the 128 lanes of a TPU's registers."""

TILES_PER_STEP = {"bfloat16": 8, "float32": 4}
"""At most so many tiles share a grid step, which costs about as much time as a tile; more would not fit in VMEM."""

_ROWS = 8

Part = tuple[Any, pl.BlockSpec] | None
"""An array, or the shape of an output, with its blocks."""

Parts = dict[str, Part]


def check_arrays(name: str, *arrays: Array) -> None:
    """Raises if a kernel cannot serve the arrays [B, T, H', D]."""
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) > 1 or not all(str(dtype) in DTYPES for dtype in dtypes):
        found = ", ".join(sorted(map(str, dtypes)))
        raise NotImplementedError(f"{name}: the TPU kernel takes arrays all bfloat16 or all float32, not {found}")
    for x in arrays:
        if x.shape[3] not in SIZES:
            raise NotImplementedError(f"{name}: the TPU kernel takes head sizes {SIZES}, not {x.shape[3]}")
        if x.shape[1] % CHUNK:
            raise NotImplementedError(f"{name}: the TPU kernel takes multiples of {CHUNK} tokens, not {x.shape[1]}")


def segmented(*decays: ChunkDecays | None) -> bool:
    """Whether segments begin inside chunks."""
    return any(x is not None and x.run is not None for x in decays)


@dataclasses.dataclass(frozen=True)
class Walk:
    """How a kernel walks: grid (B, H, steps), tiles one after another, several a step.

    Attributes:
        batch: B.
        heads: H, heads of the output; an array with fewer heads Hx is read at head h // (H / Hx).
        chunks: N, chunks before padding.
        dtype: of the operands; steps of float32 have fewer tiles.
        reverse: last tile first.
        segments: segments begin inside chunks.
    """

    batch: int
    heads: int
    chunks: int
    dtype: Any
    reverse: bool = False
    segments: bool = False

    @property
    def steps(self) -> int:
        """Grid steps along the sequence."""
        return pl.cdiv(self.chunks, 2 * TILES_PER_STEP[str(self.dtype)])

    @property
    def per_step(self) -> int:
        """Tiles of a grid step."""
        return pl.cdiv(pl.cdiv(self.chunks, 2), self.steps)

    @property
    def tiles(self) -> int:
        """Tiles of the whole walk, N'. Behind the last chunk they are padding, which leaves states alone."""
        return self.steps * self.per_step

    @property
    def order(self) -> list[int]:
        """Tiles of a grid step in the order of the walk."""
        order = range(self.per_step)
        return list(reversed(order)) if self.reverse else list(order)

    def tokens(self, x: Array | None) -> Part:
        """[B, T, Hx, D] as a kernel reads it: [B, Hx, T', D], padded with zeros."""
        if x is None:
            return None
        padding = self.tiles * TILE - x.shape[1]
        x = jnp.transpose(x, (0, 2, 1, 3))
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) if padding else x
        return x, self._blocks(x.shape[1], (self.per_step * TILE, x.shape[3]))

    def rows(self, decays: ChunkDecays | None) -> Part:
        """Decays as a kernel reads them, [B, Hd, N', 8, 2 C] float32, see `Decays.unpack`."""
        if decays is None:
            return None
        shape = decays.enter.shape
        run = jnp.zeros(shape, jnp.int32) if decays.run is None else jnp.broadcast_to(decays.run[:, None], shape)
        kept = jnp.broadcast_to(decays.kept[..., None], shape)

        def pairs(x: Array, fill: float) -> Array:
            """[B, Hd, N, C] to [B, Hd, N', 2, C]; padding keeps the state, and its zeros in arrays add nothing."""
            padding = ((0, 0), (0, 0), (0, 2 * self.tiles - self.chunks), (0, 0))
            x = jnp.pad(x.astype(jnp.float32), padding, constant_values=fill)
            return x.reshape(*x.shape[:2], self.tiles, 2, CHUNK)

        high, low, run = pairs(decays.high, 0.0), pairs(decays.low, 0.0), pairs(run, 0.0)
        enter, leave, kept = pairs(decays.enter, 1.0), pairs(decays.leave, 1.0), pairs(kept, 1.0)
        between = enter.at[..., 0, :].set(leave[..., 0, :])
        enter = enter.at[..., 1, :].multiply(kept[..., 0, :])
        leave = leave.at[..., 0, :].multiply(kept[..., 1, :])
        kept = kept * kept[..., ::-1, :]
        rows = jnp.stack([high, low, enter, leave, run, kept, between, jnp.zeros_like(kept)], axis=3)
        rows = rows.reshape(*rows.shape[:4], TILE)
        return rows, self._blocks(shape[1], (self.per_step, _ROWS, TILE))

    def state(self, x: Array | jax.ShapeDtypeStruct | None) -> Part:
        """States [B, Hs, D, E], one block for the whole walk of a head."""
        if x is None:
            return None
        repeats = self.heads // x.shape[1]
        return x, pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h, n: (b, _group(h, repeats), 0, 0))

    def states(self, x: Array | jax.ShapeDtypeStruct | None) -> Part:
        """States before every tile, [B, Hs, N', D, E]."""
        return None if x is None else (x, self._blocks(x.shape[1], (self.per_step, *x.shape[3:])))

    def token_output(self, size: int, dtype: Any) -> Part:
        """Shape and blocks of an output that `join` makes [B, T, H, size]."""
        shape = (self.batch, self.heads, self.tiles * TILE, size)
        return jax.ShapeDtypeStruct(shape, dtype), self._blocks(self.heads, (self.per_step * TILE, size))

    def number_output(self) -> Part:
        """Shape and blocks of an output that `join` makes [B, H, T], float32."""
        shape = (self.batch, self.heads, self.tiles, 1, TILE)
        return jax.ShapeDtypeStruct(shape, jnp.float32), self._blocks(self.heads, (self.per_step, 1, TILE))

    def state_output(self, key_size: int, value_size: int) -> Part:
        """Shape and block of final states [B, H, D, E], float32."""
        return self.state(jax.ShapeDtypeStruct((self.batch, self.heads, key_size, value_size), jnp.float32))

    def states_output(self, key_size: int, value_size: int, dtype: Any) -> Part:
        """Shape and blocks of the states before every tile, [B, H, N', D, E]."""
        shape = (self.batch, self.heads, self.tiles, key_size, value_size)
        return self.states(jax.ShapeDtypeStruct(shape, dtype))

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
        """`pl.pallas_call` of `kernel(inputs, outputs, *scratch)`, both by name; `products` multiply-adds a tile."""
        programs = self.batch * self.heads * self.tiles
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
    """Decays of one tile inside a kernel, float32; None where nothing decays.

    Attributes:
        mask: decay from token s to token t where t reads s, else 0, [2 C, 2 C] (t, s).
        enter: from the state before the tile to each token, [2 C, 1].
        leave: from each token to the state after the tile, [1, 2 C].
        leave_column: the same, [2 C, 1].
        kept: from state to state, [1, 1].
        segments: whether segments may begin in the tile: what a border stops may then be anything.
    """

    mask: Array
    enter: Array | None
    leave: Array | None
    leave_column: Array | None
    kept: Array | None
    segments: bool = False

    @classmethod
    def unpack(cls, walk: Walk, packed: Any) -> list["Decays"]:
        """The tiles of a grid step in the order of the walk, from what `Walk.rows` packed."""
        return [cls._unpack(walk, None if packed is None else packed[tile]) for tile in walk.order]

    @classmethod
    def _unpack(cls, walk: Walk, rows: Array | None) -> "Decays":
        """From log decays high and low in each chunk, enter, leave, run in each chunk, kept, between.

        A token of the second chunk reads one of the first by two steps, into its chunk and out of the other: `between`
        holds the former in the second chunk and the latter in the first.
        """
        reader = jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0)
        read = jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 1)
        seen = read <= reader
        if rows is None:
            return cls(seen.astype(jnp.float32), None, None, None, None)
        columns = rows.T
        seen = seen & ((reader < CHUNK) == (read < CHUNK))
        if walk.segments:
            seen = seen & (columns[:, 4:5] == rows[4:5])
        exponents = (columns[:, 0:1] - rows[0:1]) + (columns[:, 1:2] - rows[1:2])
        mask = jnp.exp(jnp.where(seen, exponents, -jnp.inf))
        lower = jnp.where(read[CHUNK:] < CHUNK, columns[CHUNK:, 6:7] * rows[6:7], mask[CHUNK:])
        mask = jnp.concatenate([mask[:CHUNK], lower])
        return cls(mask, columns[:, 2:3], rows[3:4], columns[:, 3:4], rows[5:6, 0:1], walk.segments)

    def times(self, factors: Array | None, x: Array) -> Array:
        """x times some of the factors, if there are any; `stopped`."""
        return x if factors is None else self.stopped(factors, factors * x)

    def stopped(self, factors: Array | None, x: Array) -> Array:
        """x; with segments 0 where factors are 0, as they are behind a border, whatever x is there."""
        return jnp.where(factors > 0, x, 0.0) if self.segments and factors is not None else x


def product(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """Product of matrices over one axis of each, accumulated in float32; float32 operands in full precision."""
    axes = (((contract[0],), (contract[1],)), ((), ()))

    def multiply(a: Array, b: Array) -> Array:
        precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)

    if a.dtype == jnp.float32:
        return multiply(a, b)
    # XLA's CPU backend, which interprets kernels, fails on some products of bfloat16 that accumulate in float32.
    exact = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    return jax.lax.platform_dependent(a, b, cpu=lambda *args: multiply(*exact(args)), default=multiply)


def tokens(walk: Walk, x: Any) -> list[Array]:
    """The tiles [2 C, D] of a grid step in the order of the walk."""
    return [x[pl.ds(tile * TILE, TILE)] for tile in walk.order]


def scores(a: list[Array], b: list[Array], decays: list[Decays]) -> list[Array]:
    """M_ts (a_t . b_s) of every tile, [2 C, 2 C] in the dtype of a."""
    return [(d.mask * product(x, y, (1, 1))).astype(x.dtype) for x, y, d in zip(a, b, decays, strict=True)]


class Attended(NamedTuple):
    """What one attention gives in a grid step.

    Attributes:
        out: outputs of the tiles, [2 C, E] float32; none where there are no readers.
        states: the states before the tiles, [D, E] float32.
        final: the state behind them.
    """

    out: list[Array]
    states: list[Array]
    final: Array


def attend(
    a: list[Array] | None,
    b: list[Array],
    c: list[Array],
    decays: list[Decays],
    state: Array,
    weights: list[Array] | None = None,
) -> Attended:
    """The tiles of a grid step, one after another; without readers `a`, their states alone.

    out_t = enter_t (a_t^T X) + sum_s M_ts (a_t . b_s) c_s, then X = kept X + sum_s leave_s b_s c_s^T. What needs no
    state is computed first, for all tiles: it fills the time in which the chain of states waits for itself.
    `weights` are `scores(a, b, decays)` where the caller has them already.
    """
    inside = []
    if a is not None:
        weights = scores(a, b, decays) if weights is None else weights
        inside = [product(x, y, (1, 0)) for x, y in zip(weights, c, strict=True)]
    outs, states = [], []
    for i, (added, d) in enumerate(zip(outer(b, c, decays), decays, strict=True)):
        states.append(state)
        if a is not None:
            carried = product(a[i], state.astype(a[i].dtype), (1, 0))
            outs.append(inside[i] + d.times(d.enter, carried))
        state = added + d.times(d.kept, state)
    return Attended(outs, states, state)


def outer(b: list[Array], c: list[Array], decays: list[Decays]) -> list[Array]:
    """sum_s leave_s b_s c_s^T of every tile, [D, E] float32."""
    sums = []
    for x, y, d in zip(b, c, decays, strict=True):
        x = x.T if d.leave is None else d.times(d.leave, x.T.astype(jnp.float32)).astype(x.dtype)
        sums.append(product(x, y, (1, 0)))
    return sums


def write(walk: Walk, x: Any, tiles: list[Array]) -> None:
    """Writes tiles in the order of the walk, rounded to the dtype of x."""
    for tile, values in zip(walk.order, tiles, strict=True):
        x[pl.ds(tile * TILE, TILE)] = values.astype(x.dtype)


def write_each(walk: Walk, x: Any, arrays: list[Array]) -> None:
    """Writes an array a tile, such as a state, in the order of the walk, rounded to the dtype of x."""
    for tile, values in zip(walk.order, arrays, strict=True):
        x[tile] = values.astype(x.dtype)


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
