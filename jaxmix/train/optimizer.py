"""The optimizer: AdamW with warm-up and cosine, gradient clipping, and weight decay where it belongs."""

from typing import Any

import jax
import optax

from jaxmix.train.config import OptimizerConfig

# Names of the parameters that weight decay applies to. Norms' scales, biases and the rates of decays are not here.
_DECAYED = ("kernel", "embedding")


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


def decay_mask(params: Any) -> Any:
    """Which parameters weight decay applies to.

    Matrices and embeddings have it; norms, biases and everything that sets a layer's decay (its gate parameters) do
    not. The names decide, not the ranks: parameters of equal layers are stacked and have one more axis.

    Args:
        params: nested dicts of parameters.

    Returns:
        The same tree of booleans.
    """

    def decays(path: tuple[Any, ...], _: Any) -> bool:
        names = [part.key for part in path]
        return names[-1] in _DECAYED and "decay" not in names

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The gradient transformation of a run of `steps` updates.

    Weight decay applies to what `decay_mask` selects.

    Raises:
        ValueError: if the warm-up does not end before the run does.

    Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )
