"""Chains of decayed linear attentions on Hopper, fused in one kernel: what one gives, the next takes as keys or values.

Each link of a chain is a linear attention with the same queries,

    out = enter (q X) + P values,   P = M (q keys^T),   X = kept X + keys^T (leave values)

chunk by chunk, with all decays to some power. One warpgroup serves one link and at most 64 columns of its state X,
which stay in its registers. The links run side by side, each a chunk or two behind the one that feeds it: results wait
in shared memory, in a ring of two tiles, and never leave the multiprocessor. One more warpgroup does nothing but copy
chunks of the inputs into rings of their own. A program serves one head and one block of value columns; programs of one
head repeat what the blocks share.

Where gradients need it, states before all chunks and results of links are kept: every link writes its states as it
comes by, and whoever reads a result first also copies it. What the blocks share is written by the first.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmix_kernels.decays import CHUNK, ChunkDecays
from jaxmix_kernels.gpu_chunks import (
    COLUMNS,
    COPYING_REGISTERS,
    LARGEST_GRID,
    VECTORS,
    WGMMA_ROWS,
    Products,
    attend_chunk,
    computing_registers,
    decay_arrays,
    group_of_head,
    interpreter,
    layout_of_tiles,
    refuse,
    split_index,
)
from jaxmix_kernels.gpu_rings import Rings, Turn
from jaxmix_kernels.links import Link

Array = jax.Array

_SLOTS = 2


@dataclasses.dataclass(frozen=True)
class _Worker:
    """A warpgroup: a link, and which 64 columns of the key size it serves; None where values are a block of E."""

    number: int
    link: Link
    part: int | None

    @property
    def groups(self) -> tuple[str, ...]:
        """What it reads, each waited for and released as one."""
        return tuple(dict.fromkeys(("q", self.link.keys, self.link.values)))


def chain_forward(
    links: tuple[Link, ...],
    q: Array,
    k: Array,
    v: Array,
    decays: ChunkDecays | None,
    initials: tuple[Array | None, ...],
    *,
    keep: bool = False,
    interpret: Any = False,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """The output of the last link, the final states of all, and what their gradients need.

    Args:
        links: the chain; all but the last give tiles to later ones.
        q: queries [B, T, H, D], bfloat16; T is a multiple of `CHUNK`.
        k: keys [B, T, Hk, D]; head h reads head h // (H / Hk), as for all head counts.
        v: values [B, T, Hv, E].
        decays: decays and segments; None for neither.
        initials: states before the first chunk, one a link, [B, Hs, D, D or E], float32; None for zeros.
        keep: asks for what the gradients need.
        interpret: True, or `plgpu.InterpretGPUParams(...)`, runs on a CPU, for tests.

    Returns:
        out [B, T, H, E]; states [B, H, D, D or E]; with `keep` the states before every chunk of all links,
        [B, H, N, D, D or E], and then the results of all but the last, [B, T, H, D or E], as later links read them.

    Raises:
        NotImplementedError: the kernel does not take these dtypes or sizes.
    """
    key_size, value_size, heads = q.shape[3], v.shape[3], q.shape[2]
    refuse([q, k, v], key_size, value_size)
    if key_size < WGMMA_ROWS:
        raise NotImplementedError(f"fused chains need a key size of at least {WGMMA_ROWS}, got {key_size}")
    for count in (k.shape[2], v.shape[2], *(x.shape[1] for x in initials if x is not None)):
        if heads % count:
            raise ValueError(f"every head count must divide that of q, {heads}; got {count}")
    given = {"q": q, "k": k, "v": v}
    if decays is not None:
        given |= decay_arrays(decays, q.dtype)
    given |= {f"initial {i}": x for i, x in enumerate(initials) if x is not None}
    columns = min(value_size, COLUMNS)
    blocks = value_size // columns
    batch, programs = q.shape[0], q.shape[0] * heads * blocks
    if programs > LARGEST_GRID:
        raise NotImplementedError(f"B * H * E / {columns} must be at most {LARGEST_GRID}, got {programs}")
    plan = _Plan(links, heads, key_size, columns, bool(interpret))
    results = {"out": jax.ShapeDtypeStruct((batch, q.shape[1], heads, value_size), q.dtype)}
    widths = [key_size if plan.is_keyed(link.values) else value_size for link in links]
    for i, width in enumerate(widths):
        results[f"final {i}"] = jax.ShapeDtypeStruct((batch, heads, key_size, width), jnp.float32)
    if keep:
        shape = batch, heads, q.shape[1] // CHUNK, key_size
        results |= {f"states {i}": jax.ShapeDtypeStruct((*shape, width), q.dtype) for i, width in enumerate(widths)}
        for link, width in zip(links[:-1], widths, strict=False):
            results[f"result {link.result}"] = jax.ShapeDtypeStruct((*q.shape[:3], width), q.dtype)
    scratch = plan.scratch([name for name in given if name in VECTORS], q.dtype)
    kernel = plgpu.kernel(
        lambda *refs: _program(plan, dict(zip((*given, *results, *scratch), refs, strict=True))),
        out_type=tuple(results.values()),
        grid=(programs,),
        grid_names=("program",),
        num_threads=len(plan.workers) + 1,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter(interpret),
    )
    out, *rest = kernel(*given.values())
    return out, tuple(rest[: len(links)]), tuple(rest[len(links) :])


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is fixed when the kernel is traced."""

    links: tuple[Link, ...]
    heads: int
    key_size: int
    columns: int
    interpret: bool

    def is_keyed(self, name: str) -> bool:
        """Whether a tile has as many columns as keys have, so that all blocks of columns share it."""
        return name == "k" or any(link.result == name and self.is_keyed(link.values) for link in self.links)

    @functools.cached_property
    def workers(self) -> tuple[_Worker, ...]:
        """Compute warpgroups, in the order of the links."""
        parts = [
            (link, part)
            for link in self.links
            for part in (range(self.key_size // COLUMNS) if self.is_keyed(link.values) else (None,))
        ]
        return tuple(_Worker(number, link, part) for number, (link, part) in enumerate(parts))

    def first_reader(self, result: str) -> _Worker:
        """The worker that copies the result of a link where it is kept."""
        return next(worker for worker in self.workers if result in worker.groups)

    @property
    def overlap(self) -> bool:
        """Whether registers suffice for products side by side."""
        return self.key_size == COLUMNS and len(self.workers) < 3

    @property
    def registers(self) -> int | None:
        """Registers per thread of a compute warpgroup; None if all that there may be are its own from the start."""
        if len(self.workers) == 1:
            return None
        return computing_registers(len(self.workers))

    def slots(self, group: str) -> int:
        """Chunks that a ring holds."""
        return 3 if group == "q" or (self.key_size == COLUMNS and group in ("k", "v")) else _SLOTS

    def width(self, worker: _Worker) -> int:
        """Columns of a worker's state."""
        return self.columns if worker.part is None else COLUMNS

    def scratch(self, vectors: list[str], dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers by name."""
        transforms = layout_of_tiles(min(self.key_size, self.columns, COLUMNS), dtype)

        def shared(*shape: int) -> Any:
            return plgpu.SMEM(shape, dtype, transforms=transforms)

        scratch: dict[str, Any] = {
            f"tile {name}": plgpu.SMEM((self.slots("q"), CHUNK), _type(name)) for name in vectors
        }
        copies = {"q": 1 + len(vectors), "k": 1, "v": 1}
        for link in self.links[:-1]:
            copies[link.result] = sum(worker.link is link for worker in self.workers)
        for group, count in copies.items():
            readers = sum(group in worker.groups for worker in self.workers)
            slots, width = self.slots(group), self.columns
            if group == "q" or self.is_keyed(group):
                width = self.key_size
            scratch[f"tile {group}"] = shared(slots, CHUNK, width)
            scratch[f"full {group}"] = plgpu.Barrier(num_arrivals=count, num_barriers=slots)
            scratch[f"empty {group}"] = plgpu.Barrier(num_arrivals=readers, num_barriers=slots)
        scratch["tile out"] = shared(_SLOTS, CHUNK, self.columns)
        for worker in self.workers:
            scratch[f"state {worker.number}"] = shared(1, self.key_size, self.width(worker))
            if vectors:
                scratch[f"scaled {worker.number}"] = shared(1, CHUNK, self.width(worker))
            if self.interpret:
                scratch[f"scores {worker.number}"] = shared(CHUNK, CHUNK)
        return scratch


def _type(vector: str) -> Any:
    return jnp.int32 if vector == "run" else jnp.float32


def _program(plan: _Plan, ref: dict[str, Any]) -> None:
    """One head and one block of value columns: every warpgroup finds its part."""
    blocks = ref["out"].shape[3] // plan.columns
    place = split_index(lax.axis_index("program"), plan.heads, blocks)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == len(plan.workers))
    def _() -> None:
        if plan.registers:
            plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
        _copy(plan, ref, *place)

    for worker in plan.workers:

        @pl.when(warpgroup == worker.number)
        def _(worker: _Worker = worker) -> None:
            if plan.registers:
                plgpu.set_max_registers(plan.registers, action="increase")
            _work(plan, worker, ref, *place)


def _copy(plan: _Plan, ref: dict[str, Any], batch: Any, head: Any, block: Any) -> None:
    """Copies chunk after chunk of the inputs into their rings."""

    def of_head(name: str, axis: int) -> Any:
        return group_of_head(head, plan.heads, ref[name].shape[axis])

    def sources(n: Any) -> dict[str, dict[str, Any]]:
        tokens = pl.ds(n * CHUNK, CHUNK)
        found = {"q": {"q": ref["q"].at[batch, tokens, head]}}
        for name in VECTORS:
            if name in ref:
                source = ref[name].at[batch, n] if name == "run" else ref[name].at[batch, of_head(name, 1), n]
                found["q"][name] = source
        found["k"] = {"k": ref["k"].at[batch, tokens, of_head("k", 2)]}
        value_columns = pl.ds(block * plan.columns, plan.columns)
        found["v"] = {"v": ref["v"].at[batch, tokens, of_head("v", 2), value_columns]}
        return found

    _rings(plan, ref).fill(("q", "k", "v"), sources)


def _rings(plan: _Plan, ref: dict[str, Any]) -> Rings:
    return Rings(ref, plan.slots, ref["q"].shape[1] // CHUNK)


def _work(plan: _Plan, worker: _Worker, ref: dict[str, Any], batch: Any, head: Any, block: Any) -> None:
    """One link, and one block of columns of its state: all chunks."""
    link, number, width = worker.link, plan.links.index(worker.link), plan.width(worker)
    block_columns = pl.ds(block * plan.columns, plan.columns)
    own = slice(None) if worker.part is None else pl.ds(worker.part * COLUMNS, COLUMNS)
    state_columns = block_columns if worker.part is None else own
    products = Products.named(ref, f"scores {worker.number}")
    rounded_states, dtype = ref[f"state {worker.number}"], ref["q"].dtype

    rings = _rings(plan, ref)
    vectors = tuple(name for name in VECTORS if name in ref)
    read = {group: ("q", *vectors) if group == "q" else (group,) for group in worker.groups}

    results = [link.result for link in plan.links[:-1]]
    copied = [name for name in results if f"result {name}" in ref and plan.first_reader(name) is worker]

    def keep(source: Any, name: str, place: tuple[Any, ...], *, shared: bool) -> None:
        """Copies to an array that is kept; what the blocks share, from the first of them."""
        if name not in ref:
            return

        def copy() -> None:
            plgpu.copy_smem_to_gmem(source, ref[name].at[place])

        blocks = ref["out"].shape[3] // plan.columns
        pl.when(block == 0)(copy) if shared and blocks > 1 else copy()

    def step(turn: Turn, state: Array) -> Array:
        n, kept = turn.number, None
        if "kept" in ref:
            kept = ref["kept"][batch, group_of_head(head, plan.heads, ref["kept"].shape[1]), n]
        own_place = _own_place(kept)
        rounded = rounded_states.at[own_place]
        scaled = ref[f"scaled {worker.number}"].at[own_place] if vectors else None
        keep(rounded, f"states {number}", (batch, head, n, slice(None), state_columns), shared=worker.part is not None)
        tiles = rings.take(read, turn)
        for name in copied:
            columns = slice(None) if plan.is_keyed(name) else block_columns
            place = batch, pl.ds(n * CHUNK, CHUNK), head, columns
            keep(tiles[name], f"result {name}", place, shared=plan.is_keyed(name))
        out, state = attend_chunk(
            products,
            tiles["q"],
            tiles[link.keys],
            tiles[link.values].at[:, own],
            state,
            {name: tiles[name] for name in vectors},
            kept,
            rounded_state=rounded,
            scaled=scaled,
            power=link.power,
            overlap=plan.overlap,
        )
        if f"states {number}" in ref:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        rings.release(read, turn)
        rounded[...] = state.astype(dtype)
        if link.result == "out":
            plgpu.wait_smem_to_gmem(_SLOTS - 1, wait_read_only=True)
            source = ref["tile out"].at[rings.slot("out", turn)]
            source[...] = out.astype(dtype)
            plgpu.commit_smem()
            target = ref["out"].at[batch, pl.ds(n * CHUNK, CHUNK), head, block_columns]
            plgpu.copy_smem_to_gmem(source, target)
            return state
        slot = rings.wait_until_free(link.result, turn)
        ref[f"tile {link.result}"].at[slot, :, own][...] = out.astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(rings.full(link.result, turn))
        return state

    if f"initial {number}" in ref:
        source = ref[f"initial {number}"]
        source = source.at[batch, group_of_head(head, plan.heads, source.shape[1]), :, state_columns]
        state = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
    else:
        state = plgpu.layout_cast(jnp.zeros((plan.key_size, width), jnp.float32), plgpu.Layout.WGMMA)
    rounded_states[0] = state.astype(dtype)
    plgpu.commit_smem()
    state = rings.walk(step, state)
    if link.result != "out":
        rings.drain(link.result)
    if link.result == "out" or f"states {number}" in ref:
        plgpu.wait_smem_to_gmem(0)

    def store() -> None:
        ref[f"final {number}"][batch, head, :, state_columns] = state

    store() if worker.part is None else pl.when(block == 0)(store)


def _own_place(kept: Array | None) -> Any:
    """Index of what a warpgroup has in shared memory for itself: 0.

    With decays it is made from one, which is never negative, as if it could be anything. Where it is known, the
    compiler takes the addresses of all operands there out of the loop over chunks, has no registers left for them, and
    then reads them back from memory in every turn, or lets no two products overlap.
    """
    return jnp.int32(0) if kept is None else (kept < 0).astype(jnp.int32)
