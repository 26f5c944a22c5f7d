"""The delta rule, with and without decay: a linear attention that first takes back what a key had stored."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import GATE_DTYPES, Array, check_array, check_flag, check_positive, einsum, from_numpy
from jaxmix.mixers.chunking import count_starts, split_chunks
from jaxmix.mixers.delta.delta_chunks import DeltaChunks, DeltaOptions, delta_chunks, run_chunks
from jaxmix.mixers.delta.delta_summary import DeltaSummary
from jaxmix.mixers.dispatch import Implementation, choose
from jaxmix.mixers.inputs import Inputs, check_decay_sign, check_spread_inputs
from jaxmix.mixers.linear_attention import outer
from jaxmix.mixers.recurrence import Recurrence, run_checked
from jaxmix.mixers.state import KeyValueState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState(KeyValueState):
    """S [B, H, D, E]: reading it with a key, S^T k, gives the value that is stored for it."""

    shared = ("S",)
    axes = ("DE",)
    S: Array


@dataclasses.dataclass(frozen=True)
class _GatedDeltaRule(Recurrence):
    """Keys are pairs here, (k, beta) with beta [..., 1]."""

    name = "gated_delta_rule"
    state = DeltaState
    summary = DeltaSummary
    normalizes = False
    scale: float
    masked: bool
    decay_masked: bool
    chunk_size: int
    write_mask: Any = None

    @property
    def by_token(self) -> bool:
        return not self.masked

    def bind(self, parameters: Any) -> Self:
        return dataclasses.replace(self, write_mask=parameters)

    def step(self, state: Any, q: Array, k: Any, v: Array, a: Array) -> tuple[Any, Any]:
        k, beta = k
        S = a[..., None, None] * state.S
        S = S + outer(beta * k, v - einsum("bgde,bgd->bge", S, k))
        return DeltaState(S), self.read(DeltaState(S[:, :, None]), q)

    def serial(self, inputs: Inputs, state: Any) -> tuple[Any, Any]:
        if not self.masked:
            return super().serial(inputs, state)
        batch, length = inputs.v.shape[:2]
        size = min(self.chunk_size, length)
        count = -(-length // size)

        def cut(x: Array) -> Array:
            x = jnp.pad(x, [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2))
            return jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0)

        def body(state: Any, chunk: Any) -> tuple[Any, Any]:
            tokens, mask = chunk
            outputs, after = super(_GatedDeltaRule, self).serial(tokens, state)
            base = state.S
            if self.decay_masked and tokens.log_decay is not None:
                base = jnp.exp(jnp.sum(tokens.log_decay, axis=1))[..., None, None] * base
            if tokens.segments is not None:
                base = jnp.where(jnp.any(tokens.segments.reset, axis=1)[:, None, None, None], 0, base)
            return DeltaState(base + mask[..., None, None] * (after.S - base)), outputs

        chunks = (jax.tree.map(cut, inputs), jnp.moveaxis(self.write_mask, 1, 0))
        state, outputs = jax.lax.scan(body, state, chunks)

        def join(x: Array) -> Array:
            return jnp.moveaxis(x, 0, 1).reshape(batch, count * size, *x.shape[3:])[:, :length]

        return jax.tree.map(join, outputs), state

    def cut(self, inputs: Inputs, size: int, sequence_axis: str | None) -> Any:
        log_decay = run = None
        if inputs.log_decay is not None:
            log_decay = split_chunks(inputs.log_decay[..., None], size)[..., 0]
        if inputs.segments is not None:
            run = count_starts(inputs.segments, size)
        return log_decay, run, sequence_axis

    def chunked(self, chunks: Any, q: Array, k: Any, v: Array, state: Any) -> tuple[Array, Any]:
        log_decay, run, sequence_axis = chunks
        k, beta = k
        arrays = DeltaChunks(self.scale * q[:, :, :, 0], k, v, beta, log_decay, self.write_mask, run)
        options = DeltaOptions(self.decay_masked)
        if sequence_axis is None:
            out, _, final = delta_chunks(options, arrays, state.S, None)
        else:
            out, _, final = run_chunks(options, arrays, state.S, None, sequence_axis)
        return out[:, :, :, None], DeltaState(final)

    def summarize(self, inputs: Inputs) -> DeltaSummary:
        k, beta = inputs.k
        summaries = DeltaSummary.token_summary(inputs.q, k, inputs.v, inputs.log_decay, beta[..., 0])
        return jax.tree.map(lambda x: x[:, :, :, None], summaries)

    def begin(self, state: Any, inputs: Inputs) -> DeltaSummary:
        return DeltaSummary.of_state(state.S[:, None, :, None])

    def end(self, total: DeltaSummary, inputs: Inputs) -> DeltaState:
        return DeltaState(total.W[:, 0, :, 0])

    def read(self, state: Any, q: Array) -> Any:
        stored = state.W if isinstance(state, DeltaSummary) else state.S
        return self.scale * einsum("...d,...de->...e", q, stored), None


@dataclasses.dataclass(frozen=True)
class _DeltaRule(_GatedDeltaRule):
    name = "delta_rule"


def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    beta: Array,
    *,
    scale: float | None = None,
    write_mask: Array | None = None,
    decay_masked: bool = True,
    segment_ids: Array | None = None,
    initial_state: DeltaState | None = None,
    implementation: Implementation | None = None,
    chunk_size: int = 64,
    sequence_axis: str | None = None,
) -> tuple[Array, DeltaState]:
    """The gated delta rule: S_t = a_t S_{t-1} + beta_t k_t (v_t - a_t S_{t-1}^T k_t)^T, o_t = scale S_t^T q_t.

    Keys should be unit vectors and beta between 0 and 2, or the state may grow without bound. Neither q nor k is
    normalised here. Of q, k and v each may have any number of heads that divides H, the largest; head h of H then
    reads head h // (H / its number) of theirs.

    Args:
        q: queries, [B, T, Hq, D], bfloat16, float32 or float64.
        k: keys, [B, T, Hk, D].
        v: values, [B, T, Hv, E].
        log_decay: g_t = log a_t <= 0, natural log per token, float32, [B, T, H], or [H] for a constant per head;
            None for no decay.
        beta: write strengths, float32, [B, T, H].
        scale: factor on the outputs; None for D^-1/2.
        write_mask: float32 [B, ceil(T / chunk_size), H]: the share of each chunk's update that the tokens after the
            chunk see, the final state included; those of the chunk itself see all of it. Chunks are counted over
            the places of the call, padding included. None for 1 everywhere.
        decay_masked: the decay of a chunk acts on the state whatever its write mask; False leaves it out in the
            measure in which the update is.
        segment_ids: int32 [B, T]; 0 is padding (output 0, no effect), a new id resets the state.
        initial_state: state of the tokens before the first; belongs to the first segment. None: nothing seen.
        implementation: "serial", "scan", "pallas", or None for the fastest available.
        chunk_size: tokens per chunk of the scan form and of `write_mask`; 1 is the associative scan over tokens.
        sequence_axis: shard_map axis over which T is split ("scan" only).

    Returns:
        out [B, T, H, E] in v's dtype, and the final state.

    Raises:
        ValueError: for wrong shapes, dtypes, head counts, states or options.
        NotImplementedError: when `implementation` cannot serve the call.

    Source: Yang et al., "Gated Delta Networks", arXiv 2412.06464; write_mask: Deng et al., "Neural Attention Search
    Linear", arXiv 2602.03681.
    """
    return _run(
        _GatedDeltaRule,
        (q, k, v, log_decay, beta, segment_ids, write_mask),
        scale=scale,
        decay_masked=decay_masked,
        initial_state=initial_state,
        implementation=implementation,
        chunk_size=chunk_size,
        sequence_axis=sequence_axis,
    )


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    scale: float | None = None,
    write_mask: Array | None = None,
    segment_ids: Array | None = None,
    initial_state: DeltaState | None = None,
    implementation: Implementation | None = None,
    chunk_size: int = 64,
    sequence_axis: str | None = None,
) -> tuple[Array, DeltaState]:
    """The delta rule: S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T, o_t = scale S_t^T q_t.

    `gated_delta_rule` without decay; see there for the arguments, the results and the errors.

    Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
    arXiv 2406.06484.
    """
    return _run(
        _DeltaRule,
        (q, k, v, None, beta, segment_ids, write_mask),
        scale=scale,
        decay_masked=True,
        initial_state=initial_state,
        implementation=implementation,
        chunk_size=chunk_size,
        sequence_axis=sequence_axis,
    )


def _run(
    kind: type[_GatedDeltaRule],
    arrays: tuple[Any, ...],
    *,
    scale: float | None,
    decay_masked: bool,
    initial_state: DeltaState | None,
    implementation: Implementation | None,
    chunk_size: int,
    sequence_axis: str | None,
) -> tuple[Array, DeltaState]:
    q, k, v, log_decay, beta, segment_ids, write_mask = map(from_numpy, arrays)
    form = choose(kind.name, implementation, chunk_size, sequence_axis).form
    check_flag("decay_masked", decay_masked)
    if scale is not None:
        check_positive("scale", scale)
    sizes = check_spread_inputs(q, k, v, {"log_decay": log_decay, "beta": beta}, segment_ids)
    check_decay_sign(log_decay, segment_ids)
    if write_mask is not None:
        shape = (sizes.batch, -(-sizes.length // chunk_size), sizes.heads)
        check_array("write_mask", write_mask, "[B, N, H]", shape, GATE_DTYPES)
        write_mask = write_mask.astype(sizes.dtype)
    mixer = kind(
        scale=sizes.key_size**-0.5 if scale is None else float(scale),
        masked=write_mask is not None,
        decay_masked=decay_masked,
        chunk_size=chunk_size if write_mask is not None else 0,
    )
    keys = (k, beta[..., None])
    inputs = (q, keys, v, log_decay, segment_ids, initial_state, write_mask)
    return run_checked(mixer, sizes, form, inputs, None, chunk_size, sequence_axis)
