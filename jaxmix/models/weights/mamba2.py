"""Mamba-2: blocks of the state-space layer alone."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmix.models.config import DecoderConfig
from jaxmix.models.weights.family import Family, PublishedConfig, check_equal_layers, check_options
from jaxmix.models.weights.names import Arrays, Entry, same, transposed
from jaxmix.nn import Mamba2Config

EMBEDDING = "backbone.embeddings.weight"
HEAD = "lm_head.weight"


class Mamba2(Family):
    """`Mamba2ForCausalLM`, without biases of the projections and without a limit on the step size.

    Source of the architecture: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060.
    """

    architecture = "Mamba2ForCausalLM"

    def read_config(self, published: PublishedConfig) -> DecoderConfig:
        """One layer, repeated."""
        width, heads = published.get("hidden_size", int), published.get("num_heads", int)
        size = published.get("head_dim", int)
        published.require("expand", heads * size / width, "an inner width other than num_heads * head_dim")
        published.require("hidden_act", "silu", "another activation", default="silu")
        published.require("use_bias", False, "biases of the projections", default=False)
        published.require("use_conv_bias", True, "convolutions without bias", default=True)
        limit = published.get("time_step_limit", list, [0.0, float("inf")])
        if [float(x["__float__"] if isinstance(x, dict) else x) for x in limit] != [0.0, float("inf")]:
            raise NotImplementedError(f"config.json: time_step_limit = {limit!r} needs clamped step sizes")
        # How weights were first drawn, and the precision of the residual stream, which is the compute dtype here.
        published.ignore("rescale_prenorm_residual", "residual_in_fp32", "time_step_rank", "time_step_floor")
        published.ignore("time_step_min", "time_step_max")
        eps = published.get("layer_norm_epsilon", float, 1e-5)
        mixer = Mamba2Config(
            heads=heads,
            key_heads=published.get("n_groups", int),
            key_size=published.get("state_size", int),
            value_size=size,
            conv_width=published.get("conv_kernel", int, 4),
            norm_eps=eps,
            chunk_size=published.get("chunk_size", int, 64),
        )
        return DecoderConfig(
            vocab_size=published.get("vocab_size", int),
            d_model=width,
            layers=(mixer,) * published.get("num_hidden_layers", int),
            hidden=0,
            tie_embeddings=published.get("tie_word_embeddings", bool, False),
            norm_eps=eps,
            init_std=published.get("initializer_range", float, 0.1),
        )

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of transformers' Mamba2Config."""
        mixer = check_equal_layers(self.architecture, config, Mamba2Config)
        keys, values = mixer.head_sizes(config.d_model)
        inner = mixer.heads * values
        check_options(
            self.architecture,
            {
                "hidden": (config.hidden, 0),
                "conv_width": (mixer.conv_width, mixer.conv_width or "at least 2"),
                "qk_norm": (mixer.qk_norm, None),
                "rope": (mixer.rope, False),
                "output_norm": (mixer.output_norm, True),
                "gate": (mixer.gate, True),
                "gate_activation": (mixer.gate_activation, "silu"),
                "norm_eps": (mixer.norm_eps, config.norm_eps),
                "value_size": (values, values if inner % config.d_model == 0 else "a divisor of expand * d_model"),
            },
        )
        return {
            "model_type": "mamba2",
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "expand": inner // config.d_model,
            "num_heads": mixer.heads,
            "head_dim": values,
            "n_groups": mixer.stream_heads[0],
            "state_size": keys,
            "conv_kernel": mixer.conv_width,
            "chunk_size": mixer.chunk_size,
            "num_hidden_layers": len(config.layers),
            "layer_norm_epsilon": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            "hidden_act": "silu",
            "use_bias": False,
            "use_conv_bias": True,
            "initializer_range": config.init_std,
        }

    def entries(self, config: DecoderConfig) -> Sequence[Entry]:
        """Embedding, final norm, output map unless it is tied, and nine tensors a layer."""
        head = () if config.tie_embeddings else (transposed(HEAD, "head.kernel"),)
        layers = [
            entry.under(f"backbone.layers.{index}.", f"layers.{index}.")
            for index, mixer in enumerate(config.layers)
            if isinstance(mixer, Mamba2Config)
            for entry in layer_entries(mixer, config.d_model)
        ]
        return [same(EMBEDDING, "embedding"), same("backbone.norm_f.weight", "norm.scale"), *head, *layers]

    def copies(self, config: DecoderConfig) -> Mapping[str, str]:
        """Some files repeat a tied embedding as the output map."""
        return {HEAD: EMBEDDING} if config.tie_embeddings else {}


def layer_entries(mixer: Mamba2Config, width: int) -> Sequence[Entry]:
    """The table of one block: one projection makes gate, x, B, C and dt, one convolution runs over x, B and C."""
    keys, values = mixer.head_sizes(width)
    inner, state = mixer.heads * values, mixer.stream_heads[0] * keys
    parts = ("gate", "value", "key", "query", "decay.projection")
    projections = tuple(f"mixer.{part}.kernel" for part in parts)
    split = functools.partial(_split_rows, sizes=(inner, inner, state, state, mixer.heads))
    kernels = tuple(f"mixer.convolutions.{i}.kernel" for i in (2, 1, 0))
    biases = tuple(f"mixer.convolutions.{i}.bias" for i in (2, 1, 0))
    channels = (inner, state, state)
    cut = functools.partial(split_convolution, sizes=channels)
    return (
        same("norm.weight", "mixer_norm.scale"),
        Entry(("mixer.in_proj.weight",), projections, split, join_rows),
        Entry(("mixer.conv1d.weight",), kernels, cut, join_convolution),
        Entry(("mixer.conv1d.bias",), biases, functools.partial(split, sizes=channels), join_rows),
        same("mixer.A_log", "mixer.decay.A_log"),
        same("mixer.dt_bias", "mixer.decay.dt_bias"),
        same("mixer.D", "mixer.direct"),
        same("mixer.norm.weight", "mixer.out_norm"),
        transposed("mixer.out_proj.weight", "mixer.out.kernel"),
    )


def _split_rows(x: np.ndarray, *, sizes: Sequence[int]) -> Arrays:
    """A weight [outputs, inputs] or bias [outputs] cut along the outputs, kernels transposed."""
    return tuple(part.T for part in np.split(x, np.cumsum(sizes)[:-1]))


def join_rows(*parts: np.ndarray) -> Arrays:
    """The inverse of a cut along the outputs."""
    return (np.concatenate([part.T for part in parts]),)


def split_convolution(x: np.ndarray, *, sizes: Sequence[int]) -> Arrays:
    """A depthwise weight [channels, 1, W] as kernels [W, channels] of consecutive channels."""
    return tuple(part[:, 0].T for part in np.split(x, np.cumsum(sizes)[:-1]))


def join_convolution(*kernels: np.ndarray) -> Arrays:
    """The inverse of `split_convolution`."""
    return (np.concatenate([kernel.T[:, None] for kernel in kernels]),)
