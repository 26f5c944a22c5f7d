"""Table and plot of what was measured on recall."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Run = dict[str, Any]


def chosen_runs(runs: list[Run]) -> dict[str, list[Run]]:
    """Of every mixer the runs with the learning rate that is best on the validation sequences; best mixer first."""
    groups: dict[str, dict[float, list[Run]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        groups.setdefault(run["mixer"], {}).setdefault(run["rate"], []).append(run)
    best = {name: max(rates.values(), key=lambda group: _mean(group, "validation")) for name, rates in groups.items()}
    return dict(sorted(best.items(), key=lambda item: -_mean(item[1], "test")))


def table(runs: list[Run]) -> str:
    """Accuracy by number of pairs, by distance with the most pairs, and by learning rate; mean ± deviation."""
    best = chosen_runs(runs)
    pairs = list(runs[0]["test"]["pairs"])
    lines = row("mixer", "parameters", "state, kB", "rate", *(f"{n} pairs" for n in pairs), "mean")
    for name, group in best.items():
        facts = f"{group[0]['parameters']:,}", f"{group[0]['state_bytes'] / 1000:.0f}", f"{group[0]['rate']:g}"
        cells = [spread([run["test"]["pairs"][n] for run in group]) for n in pairs]
        lines += row(name, *facts, *cells, spread([_accuracy(run, "test") for run in group]))[:1]

    lines += ["", f"Queries of {pairs[-1]} pairs by tokens since the key:", ""]
    bins = _bins(runs[0], pairs[-1])
    lines += row("mixer", *(label for _, label in bins))
    for name, group in best.items():
        lines += row(name, *(spread([_at(run, pairs[-1], i) for run in group]) for i, _ in bins))[:1]

    rates = sorted({run["rate"] for run in runs})
    lines += ["", "Mean over pairs by peak learning rate, and nats per query in the last twentieth of training:", ""]
    lines += row("mixer", *(f"{rate:g}" for rate in rates), *(f"nats, {rate:g}" for rate in rates))
    for name in best:
        groups = [[run for run in runs if run["mixer"] == name and run["rate"] == rate] for rate in rates]
        accuracy = [spread([_accuracy(run, "test") for run in group]) for group in groups]
        lines += row(name, *accuracy, *(spread([run["losses"][-1] for run in group]) for group in groups))[:1]
    seeds = {name: [run["seed"] for run in group] for name, group in best.items()}
    lines += ["", "Seeds: " + "; ".join(f"{name} {', '.join(map(str, found))}" for name, found in seeds.items())]
    return "\n".join(lines)


def plot(runs: list[Run], file: Path) -> None:
    """Accuracy of every mixer by number of pairs, and by distance with the most pairs."""
    best = chosen_runs(runs)
    pairs = list(runs[0]["test"]["pairs"])
    bins = _bins(runs[0], pairs[-1])
    by_pairs = [[statistics.mean(run["test"]["pairs"][n] for run in group) for n in pairs] for group in best.values()]
    by_bin = [[statistics.mean(_at(run, pairs[-1], i) for run in g) for i, _ in bins] for g in best.values()]
    size = 5 + 0.7 * (len(pairs) + len(bins)), 1.6 + 0.34 * len(best)
    widths = [len(pairs), len(bins)]
    figure, axes = plt.subplots(1, 2, figsize=size, sharey=True, width_ratios=widths, layout="constrained")
    panels = [
        (by_pairs, pairs, "pairs"),
        (by_bin, [label for _, label in bins], f"tokens since the key, {pairs[-1]} pairs"),
    ]
    for axis, (values, ticks, label) in zip(axes, panels, strict=True):
        image = axis.imshow(values, vmin=0, vmax=1, aspect="auto", cmap="viridis")
        axis.set_xticks(range(len(ticks)), ticks)
        axis.set_xlabel(label)
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                ink = "black" if value > 0.6 else "white"
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ink)
    axes[0].set_yticks(range(len(best)), list(best))
    figure.colorbar(image, ax=axes, label="accuracy, mean over seeds")
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _accuracy(run: Run, held_out: str) -> float:
    return statistics.mean(run[held_out]["pairs"].values())


def _mean(group: list[Run], held_out: str) -> float:
    return statistics.mean(_accuracy(run, held_out) for run in group)


def _bins(run: Run, pairs: str) -> list[tuple[int, str]]:
    """Indices and names of the distances that enough queries have."""
    counts = [asked for _, asked in run["test"]["distances"][pairs]]
    return [(i, f"{2**i}-{2 ** (i + 1) - 1}") for i, asked in enumerate(counts) if asked >= 0.002 * sum(counts)]


def _at(run: Run, pairs: str, i: int) -> float:
    right, asked = run["test"]["distances"][pairs][i]
    return right / asked if asked else float("nan")


def spread(values: list[float], digits: int = 3) -> str:
    """Mean ± standard deviation."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def row(*cells: str) -> list[str]:
    """A row of a table, and the line that goes under it if it is the first."""
    return [f"| {' | '.join(cells)} |", "|" + " - |" * len(cells)]
