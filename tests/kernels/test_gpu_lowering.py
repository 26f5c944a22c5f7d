"""Every variant of the Hopper kernels becomes a CUDA program that fits the shared memory, without a GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxmix_kernels.decays import CHUNK
from jaxmix_kernels.gpu_chunks import COPYING_REGISTERS, SIZES, computing_registers
from jaxmix_kernels.linear_attention.gpu import LONG, decayed_attention
from tests.kernels import gpu_checks, reference

VARIANTS = {
    "no decay, no segments": {"decay": None, "segments": False},
    "decays": {"segments": False},
    "decays and segments": {},
}


def _shapes(**options):
    options = {"batch": 1, "tokens": 512, "heads": 4, "b_heads": 2, "dtype": jnp.bfloat16, **options}
    return jax.eval_shape(functools.partial(reference.random_case, **options))


@pytest.mark.parametrize("value_size", SIZES)
@pytest.mark.parametrize("key_size", SIZES)
def test_every_size_with_all_inputs(key_size, value_size):
    *arrays, _ = _shapes(key_size=key_size, value_size=value_size)
    gpu_checks.lower(functools.partial(decayed_attention, states=True), *arrays)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(name):
    a, b, c, decays, _, _ = _shapes(key_size=128, value_size=128, **VARIANTS[name])
    gpu_checks.lower(decayed_attention, a, b, c, decays, None)
    for reverse in (False, True):
        alone = functools.partial(decayed_attention, outputs=False, reverse=reverse)
        gpu_checks.lower(alone, None, b, c, decays, None)


def test_long_sequences():
    _, b, c, decays, _, _ = _shapes(tokens=(LONG + 1) * CHUNK)
    for reverse in (False, True):
        gpu_checks.lower(functools.partial(decayed_attention, outputs=False, reverse=reverse), None, b, c, decays, None)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_warpgroups_ask_for_no_more_registers_than_there_are(count):
    at_start = 65_536 // (128 * (count + 1)) // 8 * 8
    asked = count * computing_registers(count) + COPYING_REGISTERS
    assert asked <= at_start * (count + 1)
    assert computing_registers(count) % 8 == 0
