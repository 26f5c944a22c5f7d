"""Softmax attention to lists of pages against dense sums, and the memory that it needs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.mixers.natsl import natsl_attention
from jaxmix.mixers.natsl.paged_attention import Paged, PagedOptions, PageLists, Places, paged_attention
from tests.contract.agreement import F64
from tests.contract.programs import largest_array
from tests.contract.spec import precision
from tests.tolerances import FORMS, ROUTER_GRADIENT, assert_close, assert_same_bits

BATCH, LISTS, GROUP, CHUNKS, SLOTS, KEYS, VALUES, PAGES = 2, 2, 2, 4, 3, 3, 2, 6
SCALE = 0.7
SEEN = np.tri(SLOTS, dtype=bool) & (np.arange(SLOTS) < [[[[3]], [[2]], [[3]], [[3]]], [[[3]], [[3]], [[3]], [[1]]]])
"""Slots of the own chunk that a query sees; some chunks are not full."""
QUERIES = np.array([[0, 0, 0, 1], [0, 0, 1, 1]], np.int32)
"""Documents of the chunks of queries."""


def lists(page, chunk, document, count):
    return PageLists(*(np.array(x, np.int32) for x in (page, chunk, document, count)))


# Two rows of two lists each. A page may stand in both lists of a row; what comes after the count is no page.
READ = lists(
    page=[[[0, 2, 1], [2, 5, 5]], [[3, 4, 0], [1, 1, 1]]],
    chunk=[[[-1, 0, 3], [1, 0, 0]], [[-1, 1, 2], [0, 0, 0]]],
    document=[[[0, 0, 1], [0, 0, 0]], [[0, 0, 1], [0, 0, 0]]],
    count=[[3, 1], [3, 0]],
)
UNREAD = lists(
    page=[[[3, 4], [0, 1]], [[1, 5], [3, 4]]],
    chunk=[[[1, 2], [0, 0]], [[0, 2], [0, 1]]],
    document=[[[0, 0], [0, 0]], [[0, 1], [0, 0]]],
    count=[[2, 1], [2, 2]],
)
PLACES = Places(SEEN, QUERIES, READ, UNREAD)


def draw(rng):
    """Arrays with weights of one, and cotangents of outputs and log-sum-exps."""
    own, pages = (BATCH, LISTS, GROUP, CHUNKS, SLOTS), (BATCH, PAGES, GROUP, SLOTS)
    arrays = Paged(
        q=rng.normal(size=(*own, KEYS)),
        own_k=rng.normal(size=(*own, KEYS)),
        own_v=rng.normal(size=(*own, VALUES)),
        page_k=rng.normal(size=(*pages, KEYS)),
        page_v=rng.normal(size=(*pages, VALUES)),
        weight=np.ones(READ.page.shape),
        other=np.zeros(UNREAD.page.shape),
    )
    return arrays, (rng.normal(size=(*own, VALUES)), rng.normal(size=own))


def dense(options, arrays, lists=READ):
    """Outputs and log-sum-exps with all keys of a query at once: those of the own chunk, and those of every page."""
    out, lse = [], []
    for row, head in np.ndindex(BATCH, LISTS):
        listed = range(lists.count[row, head])
        seen = np.array([[visible(lists, row, head, at, chunk) for at in listed] for chunk in range(CHUNKS)], bool)
        pages = lists.page[row, head, : len(listed)]
        q, own_k, own_v = (x[row, head] for x in (arrays.q, arrays.own_k, arrays.own_v))
        page_k, page_v = (jnp.swapaxes(x[row, pages], 0, 1) for x in (arrays.page_k, arrays.page_v))
        mine = jnp.einsum("gntd,gnsd->gnts", q, own_k)
        if options.detach_own:
            mine, own_v = jax.lax.stop_gradient((mine, own_v))
        mine = jnp.where(SEEN[row], jnp.exp(options.scale * mine), 0) * options.own
        paged = jnp.exp(options.scale * jnp.einsum("gntd,gpsd->gntps", q, page_k))
        weight = arrays.weight[row, head, : len(listed), None]
        paged = jnp.where(seen[:, None, :, None], weight * paged, 0)
        total = mine.sum(axis=-1) + paged.sum(axis=(-2, -1))
        some = total > 0
        total = jnp.where(some, total, 1)
        values = jnp.einsum("gnts,gnse->gnte", mine, own_v) + jnp.einsum("gntps,gpse->gnte", paged, page_v)
        out.append(jnp.where(some[..., None], values, 0) / total[..., None])
        lse.append(jnp.where(some, jnp.log(total), -jnp.inf))
    return tuple(jnp.stack(x).reshape(BATCH, LISTS, *x[0].shape) for x in (out, lse))


def visible(lists, row, head, at, chunk):
    return lists.document[row, head, at] == QUERIES[row, chunk] and lists.chunk[row, head, at] < chunk


@functools.partial(jax.jit, static_argnums=(0, 1))
def differentiate(function, options, arrays, cotangents):
    out, pull_back = jax.vjp(functools.partial(function, options), arrays)
    return out, pull_back(cotangents)[0]


def paged(options, arrays):
    return paged_attention(options, arrays, jax.tree.map(jnp.asarray, PLACES))


@pytest.mark.parametrize(
    "options",
    [PagedOptions(SCALE), PagedOptions(SCALE, detach_own=True), PagedOptions(SCALE, own=False)],
    ids=["own chunk", "own chunk detached", "no own chunk"],
)
def test_outputs_and_every_gradient_are_those_of_dense_sums(options):
    arrays, cotangents = draw(np.random.default_rng(0))
    with precision():
        (out, lse), gradients = jax.device_get(differentiate(paged, options, arrays, cotangents))
        (wanted_out, wanted_lse), wanted = jax.device_get(differentiate(dense, options, arrays, cotangents))
    nothing = np.isneginf(wanted_lse)
    assert nothing.any() != options.own
    assert np.array_equal(np.isneginf(lse), nothing)
    assert not np.any(out[nothing])
    assert_close(out, wanted_out, FORMS[F64])
    assert_close(lse[~nothing], wanted_lse[~nothing], FORMS[F64])
    listed = np.arange(READ.page.shape[-1]) < READ.count[..., None]
    assert_close(gradients.weight, np.where(listed, wanted.weight, 0), ROUTER_GRADIENT)
    assert_close(gradients._replace(weight=0.0, other=0.0), wanted._replace(weight=0.0, other=0.0), FORMS[F64])


@pytest.mark.parametrize("own", [True, False])
def test_pages_that_are_not_read_have_the_capped_gradient(own):
    options = PagedOptions(SCALE, own)
    arrays, (d_out, _) = draw(np.random.default_rng(1))
    with precision():
        cotangents = (d_out, np.zeros(d_out.shape[:-1]))
        (out, lse), gradients = jax.device_get(differentiate(paged, options, arrays, cotangents))
    expected = np.zeros(UNREAD.page.shape)
    for row, head, at in np.ndindex(expected.shape):
        for group, chunk in np.ndindex(GROUP, CHUNKS):
            if at < UNREAD.count[row, head] and visible(UNREAD, row, head, at, chunk):
                page, place = UNREAD.page[row, head, at], (row, head, group, chunk)
                logits = SCALE * arrays.q[place] @ arrays.page_k[row, page, group].T
                p = np.minimum(np.exp(logits - lse[place][:, None]), 1)
                pull = d_out[place] @ arrays.page_v[row, page, group].T - (d_out[place] * out[place]).sum(1)[:, None]
                expected[row, head, at] += np.sum(p * pull)
    # Two of the seven pages that are listed have no later queries in their documents.
    assert np.count_nonzero(expected) == 5
    assert_close(gradients.other, expected, ROUTER_GRADIENT)


def test_pages_in_no_list_are_not_visited():
    arrays, cotangents = draw(np.random.default_rng(2))
    arrays = arrays._replace(other=None)
    places = jax.tree.map(jnp.asarray, PLACES._replace(unread=None))

    def few(options, arrays):
        return paged_attention(options, arrays, places)

    with precision():
        expected = differentiate(few, PagedOptions(SCALE), arrays, cotangents)
        used = np.zeros((BATCH, PAGES), bool)
        for row in range(BATCH):
            used[row, READ.page[row]] = True
        assert not used.all(axis=1).any()
        spoilt = [np.where(used[..., None, None, None], x, np.nan) for x in (arrays.page_k, arrays.page_v)]
        arrays = arrays._replace(page_k=spoilt[0], page_v=spoilt[1])
        actual = differentiate(few, PagedOptions(SCALE), arrays, cotangents)
    assert_same_bits(actual, expected)


def test_very_large_logits_stay_finite():
    arrays, cotangents = draw(np.random.default_rng(3))
    arrays = jax.tree.map(lambda x: x.astype(np.float32), arrays._replace(q=1e4 * arrays.q))
    cotangents = tuple(x.astype(np.float32) for x in cotangents)
    results = differentiate(paged, PagedOptions(SCALE), arrays, cotangents)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(results))


TOKENS, CHUNK, HEAD = 4096, 64, 16


def compiled(loss):
    arguments = [jax.ShapeDtypeStruct((1, TOKENS, 1, HEAD), jnp.float32) for _ in range(3)]
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arguments).compile()


def test_memory_is_far_below_that_of_all_pairs_of_tokens():
    routed = jnp.arange(TOKENS // CHUNK) % 8 == 0
    choice = jnp.stack([routed, ~routed], axis=-1).astype(jnp.float32)[None, :, None]
    gates = jnp.zeros((1, TOKENS, 1))

    def routed_branch(q, k, v):
        out, _ = natsl_attention(q, k, v, gates, gates, q, k, v, choice, chunk_size=CHUNK, implementation="scan")
        return jnp.sum(jnp.sin(out[1]))

    def dense_branch(q, k, v):
        i, j = jnp.ogrid[:TOKENS, :TOKENS]
        seen = (j <= i) & (routed[j // CHUNK] | (j // CHUNK == i // CHUNK))
        p = jax.nn.softmax(jnp.where(seen, q[0, :, 0] @ k[0, :, 0].T, -jnp.inf), axis=-1)
        return jnp.sum(jnp.sin(p @ v[0, :, 0]))

    pages, square = compiled(routed_branch), compiled(dense_branch)
    assert largest_array(square.as_text()) >= TOKENS * TOKENS
    assert largest_array(pages.as_text()) < TOKENS * TOKENS // 16
    sizes = [program.memory_analysis().temp_size_in_bytes for program in (pages, square)]
    assert sizes[0] < sizes[1] / 4
