"""`jaxmix import`: make a run of a published checkpoint, to generate from, evaluate, train on or export."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxmix.models import parameter_count
from jaxmix.train.weights import import_run


@dataclass(frozen=True, kw_only=True)
class ImportArguments:
    """Arguments of `jaxmix import`.

    Attributes:
        source: directory with config.json, model.safetensors (or its parts with model.safetensors.index.json) and
            tokenizer.json.
        run_directory: the run to make; must be empty or not exist.
        tokenizer: a tokenizer.json or a directory with one, in place of the source's.
        param_dtype: dtype of the parameters; that of the checkpoint by default. float32 is for training.
        dtype: compute dtype; that of the parameters by default.
        capacity: slots of every key/value cache, allocated for every stream; max_position_embeddings by default.
    """

    source: Annotated[Path, tyro.conf.Positional]
    run_directory: Annotated[Path, tyro.conf.Positional]
    tokenizer: Path | None = None
    param_dtype: str | None = None
    dtype: str | None = None
    capacity: int | None = None


def run(arguments: Sequence[str]) -> int:
    """Imports and says what there is now."""
    chosen = tyro.cli(ImportArguments, prog="jaxmix import", args=arguments, description=__doc__)
    model = import_run(
        chosen.source,
        chosen.run_directory,
        tokenizer=chosen.tokenizer,
        dtype=chosen.dtype,
        param_dtype=chosen.param_dtype,
        capacity=chosen.capacity,
    )
    config = model.config
    print(
        f"{chosen.run_directory}: {parameter_count(config):,} parameters in {config.param_dtype}, "
        f"{len(config.layers)} layers\nTo see it write: jaxmix generate {chosen.run_directory} --prompt TEXT"
    )
    return 0
