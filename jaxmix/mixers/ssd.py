"""The core of Mamba-2 (state-space duality): linear attention with decay and write strength from one step size."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.arrays import (
    GATE_DTYPES,
    INPUT_DTYPES,
    Array,
    check_array,
    check_sizes,
    compute_dtype,
    einsum,
    fail,
    from_numpy,
    is_concrete,
)
from jaxmix.mixers.chunking import Chunks
from jaxmix.mixers.dispatch import Implementation, choose
from jaxmix.mixers.inputs import Sizes
from jaxmix.mixers.linear_attention import LinearSummary, outer
from jaxmix.mixers.recurrence import Recurrence, run_checked
from jaxmix.mixers.segments import check_segment_ids
from jaxmix.mixers.state import KeyValueState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SSDState(KeyValueState):
    """P = sum c dt B x^T [B, H, D, E], D the state size and E the head size of Mamba-2."""

    shared = ("P",)
    axes = ("DE",)
    P: Array


@dataclasses.dataclass(frozen=True)
class _SSD(Recurrence):
    name = "ssd"
    state = SSDState
    summary = LinearSummary
    normalizes = False
    repeats: int
    """Heads that share one B and C."""

    def step(self, state: Any, q: Array, k: Array, v: Array, a: Array) -> tuple[Any, Any]:
        state = SSDState(a[..., None, None] * state.P + outer(k, v))
        return state, self.read(SSDState(state.P[:, :, None]), q)

    def chunked(self, chunks: Chunks, q: Array, k: Array, v: Array, state: Any) -> tuple[Array, Any]:
        q = q[:, :, :, 0]
        # The products of C and B are the same for all heads of a group; only their decays differ.
        products = einsum("bngtd,bngsd->bngts", q[:, :, :: self.repeats], k[:, :, :: self.repeats])
        scores = chunks.decayed(jnp.repeat(products, self.repeats, axis=2))
        out, final = chunks.linear(q, k, v, state.P, scores=scores)
        return out[:, :, :, None], SSDState(final)

    def read(self, state: Any, q: Array) -> Any:
        return einsum("...d,...de->...e", q, state.P), None


def ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    D: Array | None = None,
    *,
    segment_ids: Array | None = None,
    initial_state: SSDState | None = None,
    implementation: Implementation | None = None,
    chunk_size: int = 64,
    sequence_axis: str | None = None,
) -> tuple[Array, SSDState]:
    """The core of Mamba-2: P_t = exp(dt_t A) P_{t-1} + dt_t B_t x_t^T, y_t = P_t^T C_t + D x_t.

    In the terms of linear attention C are queries, B keys, dt x values and dt A log decays.

    Args:
        x: inputs, [B, T, H, E], bfloat16, float32 or float64.
        dt: step sizes >= 0 after softplus, float32, [B, T, H].
        A: negative rates, float32, [H].
        B: input maps, [B, T, G, N]; G divides H and head h reads group h // (H / G). N is the state size.
        C: readouts, [B, T, G, N].
        D: factor of the direct path, float32, [H]; None for none.
        segment_ids: int32 [B, T]; 0 is padding (output 0, no effect), a new id resets the state.
        initial_state: state of the tokens before the first; belongs to the first segment. None: nothing seen.
        implementation: "serial", "scan", "pallas", or None for the fastest available.
        chunk_size: tokens per chunk of the scan form; 1 is the associative scan over single tokens.
        sequence_axis: shard_map axis over which T is split ("scan" only).

    Returns:
        y [B, T, H, E] in the dtype of x, and the final state.

    Raises:
        ValueError: for wrong shapes, dtypes, head counts, states or options, A not below 0 or dt below 0 (where their
            values are known).
        NotImplementedError: when `implementation` cannot serve the call.

    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060.
    """
    x, dt, A, B, C, D, segment_ids = map(from_numpy, (x, dt, A, B, C, D, segment_ids))
    form = choose("ssd", implementation, chunk_size, sequence_axis).form
    check_array("x", x, "[B, T, H, E]", (None,) * 4, INPUT_DTYPES)
    check_sizes("x", x, "BTHE")
    batch, length, heads, size = x.shape
    check_array("dt", dt, "[B, T, H]", (batch, length, heads), GATE_DTYPES)
    check_array("A", A, "[H]", (heads,), GATE_DTYPES)
    check_array("B", B, "[B, T, G, N]", (batch, length, None, None), INPUT_DTYPES)
    check_sizes("B", B, "BTGN")
    if heads % B.shape[2]:
        fail("B", f"a group count that divides the {heads} heads of x", f"{B.shape[2]} groups, shape {list(B.shape)}")
    check_array("C", C, "[B, T, G, N]", B.shape, INPUT_DTYPES)
    if D is not None:
        check_array("D", D, "[H]", (heads,), GATE_DTYPES)
    if segment_ids is not None:
        check_segment_ids(segment_ids, batch, length)
    _check_signs(dt, A, segment_ids)
    dtype = compute_dtype(x, dt, A, B, C, D)
    sizes = Sizes(batch, length, heads, heads, B.shape[3], size, dtype)
    wide = x.astype(dtype)
    if segment_ids is not None:
        real = (segment_ids != 0)[..., None]
        wide, dt = jnp.where(real[..., None], wide, 0), jnp.where(real, dt, 0)
    values = (dt.astype(dtype)[..., None] * wide).astype(dtype)
    log_decay = dt.astype(dtype) * A.astype(dtype)
    mixer = _SSD(heads // B.shape[2])
    y, state = run_checked(
        mixer, sizes, form, (C, B, values, log_decay, segment_ids, initial_state, None), None, chunk_size, sequence_axis
    )
    if D is not None:
        y = y + D.astype(dtype)[:, None] * wide
    return y.astype(x.dtype), state


def _check_signs(dt: Array, A: Array, segment_ids: Array | None) -> None:
    """Raise ValueError where a known A is not below 0, or a known dt below 0 anywhere but at padding."""
    if is_concrete(A) and not np.all(np.asarray(A) < 0):
        fail("A", "values below 0", f"{np.max(np.asarray(A))}")
    if is_concrete(dt) and is_concrete(segment_ids):
        values = np.asarray(dt)
        wrong = values < 0
        if segment_ids is not None:
            wrong &= (np.asarray(segment_ids) != 0)[..., None]
        if wrong.any():
            fail("dt", "values of at least 0", f"{values[wrong].flat[0]}")
