"""Qwen3-Next: Gated DeltaNet layers and gated softmax attention, with a dense SwiGLU."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmix.models.config import DecoderConfig
from jaxmix.models.weights.family import Family, PublishedConfig, check_options
from jaxmix.models.weights.llama import EMBEDDING, HEAD, LAYER, read_rope
from jaxmix.models.weights.mamba2 import join_convolution, split_convolution
from jaxmix.models.weights.names import Arrays, Entry, same, transposed
from jaxmix.nn import GatedDeltaNetConfig, MixerConfig, SoftmaxAttentionConfig

LINEAR, FULL = "linear_attention", "full_attention"
_EPS = 1e-6
_SWIGLU = tuple(entry for entry in LAYER if entry.theirs[0].startswith("mlp."))


class Qwen3Next(Family):
    """`Qwen3NextForCausalLM` with a dense SwiGLU in every layer; the decoder has no mixture of experts.

    Its RMS norms multiply with 1 + weight, all but the one inside the linear layers.

    Source of the architecture: `models/qwen3_next` of transformers; Yang et al., "Gated Delta Networks",
    arXiv 2412.06464.
    """

    architecture = "Qwen3NextForCausalLM"

    def read_config(self, published: PublishedConfig) -> DecoderConfig:
        """Two kinds of layers, in the order of `layer_types`."""
        width, layers = published.get("hidden_size", int), published.get("num_hidden_layers", int)
        kinds = published.get("layer_types", list, [FULL if i % 4 == 3 else LINEAR for i in range(layers)])
        if len(kinds) != layers or set(kinds) - {LINEAR, FULL}:
            raise NotImplementedError(f"config.json: layer_types = {kinds!r} needs other kinds of layers")
        experts, dense = published.get("num_experts", int, 512), published.get("mlp_only_layers", list, [])
        if experts and sorted(dense) != list(range(layers)):
            raise NotImplementedError(f"config.json: num_experts = {experts} needs a mixture of experts")
        published.ignore("decoder_sparse_step", "moe_intermediate_size", "norm_topk_prob", "num_experts_per_tok")
        published.ignore("output_router_logits", "router_aux_loss_coef", "shared_expert_intermediate_size")
        published.require("hidden_act", "silu", "another activation", default="silu")
        published.require("attention_bias", False, "biases", default=False)
        published.require("attention_dropout", 0.0, "dropout", default=0.0)
        published.require("rms_norm_eps", _EPS, "an eps that differs between norms", default=_EPS)
        base, fraction = read_rope(published, 0.25)
        size = published.get("head_dim", int, 256)
        mixers: dict[str, MixerConfig] = {
            LINEAR: GatedDeltaNetConfig(
                heads=published.get("linear_num_value_heads", int),
                key_heads=published.get("linear_num_key_heads", int),
                key_size=published.get("linear_key_head_dim", int),
                value_size=published.get("linear_value_head_dim", int),
                conv_width=published.get("linear_conv_kernel_dim", int, 4),
            ),
            FULL: SoftmaxAttentionConfig(
                heads=published.get("num_attention_heads", int),
                kv_heads=published.get("num_key_value_heads", int),
                key_size=size,
                value_size=size,
                qk_norm="rms",
                rope_base=base,
                rope_fraction=fraction,
                gate=True,
                gate_activation="sigmoid",
                capacity=published.get("max_position_embeddings", int),
            ),
        }
        return DecoderConfig(
            vocab_size=published.get("vocab_size", int),
            d_model=width,
            layers=tuple(mixers[kind] for kind in kinds),
            hidden=published.get("intermediate_size", int),
            tie_embeddings=published.get("tie_word_embeddings", bool, False),
            norm_eps=_EPS,
            init_std=published.get("initializer_range", float, 0.02),
        )

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of transformers' Qwen3NextConfig."""
        delta, softmax = self._kinds(config)
        keys, values = delta.head_sizes(config.d_model)
        size, value_size = softmax.head_sizes(config.d_model)
        shared = {"norm_eps": (config.norm_eps, _EPS), "hidden": (bool(config.hidden), True)}
        linear = {
            "rope": (delta.rope, False),
            "qk_norm": (delta.qk_norm, "l2"),
            "output_norm": (delta.output_norm, True),
            "gate": (delta.gate, True),
            "gate_activation": (delta.gate_activation, "silu"),
            "negative_eigenvalues": (delta.negative_eigenvalues, False),
            "scale": (delta.scale, None),
            "norm_eps": (delta.norm_eps, _EPS),
            "conv_width": (bool(delta.conv_width), True),
        }
        full = {
            "rope": (softmax.rope, True),
            "qk_norm": (softmax.qk_norm, "rms"),
            "output_norm": (softmax.output_norm, False),
            "gate": (softmax.gate, True),
            "gate_activation": (softmax.gate_activation, "sigmoid"),
            "scale": (softmax.scale, None),
            "norm_eps": (softmax.norm_eps, _EPS),
            "conv_width": (softmax.conv_width, 0),
            "value_size": (value_size, size),
        }
        for options in (shared, linear, full):
            check_options(self.architecture, options)
        return {
            "model_type": "qwen3_next",
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "intermediate_size": config.hidden,
            "num_hidden_layers": len(config.layers),
            "layer_types": [FULL if isinstance(x, SoftmaxAttentionConfig) else LINEAR for x in config.layers],
            "mlp_only_layers": list(range(len(config.layers))),
            "num_experts": 0,
            "linear_num_value_heads": delta.heads,
            "linear_num_key_heads": delta.stream_heads[0],
            "linear_key_head_dim": keys,
            "linear_value_head_dim": values,
            "linear_conv_kernel_dim": delta.conv_width,
            "num_attention_heads": softmax.heads,
            "num_key_value_heads": softmax.groups,
            "head_dim": size,
            "max_position_embeddings": softmax.capacity,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": softmax.rope_base,
                "partial_rotary_factor": softmax.rope_fraction,
            },
            "rms_norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "initializer_range": config.init_std,
        }

    def _kinds(self, config: DecoderConfig) -> tuple[GatedDeltaNetConfig, SoftmaxAttentionConfig]:
        """The one Gated DeltaNet and the one softmax attention that the layers are."""
        kinds = set(config.layers)
        delta = [kind for kind in kinds if type(kind) is GatedDeltaNetConfig]
        softmax = [kind for kind in kinds if isinstance(kind, SoftmaxAttentionConfig)]
        if len(delta) != 1 or len(softmax) != 1 or len(kinds) != 2:
            names = ", ".join(sorted({kind.name for kind in kinds}))
            raise NotImplementedError(
                f"layers: {self.architecture} has one gated_delta_net and one softmax_attention, this model {names}"
            )
        return delta[0], softmax[0]

    def entries(self, config: DecoderConfig) -> Sequence[Entry]:
        """Embedding, final norm, output map unless it is tied, and the tensors of each kind of layer."""
        head = () if config.tie_embeddings else (transposed(HEAD, "head.kernel"),)
        layers = [
            entry.under(f"model.layers.{index}.", f"layers.{index}.")
            for index, mixer in enumerate(config.layers)
            for entry in (*_around(), *mixer_entries(mixer, config.d_model))
        ]
        return [same(EMBEDDING, "embedding"), _shifted("model.norm.weight", "norm.scale"), *head, *layers]

    def copies(self, config: DecoderConfig) -> Mapping[str, str]:
        """Some files repeat a tied embedding as the output map."""
        return {HEAD: EMBEDDING} if config.tie_embeddings else {}


