"""The train step and the evaluation step: pure functions of parameters and a batch, compiled once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Batch = Mapping[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything an update reads and writes.

    Attributes:
        step: updates made so far, int32 scalar.
        params: nested dicts of the model's parameters.
        opt_state: the optimizer's state.
    """

    step: jax.Array
    params: Any
    opt_state: Any


def split_model(model: nnx.Module) -> tuple[Any, Any]:
    """A model's structure and its parameters as nested dicts; `nnx.merge(structure, params)` is the model again.

    Raises:
        ValueError: if the model holds variables that are not parameters, which training would lose.
    """
    structure, params, rest = nnx.split(model, nnx.Param, ...)
    if jax.tree.leaves(rest):
        raise ValueError(f"model: expected no variables but nnx.Param, got also {nnx.to_pure_dict(rest)}")
    return structure, nnx.to_pure_dict(params)


def batch_loss(model: Callable[..., Any], batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Sum of -log p(label) over the labels that count, and their number.

    Args:
        model: tokens, segment_ids, positions -> (logits [B, T, V], state).
        batch: what `jaxmix.data.packed_batches` gives.

    Returns:
        The sum in nats and the sum of the weights, float32 scalars.
    """
    logits, _ = model(batch["tokens"], segment_ids=batch["segment_ids"], positions=batch["positions"])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["labels"])
    return jnp.sum(nats * batch["weights"]), jnp.sum(batch["weights"])


def make_train_step(
    structure: Any, optimizer: optax.GradientTransformation, *, sharding: jax.sharding.Sharding | None = None
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Compiles one update; the state that goes in is given up (its memory is reused).

    Args:
        structure: from `split_model`.
        optimizer: from `make_optimizer`.
        sharding: of the state that comes out; what the compiler chooses by default.

    Returns:
        (state, batch) -> (state, {"loss": mean nats per label, "grad_norm": before clipping, "labels": how many}).
    """

    def mean_loss(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        nats, labels = batch_loss(nnx.merge(structure, params), batch)
        return nats / jnp.maximum(labels, 1.0), labels

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        (loss, labels), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "labels": labels}
        return TrainState(state.step + 1, params, opt_state), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=sharding)


def make_eval_step(structure: Any) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Compiles (params, batch) -> (sum of nats, number of labels)."""
    return jax.jit(lambda params, batch: batch_loss(nnx.merge(structure, params), batch))


def init_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first update."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
