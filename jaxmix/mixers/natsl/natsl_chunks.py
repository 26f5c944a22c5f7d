"""NAtS-L for all chunks of a call at once."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from jaxmix.arrays import Array, einsum
from jaxmix.mixers.chunking import Chunks
from jaxmix.mixers.decay import LogDecay
from jaxmix.mixers.delta.delta_chunks import DeltaChunks, DeltaOptions, delta_chunks
from jaxmix.mixers.natsl.block_attention import here
from jaxmix.mixers.natsl.layout import ChunkLayout, take_chunk
from jaxmix.mixers.natsl.natsl_inputs import NAtSLInputs, NAtSLOptions, by_list, routed
from jaxmix.mixers.natsl.natsl_state import NAtSLState, commit_pages
from jaxmix.mixers.natsl.paged_attention import Paged, PageLists, Places, paged_attention


def run_chunked(
    options: NAtSLOptions, inputs: NAtSLInputs, choice: Array, layout: ChunkLayout, state: NAtSLState | None
) -> tuple[Any, NAtSLState]:
    """Both outputs [B, T, heads, size] and the final state; `state` is None for new streams."""
    # A chunk that is not full needs no choice, so what stands there may be anything.
    choice = jnp.where(layout.complete[..., None, None], choice, 0)
    linear, after = _linear_branch(options, inputs, choice, layout, state)
    softmax, after = _softmax_branch(options, inputs, choice, layout, state, after)
    return (layout.restore(linear), layout.restore(softmax)), after


def _linear_branch(
    options: NAtSLOptions, inputs: NAtSLInputs, choice: Array, layout: ChunkLayout, given: NAtSLState | None
) -> tuple[Array, NAtSLState]:
    """Outputs [B, N, C, H, E], and the state with its linear part after the call."""

    def by_chunk(x: Array) -> Array:
        return jnp.moveaxis(layout.align(x), 2, 3)

    state = options.fresh() if given is None else given
    complete = layout.complete
    run = None
    if not layout.plain:
        run = jnp.broadcast_to(layout.begins[..., None], layout.valid.shape).astype(jnp.int32)
    chunks = DeltaChunks(
        q=by_chunk(inputs.q),
        k=by_chunk(inputs.k),
        v=by_chunk(inputs.v),
        beta=by_chunk(inputs.beta[..., None]),
        log_decay=by_chunk(inputs.log_decay[..., None])[..., 0],
        write_mask=jnp.where(complete[..., None], choice[..., 1], 1),
        run=run,
    )
    base = state.S_start
    if options.decay_through_softmax:
        base = jnp.exp(state.log_decay)[..., None, None] * base
    rules = DeltaOptions(options.decay_through_softmax, options.rule == "gated_delta")
    out, states, final = delta_chunks(rules, chunks, state.S_cur, None if given is None else base - state.S_cur)
    if options.own_chunk == "softmax":
        start, _, _ = Chunks(_accumulated(chunks), run, options.chunk_size, None).edges(options.dtype)
        opened = jnp.exp(state.log_decay)[..., None, None] * state.S_start
        out = einsum("bnhcd,bnhde->bnhce", start * chunks.q, states.at[:, 0].set(opened))
    last = layout.last
    closed, first = take_chunk(complete, last), last == 0
    opened = take_chunk(states.at[:, 0].set(state.S_start), last)
    opened = jnp.where(take_chunk(layout.begins, last)[:, None, None, None], 0, opened)
    assert chunks.log_decay is not None
    log_decay = take_chunk(jnp.sum(chunks.log_decay, axis=-1), last) + jnp.where(first[:, None], state.log_decay, 0)
    after = dataclasses.replace(
        state,
        S_start=jnp.where(closed[:, None, None, None], final, opened),
        S_cur=final,
        log_decay=jnp.where(closed[:, None], 0, log_decay),
    )
    return options.scale * jnp.moveaxis(out, 2, 3), after


def _accumulated(chunks: DeltaChunks) -> LogDecay:
    assert chunks.log_decay is not None
    return LogDecay.accumulate(chunks.log_decay, chunks.run)


def _softmax_branch(
    options: NAtSLOptions,
    inputs: NAtSLInputs,
    choice: Array,
    layout: ChunkLayout,
    given: NAtSLState | None,
    state: NAtSLState,
) -> tuple[Array, NAtSLState]:
    """Outputs [B, N, C, Hs, Es], and `state` with the softmax part after the call; `given` is that before it."""
    waiting = (None, None) if given is None else (given.own_k, given.own_v)
    q = layout.align(inputs.q_softmax)
    # The cache keeps keys and values in its own dtype, and every form reads what the cache would give.
    k = layout.align(inputs.k_softmax.astype(options.cache_dtype), waiting[0])
    v = layout.align(inputs.v_softmax.astype(options.cache_dtype), waiting[1])
    batch, chunks, size = layout.valid.shape
    heads = functools.partial(by_list, options)
    q, own_k, own_v = (heads(x).transpose(0, 3, 4, 1, 2, 5).astype(options.dtype) for x in (q, k, v))
    pages_k, pages_v = (heads(x).transpose(0, 1, 3, 4, 2, 5) for x in (k, v))
    keep = routed(choice) & layout.complete[..., None]

    new_k, new_v = (
        x.reshape(batch, chunks * options.heads, *x.shape[3:]).astype(options.dtype) for x in (pages_k, pages_v)
    )
    weight = jnp.moveaxis(choice[..., 0], 1, 2)
    offset = 0
    if given is not None:
        offset = options.capacity
        new_k = jnp.concatenate([given.page_k.astype(options.dtype), new_k], axis=1)
        new_v = jnp.concatenate([given.page_v.astype(options.dtype), new_v], axis=1)
        weight = jnp.concatenate([jnp.take_along_axis(given.weight[:, None], given.table, axis=-1), weight], axis=-1)
    listed = here(layout, options.heads, offset)
    kept = jnp.moveaxis(keep, 1, 2)
    if given is None:
        read, order = PageLists.compact(listed, kept)
    else:
        stored = jnp.arange(options.capacity) < given.count[..., None]
        before = (given.table, jnp.full_like(given.table, -1), jnp.zeros_like(given.table))
        both = tuple(jnp.concatenate(pair, axis=-1) for pair in zip(before, listed, strict=True))
        read, order = PageLists.compact(both, jnp.concatenate([stored, kept], axis=-1))
    other = unread = None
    if options.counterfactual_router_grad:
        unread, turned = PageLists.compact(listed, jnp.moveaxis(layout.complete[..., None] & ~keep, 1, 2))
        other = jnp.take_along_axis(jnp.moveaxis(choice[..., 0], 1, 2), turned, axis=-1)
    causal = jnp.tri(size, dtype=jnp.bool_)
    places = Places(causal & layout.valid[:, :, None, :], layout.document, read, unread)
    arrays = Paged(q, own_k, own_v, new_k, new_v, jnp.take_along_axis(weight, order, axis=-1), other)
    out = paged_attention(options.paged, arrays, places)[0].transpose(0, 3, 4, 1, 2, 5)
    out = out.reshape(batch, chunks, size, -1, out.shape[-1])
    if given is not None:
        lost = (given.used > options.capacity)[:, None] & (layout.document == 0)
        out = jnp.where(lost[:, :, None, None, None], jnp.nan, out)

    last = layout.last
    closed = take_chunk(layout.complete, last)
    open_slots = take_chunk(layout.valid, last) & ~closed[:, None]
    document = take_chunk(layout.document, last)
    fields = {
        name: jnp.where(open_slots[:, :, None, None], take_chunk(x, last), 0)
        for name, x in (("own_k", k), ("own_v", v))
    }
    after = dataclasses.replace(state, filled=jnp.sum(open_slots, axis=1, dtype=jnp.int32), **fields)
    current = keep & (layout.document == document[:, None])[..., None]
    return out, commit_pages(after, pages_k, pages_v, choice[..., 0], current, document == 0)
