"""DeltaNet, Gated DeltaNet and Mamba-2: options, initial values and gates."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmix import ssd
from jaxmix.nn import DeltaNet, DeltaNetConfig, GatedDeltaNet, GatedDeltaNetConfig, Mamba2, Mamba2Config, StepSize
from jaxmix.nn.parameters import parameter_label

WIDTH = 16
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7, WIDTH)), jnp.float32)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (DeltaNetConfig, {"kv_heads": 2}, r"kv_heads: expected None .*, got 2"),
        (GatedDeltaNetConfig, {"key_heads": 3}, "key_heads: expected a divisor of heads=4, got 3"),
        (GatedDeltaNetConfig, {"key_heads": 0}, "key_heads: expected an int of at least 1, got 0"),
        (DeltaNetConfig, {"negative_eigenvalues": 1}, "negative_eigenvalues: expected True or False, got 1"),
        (DeltaNetConfig, {"chunk_size": 0}, "chunk_size: expected an int of at least 1, got 0"),
        (Mamba2Config, {"scale": 2.0}, "scale: expected None, .* got 2.0"),
        (Mamba2Config, {"gate_activation": "tanh"}, "gate_activation: expected one of 'silu', 'sigmoid', got 'tanh'"),
        (DeltaNetConfig, {"rope_fraction": 1.5}, "rope_fraction: expected at most 1, got 1.5"),
    ],
)
def test_options_that_are_wrong(config, options, message):
    with pytest.raises(ValueError, match=message):
        config(heads=4, **options)


def test_sizes_that_do_not_fit_the_model():
    with pytest.raises(ValueError, match=r"heads: expected a divisor of 2 d_model=32"):
        Mamba2(WIDTH, heads=5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"rope_fraction: expected a share of key_size=4 .*, got 0.3"):
        DeltaNet(WIDTH, heads=4, rope=True, rope_fraction=0.3, rngs=nnx.Rngs(0))


def test_step_sizes_and_rates_start_in_their_ranges():
    for rates in ((0.0, 16.0), (1.0, 16.0)):
        gate = StepSize(WIDTH, 512, rates, rngs=nnx.Rngs(0), init_std=1e-9)
        steps = np.asarray(gate(X))[0, 0]
        assert np.all((steps > 0.999e-3) & (steps < 1.001e-1))
        assert np.quantile(steps, [0.1, 0.9]) == pytest.approx([10**-2.8, 10**-1.2], rel=0.2)
        assert np.all((gate.rates() >= rates[0]) & (gate.rates() <= rates[1]))
        assert np.mean(gate.rates()) == pytest.approx(sum(rates) / 2, rel=0.1)


@pytest.mark.parametrize("layer_class", [DeltaNet, GatedDeltaNet, Mamba2])
def test_gates_are_float32_whatever_the_parameters_are(layer_class):
    layer = layer_class(WIDTH, heads=4, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    dtypes = {path: leaf.dtype for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    gates = {path: dtype for path, dtype in dtypes.items() if path[0] in ("beta", "decay", "direct")}
    assert gates
    assert set(gates.values()) == {jnp.dtype(jnp.float32)}
    assert {dtype for path, dtype in dtypes.items() if path not in gates} == {jnp.dtype(jnp.bfloat16)}


def test_parameters_of_the_gates_have_no_weight_decay():
    layer = GatedDeltaNet(WIDTH, heads=4, rngs=nnx.Rngs(0))
    labels = {
        ".".join(map(str, path)): parameter_label(path) for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    vectors = {name for name, label in labels.items() if label == "vector"}
    assert {"decay.A_log", "decay.dt_bias", "out_norm.scale"} <= vectors
    assert labels["query.kernel"] == labels["beta.kernel"] == "matrix"


def test_negative_eigenvalues_double_the_write_strength():
    plain, doubled = (DeltaNet(WIDTH, heads=4, negative_eigenvalues=on, rngs=nnx.Rngs(0)) for on in (False, True))
    assert np.allclose(doubled.strengths(X), 2 * plain.strengths(X))
    assert np.all(plain.strengths(X) < 1)


def test_mamba2_norms_after_the_gate_and_for_each_group():
    layer = Mamba2(WIDTH, heads=4, key_heads=2, key_size=8, rngs=nnx.Rngs(0), init_std=0.3)
    layer.out_norm[...] = jnp.linspace(0.5, 2.0, 32)
    streams, _ = layer.project(X, None, layer.init_state(2).convolutions, jnp.zeros((2, 7), jnp.int32))
    C, B, u = streams
    y = ssd(u, layer.decay(X), -layer.decay.rates(), B, C, layer.direct[...])[0].reshape(2, 7, 2, 16)
    y = y * jax.nn.silu(layer.gate(X)).reshape(y.shape)
    y = y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + layer.config.norm_eps)
    expected = layer.out(y.reshape(2, 7, 32) * layer.out_norm[...])
    assert np.allclose(layer(X)[0], expected, rtol=1e-4, atol=1e-5)


def test_the_gates_of_a_layer_are_named_in_its_parameters():
    layer = GatedDeltaNet(WIDTH, heads=4, key_heads=2, rngs=nnx.Rngs(0))
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    kinds = {re.sub(r"\d", "#", name) for name in names}
    assert kinds == {
        *(f"{name}.kernel" for name in ("query", "key", "value", "gate", "out", "beta", "decay.projection")),
        "convolutions.#.kernel",
        "decay.A_log",
        "decay.dt_bias",
        "out_norm.scale",
    }
