"""The warpgroups of the kernel of all gradients of a decayed linear attention; see `gpu_backward`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmix_kernels.decays import CHUNK
from jaxmix_kernels.gpu_chunks import (
    COLUMNS,
    COPYING_REGISTERS,
    Products,
    computing_registers,
    group_of_head,
    layout_of_tiles,
    masked,
    masked_together,
    pair_sums,
    rows,
    split_index,
    tile,
)
from jaxmix_kernels.gpu_rings import Rings

Array = jax.Array

VECTORS = ("enter", "leave", "high", "low", "run")
ADDED = ("more dq", "more dk")
"""Gradients that are added before results are rounded."""
WARPGROUPS = 4
_STATE, _QUERIES, _KEYS, _COPIES = range(WARPGROUPS)


def head_axis(name: str) -> int:
    """The axis of an array that counts heads."""
    return 2 if name in ("q", "k", "v", "d_out", *ADDED) else 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed when the kernel is traced; with `same`, values are the keys, and dv is added to dk."""

    heads: int
    key_size: int
    columns: int
    vectors: tuple[str, ...]
    added: tuple[str, ...]
    same: bool
    interpret: bool

    @property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Rings that are filled from global memory, and the arrays in each."""
        groups = {"vectors": self.vectors} if self.vectors else {}
        return groups | {name: (name,) for name in ("d_out", "q", "k", "v", "x", *self.added)}

    def read(self, warpgroup: int) -> dict[str, tuple[str, ...]]:
        """Rings that a warpgroup reads, and the tiles in each."""
        names = {
            _STATE: ("d_out", "q", "x") if self.vectors else ("d_out", "q"),
            _QUERIES: ("d_out", "q", "k", "v", "x", *(name for name in self.added if name == "more dq")),
            _KEYS: ("d_out", "q", "k", "v", "dx", *(name for name in self.added if name == "more dk")),
        }[warpgroup]
        vectors = {"vectors": self.vectors} if self.vectors else {}
        return vectors | {name: (name,) for name in names}

    def slots(self, group: str) -> int:
        """Chunks that a ring holds."""
        return 3 if self.key_size == COLUMNS and group in self.inputs and group not in ADDED else 2

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers by name."""
        transforms = layout_of_tiles(min(self.key_size, self.columns), dtype)

        def shared(*shape: int) -> Any:
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        tall, wide, narrow = (self.key_size, self.columns), (CHUNK, self.key_size), (CHUNK, self.columns)
        shapes = {"q": wide, "k": wide, "v": narrow, "d_out": narrow, "x": tall, "dx": tall}
        shapes |= dict.fromkeys(self.added, wide)
        found: dict[str, Any] = {f"tile {name}": shared(self.slots(name), *shape) for name, shape in shapes.items()}
        found |= {"out dq": shared(*wide), "out dk": shared(*wide)}
        if not self.same:
            found["out dv"] = shared(*narrow)
        for name in self.vectors:
            slots = self.slots("vectors")
            found[f"tile {name}"] = plgpu.SMEM((slots, CHUNK), jnp.int32 if name == "run" else jnp.float32)
        if self.vectors:
            found["scaled"] = shared(*narrow)
            for name in ("rises", "falls", "leaves"):
                found[f"out {name}"] = plgpu.SMEM((CHUNK,), jnp.float32)
            found["out carried"] = plgpu.SMEM((self.key_size,), jnp.float32)
        for group in (*self.inputs, "dx"):
            arrivals, slots = len(self.inputs.get(group, (group,))), self.slots(group)
            readers = sum(group in self.read(warpgroup) for warpgroup in (_STATE, _QUERIES, _KEYS))
            found[f"full {group}"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)
            found[f"empty {group}"] = plgpu.Barrier(num_arrivals=readers, num_barriers=slots)
        if self.interpret:
            found |= {f"scores {warpgroup}": shared(CHUNK, CHUNK) for warpgroup in (_STATE, _QUERIES, _KEYS)}
        return found


