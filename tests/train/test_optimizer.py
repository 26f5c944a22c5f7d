import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxmix.models import Decoder, DecoderConfig
from jaxmix.nn import HLAConfig, InterdomainAttentionConfig, SoftmaxAttentionConfig
from jaxmix.train.config import OptimizerConfig
from jaxmix.train.optimizer import learning_rate, make_optimizer, parameter_labels
from jaxmix.train.step import split_model


def _params():
    layers = (
        HLAConfig(heads=2, decay="data", qk_norm="rms"),
        HLAConfig(heads=2),
        SoftmaxAttentionConfig(heads=2),
        InterdomainAttentionConfig(heads=2, modes=4),
    )
    config = DecoderConfig(vocab_size=16, d_model=8, layers=layers, hidden=8)
    return split_model(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[1]


def _paths(label):
    labels = jax.tree_util.tree_leaves_with_path(parameter_labels(_params()))
    return {tuple(str(part.key) for part in path) for path, found in labels if found == label}


def test_the_state_space_group_is_poles_steps_mixing_and_input_norms():
    names = {path[path.index("ssm") + 1] for path in _paths("ssm")}
    assert names == {"log_real", "imaginary", "log_step", "mixing", "scales", "biases"}


@pytest.mark.parametrize(("peak", "rate"), [(3e-3, 1e-3), (5e-4, 5e-4)])
def test_the_state_space_group_has_a_capped_rate_and_no_weight_decay(peak, rate):
    params = {"ssm": {"mixing": jnp.ones(3)}, "head": {"kernel": jnp.ones(3)}}
    config = OptimizerConfig(learning_rate=peak, warmup_steps=0, weight_decay=0.5, clip_norm=100.0)
    optimizer = make_optimizer(config, 10)
    gradient = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    np.testing.assert_allclose(updates["ssm"]["mixing"], -rate, rtol=1e-5)
    np.testing.assert_allclose(updates["head"]["kernel"], -1.5 * peak, rtol=1e-5)


def test_weight_decay_is_on_matrices_and_not_on_norms_biases_and_gates():
    decayed, spared = _paths("matrix"), _paths("vector")
    assert {path[-1] for path in decayed} == {"kernel", "embedding"}
    assert {path[-1] for path in spared} == {"scale", "log_rate", "bias", "kernel"}
    assert all("decay" in path for path in spared if path[-1] == "kernel")
    assert not any("decay" in path for path in decayed)
    assert sum("gate" in path for path in decayed) >= 2  # the projections of SwiGLU and of the output gate are matrices


def test_only_decayed_parameters_shrink_without_a_gradient():
    params = {"layer": {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2)}, "decay": {"kernel": jnp.ones(2)}}
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, warmup_steps=0, weight_decay=0.5), 10)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(updates["layer"]["kernel"], -0.05)
    np.testing.assert_array_equal(updates["layer"]["scale"], 0.0)
    np.testing.assert_array_equal(updates["decay"]["kernel"], 0.0)


def test_the_rate_warms_up_and_follows_a_cosine_to_its_end():
    rate = learning_rate(OptimizerConfig(learning_rate=1.0, warmup_steps=10, final_fraction=0.1), 110)
    assert [float(rate(step)) for step in (0, 5, 10)] == pytest.approx([0.0, 0.5, 1.0])
    assert float(rate(60)) == pytest.approx(0.55)
    assert float(rate(110)) == pytest.approx(0.1)
    assert all(rate(step + 1) < rate(step) for step in range(10, 110, 10))


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match="warmup_steps: expected fewer than steps=10, got 10"):
        make_optimizer(OptimizerConfig(warmup_steps=10), 10)


def test_large_gradients_are_scaled_to_the_clipping_norm():
    params = {"kernel": jnp.zeros(4)}
    config = OptimizerConfig(clip_norm=1.0, warmup_steps=0, eps=1.0, beta1=0.0, beta2=0.0)
    optimizer = make_optimizer(config, 10)

    def update(gradient):
        updates, _ = optimizer.update({"kernel": gradient}, optimizer.init(params), params)
        return updates["kernel"]

    direction = jnp.array([3.0, 0.0, 4.0, 0.0]) / 5
    np.testing.assert_allclose(update(100.0 * direction), update(direction), rtol=1e-6)
    assert float(optax.tree.norm(update(0.5 * direction))) < float(optax.tree.norm(update(direction)))
