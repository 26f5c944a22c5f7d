"""Options of layers: what they do, which are refused, and their plain form."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmix.nn import (
    HLA,
    MIXER_CONFIGS,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    HLAConfig,
    InterdomainAttentionConfig,
    LinearAttention,
    LinearAttentionConfig,
    Mamba2Config,
    NAtSLConfig,
    S4DConfig,
    SoftmaxAttention,
    SoftmaxAttentionConfig,
    mixer_from_dict,
)
from tests.nn.layers import LAYERS
from tests.tolerances import FORMS, assert_close

WIDTH = 16
F32 = FORMS[np.dtype(np.float32)]
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, WIDTH)), jnp.float32)


def outputs(layer, **arguments):
    return nnx.jit(lambda layer: layer(X, **arguments)[0])(layer)


@pytest.mark.parametrize("name", LAYERS)
def test_a_config_comes_back_from_json(name):
    config = LAYERS[name]
    assert mixer_from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_registry_knows_every_config_by_its_name():
    assert {name: config.name for name, config in MIXER_CONFIGS.items()} == {name: name for name in MIXER_CONFIGS}
    assert set(MIXER_CONFIGS.values()) == {
        DeltaNetConfig,
        GatedDeltaNetConfig,
        HLAConfig,
        InterdomainAttentionConfig,
        LinearAttentionConfig,
        Mamba2Config,
        NAtSLConfig,
        S4DConfig,
        SoftmaxAttentionConfig,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"heads": 2},
            r"mixer: expected one of delta_net, .*, hla, .*, softmax_attention, got None",
        ),
        ({"mixer": "lstm"}, r"mixer: expected one of .*, got 'lstm'"),
        ({"mixer": "hla"}, r"HLAConfig fields: expected also heads"),
        ({"mixer": "hla", "heads": 2, "head": 3}, r"HLAConfig fields: expected only .*, got also head$"),
        ({"mixer": "softmax_attention", "heads": 2, "decay": None}, r"SoftmaxAttentionConfig fields: .*also decay"),
        ("hla", r"mixer: expected a dict, got str"),
    ],
)
def test_a_wrong_dict_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        mixer_from_dict(fields)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, r"heads: expected an int of at least 1, got 0"),
        ({"heads": True}, r"heads: expected an int of at least 1, got True"),
        ({"heads": 4, "kv_heads": 3}, r"kv_heads: expected a divisor of heads=4, got 3"),
        ({"heads": 4, "key_size": 2.0}, r"key_size: expected an int"),
        ({"heads": 4, "qk_norm": "l1"}, r"qk_norm: expected one of None, 'l2', 'rms', got 'l1'"),
        ({"heads": 4, "scale": 0}, r"scale: expected a positive number, got 0"),
        ({"heads": 4, "rope": 1}, r"rope: expected True or False, got 1"),
        ({"heads": 4, "rope_base": -1.0}, r"rope_base: expected a positive number"),
        ({"heads": 4, "conv_width": 1}, r"conv_width: expected 0 for no convolution, or at least 2, got 1"),
        ({"heads": 4, "norm_eps": float("nan")}, r"norm_eps: expected a positive number, got nan"),
        ({"heads": 4, "implementation": "triton"}, r"implementation: expected one of None, 'serial', 'scan', 'pallas'"),
        ({"heads": 4, "decay": "token"}, r"decay: expected one of None, 'head', 'data', got 'token'"),
        ({"heads": 4, "time_scales": (8.0,)}, r"time_scales: expected two numbers"),
        ({"heads": 4, "time_scales": (8.0, 4.0)}, r"time_scales: expected the shortest first, got \(8\.0, 4\.0\)"),
        ({"heads": 4, "eps": 0.0}, r"eps: expected a positive number, got 0\.0"),
        ({"heads": 4, "chunk_size": 0}, r"chunk_size: expected an int of at least 1, got 0"),
        ({"heads": 4, "order": 4}, r"order: expected one of 2, 'asymmetric', 3, got 4"),
        ({"heads": 4, "ridge": -1.0}, r"ridge: expected a number of at least 0, got -1\.0"),
        ({"heads": 4, "order": 3, "ridge": 1.0}, r"ridge: expected 0 unless order=2, got 1\.0 with order=3"),
        ({"heads": 4, "order": "asymmetric", "masked": False}, r"masked: expected True unless order=2"),
        ({"heads": 4, "order": 2, "mask": "printed"}, r"mask: expected 'exact' unless order=3"),
        ({"heads": 4, "masked": False, "decay_form": "printed"}, r"decay_form: expected 'masked' with masked=False"),
        ({"heads": 4, "order": 3, "mask": "printed"}, r"mask: expected 'exact' with a decay, or decay=None"),
    ],
)
def test_a_wrong_option_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HLAConfig(**options)
    with pytest.raises(ValueError, match=message):
        HLA(WIDTH, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("layer_class", "d_model", "options", "message"),
    [
        (HLA, 16, {"heads": 3}, r"heads: expected a divisor of d_model=16, or key_size and value_size given, got 3"),
        (
            SoftmaxAttention,
            12,
            {"heads": 4},
            r"key_size: expected an even number, since rope=True rotates pairs, got 3",
        ),
        (SoftmaxAttention, 16, {"heads": 4, "capacity": 0}, r"capacity: expected an int of at least 1, got 0"),
        (HLA, 0, {"heads": 4}, r"d_model: expected an int of at least 1, got 0"),
        (
            HLA,
            16,
            {"config": LinearAttentionConfig(heads=4)},
            r"config: expected a HLAConfig, got LinearAttentionConfig",
        ),
        (
            HLA,
            16,
            {"config": HLAConfig(heads=4), "order": 3},
            r"options: expected either a config or its fields, got both",
        ),
        (HLA, 16, {"heads": 4, "hedas": 4}, r"HLAConfig fields: expected only .*, got also hedas"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(layer_class, d_model, options, message):
    with pytest.raises(ValueError, match=message):
        layer_class(d_model, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[..., :-1]}, r"x: expected shape \[B, T, d\] = \[\*, \*, 16\], got shape \[2, 5, 15\]"),
        ({"x": X[0]}, r"x: expected shape \[B, T, d\]"),
        ({"x": X.astype(jnp.int32)}, r"x: expected dtype"),
        ({"segment_ids": jnp.ones((2, 4), jnp.int32)}, r"segment_ids: expected shape \[B, T\] = \[2, 5\]"),
        ({"positions": jnp.ones((2, 5))}, r"positions: expected dtype int32, got dtype float32"),
        ({"x": jnp.tile(X, (1, 4, 1))}, r"x: expected at most capacity=8 tokens in a call .*, got 20"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    layer = SoftmaxAttention(WIDTH, heads=2, capacity=8, rngs=nnx.Rngs(0))
    arguments = {"x": X} | change
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: layer(**arguments))


def test_the_state_of_another_layer_is_refused():
    layer = HLA(WIDTH, heads=2, rngs=nnx.Rngs(0))
    good = layer.init_state(2)
    for state, message in [
        (HLA(WIDTH, heads=2, order=3, rngs=nnx.Rngs(0)).init_state(2), r"state: expected the structure"),
        (HLA(WIDTH, heads=4, rngs=nnx.Rngs(0)).init_state(2), r"state\.mixer\.S: expected float32 \[2, 2, 8, 8\]"),
        (layer.init_state(3), r"state\.mixer\.S: .*got float32 \[3, 2, 8, 8\]"),
        (dataclasses.replace(good, position=jnp.zeros(2)), r"state\.position: expected int32 \[2\], got float32 \[2\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda state=state: layer(X, state=state))


@pytest.mark.parametrize(("layer_class", "options"), [(LinearAttention, {"decay": None}), (SoftmaxAttention, {})])
def test_shared_key_heads_are_repeated_ones(layer_class, options):
    few = layer_class(WIDTH, heads=4, kv_heads=2, conv_width=2, **options, rngs=nnx.Rngs(0))
    many = layer_class(WIDTH, heads=4, conv_width=2, **options, rngs=nnx.Rngs(0))

    def repeat(kernel):
        return jnp.repeat(kernel.reshape(-1, 2, 4), 2, axis=1).reshape(-1, 16)

    values = dict(nnx.to_flat_state(nnx.state(few)))
    for name, parameter in nnx.to_flat_state(nnx.state(many)):
        shared = name[0] in ("key", "value") or name[:2] in (("convolutions", 1), ("convolutions", 2))
        parameter[...] = repeat(values[name][...]) if shared else values[name][...]
    assert_close(outputs(many), outputs(few), F32)


def test_rotated_layers_see_only_differences_of_positions_and_count_on():
    layer = SoftmaxAttention(WIDTH, heads=2, capacity=8, rngs=nnx.Rngs(0), init_std=0.5)
    positions = jnp.tile(jnp.arange(5, dtype=jnp.int32), (2, 1))
    expected = outputs(layer)
    assert_close(outputs(layer, positions=positions), expected, F32)
    assert_close(outputs(layer, positions=positions + 7), expected, F32)
    assert np.max(np.abs(outputs(layer, positions=3 * positions) - expected)) > 1e-3
    run = jax.jit(lambda **arguments: layer(X, **arguments)[1].position)
    assert run(positions=positions + 7).tolist() == [12, 12]
    ids = jnp.array([[1, 1, 0, 2, 0], [0, 0, 0, 0, 0]], jnp.int32)
    state = dataclasses.replace(layer.init_state(2), position=jnp.array([3, 4], jnp.int32))
    assert run(segment_ids=ids, state=state).tolist() == [1, 4]


BASE = {"heads": 2, "output_norm": False}


@functools.cache
def plain_layer():
    layer = HLA(WIDTH, **BASE, rngs=nnx.Rngs(0), init_std=0.5)
    return layer, outputs(layer)


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": None},
        {"scale": 2.0},
        {"rope": True},
        {"conv_width": 0},
        {"output_norm": True},
        {"gate": False},
        {"decay": None},
        {"time_scales": (1.0, 2.0)},
        {"normalize": True},
        {"order": "asymmetric"},
        {"order": 3},
        {"ridge": 1.0},
        {"masked": False},
        {"decay_form": "printed"},
        {"decay": None, "order": 3, "mask": "printed"},
    ],
    ids=str,
)
def test_every_option_of_hla_does_something(options):
    plain, expected = plain_layer()
    other = HLA(WIDTH, **BASE | options, rngs=nnx.Rngs(0), init_std=0.5)
    # What both have is set to the same values, so that only the option differs.
    values = dict(nnx.to_flat_state(nnx.state(plain)))
    for path, parameter in nnx.to_flat_state(nnx.state(other)):
        if path in values and "decay" not in path:
            parameter[...] = values[path][...]
    y = outputs(other)
    assert np.all(np.isfinite(y))
    assert np.max(np.abs(y - expected)) > 1e-3 * np.max(np.abs(expected))


def test_layers_whose_state_keeps_tokens_say_so():
    assert {name for name, config in MIXER_CONFIGS.items() if config.has_cache} == {"natsl", "softmax_attention"}
