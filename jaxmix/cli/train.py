"""`jaxmix train`: train a language model, then judge it; or go on with a run that was interrupted."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console

from jaxmix.cli.allocator import keep_freed_memory
from jaxmix.cli.report import report
from jaxmix.models import DecoderConfig
from jaxmix.train import TRAIN_PRESETS, TrainConfig, fit, get_train_preset
from jaxmix.train.config import merge, read_json
from jaxmix.train.loop import sharing_devices
from jaxmix.train.progress import Progress


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """Arguments of `jaxmix train`: a preset, a file over it, flags over both.

    Attributes:
        preset: a named run.
        config: a JSON file in the form of the config.json that every run leaves in its directory; it may be partial
            where a preset fills the rest.
        directory: of the run; runs/PRESET, or runs/ and the name of the file, by default. A run that is there is gone
            on with.
        report: judge and sample the model at the end.
        run: the configuration.
    """

    preset: Annotated[str | None, tyro.conf.Positional] = None
    config: Path | None = None
    directory: Path | None = None
    report: bool = True
    run: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=lambda: TRAIN_PRESETS["quickstart"])


def run(arguments: Sequence[str]) -> int:
    """Trains; the status is 130 if the run was interrupted."""
    chosen = parse(arguments)
    directory = chosen.directory or Path("runs") / (chosen.config.stem if chosen.config else chosen.preset or "run")
    console = Console()
    keep_freed_memory()
    _split_processor(chosen.run.data.batch_size)
    with Progress(console) as progress:
        result = fit(chosen.run, directory, watcher=progress)
    if result.status == "interrupted":
        console.print(f"Interrupted; step {result.step:,} is saved. The same command goes on from there.")
        return 130
    if result.status == "already finished":
        console.print(f"{directory} is finished: all {result.step:,} updates were made. Nothing is trained again.")
    if chosen.report:
        report(directory, console)
    return 0


def parse(arguments: Sequence[str]) -> TrainArguments:
    """Reads the arguments: flags win over the file, the file over the preset.

    Raises:
        ValueError: if there is neither preset nor file, or one of them is wrong.
    """
    preset = arguments[0] if arguments and not arguments[0].startswith("-") else None
    asks_help = any(word in ("-h", "--help") for word in arguments)
    config = _value_of("--config", arguments)
    if preset is None and config is None and not asks_help:
        raise ValueError(f"train: expected a preset ({', '.join(TRAIN_PRESETS)}) or --config FILE, got neither")
    base = {} if preset is None and config else get_train_preset(preset or "quickstart").to_dict()
    if config is not None:
        base = merge(base, read_json(config))
    default = TrainArguments(preset=preset, run=TrainConfig.from_dict(base))
    return tyro.cli(
        TrainArguments,
        prog="jaxmix train",
        args=arguments,
        default=default,
        description=__doc__,
        registry=_registry(),
    )


def _split_processor(batch_size: int) -> None:
    """Makes a device of each processor core, so that a batch is shared out to them.

    The small operations of a small model do not fill several cores by themselves.
    """
    try:
        jax.config.update("jax_num_cpu_devices", sharing_devices(batch_size, os.cpu_count() or 1))
    except RuntimeError:
        return  # a program that has used jax before it calls `run` keeps its devices


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    for word, following in itertools.pairwise([*arguments, None]):
        if word == flag:
            return following
        if word is not None and word.startswith(flag + "="):
            return word.removeprefix(flag + "=")
    return None


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Lets `--model` take a preset's name, or a JSON file with a decoder's fields."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def _model(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if info.type != (DecoderConfig | str):
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="PRESET|FILE",
            instance_from_str=lambda words: _read_model(words[0]),
            is_instance=lambda value: isinstance(value, DecoderConfig | str),
            str_from_instance=lambda value: [value if isinstance(value, str) else _describe(value)],
        )

    return registry


def _read_model(word: str) -> DecoderConfig | str:
    return DecoderConfig.from_dict(read_json(word)) if word.endswith(".json") else word


def _describe(model: DecoderConfig) -> str:
    return f"{len(model.layers)}-layers-of-width-{model.d_model}"
