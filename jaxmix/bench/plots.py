"""Rows of the suites of named shapes as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from jaxmix.bench.costs import PASSES
from jaxmix.bench.report import Row

_SUITES = ("anchors", "long")


def plot_rows(rows: Sequence[Row], file: Path) -> bool:
    """Draws milliseconds at the anchor shapes and time per token over the length, a panel a pass.

    Args:
        rows: of any suites; those without a time are left out.
        file: the picture.

    Returns:
        Whether there was anything to draw.
    """
    timed = [row for row in rows if row.suite in _SUITES and "milliseconds" in row.values]
    panels = [(suite, part) for suite in _SUITES for part in PASSES if _select(timed, suite, part)]
    if not panels:
        return False
    suites = [suite for suite in _SUITES if any(suite == name for name, _ in panels)]
    figure = Figure(figsize=(6 * len(PASSES), 5.5 * len(suites)), layout="constrained")
    grid = figure.subplots(len(suites), len(PASSES), squeeze=False)
    names = list(dict.fromkeys(_name(row) for row in timed))
    colours = {name: colormaps["tab20"](i % 20) for i, name in enumerate(names)}
    for axes, suite in zip(grid, suites, strict=True):
        for panel, part in zip(axes, PASSES, strict=True):
            chosen = _select(timed, suite, part)
            shapes = list(dict.fromkeys(row.shape for row in chosen))
            for name in dict.fromkeys(_name(row) for row in chosen):
                own = [row for row in chosen if _name(row) == name]
                panel.plot(
                    [_length(row) if suite == "long" else shapes.index(row.shape) for row in own],
                    [row.values["ns/token" if suite == "long" else "milliseconds"] for row in own],
                    marker="o",
                    linestyle="-" if suite == "long" else "",
                    color=colours[name],
                    label=name,
                )
            panel.set_yscale("log")
            panel.set_title(f"{suite}: {part}")
            panel.grid(visible=True, which="both", alpha=0.2)
            if suite == "long":
                panel.set_xscale("log", base=2)
                panel.set_xlabel("tokens of a sequence")
                panel.set_ylabel("ns per token")
            else:
                panel.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right")
                panel.set_ylabel("milliseconds")
            if chosen:
                panel.legend(fontsize=7)
    figure.savefig(file, dpi=130)
    return True


def _select(rows: Sequence[Row], suite: str, part: str) -> list[Row]:
    return [row for row in rows if row.suite == suite and row.case.endswith(f", {part}")]


def _name(row: Row) -> str:
    return row.case.rpartition(", ")[0]


def _length(row: Row) -> int:
    """Tokens, the second number of the shape."""
    return int(row.shape.split(",")[1])
