"""NAtS-L: every chunk of tokens is kept, head by head, by softmax attention or by a linear state."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix.arrays import (
    GATE_DTYPES,
    INPUT_DTYPES,
    Array,
    check_array,
    check_choice,
    check_count,
    check_flag,
    check_positive,
    check_sizes,
    compute_dtype,
    fail,
    from_numpy,
    is_concrete,
)
from jaxmix.mixers.dispatch import Implementation, choose
from jaxmix.mixers.inputs import check_decay_sign
from jaxmix.mixers.natsl.layout import ChunkLayout, count_chunks
from jaxmix.mixers.natsl.natsl_chunks import run_chunked
from jaxmix.mixers.natsl.natsl_inputs import LinearRule, NAtSLInputs, NAtSLOptions, OwnChunk
from jaxmix.mixers.natsl.natsl_serial import run_serial
from jaxmix.mixers.natsl.natsl_state import NAtSLState
from jaxmix.mixers.segments import check_segment_ids, find_segments, where_valid


def natsl_attention(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    beta: Array | None,
    q_softmax: Array,
    k_softmax: Array,
    v_softmax: Array,
    choice: Array,
    *,
    rule: LinearRule = "gated_delta",
    scale: float | None = None,
    softmax_scale: float | None = None,
    own_chunk: OwnChunk = "both",
    decay_through_softmax: bool = True,
    counterfactual_router_grad: bool = False,
    detach_own_chunk: bool = False,
    segment_ids: Array | None = None,
    initial_state: NAtSLState | None = None,
    implementation: Implementation | None = None,
    chunk_size: int = 64,
    capacity: int | None = None,
    max_documents: int | None = None,
) -> tuple[tuple[Array, Array], NAtSLState]:
    r"""Both branches of NAtS-L: softmax attention to the chunks routed to it, and a linear state of the others.

    A choice m belongs to a chunk of `chunk_size` tokens of a document and to a linear head, and to the G = Hs / H
    softmax heads of that head. It acts on later chunks only:

        linear branch   S_{c+1} = gam_c S_c + m_lin[c] (P_c - gam_c S_c) ,  P_c the state that all tokens of c updated
        softmax branch  token i sees j when m_sm[c(j)] = 1 and c(j) < c(i), or c(j) = c(i) and j <= i

    The last chunk of a document, as long as it is not full, needs no choice. The gradient of `choice` is that of a mask
    that multiplies the update of the state, or the terms of the softmax, at the value 1; it is zero for the operation
    that was not chosen.

    Args:
        q: queries of the linear branch, [B, T, H, D]; neither normalised nor scaled here but by `scale`.
        k: keys, [B, T, H, D].
        v: values, [B, T, H, E].
        log_decay: log decays <= 0 of the linear branch, float32, [B, T, H]; None for none.
        beta: write strengths, float32, [B, T, H]; None for rule="ssd", which has none.
        q_softmax: queries of the softmax branch, [B, T, Hs, Ds].
        k_softmax: keys, [B, T, Hs, Ds].
        v_softmax: values, [B, T, Hs, Es].
        choice: float32 [B, N, H, 2], for each chunk softmax attention (1, 0) or the linear state (0, 1); what is larger
            counts. N = `jaxmix.mixers.natsl.count_chunks(...)`: ceil(T / C) for one document from its start. Documents
            of a packed row follow each other without gaps, each from a chunk of its own.
        rule: "gated_delta", or "ssd" for S_t = a_t S_{t-1} + k_t v_t^T.
        scale: factor on the linear outputs; D^-1/2 by default, 1 for "ssd".
        softmax_scale: factor on the logits; Ds^-1/2 by default.
        own_chunk: which branches see the tokens of the own chunk.
        decay_through_softmax: chunks that softmax attention keeps decay the linear state.
        counterfactual_router_grad: give the operation that was not chosen its gradient too: in the linear branch the
            exact derivative, in the softmax branch sums of min(exp(s - lse), 1) in place of probabilities. "scan" only.
        detach_own_chunk: no gradient through logits and values of the own chunk in the softmax branch, as in the
            authors' code.
        segment_ids: int32 [B, T]; 0 is padding, a new id starts a document.
        initial_state: state that the first document continues; that of a new stream by default.
        implementation: "serial", "scan", "pallas", or None for the fastest available.
        chunk_size: tokens per chunk C.
        capacity: pages of the returned state, each for one chunk of one linear head; at least those of `initial_state`.
            By default those of `initial_state`, or enough for every chunk of this call. A stream that needs more is an
            error where that is known, and in compiled code the softmax outputs of later calls (in the serial form of
            later tokens) are NaN.
        max_documents: see `count_chunks`.

    Returns:
        (o_linear [B, T, H, E], o_softmax [B, T, Hs, Es]) in the dtypes of v and v_softmax, and the state.

    Raises:
        ValueError: for wrong shapes, dtypes, head counts, states or options, or more pages than the state can take.
        NotImplementedError: when `implementation` cannot serve the call.

    Source: Deng et al., "Neural Attention Search Linear", arXiv 2602.03681.
    """
    arrays = (q, k, v, log_decay, beta, q_softmax, k_softmax, v_softmax, choice, segment_ids)
    q, k, v, log_decay, beta, q_softmax, k_softmax, v_softmax, choice, segment_ids = map(from_numpy, arrays)
    form = choose("natsl_attention", implementation, chunk_size, None).form
    if form == "serial" and counterfactual_router_grad:
        raise NotImplementedError(
            "natsl_attention: the serial form has no gradient of what was not chosen; with "
            "counterfactual_router_grad=True use implementation='scan'"
        )
    check_choice("rule", rule, ("gated_delta", "ssd"))
    check_choice("own_chunk", own_chunk, ("both", "softmax", "linear"))
    flags = {
        "decay_through_softmax": decay_through_softmax,
        "counterfactual_router_grad": counterfactual_router_grad,
        "detach_own_chunk": detach_own_chunk,
    }
    for name, value in flags.items():
        check_flag(name, value)
    for name, value in (("scale", scale), ("softmax_scale", softmax_scale)):
        if value is not None:
            check_positive(name, value)
    for name, value in (("capacity", capacity), ("max_documents", max_documents)):
        if value is not None:
            check_count(name, value)
    _check_arrays(q, k, v, log_decay, beta, q_softmax, k_softmax, v_softmax, rule, segment_ids)
    if initial_state is not None and not isinstance(initial_state, NAtSLState):
        fail("initial_state", "a NAtSLState", type(initial_state).__name__)
    batch, length, heads, key_size = q.shape
    counted = {
        "packed": segment_ids is not None,
        "continued": initial_state is not None,
        "max_documents": max_documents,
    }
    chunks = count_chunks(length, chunk_size, **counted)
    check_array("choice", choice, "[B, N, H, 2]", (batch, chunks, heads, 2), GATE_DTYPES)
    if capacity is None:
        capacity = chunks * heads if initial_state is None else initial_state.capacity
    options = NAtSLOptions(
        batch=batch,
        length=length,
        heads=heads,
        group=q_softmax.shape[2] // heads,
        key_size=key_size,
        value_size=v.shape[3],
        softmax_key_size=q_softmax.shape[3],
        softmax_value_size=v_softmax.shape[3],
        chunk_size=chunk_size,
        chunks=chunks,
        capacity=capacity,
        dtype=jnp.dtype(compute_dtype(*(x for x in arrays[:9] if x is not None))),
        cache_dtype=jnp.result_type(k_softmax, v_softmax) if initial_state is None else initial_state.own_k.dtype,
        out_dtypes=(v.dtype, v_softmax.dtype),
        scale=float(scale or (1.0 if rule == "ssd" else key_size**-0.5)),
        softmax_scale=float(softmax_scale or q_softmax.shape[3] ** -0.5),
        own_chunk=own_chunk,
        rule=rule,
        **flags,
    )
    state = None if initial_state is None else _grown(initial_state, options)
    inputs = NAtSLInputs(q, k, v, *_gates(options, log_decay, beta), q_softmax, k_softmax, v_softmax)
    out, state = _run(options, form, inputs, choice, segment_ids, state)
    if is_concrete(state.used) and (state.used > capacity).any():
        fail("capacity", f"room for {int(state.used.max())} pages that a stream has chosen to keep", capacity)
    return out, state


def _gates(options: NAtSLOptions, log_decay: Array | None, beta: Array | None) -> tuple[Array, Array]:
    shape = (options.batch, options.length, options.heads)
    zeros = jnp.zeros(shape, options.dtype) if log_decay is None else log_decay.astype(options.dtype)
    return zeros, jnp.ones(shape, options.dtype) if beta is None else beta.astype(options.dtype)


def _check_arrays(
    q: Any,
    k: Any,
    v: Any,
    log_decay: Any,
    beta: Any,
    q_softmax: Any,
    k_softmax: Any,
    v_softmax: Any,
    rule: str,
    ids: Any,
) -> None:
    check_array("q", q, "[B, T, H, D]", (None,) * 4, INPUT_DTYPES)
    check_sizes("q", q, "BTHD")
    batch, length, heads, _ = q.shape
    check_array("k", k, "[B, T, H, D]", q.shape, INPUT_DTYPES)
    check_array("v", v, "[B, T, H, E]", (batch, length, heads, None), INPUT_DTYPES)
    check_array("q_softmax", q_softmax, "[B, T, Hs, Ds]", (batch, length, None, None), INPUT_DTYPES)
    check_sizes("q_softmax", q_softmax, ("B", "T", "Hs", "Ds"))
    softmax_heads = q_softmax.shape[2]
    if softmax_heads % heads:
        fail("q_softmax", f"a multiple of the {heads} heads of q", f"{softmax_heads} heads")
    check_array("k_softmax", k_softmax, "[B, T, Hs, Ds]", q_softmax.shape, INPUT_DTYPES)
    check_array("v_softmax", v_softmax, "[B, T, Hs, Es]", (batch, length, softmax_heads, None), INPUT_DTYPES)
    if ids is not None:
        check_segment_ids(ids, batch, length)
    if log_decay is not None:
        check_array("log_decay", log_decay, "[B, T, H]", (batch, length, heads), GATE_DTYPES)
        check_decay_sign(log_decay, ids)
    if rule == "ssd" and beta is not None:
        fail("beta", "None for rule='ssd'", f"shape {list(beta.shape)}")
    if rule != "ssd":
        check_array("beta", beta, "[B, T, H]", (batch, length, heads), GATE_DTYPES)


def _grown(state: NAtSLState, options: NAtSLOptions) -> NAtSLState:
    """The initial state with room for `capacity` pages, checked."""
    grow = options.capacity - state.capacity
    if grow < 0:
        fail("capacity", f"at least the {state.capacity} pages of initial_state", options.capacity)
    fresh = jax.eval_shape(options.fresh)
    pages = {"page_k": 1, "page_v": 1, "weight": 1, "table": 2}
    given = jax.tree.map(lambda x: x, state)
    if grow:
        padded = {
            name: jnp.pad(
                getattr(state, name), [(0, grow if i == axis else 0) for i in range(getattr(state, name).ndim)]
            )
            for name, axis in pages.items()
        }
        given = dataclasses.replace(state, **padded)
    for field in dataclasses.fields(fresh):
        got, want = getattr(given, field.name), getattr(fresh, field.name)
        if tuple(got.shape) != tuple(want.shape):
            fail(f"initial_state.{field.name}", f"shape {list(want.shape)}", f"shape {list(got.shape)}")
        if got.dtype != want.dtype:
            fail(f"initial_state.{field.name}", f"dtype {want.dtype}", f"dtype {got.dtype}")
    return given


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    options: NAtSLOptions,
    form: str,
    inputs: NAtSLInputs,
    choice: Array,
    segment_ids: Array | None,
    state: NAtSLState | None,
) -> tuple[tuple[Array, Array], NAtSLState]:
    segments = None if segment_ids is None else find_segments(segment_ids)
    inputs = jax.tree.map(lambda x: where_valid(segments, jnp.asarray(x)).astype(options.dtype), inputs)
    choice = choice.astype(options.dtype)
    if not options.counterfactual_router_grad:
        # What was not chosen has no gradient.
        chosen = choice >= jnp.flip(choice, axis=-1)
        choice = jnp.where(chosen, choice, jax.lax.stop_gradient(choice))
    filled = None if state is None else state.filled
    with jax.named_scope(f"natsl_attention_{form}"):
        if options.length == 1 or form == "serial":
            state = options.fresh() if state is None else state
            out, state = run_serial(options, inputs, choice, segments, state)
        else:
            sizes = (options.batch, options.length, options.chunk_size, options.chunks)
            layout = ChunkLayout.of(*sizes, segments, filled)
            out, state = run_chunked(options, inputs, choice, layout, state)
    linear, softmax = (where_valid(segments, x) for x in out)
    return (linear.astype(options.out_dtypes[0]), softmax.astype(options.out_dtypes[1])), state
