"""NaN in one document and the kernels of another: a border lets nothing through from chunk to chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import hla2, linear_attention
from jaxmix_kernels.target import Target
from tests.kernels.targets import OneDevice
from tests.kernels.test_fused_chains import BF16, draw, mix

TOKENS, BORDER = 384, 128
"""The border is one of tiles of two chunks as well, which is what a TPU kernel works on at a time."""
TARGETS = {"gpu": OneDevice("gpu", interpret=True), "tpu": Target("tpu", interpret=True)}
MIXERS = {"linear_attention": linear_attention, "hla2": hla2}
BROKEN = {"the first": (slice(3, 60), slice(BORDER, None)), "the last": (slice(300, 380), slice(None, BORDER))}
"""Tokens that are broken, and those of the other document."""


@pytest.mark.parametrize("platform", TARGETS)
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_broken_document_changes_nothing_of_another(platform, name):
    ids = np.repeat([[1, 2]], (BORDER, TOKENS - BORDER), axis=1)
    mixer = functools.partial(mix, mixer=MIXERS[name], target=TARGETS[platform], segment_ids=ids)
    inputs = draw(batch=1, heads=1, groups=1, tokens=TOKENS, dtype=BF16, key_size=64, value_size=32)

    @jax.jit
    def run(inputs, seen):
        """Outputs and gradients of a loss that reads those `seen`."""

        def loss(inputs):
            out, _ = mixer(inputs)
            return jnp.sum(jnp.where(seen[None, :, None, None], jnp.sin(out.astype(jnp.float32)), 0)), out

        grads, out = jax.grad(loss, has_aux=True)(inputs)
        return {"out": out} | grads

    for broken, other in BROKEN.values():
        seen = np.zeros(TOKENS, bool)
        seen[other] = True
        keys = inputs["k"].copy()
        keys[:, broken] = np.nan
        actual, expected = run(inputs | {"k": keys}, seen), run(inputs, seen)
        assert not np.isfinite(np.asarray(actual["out"], np.float32)).all()
        for what, x in expected.items():
            np.testing.assert_array_equal(actual[what][:, other], x[:, other], err_msg=what)
