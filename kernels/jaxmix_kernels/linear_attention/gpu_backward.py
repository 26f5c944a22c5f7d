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

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmix_kernels.decays import CHUNK, DTYPES, BackwardArguments, BackwardResult, ChunkDecays
from jaxmix_kernels.gpu_chunks import (
    COLUMNS,
    LARGEST_GRID,
    VECTORS,
    WGMMA_ROWS,
    decay_arrays,
    interpreter,
    refuse,
)
from jaxmix_kernels.gpu_operands import LOW, halve
from jaxmix_kernels.linear_attention.gpu_backward_program import ADDED, WARPGROUPS, Plan, Program, head_axis

Array = jax.Array


def decayed_attention_backward(arguments: BackwardArguments, *, interpret: Any = False) -> BackwardResult:
    """Gradients of a decayed attention for each head.

    Args:
        arguments: see `BackwardArguments`.
        interpret: True, or `plgpu.InterpretGPUParams(...)`, runs on a CPU, for tests.

    Returns:
        dq, dk, dv, d_initial and d_steps of all H heads: where heads share an array, the caller sums.

    Raises:
        NotImplementedError: the kernel does not take these dtypes or sizes.
        ValueError: the tokens do not fill chunks, or a head count does not divide another.
    """
    q, k, v, d_out, decays, states, d_final, *added = arguments
    same, values = v is None, k if v is None else v
    key_size, value_size = q.shape[3], values.shape[3]
    refuse([q, k, values, d_out, states], key_size, value_size, DTYPES)
    given: dict[str, Array] = {"q": q, "k": k, "v": values, "d_out": d_out, "x": states}
    more = {name: x for name, x in zip(ADDED, added, strict=True) if x is not None}
    # At other sizes blocks of columns are summed afterwards anyway, or there is no room for them on the chip, as there
    # is none in float32.
    same_inside = same and key_size == value_size == COLUMNS
    if key_size == value_size == COLUMNS and q.dtype == jnp.bfloat16:
        given |= more
        more = {}
    if d_final is not None:
        given["d_final"] = d_final
    # Products of the state have D rows, and a wgmma at least 64.
    padding = max(0, WGMMA_ROWS - key_size)
    if padding:
        for name, axis in {"q": 3, "k": 3, "x": 3, "d_final": 2}.items():
            if name in given:
                x = given[name]
                given[name] = jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)])
    for name in ("q", "k", "v", "d_out", "x"):
        given |= halve(name, given[name])
    if decays is not None:
        given |= decay_arrays(decays, q.dtype)
    results = _call(given, same_inside, interpret)

    def gathered(name: str) -> Array:
        """The sum over blocks, and what is to be added."""
        x, others = results[name], [more[f"more {name}"]] if f"more {name}" in more else []
        if name == "dk" and same and not same_inside:
            others.append(results["dv"])
        if x.shape[0] == 1 and not others:
            return x[0, ..., :key_size]
        total = jnp.sum(x[..., :key_size].astype(jnp.float32), axis=0)
        return sum((other.astype(jnp.float32) for other in others), total).astype(x.dtype)

    d_steps = None
    if decays is not None:
        sums = {name: jnp.sum(results[name], axis=2) for name in ("rises", "falls", "leaves", "carried")}
        d_steps = _steps(decays, **sums)
    d_initial = results["d_initial"][:, :, :key_size]
    dv = None if same else results["dv"]
    return BackwardResult(gathered("dq"), gathered("dk"), dv, d_initial, d_steps)


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


def _call(given: dict[str, Array], same: bool, interpret: Any) -> dict[str, Array]:
    """Lays out the kernel: dq and dk [blocks, B, T, H, D], dv, d_initial, with decays sums [B, H, blocks, N, ...]."""
    batch, tokens, _, key_size = given["q"].shape
    value_size, is_wide = given["v"].shape[3], "v" + LOW in given
    dtype = jnp.float32 if is_wide else given["v"].dtype
    vectors = tuple(name for name in VECTORS if name in given)
    counts = {name: x.shape[head_axis(name)] for name, x in given.items() if name != "run"}
    heads = max(counts.values())
    for name, count in counts.items():
        if heads % count:
            raise ValueError(f"every head count must divide the largest, {heads}; {name} has {count}")
    columns = min(value_size, COLUMNS)
    blocks, chunks = value_size // columns, tokens // CHUNK
    programs = batch * heads * blocks
    if programs > LARGEST_GRID:
        raise NotImplementedError(f"B * H * E / {columns} must be at most {LARGEST_GRID}, got {programs}")
    added = tuple(name for name in ADDED if name in given)
    plan = Plan(heads, key_size, columns, vectors, added, same, is_wide, bool(interpret))
    results = {
        "dq": jax.ShapeDtypeStruct((blocks, batch, tokens, heads, key_size), dtype),
        "dk": jax.ShapeDtypeStruct((blocks, batch, tokens, heads, key_size), dtype),
        "dv": jax.ShapeDtypeStruct((batch, tokens, heads, value_size), dtype),
        "d_initial": jax.ShapeDtypeStruct((batch, heads, key_size, value_size), jnp.float32),
    }
    if same:
        del results["dv"]
    if vectors:
        for name, width in {"rises": CHUNK, "falls": CHUNK, "leaves": CHUNK, "carried": key_size}.items():
            results[name] = jax.ShapeDtypeStruct((batch, heads, blocks, chunks, width), jnp.float32)
    scratch = plan.scratch(given["v"].dtype)
    kernel = plgpu.kernel(
        lambda *refs: Program(plan, dict(zip((*given, *results, *scratch), refs, strict=True))).run(),
        out_type=tuple(results.values()),
        grid=(programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter(interpret),
    )
    return dict(zip(results, kernel(*given.values()), strict=True))
