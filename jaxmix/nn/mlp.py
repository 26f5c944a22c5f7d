"""The feed-forward half of a decoder layer."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import Array, Dtype
from jaxmix.nn.parameters import projection


class SwiGLU(nnx.Module):
    """y = (SiLU(x Wgate) * (x Wup)) Wdown, without biases.

    Args:
        d_model: width d of input and output.
        hidden: hidden size.
        rngs: source of the initial values.
        dtype: compute dtype.
        param_dtype: dtype of the kernels.
        init_std: standard deviation of the initial Wgate and Wup.
        out_init_std: that of Wdown; `init_std` by default.

    Source: Shazeer, "GLU variants improve Transformer", arXiv 2002.05202.
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        rngs: nnx.Rngs,
        dtype: Dtype = jnp.float32,
        param_dtype: Dtype = jnp.float32,
        init_std: float = 0.02,
        out_init_std: float | None = None,
    ):
        dtypes = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.gate = projection(d_model, hidden, std=init_std, axes=("embed", "mlp"), **dtypes)
        self.up = projection(d_model, hidden, std=init_std, axes=("embed", "mlp"), **dtypes)
        out_init_std = init_std if out_init_std is None else out_init_std
        self.down = projection(hidden, d_model, std=out_init_std, axes=("mlp", "embed"), **dtypes)

    def __call__(self, x: Array) -> Array:
        """Maps x, [..., d_model]."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
