"""The Hopper kernel of the gradients of decayed linear attention, interpreted on a CPU and lowered for a GPU."""

import jax.numpy as jnp
import pytest

from jaxmix_kernels.decays import CHUNK, BackwardArguments
from jaxmix_kernels.linear_attention.gpu_backward import decayed_attention_backward
from tests.kernels import backward, gpu_checks
from tests.kernels.targets import OneDevice
from tests.tolerances import assert_close


@pytest.mark.parametrize("name", backward.CASES)
def test_equals_the_reference_without_races(name):
    q, k, v, d_out, decays, initial, d_final = backward.draw(**backward.CASES[name])
    d_final = None if name == backward.ONE_CHUNK else d_final
    expected, given = backward.expect(q, k, v, d_out, decays, initial, d_final)
    with gpu_checks.races_forbidden() as interpret:
        actual = decayed_attention_backward(given, interpret=interpret)
    assert actual.dq.dtype == actual.dk.dtype == actual.dv.dtype == q.dtype
    assert_close(actual, expected, backward.BFLOAT16, floor=backward.FLOOR)


@pytest.mark.parametrize("size", [64, 32], ids=["in the kernel", "after it"])
def test_keys_that_are_values_and_gradients_that_are_added(size):
    options = {"decay": "weak", "key_size": size, "value_size": size}
    q, k, _, d_out, decays, initial, d_final = backward.draw(**options)
    more_dq, more_dk = d_out[:, ::-1], 2 * d_out
    expected, given = backward.expect(q, k, None, d_out, decays, initial, d_final, more_dq, more_dk)
    with gpu_checks.races_forbidden() as interpret:
        actual = decayed_attention_backward(given, interpret=interpret)
    assert actual.dv is None
    assert_close(actual, expected, backward.BFLOAT16)


def test_gradients_of_a_call_are_by_the_kernel_from_the_states_that_the_forward_kernel_keeps():
    case = backward.CASES["weak decays and segments"] | {"tokens": 2 * CHUNK}
    arrays = backward.draw(**case)
    expected, _ = backward.expect(*arrays)
    with gpu_checks.races_forbidden() as interpret:
        actual = backward.of_call(OneDevice("gpu", interpret=interpret), *arrays)
    assert_close(actual, expected, backward.BFLOAT16)


# A program has at most 64 columns of the values: E = 128 is E = 64 twice.
@pytest.mark.parametrize("sizes", [(32, 32), (32, 128), (64, 32), (64, 64), (128, 32), (128, 128)], ids=str)
def test_lowers_for_a_gpu(sizes):
    gpu_checks.lower(decayed_attention_backward, backward.shapes(*sizes))


def test_lowers_without_decays():
    gpu_checks.lower(decayed_attention_backward, backward.shapes(128, 128, decay=None, segments=False))


def test_refuses_what_it_cannot_serve():
    q, k, v, d_out, decays, initial, _ = backward.draw(**backward.CASES[backward.ONE_CHUNK])
    states = jnp.zeros((*initial.shape[:2], 1, *initial.shape[2:]), q.dtype)
    others = [x.astype(jnp.float16) for x in (q, k, v, d_out)]
    with pytest.raises(NotImplementedError, match="float16"):
        decayed_attention_backward(BackwardArguments(*others, decays, states))
    with pytest.raises(ValueError, match="head count"):
        decayed_attention_backward(BackwardArguments(jnp.tile(q, (1, 1, 2, 1))[:, :, :3], k, v, d_out, decays, states))
