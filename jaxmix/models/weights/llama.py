"""Llama: rotary softmax attention with grouped heads, SwiGLU, RMSNorm, no biases."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmix.models.config import DecoderConfig
from jaxmix.models.weights.family import Family, PublishedConfig
from jaxmix.models.weights.names import Entry, same, transposed
from jaxmix.nn import SoftmaxAttentionConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

OUTSIDE = (
    same(EMBEDDING, "embedding"),
    same("model.norm.weight", "norm.scale"),
)
LAYER = (
    same("input_layernorm.weight", "mixer_norm.scale"),
    transposed("self_attn.q_proj.weight", "mixer.query.kernel"),
    transposed("self_attn.k_proj.weight", "mixer.key.kernel"),
    transposed("self_attn.v_proj.weight", "mixer.value.kernel"),
    transposed("self_attn.o_proj.weight", "mixer.out.kernel"),
    same("post_attention_layernorm.weight", "mlp_norm.scale"),
    transposed("mlp.gate_proj.weight", "mlp.gate.kernel"),
    transposed("mlp.up_proj.weight", "mlp.up.kernel"),
    transposed("mlp.down_proj.weight", "mlp.down.kernel"),
)
# Old checkpoints store the frequencies of the rotary embedding.
_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class Llama(Family):
    """`LlamaForCausalLM`, without rope scaling and biases.

    Source of the architecture: Touvron et al., "LLaMA: Open and efficient foundation language models",
    arXiv 2302.13971; grouped heads as in "Llama 2", arXiv 2307.09288.
    """

    architecture = "LlamaForCausalLM"

    def read_config(self, published: PublishedConfig) -> DecoderConfig:
        """One layer of softmax attention, repeated."""
        width, heads = published.get("hidden_size", int), published.get("num_attention_heads", int)
        size = published.get("head_dim", int, width // max(heads, 1))
        base, fraction = read_rope(published)
        if fraction != 1:
            raise NotImplementedError(f"config.json: partial_rotary_factor = {fraction} is not of LlamaForCausalLM")
        attention = SoftmaxAttentionConfig(
            heads=heads,
            kv_heads=published.get("num_key_value_heads", int, heads),
            key_size=size,
            value_size=size,
            rope_base=base,
            capacity=published.get("max_position_embeddings", int),
        )
        published.require("hidden_act", "silu", "another activation in the SwiGLU", default="silu")
        for key in ("attention_bias", "mlp_bias"):
            published.require(key, False, "biases", default=False)
        published.require("attention_dropout", 0.0, "dropout", default=0.0)
        published.require("sliding_window", None, "attention to a window")
        published.ignore("is_llama_config", "pretraining_tp")
        return DecoderConfig(
            vocab_size=published.get("vocab_size", int),
            d_model=width,
            layers=(attention,) * published.get("num_hidden_layers", int),
            hidden=published.get("intermediate_size", int),
            tie_embeddings=published.get("tie_word_embeddings", bool, False),
            norm_eps=published.get("rms_norm_eps", float, 1e-6),
            init_std=published.get("initializer_range", float, 0.02),
        )

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of transformers' LlamaConfig."""
        attention = check_llama(config)
        size, _ = attention.head_sizes(config.d_model)
        return {
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "intermediate_size": config.hidden,
            "num_hidden_layers": len(config.layers),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.groups,
            "head_dim": size,
            "max_position_embeddings": attention.capacity,
            # Releases before and after transformers 5 look for the base in different places.
            "rope_theta": attention.rope_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": attention.rope_base},
            "rms_norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "initializer_range": config.init_std,
        }

    def entries(self, config: DecoderConfig) -> Sequence[Entry]:
        """Embedding, final norm, output map unless it is tied, and nine tensors a layer."""
        head = () if config.tie_embeddings else (transposed(HEAD, "head.kernel"),)
        layers = [
            entry.under(f"model.layers.{index}.", f"layers.{index}.")
            for index in range(len(config.layers))
            for entry in LAYER
        ]
        return [*OUTSIDE, *head, *layers]

    def copies(self, config: DecoderConfig) -> Mapping[str, str]:
        """Some files repeat a tied embedding as the output map."""
        return {HEAD: EMBEDDING} if config.tie_embeddings else {}

    def is_derived(self, name: str) -> bool:
        """Frequencies of the rotary embedding."""
        return _FREQUENCIES.fullmatch(name) is not None


def read_rope(published: PublishedConfig, default_fraction: float = 1.0) -> tuple[float, float]:
    """Base and rotated share of a rotary embedding without scaling, in the form of transformers 5 or of earlier ones.

    Raises:
        NotImplementedError: if the frequencies are scaled or turned another way.
    """
    base = published.get("rope_theta", float, 10000.0)
    fraction = published.get("partial_rotary_factor", float, default_fraction)
    published.require("rope_scaling", None, "scaled rotary frequencies")
    published.require("rope_interleaved", False, "rotation of neighbouring channels", default=False)
    rope = dict(published.get("rope_parameters", dict, {}))
    kind, base = rope.pop("rope_type", "default"), rope.pop("rope_theta", base)
    fraction = rope.pop("partial_rotary_factor", fraction)
    if kind != "default" or rope:
        raise NotImplementedError(
            f"config.json: rope_parameters = {published.get('rope_parameters', dict)!r} needs scaled rotary "
            "frequencies, which the decoder has not"
        )
    return float(base), float(fraction)


def check_llama(config: DecoderConfig) -> SoftmaxAttentionConfig:
    """The attention of all layers, if the decoder is a Llama.

    Raises:
        NotImplementedError: names what Llama has not.
    """
    first = config.layers[0]
    if not isinstance(first, SoftmaxAttentionConfig):
        raise NotImplementedError(f"layers: LlamaForCausalLM has softmax attention only, this model {first.name}")
    if other := [i for i, layer in enumerate(config.layers) if layer != first]:
        raise NotImplementedError(f"layers: LlamaForCausalLM has equal layers, here {other} differ from the first")
    if not config.hidden:
        raise NotImplementedError("hidden: LlamaForCausalLM has a SwiGLU in every layer, this model has none")
    key_size, value_size = first.head_sizes(config.d_model)
    # What may differ from the attention of Llama without changing what it computes, or has a key in config.json.
    free = ("heads", "kv_heads", "key_size", "value_size", "rope_base", "capacity", "norm_eps", "implementation")
    if first.scale == key_size**-0.5:
        free += ("scale",)
    llama = SoftmaxAttentionConfig(**{name: getattr(first, name) for name in free})
    names = [field.name for field in dataclasses.fields(first)]
    wrong = [f"{name} = {getattr(first, name)!r}" for name in names if getattr(first, name) != getattr(llama, name)]
    if value_size != key_size:
        wrong.append(f"values of size {value_size} and keys of size {key_size}")
    if wrong:
        raise NotImplementedError(f"layers: LlamaForCausalLM has no attention with {', '.join(wrong)}")
    return first
