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
    decayed,
    group_of_head,
    layout_of_tiles,
    masked,
    masked_together,
    pair_sums,
    rows,
    split_index,
    stopped,
)
from jaxmix_kernels.gpu_operands import LOW, Operand, halves
from jaxmix_kernels.gpu_rings import Rings, Turn

Array = jax.Array

ADDED = ("more dq", "more dk")
"""Gradients that are added before results are rounded."""
WARPGROUPS = 4
_STATE, _QUERIES, _KEYS, _COPIES = range(WARPGROUPS)


def head_axis(name: str) -> int:
    """The axis of an array that counts heads."""
    return 2 if name.removesuffix(LOW) in ("q", "k", "v", "d_out", *ADDED) else 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is fixed when the kernel is traced; with `same`, values are the keys, and dv is added to dk.

    With `is_wide` operands are float32, in two halves: rings have fewer slots, nothing is added, and results go from
    registers to global memory.
    """

    heads: int
    key_size: int
    columns: int
    vectors: tuple[str, ...]
    added: tuple[str, ...]
    same: bool
    is_wide: bool
    interpret: bool

    @property
    def segments(self) -> bool:
        """Whether segments may begin inside: what a border stops may then be anything."""
        return "run" in self.vectors

    @property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Rings that are filled from global memory, and the arrays in each."""
        groups = {"vectors": self.vectors} if self.vectors else {}
        return groups | {name: self.halves(name) for name in ("d_out", "q", "k", "v", "x", *self.added)}

    def halves(self, name: str) -> tuple[str, ...]:
        """The tiles of an operand."""
        return halves(name, self.is_wide)

    def read(self, warpgroup: int) -> dict[str, tuple[str, ...]]:
        """Rings that a warpgroup reads, and the tiles in each."""
        names = {
            _STATE: ("d_out", "q", "x") if self.vectors else ("d_out", "q"),
            _QUERIES: ("d_out", "q", "k", "v", "x", *(name for name in self.added if name == "more dq")),
            _KEYS: ("d_out", "q", "k", "v", "dx", *(name for name in self.added if name == "more dk")),
        }[warpgroup]
        vectors = {"vectors": self.vectors} if self.vectors else {}
        return vectors | {name: self.halves(name) for name in names}

    def slots(self, group: str) -> int:
        """Chunks that a ring holds."""
        if self.is_wide:
            return 1 if self.key_size > COLUMNS and group not in ("vectors", "d_out", "v") else 2
        return 3 if self.key_size == COLUMNS and group in self.inputs and group not in ADDED else 2

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers by name."""
        transforms = layout_of_tiles(min(self.key_size, self.columns), dtype)

        def shared(*shape: int) -> Any:
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        tall, wide, narrow = (self.key_size, self.columns), (CHUNK, self.key_size), (CHUNK, self.columns)
        shapes = {"q": wide, "k": wide, "v": narrow, "d_out": narrow, "x": tall, "dx": tall}
        shapes |= dict.fromkeys(self.added, wide)
        found: dict[str, Any] = {}
        for name, shape in shapes.items():
            found |= {f"tile {half}": shared(self.slots(name), *shape) for half in self.halves(name)}
        if not self.is_wide:
            found |= {"out dq": shared(*wide), "out dk": shared(*wide)}
        if not self.is_wide and not self.same:
            found["out dv"] = shared(*narrow)
        for name in self.vectors:
            slots = self.slots("vectors")
            found[f"tile {name}"] = plgpu.SMEM((slots, CHUNK), jnp.int32 if name == "run" else jnp.float32)
        if self.vectors:
            found |= {half: shared(*narrow) for half in self.halves("scaled")}
            for name in ("rises", "falls", "leaves"):
                found[f"out {name}"] = plgpu.SMEM((CHUNK,), jnp.float32)
            found["out carried"] = plgpu.SMEM((self.key_size,), jnp.float32)
        for group in (*self.inputs, "dx"):
            arrivals, slots = len(self.inputs.get(group, (group,))), self.slots(group)
            readers = sum(group in self.read(warpgroup) for warpgroup in (_STATE, _QUERIES, _KEYS))
            found[f"full {group}"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots)
            found[f"empty {group}"] = plgpu.Barrier(num_arrivals=readers, num_barriers=slots)
        if self.interpret:
            for warpgroup in (_STATE, _QUERIES, _KEYS):
                found |= {half: shared(CHUNK, CHUNK) for half in self.halves(f"scores {warpgroup}")}
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
                elif ring == "x":
                    source = ref[name].at[self.batch, self.of_head(name), chunk, :, self.block_columns]
                else:
                    columns = self.block_columns if ring in ("v", "d_out") else slice(None)
                    source = ref[name].at[self.batch, self.tokens(n), self.of_head(name), columns]
                found[ring][name] = source
        return found

    def deliver(self, n: Any, values: dict[str, Array]) -> None:
        """Copies results of a chunk to global memory, once those of the chunk before have left their places."""
        staged = {name: x for name, x in values.items() if f"out {name}" in self.ref}
        for name, x in values.items():
            if name not in staged:
                self.target(name, n)[...] = x
        if not staged:
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for name, x in staged.items():
            source = self.ref[f"out {name}"]
            source[...] = x.astype(source.dtype)
        plgpu.commit_smem()
        for name in staged:
            plgpu.copy_smem_to_gmem(self.ref[f"out {name}"], self.target(name, n), commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    def target(self, name: str, n: Any) -> Any:
        """Where a result of a chunk belongs."""
        target = self.ref[name]
        if name in ("dq", "dk"):
            return target.at[self.block, self.batch, self.tokens(n), self.head]
        if name == "dv":
            return target.at[self.batch, self.tokens(n), self.head, self.block_columns]
        return target.at[self.batch, self.head, self.block, self.chunk(n)]

    def state(self) -> None:
        """dX of every chunk, for the warpgroup of the keys, and what the decays of whole chunks carry."""
        ref, plan, warpgroup = self.ref, self.plan, _STATE
        products = Products.named(ref, f"scores {warpgroup}")

        def step(turn: Turn, dx: Array) -> Array:
            slot = self.rings.wait_until_free("dx", turn)
            Operand(tuple(ref[f"tile {half}"].at[slot] for half in plan.halves("dx"))).store(dx)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.rings.full("dx", turn))
            tiles = self.rings.take(plan.read(warpgroup), turn)
            q, x, d_out = (Operand.named(tiles, name) for name in ("q", "x", "d_out"))
            if plan.vectors:
                kept = ref["kept"][self.batch, self.of_head("kept"), self.chunk(turn.number)]
                scaled = Operand.named(ref, "scaled")
                scaled.store(decayed(d_out.load(), rows(tiles["enter"], plan.columns), segments=plan.segments))
                plgpu.commit_smem()
                d_out = scaled
                dx = decayed(dx, kept, segments=plan.segments)
                carried = stopped(jnp.sum(dx * x.load(), axis=1), kept, segments=plan.segments)
                self.deliver(turn.number, {"carried": carried})
            dx = products.add(dx, q.transposed, d_out, carried=True)
            self.rings.release(plan.read(warpgroup), turn)
            return dx

        if "d_final" in ref:
            source = ref["d_final"].at[self.batch, self.of_head("d_final"), :, self.block_columns]
            dx = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
        else:
            dx = plgpu.layout_cast(jnp.zeros((plan.key_size, plan.columns), jnp.float32), plgpu.Layout.WGMMA)
        dx = self.rings.walk(step, dx)
        self.rings.drain("dx")
        plgpu.wait_smem_to_gmem(0)
        ref["d_initial"][self.batch, self.head, :, self.block_columns] = dx

    def queries(self) -> None:
        """dq, and the pairs of every token with tokens and the state before it."""
        plan, warpgroup = self.plan, _QUERIES
        products = Products.named(self.ref, f"scores {warpgroup}")
        square, wide = (CHUNK, CHUNK), (CHUNK, plan.key_size)

        def step(turn: Turn, _: None) -> None:
            tiles = self.rings.take(plan.read(warpgroup), turn)
            vectors = {name: tiles[name] for name in plan.vectors}
            q, k, v, x, d_out = (Operand.named(tiles, name) for name in ("q", "k", "v", "x", "d_out"))
            pair = square, d_out, v.transposed
            values, pairs = {}, None
            if vectors:
                same = square, q, k.transposed
                weights, scores = products.together(pair, same)
                weights = masked(weights, vectors)
                pairs = pair_sums(weights * scores)
            else:
                weights = masked(products.new(*pair), vectors)
            weights = d_out.like(weights)
            dq = products.new(wide, d_out, x.transposed)
            if pairs is not None:
                dq = decayed(dq, rows(tiles["enter"], plan.key_size), segments=plan.segments)
                values["rises"] = pairs + jnp.sum(dq * q.load(), axis=1)
            if "more dq" in tiles:
                dq += Operand.named(tiles, "more dq").load()
            values["dq"] = products.add(dq, weights, k)
            self.rings.release(plan.read(warpgroup), turn)
            self.deliver(turn.number, values)

        self.rings.walk(step)
        plgpu.wait_smem_to_gmem(0)

    def keys(self) -> None:
        """dk and dv, and the pairs of every token with tokens and the state after it."""
        plan, warpgroup = self.plan, _KEYS
        products = Products.named(self.ref, f"scores {warpgroup}")
        square = CHUNK, CHUNK

        def step(turn: Turn, _: None) -> None:
            tiles = self.rings.take(plan.read(warpgroup), turn)
            vectors = {name: tiles[name] for name in plan.vectors}
            q, k, v, d_out = (Operand.named(tiles, name) for name in ("q", "k", "v", "d_out"))
            values = {}
            scores, d_weights = products.together((square, k, q.transposed), (square, v, d_out.transposed))
            weights, d_weights = masked_together([scores, d_weights], vectors, reverse=True)
            if vectors:
                values["falls"] = pair_sums(d_weights * scores)
            weights, d_weights = d_out.like(weights), d_out.like(d_weights)
            if plan.is_wide:
                # One after the other, which takes fewer registers.
                dv = self.of_values(products, tiles, weights)
                if not plan.same:
                    self.deliver(turn.number, {"dv": dv})
                dk, leaves = self.of_keys(products, tiles, d_weights)
                found = {"dk": dk + dv if plan.same else dk}
            else:
                dk, leaves = self.of_keys(products, tiles, d_weights)
                dv = self.of_values(products, tiles, weights, dk if plan.same else None)
                found = {"dk": dv} if plan.same else {"dk": dk, "dv": dv}
            if leaves is not None:
                values["leaves"] = leaves
            values |= found
            self.rings.release(plan.read(warpgroup), turn)
            self.deliver(turn.number, values)

        self.rings.walk(step)
        plgpu.wait_smem_to_gmem(0)

    def of_keys(self, products: Products, tiles: dict[str, Any], d_weights: Operand) -> tuple[Array, Array | None]:
        """dk of a chunk, and `leaves` with decays."""
        wide, leaves = (CHUNK, self.plan.key_size), None
        q, k, v, dx = (Operand.named(tiles, name) for name in ("q", "k", "v", "dx"))
        dk = products.new(wide, v, dx.transposed)
        if "leave" in tiles:
            dk = decayed(dk, rows(tiles["leave"], self.plan.key_size), segments=self.plan.segments)
            leaves = jnp.sum(dk * k.load(), axis=1)
        if "more dk" in tiles:
            dk += Operand.named(tiles, "more dk").load()
        return products.add(dk, d_weights, q), leaves

    def of_values(
        self, products: Products, tiles: dict[str, Any], weights: Operand, total: Array | None = None
    ) -> Array:
        """dv of a chunk, which may be added to a total."""
        k, dx, d_out = (Operand.named(tiles, name) for name in ("k", "dx", "d_out"))
        dv = products.new((CHUNK, self.plan.columns), k, dx)
        if "leave" in tiles:
            dv = decayed(dv, rows(tiles["leave"], self.plan.columns), segments=self.plan.segments)
        return products.add(dv if total is None else total + dv, weights, d_out)
