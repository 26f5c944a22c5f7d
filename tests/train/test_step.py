import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxmix.train.step import batch_loss, init_state, make_eval_step, make_train_step, split_model
from tests.evaluation.stub_model import CountingModel, log2_probability

BATCH = {
    "tokens": np.array([[1, 2, 3, 0], [4, 4, 0, 0]], np.int32),
    "labels": np.array([[2, 0, 5, 0], [4, 0, 0, 0]], np.int32),
    "segment_ids": np.array([[1, 1, 2, 2], [1, 1, 0, 0]], np.int32),
    "positions": np.array([[0, 1, 0, 1], [0, 1, 0, 0]], np.int32),
    "weights": np.array([[1, 0, 1, 0], [1, 0, 0, 0]], np.float32),
}


def test_the_loss_is_that_of_the_labels_that_count():
    model = CountingModel(6)
    nats, labels = batch_loss(model, BATCH)
    expected = [log2_probability(model, *pair) for pair in (([1], 2), ([3], 5), ([4], 4))]
    assert float(nats) == pytest.approx(-sum(expected) * np.log(2), rel=1e-5)
    assert float(labels) == 3


def test_an_update_follows_the_gradient_of_the_mean_loss():
    structure, params = split_model(CountingModel(6))
    optimizer = optax.sgd(0.5)
    before = jax.tree.map(np.asarray, params)
    gradient = jax.grad(lambda p: batch_loss(nnx.merge(structure, p), BATCH)[0] / 3)(params)
    state, metrics = make_train_step(structure, optimizer)(init_state(params, optimizer), BATCH)
    for after, start, slope in zip(*map(jax.tree.leaves, (state.params, before, gradient)), strict=True):
        np.testing.assert_allclose(after, start - 0.5 * np.asarray(slope), rtol=1e-5)
    assert int(state.step) == 1
    assert float(metrics["labels"]) == 3
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)


def test_evaluation_gives_sums():
    structure, params = split_model(CountingModel(6))
    nats, labels = make_eval_step(structure)(params, BATCH)
    assert float(nats) == pytest.approx(float(batch_loss(CountingModel(6), BATCH)[0]), rel=1e-6)
    assert float(labels) == 3


def test_a_model_with_other_variables_is_refused():
    model = CountingModel(6)
    model.statistics = nnx.BatchStat(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"no variables but nnx.Param, got also .*statistics"):
        split_model(model)
