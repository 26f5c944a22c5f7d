"""The short convolution looks at the last W inputs of its own segment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmix.nn import ShortConvolution, short_convolution
from tests.tolerances import FORMS, assert_close, assert_same_bits

BATCH, TOKENS, CHANNELS, WIDTH = 2, 9, 3, 4
F64 = FORMS[np.dtype(np.float64)]
run = jax.jit(short_convolution)


def draw(tokens=TOKENS):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, tokens, CHANNELS))
    return x, rng.normal(size=(WIDTH, CHANNELS)), rng.normal(size=(BATCH, WIDTH - 1, CHANNELS))


def by_hand(x, kernel, ids, tail):
    """The definition, token by token: lists of the inputs that each segment has seen."""
    y, final = np.zeros_like(x), np.zeros_like(tail)
    for row in range(len(x)):
        seen, last = list(tail[row]), None
        for t in range(x.shape[1]):
            if ids[row, t] == 0:
                continue
            if last not in (None, ids[row, t]):
                seen = [np.zeros(CHANNELS)] * (WIDTH - 1)
            last = ids[row, t]
            seen.append(x[row, t])
            y[row, t] = sum(weight * value for weight, value in zip(kernel, seen[-WIDTH:], strict=True))
        final[row] = seen[1 - WIDTH :]
    return y, final


LAYOUTS = {
    "one document": [[1] * 9, [2] * 9],
    "packed": [[1, 1, 2, 2, 2, 2, 3, 1, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9]],
    "padding at the end": [[1, 1, 2, 2, 2, 0, 0, 0, 0], [1] + [0] * 8],
    "padding anywhere": [[0, 1, 0, 1, 1, 0, 0, 2, 0], [1, 1, 0, 2, 2, 0, 2, 2, 2]],
    "nothing but padding": [[0] * 9, [0, 0, 1, 1, 1, 1, 1, 1, 1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_the_definition(layout):
    x, kernel, tail = draw()
    ids = np.array(LAYOUTS[layout], np.int32)
    with jax.enable_x64(True):
        actual = run(x, kernel, segment_ids=ids, initial_state=tail)
    assert_close(actual, by_hand(x, kernel, ids, tail), F64)


@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_no_segments_is_one_document_with_every_gradient(tokens):
    x, kernel, tail = draw(tokens)
    ids = np.ones((BATCH, tokens), np.int32)
    rng = np.random.default_rng(1)
    cotangents = rng.normal(size=x.shape), rng.normal(size=tail.shape)

    @jax.jit
    def gradients(segment_ids):
        def convolve(x, kernel, tail):
            return short_convolution(x, kernel, segment_ids=segment_ids, initial_state=tail)

        out, pull_back = jax.vjp(convolve, x, kernel, tail)
        return out, pull_back(cotangents)

    with jax.enable_x64(True):
        expected, actual = jax.device_get((gradients(ids), gradients(None)))
    assert_close(actual, expected, F64)
    assert_close(actual[0], by_hand(x, kernel, ids, tail), F64)
    assert all(np.all(np.any(x, axis=-1)) for x in actual[1])


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_a_handed_on_state_continues_the_stream(cut):
    x, kernel, tail = draw()
    with jax.enable_x64(True):
        whole, end = run(x, kernel, initial_state=tail)
        first, state = run(x[:, :cut], kernel, initial_state=tail)
        second, state = run(x[:, cut:], kernel, initial_state=state)
    assert_same_bits(np.concatenate([first, second], axis=1), whole)
    assert_same_bits(state, end)


def test_padding_may_hold_nan():
    x, kernel, tail = draw()
    ids = np.array(LAYOUTS["padding anywhere"], np.int32)
    spoilt = np.where(ids[..., None] == 0, np.nan, x)

    @jax.jit
    def run_with_gradients(x):
        def convolve(x, kernel, tail):
            return short_convolution(x, kernel, segment_ids=jnp.asarray(ids), initial_state=tail)

        out, pull_back = jax.vjp(convolve, x, kernel, tail)
        return out, pull_back(jax.tree.map(jnp.ones_like, out))

    with jax.enable_x64(True):
        assert_same_bits(run_with_gradients(spoilt), run_with_gradients(x))


def test_the_state_is_float32_and_holds_bfloat16_inputs_exactly():
    x = jnp.asarray(draw()[0], jnp.bfloat16)
    module = ShortConvolution(CHANNELS, WIDTH, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    y, state = module(x, state=module.init_state(BATCH))
    assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    assert_same_bits(state, x[:, -3:].astype(jnp.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.zeros((2, 3))}, r"x: expected shape \[B, T, C\]"),
        ({"kernel": jnp.zeros((4, 2))}, r"kernel: expected shape \[W, C\] = \[\*, 3\], got shape \[4, 2\]"),
        ({"kernel": jnp.zeros((1, 3))}, r"kernel: expected a width W of at least 2"),
        ({"segment_ids": jnp.zeros((2, 4), jnp.int32)}, r"segment_ids: expected shape \[B, T\] = \[2, 5\]"),
        ({"initial_state": jnp.zeros((2, 4, 3))}, r"initial_state: expected shape \[B, W-1, C\] = \[2, 3, 3\]"),
        ({"initial_state": jnp.zeros((2, 3, 3), jnp.bfloat16)}, r"initial_state: expected dtype float32"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    arguments = {"x": jnp.zeros((2, 5, 3)), "kernel": jnp.zeros((4, 3))} | change
    with pytest.raises(ValueError, match=message):
        short_convolution(**arguments)
