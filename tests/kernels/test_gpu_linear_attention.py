"""The Hopper kernel of decayed linear attention, interpreted on a CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix_kernels.decays import CHUNK
from jaxmix_kernels.linear_attention import gpu
from jaxmix_kernels.linear_attention.gpu import decayed_attention
from tests.kernels import gpu_checks, reference
from tests.tolerances import assert_close

# bfloat16 operands: products of numbers rounded at 2e-3 relative (RMS), and the output rounded once more.
TOLERANCE = 5e-3

CASES = {
    **reference.LAYOUTS,
    "weak decays": {"decay": "weak", "segments": False, "key_size": 64},
    "neither decay nor segments": {"decay": None, "segments": False, "value_size": 32},
    "two blocks of columns": {"key_size": 128, "value_size": 128},
}


@functools.cache
def _case(name):
    return reference.random_case(**{"batch": 1, "heads": 2, "dtype": jnp.bfloat16, **CASES[name]})


def _interpret(*args, **options):
    with gpu_checks.races_forbidden() as interpret:
        return decayed_attention(*args, interpret=interpret, **options)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_without_races(name):
    a, b, c, decays, initial, _ = _case(name)
    actual = _interpret(a, b, c, decays, initial)
    assert actual.out is not None
    assert actual.out.dtype == c.dtype
    assert_close(actual, reference.decayed_attention(a, b, c, decays, initial), TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_final_state_in_reverse(name):
    _, b, c, decays, initial, _ = _case(name)
    options = {"reverse": True, "outputs": False}
    actual = _interpret(None, b, c, decays, initial, **options)
    assert_close(actual, reference.decayed_attention(None, b, c, decays, initial, **options), TOLERANCE)


def test_final_state_alone():
    a, b, c, decays, initial, _ = _case("mixed decays and segments")
    whole = _interpret(a, b, c, decays, initial)
    alone = _interpret(None, b, c, decays, initial, outputs=False)
    assert alone.out is None
    np.testing.assert_array_equal(alone.final, whole.final)


@pytest.mark.parametrize("reverse", [False, True])
def test_final_state_of_a_long_sequence_begins_where_decays_leave_something(monkeypatch, reverse):
    """Of six chunks one head keeps the last three to be walked, one all, one the last; NaN is elsewhere."""
    monkeypatch.setattr(gpu, "LONG", 5)
    rng = np.random.default_rng(0)
    b, c = (jnp.asarray(rng.normal(size=(1, 6 * CHUNK, 3, size)) / 8, jnp.bfloat16) for size in (32, 64))
    steps = np.repeat(np.array([-40.0, -1.0, -200.0]) / CHUNK, 6 * CHUNK).reshape(1, 3, 6 * CHUNK)
    decays = reference.make_decays(steps)
    options = {"reverse": reverse, "outputs": False}
    expected = reference.decayed_attention(None, b, c, decays, None, **options).final

    walked = np.arange(6) if reverse else np.arange(6)[::-1]
    seen = walked[:, None] < np.array([3, 6, 1])
    c = jnp.where(np.repeat(seen, CHUNK, axis=0)[None, :, :, None], c, jnp.nan)
    assert_close(_interpret(None, b, c, decays, None, **options).final, expected, TOLERANCE)


@pytest.mark.parametrize("outputs", [True, False], ids=["with outputs", "without"])
def test_states_before_every_chunk(outputs):
    a, b, c, decays, initial, _ = _case("two blocks of columns")
    whole = _interpret(a if outputs else None, b, c, decays, initial, outputs=outputs, states=True)
    assert whole.states.dtype == c.dtype
    count = b.shape[1] // CHUNK
    for n in range(count):
        expected = initial
        if n:
            first = jax.tree.map(lambda x, n=n: x[:, :, :n], dataclasses.replace(decays, run=None))
            first = dataclasses.replace(first, run=decays.run[:, :n])
            head = slice(0, n * CHUNK)
            expected = reference.decayed_attention(None, b[:, head], c[:, head], first, initial, outputs=False).final
        assert_close(whole.states[:, :, n].astype(jnp.float32), expected, TOLERANCE)


def test_no_initial_state_is_a_state_of_zeros():
    a, b, c, decays, initial, _ = _case("weak decays")
    nothing = _interpret(a, b, c, decays, None)
    zeros = _interpret(a, b, c, decays, jnp.zeros_like(initial))
    assert_close(nothing, zeros, 1e-6)


def test_refuses_what_it_cannot_serve():
    a, b, c, decays, initial, _ = _case("weak decays")
    with pytest.raises(NotImplementedError, match="float16"):
        decayed_attention(*(x.astype(jnp.float16) for x in (a, b, c)), decays, initial)
    with pytest.raises(NotImplementedError, match="without outputs"):
        decayed_attention(a, b, c, decays, initial, reverse=True)
    with pytest.raises(NotImplementedError, match="sizes"):
        decayed_attention(a[..., :48], b[..., :48], c, None, None)
    with pytest.raises(ValueError, match="multiple of 64"):
        decayed_attention(a[:, :63], b[:, :63], c[:, :63], None, None)
    with pytest.raises(ValueError, match="head count"):
        decayed_attention(jnp.repeat(a, 3, axis=2)[:, :, :3], b, c, None, None)
