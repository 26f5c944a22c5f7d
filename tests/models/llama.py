"""Random checkpoints in the layout of Llama, and what a Llama makes of them, in numpy."""

import json

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 6,
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 20,
    "max_position_embeddings": 32,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 0.03,
    "rope_theta": 50.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 40,
}


def llama_tensors(fields=LLAMA, dtype=np.float32):
    """Random tensors in the layout of LlamaForCausalLM."""
    rng = np.random.default_rng(0)
    width, hidden = fields["hidden_size"], fields["intermediate_size"]
    queries, keys = (fields[f"num_{kind}_heads"] * fields["head_dim"] for kind in ("attention", "key_value"))
    matrices = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    shapes = {"model.embed_tokens.weight": (fields["vocab_size"], width), "model.norm.weight": (width,)}
    if not fields["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (fields["vocab_size"], width)
    for layer in range(fields["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"model.layers.{layer}.{n}_layernorm.weight": (width,) for n in ("input", "post_attention")}
    return {name: rng.normal(0.5, 0.4, shape).astype(dtype) for name, shape in sorted(shapes.items())}


def write(directory, fields, tensors):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def llama_forward(fields, tensors, tokens):
    """Llama in numpy and float64, written from the papers: RMSNorm, RoPE, grouped causal attention, SwiGLU."""
    weights = {name.removeprefix("model."): x.astype(np.float64) for name, x in tensors.items()}
    size, length = fields["head_dim"], tokens.shape[1]
    angle = np.arange(length)[:, None] * fields["rope_theta"] ** (-np.arange(0, size, 2) / size)
    turn = np.exp(1j * angle)[:, None]
    future = np.triu(np.full((length, length), -np.inf), 1)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + fields["rms_norm_eps"]) * weights[name + ".weight"]

    def heads(x, name):
        return (x @ weights[name + ".weight"].T).reshape(*x.shape[:2], -1, size)

    def rotated(x):
        turned = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = weights["embed_tokens.weight"][tokens]
    for layer in range(fields["num_hidden_layers"]):
        name = f"layers.{layer}"
        y = norm(x, f"{name}.input_layernorm")
        q, k = (rotated(heads(y, f"{name}.self_attn.{which}_proj")) for which in "qk")
        k, v = (np.repeat(z, q.shape[2] // z.shape[2], axis=2) for z in (k, heads(y, f"{name}.self_attn.v_proj")))
        scores = np.exp(np.einsum("bthd,bshd->bhts", q, k) / size**0.5 + future)
        mixed = np.einsum("bhts,bshd->bthd", scores / scores.sum(axis=-1, keepdims=True), v)
        x = x + mixed.reshape(*x.shape[:2], -1) @ weights[f"{name}.self_attn.o_proj.weight"].T
        y = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (y @ weights[f"{name}.mlp.{which}_proj.weight"].T for which in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
    head = "embed_tokens.weight" if fields["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "norm") @ weights[head].T


def params(model):
    return jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
