"""The TPU kernel of decayed linear attention, interpreted on a CPU and lowered for a TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix_kernels import tpu_tiles
from jaxmix_kernels.decays import CHUNK
from jaxmix_kernels.linear_attention.tpu import decayed_attention
from tests.kernels import reference, tpu_checks
from tests.tolerances import FORMS, assert_close

CASES = {
    **reference.LAYOUTS,
    "weak decays": {"decay": "weak", "segments": False},
    "neither decay nor segments": {"decay": None, "segments": False},
    "padded to two grid steps": {"tokens": 5 * CHUNK, "batch": 1, "heads": 2},
    "bfloat16": {"dtype": jnp.bfloat16, "value_size": 128},
}


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch):
    """Several grid steps for few tokens, so that they are interpreted fast."""
    monkeypatch.setattr(tpu_tiles, "TILES_PER_STEP", {"bfloat16": 2, "float32": 2})


@functools.cache
def _case(name):
    return reference.random_case(**CASES[name])


def _run(function, *args, **options):
    return jax.jit(functools.partial(function, interpret=True, **options))(*args)


def _expect(*args):
    """By the reference: outputs, final state and the states before every tile."""
    result = _run(reference.decayed_attention, *args, states=True)
    return result._replace(states=result.states[:, :, ::2])


def _without_padding(result, tokens):
    return result._replace(states=result.states[:, :, : -(-tokens // tpu_tiles.TILE)])


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name):
    a, b, c, decays, initial, _ = _case(name)
    actual = _without_padding(_run(decayed_attention, a, b, c, decays, initial, states=True), c.shape[1])
    assert actual.out.dtype == actual.states.dtype == c.dtype
    assert_close(actual, _expect(a, b, c, decays, initial), FORMS[np.dtype(c.dtype)])


def test_states_alone():
    a, b, c, decays, initial, _ = _case("mixed decays and segments")
    whole = _run(decayed_attention, a, b, c, decays, initial)
    alone = _run(decayed_attention, None, b, c, decays, initial, outputs=False, states=True)
    assert alone.out is None
    assert whole.states is None
    assert_close(alone.final, whole.final, 1e-6)
    assert_close(alone.states, _expect(a, b, c, decays, initial).states, FORMS[np.dtype(np.float32)])


def test_no_initial_state_is_a_state_of_zeros():
    a, b, c, decays, initial, _ = _case("weak decays")
    nothing = _run(decayed_attention, a, b, c, decays, None)
    zeros = _run(decayed_attention, a, b, c, decays, jnp.zeros_like(initial))
    assert_close(nothing, zeros, 1e-6)


def test_no_race_and_no_read_of_what_was_never_written():
    a, b, c, decays, initial, _ = reference.random_case(
        batch=1, heads=2, b_heads=1, tokens=5 * CHUNK, key_size=32, value_size=32
    )
    with tpu_checks.races_forbidden() as interpret:
        actual = decayed_attention(a, b, c, decays, initial, states=True, interpret=interpret)
    actual = _without_padding(actual, 5 * CHUNK)
    assert_close(actual, _expect(a, b, c, decays, initial), FORMS[np.dtype(np.float32)])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [(32, 32), (64, 64), (128, 128), (128, 32), (32, 64)], ids=str)
def test_lowers_for_a_tpu(dtype, sizes):
    for name in ("every array with its own number of heads", "neither decay nor segments"):
        case = functools.partial(reference.random_case, **CASES[name])
        case = functools.partial(case, dtype=dtype, key_size=sizes[0], value_size=sizes[1])
        a, b, c, decays, initial, _ = jax.eval_shape(case)
        for states in (False, True):
            kernel = functools.partial(decayed_attention, states=states)
            tpu_checks.lower(kernel, a, b, c, decays, initial)
            tpu_checks.lower(functools.partial(kernel, outputs=False), None, b, c, decays, None)


def test_refuses_what_it_cannot_serve():
    a, b, c, *_ = _case("one chunk")
    with pytest.raises(NotImplementedError, match="float16"):
        decayed_attention(*(x.astype(jnp.float16) for x in (a, b, c)), None, None)
    with pytest.raises(NotImplementedError, match="head sizes"):
        decayed_attention(a[..., :48], b[..., :48], c, None, None)
    with pytest.raises(NotImplementedError, match="multiples of 64 tokens"):
        decayed_attention(a[:, :63], b[:, :63], c[:, :63], None, None)
    with pytest.raises(ValueError, match="a: needed"):
        decayed_attention(None, b, c, None, None)