def _around() -> Sequence[Entry]:
    return (
        _shifted("input_layernorm.weight", "mixer_norm.scale"),
        _shifted("post_attention_layernorm.weight", "mlp_norm.scale"),
        *_SWIGLU,
    )


def mixer_entries(mixer: Any, width: int) -> Sequence[Entry]:
    """The table of the mixer of one layer, of either kind."""
    key_size, value_size = mixer.head_sizes(width)
    if isinstance(mixer, SoftmaxAttentionConfig):
        queries = ("mixer.query.kernel", "mixer.gate.kernel")
        split = functools.partial(_split_groups, groups=mixer.heads, sizes=(key_size, key_size))
        join = functools.partial(_join_groups, groups=mixer.heads)
        return (
            Entry(("self_attn.q_proj.weight",), queries, split, join),
            transposed("self_attn.k_proj.weight", "mixer.key.kernel"),
            transposed("self_attn.v_proj.weight", "mixer.value.kernel"),
            transposed("self_attn.o_proj.weight", "mixer.out.kernel"),
            _shifted("self_attn.q_norm.weight", "mixer.query_norm.scale"),
            _shifted("self_attn.k_norm.weight", "mixer.key_norm.scale"),
        )
    groups = mixer.stream_heads[0]
    repeats = mixer.heads // groups
    values, keys = repeats * value_size, groups * key_size
    join = functools.partial(_join_groups, groups=groups)
    streams = tuple(f"mixer.{name}.kernel" for name in ("query", "key", "value", "gate"))
    gates = ("mixer.beta.kernel", "mixer.decay.projection.kernel")
    kernels = tuple(f"mixer.convolutions.{i}.kernel" for i in range(3))
    cut = functools.partial(split_convolution, sizes=(keys, keys, groups * values))
    split = functools.partial(_split_groups, groups=groups, sizes=(key_size, key_size, values, values))
    split_gates = functools.partial(_split_groups, groups=groups, sizes=(repeats, repeats))
    return (
        Entry(("linear_attn.in_proj_qkvz.weight",), streams, split, join),
        Entry(("linear_attn.in_proj_ba.weight",), gates, split_gates, join),
        Entry(("linear_attn.conv1d.weight",), kernels, cut, join_convolution),
        same("linear_attn.A_log", "mixer.decay.A_log"),
        same("linear_attn.dt_bias", "mixer.decay.dt_bias"),
        same("linear_attn.norm.weight", "mixer.out_norm.scale"),
        transposed("linear_attn.out_proj.weight", "mixer.out.kernel"),
    )


def _split_groups(x: np.ndarray, *, groups: int, sizes: Sequence[int]) -> Arrays:
    """A weight whose rows are, group by group, those of several maps, as one kernel for each map."""
    parts = np.split(x.reshape(groups, -1, x.shape[-1]), np.cumsum(sizes)[:-1], axis=1)
    return tuple(part.reshape(-1, x.shape[-1]).T for part in parts)


def _join_groups(*kernels: np.ndarray, groups: int) -> Arrays:
    """The inverse of `_split_groups`."""
    width = kernels[0].shape[0]
    parts = [kernel.T.reshape(groups, -1, width) for kernel in kernels]
    return (np.concatenate(parts, axis=1).reshape(-1, width),)


def _shifted(theirs: str, ours: str) -> Entry:
    """A norm that multiplies with 1 + weight."""
    return Entry((theirs,), (ours,), _add_one, _take_one)


def _add_one(x: np.ndarray) -> Arrays:
    return ((x.astype(np.float32) + 1).astype(x.dtype),)


def _take_one(x: np.ndarray) -> Arrays:
    return ((x.astype(np.float32) - 1).astype(x.dtype),)
