"""The directory of a training run: what is where, and what makes a rerun the same run.

config.json       the resolved configuration          data/             token shards and their manifest
tokenizer/        what text was encoded with          checkpoints/      one folder a step
metrics.jsonl     one line a step or evaluation       loss.png          the curve
yardsticks.json   what simple predictors reach        evaluation.json   what the model reached
imported.json     where the first parameters are from, if they were not drawn
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxmix.data.tokenizers import Tokenizer, load_tokenizer
from jaxmix.models import Decoder
from jaxmix.train.checkpoints import Checkpoints
from jaxmix.train.config import TrainConfig, differences
from jaxmix.train.step import split_model


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run, and its configuration.

    Attributes:
        path: the directory.
    """

    path: Path

    config_file = property(lambda self: self.path / "config.json")
    tokenizer = property(lambda self: self.path / "tokenizer")
    data = property(lambda self: self.path / "data")
    checkpoints = property(lambda self: self.path / "checkpoints")
    metrics = property(lambda self: self.path / "metrics.jsonl")
    plot = property(lambda self: self.path / "loss.png")
    yardsticks = property(lambda self: self.path / "yardsticks.json")
    evaluation = property(lambda self: self.path / "evaluation.json")
    imported = property(lambda self: self.path / "imported.json")

    def config(self) -> TrainConfig:
        """The resolved configuration.

        Raises:
            ValueError: if the directory holds no run.
        """
        if not self.config_file.is_file():
            raise ValueError(f"directory: expected a training run with a config.json, got {str(self.path)!r}")
        return TrainConfig.load(self.config_file)

    def check_same(self, config: TrainConfig) -> None:
        """Makes sure that a run that is here already is a run of this configuration.

        Of an imported model that is not trained yet only the decoder has to be the same.

        Raises:
            ValueError: if it is another one; the message names the fields that differ.
        """
        if not self.config_file.is_file():
            return
        here = self.config()
        there, now = here.to_dict(), config.resolve(here.decoder.vocab_size).to_dict()
        if self.imported.is_file() and not self.metrics.is_file():
            there, now = ({"model": fields["model"]} for fields in (there, now))
        differing = differences(there, now)
        if differing:
            raise ValueError(
                f"{self.path} holds a run with another configuration (there -> now):\n  "
                + "\n  ".join(differing)
                + "\nGive the same configuration to go on with it, or another directory, or delete that one."
            )

    def resolve(self, config: TrainConfig, vocab_size: int) -> TrainConfig:
        """The configuration spelled out for the tokenizer's vocabulary, or for that of the model that is here.

        Raises:
            ValueError: if the model that is here has too small a vocabulary.
        """
        here = self.config().decoder.vocab_size if self.config_file.is_file() else vocab_size
        if here < vocab_size:
            raise ValueError(
                f"tokenizer: expected at most the {here} ids of the model in {self.path}, got {vocab_size}"
            )
        return config.resolve(here)


class Metrics:
    """The metrics file of a run, one JSON object a line.

    Args:
        file: where the lines go.
        resume_after: lines of later steps are dropped: they were written after the checkpoint that is gone on from.
    """

    def __init__(self, file: Path, *, resume_after: int) -> None:
        kept = [record for record in read_metrics(file) if record["step"] <= resume_after]
        file.write_text("".join(json.dumps(record) + "\n" for record in kept), "utf-8")
        self._stream = file.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a line; a record has the key "step"."""
        self._stream.write(json.dumps(record) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, none if there is no file; a line cut short by a crash ends them."""
    records = []
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def build_decoder(config: TrainConfig) -> Decoder:
    """The decoder of a resolved configuration with its initial parameters."""
    return Decoder(config.decoder, rngs=nnx.Rngs(config.seed))


def load_run(directory: str | Path, *, step: int | None = None) -> tuple[Decoder, Tokenizer, TrainConfig]:
    """A trained model with its tokenizer.

    Args:
        directory: of a run.
        step: of the checkpoint; the latest by default.

    Returns:
        The decoder with the parameters of the checkpoint, the tokenizer and the run's configuration.

    Raises:
        ValueError: if the directory holds no run or no checkpoint.
    """
    run = RunDirectory(Path(directory).expanduser())
    config = run.config()
    structure, abstract = split_model(nnx.eval_shape(lambda: build_decoder(config)))
    if not run.checkpoints.is_dir():
        raise ValueError(f"directory: expected a run with a checkpoint, found none in {run.path}")
    with Checkpoints(run.checkpoints) as checkpoints:
        params = checkpoints.restore_params(abstract, step)
    return nnx.merge(structure, jax.tree.map(jax.numpy.asarray, params)), load_tokenizer(run.tokenizer), config
