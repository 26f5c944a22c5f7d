"""The fused forward kernels of HLA2, AHLA and HLA3 for a TPU against chains of the primitive."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix_kernels import tpu_tiles
from jaxmix_kernels.ahla.tpu import ahla_forward
from jaxmix_kernels.decays import CHUNK
from jaxmix_kernels.hla2.tpu import hla2_forward
from jaxmix_kernels.hla3.tpu import hla3_forward
from tests.kernels import reference, tpu_checks
from tests.tolerances import FORMS, assert_close


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch):
    """Several grid steps for few tokens, so that they are interpreted fast."""
    monkeypatch.setattr(tpu_tiles, "TILES_PER_STEP", 2)


def _attend(*args):
    """Output, kept in float32 at least, and final state."""
    a, b, c, decays, initial = args
    result = reference.decayed_attention(a, b, c.astype(jnp.promote_types(c.dtype, jnp.float32)), decays, initial)
    return result.out, result.final


def hla2_chain(q, k, v, decays, squared, initial_s, initial_f):
    kt, s = _attend(q, k, k, decays, initial_s)
    out, f = _attend(q, kt, v, squared, initial_f)
    return out.astype(v.dtype), s, f


def ahla_chain(q, k, v, decays, initial_p, initial_e):
    vt, p = _attend(q, k, v, decays, initial_p)
    out, e = _attend(q, k, vt, decays, initial_e)
    return out.astype(v.dtype), p, e


def hla3_chain(q, k, v, decays, cubed, initial_s, initial_p, initial_f):
    kt, s = _attend(q, k, k, decays, initial_s)
    vt, p = _attend(q, k, v, decays, initial_p)
    out, f = _attend(q, kt, vt, cubed, initial_f)
    return out.astype(v.dtype), s, p, f


KERNELS = {
    "hla2": (hla2_forward, hla2_chain, 2, ("DD", "DE")),
    "ahla": (ahla_forward, ahla_chain, None, ("DE", "DE")),
    "hla3": (hla3_forward, hla3_chain, 3, ("DD", "DE", "DE")),
}

CASES = {
    "mixed decays and segments": {"tokens": 2 * CHUNK, "heads": 2},
    "keys, values, decays and states shared, bfloat16": {
        "tokens": 2 * CHUNK,
        "b_heads": 4,
        "c_heads": 2,
        "decay_heads": 2,
        "state_heads": 1,
        "dtype": jnp.bfloat16,
    },
    "no decay, nothing seen before": {"tokens": 2 * CHUNK, "decay": None, "segments": False, "state_heads": None},
    "padded to two grid steps": {"tokens": 5 * CHUNK, "heads": 2, "batch": 1, "value_size": 32, "decay": "weak"},
}


def _power(decays, power):
    scaled = {name: power * getattr(decays, name) for name in ("high", "low", "steps")}
    raised = {name: getattr(decays, name) ** power for name in ("enter", "leave", "kept")}
    return type(decays)(run=decays.run, **scaled, **raised)


def _arguments(name, **case):
    power, sizes = KERNELS[name][2:]
    q, k, v, decays, initial, _ = reference.random_case(**case)
    arguments = [q, k, v, decays]
    if power is not None:
        arguments.append(None if decays is None else _power(decays, power))
    if case.get("state_heads", 1) is None:
        return *arguments, *(None for _ in sizes)
    square = initial[..., : initial.shape[2]] if initial.shape[2] <= initial.shape[3] else initial @ initial.mT
    return *arguments, *({"DD": square, "DE": initial}[size] for size in sizes)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_chain(name, case):
    kernel, chain = KERNELS[name][:2]
    arguments = _arguments(name, **CASES[case])
    actual = jax.jit(functools.partial(kernel, interpret=True))(*arguments)
    assert actual[0].dtype == arguments[2].dtype
    assert_close(actual, jax.jit(chain)(*arguments), FORMS[np.dtype(arguments[2].dtype)])


@pytest.mark.parametrize("name", KERNELS)
def test_no_race_and_no_read_of_what_was_never_written(name):
    kernel, chain = KERNELS[name][:2]
    arguments = _arguments(name, batch=1, heads=2, b_heads=1, tokens=5 * CHUNK, key_size=32, value_size=32)
    with tpu_checks.races_forbidden() as interpret:
        actual = kernel(*arguments, interpret=interpret)
    assert_close(actual, jax.jit(chain)(*arguments), FORMS[np.dtype(np.float32)])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", KERNELS)
def test_lowers_for_a_tpu(name, dtype):
    for key_size, value_size in ((32, 32), (64, 64), (128, 128), (128, 32), (32, 64)):
        for case in ("keys, values, decays and states shared, bfloat16", "no decay, nothing seen before"):
            sizes = {"dtype": dtype, "key_size": key_size, "value_size": value_size}
            arguments = jax.eval_shape(functools.partial(_arguments, name, **{**CASES[case], **sizes}))
            tpu_checks.lower(KERNELS[name][0], *arguments)


def test_refuses_what_it_cannot_serve():
    q = jax.ShapeDtypeStruct((1, CHUNK, 2, 48), jnp.float32)
    with pytest.raises(NotImplementedError, match="hla2: the TPU kernel takes head sizes"):
        jax.eval_shape(lambda q: hla2_forward(q, q, q, None, None, None, None), q)
