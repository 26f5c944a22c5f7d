"""Training and measuring several runs of one model at once, each with its own seed and learning rate.

The runs of a model are stacked (`jax.vmap`), their updates are a `jax.lax.scan`, and the sequences are drawn inside it,
so that a small model keeps a GPU busy and nothing but the losses leaves it.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from task import Task, sequences

from jaxmix.models import Decoder, DecoderConfig
from jaxmix.train import OptimizerConfig
from jaxmix.train.optimizer import make_optimizer, parameter_labels
from jaxmix.train.step import TrainState, init_state, make_train_step, split_model

VALIDATION, TEST = 1_000_003, 1_000_033
"""Seeds of held-out sequences: the first choose learning rates, the second are reported."""
RECIPE = OptimizerConfig(learning_rate=1.0, ssm_learning_rate=1.0, warmup_steps=1, final_fraction=0.02)
"""At a peak of 1; `scaled` brings the peak in. The warm-up is set to a tenth of the run."""
SSM_RATE = OptimizerConfig().ssm_learning_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Updates, sequences of an update, and held-out sequences of every number of pairs."""

    steps: int = 3000
    batch: int = 64
    held_out: int = 512


def scaled(rate: jax.Array, steps: int) -> optax.GradientTransformation:
    """The library's optimizer with a peak learning rate that is an array; updates are proportional to it."""
    unit = make_optimizer(dataclasses.replace(RECIPE, warmup_steps=max(1, steps // 10)), steps)

    def scale(updates: Any, params: Any = None) -> Any:
        rates = {"matrix": rate, "vector": rate, "ssm": jnp.minimum(rate, SSM_RATE)}
        return jax.tree.map(lambda update, label: update * rates[label], updates, parameter_labels(updates))

    return optax.chain(unit, optax.stateless(scale))


def train(
    config: DecoderConfig, task: Task, budget: Budget, runs: list[tuple[float, int]]
) -> tuple[list[dict[str, Any]], float]:
    """Trains a model once for every (learning rate, seed), and measures it.

    Returns:
        Of every run "validation" and "test" as `accuracies` gives them and "losses", nats per query, every sequence
        counting the same, over every twentieth of the run; and the seconds that all took together, compiling included.
    """
    start = time.perf_counter()
    structure, _ = split_model(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(jax.random.key(0)))))
    rates, seeds = jnp.array([rate for rate, _ in runs]), jnp.array([seed for _, seed in runs])

    @jax.jit
    @jax.vmap
    def begin(rate: jax.Array, seed: jax.Array) -> TrainState:
        _, params = split_model(Decoder(config, rngs=nnx.Rngs(jax.random.key(seed))))
        return init_state(params, scaled(rate, budget.steps))

    @functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
    def advance(state: TrainState, rates: jax.Array, seeds: jax.Array, updates: int) -> tuple[TrainState, jax.Array]:
        def one(state: TrainState, rate: jax.Array, seed: jax.Array) -> tuple[TrainState, jax.Array]:
            step = make_train_step(structure, scaled(rate, budget.steps))
            key = jax.random.fold_in(jax.random.key(seed), 1)

            def body(state: TrainState, _: None) -> tuple[TrainState, jax.Array]:
                drawn = sequences(task, jax.random.fold_in(key, state.step), budget.batch)
                each = drawn["weights"] / drawn["weights"].sum(-1, keepdims=True)
                state, metrics = step(state, drawn | {"weights": each, "segment_ids": None, "positions": None})
                return state, metrics["loss"]

            state, losses = jax.lax.scan(body, state, length=updates)
            return state, losses.mean()

        return jax.vmap(one)(state, rates, seeds)

    state, losses, done = begin(rates, seeds), [], 0
    while done < budget.steps:
        updates = min(max(1, budget.steps // 20), budget.steps - done)
        state, loss = advance(state, rates, seeds, updates)
        done += updates
        losses.append(np.asarray(loss).tolist())
        print(f"  {done} updates, {time.perf_counter() - start:.0f} s:", *(f"{x:.3f}" for x in losses[-1]), flush=True)
    measured = [{"losses": list(curve)} for curve in zip(*losses, strict=True)]
    count = counter(structure, task, budget)
    for name, seed in (("validation", VALIDATION), ("test", TEST)):
        for run, found in zip(measured, accuracies(count, state.params, task, seed), strict=True):
            run[name] = found
    return measured, time.perf_counter() - start


Counter = Callable[[Any, jax.Array, int], tuple[jax.Array, jax.Array]]


def counter(structure: Any, task: Task, budget: Budget) -> Counter:
    """Compiles (stacked params, key, pairs) -> (right [models, bins], asked [bins]), bins as in `accuracies`."""
    bins = task.length.bit_length()
    batches = -(-budget.held_out // budget.batch)

    @jax.jit
    def count(params: Any, key: jax.Array, pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
        def batch(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            drawn = sequences(task, key, budget.batch, pairs)
            bin = jnp.sum(drawn["distances"][..., None] >= 2 ** jnp.arange(1, bins), axis=-1)
            asked = drawn["weights"][..., None] * jax.nn.one_hot(bin, bins)

            def right(params: Any) -> jax.Array:
                logits, _ = nnx.merge(structure, params)(drawn["tokens"])
                return jnp.sum((logits.argmax(-1) == drawn["labels"])[..., None] * asked, axis=(0, 1))

            return jax.vmap(right)(params), asked.sum((0, 1))

        right, asked = jax.lax.map(batch, jax.random.split(key, batches))
        return right.sum(0), asked.sum(0)

    return count


def accuracies(count: Counter, params: Any, task: Task, seed: int) -> list[dict[str, Any]]:
    """What stacked models get right on the held-out sequences of a seed.

    Returns:
        Of every model "pairs", fraction right by number of pairs, and "distances", by number of pairs [right, asked]
        of queries 1, 2 to 3, 4 to 7, 8 to 15, ... tokens behind their key.
    """
    counts = {}
    for pairs in task.pairs:
        key = jax.random.fold_in(jax.random.key(seed), pairs)
        counts[pairs] = tuple(np.asarray(x) for x in count(params, key, pairs))
    return [
        {
            "pairs": {str(pairs): float(right[i].sum() / asked.sum()) for pairs, (right, asked) in counts.items()},
            "distances": {
                str(pairs): [[int(r), int(a)] for r, a in zip(right[i], asked, strict=True)]
                for pairs, (right, asked) in counts.items()
            },
        }
        for i in range(len(next(iter(counts.values()))[0]))
    ]
