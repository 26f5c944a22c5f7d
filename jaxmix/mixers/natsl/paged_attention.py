"""Softmax attention of chunks to themselves and to lists of earlier chunks, one list a head.

Memory is that of one chunk of keys at a time, and the work that of the longest list: nothing has the size of all pairs
of tokens. The loop over lists has as many turns as the longest list needs, whatever room there is.

Axes: B rows, H lists (heads of the router), G softmax heads of each, N chunks of queries, C slots, P pages, L places in
a list. A page holds one chunk of keys and values for the G heads of one list.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, einsum


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

    # Early queries skip late pages, which takes a quarter off the forward pass at 8192 tokens on a CPU.
    chunks = q.shape[3]
    half = chunks // 2
    carry = _visit_pages(q, arrays, places, (-1, half - 1 if half else chunks), (top, total, out))
    if half:
        early, late = ([x[:, :, :, part] for x in carry] for part in (slice(half), slice(half, None)))
        late = _visit_pages(q[:, :, :, half:], arrays, places, (half - 1, chunks), late)
        carry = [jnp.concatenate(pair, axis=3) for pair in zip(early, late, strict=True)]
    top, total, out = carry
    lse = jnp.where(total > 0, _finite(top) + jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    return (out, lse), (arrays, places, out, lse)


def _visit_pages(q: Array, arrays: Paged, places: Places, chunks: tuple[int, int], carry: Any) -> Any:
    """Running maximum, sum and output of the last N' chunks of queries q, after pages of the chunks [from, to)."""
    read, first = places.read, places.document.shape[1] - q.shape[3]
    low, high = chunks
    size = read.page.shape[-1]
    place = jnp.arange(size)
    chosen = (read.chunk >= low) & (read.chunk < high) & (place < read.count[..., None])
    begin, end = jnp.min(jnp.where(chosen, place, size)), jnp.max(jnp.where(chosen, place + 1, 0))

    def visit(place: Array, carry: Any) -> Any:
        top, total, out = carry
        k, v = (_take_page(x, read.page[..., place]) for x in (arrays.page_k, arrays.page_v))
        seen = (
            _visible(read, place, places.document)[:, :, :, first:] & chosen[..., place][:, :, None, None, None, None]
        )
        logits = jnp.where(seen, einsum("bhgncd,bhgsd->bhgncs", q, k), -jnp.inf)
        new = jnp.maximum(top, jnp.max(logits, axis=-1))
        rescale = jnp.exp(top - _finite(new))
        p = _weigh(arrays.weight, place) * jnp.exp(logits - _finite(new)[..., None])
        total = rescale * total + jnp.sum(p, axis=-1)
        return new, total, rescale[..., None] * out + einsum("bhgncs,bhgse->bhgnce", p, v)

    return jax.lax.fori_loop(begin, end, visit, tuple(carry))


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
    rows = jnp.arange(q.shape[0])[:, None]

    def effect(lists: PageLists, place: Array, cap: bool) -> tuple[Array, Array, Array, Array]:
        """The page's keys, exp(s - lse), that times the cotangent of s at weight 1, and its sum over all pairs."""
        k, v = (_take_page(x, lists.page[..., place]) for x in (arrays.page_k, arrays.page_v))
        logits = einsum("bhgncd,bhgsd->bhgncs", q, k) - shift
        if cap:
            logits = jnp.where(seen[..., None], jnp.minimum(logits, 0), 0)
        p = jnp.exp(jnp.where(_visible(lists, place, places.document), logits, -jnp.inf))
        pull = p * (einsum("bhgnce,bhgse->bhgncs", d_out, v) - d_shift)
        return k, p, pull, jnp.sum(pull, axis=(2, 3, 4, 5))

    def visit(place: Array, carry: Any) -> Any:
        d_q, d_k, d_v, d_weight = carry
        k, p, pull, total = effect(places.read, place, False)
        weight, at = _weigh(arrays.weight, place), (rows, places.read.page[..., place])
        d_k = d_k.at[at].add(einsum("bhgncs,bhgncd->bhgsd", weight * pull, q))
        d_v = d_v.at[at].add(einsum("bhgncs,bhgnce->bhgse", weight * p, d_out))
        d_q = d_q + einsum("bhgncs,bhgsd->bhgncd", weight * pull, k)
        return d_q, d_k, d_v, d_weight.at[..., place].set(total)

    start = (d_q, jnp.zeros_like(arrays.page_k), jnp.zeros_like(arrays.page_v), jnp.zeros_like(arrays.weight))
    d_q, d_k, d_v, d_weight = jax.lax.fori_loop(0, jnp.max(places.read.count), visit, start)
    d_other = None
    if arrays.other is not None:
        unread = places.unread
        assert unread is not None

        def look(place: Array, d_other: Array) -> Array:
            return d_other.at[..., place].set(effect(unread, place, True)[3])

        d_other = jax.lax.fori_loop(0, jnp.max(unread.count), look, jnp.zeros_like(arrays.other))
    return Paged(options.scale * d_q, d_own_k, d_own_v, d_k, d_v, d_weight, d_other), None


paged_attention.defvjp(_forward, _backward)


def _own_logits(q: Array, own_k: Array, places: Places) -> Array:
    logits = einsum("bhgncd,bhgnsd->bhgncs", q, own_k)
    return jnp.where(places.own_mask[:, None, None], logits, -jnp.inf)


def _visible(lists: PageLists, place: Array, document: Array) -> Array:
    """Chunks of queries that see the page at a place of each list, [B, H, 1, N, 1, 1]."""
    same = document[:, None] == lists.document[..., place, None]
    later = jnp.arange(document.shape[1]) > lists.chunk[..., place, None]
    listed = (place < lists.count)[..., None]
    return (same & later & listed)[:, :, None, :, None, None]


def _take_page(x: Array, page: Array) -> Array:
    """x [B, P, ...] at pages [B, H]: [B, H, ...]."""
    return jax.vmap(lambda row, at: row[at])(x, page)


def _weigh(weight: Array, place: Array) -> Array:
    return weight[..., place][:, :, None, None, None, None]


def _finite(x: Array) -> Array:
    return jnp.where(x > -jnp.inf, x, 0)
