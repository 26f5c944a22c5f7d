"""What the routers of a model in training choose, looked at with every validation loss."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmix.models import DecoderConfig
from jaxmix.models.routing import natsl_layers, pass_fractions
from jaxmix.train.step import Batch


def routing_probe(
    structure: Any, config: DecoderConfig, batches: Sequence[Batch], sharding: jax.sharding.Sharding
) -> Callable[[Any], dict[str, Any]]:
    """Params to what goes into the metrics: {"softmax_fraction": {layer: one fraction a head}}.

    It is that of the windows of the first batch that have no padding, each read as one document. It is empty for a
    model without NAtS-L layers, and for windows without a whole chunk.

    Args:
        structure: from `split_model`.
        config: of the model.
        batches: the validation batches.
        sharding: of a batch.
    """
    layers = natsl_layers(config)
    full = np.all(batches[0]["segment_ids"] != 0, axis=1) if layers and batches else np.zeros(1, bool)
    if not full.any() or batches[0]["tokens"].shape[1] < max(layer.chunk_size for layer in layers.values()):
        return lambda params: {}
    weights = jnp.asarray(full / full.sum(), jnp.float32)
    tokens = jax.device_put(batches[0]["tokens"], sharding)

    @jax.jit
    def fractions(params: Any, tokens: Any) -> dict[int, jax.Array]:
        found = pass_fractions(nnx.merge(structure, params), tokens)
        return {layer: weights @ rows for layer, rows in found.items()}

    def probe(params: Any) -> dict[str, Any]:
        found = jax.device_get(fractions(params, tokens))
        return {"softmax_fraction": {str(n): [round(float(x), 6) for x in heads] for n, heads in found.items()}}

    return probe
