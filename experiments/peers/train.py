"""Training several runs of one model at once, each with its own seed and learning rate.

The runs of a model are stacked (`jax.vmap`), their updates are a `jax.lax.scan`, and the sequences are drawn inside it,
so that a small model keeps a GPU busy and nothing but the losses leaves it.
"""

import dataclasses
import functools
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxmix.models import Decoder, DecoderConfig
from jaxmix.train import OptimizerConfig
from jaxmix.train.optimizer import make_optimizer, parameter_labels
from jaxmix.train.step import TrainState, init_state, make_train_step, split_model

RECIPE = OptimizerConfig(learning_rate=1.0, ssm_learning_rate=1.0, warmup_steps=1, final_fraction=0.02)
"""At a peak of 1; `scaled` brings the peak and the warm-up in."""
SSM_RATE = OptimizerConfig().ssm_learning_rate


class Task(Protocol):
    """What models are trained and measured on."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that a model is given."""
        ...

    def draw(self, key: jax.Array, count: int) -> dict[str, jax.Array]:
        """`count` training sequences: "tokens" and "labels" int32 [B, T], "weights" float32 [B, T] of the labels."""
        ...

    def measure(self, structure: Any, params: Any, models: int) -> list[dict[str, Any]]:
        """What each of the stacked models achieves on held-out sequences; structure and params of `split_model`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Updates, sequences of an update, and updates until the rate is at its peak; None for a tenth of all."""

    steps: int
    batch: int
    warmup: int | None = None


def scaled(rate: jax.Array, budget: Budget) -> optax.GradientTransformation:
    """The library's optimizer with a peak learning rate that is an array; updates are proportional to it."""
    warmup = max(1, budget.steps // 10) if budget.warmup is None else budget.warmup
    unit = make_optimizer(dataclasses.replace(RECIPE, warmup_steps=warmup), budget.steps)

    def scale(updates: Any, params: Any = None) -> Any:
        rates = {"matrix": rate, "vector": rate, "ssm": jnp.minimum(rate, SSM_RATE)}
        return jax.tree.map(lambda update, label: update * rates[label], updates, parameter_labels(updates))

    return optax.chain(unit, optax.stateless(scale))


def train(
    config: DecoderConfig, task: Task, budget: Budget, runs: list[tuple[float, int]]
) -> tuple[list[dict[str, Any]], float]:
    """Trains a model once for every (learning rate, seed), and measures it.

    Returns:
        Of every run what `task.measure` finds and "losses", the mean over every twentieth of the run; and the seconds
        that all took together, compiling included.
    """
    start = time.perf_counter()
    structure, _ = split_model(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(jax.random.key(0)))))
    rates, seeds = jnp.array([rate for rate, _ in runs]), jnp.array([seed for _, seed in runs])

    @jax.jit
    @jax.vmap
    def begin(rate: jax.Array, seed: jax.Array) -> TrainState:
        _, params = split_model(Decoder(config, rngs=nnx.Rngs(jax.random.key(seed))))
        return init_state(params, scaled(rate, budget))

    @functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
    def advance(state: TrainState, rates: jax.Array, seeds: jax.Array, updates: int) -> tuple[TrainState, jax.Array]:
        def one(state: TrainState, rate: jax.Array, seed: jax.Array) -> tuple[TrainState, jax.Array]:
            step = make_train_step(structure, scaled(rate, budget))
            key = jax.random.fold_in(jax.random.key(seed), 1)

            def body(state: TrainState, _: None) -> tuple[TrainState, jax.Array]:
                drawn = task.draw(jax.random.fold_in(key, state.step), budget.batch)
                state, metrics = step(state, drawn | {"segment_ids": None, "positions": None})
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
    measured = task.measure(structure, state.params, len(runs))
    curves = zip(*losses, strict=True)
    found = [{"losses": list(curve)} | held_out for curve, held_out in zip(curves, measured, strict=True)]
    return found, time.perf_counter() - start
