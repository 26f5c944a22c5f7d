"""Softmax attention to chosen blocks: the form that visits them, the dense form, and plain softmax attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import block_softmax_attention, softmax_attention
from jaxmix.mixers.natsl import count_chunks
from tests.contract.agreement import F64
from tests.contract.spec import precision
from tests.tolerances import FORMS, assert_close, assert_same_bits

BATCH, TOKENS, HEADS, GROUP, CHUNK = 2, 22, 2, 2, 4
LONG = 600
"""Tokens whose lists take several turns, early and late queries apart."""
PACKED = np.array([[1] * 9 + [0] * 2 + [2] * 11, [0, 3, 3] + [4] * 14 + [0] + [4] * 4], np.int32)
LAYOUTS = {"one document": (TOKENS, None, None), "packed": (TOKENS, PACKED, 3), "long": (LONG, None, None)}


def draw(layout):
    """q, k, v and a selection of about half of the chunks, with the options of the layout."""
    tokens, ids, documents = LAYOUTS[layout]
    rng = np.random.default_rng(0)
    shape = (BATCH, tokens, HEADS * GROUP)
    chunks = count_chunks(tokens, CHUNK, packed=ids is not None, continued=False, max_documents=documents)
    selection = (rng.random((BATCH, chunks, HEADS)) < 0.5).astype(np.float64)
    arrays = tuple(rng.normal(size=(*shape, size)) for size in (3, 3, 5))
    return (*arrays, selection), {"segment_ids": ids, "chunk_size": CHUNK, "max_documents": documents}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_scan_equals_the_dense_form_with_every_gradient(layout):
    arrays, options = draw(layout)
    rng = np.random.default_rng(1)
    weights = rng.normal(size=arrays[2].shape), rng.normal(size=arrays[0].shape[:3])
    ids = options["segment_ids"]
    real = np.ones(arrays[0].shape[:2], bool) if ids is None else ids != 0
    with precision():

        def loss(arrays, form):
            out, lse = block_softmax_attention(*arrays, scale=0.7, implementation=form, **options)
            lse = jnp.where(real[..., None], lse, 0)
            return jnp.sum(weights[0] * out) + jnp.sum(weights[1] * lse), (out, lse)

        run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
        arrays = jax.tree.map(jnp.asarray, arrays)
        gradients, found = jax.device_get(run(arrays, "scan"))
        expected, wanted = jax.device_get(run(arrays, "dense"))
        assert_close((gradients[:3], found), (expected[:3], wanted), FORMS[F64])
        # What is not read has no gradient; the dense form would give a chunk of weight 0 none either.
        assert_close(gradients[3], np.where(arrays[3] > 0, expected[3], 0), FORMS[F64])
        assert np.any(gradients[3])


def test_all_blocks_are_softmax_attention_and_none_is_a_block_by_itself():
    (q, k, v, selection), options = draw("one document")
    with precision():
        q, k, v = map(jnp.asarray, (q, k, v))
        ones = jnp.ones(selection.shape)
        everything, _ = block_softmax_attention(q, k, v, ones, **options)
        assert_close(everything, softmax_attention(q, k, v)[0], FORMS[F64])
        alone, _ = block_softmax_attention(q, k, v, 0 * ones, **options)
        ids = jnp.tile(1 + jnp.arange(TOKENS, dtype=jnp.int32) // CHUNK, (BATCH, 1))
        assert_close(alone, softmax_attention(q, k, v, segment_ids=ids)[0], FORMS[F64])


def test_calls_under_vmap_with_lists_of_different_lengths_are_those_calls_by_themselves():
    (q, k, v, _), options = draw("long")
    shape = (3, BATCH, LONG // CHUNK, HEADS)
    selections = np.random.default_rng(2).random(shape) < np.array([0.0, 0.1, 0.9])[:, None, None, None]
    with precision():
        q, k, v, selections = jax.tree.map(jnp.asarray, (q, k, v, selections.astype(np.float64)))

        def gradients(selection):
            def loss(*arrays):
                out, lse = block_softmax_attention(*arrays, **options)
                return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

            return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(q, k, v, selection)

        together = jax.device_get(jax.jit(jax.vmap(gradients))(selections))
        alone = [jax.device_get(jax.jit(gradients)(selection)) for selection in selections]
        assert_close(together, jax.tree.map(lambda *x: np.stack(x), *alone), FORMS[F64])


def test_padding_may_hold_anything_and_gives_zeros():
    arrays, options = draw("packed")
    real = options["segment_ids"] != 0
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    spoilt = [jnp.where(real[..., None, None], x, jnp.nan) for x in arrays[:3]]
    for form in ("dense", "scan"):
        expected, _ = block_softmax_attention(*arrays, implementation=form, **options)
        out, _ = block_softmax_attention(*spoilt, arrays[3], implementation=form, **options)
        assert_same_bits(out, expected)
        assert not np.any(np.asarray(out)[~real])


def test_the_results_have_the_dtypes_of_the_arguments():
    arrays, options = draw("one document")
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in arrays[:3]]
    out, lse = block_softmax_attention(*narrow, jnp.asarray(arrays[3], jnp.float32), **options)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "serial"}, "implementation: expected one of None, 'dense', 'scan', got 'serial'"),
        ({"chunk_size": 0}, "chunk_size: expected an int of at least 1, got 0"),
        ({"scale": -1.0}, "scale: expected a positive number, got -1.0"),
        ({"selection": np.ones((2, 6, 3), np.float32)}, "selection: .* divides the 4 heads of q, got 3 heads"),
        (
            {"selection": np.ones((2, 5, 2), np.float32)},
            r"selection: expected shape .*\[2, 6, \*\], got .*\[2, 5, 2\]",
        ),
        ({"k": np.ones((2, 22, 4, 2), np.float32)}, r"k: expected shape .*3\], got shape \[2, 22, 4, 2\]"),
        ({"v": np.ones((2, 22, 2, 5), np.float32)}, r"v: expected shape .*, got shape \[2, 22, 2, 5\]"),
    ],
)
def test_misuse_is_named(change, message):
    arrays, options = draw("one document")
    names = ("q", "k", "v", "selection")
    given = dict(zip(names, (jnp.asarray(x, jnp.float32) for x in arrays), strict=True)) | options | change
    with pytest.raises(ValueError, match=message):
        block_softmax_attention(**given)
