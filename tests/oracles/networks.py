"""Vectors of whole layers and models of transformers, with every weight drawn at random."""

from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from tests.oracles.precision import double_precision, generator, relative_rms, short

HIDDEN, VOCABULARY = 32, 96
LAYER_INPUT = (2, 37, HIDDEN)
TOKENS = (2, 33)

MAMBA2 = {
    "hidden_size": HIDDEN,
    "expand": 2,
    "head_dim": 16,
    "num_heads": 4,
    "state_size": 8,
    "conv_kernel": 4,
    "chunk_size": 16,
    "vocab_size": VOCABULARY,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN3_NEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
    "mlp_only_layers": [0, 1, 2, 3],
    "num_experts": 0,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}

LAYERS = {
    "qwen3_next_gated_delta_net": lambda: Qwen3NextGatedDeltaNet(Qwen3NextConfig(**QWEN3_NEXT), layer_idx=0),
    "mamba2_mixer_groups1": lambda: Mamba2Mixer(Mamba2Config(**MAMBA2, n_groups=1), layer_idx=0),
    "mamba2_mixer_groups2": lambda: Mamba2Mixer(Mamba2Config(**MAMBA2, n_groups=2), layer_idx=0),
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama_tied": lambda: LlamaForCausalLM(
        LlamaConfig(**LLAMA, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    ),
    "mamba2": lambda: Mamba2ForCausalLM(Mamba2Config(**MAMBA2, n_groups=1, num_hidden_layers=2)),
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**QWEN3_NEXT)),
}


def draw_weight(name: str, weight: torch.Tensor, rng: np.random.Generator) -> np.ndarray:
    """A value far from every default, at which the layer still remembers for tens of tokens."""
    leaf, shape = name.split(".")[-1], tuple(weight.shape)
    normal = rng.standard_normal(shape)
    if leaf == "A_log":
        return np.log(rng.uniform(0.1, 4.0, shape))
    if leaf == "dt_bias":
        return rng.uniform(-4.0, 0.5, shape)
    if leaf == "D" or "embed" in name:
        return normal
    if weight.ndim == 1 and leaf == "weight":
        return weight.detach().numpy() + 0.4 * normal
    if weight.ndim == 1:
        return 0.4 * normal
    fan_in = np.prod(shape[1:])
    return 1.5 * normal / np.sqrt(fan_in)


def randomise(module: torch.nn.Module, name: str) -> None:
    """Draws every parameter of `module`, shared ones once, in the order of their names."""
    rng = generator(name)
    for key, weight in sorted(module.named_parameters()):
        weight.data = torch.tensor(short(draw_weight(key, weight, rng)))
    module.eval()


@torch.no_grad()
def run_both(module: torch.nn.Module, call, value: np.ndarray) -> tuple[np.ndarray, float]:
    """The float64 result of `call(module, value)`, and how far its float32 result is from it."""
    single = call(module, torch.tensor(value)).numpy()
    module.double()
    wide = torch.tensor(value, dtype=torch.float64) if value.dtype == np.float32 else torch.tensor(value)
    with double_precision():
        result = call(module, wide).numpy()
    return result, relative_rms(single, result)


def layer_vectors(name: str) -> tuple[dict[str, np.ndarray], float]:
    """State dict (`weights.<name>`), input and output of one layer."""
    layer = LAYERS[name]()
    randomise(layer, name)
    arrays = {f"weights.{key}": value.numpy().copy() for key, value in layer.state_dict().items()}
    arrays["input"] = short(generator(f"{name} input").standard_normal(LAYER_INPUT))
    arrays["output"], difference = run_both(layer, lambda module, x: module(x), arrays["input"])
    return arrays, difference


def write_checkpoint(name: str, folder: Path) -> tuple[dict[str, np.ndarray], float]:
    """Saves a float32 checkpoint into `folder`; gives tokens and logits."""
    model = MODELS[name]()
    randomise(model, name)
    model.save_pretrained(folder)
    # Only says that generation has no defaults.
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = generator(f"{name} tokens").integers(0, VOCABULARY, TOKENS)
    logits, difference = run_both(model, lambda module, x: module(x, use_cache=False).logits, tokens)
    return {"tokens": tokens.astype(np.int32), "logits": logits}, difference
