"""What the layers of S4D and interdomain attention share: two input streams and a learned diagonal state space."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import Array, Dtype, check_choice, check_count, check_positive, fail
from jaxmix.mixers.modes import DISCRETIZATIONS, Discretization
from jaxmix.mixers.s4d import s4d_poles
from jaxmix.mixers.segments import Segments
from jaxmix.nn.config import MixerConfig
from jaxmix.nn.convolution import ShortConvolution, convolve_streams
from jaxmix.nn.layer import MixerLayer
from jaxmix.nn.norms import l2_normalize, rms_normalize
from jaxmix.nn.parameters import partitioned, projection
from jaxmix.nn.rope import rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModalConfig(MixerConfig):
    """Options of the layers with a diagonal state space, beside those of `MixerConfig`.

    Their short convolution has a bias and no activation.

    Attributes:
        streams: what the state space runs over, [a, b] per head. "keys and values": a = xi(k), unit vectors of SiLU
            features, b = v; the convolution and the rotation are on keys only. "single": two projections of the input
            without features, both convolved, the first rotated.
        modes: complex modes M per head.
        poles: initial imaginary parts of the poles, see `jaxmix.nn.s4d_poles`; real parts start at -1/2.
        discretization: see `jaxmix.s4d`.
        mixing: a full M x M matrix C over the modes, or a diagonal.
        mixing_init: C of independent complex normal numbers with E|C|^2 = 1 / M, or the identity.
        steps: smallest and largest initial step size Delta, between which it is drawn log-uniformly, one per head.
        chunk_size: tokens per chunk of the scan form.
    """

    conv_width: int = 4
    streams: Literal["keys and values", "single"] = "keys and values"
    modes: int = 64
    poles: Literal["inv", "lin", "legs"] = "inv"
    discretization: Discretization = "zoh"
    mixing: Literal["full", "diagonal"] = "full"
    mixing_init: Literal["normal", "identity"] = "normal"
    steps: tuple[float, float] = (1e-3, 1e-1)
    chunk_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("streams", self.streams, ("keys and values", "single"))
        check_count("modes", self.modes)
        check_choice("poles", self.poles, ("inv", "lin", "legs"))
        check_choice("discretization", self.discretization, DISCRETIZATIONS)
        check_choice("mixing", self.mixing, ("full", "diagonal"))
        check_choice("mixing_init", self.mixing_init, ("normal", "identity"))
        check_count("chunk_size", self.chunk_size)
        if not isinstance(self.steps, tuple | list) or len(self.steps) != 2:
            fail("steps", "two numbers, smallest and largest", repr(self.steps))
        for step in self.steps:
            check_positive("steps", step)
        if self.steps[0] > self.steps[1]:
            fail("steps", "the smallest first", self.steps)
        object.__setattr__(self, "steps", tuple(self.steps))


class StateSpace(nnx.Module):
    """The learned modes of G heads, and the scale and bias with which their two input streams are normalised.

        z = [RMSNorm(a) * s_a + b_a ; RMSNorm(b) * s_b + b_b]      scales for all heads, biases per head
        A = -exp(log_real) + i imaginary ,  Delta = exp(log_step)

    Its parameters are labelled "ssm": see `jaxmix.nn.parameter_label`.
    """

    def __init__(self, config: ModalConfig, sizes: tuple[int, int], *, rngs: nnx.Rngs, dtype: Dtype):
        groups, modes = config.groups, config.modes
        real, imaginary = s4d_poles(modes, config.poles)
        low, high = (math.log(step) for step in config.steps)
        per_head = partitioned("heads")

        def repeated(row: Any) -> nnx.Param:
            return nnx.Param(jnp.tile(jnp.asarray(row, dtype), (groups, 1)), **partitioned("heads", None))

        self.log_real = repeated([math.log(-x) for x in real])
        self.imaginary = repeated(imaginary)
        self.log_step = nnx.Param(jax.random.uniform(rngs.params(), (groups,), dtype, low, high), **per_head)
        shape = (groups, 2, modes, modes) if config.mixing == "full" else (groups, 2, modes)
        if config.mixing_init == "normal":
            mixing = jax.random.normal(rngs.params(), shape, dtype) * (2 * modes) ** -0.5
        else:
            one = jnp.eye(modes, dtype=dtype) if config.mixing == "full" else jnp.ones((modes,), dtype)
            mixing = jnp.broadcast_to(jnp.stack([one, jnp.zeros_like(one)]), shape)
        self.mixing = nnx.Param(mixing, **partitioned("heads", *(None,) * (len(shape) - 1)))
        self.scales = nnx.List(nnx.Param(jnp.ones((size,), dtype), **partitioned(None)) for size in sizes)
        self.biases = nnx.List(
            nnx.Param(jnp.zeros((groups, size), dtype), **partitioned("heads", None)) for size in sizes
        )
        self.eps = config.norm_eps

    def poles(self) -> Array:
        """A, [G, 2, M]."""
        return jnp.stack([-jnp.exp(self.log_real[...]), self.imaginary[...]], axis=1)

    def step(self) -> Array:
        """Delta, [G]."""
        return jnp.exp(self.log_step[...])

    def normalize(self, streams: tuple[Array, Array]) -> tuple[Array, Array]:
        """The two streams [B, T, G, size], normalised, scaled and shifted."""
        a, b = (
            (rms_normalize(x, self.eps) * scale[...] + bias[...]).astype(x.dtype)
            for x, scale, bias in zip(streams, self.scales, self.biases, strict=True)
        )
        return a, b


class ModalLayer(MixerLayer):
    """Base of the layers with a diagonal state space; see `MixerLayer` for the arguments."""

    has_queries: bool = False

    def __init__(
        self,
        d_model: int,
        config: Any = None,
        *,
        rngs: nnx.Rngs,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        init_std: float = 0.02,
        **arguments: Any,
    ):
        shared: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(d_model, config, init_std=init_std, **shared, **arguments)
        config, shared["dtype"] = self.config, self.dtype
        sizes = {"key": config.groups * self.key_size, "value": config.groups * self.value_size}
        if self.has_queries:
            sizes = {"query": config.heads * self.key_size} | sizes
        for name, size in sizes.items():
            setattr(self, name, projection(d_model, size, std=init_std, **shared))
        self.names = tuple(sizes)
        self.convolved = tuple(n for n in sizes if config.conv_width and (n != "value" or config.streams == "single"))
        self.convolutions = nnx.List(
            ShortConvolution(sizes[n], config.conv_width, rngs=rngs, param_dtype=param_dtype, axis="heads", bias=True)
            for n in self.convolved
        )
        self.ssm = StateSpace(config, (self.key_size, self.value_size), rngs=rngs, dtype=self.state_dtype)

    def project(
        self, x: Array, segments: Segments | None, tails: tuple[Array, ...], positions: Array
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Queries (where the layer has them) and the two streams of the state space, by head."""
        flat = {name: getattr(self, name)(x) for name in self.names}
        if self.convolved:
            streams = [flat[name] for name in self.convolved]
            kernels = [convolution.kernel[...] for convolution in self.convolutions]
            convolved = convolve_streams(streams, kernels, tails, segments)
            tails = tuple(tail for _, tail in convolved)
            for name, convolution, (y, _) in zip(self.convolved, self.convolutions, convolved, strict=True):
                flat[name] = convolution.shift(y)
        config = self.config
        features = {"query"} | ({"key"} if config.streams == "keys and values" else set())
        heads = {}
        for name, y in flat.items():
            y = y.reshape(*y.shape[:2], -1, self.value_size if name == "value" else self.key_size)
            if config.rope and name != "value":
                y = rotate(y, positions, config.rope_base)
            heads[name] = l2_normalize(jax.nn.silu(y), config.norm_eps) if name in features else y
        a, b = self.ssm.normalize((heads["key"], heads["value"]))
        return ((heads["query"], a, b) if self.has_queries else (a, b)), tails
