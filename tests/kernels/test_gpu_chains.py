"""The fused Hopper kernels of HLA2, AHLA and HLA3, interpreted on a CPU and lowered for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix_kernels.ahla import gpu as ahla
from jaxmix_kernels.decays import CHUNK
from jaxmix_kernels.hla2 import gpu as hla2
from jaxmix_kernels.hla3 import gpu as hla3
from tests.kernels import gpu_checks, reference
from tests.tolerances import assert_close

# bfloat16 operands, among them results of the links before: each rounding is 2e-3 relative (RMS).
TOLERANCE = 7e-3

KERNELS = {
    "hla2": (hla2.hla2_forward, hla2.LINKS),
    "ahla": (ahla.ahla_forward, ahla.LINKS),
    "hla3": (hla3.hla3_forward, hla3.LINKS),
    "hla3 tail": (hla3.hla3_tail_forward, hla3.TAIL),
}
CASES = {
    "decays and segments, what gradients need": ({"segments": True}, True),
    "neither, grouped heads": ({"decay": None, "segments": False, "heads": 4}, False),
}


def _case(options):
    options = {"batch": 1, "heads": 2, "b_heads": 1, "c_heads": 1, "decay_heads": 1, "decay": "weak", **options}
    options = {"tokens": 5 * CHUNK, "key_size": 64, "dtype": jnp.bfloat16, **options}
    q, k, v, decays, *_ = reference.random_case(**options)
    return q, k, v, decays


def _initials(links, q, k, v):
    rng = np.random.default_rng(1)
    shapes = {"k": k.shape[3], "v": v.shape[3]}
    states = []
    for link in links:
        shapes[link.result] = shapes[link.values]
        states.append(jnp.asarray(rng.normal(size=(q.shape[0], 1, k.shape[3], shapes[link.values])), jnp.float32))
    return states


def _expected(links, q, k, v, decays, states, keep):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return reference.chain_forward(links, q, k, v, decays, states, keep=keep)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_equals_its_linear_attentions_without_races(case, name):
    function, links = KERNELS[name]
    options, keep = CASES[case]
    arrays = _case(options)
    states = _initials(links, *arrays[:3])
    with gpu_checks.races_forbidden() as interpret:
        actual = function(*arrays, *states, keep=keep, interpret=interpret)
    assert_close(actual, _expected(links, *arrays, states, keep), TOLERANCE)


@pytest.mark.parametrize("name", ["hla2", "hla3 tail"])
def test_a_key_size_of_128_in_two_parts(name):
    function, links = KERNELS[name]
    arrays = _case({"tokens": 4 * CHUNK, "heads": 1, "key_size": 128, "value_size": 128, "segments": False})
    with gpu_checks.races_forbidden() as interpret:
        actual = function(*arrays, None, None, keep=True, interpret=interpret)
    states = [jnp.zeros_like(x[:, :1]) for x in _initials(links, *arrays[:3])]
    assert_close(actual, _expected(links, *arrays, states, True), TOLERANCE)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("sizes", [(64, 32), (64, 64), (64, 128), (128, 32), (128, 128)], ids=str)
def test_lowers_for_a_gpu(sizes, name):
    function, links = KERNELS[name]
    if name == "hla3" and sizes[0] == 128:
        with pytest.raises(NotImplementedError, match="size 64"):
            function(*_case({"tokens": CHUNK, "key_size": 128}), *[None] * 3)
        return
    for options, keep in (({}, True), ({"decay": None, "segments": False}, False)):
        shapes = {"key_size": sizes[0], "value_size": sizes[1], **options}
        arrays = jax.eval_shape(functools.partial(_case, shapes))
        gpu_checks.lower(functools.partial(function, keep=keep), *arrays, *[None] * len(links))


def test_refuses_what_it_cannot_serve():
    q, k, v, decays = _case({"tokens": CHUNK})
    with pytest.raises(NotImplementedError, match="key size of at least 64"):
        hla2.hla2_forward(q[..., :32], k[..., :32], v, decays, None, None)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        hla2.hla2_forward(*(x.astype(jnp.float32) for x in (q, k, v)), decays, None, None)
