"""The TPU kernel of the gradients of decayed linear attention, interpreted on a CPU and lowered for a TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix_kernels import tpu_tiles
from jaxmix_kernels.decays import CHUNK, BackwardArguments
from jaxmix_kernels.linear_attention.tpu_backward import decayed_attention_backward
from tests.kernels import backward, tpu_checks
from tests.kernels.targets import OneDevice
from tests.tolerances import FORMS, assert_close

TOLERANCES = {"float32": FORMS[np.dtype(np.float32)], "bfloat16": backward.BFLOAT16}
RUNS = [
    *((name, "float32") for name in backward.CASES),
    *((name, "bfloat16") for name in ("weak decays and segments", "mixed decays and segments")),
]


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch):
    """Several grid steps for few tokens, so that they are interpreted fast."""
    monkeypatch.setattr(tpu_tiles, "TILES_PER_STEP", {"bfloat16": 2, "float32": 1})


def _by_tile(given):
    """With the states before every second chunk: those that the kernel reads."""
    return given._replace(states=given.states[:, :, ::2])


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=str)
def test_equals_the_reference(name, dtype):
    q, k, v, d_out, decays, initial, d_final = backward.draw(**backward.CASES[name], dtype=jnp.dtype(dtype))
    d_final = None if name == backward.ONE_CHUNK else d_final
    expected, given = backward.expect(q, k, v, d_out, decays, initial, d_final)
    kernel = jax.jit(functools.partial(decayed_attention_backward, interpret=True))
    actual = kernel(_by_tile(given))
    assert actual.dq.dtype == actual.dk.dtype == actual.dv.dtype == q.dtype
    assert_close(actual, expected, TOLERANCES[dtype], floor=backward.FLOOR)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_keys_that_are_values_and_gradients_that_are_added(dtype):
    options = {"decay": "weak", "key_size": 64, "value_size": 64, "dtype": jnp.dtype(dtype)}
    q, k, _, d_out, decays, initial, d_final = backward.draw(**options)
    more = d_out[:, ::-1], 2 * d_out
    expected, given = backward.expect(q, k, None, d_out, decays, initial, d_final, *more)
    kernel = jax.jit(functools.partial(decayed_attention_backward, interpret=True))
    actual = kernel(_by_tile(given))
    assert actual.dv is None
    assert_close(actual, expected, TOLERANCES[dtype])


def test_gradients_of_a_call_come_from_the_states_that_it_keeps_without_races(monkeypatch):
    monkeypatch.setattr(tpu_tiles, "TILES_PER_STEP", {"float32": 2})
    options = {"heads": 2, "b_heads": 1, "tokens": 5 * CHUNK, "value_size": 32, "dtype": np.float32}
    arrays = backward.draw(**options)
    expected, _ = backward.expect(*arrays)
    with tpu_checks.races_forbidden() as interpret:
        actual = backward.of_call(OneDevice("tpu", interpret=interpret), *arrays)
    shared = expected._replace(dk=np.sum(expected.dk, axis=2, keepdims=True))
    assert_close(actual, shared, TOLERANCES["float32"])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("sizes", [(32, 32), (64, 64), (128, 128), (128, 32), (32, 64)], ids=str)
def test_lowers_for_a_tpu(dtype, sizes):
    for options in ({}, {"decay": None, "segments": False}):
        arguments = backward.shapes(*sizes, states_every=tpu_tiles.TILE, **options, dtype=jnp.dtype(dtype))
        tpu_checks.lower(decayed_attention_backward, arguments)
        if sizes[0] == sizes[1]:
            same = arguments._replace(v=None, more_dq=arguments.q, more_dk=arguments.q)
            tpu_checks.lower(decayed_attention_backward, same)


def test_refuses_what_it_cannot_serve():
    q, k, v, d_out, decays, initial, _ = backward.draw(**backward.CASES[backward.ONE_CHUNK])
    states = jnp.zeros((*initial.shape[:2], 1, *initial.shape[2:]), q.dtype)
    with pytest.raises(NotImplementedError, match="all bfloat16 or all float32"):
        decayed_attention_backward(BackwardArguments(q, k, v, d_out.astype(jnp.float32), decays, states))
    with pytest.raises(ValueError, match="states: expected 1, one before every tile, got 2"):
        decayed_attention_backward(BackwardArguments(q, k, v, d_out, decays, jnp.repeat(states, 2, axis=2)))
    narrow = BackwardArguments(q[..., :16], k[..., :16], v, d_out, decays, states[..., :16, :])
    with pytest.raises(NotImplementedError, match="head sizes"):
        decayed_attention_backward(narrow)
