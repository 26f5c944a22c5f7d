"""Table and plot of what was measured on text."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from recall_report import row, spread

from jaxmix.evaluation.router import LayerRoutes, RouterMap
from jaxmix.evaluation.router_plots import plot_router_map

Run = dict[str, Any]


def table(runs: list[Run]) -> str:
    """Bits per byte at the training length, then by position in longer windows; mean ± deviation over seeds."""
    groups = _groups(runs)
    beyond, length = len(runs[0]["by_position"]), runs[0]["settings"]["task"]["length"]
    header = "mixer", "parameters", "state, kB", "bits per byte", "seeds", "nats at the end of training"
    lines = row(*header)
    for name, group in groups.items():
        facts = f"{group[0]['parameters']:,}", f"{group[0]['state_bytes'] / 1000:.0f}"
        seeds = ", ".join(f"{run['bits_per_byte']:.4f}" for run in group)
        fitted = spread([run["losses"][-1] for run in group])
        lines += row(name, *facts, spread([run["bits_per_byte"] for run in group], 4), seeds, fitted)[:1]

    stretches = [(0, 1)] + [(2**i, 2 ** (i + 1)) for i in range(beyond.bit_length() - 1)]
    lines += ["", f"Windows of {beyond * length} tokens, by position; what is beyond {length} was never trained:", ""]
    lines += row("mixer", *(f"{a * length} to {b * length - 1}" for a, b in stretches), "last minus first")
    for name, group in groups.items():
        means = [[statistics.mean(run["by_position"][a:b]) for run in group] for a, b in stretches]
        grown = [last - first for first, last in zip(means[0], means[-1], strict=True)]
        lines += row(name, *(spread(values) for values in means), spread(grown))[:1]

    routed = {name: group for name, group in groups.items() if "softmax_fraction" in group[0]}
    if routed:
        lines += ["", "Part of the chunks that each head keeps for softmax attention, by layer and seed:", ""]
        lines += row("mixer", "seed", "layer: heads")
        for name, group in routed.items():
            for run in group:
                kept = run["softmax_fraction"].items()
                layers = (f"{layer}: {' '.join(f'{x:.2f}' for x in heads)}" for layer, heads in kept)
                lines += row(name, str(run["seed"]), "; ".join(layers))[:1]
    return "\n".join(lines)


def plot(runs: list[Run], file: Path) -> None:
    """Bits per byte of every mixer at the training length, and by position in longer windows.

    Beside the file go pictures of how NAtS-L routes the first long window, router-MIXER.png, where a run has that.
    """
    groups = _groups(runs)
    beyond, length = len(runs[0]["by_position"]), runs[0]["settings"]["task"]["length"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 1.8 + 0.28 * len(groups)), layout="constrained")
    colors = plt.get_cmap("turbo")
    for i, (name, group) in enumerate(groups.items()):
        color, y = colors((i + 0.5) / len(groups)), len(groups) - 1 - i
        bits = [run["bits_per_byte"] for run in group]
        left.plot(bits, [y] * len(bits), "o", color=color, alpha=0.5)
        left.plot(statistics.mean(bits), y, "|", color=color, markersize=14, markeredgewidth=2)
        curve = [statistics.mean(run["by_position"][j] for run in group) for j in range(beyond)]
        right.plot([(j + 0.5) * length for j in range(beyond)], curve, marker=".", color=color, label=name)
    left.set_yticks(range(len(groups)), list(groups)[::-1])
    left.set_xlabel(f"bits per byte, windows of {length}; points are seeds")
    left.grid(axis="x", alpha=0.3)
    right.axvline(length, color="grey", linestyle=":", linewidth=1)
    right.set_yscale("log")
    ticks = [1.8, 2, 2.5, 3, 4, 5, 6]
    right.set_yticks(ticks, list(map(str, ticks)))
    right.minorticks_off()
    right.set_xlabel("position in the window (dotted: training length)")
    right.set_ylabel("bits per byte")
    figure.legend(fontsize=8, loc="outside right center")
    figure.savefig(file, dpi=150)
    plt.close(figure)
    for run in runs:
        if "routes" in run:
            name = run["mixer"]
            picture = file.with_name(f"router-{name}.png")
            plot_router_map(_routes(run["routes"]), picture, title=f"{name}, seed {run['seed']}")


def _routes(stored: dict[str, Any]) -> RouterMap:
    """What text.py stored."""
    layers = []
    for layer in stored["layers"]:
        softmax = np.array([list(map(int, head)) for head in layer["softmax"]], bool)
        layers.append(LayerRoutes(**(layer | {"softmax": softmax})))
    return RouterMap(**(stored | {"layers": tuple(layers)}))


def _groups(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by mixer, best first."""
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        groups.setdefault(run["mixer"], []).append(run)
    return dict(sorted(groups.items(), key=lambda item: statistics.mean(run["bits_per_byte"] for run in item[1])))
