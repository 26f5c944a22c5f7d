"""How layers make their parameters: initial values, and logical axis names for sharding.

Parameters carry names of logical axes and are not placed anywhere by themselves:

    embed   model width            heads   heads times head size      mlp     SwiGLU hidden size
    vocab   vocabulary             layers  stacked equal layers

Map them to mesh axes where a model is sharded, every name to a mesh axis or None:

    rules = {"embed": "data", "heads": "model", "mlp": "model", "vocab": "model", "layers": None}
    with nnx.logical_axis_rules(tuple(rules.items())):
        shardings = nnx.get_named_sharding(nnx.state(model), mesh)
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
from flax import nnx

from jaxmix.arrays import Dtype

AXES = ("embed", "heads", "mlp", "vocab", "layers")
"""Every logical axis name in use."""


def parameter_label(path: Sequence[str]) -> Literal["matrix", "ssm", "vector"]:
    """What an optimizer should know of a parameter, from the names on the way to it.

    "matrix": projections, convolutions and embeddings, which weight decay is for. "ssm": poles, step sizes, mixing and
    input norms of a `StateSpace`, which the paper trains with a learning rate of at most 1e-3 and without decay.
    "vector": all else (norms, biases, gate parameters). Names decide and not ranks: parameters of equal layers are
    stacked and have one more axis.

    Source of the group "ssm": Kiyohara et al., arXiv 2605.24330.
    """
    if "ssm" in path:
        return "ssm"
    return "matrix" if path[-1] in ("kernel", "embedding") and "decay" not in path else "vector"


def partitioned(*axes: str | None) -> dict[str, Any]:
    """Metadata of an `nnx.Param` with these logical axes, which needs no mesh when the parameter is made."""
    return {"out_sharding": axes, "eager_sharding": False}


def projection(
    inputs: int,
    outputs: int,
    *,
    std: float,
    axes: tuple[str | None, str | None] = ("embed", "heads"),
    dtype: Dtype,
    param_dtype: Dtype,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A linear map without bias, kernel [inputs, outputs] from N(0, std^2) with logical `axes`."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=False,
        kernel_init=jax.nn.initializers.normal(std),
        kernel_metadata=partitioned(*axes),
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )
