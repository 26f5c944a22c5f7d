"""NAtS-L token by token: the reference, and the step of decoding."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, einsum, expand_to
from jaxmix.mixers.linear_attention import outer
from jaxmix.mixers.natsl.layout import ChunkLayout
from jaxmix.mixers.natsl.natsl_inputs import NAtSLInputs, NAtSLOptions, by_list, routed
from jaxmix.mixers.natsl.natsl_state import NAtSLState, commit_pages
from jaxmix.mixers.natsl.paged_attention import Paged, PageLists, Places, paged_attention
from jaxmix.mixers.segments import Segments


def run_serial(
    options: NAtSLOptions, inputs: NAtSLInputs, choice: Array, segments: Segments | None, state: NAtSLState
) -> tuple[Any, NAtSLState]:
    """Both outputs [B, T, heads, size] and the final state."""
    if options.length == 1:
        tokens = jax.tree.map(lambda x: x[:, 0], inputs)
        if segments is None:
            out, state = _step(options, tokens, choice[:, 0], state)
        else:
            out, state = _packed_step(options, tokens, choice[:, 0], segments.valid[:, 0], segments.reset[:, 0], state)
        return jax.tree.map(lambda x: x[:, None], out), state
    sizes = (options.batch, options.length, options.chunk_size, options.chunks)
    layout = ChunkLayout.of(*sizes, segments, state.filled)
    everywhere = jnp.ones(layout.chunk.shape, jnp.bool_)
    valid, reset = (everywhere, ~everywhere) if segments is None else (segments.valid, segments.reset)

    def body(state: NAtSLState, token: Any) -> tuple[NAtSLState, Any]:
        inputs, choice, valid, reset = token
        out, state = _packed_step(options, inputs, choice, valid, reset, state)
        return state, out

    tokens = (inputs, layout.by_token(choice), valid, reset)
    state, out = jax.lax.scan(body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    fits = layout.fits[:, :, None, None]
    return jax.tree.map(lambda x: jnp.where(fits, jnp.moveaxis(x, 0, 1), jnp.nan), out), state


def _packed_step(
    options: NAtSLOptions, token: NAtSLInputs, choice: Array, valid: Array, reset: Array, state: NAtSLState
) -> tuple[Any, NAtSLState]:
    state = state.reset(reset)
    out, after = _step(options, token, jnp.where(valid[:, None, None], choice, 0), state)
    return out, jax.tree.map(lambda a, b: jnp.where(expand_to(valid, a.ndim), a, b), after, state)


def _step(options: NAtSLOptions, token: NAtSLInputs, choice: Array, state: NAtSLState) -> tuple[Any, NAtSLState]:
    """One token of every row: inputs [B, heads, size], choice [B, H, 2] of the chunk that it may complete."""
    decay = jnp.exp(token.log_decay)[..., None, None]
    working = decay * state.S_cur
    stored = einsum("bhde,bhd->bhe", working, token.k) if options.rule == "gated_delta" else 0
    working = working + outer(token.beta[..., None] * token.k, token.v - stored)
    log_decay = state.log_decay + token.log_decay
    base = state.S_start
    if options.decay_through_softmax:
        base = jnp.exp(log_decay)[..., None, None] * base
    read = base if options.own_chunk == "softmax" else working
    if options.own_chunk == "softmax" and not options.decay_through_softmax:
        read = jnp.exp(log_decay)[..., None, None] * base
    linear = options.scale * einsum("bhd,bhde->bhe", token.q, read)

    rows = jnp.arange(options.batch)
    own_k = state.own_k.at[rows, state.filled].set(token.k_softmax.astype(state.own_k.dtype))
    own_v = state.own_v.at[rows, state.filled].set(token.v_softmax.astype(state.own_v.dtype))
    softmax = _attend_token(options, token.q_softmax, own_k, own_v, state)

    full = state.filled + 1 == options.chunk_size
    committed = base + jnp.where(full[:, None], choice[..., 1], 1)[..., None, None] * (working - base)
    S_cur = jnp.where(full[:, None, None, None], committed, working)
    after = dataclasses.replace(
        state,
        S_start=jnp.where(full[:, None, None, None], committed, state.S_start),
        S_cur=S_cur,
        log_decay=jnp.where(full[:, None], 0, log_decay),
        own_k=jnp.where(full[:, None, None, None], 0, own_k),
        own_v=jnp.where(full[:, None, None, None], 0, own_v),
        filled=jnp.where(full, 0, state.filled + 1),
    )
    pages_k, pages_v = (jnp.moveaxis(by_list(options, x), 1, 3)[:, None] for x in (own_k, own_v))
    keep = (routed(choice) & full[:, None])[:, None]
    everywhere = jnp.ones((options.batch,), jnp.bool_)
    return (linear, softmax), commit_pages(after, pages_k, pages_v, choice[:, None, :, 0], keep, everywhere)


def _attend_token(options: NAtSLOptions, q: Array, own_k: Array, own_v: Array, state: NAtSLState) -> Array:
    """The softmax branch of one token, which is in the own chunk already: [B, Hs, Es]."""
    heads = functools.partial(by_list, options)
    dtype = options.dtype

    def chunk(x: Array) -> Array:
        return jnp.moveaxis(heads(x), 1, 3)[:, :, :, None].astype(dtype)

    shape = (options.batch, options.heads, options.capacity)
    before = jnp.full(shape, -1, jnp.int32)
    lists = PageLists(state.table, before, jnp.zeros_like(before), jnp.minimum(state.count, options.capacity))
    mask = jnp.arange(options.chunk_size) <= state.filled[:, None]
    places = Places(mask[:, None, None], jnp.zeros((options.batch, 1), jnp.int32), lists, None)
    weight = jnp.take_along_axis(state.weight[:, None], state.table, axis=-1)
    arrays = Paged(
        heads(q)[:, :, :, None, None],
        chunk(own_k),
        chunk(own_v),
        state.page_k.astype(dtype),
        state.page_v.astype(dtype),
        weight,
        None,
    )
    out = paged_attention(options.paged, arrays, places)[0]
    out = out.reshape(options.batch, -1, out.shape[-1])
    return jnp.where((state.used > options.capacity)[:, None, None], jnp.nan, out)
