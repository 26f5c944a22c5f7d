"""The Hopper kernel of the gradients of decayed linear attention, interpreted on a CPU and lowered for a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxmix_kernels.decays import CHUNK, BackwardResult
from jaxmix_kernels.gpu_chunks import SIZES
from jaxmix_kernels.linear_attention.gpu import decayed_attention
from jaxmix_kernels.linear_attention.gpu_backward import decayed_attention_backward
from tests.kernels import gpu_checks, reference
from tests.tolerances import assert_close

# bfloat16 operands: products of numbers rounded at 2e-3 relative (RMS), and the results rounded once more.
TOLERANCE = 5e-3

# Gradients that decay to the smallest numbers of float32 have few digits.
FLOOR = 1e-20

CASES = {
    "weak decays and segments": {"decay": "weak", "key_size": 64},
    "mixed decays and segments": {"key_size": 64, "value_size": 32},
    "decays of -80": {"decay": -80.0, "segments": False},
    "segments without decay": {"decay": None},
    "neither decay nor segments": {"decay": None, "segments": False, "key_size": 64},
    "one chunk": {"tokens": CHUNK, "decay": "weak", "segments": False},
    "two blocks of columns": {"decay": "weak", "key_size": 128, "value_size": 128},
    "every array with its own number of heads": {
        "decay": "weak",
        "heads": 4,
        "b_heads": 2,
        "c_heads": 1,
        "decay_heads": 2,
        "tokens": 2 * CHUNK,
    },
}


def _case(name):
    """q, k, v, d_out, decays, the initial state, and the gradient of the final one."""
    options = {"batch": 1, "heads": 2, "tokens": 4 * CHUNK, "dtype": jnp.bfloat16, **CASES[name]}
    q, k, v, decays, initial, d_out = reference.random_case(**options)
    d_final = jax.random.normal(jax.random.key(1), initial.shape)
    return q, k, v, d_out, decays, initial, d_final


def _serial(q, k, v, steps, initial, starts):
    """The recurrence, token by token: outputs, the final state, and the state before every token."""

    def step(state, token):
        q, k, v, g, start = token
        decayed = jnp.where(start, 0, jnp.exp(g)[..., None, None] * state)
        after = decayed + k[..., :, None] * v[..., None, :]
        return after, (jnp.einsum("bhd,bhde->bhe", q, after), state)

    tokens = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, jnp.moveaxis(steps, 1, 2))]
    starts = jnp.moveaxis(starts, 1, 0)[..., None, None, None]
    final, (out, states) = jax.lax.scan(step, initial, (*tokens, starts))
    return jnp.moveaxis(out, 0, 1), final, states


def _expected(q, k, v, d_out, decays, initial, d_final):
    """Gradients of every head by autodiff in float32, and the states before every chunk, rounded."""
    batch, length, heads, _ = q.shape

    def each(x, axis):
        return jnp.repeat(x.astype(jnp.float32), heads // x.shape[axis], axis=axis)

    steps, starts = jnp.zeros((batch, heads, length)), jnp.zeros((batch, length), bool)
    if decays is not None:
        steps = each(decays.steps, 1).reshape(batch, heads, length)
    if decays is not None and decays.run is not None:
        starts = (decays.run != jnp.pad(decays.run[..., :-1], ((0, 0), (0, 0), (1, 0)))).reshape(batch, length)
    arrays = each(q, 2), each(k, 2), each(v, 2), steps, each(initial, 1)
    (_, _, states), pullback = jax.vjp(functools.partial(_serial, starts=starts), *arrays)
    cotangents = each(d_out, 2), each(d_final, 1), jnp.zeros_like(states)
    dq, dk, dv, d_steps, d_initial = pullback(cotangents)
    d_steps = None if decays is None else d_steps.reshape(batch, heads, -1, CHUNK)
    states = jnp.moveaxis(states[::CHUNK], 0, 2).astype(q.dtype)
    return BackwardResult(dq, dk, dv, d_initial, d_steps), states


@pytest.mark.parametrize("name", CASES)
def test_equals_autodiff_of_the_recurrence_without_races(name):
    q, k, v, d_out, decays, initial, d_final = _case(name)
    expected, states = _expected(q, k, v, d_out, decays, initial, d_final)
    with gpu_checks.races_forbidden() as interpret:
        actual = decayed_attention_backward(q, k, v, d_out, decays, states, d_final, interpret=interpret)
    assert actual.dq.dtype == actual.dk.dtype == actual.dv.dtype == q.dtype
    assert_close(actual, expected, TOLERANCE, floor=FLOOR)


def test_with_the_states_of_the_forward_kernel_and_no_gradient_of_the_final_state():
    q, k, v, d_out, decays, initial, d_final = _case("weak decays and segments")
    expected, _ = _expected(q, k, v, d_out, decays, initial, jnp.zeros_like(d_final))
    with gpu_checks.races_forbidden() as interpret:
        states = decayed_attention(q, k, v, decays, initial, states=True, interpret=interpret).states
        actual = decayed_attention_backward(q, k, v, d_out, decays, states, None, interpret=interpret)
    assert_close(actual, expected, TOLERANCE)


def _shapes(key_size, value_size, **options):
    options = {"batch": 1, "tokens": 512, "heads": 4, "b_heads": 2, "dtype": jnp.bfloat16, **options}
    case = functools.partial(reference.random_case, key_size=key_size, value_size=value_size, **options)
    q, k, v, decays, initial, d_out = jax.eval_shape(case)
    states = jax.ShapeDtypeStruct((1, 4, 8, key_size, value_size), jnp.bfloat16)
    return q, k, v, d_out, decays, states, initial


@pytest.mark.parametrize("value_size", SIZES)
@pytest.mark.parametrize("key_size", SIZES)
def test_lowers_for_a_gpu(key_size, value_size):
    gpu_checks.lower(decayed_attention_backward, *_shapes(key_size, value_size))


def test_lowers_without_decays():
    gpu_checks.lower(decayed_attention_backward, *_shapes(128, 128, decay=None, segments=False))


def test_refuses_what_it_cannot_serve():
    q, k, v, d_out, decays, initial, _ = _case("one chunk")
    states = jnp.zeros((*initial.shape[:2], 1, *initial.shape[2:]), q.dtype)
    wide = [x.astype(jnp.float32) for x in (q, k, v, d_out)]
    with pytest.raises(NotImplementedError, match="bfloat16"):
        decayed_attention_backward(*wide, decays, states, None)
    with pytest.raises(ValueError, match="head count"):
        decayed_attention_backward(jnp.tile(q, (1, 1, 2, 1))[:, :, :3], k, v, d_out, decays, states, None)
