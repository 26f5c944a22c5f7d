"""The optimizer: AdamW with warm-up and cosine, gradient clipping, and weight decay where it belongs."""

import functools
from typing import Any

import jax
import optax

from jaxmix.nn import parameter_label
from jaxmix.train.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear from 0 to the peak over the warm-up, then a cosine to `final_fraction` of it at the last step.

    Args:
        config: the rates.
        steps: number of updates of the whole run.

    Returns:
        Update number (from 0) to learning rate.

    Raises:
        ValueError: if the warm-up does not end before the run does.
    """
    if config.warmup_steps >= steps:
        raise ValueError(f"warmup_steps: expected fewer than steps={steps}, got {config.warmup_steps}")
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=steps,
        end_value=config.learning_rate * config.final_fraction,
    )


def parameter_labels(params: Any) -> Any:
    """What each parameter is to the optimizer, by `jaxmix.nn.parameter_label`.

    Args:
        params: nested dicts of parameters.

    Returns:
        The same tree of "matrix", "ssm" and "vector".
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: parameter_label([str(p.key) for p in path]), params)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The gradient transformation of a run of `steps` updates.

    Weight decay applies to parameters labelled "matrix". Those labelled "ssm" follow the schedule scaled down to a peak
    of `config.ssm_learning_rate`, if the peak is higher.

    Raises:
        ValueError: if the warm-up does not end before the run does.

    Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101.
    """
    capped = min(1.0, config.ssm_learning_rate / config.learning_rate) if config.learning_rate else 1.0
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=functools.partial(_has_label, "matrix"),
        ),
        optax.masked(optax.scale(capped), functools.partial(_has_label, "ssm")),
    )


def _has_label(label: str, params: Any) -> Any:
    return jax.tree.map(lambda x: x == label, parameter_labels(params))
