"""All gradients of a decayed linear attention on Hopper in one kernel that walks over the chunks from last to first.

With X the state before a chunk, as the forward kernel saved it, dX' the gradient of the state after it, rows t and
columns s of M, and A = q k^T, dP = M * (do v^T):

    dq  = dP k + enter (do X^T)                  dv  = (M * A)^T do + leave (k dX')
    dk  = dP^T q + leave (v dX'^T)               dX  = kept dX' + q^T (enter do)

The log decay of token r is in every pair it lies between: of tokens s < r <= t, of the state before and t >= r, of
s < r and the state after, of both states. Each kind is summed within the chunk, in float32 from float32 products, so
that no rounding gathers along the sequence. The kernel gives the sums over pairs by token,

    rises_t  = sum_{s<t} A_ts dP_ts + q_t . enter_t (do X^T)_t       falls_s = sum_{t>s} A_ts dP_ts
    leaves_s = k_s . leave_s (v dX'^T)_s                             carried = kept <X, dX'>

and what is left are sums of 64 numbers. A program owns one head of one sequence and one block of value columns; dq, dk
and those sums are summed over the blocks. One warpgroup keeps dX, one has dq, one has dk and dv, and one copies. The
second needs M and the third its transpose, for which the products of tokens are made twice rather than transposed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmix_kernels.decays import CHUNK, BackwardResult, ChunkDecays
from jaxmix_kernels.gpu_chunks import (
    COLUMNS,
    LARGEST_GRID,
    WGMMA_ROWS,
    Products,
    group_of_head,
    interpreter,
    layout_of_tiles,
    masked,
    masked_together,
    pair_sums,
    refuse,
    rows,
    split_index,
    tile,
)

Array = jax.Array

_VECTORS = ("enter", "leave", "high", "low", "run")
_COMPUTING, _COPYING = 160, 24
_STATE, _QUERIES, _KEYS, _COPIES = range(4)
"""The warpgroups."""


def decayed_attention_backward(
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    decays: ChunkDecays | None,
    states: Array,
    d_final: Array | None,
    *,
    interpret: Any = False,
) -> BackwardResult:
    """Gradients of `decayed_attention(q, k, v, decays, initial)`, forward in time, for each head.

    Args:
        q: queries [B, T, H, D], bfloat16; T is a multiple of `CHUNK`. Head h of H, the largest head count, reads head
            h // (H / Hx) of every array.
        k: keys [B, T, Hk, D].
        v: values [B, T, Hv, E].
        d_out: gradient of the outputs, [B, T, H, E], bfloat16.
        decays: decays and segments; None for neither.
        states: state before every chunk, [B, Hs, N, D, E], bfloat16, as `decayed_attention(..., states=True)` gives it.
        d_final: gradient of the final state, [B, Hf, D, E], float32; None for zeros.
        interpret: True, or `plgpu.InterpretGPUParams(...)`, runs on a CPU, for tests.

    Returns:
        dq, dk, dv, d_initial and d_steps of all H heads: where heads share an array, the caller sums.

    Raises:
        NotImplementedError: the kernel does not take these dtypes or sizes.
        ValueError: the tokens do not fill chunks, or a head count does not divide another.
    """
    key_size, value_size = q.shape[3], v.shape[3]
    refuse([q, k, v, d_out, states], key_size, value_size)
    given: dict[str, Array] = {"q": q, "k": k, "v": v, "d_out": d_out, "x": states}
    if d_final is not None:
        given["d_final"] = d_final
    # Products of the state have D rows, and a wgmma at least 64.
    padding = max(0, WGMMA_ROWS - key_size)
    if padding:
        for name, axis in {"q": 3, "k": 3, "x": 3, "d_final": 2}.items():
            if name in given:
                x = given[name]
                given[name] = jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)])
    if decays is not None:
        names = (*_VECTORS, "kept")
        given |= {name: getattr(decays, name) for name in names if getattr(decays, name) is not None}
    results = _call(given, interpret)

    def gathered(x: Array) -> Array:
        """The sum over blocks."""
        x = x[0] if x.shape[0] == 1 else jnp.sum(x.astype(jnp.float32), axis=0).astype(x.dtype)
        return x[..., :key_size]

    d_steps = None
    if decays is not None:
        sums = {name: jnp.sum(results[name], axis=2) for name in ("rises", "falls", "leaves", "carried")}
        d_steps = _steps(decays, **sums)
    d_initial = results["d_initial"][:, :, :key_size]
    return BackwardResult(gathered(results["dq"]), gathered(results["dk"]), results["dv"], d_initial, d_steps)


def _steps(decays: ChunkDecays, *, rises: Array, falls: Array, leaves: Array, carried: Array) -> Array:
    """The gradient of the log decays: sums over pairs, from sums by token [B, H, N, C] and `carried` [B, H, N, D]."""
    after = jnp.triu(jnp.ones((CHUNK, CHUNK), jnp.float32))
    begins = None
    if decays.run is not None:
        run = decays.run[:, None]
        after = jnp.where(run[..., :, None] == run[..., None, :], after, 0)
        begins = run != jnp.pad(run[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)))
    before = jnp.tril(jnp.ones((CHUNK, CHUNK), jnp.float32), -1)
    precision = lax.Precision.HIGHEST
    d_steps = jnp.einsum("...rt,...t->...r", after, rises - falls, precision=precision)
    d_steps += jnp.einsum("rs,...s->...r", before, leaves, precision=precision)
    d_steps += jnp.sum(carried, axis=-1, keepdims=True)
    # The decay of a token that starts a segment meets no pair.
    return d_steps if begins is None else jnp.where(begins, 0, d_steps)


def _call(given: dict[str, Array], interpret: Any) -> dict[str, Array]:
    """Lays out the kernel: dq and dk [blocks, B, T, H, D], dv, d_initial, with decays sums [B, H, blocks, N, ...]."""
    batch, tokens, _, key_size = given["q"].shape
    value_size, dtype = given["v"].shape[3], given["v"].dtype
    vectors = tuple(name for name in _VECTORS if name in given)
    counts = {name: x.shape[_head_axis(name)] for name, x in given.items() if name != "run"}
    heads = max(counts.values())
    for name, count in counts.items():
        if heads % count:
            raise ValueError(f"every head count must divide the largest, {heads}; {name} has {count}")
    columns = min(value_size, COLUMNS)
    blocks, chunks = value_size // columns, tokens // CHUNK
    programs = batch * heads * blocks
    if programs > LARGEST_GRID:
        raise NotImplementedError(f"B * H * E / {columns} must be at most {LARGEST_GRID}, got {programs}")
    plan = _Plan(heads, key_size, columns, vectors, bool(interpret))
    results = {
        "dq": jax.ShapeDtypeStruct((blocks, batch, tokens, heads, key_size), dtype),
        "dk": jax.ShapeDtypeStruct((blocks, batch, tokens, heads, key_size), dtype),
        "dv": jax.ShapeDtypeStruct((batch, tokens, heads, value_size), dtype),
        "d_initial": jax.ShapeDtypeStruct((batch, heads, key_size, value_size), jnp.float32),
    }
    if vectors:
        for name, width in {"rises": CHUNK, "falls": CHUNK, "leaves": CHUNK, "carried": key_size}.items():
            results[name] = jax.ShapeDtypeStruct((batch, heads, blocks, chunks, width), jnp.float32)
    scratch = plan.scratch(dtype)
    kernel = plgpu.kernel(
        lambda *refs: _Program(plan, dict(zip((*given, *results, *scratch), refs, strict=True))).run(),
        out_type=tuple(results.values()),
        grid=(programs,),
        grid_names=("program",),
        num_threads=_COPIES + 1,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter(interpret),
    )
    return dict(zip(results, kernel(*given.values()), strict=True))


def _head_axis(name: str) -> int:
    return 2 if name in ("q", "k", "v", "d_out") else 1


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is fixed when the kernel is traced."""

    heads: int
    key_size: int
    columns: int
    vectors: tuple[str, ...]
    interpret: bool

    @property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Rings that are filled from global memory, and the arrays in each."""
        groups = {"vectors": self.vectors} if self.vectors else {}
        return groups | {name: (name,) for name in ("d_out", "q", "k", "v", "x")}

    def groups(self, warpgroup: int) -> tuple[str, ...]:
        """Rings that a warpgroup reads."""
        names = {
            _STATE: ("d_out", "q", "x") if self.vectors else ("d_out", "q"),
            _QUERIES: ("d_out", "q", "k", "v", "x"),
            _KEYS: ("d_out", "q", "k", "v", "dx"),
        }[warpgroup]
        return ("vectors", *names) if self.vectors else names

    def slots(self, group: str) -> int:
        """Chunks that a ring holds."""
        return 3 if self.key_size == COLUMNS and group in self.inputs else 2

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers by name."""
        transforms = layout_of_tiles(min(self.key_size, self.columns), dtype)

        def shared(*shape: int) -> Any:
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        tall, wide, narrow = (self.key_size, self.columns), (CHUNK, self.key_size), (CHUNK, self.columns)
        shapes = {"q": wide, "k": wide, "v": narrow, "d_out": narrow, "x": tall, "dx": tall}
        found: dict[str, Any] = {f"tile {name}": shared(self.slots(name), *shape) for name, shape in shapes.items()}
        found |= {"out dq": shared(*wide), "out dk": shared(*wide), "out dv": shared(*narrow)}
        for name in self.vectors:
            slots = self.slots("vectors")
            found[f"tile {name}"] = plgpu.SMEM((slots, CHUNK), jnp.int32 if name == "run" else jnp.float32)
        if self.vectors:
            found["scaled"] = shared(*narrow)
            for name in ("rises", "falls", "leaves"):
                found[f"out {name}"] = plgpu.SMEM((CHUNK,), jnp.float32)
            found["out carried"] = plgpu.SMEM((self.key_size,), jnp.float32)
        for group in (*self.inputs, "dx"):
            arrivals, slots = len(self.inputs.get(group, group.split())), self.slots(group)
            readers = sum(group in self.groups(warpgroup) for warpgroup in (_STATE, _QUERIES, _KEYS))
            found[f"full {group}"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)
            found[f"empty {group}"] = plgpu.Barrier(num_arrivals=readers, num_barriers=slots)
        if self.interpret:
            found |= {f"scores {warpgroup}": shared(CHUNK, CHUNK) for warpgroup in (_STATE, _QUERIES, _KEYS)}
        return found


