"""The Hopper kernels in float32, whose operands are two bfloat16 halves: against float64, interpreted and lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmix
from jaxmix_kernels.decays import CHUNK, SIZES
from jaxmix_kernels.gpu_operands import halve, join
from jaxmix_kernels.linear_attention.gpu import decayed_attention
from jaxmix_kernels.linear_attention.gpu_backward import decayed_attention_backward
from jaxmix_kernels.target import Target, using_target
from tests.contract.agreement import F32
from tests.contract.spec import SERIAL, Form, draw_case, evaluate
from tests.kernels import backward, gpu_checks, reference
from tests.kernels.by_kernel import by_kernel
from tests.kernels.targets import OneDevice
from tests.mixers import test_hla2
from tests.tolerances import FORMS, HALVES, assert_close, rms_ratio

FORWARD = {
    "weak decays": {"decay": "weak", "segments": False, "key_size": 64},
    "mixed decays and segments": {},
    "neither decay nor segments": {"decay": None, "segments": False, "value_size": 32},
    "two blocks of columns": {"key_size": 128, "value_size": 128},
}
BACKWARD = (
    "weak decays and segments",
    "mixed decays and segments",
    "neither decay nor segments",
    "two blocks of columns",
)
"""Of `backward.CASES`."""


def draw(**options):
    return reference.random_case(**{"batch": 1, "dtype": np.float32, **options})


def in_float64(function, *arrays, **options):
    """What the reference gives for the same numbers in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64) if x.dtype == F32 else x, jax.device_get(arrays))
        return jax.device_get(jax.jit(functools.partial(function, **options))(*wide))


def assert_gradients_close(actual, expected):
    assert_close(actual._replace(d_steps=None), expected._replace(d_steps=None), HALVES, floor=backward.FLOOR)
    assert_close(actual.d_steps, expected.d_steps, FORMS[F32])


def test_two_halves_are_a_number_to_sixteen_bits():
    x = np.random.default_rng(0).normal(size=10_000).astype(np.float32) * np.float32(10.0) ** np.arange(-20, 20, 0.004)
    x = jnp.asarray(x, F32)
    parts = jax.jit(functools.partial(halve, "x"))(x)
    assert [part.dtype for part in parts.values()] == [jnp.bfloat16] * 2
    assert np.max(np.abs(join(parts, "x") - x) / np.abs(x)) <= 2.0**-16
    assert rms_ratio(parts["x"].astype(F32), x) > 1e-4


@pytest.mark.parametrize("name", FORWARD)
def test_forward_equals_the_reference_without_races(name):
    a, b, c, decays, initial, _ = draw(heads=2, **FORWARD[name])
    with gpu_checks.races_forbidden() as interpret:
        actual = decayed_attention(a, b, c, decays, initial, states=True, interpret=interpret)
    assert {x.dtype for x in actual if x is not None} == {jnp.dtype(F32)}
    expected = in_float64(reference.decayed_attention, a, b, c, decays, initial, states=True)
    assert_close(actual, expected, HALVES)


def test_final_state_in_reverse():
    _, b, c, decays, initial, _ = draw(heads=2)
    options = {"reverse": True, "outputs": False}
    with gpu_checks.races_forbidden() as interpret:
        actual = decayed_attention(None, b, c, decays, initial, interpret=interpret, **options)
    expected = in_float64(functools.partial(reference.decayed_attention, None, **options), b, c, decays, initial)
    assert_close(actual, expected, HALVES)


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_equals_the_reference_without_races(name):
    expected, given = backward.expect(*backward.draw(**backward.CASES[name], dtype=F32))
    with gpu_checks.races_forbidden() as interpret:
        assert_gradients_close(decayed_attention_backward(given, interpret=interpret), expected)


def test_keys_that_are_values_and_gradients_that_are_added():
    options = {"decay": "weak", "key_size": 64, "tokens": 2 * CHUNK, "dtype": F32}
    q, k, _, d_out, *others = backward.draw(**options)
    expected, given = backward.expect(q, k, None, d_out, *others, d_out[:, ::-1], 2 * d_out)
    with gpu_checks.races_forbidden() as interpret:
        assert_gradients_close(decayed_attention_backward(given, interpret=interpret), expected)


def test_hla2_equals_the_serial_form_with_every_gradient():
    spec = test_hla2.TestHLA2.spec
    variant = spec.variants["grouped heads, shared decay"]
    case = draw_case(spec, variant, 70, segment_ids=[[1] * 30 + [0] * 6 + [1] * 30 + [2] * 4, [0] * 3 + [1] * 67])
    expected = evaluate(spec, variant, spec.rounded(case, F32), SERIAL)
    ours = by_kernel(spec, OneDevice("gpu", interpret=True))
    assert_close(evaluate(ours, variant, case, Form("scan"), F32), expected, FORMS[F32])


@pytest.mark.parametrize("value_size", SIZES)
@pytest.mark.parametrize("key_size", SIZES)
def test_every_size_lowers_for_a_gpu(key_size, value_size):
    given = backward.shapes(key_size, value_size, dtype=F32)
    forward = functools.partial(decayed_attention, states=True)
    gpu_checks.lower(forward, given.q, given.k, given.v, given.decays, given.d_final)
    gpu_checks.lower(decayed_attention_backward, given)


@pytest.mark.parametrize(("name", "links"), [("linear_attention", 1), ("hla2", 2), ("hla3", 3)])
def test_mixers_lower_with_a_kernel_for_every_link_and_one_for_its_gradients(name, links):
    x, decay = jax.ShapeDtypeStruct((4, 1024, 16, 128), F32), jax.ShapeDtypeStruct((4, 1024, 16), F32)

    def loss(q, k, v, log_decay):
        return jnp.sum(getattr(jaxmix, name)(q, k, v, log_decay, implementation="pallas")[0])

    with using_target(Target("gpu")):
        text = gpu_checks.lower(jax.grad(loss, argnums=range(4)), x, x, x, decay)
    assert text.count("custom_call @mosaic_gpu") == 2 * links


def test_refuses_float64_and_operands_of_several_dtypes():
    refusal = Target("gpu").refusal("float64", 64, 64)
    assert refusal == "the gpu kernels take bfloat16 or float32, not float64"
    a, b, c, decays, initial, _ = draw(tokens=CHUNK)
    with pytest.raises(NotImplementedError, match="of one dtype"):
        decayed_attention(a, b, c.astype(jnp.bfloat16), decays, initial)
