"""`jaxmix export`: write the model of a run as a published checkpoint, config.json and model.safetensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxmix.train.weights import export_run


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Arguments of `jaxmix export`.

    Attributes:
        run_or_checkpoint: directory of a run, for its latest checkpoint, or RUN/checkpoints/STEP.
        target: directory to write; must be empty or not exist.
        dtype: of the tensors; that of the parameters by default.
    """

    run_or_checkpoint: Annotated[Path, tyro.conf.Positional]
    target: Annotated[Path, tyro.conf.Positional]
    dtype: str | None = None


def run(arguments: Sequence[str]) -> int:
    """Exports and says where to."""
    chosen = tyro.cli(ExportArguments, prog="jaxmix export", args=arguments, description=__doc__)
    export_run(chosen.run_or_checkpoint, chosen.target, dtype=chosen.dtype)
    print(f"Wrote {', '.join(sorted(file.name for file in chosen.target.iterdir()))} into {chosen.target}")
    return 0