class Program:
    """One head and one block of value columns.

    Attributes:
        plan: sizes.
        ref: arrays in global memory, tiles and barriers in shared memory, by name.
    """

    def __init__(self, plan: Plan, ref: dict[str, Any]) -> None:
        self.plan, self.ref = plan, ref
        self.count = ref["q"].shape[1] // CHUNK
        blocks = ref["v"].shape[3] // plan.columns
        self.batch, self.head, self.block = split_index(lax.axis_index("program"), plan.heads, blocks)
        self.block_columns = pl.ds(self.block * plan.columns, plan.columns)
        self.dtype = ref["v"].dtype
        self.rings = Rings(ref, plan.slots, self.count)

    def run(self) -> None:
        """Every warpgroup finds its part."""
        warpgroup = lax.axis_index("warpgroup")
        parts = {_STATE: self.state, _QUERIES: self.queries, _KEYS: self.keys, _COPIES: self.copy}
        for number, part in parts.items():

            @pl.when(warpgroup == number)
            def _(number: int = number, part: Any = part) -> None:
                if number == _COPIES:
                    plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
                else:
                    plgpu.set_max_registers(computing_registers(WARPGROUPS - 1), action="increase")
                part()

    def of_head(self, name: str) -> Any:
        """The head of an array that this program reads."""
        return group_of_head(self.head, self.plan.heads, self.ref[name].shape[head_axis(name)])

    def chunk(self, n: Any) -> Any:
        """Index of the chunk walked after n others."""
        return jnp.int32(self.count - 1) - n

    def tokens(self, n: Any) -> Any:
        """Tokens of the chunk walked after n others."""
        return pl.ds(self.chunk(n) * CHUNK, CHUNK)

    def copy(self) -> None:
        """Copies chunk after chunk of the inputs."""
        self.rings.fill(self.plan.inputs, self.sources)

    def sources(self, n: Any) -> dict[str, dict[str, Any]]:
        """What a chunk consists of, for every ring."""
        ref, chunk = self.ref, self.chunk(n)
        found: dict[str, dict[str, Any]] = {}
        for ring, members in self.plan.inputs.items():
            found[ring] = {}
            for name in members:
                if name == "run":
                    source = ref[name].at[self.batch, chunk]
                elif ring == "vectors":
                    source = ref[name].at[self.batch, self.of_head(name), chunk]
                elif name == "x":
                    source = ref[name].at[self.batch, self.of_head(name), chunk, :, self.block_columns]
                else:
                    columns = self.block_columns if name in ("v", "d_out") else slice(None)
                    source = ref[name].at[self.batch, self.tokens(n), self.of_head(name), columns]
                found[ring][name] = source
        return found

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
            slot = self.rings.wait_until_free("dx", n)
            rounded = ref["tile dx"].at[slot]
            rounded[...] = dx.astype(self.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.rings.full("dx", n))
            tiles = self.rings.take(plan.read(warpgroup), n)
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
            self.rings.release(plan.read(warpgroup), n)
            return dx

        if "d_final" in ref:
            source = ref["d_final"].at[self.batch, self.of_head("d_final"), :, self.block_columns]
            dx = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
        else:
            dx = plgpu.layout_cast(jnp.zeros((plan.key_size, plan.columns), jnp.float32), plgpu.Layout.WGMMA)
        dx = lax.fori_loop(0, self.count, step, dx)
        self.rings.drain("dx")
        plgpu.wait_smem_to_gmem(0)
        ref["d_initial"][self.batch, self.head, :, self.block_columns] = dx

    def queries(self) -> None:
        """dq, and the pairs of every token with tokens and the state before it."""
        plan, warpgroup = self.plan, _QUERIES
        products = Products(self.ref.get(f"scores {warpgroup}"))
        square, wide = (CHUNK, CHUNK), (CHUNK, plan.key_size)

        @pl.loop(0, self.count)
        def _(n: Any) -> None:
            tiles = self.rings.take(plan.read(warpgroup), n)
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
            if "more dq" in tiles:
                dq += tile(tiles["more dq"]).astype(jnp.float32)
            values["dq"] = products.add(dq, weights, tiles["k"])
            self.rings.release(plan.read(warpgroup), n)
            self.deliver(n, values)

        plgpu.wait_smem_to_gmem(0)

    def keys(self) -> None:
        """dk and dv, and the pairs of every token with tokens and the state after it."""
        plan, warpgroup = self.plan, _KEYS
        products = Products(self.ref.get(f"scores {warpgroup}"))
        square, wide, narrow = (CHUNK, CHUNK), (CHUNK, plan.key_size), (CHUNK, plan.columns)

        @pl.loop(0, self.count)
        def _(n: Any) -> None:
            tiles = self.rings.take(plan.read(warpgroup), n)
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
            if "more dk" in tiles:
                dk += tile(tiles["more dk"]).astype(jnp.float32)
            values["dk"] = products.add(dk, d_weights, tiles["q"])
            dv = products.new(narrow, tiles["k"], tiles["dx"])
            if vectors:
                dv = dv * rows(tiles["leave"], plan.columns)
            if plan.same:
                values["dk"] = products.add(values["dk"] + dv, weights, tiles["d_out"])
            else:
                values["dv"] = products.add(dv, weights, tiles["d_out"])
            self.rings.release(plan.read(warpgroup), n)
            self.deliver(n, values)

        plgpu.wait_smem_to_gmem(0)
