"""Softmax attention of chunks to themselves and to lists of earlier chunks, one list a head.

Memory is that of `TILE` keys at a time, and the work that of the longest list: nothing has the size of all pairs of
tokens. The loop over lists has as many turns as the longest list needs, whatever room there is.

Axes: B rows, H lists (heads of the router), G softmax heads of each, N chunks of queries, C slots, P pages, L places in
a list, J pages of one turn. A page holds one chunk of keys and values for the G heads of one list.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, einsum

TILE = 128
"""Keys that a query meets in one turn of the loop, or those of one page if it has more.

With fewer a small model on a GPU waits for launches: each turn is some 16 kernels forward and 29 backward.
"""


@dataclasses.dataclass(frozen=True)
class PagedOptions:
    """What is fixed when the code is compiled.

    Attributes:
        scale: factor on the logits.
        own: queries see the keys of their own chunk, up to themselves.
        detach_own: no gradient passes through logits and values of the own chunk.
    """

    scale: float
    own: bool = True
    detach_own: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageLists:
    """Which pages each head reads.

    Attributes:
        page: pages in order, int32 [B, H, L].
        chunk: the chunk that a page was, int32 [B, H, L]; a query sees pages of earlier chunks, and -1 is before all.
        document: document of a page, int32 [B, H, L]; a query sees pages of its own.
        count: pages in each list, int32 [B, H].
    """

    page: Array
    chunk: Array
    document: Array
    count: Array

    @classmethod
    def compact(cls, fields: tuple[Array, ...], present: Array) -> tuple["PageLists", Array]:
        """The lists of (page, chunk, document) where `present`, [B, H, L] each, and the order that put them first."""
        page, chunk, document = fields
        order = jnp.argsort(~present, axis=-1, stable=True)
        page, chunk, document = (jnp.take_along_axis(x, order, axis=-1) for x in (page, chunk, document))
        return cls(page, chunk, document, jnp.sum(present, axis=-1, dtype=jnp.int32)), order


class Paged(NamedTuple):
    """Arguments of `paged_attention` that have gradients.

    q [B, H, G, N, Cq, D]; own_k [B, H, G, N, C, D], own_v [B, H, G, N, C, E]; page_k [B, P, G, C, D],
    page_v [B, P, G, C, E]; weight [B, H, L], by which the terms of a page are multiplied, 1 for what is read; other
    [B, H, L'], of pages that are not read, None or zeros.
    """

    q: Array
    own_k: Array
    own_v: Array
    page_k: Array
    page_v: Array
    weight: Array
    other: Array | None


class Places(NamedTuple):
    """Arguments without gradients.

    own_mask: slots of the own chunk that a query sees, bool [B, N, Cq, C]. document: of the queries, int32 [B, N].
    read: the lists. unread: lists of pages whose weights get a gradient although they are not read, or None.
    """

    own_mask: Array
    document: Array
    read: PageLists
    unread: PageLists | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def paged_attention(options: PagedOptions, arrays: Paged, places: Places) -> tuple[Array, Array]:
    """Outputs [B, H, G, N, Cq, E] and log-sum-exp of the logits [B, H, G, N, Cq]; 0 and -inf where nothing is seen.

    The gradient of a weight is exact at 1: sum_ij p_ij (do_i . v_j - do_i . o_i) over the queries i that read the page.
    For pages that are not read it is the same sum with exp(s_ij - lse_i) in place of p_ij, and at most 1.
    """
    return _forward(options, arrays, places)[0]


def _forward(options: PagedOptions, arrays: Paged, places: Places) -> Any:
    q = options.scale * arrays.q
    if options.own:
        logits = _own_logits(q, arrays.own_k, places)
        top = jnp.max(logits, axis=-1)
        p = jnp.exp(logits - _finite(top)[..., None])
        total, out = jnp.sum(p, axis=-1), einsum("bhgncs,bhgnse->bhgnce", p, arrays.own_v)
    else:
        top = jnp.full(q.shape[:-1], -jnp.inf, q.dtype)
        total, out = jnp.zeros_like(top), jnp.zeros((*q.shape[:-1], arrays.own_v.shape[-1]), q.dtype)

    # Early queries skip late pages of long lists, which takes a quarter off the forward pass at 8192 tokens on a CPU.
    # No query sees the page of the last chunk.
    chunks = q.shape[3]
    half = chunks // 2 if places.read.page.shape[-1] > 4 * _tile(arrays, places.read) else 0
    carry = _visit_pages(q, arrays, places, (-1, half - 1 if half else chunks - 1), (top, total, out))
    if half:
        early, late = ([x[:, :, :, part] for x in carry] for part in (slice(half), slice(half, None)))
        late = _visit_pages(q[:, :, :, half:], arrays, places, (half - 1, chunks - 1), late)
        carry = [jnp.concatenate(pair, axis=3) for pair in zip(early, late, strict=True)]
    top, total, out = carry
    lse = jnp.where(total > 0, _finite(top) + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    return (out, lse), (arrays, places, out, lse)


def _visit_pages(q: Array, arrays: Paged, places: Places, chunks: tuple[int, int], carry: Any) -> Any:
    """Running maximum, sum and output of the last N' chunks of queries q, after pages of the chunks [from, to)."""
    read, first = places.read, places.document.shape[1] - q.shape[3]
    low, high = chunks
    size, tile = read.page.shape[-1], _tile(arrays, read)
    place = jnp.arange(size)
    chosen = (read.chunk >= low) & (read.chunk < high) & (place < read.count[..., None])
    begin, end = size - _longest(jnp.where(chosen, size - place, 0)), _longest(jnp.where(chosen, place + 1, 0))
    read, weights = _padded(read, tile), _pad(arrays.weight, tile)

    def visit(turn: Array, carry: Any) -> Any:
        top, total, out = carry
        at = begin + tile * turn
        pages = _Pages.of(read, at, tile)
        k, v = (_take_pages(x, pages) for x in (arrays.page_k, arrays.page_v))
        inside = _by_page(pages.listed & (pages.chunk >= low) & (pages.chunk < high))
        seen = pages.visible(places.document)[:, :, :, first:] & inside
        logits = jnp.where(seen, einsum("bhgncd,bhgjsd->bhgncjs", q, k), -jnp.inf)
        new = jnp.maximum(top, jnp.max(logits, axis=(-2, -1)))
        rescale = jnp.exp(top - _finite(new))
        p = _by_page(_cut(weights, at, tile)) * jnp.exp(logits - _finite(new)[..., None, None])
        total = rescale * total + jnp.sum(p, axis=(-2, -1))
        return new, total, rescale[..., None] * out + einsum("bhgncjs,bhgjse->bhgnce", p, v)

    return jax.lax.fori_loop(0, -(-(end - begin) // tile), visit, tuple(carry))


def _backward(options: PagedOptions, saved: Any, cotangents: tuple[Array, Array]) -> tuple[Paged, None]:
    arrays, places, out, lse = saved
    d_out, d_lse = cotangents
    q = options.scale * arrays.q
    seen = lse > -jnp.inf
    shift = jnp.where(seen, lse, 0)[..., None]
    d_shift = (jnp.sum(d_out * out, axis=-1) - jnp.where(seen, d_lse, 0))[..., None]
    d_q, d_own_k, d_own_v = jnp.zeros_like(q), jnp.zeros_like(arrays.own_k), jnp.zeros_like(arrays.own_v)
    if options.own and not options.detach_own:
        p = jnp.exp(_own_logits(q, arrays.own_k, places) - shift)
        d_logits = p * (einsum("bhgnce,bhgnse->bhgncs", d_out, arrays.own_v) - d_shift)
        d_q = einsum("bhgncs,bhgnsd->bhgncd", d_logits, arrays.own_k)
        d_own_k = einsum("bhgncs,bhgncd->bhgnsd", d_logits, q)
        d_own_v = einsum("bhgncs,bhgnce->bhgnse", p, d_out)
    rows = jnp.arange(q.shape[0])[:, None, None]

    def effect(pages: _Pages, cap: bool) -> tuple[Array, Array, Array, Array]:
        """The pages' keys, exp(s - lse), that times the cotangent of s at weight 1, and its sums over all pairs."""
        k, v = (_take_pages(x, pages) for x in (arrays.page_k, arrays.page_v))
        logits = einsum("bhgncd,bhgjsd->bhgncjs", q, k) - shift[..., None]
        if cap:
            logits = jnp.where(seen[..., None, None], jnp.minimum(logits, 0), 0)
        p = jnp.exp(jnp.where(pages.visible(places.document), logits, -jnp.inf))
        pull = p * (einsum("bhgnce,bhgjse->bhgncjs", d_out, v) - d_shift[..., None])
        return k, p, pull, jnp.sum(pull, axis=(2, 3, 4, 6))

    tile = _tile(arrays, places.read)
    read, weights = _padded(places.read, tile), _pad(arrays.weight, tile)

    def visit(turn: Array, carry: Any) -> Any:
        d_q, d_k, d_v, d_weight = carry
        at = tile * turn
        pages, weight = _Pages.of(read, at, tile), _by_page(_cut(weights, at, tile))
        k, p, pull, total = effect(pages, False)
        d_k = d_k.at[rows, pages.page].add(einsum("bhgncjs,bhgncd->bhjgsd", weight * pull, q))
        d_v = d_v.at[rows, pages.page].add(einsum("bhgncjs,bhgnce->bhjgse", weight * p, d_out))
        d_q = d_q + einsum("bhgncjs,bhgjsd->bhgncd", weight * pull, k)
        return d_q, d_k, d_v, jax.lax.dynamic_update_slice_in_dim(d_weight, total, at, axis=-1)

    start = (d_q, jnp.zeros_like(arrays.page_k), jnp.zeros_like(arrays.page_v), jnp.zeros_like(weights))
    turns = -(-_longest(read.count) // tile)
    d_q, d_k, d_v, d_weight = jax.lax.fori_loop(0, turns, visit, start)
    d_weight, d_other = d_weight[..., : arrays.weight.shape[-1]], None
    if arrays.other is not None:
        assert places.unread is not None
        tile = _tile(arrays, places.unread)
        unread = _padded(places.unread, tile)

        def look(turn: Array, d_other: Array) -> Array:
            total = effect(_Pages.of(unread, tile * turn, tile), True)[3]
            return jax.lax.dynamic_update_slice_in_dim(d_other, total, tile * turn, axis=-1)

        d_other = jnp.zeros_like(_pad(arrays.other, tile))
        d_other = jax.lax.fori_loop(0, -(-_longest(unread.count) // tile), look, d_other)
        d_other = d_other[..., : arrays.other.shape[-1]]
    return Paged(options.scale * d_q, d_own_k, d_own_v, d_k, d_v, d_weight, d_other), None


paged_attention.defvjp(_forward, _backward)


class _Pages(NamedTuple):
    """Pages at J places of each list, [B, H, J]; places behind a list's end repeat its last page, `listed` False."""

    page: Array
    chunk: Array
    document: Array
    listed: Array

    @classmethod
    def of(cls, lists: PageLists, first: Array, tile: int) -> "_Pages":
        """Those from a place on; the lists are `_padded`."""
        page, chunk, document = (_cut(x, first, tile) for x in (lists.page, lists.chunk, lists.document))
        return cls(page, chunk, document, first + jnp.arange(tile) < lists.count[..., None])

    def visible(self, document: Array) -> Array:
        """Chunks of queries that see each page, [B, H, 1, N, 1, J, 1]."""
        same = document[:, None, :, None] == self.document[:, :, None]
        later = jnp.arange(document.shape[1])[:, None] > self.chunk[:, :, None]
        return (same & later & self.listed[:, :, None])[:, :, None, :, None, :, None]


def _tile(arrays: Paged, lists: PageLists) -> int:
    """The number of pages J that a turn of the loop visits; a single token takes half, which a CPU does faster."""
    keys = TILE if arrays.q.shape[3] * arrays.q.shape[4] > 1 else TILE // 2
    return min(lists.page.shape[-1], max(1, keys // arrays.page_k.shape[3]))


def _padded(lists: PageLists, tile: int) -> PageLists:
    """The lists with room for a turn that begins anywhere in them, their last pages repeated behind their ends."""
    place = jnp.arange(lists.page.shape[-1] + tile - 1)
    last = jnp.maximum(lists.count[..., None] - 1, 0)
    page = jnp.take_along_axis(lists.page, jnp.minimum(place, last), axis=-1)
    return PageLists(page, _pad(lists.chunk, tile), _pad(lists.document, tile), lists.count)


def _pad(x: Array, tile: int) -> Array:
    return jnp.pad(x, [(0, 0), (0, 0), (0, tile - 1)])


def _cut(x: Array, first: Array, tile: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, first, tile, axis=-1)


@jax.custom_batching.custom_vmap
def _longest(count: Array) -> Array:
    """The largest number, under `jax.vmap` that of all calls: a loop whose end differs copies all that it carries."""
    return jnp.max(count)


@_longest.def_vmap
def _longest_of_all(axis_size: int, in_batched: Any, count: Array) -> tuple[Array, bool]:
    return _longest(count), False


def _own_logits(q: Array, own_k: Array, places: Places) -> Array:
    logits = einsum("bhgncd,bhgnsd->bhgncs", q, own_k)
    return jnp.where(places.own_mask[:, None, None], logits, -jnp.inf)


def _take_pages(x: Array, pages: _Pages) -> Array:
    """x [B, P, G, ...] at the pages: [B, H, G, J, ...]."""
    return jnp.moveaxis(jax.vmap(lambda row, at: row[at])(x, pages.page), 2, 3)


def _by_page(x: Array) -> Array:
    """x [B, H, J] beside arrays [B, H, G, N, C, J, C]."""
    return x[:, :, None, None, None, :, None]


def _finite(x: Array) -> Array:
    return jnp.where(x > -jnp.inf, x, 0)
