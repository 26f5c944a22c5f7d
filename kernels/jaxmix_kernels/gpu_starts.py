"""What a start state contributes to a linear attention on Hopper, added to what was computed from a state of zeros.

A linear attention is linear in its state. The start X_0 gives a chunk enter (q X) and the state before it X, where X is
kept X from chunk to chunk, so that all of it is X_0 times a number. One program adds this to one head and one block of
value columns, chunk after chunk: the start stays in shared memory, rounded as an operand, and in registers where
states are wanted, and everything else passes by once. Results are written over what they are added to, so that it ends
where nothing of the start is left, and does not begin where the start is zeros.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmix_kernels.decays import CHUNK
from jaxmix_kernels.gpu_chunks import (
    COLUMNS,
    LARGEST_GRID,
    WGMMA_ROWS,
    Products,
    decayed,
    group_of_head,
    interpreter,
    layout_of_tiles,
    reached,
    refuse,
    rows,
    split_index,
    tile,
)

Array = jax.Array

_SLOTS = 2
"""Tiles of results on their way to global memory."""


def add_starts(
    q: Array,
    out: Array,
    starts: Array,
    enter: Array | None,
    kept: Array | None,
    states: Array | None,
    *,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """out_n + enter_n (q_n X_n), and states_n + X_n, for chunks n with X_0 = starts and X_{n+1} = kept_n X_n.

    Nothing behind a border, where `enter` and `kept` are 0, is multiplied by the start. `out` and `states` are changed
    in place, which takes no copy where nothing else reads them.

    Args:
        q: queries [B, T, H, D], bfloat16, D in {64, 128}; T is a multiple of `CHUNK`.
        out: outputs from states of zeros [B, T, H, E], bfloat16, E in {32, 64, 128}.
        starts: states before the first chunk, [B, H, D, E], float32.
        enter: decay from the state before the chunk to each token, [B, Hd, N, C], float32, Hd a divisor of H; None
            for 1.
        kept: decay of the whole chunk, [B, Hd, N], float32; None where `enter` is.
        states: states before every chunk, from zeros, [B, H, N, D, E], bfloat16; None for none.
        interpret: True, or `plgpu.InterpretGPUParams(...)`, runs on a CPU, for tests.

    Returns:
        Outputs, and states where they are given; sums are float32, rounded once.

    Raises:
        NotImplementedError: the kernel does not take these dtypes or sizes.
        ValueError: the tokens do not fill chunks, or the head count of decays does not divide H.
    """
    batch, _, heads, key_size = q.shape
    value_size = out.shape[3]
    refuse([q, out] if states is None else [q, out, states], key_size, value_size)
    if key_size < WGMMA_ROWS:
        raise NotImplementedError(f"start states are added for a key size of at least {WGMMA_ROWS}, got {key_size}")
    if enter is not None and heads % enter.shape[1]:
        raise ValueError(f"the head count of decays must divide that of q, {heads}; got {enter.shape[1]}")
    columns = min(value_size, COLUMNS)
    programs = batch * heads * (value_size // columns)
    if programs > LARGEST_GRID:
        raise NotImplementedError(f"B * H * E / {columns} must be at most {LARGEST_GRID}, got {programs}")
    inputs = {"q": q, "starts": starts, "enter": enter, "kept": kept, "reached": _reached(starts, kept, q.shape[1])}
    given = {name: x for name, x in inputs.items() if x is not None}
    changed = {"out": out} | ({} if states is None else {"states": states})
    transforms = layout_of_tiles(min(key_size, columns), q.dtype)
    scratch = {
        "start": plgpu.SMEM((key_size, columns), q.dtype, transforms=transforms),
        "tile out": plgpu.SMEM((_SLOTS, CHUNK, columns), q.dtype, transforms=transforms),
    }
    if states is not None:
        scratch["tile states"] = plgpu.SMEM((_SLOTS, key_size, columns), q.dtype, transforms=transforms)
    kernel = plgpu.kernel(
        lambda *refs: _program(dict(zip((*given, *changed, *scratch), refs, strict=True)), columns, transforms),
        out_type=(),
        grid=(programs,),
        grid_names=("program",),
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter(interpret),
    )
    change: Any = pl.run_state(lambda references: kernel(*given.values(), *references))
    return change(tuple(changed.values()))


def _reached(starts: Array, kept: Array | None, tokens: int) -> Array:
    """Chunks, from the first one on, to which the start gives anything, int32 [B, H]."""
    count = jnp.int32(tokens // CHUNK)
    if kept is not None:
        count = jnp.repeat(reached(kept), starts.shape[1] // kept.shape[1], axis=1)
    return jnp.where(jnp.any(starts != 0, axis=(2, 3)), count, 0)


def _program(ref: dict[str, Any], columns: int, transforms: tuple[Any, ...]) -> None:
    """One head and one block of columns, all chunks."""
    _, _, heads, key_size = ref["q"].shape
    batch, head, block = split_index(lax.axis_index("program"), heads, ref["out"].shape[3] // columns)
    block_columns = pl.ds(block * columns, columns)
    decay_head = group_of_head(head, heads, ref["enter"].shape[1]) if "enter" in ref else None

    def spec(*shape: int | None) -> Any:
        return plgpu.BlockSpec(shape, lambda n: (n, *[0] * (len(shape) - 1)), transforms=transforms)

    sources: dict[str, tuple[Any, Any]] = {
        "q": (spec(CHUNK, key_size), ref["q"].at[batch, :, head]),
        "out": (spec(CHUNK, columns), ref["out"].at[batch, :, head, block_columns]),
    }
    if "enter" in ref:
        sources["enter"] = plgpu.BlockSpec((None, CHUNK), lambda n: (n, 0)), ref["enter"].at[batch, decay_head]
    if "states" in ref:
        source = ref["states"].at[batch, head, :, :, block_columns]
        sources["states"] = spec(None, key_size, columns), source
    pending = _SLOTS * (1 + ("states" in ref)) - 1

    def write(name: str, n: Any, x: Array, target: Any) -> None:
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        slot = ref[f"tile {name}"].at[lax.rem(n, jnp.int32(_SLOTS))]
        slot[...] = x.astype(slot.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, target)

    def step(indices: tuple[Any, ...], *tiles: Any) -> Array | None:
        """With decays the last of the tiles is the factor that the start has come down to."""
        (n,), chunk = indices, dict(zip(sources, tiles, strict=False))
        factor = kept = None
        if "enter" in ref:
            factor, kept = tiles[-1], ref["kept"][batch, decay_head, n]
        entered, before = Products(None).new((CHUNK, columns), chunk["q"], ref["start"]), start
        if factor is not None:
            entered = decayed(entered, rows(chunk["enter"], columns) * factor, segments=True)
        place = batch, pl.ds(n * CHUNK, CHUNK), head, block_columns
        write("out", n, tile(chunk["out"]).astype(jnp.float32) + entered, ref["out"].at[place])
        if "states" in ref:
            if factor is not None:
                before = decayed(start, factor, segments=True)
            before = tile(chunk["states"]).astype(jnp.float32) + before
            write("states", n, before, ref["states"].at[batch, head, n, :, block_columns])
        return None if factor is None else factor * kept

    source = ref["starts"].at[batch, head, :, block_columns]
    start = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
    ref["start"][...] = start.astype(ref["start"].dtype)
    plgpu.commit_smem()
    pipeline = plgpu.emit_pipeline(
        step,
        grid=(ref["reached"][batch, head],),
        in_specs=[spec for spec, _ in sources.values()],
        # One more would not fit in shared memory with states at D = E = 128.
        max_concurrent_steps=4,
        init_carry=jnp.float32(1) if "enter" in ref else None,
    )
    pipeline(*(source for _, source in sources.values()))
    plgpu.wait_smem_to_gmem(0)
