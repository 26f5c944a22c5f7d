"""The mixers with kernels of one token, interpreted on a CPU; and when these kernels are taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmix import ahla, hla2, hla3, linear_attention
from jaxmix.mixers import dispatch
from jaxmix.mixers.dispatch import Operands, choose
from jaxmix.parallel import make_mesh
from jaxmix_kernels.target import Target, using_target
from tests.kernels import gpu_checks, tpu_checks
from tests.tolerances import FORMS, assert_close

MIXERS = {mixer.__name__: mixer for mixer in (linear_attention, hla2, ahla, hla3)}
GPU, TPU = (Target(platform, interpret=True) for platform in ("gpu", "tpu"))
F32 = FORMS[np.dtype(np.float32)]
CASES = {"a decay a head": {}, "no decay, shared states": {"decay_heads": None}}
"""Shared states with a decay have gradients below, and values in `test_decode_kernels`."""


def draw(length, *, batch=2, heads=4, groups=2, decay_heads=4, size=32, dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def tokens(count):
        return np.asarray(rng.normal(size=(batch, length, count, size)) / size**0.5, np.float32).astype(dtype)

    inputs = {"q": tokens(heads), "k": tokens(groups), "v": tokens(groups)}
    if decay_heads is not None:
        inputs["log_decay"] = np.asarray(-(rng.uniform(size=(batch, length, decay_heads)) ** 3), np.float32)
    return inputs


def at(inputs, t):
    return {name: x[:, t : t + 1] for name, x in inputs.items()}


def with_kernels(name, target, **options):
    """The mixer by kernels for `target` where these serve."""

    def function(inputs, state=None, **given):
        with using_target(target):
            return MIXERS[name](**inputs, initial_state=state, implementation="pallas", **options, **given)

    return function


def by_xla(name, **options):
    def function(inputs, state=None, **given):
        return MIXERS[name](**inputs, initial_state=state, implementation="scan", **options, **given)

    return function


def gradient(function, **given):
    def loss(inputs, state):
        out, after = function(inputs, state, **given)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(after))

    return jax.value_and_grad(loss, argnums=(0, 1))


def names_of_kernels(function, *arguments):
    return {name for name in MIXERS if f"{name}_decode" in str(jax.make_jaxpr(function)(*arguments))}


@functools.cache
def prefilled(name, case):
    """Inputs of nine tokens; by the scan output and state after all, and after the first six."""
    inputs = draw(9, **CASES[case])
    return inputs, by_xla(name)(inputs), by_xla(name)({key: x[:, :6] for key, x in inputs.items()})


@functools.cache
def state_after(name, tokens, decay_heads=4):
    return by_xla(name)(draw(tokens, decay_heads=decay_heads))[1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("target", [GPU, TPU], ids=["gpu", "tpu"])
def test_prefill_by_scan_then_decode_by_kernel_equals_one_pass(target, name, case):
    inputs, expected, (out, state) = prefilled(name, case)
    token = jax.jit(with_kernels(name, target))
    assert names_of_kernels(token, at(inputs, 6), state) == {name}
    outs = [out]
    for t in range(6, 9):
        out, state = token(at(inputs, t), state)
        outs.append(out)
    assert_close((np.concatenate(outs, axis=1), state), expected, F32)


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {"normalize": True, "eps": 5.0}) for name in MIXERS), ("hla3", {})],
    ids=[*(f"{name}, normalised" for name in MIXERS), "hla3, plain"],
)
def test_gradients_are_those_of_the_step_by_xla(name, options):
    inputs, before = at(draw(7, decay_heads=2), 6), state_after(name, 6, 2)
    expected = gradient(by_xla(name, **options))(inputs, before)
    assert_close(gradient(with_kernels(name, TPU, **options))(inputs, before), expected, F32)


def test_gradients_of_bfloat16_inputs_and_of_hla2_with_its_options():
    options = {"ridge": 0.3, "masked": False}
    inputs, before = draw(1, dtype=jnp.bfloat16), by_xla("hla2", **options)(draw(5))[1]
    expected = gradient(by_xla("hla2", **options))(inputs, before)
    actual = gradient(with_kernels("hla2", GPU, **options))(inputs, before)
    assert_close(actual, expected, FORMS[np.dtype(jnp.bfloat16)])
    assert jax.tree.map(lambda x: x.dtype, actual) == jax.tree.map(lambda x: x.dtype, expected)


@pytest.mark.parametrize("target", [GPU, TPU], ids=["gpu", "tpu"])
def test_vmap_and_a_scan_over_tokens(target):
    name, inputs = "ahla", draw(4, batch=3)

    def decode_all(inputs):
        def token(state, x):
            out, state = with_kernels(name, target)({key: y[None, None] for key, y in x.items()}, state)
            return state, out[0, 0]

        empty = jax.tree.map(jnp.zeros_like, by_xla(name)({key: x[None, :1] for key, x in inputs.items()})[1])
        state, outs = jax.lax.scan(token, empty, inputs)
        return outs, jax.tree.map(lambda x: x[0], state)

    assert_close(jax.jit(jax.vmap(decode_all))(inputs), by_xla(name)(inputs), F32)


@pytest.mark.parametrize("target", [GPU, TPU], ids=["gpu", "tpu"])
@pytest.mark.parametrize("name", MIXERS)
def test_padding_leaves_the_state_and_gives_zero(name, target):
    inputs, before = draw(1), state_after(name, 5)
    inputs = {key: np.concatenate([np.full_like(x[:1], np.nan), x[1:]]) for key, x in inputs.items()}
    ids = jnp.array([[0], [1]], jnp.int32)
    out, after = with_kernels(name, target)(inputs, before, segment_ids=ids)
    assert not np.any(out[0])
    for x, y in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(x[0], y[0])
    assert_close((out, after), by_xla(name)(inputs, before, segment_ids=ids), F32)


def test_a_stream_that_was_reset_starts_anew():
    inputs, before = draw(1), state_after("hla2", 5)
    out, after = with_kernels("hla2", TPU)(inputs, before.reset(jnp.array([True, False])))
    fresh = with_kernels("hla2", TPU)(inputs)
    assert_close((out[0], after.C[0]), (fresh[0][0], fresh[1].C[0]), 0.0)


def test_shard_map_over_batches():
    mesh = make_mesh(batch=2)
    inputs, before = draw(1), state_after("linear_attention", 5)
    function = with_kernels("linear_attention", TPU)
    split = jax.shard_map(function, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), check_vma=False)
    assert_close(jax.jit(split)(inputs, before), by_xla("linear_attention")(inputs, before), F32)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("name", MIXERS)
def test_decoding_in_place_lowers_for_the_device(name, platform):
    inputs = jax.eval_shape(functools.partial(draw, 1, size=128, dtype=jnp.bfloat16))
    state = jax.eval_shape(by_xla(name), inputs)[1]

    def loop(inputs, state):
        mixer = with_kernels(name, Target(platform))
        out = jnp.zeros(inputs["v"].shape[:2] + inputs["q"].shape[2:], jnp.bfloat16)
        return jax.lax.fori_loop(0, 8, lambda _, carry: mixer(inputs, carry[1]), (out, state))

    {"gpu": gpu_checks, "tpu": tpu_checks}[platform].lower(loop, inputs, state)


def test_when_the_kernels_are_taken(monkeypatch):
    fine = Operands("bfloat16", 1, 64, 128)

    def target(implementation=None, mixer="hla2", sequence_axis=None, **change):
        operands = Operands(**(vars(fine) | change))
        return choose(mixer, implementation, 64, sequence_axis, operands=operands).target

    with pytest.raises(NotImplementedError, match="need a Hopper GPU or a TPU"):
        target("pallas")
    monkeypatch.setattr(dispatch, "current_target", lambda: GPU)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert target("pallas") == target("pallas", dtype="float32") == GPU
    assert target() is target("scan") is target("serial") is None
    for change in ({"key_size": 48}, {"sharing": 9}):
        assert target("pallas", **change) is None, change
    for change, message in (
        ({"mixer": "hla2_printed"}, "no Pallas kernel"),
        ({"mixer": "gated_delta_rule"}, "no Pallas kernel"),
        ({"sequence_axis": "sequence"}, "do not split T"),
        ({"dtype": "float64"}, "not float64"),
        ({"dtype": "mixed"}, "of one dtype"),
        ({"value_size": 256}, "up to 128, not 256"),
        ({"is_checked": True}, "check_vma=False"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            target("pallas", **change)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert target("pallas") == GPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert target("pallas") is None


@pytest.mark.parametrize("implementation", ["scan", "serial"])
def test_other_implementations_never_take_a_kernel(implementation):
    def function(inputs):
        with using_target(TPU):
            return hla3(**inputs, implementation=implementation)

    assert not names_of_kernels(function, draw(1))


def test_sizes_without_a_kernel_take_the_step_by_xla():
    inputs = draw(1, size=48)
    assert not names_of_kernels(with_kernels("ahla", TPU), inputs)
    assert_close(with_kernels("ahla", TPU)(inputs), by_xla("ahla")(inputs), F32)
