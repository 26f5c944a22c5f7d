"""Layers go through Flax's own machinery."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxmix.nn import HLA, SoftmaxAttention
from tests.tolerances import FORMS, assert_close, assert_same_bits

WIDTH = 16
F32 = FORMS[np.dtype(np.float32)]
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, WIDTH)), jnp.float32)

both_kinds = pytest.mark.parametrize(
    ("layer_class", "options"),
    [(HLA, {"heads": 2}), (SoftmaxAttention, {"heads": 2, "capacity": 8})],
    ids=["hla", "softmax"],
)


@both_kinds
@pytest.mark.parametrize("graph", [True, False], ids=["graph mode", "tree mode"])
def test_split_and_merge(layer_class, options, graph):
    layer = layer_class(WIDTH, **options, rngs=nnx.Rngs(0))
    definition, state = nnx.split(layer, graph=graph)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(layer, nnx.Param))
    again = nnx.merge(definition, state)
    run = nnx.jit(lambda layer: layer(X)[0], graph=graph)
    assert_same_bits(run(again), run(layer))


@both_kinds
def test_a_call_changes_nothing_in_the_module(layer_class, options):
    layer = layer_class(WIDTH, **options, rngs=nnx.Rngs(0))
    before = jax.device_get(nnx.to_pure_dict(nnx.state(layer)))
    definition = nnx.graphdef(layer)
    nnx.jit(lambda layer: layer(X))(layer)
    assert_same_bits(jax.device_get(nnx.to_pure_dict(nnx.state(layer))), before)
    assert nnx.graphdef(layer) == definition


@both_kinds
def test_lax_scan_over_stacked_layers_equals_a_loop(layer_class, options):
    layers = [layer_class(WIDTH, **options, rngs=nnx.Rngs(seed)) for seed in range(3)]
    definition = nnx.graphdef(layers[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(nnx.state(layer) for layer in layers))

    @jax.jit
    def scan(x):
        return jax.lax.scan(lambda x, state: (x + nnx.merge(definition, state)(x)[0], None), x, stacked)[0]

    @jax.jit
    def loop(x):
        for layer in layers:
            x = x + layer(x)[0]
        return x

    assert_close(scan(X), loop(X), F32)


@both_kinds
def test_a_layer_is_a_linen_module_through_the_bridge(layer_class, options):
    layer = layer_class(WIDTH, **options, rngs=nnx.Rngs(0))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return nnx.bridge.to_linen(layer_class, WIDTH, **options, name="mixer")(x)[0]

    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), X)
    own = nnx.to_pure_dict(nnx.state(layer))
    boxed = jax.tree.leaves(variables["params"]["mixer"])
    assert [x.shape for x in boxed] == [x.shape for x in jax.tree.leaves(own)]
    values = jax.tree.unflatten(jax.tree.structure(variables["params"]["mixer"]), jax.tree.leaves(own))
    out = jax.jit(model.apply)({"params": {"mixer": values}}, X)
    assert_close(out, nnx.jit(lambda layer: layer(X)[0])(layer), F32)
