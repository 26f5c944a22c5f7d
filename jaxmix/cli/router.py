"""`jaxmix router`: which chunks of a text the NAtS-L layers of a trained model keep in softmax attention."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from jaxmix.arrays import check_count
from jaxmix.data.tokenizers import Tokenizer
from jaxmix.evaluation.router import RouterMap, router_map
from jaxmix.evaluation.router_plots import plot_cache, plot_router_map
from jaxmix.models import Decoder
from jaxmix.train.run import load_run


@dataclass(frozen=True, kw_only=True)
class RouterArguments:
    """Arguments of `jaxmix router`.

    Attributes:
        directory: of a training run, or one of its checkpoints (RUN/checkpoints/STEP).
        text: file with the text, read as one document.
        out: directory of the pictures router_map.png and router_cache.png; RUN/router by default.
        length: the most tokens to read; all by default.
        json: print JSON.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    text: Path
    out: Path | None = None
    length: int | None = None
    json: bool = False


def run(arguments: Sequence[str]) -> int:
    """Reads the text, draws the pictures and prints the fractions."""
    chosen = tyro.cli(RouterArguments, prog="jaxmix router", args=arguments, description=__doc__)
    if chosen.length is not None:
        check_count("length", chosen.length)
    if not chosen.text.is_file():
        raise ValueError(f"text: expected a file, got {str(chosen.text)!r}")
    directory, model, tokenizer = _load(chosen.directory)
    tokens = np.concatenate([[tokenizer.bos_id], *tokenizer.encode_batch([chosen.text.read_text("utf-8")])])
    found = router_map(model, tokens[: chosen.length])
    out = chosen.out or directory / "router"
    out.mkdir(parents=True, exist_ok=True)
    pictures = [out / "router_map.png", out / "router_cache.png"]
    title = f"{directory.name} reads {found.tokens:,} tokens of {chosen.text.name}"
    plot_router_map(found, pictures[0], title=f"Where chunks go: {title}")
    plot_cache(found, pictures[1], title=f"What is remembered: {title}")
    if chosen.json:
        print(json.dumps({**describe(found), "pictures": [str(file) for file in pictures]}, indent=2))
    else:
        _print(found, pictures, title, Console())
    return 0


def _load(path: Path) -> tuple[Path, Decoder, Tokenizer]:
    """The run's directory, the model and its tokenizer."""
    path = path.expanduser().resolve()
    step = int(path.name) if path.parent.name == "checkpoints" and path.name.isdecimal() else None
    directory = path if step is None else path.parents[1]
    model, tokenizer, _ = load_run(directory, step=step)
    return directory, model, tokenizer


def describe(found: RouterMap) -> dict[str, Any]:
    """The routes and their cost as plain values."""
    positions = found.positions
    layers = [
        {
            "layer": x.layer,
            "chunk_size": x.chunk_size,
            "softmax_fraction": float(x.fractions.mean()),
            "softmax_fraction_by_head": x.fractions.tolist(),
            "softmax": x.softmax.astype(int).tolist(),
            "pages": x.pages(positions).tolist(),
            "page_bytes": x.page_bytes,
            "capacity_pages": x.capacity,
        }
        for x in found.layers
    ]
    cache = {
        "tokens": positions.tolist(),
        "kept_bytes": found.kept_bytes.tolist(),
        "full_softmax_bytes": found.full_bytes.tolist(),
        "fixed_bytes": found.fixed_bytes,
    }
    return {"tokens": found.tokens, "layers": layers, "cache": cache}


def _print(found: RouterMap, pictures: Sequence[Path], title: str, console: Console) -> None:
    heads = max(layer.softmax.shape[0] for layer in found.layers)
    table = Table(title=f"Fraction of the chunks kept by softmax attention; {title}", title_justify="left")
    for name in ("layer", "all heads", *(f"head {head}" for head in range(heads)), "pages", "of room for"):
        table.add_column(name, justify="right")
    for layer in found.layers:
        shares = [f"{share:.2f}" for share in layer.fractions]
        shares += [""] * (heads - len(shares))
        kept = f"{layer.softmax.sum():,}"
        table.add_row(str(layer.layer), f"{layer.fractions.mean():.2f}", *shares, kept, f"{layer.capacity:,}")
    console.print(table)
    kept, full = int(found.kept_bytes[-1]), int(found.full_bytes[-1])
    console.print(
        f"These pages take {kept:,} bytes; keeping all would take {full:,} ({kept / full:.0%}). "
        f"Linear states and open chunks take {found.fixed_bytes:,} at every length.",
        highlight=False,
    )
    for name, file in zip(("router map", "cache size"), pictures, strict=True):
        console.print(f"{name}     {file}", highlight=False, soft_wrap=True)