class _Program:
    """One head and one block of value columns.

    Attributes:
        plan: sizes.
        ref: arrays in global memory, tiles and barriers in shared memory, by name.
    """

    def __init__(self, plan: _Plan, ref: dict[str, Any]) -> None:
        self.plan, self.ref = plan, ref
        self.count = ref["q"].shape[1] // CHUNK
        blocks = ref["v"].shape[3] // plan.columns
        self.batch, self.head, self.block = split_index(lax.axis_index("program"), plan.heads, blocks)
        self.block_columns = pl.ds(self.block * plan.columns, plan.columns)
        self.dtype = ref["v"].dtype

    def run(self) -> None:
        """Every warpgroup finds its part."""
        warpgroup = lax.axis_index("warpgroup")
        parts = {_STATE: self.state, _QUERIES: self.queries, _KEYS: self.keys, _COPIES: self.copy}
        for number, part in parts.items():

            @pl.when(warpgroup == number)
            def _(number: int = number, part: Any = part) -> None:
                if number == _COPIES:
                    plgpu.set_max_registers(_COPYING, action="decrease")
                else:
                    plgpu.set_max_registers(_COMPUTING, action="increase")
                part()

    def of_head(self, name: str) -> Any:
        """The head of an array that this program reads."""
        return group_of_head(self.head, self.plan.heads, self.ref[name].shape[_head_axis(name)])

    def chunk(self, n: Any) -> Any:
        """Index of the chunk walked after n others."""
        return jnp.int32(self.count - 1) - n

    def tokens(self, n: Any) -> Any:
        """Tokens of the chunk walked after n others."""
        return pl.ds(self.chunk(n) * CHUNK, CHUNK)

    def copy(self) -> None:
        """Copies chunk after chunk of the inputs into their rings, as far ahead as these have room."""

        @pl.loop(0, self.count)
        def _(n: Any) -> None:
            for group, members in self.plan.inputs.items():
                slot = self.free(group, n)
                for name in members:
                    source = self.ref[name]
                    if name == "run":
                        source = source.at[self.batch, self.chunk(n)]
                    elif group == "vectors":
                        source = source.at[self.batch, self.of_head(name), self.chunk(n)]
                    elif name == "x":
                        source = source.at[self.batch, self.of_head(name), self.chunk(n), :, self.block_columns]
                    else:
                        columns = self.block_columns if name in ("v", "d_out") else slice(None)
                        source = source.at[self.batch, self.tokens(n), self.of_head(name), columns]
                    target = self.ref[f"tile {name}"].at[slot]
                    plgpu.copy_gmem_to_smem(source, target, self.ref[f"full {group}"].at[slot])

        for group in self.plan.inputs:
            self.drain(group)

    def slot(self, group: str, n: Any) -> Any:
        """Slot of a ring for the chunk walked after n others."""
        return lax.rem(n, jnp.int32(self.plan.slots(group)))

    def free(self, group: str, n: Any) -> Any:
        """Waits until the ring has room for one more chunk; its slot."""
        slot = self.slot(group, n)

        @pl.when(n >= self.plan.slots(group))
        def _() -> None:
            plgpu.barrier_wait(self.ref[f"empty {group}"].at[slot])

        return slot

    def drain(self, group: str) -> None:
        """Waits until every tile that was written to a ring has been read."""
        for slot in range(min(self.plan.slots(group), self.count)):
            plgpu.barrier_wait(self.ref[f"empty {group}"].at[slot])

    def take(self, warpgroup: int, n: Any) -> dict[str, Any]:
        """Waits for all that a warpgroup reads of a chunk: tiles by name."""
        tiles = {}
        for group in self.plan.groups(warpgroup):
            slot = self.slot(group, n)
            plgpu.barrier_wait(self.ref[f"full {group}"].at[slot])
            for name in self.plan.vectors if group == "vectors" else (group,):
                tiles[name] = self.ref[f"tile {name}"].at[slot]
        return tiles

    def release(self, warpgroup: int, n: Any) -> None:
        """Lets what a chunk took be written again."""
        for group in self.plan.groups(warpgroup):
            plgpu.barrier_arrive(self.ref[f"empty {group}"].at[self.slot(group, n)])

    def deliver(self, n: Any, values: dict[str, Array]) -> None:
        """Copies results of a chunk to global memory, once those of the chunk before have left their places."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for name, x in values.items():
            source = self.ref[f"out {name}"]
            source[...] = x.astype(source.dtype)
        plgpu.commit_smem()
        for name in values:
            target = self.ref[name]
            if name in ("dq", "dk"):
                target = target.at[self.block, self.batch, self.tokens(n), self.head]
            elif name == "dv":
                target = target.at[self.batch, self.tokens(n), self.head, self.block_columns]
            else:
                target = target.at[self.batch, self.head, self.block, self.chunk(n)]
            plgpu.copy_smem_to_gmem(self.ref[f"out {name}"], target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    def state(self) -> None:
        """dX of every chunk, for the warpgroup of the keys, and what the decays of whole chunks carry."""
        ref, plan, warpgroup = self.ref, self.plan, _STATE
        products = Products(ref.get(f"scores {warpgroup}"))

        def step(n: Any, dx: Array) -> Array:
            slot = self.free("dx", n)
            rounded = ref["tile dx"].at[slot]
            rounded[...] = dx.astype(self.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ref["full dx"].at[slot])
            tiles = self.take(warpgroup, n)
            d_out = tiles["d_out"]
            if plan.vectors:
                kept = ref["kept"][self.batch, self.of_head("kept"), self.chunk(n)]
                scaled = tile(d_out).astype(jnp.float32) * rows(tiles["enter"], plan.columns)
                ref["scaled"][...] = scaled.astype(self.dtype)
                plgpu.commit_smem()
                d_out = ref["scaled"]
                dx = dx * kept
                self.deliver(n, {"carried": jnp.sum(dx * tile(tiles["x"]).astype(jnp.float32), axis=1)})
            dx = products.add(dx, tiles["q"].transpose((1, 0)), d_out)
            self.release(warpgroup, n)
            return dx

        if "d_final" in ref:
            source = ref["d_final"].at[self.batch, self.of_head("d_final"), :, self.block_columns]
            dx = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
        else:
            dx = plgpu.layout_cast(jnp.zeros((plan.key_size, plan.columns), jnp.float32), plgpu.Layout.WGMMA)
        dx = lax.fori_loop(0, self.count, step, dx)
        self.drain("dx")
        plgpu.wait_smem_to_gmem(0)
        ref["d_initial"][self.batch, self.head, :, self.block_columns] = dx

    def queries(self) -> None:
        """dq, and the pairs of every token with tokens and the state before it."""
        plan, warpgroup = self.plan, _QUERIES
        products = Products(self.ref.get(f"scores {warpgroup}"))
        square, wide = (CHUNK, CHUNK), (CHUNK, plan.key_size)

        @pl.loop(0, self.count)
        def _(n: Any) -> None:
            tiles = self.take(warpgroup, n)
            vectors = {name: tiles[name] for name in plan.vectors}
            pair = square, tiles["d_out"], tiles["v"].transpose((1, 0))
            values, pairs = {}, None
            if vectors:
                same = square, tiles["q"], tiles["k"].transpose((1, 0))
                weights, scores = products.together(pair, same)
                weights = masked(weights, vectors)
                pairs = pair_sums(weights * scores)
            else:
                weights = masked(products.new(*pair), vectors)
            weights = weights.astype(self.dtype)
            dq = products.new(wide, tiles["d_out"], tiles["x"].transpose((1, 0)))
            if pairs is not None:
                dq = dq * rows(tiles["enter"], plan.key_size)
                values["rises"] = pairs + jnp.sum(dq * tile(tiles["q"]).astype(jnp.float32), axis=1)
            values["dq"] = products.add(dq, weights, tiles["k"])
            self.release(warpgroup, n)
            self.deliver(n, values)

        plgpu.wait_smem_to_gmem(0)

    def keys(self) -> None:
        """dk and dv, and the pairs of every token with tokens and the state after it."""
        plan, warpgroup = self.plan, _KEYS
        products = Products(self.ref.get(f"scores {warpgroup}"))
        square, wide, narrow = (CHUNK, CHUNK), (CHUNK, plan.key_size), (CHUNK, plan.columns)

        @pl.loop(0, self.count)
        def _(n: Any) -> None:
            tiles = self.take(warpgroup, n)
            vectors = {name: tiles[name] for name in plan.vectors}
            values = {}
            scores, d_weights = products.together(
                (square, tiles["k"], tiles["q"].transpose((1, 0))),
                (square, tiles["v"], tiles["d_out"].transpose((1, 0))),
            )
            weights, d_weights = masked_together([scores, d_weights], vectors, reverse=True)
            if vectors:
                values["falls"] = pair_sums(d_weights * scores)
            weights, d_weights = weights.astype(self.dtype), d_weights.astype(self.dtype)
            dk = products.new(wide, tiles["v"], tiles["dx"].transpose((1, 0)))
            if vectors:
                dk = dk * rows(tiles["leave"], plan.key_size)
                values["leaves"] = jnp.sum(dk * tile(tiles["k"]).astype(jnp.float32), axis=1)
            values["dk"] = products.add(dk, d_weights, tiles["q"])
            dv = products.new(narrow, tiles["k"], tiles["dx"])
            if vectors:
                dv = dv * rows(tiles["leave"], plan.columns)
            values["dv"] = products.add(dv, weights, tiles["d_out"])
            self.release(warpgroup, n)
            self.deliver(n, values)

        plgpu.wait_smem_to_gmem(0)
