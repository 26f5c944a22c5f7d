"""A language model small enough to be worked out by hand, with the calls and the state of the decoder."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CountState:
    """How often each id was seen, [B, V]."""

    counts: jax.Array

    def reset(self, where):
        return CountState(jnp.where(where[:, None], 0.0, self.counts))


class CountingModel(nnx.Module):
    """p(next = v) is in proportion to weight_v^(number of times v was seen in the segment) * bias_v."""

    def __init__(self, vocab_size, seed=0):
        keys = jax.random.split(jax.random.key(seed))
        self.weight = nnx.Param(0.3 * jax.random.normal(keys[0], (vocab_size,)))
        self.bias = nnx.Param(jax.random.normal(keys[1], (vocab_size,)))

    def init_state(self, batch_size):
        return CountState(jnp.zeros((batch_size, self.bias.shape[0])))

    def __call__(self, tokens, *, segment_ids=None, positions=None, state=None):
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        state = self.init_state(tokens.shape[0]) if state is None else state
        seen = jax.nn.one_hot(tokens, self.bias.shape[0])

        def step(carry, inputs):
            counts, last = carry
            token, segment = inputs
            new = (segment > 0) & (last > 0) & (segment != last)
            counts = jnp.where(new[:, None], 0.0, counts) + jnp.where((segment > 0)[:, None], token, 0.0)
            return (counts, jnp.where(segment > 0, segment, last)), counts

        start = (state.counts, jnp.zeros(tokens.shape[0], jnp.int32))
        (counts, _), all_counts = jax.lax.scan(step, start, (seen.swapaxes(0, 1), segment_ids.swapaxes(0, 1)))
        return self.bias[...] + self.weight[...] * all_counts.swapaxes(0, 1), CountState(counts)


def log2_probability(model, context, token):
    """log2 p(token | context), in plain Python."""
    import math

    weight, bias = (list(map(float, p[...])) for p in (model.weight, model.bias))
    logits = [b + w * context.count(v) for v, (w, b) in enumerate(zip(weight, bias, strict=True))]
    return (logits[token] - math.log(sum(map(math.exp, logits)))) / math.log(2)
