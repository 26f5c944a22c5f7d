"""Misuse of sequence_axis, and a training step with tokens and batch split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmix import ahla, hla2, hla3, linear_attention
from jaxmix.parallel import make_mesh
from tests.tolerances import FORMS, assert_close

MIXERS = [linear_attention, hla2, ahla, hla3]
EVERY_MIXER = pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.__name__)


@EVERY_MIXER
def test_an_axis_that_is_not_mapped_is_refused(mixer):
    q = jnp.ones((1, 4, 1, 2))
    with pytest.raises(ValueError, match=r"(?s)sequence_axis.*tokens"):
        mixer(q, q, q, sequence_axis="tokens")


@EVERY_MIXER
def test_an_axis_that_is_not_a_name_is_refused(mixer):
    q = jnp.ones((1, 4, 1, 2))
    with pytest.raises(ValueError, match=r"(?s)sequence_axis.*3"):
        mixer(q, q, q, sequence_axis=3)


@EVERY_MIXER
def test_one_token_per_device(mixer):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 8, 2, 3)), jnp.float32) for _ in range(3))
    split = P(None, "sequence")

    @jax.jit
    @jax.shard_map(mesh=make_mesh(sequence=8), in_specs=(split,) * 3, out_specs=(split, P()))
    def run(q, k, v):
        return mixer(q, k, v, sequence_axis="sequence")

    assert_close(run(q, k, v), mixer(q, k, v, implementation="serial"), FORMS[np.dtype(np.float32)])


def test_a_training_step_with_split_tokens_equals_one_on_a_single_device():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 64, 2, 4)), jnp.float32)
    weights = {name: jnp.asarray(rng.normal(size=(4, 4)) / 2, jnp.float32) for name in "qkv"}
    segment_ids = jnp.asarray(np.repeat([[1, 2], [1, 1], [3, 0], [0, 4]], 32, axis=1), jnp.int32)

    def loss(weights, x, segment_ids, **options):
        q, k, v = (jnp.einsum("bthd,de->bthe", x, weights[name]) for name in "qkv")
        out, _ = hla2(q, k, v, -jnp.ones(2), segment_ids=segment_ids, chunk_size=16, **options)
        return jnp.sum(jnp.tanh(out) ** 2)

    split = P("data", "sequence")

    @functools.partial(jax.shard_map, mesh=make_mesh(data=2, sequence=4), in_specs=(P(), split, split), out_specs=P())
    def split_loss(weights, x, segment_ids):
        return jax.lax.psum(loss(weights, x, segment_ids, sequence_axis="sequence"), ("data", "sequence"))

    expected = jax.jit(jax.value_and_grad(loss))(weights, x, segment_ids)
    assert_close(
        jax.jit(jax.value_and_grad(split_loss))(weights, x, segment_ids), expected, FORMS[np.dtype(np.float32)]
    )
