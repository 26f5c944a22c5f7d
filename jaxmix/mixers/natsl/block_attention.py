"""Softmax attention to chosen blocks of tokens, by itself: a dense form, and one whose cost follows the choice."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxmix.arrays import (
    GATE_DTYPES,
    INPUT_DTYPES,
    Array,
    check_array,
    check_choice,
    check_count,
    check_positive,
    check_sizes,
    compute_dtype,
    einsum,
    fail,
    from_numpy,
)
from jaxmix.mixers.natsl.layout import ChunkLayout, count_chunks
from jaxmix.mixers.natsl.paged_attention import Paged, PagedOptions, PageLists, Places, paged_attention
from jaxmix.mixers.segments import check_segment_ids, find_segments, where_valid

Form = Literal["dense", "scan"]


def block_softmax_attention(
    q: Array,
    k: Array,
    v: Array,
    selection: Array,
    *,
    scale: float | None = None,
    segment_ids: Array | None = None,
    implementation: Form | None = None,
    chunk_size: int = 64,
    max_documents: int | None = None,
) -> tuple[Array, Array]:
    r"""Causal softmax attention of every token to its own chunk and to chosen earlier chunks of its document.

        o_i = sum_j w_ij e^{s_ij} v_j / sum_j w_ij e^{s_ij} ,    s_ij = scale q_i.k_j

    with w_ij = 1 for j <= i in the chunk of i, the selection of j's chunk for earlier chunks, and 0 otherwise.

    Args:
        q: queries, [B, T, Hs, D], bfloat16, float32 or float64.
        k: keys, [B, T, Hs, D].
        v: values, [B, T, Hs, E].
        selection: weights of chunks, float32, [B, N, H]: 1 for a chunk that is read, 0 for one that is not; H divides
            Hs, and the heads of a group share a selection. N = `count_chunks(T, chunk_size, packed=segment_ids is not
            None, continued=False, max_documents=max_documents)`; that of a chunk that is not full is not used. Its
            gradient is that of w at 1, and 0 for chunks that are not read.
        scale: factor on the logits; D^-1/2 by default.
        segment_ids: int32 [B, T]; 0 is padding (output 0), a new id starts a document and a chunk.
        implementation: "dense" forms all pairs of tokens and is the reference; "scan" (the default) visits chosen
            chunks only, with the memory of 128 keys, or one chunk of more, at a time.
        chunk_size: tokens per chunk C.
        max_documents: see `count_chunks`.

    Returns:
        The output [B, T, Hs, E] in v's dtype, and the log-sum-exp of the logits [B, T, Hs], float32 or better, which
        has no meaning at padding.

    Raises:
        ValueError: for wrong shapes, dtypes, head counts or options.

    Source: Deng et al., "Neural Attention Search Linear", arXiv 2602.03681.
    """
    q, k, v, selection, segment_ids = map(from_numpy, (q, k, v, selection, segment_ids))
    check_choice("implementation", implementation, (None, "dense", "scan"))
    check_count("chunk_size", chunk_size)
    if scale is not None:
        check_positive("scale", scale)
    if max_documents is not None:
        check_count("max_documents", max_documents)
    check_array("q", q, "[B, T, Hs, D]", (None,) * 4, INPUT_DTYPES)
    check_sizes("q", q, ("B", "T", "Hs", "D"))
    batch, length, heads, size = q.shape
    check_array("k", k, "[B, T, Hs, D]", q.shape, INPUT_DTYPES)
    check_array("v", v, "[B, T, Hs, E]", (batch, length, heads, None), INPUT_DTYPES)
    if segment_ids is not None:
        check_segment_ids(segment_ids, batch, length)
    packed = segment_ids is not None
    chunks = count_chunks(length, chunk_size, packed=packed, continued=False, max_documents=max_documents)
    check_array("selection", selection, "[B, N, H]", (batch, chunks, None), GATE_DTYPES)
    if selection.shape[2] == 0 or heads % selection.shape[2]:
        fail("selection", f"a head count that divides the {heads} heads of q", f"{selection.shape[2]} heads")
    scale = size**-0.5 if scale is None else float(scale)
    return _run(implementation or "scan", scale, chunk_size, q, k, v, selection, segment_ids)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    form: str, scale: float, chunk_size: int, q: Array, k: Array, v: Array, selection: Array, segment_ids: Array | None
) -> tuple[Array, Array]:
    dtype = compute_dtype(q, k, v, selection)
    segments = None if segment_ids is None else find_segments(segment_ids)
    arrays = [where_valid(segments, jnp.asarray(x)).astype(dtype) for x in (q, k, v)]
    batch, length = q.shape[:2]
    layout = ChunkLayout.of(batch, length, chunk_size, selection.shape[1], segments, None)
    read = (selection > 0) & layout.complete[..., None]
    weight = jnp.where(read, selection, 0).astype(dtype)
    attend = _dense if form == "dense" else _scan
    out, lse = attend(scale, layout, arrays, weight, read)
    return where_valid(segments, out).astype(v.dtype), lse


def _dense(scale: float, layout: ChunkLayout, arrays: Any, weight: Array, read: Array) -> tuple[Array, Array]:
    q, k, v = arrays
    group = q.shape[2] // weight.shape[2]
    places = jnp.arange(q.shape[1])
    valid = layout.chunk < weight.shape[1]
    document = layout.by_token(layout.document)
    same = (document[:, :, None] == document[:, None, :]) & valid[:, None, :]
    own = same & (layout.chunk[:, :, None] == layout.chunk[:, None, :]) & (places[:, None] >= places)
    earlier = same & (layout.chunk[:, :, None] > layout.chunk[:, None, :])
    chosen = jnp.repeat(jnp.moveaxis(layout.by_token(weight), 2, 1), group, axis=1)
    weights = jnp.where(own[:, None], 1, jnp.where(earlier[:, None], chosen[:, :, None, :], 0))
    logits = jnp.where(weights > 0, scale * einsum("bthd,bshd->bhts", q, k), -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(top > -jnp.inf, top, 0))
    terms = weights * jnp.exp(logits - top)
    total = jnp.sum(terms, axis=-1)
    safe = jnp.where(total > 0, total, 1)
    out = einsum("bhts,bshe->bthe", terms / safe[..., None], v)
    lse = jnp.moveaxis(jnp.where(total > 0, top[..., 0] + jnp.log(safe), -jnp.inf), 1, 2)
    fits = layout.fits[..., None]
    return jnp.where(fits[..., None], out, jnp.nan), jnp.where(fits, lse, jnp.nan)


def _scan(scale: float, layout: ChunkLayout, arrays: Any, weight: Array, read: Array) -> tuple[Array, Array]:
    batch, chunks, size = layout.valid.shape
    lists = weight.shape[2]

    def by_list(x: Array) -> Array:
        x = layout.align(x)
        return x.reshape(*x.shape[:3], lists, -1, x.shape[-1])

    q, k, v = map(by_list, arrays)
    own_q, own_k, own_v = (x.transpose(0, 3, 4, 1, 2, 5) for x in (q, k, v))
    page_k, page_v = (
        x.transpose(0, 1, 3, 4, 2, 5).reshape(batch, chunks * lists, -1, size, x.shape[-1]) for x in (k, v)
    )
    fields = here(layout, lists, 0)
    listed, order = PageLists.compact(fields, jnp.moveaxis(read, 1, 2))
    causal = jnp.tri(size, dtype=jnp.bool_)
    places = Places(causal & layout.valid[:, :, None, :], layout.document, listed, None)
    weights = jnp.take_along_axis(jnp.moveaxis(weight, 1, 2), order, axis=-1)
    out, lse = paged_attention(PagedOptions(scale), Paged(own_q, own_k, own_v, page_k, page_v, weights, None), places)
    out = out.transpose(0, 3, 4, 1, 2, 5).reshape(batch, chunks, size, -1, out.shape[-1])
    lse = lse.transpose(0, 3, 4, 1, 2).reshape(batch, chunks, size, -1)
    return layout.restore(out), layout.restore(lse)


def here(layout: ChunkLayout, lists: int, first: int) -> tuple[Array, Array, Array]:
    """Page, chunk and document of every chunk of a call for every list, int32 [B, H, N].

    The page of list h in chunk c is number first + c H + h.
    """
    batch, chunks = layout.document.shape
    page = first + jnp.arange(chunks * lists, dtype=jnp.int32).reshape(chunks, lists).T
    fields = page, jnp.arange(chunks, dtype=jnp.int32), layout.document[:, None]
    page, chunk, document = (jnp.broadcast_to(x, (batch, lists, chunks)) for x in fields)
    return page, chunk, document
