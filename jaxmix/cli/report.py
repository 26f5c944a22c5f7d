"""The end of `jaxmix train`: how good the model is, beside yardsticks; a picture; a sample; what to try next."""

import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxmix.cli.generate import continuation
from jaxmix.data import Corpus, Manifest, load_corpus
from jaxmix.evaluation import BitsPerByte, Yardsticks, bits_per_byte, yardsticks
from jaxmix.generate import Sampling
from jaxmix.models import DecoderConfig
from jaxmix.train import RunDirectory, TrainConfig, load_run, read_metrics
from jaxmix.train.plots import plot_losses

SAMPLE_PROMPT = "My fellow Americans, "
SAMPLE_TOKENS = 120


def report(directory: Path, console: Console) -> None:
    """Judges the model of a finished run and prints what there is to know.

    Args:
        directory: of the run.
        console: where to.
    """
    run = RunDirectory(directory)
    model, tokenizer, config = load_run(directory)
    corpus = load_corpus(config.data.corpus, validation_fraction=config.data.validation_fraction)
    with console.status("compressing and counting for the yardsticks"):
        measured_yardsticks = _yardsticks(run, corpus)
    with console.status("validating on every byte"):
        result = bits_per_byte(
            model,
            tokenizer,
            corpus.validation,
            context="windows" if any(layer.has_cache for layer in config.decoder.layers) else "stream",
            length=config.data.length,
        )
    _save_evaluation(run, result)
    console.print()
    console.print(comparison(result, measured_yardsticks, corpus))
    console.print(verdict(result, measured_yardsticks), highlight=False)
    _plot(run, config, measured_yardsticks)
    console.print("\n[bold]A sample[/], drawn one token at a time from a state of constant size:\n")
    sampling = Sampling(temperature=0.8, top_p=0.95)
    console.print(SAMPLE_PROMPT, end="", style="bold", markup=False, highlight=False)
    for piece in continuation(model, tokenizer, SAMPLE_PROMPT, max_tokens=SAMPLE_TOKENS, sampling=sampling, seed=0):
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    _print_next(run, config, console)


def comparison(result: BitsPerByte, found: Yardsticks, corpus: Corpus) -> Table:
    """The table of bits per byte, best first. The yardsticks know all training documents of the corpus."""
    fitted = f"all {len(corpus.train)} training documents"
    orders = f"orders {min(found.byte_model)} to {max(found.byte_model)}"
    rows = [
        ("[bold]this model[/]", result.bits_per_byte, f"each token from {result.context}"),
        ("xz -9e after the training text", found.xz_after_training, f"what the text adds behind {fitted}"),
        (
            f"byte model of order {found.best_order}",
            found.best_byte_model,
            f"counts of {fitted}; best of {orders}",
        ),
        ("xz -9e", found.xz_alone, "of the validation text alone"),
    ]
    table = Table(
        title=f"Validation: all {result.text_bytes:,} bytes of {len(corpus.validation)} documents", title_justify="left"
    )
    table.add_column("predictor")
    table.add_column("bits per byte", justify="right")
    table.add_column("how")
    for name, bits, how in sorted(rows, key=lambda row: row[1]):
        table.add_row(name, f"{bits:.3f}", how)
    return table


def verdict(result: BitsPerByte, found: Yardsticks) -> str:
    """One sentence: what the model beats, and by how much."""
    bits = result.bits_per_byte
    named = {
        "xz after the training text": found.xz_after_training,
        "the byte model": found.best_byte_model,
        "xz alone": found.xz_alone,
    }
    beaten = [f"{name} by {100 * (1 - bits / other):.0f} %" for name, other in named.items() if bits < other]
    missed = [name for name, other in named.items() if bits >= other]
    parts = [f"beats {', '.join(beaten)}"] if beaten else []
    parts += [f"does not beat {', '.join(missed)}"] if missed else []
    return f"The model {' and '.join(parts)}."


def _yardsticks(run: RunDirectory, corpus: Corpus) -> Yardsticks:
    """Measured once a run: they depend on the corpus alone."""
    if run.yardsticks.is_file():
        fields = json.loads(run.yardsticks.read_text("utf-8"))
        fields["byte_model"] = {int(order): bits for order, bits in fields["byte_model"].items()}
        return Yardsticks(**fields)
    found = yardsticks([d.text for d in corpus.train], [d.text for d in corpus.validation])
    run.yardsticks.write_text(json.dumps(dataclasses.asdict(found), indent=2) + "\n", "utf-8")
    return found


def _save_evaluation(run: RunDirectory, result: BitsPerByte) -> None:
    fields = {"bits_per_byte": result.bits_per_byte, "nats_per_token": result.nats_per_token}
    run.evaluation.write_text(json.dumps({**fields, **dataclasses.asdict(result)}, indent=2) + "\n", "utf-8")


def _plot(run: RunDirectory, config: TrainConfig, found: Yardsticks) -> None:
    splits = Manifest.load(run.data).splits
    assert isinstance(config.model, DecoderConfig)
    plot_losses(
        read_metrics(run.metrics),
        run.plot,
        bytes_per_token={name: split.bytes_per_token for name, split in splits.items()},
        yardsticks={
            "xz -9e after the training text": found.xz_after_training,
            f"byte model of order {found.best_order}": found.best_byte_model,
        },
        title=f"{run.path.name}: {len(config.model.layers)} layers of {_mixers(config.model)}, "
        f"width {config.model.d_model}, {config.data.corpus}",
    )


def _mixers(model: DecoderConfig) -> str:
    return " and ".join(dict.fromkeys(layer.name for layer in model.layers))


def _print_next(run: RunDirectory, config: TrainConfig, console: Console) -> None:
    # As this process was called, so that the lines can be pasted where no environment is activated.
    jaxmix = sys.argv[0] if Path(sys.argv[0]).name == "jaxmix" else "python -m jaxmix"
    lines = [
        f"loss curve     {run.plot}",
        f"everything     {run.path}/ (config.json, metrics.jsonl, evaluation.json, checkpoints, tokenizer)",
        "",
        "[bold]Next[/]",
        f'  {jaxmix} generate {run.path} --prompt "The state of the Union is" --max-tokens 300',
        f"  {jaxmix} info {run.path}",
        f"  {jaxmix} verify",
        f"  {jaxmix} train --config {run.config_file} --directory runs/longer --steps {10 * config.steps}",
        f"  {jaxmix} train --config {run.config_file} --directory runs/mine --data.corpus FILE_OR_FOLDER_OF_TEXT",
    ]
    console.print("\n" + "\n".join(lines), highlight=False, soft_wrap=True)
