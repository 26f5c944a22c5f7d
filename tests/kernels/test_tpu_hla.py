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
from jaxmix_kernels.links import AHLA, HLA2, HLA3
from tests.kernels import reference, tpu_checks
from tests.tolerances import FORMS, assert_close


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch):
    """Several grid steps for few tokens, so that they are interpreted fast."""
    monkeypatch.setattr(tpu_tiles, "TILES_PER_STEP", {"bfloat16": 2, "float32": 2})


KERNELS = {"hla2": (hla2_forward, HLA2), "ahla": (ahla_forward, AHLA), "hla3": (hla3_forward, HLA3)}


@functools.partial(jax.jit, static_argnums=0)
def _chain(links, q, k, v, decays, *others):
    """Link after link without rounding in between: what the kernel of the chain gives when it keeps all."""
    by_power = {1: decays}
    if links[-1].power > 1:
        by_power[links[-1].power], *others = others
    known, finals, states = {"k": k, "v": v}, [], []
    for link, initial in zip(links, others, strict=True):
        values = known[link.values].astype(jnp.float32)
        result = reference.decayed_attention(q, known[link.keys], values, by_power[link.power], initial, states=True)
        known[link.result] = result.out
        finals.append(result.final)
        states.append(result.states[:, :, ::2].astype(v.dtype))
    results = [known[link.result].astype(v.dtype) for link in links]
    return results[-1], *finals, *states, *results[:-1]


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
    links = KERNELS[name][1]
    q, k, v, decays, initial, _ = reference.random_case(**case)
    arguments = [q, k, v, decays]
    if links[-1].power > 1:
        arguments.append(None if decays is None else _power(decays, links[-1].power))
    if case.get("state_heads", 1) is None:
        return *arguments, *(None for _ in links)
    square = initial[..., : initial.shape[2]] if initial.shape[2] <= initial.shape[3] else initial @ initial.mT
    return *arguments, *(square if link.values == "k" else initial for link in links)


def _assert_all(name, actual, arguments):
    """The states of padding behind the last tile are nothing that counts."""
    links, tiles = KERNELS[name][1], -(-arguments[0].shape[1] // tpu_tiles.TILE)
    actual = [x[:, :, :tiles] if x.ndim == 5 else x for x in actual]
    assert_close(actual, list(_chain(links, *arguments)), FORMS[np.dtype(arguments[2].dtype)])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_chain_with_what_gradients_need(name, case):
    arguments = _arguments(name, **CASES[case])
    actual = jax.jit(functools.partial(KERNELS[name][0], keep=True, interpret=True))(*arguments)
    assert actual[0].dtype == arguments[2].dtype
    _assert_all(name, actual, arguments)


@pytest.mark.parametrize("name", KERNELS)
def test_no_race_and_no_read_of_what_was_never_written(name):
    arguments = _arguments(name, batch=1, heads=2, b_heads=1, tokens=5 * CHUNK, key_size=32, value_size=32)
    with tpu_checks.races_forbidden() as interpret:
        actual = KERNELS[name][0](*arguments, keep=True, interpret=interpret)
    _assert_all(name, actual, arguments)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", KERNELS)
def test_lowers_for_a_tpu(name, dtype):
    for key_size, value_size in ((32, 32), (64, 64), (128, 128), (128, 32), (32, 64)):
        for case in ("keys, values, decays and states shared, bfloat16", "no decay, nothing seen before"):
            sizes = {"dtype": dtype, "key_size": key_size, "value_size": value_size}
            arguments = jax.eval_shape(functools.partial(_arguments, name, **{**CASES[case], **sizes}))
            for keep in (False, True):
                tpu_checks.lower(functools.partial(KERNELS[name][0], keep=keep), *arguments)


def test_refuses_what_it_cannot_serve():
    q = jax.ShapeDtypeStruct((1, CHUNK, 2, 48), jnp.float32)
    with pytest.raises(NotImplementedError, match="hla2: the TPU kernel takes head sizes"):
        jax.eval_shape(lambda q: hla2_forward(q, q, q, None, None, None, None), q)
