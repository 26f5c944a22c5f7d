"""The Hopper kernel of the gradients of decayed linear attention, interpreted on a CPU and lowered for a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jaxmix_kernels.decays import CHUNK, BackwardResult
from jaxmix_kernels.linear_attention.gpu_backward import decayed_attention_backward
from jaxmix_kernels.linear_attention.vjp import linear_attention
from jaxmix_kernels.target import Target
from tests.kernels import gpu_checks, reference
from tests.tolerances import assert_close

# bfloat16 operands: products of numbers rounded at 2e-3 relative (RMS), and the results rounded once more.
TOLERANCE = 5e-3

# Gradients that decay to the smallest numbers of float32 have few digits.
FLOOR = 1e-20

ONE_CHUNK = "one chunk, every array with its own number of heads"

# A ring of tiles has three slots at D = 64 and two at other sizes: so many chunks write every slot again.
CASES = {
    "weak decays and segments": {"decay": "weak", "key_size": 64, "tokens": 4 * CHUNK},
    "mixed decays and segments": {"value_size": 32},
    "decays of -80": {"decay": -80.0, "segments": False, "tokens": 2 * CHUNK},
    "segments without decay": {"decay": None, "tokens": 2 * CHUNK},
    "neither decay nor segments": {"decay": None, "segments": False, "key_size": 64, "tokens": 4 * CHUNK},
    "two blocks of columns": {"decay": "weak", "key_size": 128, "value_size": 128},
    ONE_CHUNK: {
        "decay": "weak",
        "heads": 4,
        "b_heads": 2,
        "c_heads": 1,
        "decay_heads": 2,
        "tokens": CHUNK,
    },
}


def _case(**options):
    """q, k, v, d_out, decays, the initial state, and the gradient of the final one."""
    options = {"batch": 1, "heads": 1, "tokens": 3 * CHUNK, "dtype": jnp.bfloat16, **options}
    q, k, v, decays, initial, d_out = reference.random_case(**options)
    d_final = jax.random.normal(jax.random.key(1), initial.shape)
    return q, k, v, d_out, decays, initial, d_final


class OneDevice(Target):
    """The interpreter calls back in order, which no compiler splits over devices."""

    splits = False


@jax.jit
def _expected(q, k, v, d_out, decays, initial, d_final, *more):
    """Gradients of every head in float32, and the states before every chunk, rounded."""
    wide = [None if x is None else x.astype(jnp.float32) for x in (q, k, v, d_out)]
    states = reference.decayed_attention(q, k, k if v is None else v, decays, initial, states=True).states
    return reference.decayed_attention_backward(*wide, decays, states, d_final, *more), states


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_without_races(name):
    q, k, v, d_out, decays, initial, d_final = _case(**CASES[name])
    d_final = None if name == ONE_CHUNK else d_final
    expected, states = _expected(q, k, v, d_out, decays, initial, d_final)
    with gpu_checks.races_forbidden() as interpret:
        actual = decayed_attention_backward(q, k, v, d_out, decays, states, d_final, interpret=interpret)
    assert actual.dq.dtype == actual.dk.dtype == actual.dv.dtype == q.dtype
    assert_close(actual, expected, TOLERANCE, floor=FLOOR)


@pytest.mark.parametrize("size", [64, 32], ids=["in the kernel", "after it"])
def test_keys_that_are_values_and_gradients_that_are_added(size):
    options = {"decay": "weak", "key_size": size, "value_size": size}
    q, k, _, d_out, decays, initial, d_final = _case(**options)
    more_dq, more_dk = d_out[:, ::-1], 2 * d_out
    expected, states = _expected(q, k, None, d_out, decays, initial, d_final, more_dq, more_dk)
    with gpu_checks.races_forbidden() as interpret:
        arrays = q, k, None, d_out, decays, states, d_final, more_dq, more_dk
        actual = decayed_attention_backward(*arrays, interpret=interpret)
    assert actual.dv is None
    assert_close(actual, expected, TOLERANCE)


def test_gradients_of_a_call_are_by_the_kernel_from_the_states_that_the_forward_kernel_keeps():
    q, k, v, d_out, decays, initial, d_final = _case(**CASES["weak decays and segments"] | {"tokens": 2 * CHUNK})
    expected, _ = _expected(q, k, v, d_out, decays, initial, d_final)
    with gpu_checks.races_forbidden() as interpret:
        target = OneDevice("gpu", interpret=interpret)

        def attend(q, k, v, initial, steps):
            given = dataclasses.replace(decays, steps=steps)
            return linear_attention(q, k, v, given, initial, target=target)

        actual = jax.vjp(attend, q, k, v, initial, decays.steps)[1]((d_out, d_final))
    assert_close(BackwardResult(*actual), expected, TOLERANCE)


def _shapes(key_size, value_size, **options):
    options = {"batch": 1, "tokens": 512, "heads": 4, "b_heads": 2, "dtype": jnp.bfloat16, **options}
    case = functools.partial(reference.random_case, key_size=key_size, value_size=value_size, **options)
    q, k, v, decays, initial, d_out = jax.eval_shape(case)
    states = jax.ShapeDtypeStruct((1, 4, 8, key_size, value_size), jnp.bfloat16)
    return q, k, v, d_out, decays, states, initial


# A program has at most 64 columns of the values: E = 128 is E = 64 twice.
@pytest.mark.parametrize("sizes", [(32, 32), (32, 128), (64, 32), (64, 64), (128, 32), (128, 128)], ids=str)
def test_lowers_for_a_gpu(sizes):
    gpu_checks.lower(decayed_attention_backward, *_shapes(*sizes))


def test_lowers_without_decays():
    gpu_checks.lower(decayed_attention_backward, *_shapes(128, 128, decay=None, segments=False))


def test_refuses_what_it_cannot_serve():
    q, k, v, d_out, decays, initial, _ = _case(**CASES[ONE_CHUNK])
    states = jnp.zeros((*initial.shape[:2], 1, *initial.shape[2:]), q.dtype)
    others = [x.astype(jnp.float16) for x in (q, k, v, d_out)]
    with pytest.raises(NotImplementedError, match="float16"):
        decayed_attention_backward(*others, decays, states, None)
    with pytest.raises(ValueError, match="head count"):
        decayed_attention_backward(jnp.tile(q, (1, 1, 2, 1))[:, :, :3], k, v, d_out, decays, states, None)
