"""The loss curve of a run as a picture, with what its routers chose."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

_TRAIN, _VALIDATION, _YARDSTICK = "#9db7d5", "#1f4e8c", "#b3541e"


def plot_losses(
    records: Sequence[Mapping[str, Any]],
    file: Path,
    *,
    bytes_per_token: Mapping[str, float],
    yardsticks: Mapping[str, float],
    title: str,
) -> None:
    """Draws training and validation loss in bits per byte over the updates, with the yardsticks as lines.

    Below it, for a model with NAtS-L layers, the fraction of the chunks that each layer routes to softmax attention.

    Args:
        records: of the metrics file.
        file: the PNG.
        bytes_per_token: split to mean size of a token, which turns nats per token into bits per byte.
        yardsticks: label to bits per byte.
        title: of the picture.

    Raises:
        ValueError: if no record has a loss.
    """
    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    validation = [(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]
    if not train:
        raise ValueError("records: expected at least one with a loss, got none")
    routed = [(r["step"], r["softmax_fraction"]) for r in records if "softmax_fraction" in r]
    figure = Figure(figsize=(8, 6.8 if routed else 4.8), layout="constrained")
    axes, *below = figure.subplots(
        2 if routed else 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [5, 2][: 2 if routed else 1]}
    )[:, 0]
    steps, losses = _curve(train, bytes_per_token["train"])
    axes.plot(steps, losses, color=_TRAIN, linewidth=0.8, alpha=0.6)
    axes.plot(steps, _smooth(losses), color=_TRAIN, linewidth=2, label="training (smoothed)")
    if validation:
        axes.plot(
            *_curve(validation, bytes_per_token["validation"]),
            color=_VALIDATION,
            linewidth=2,
            marker="o",
            markersize=4,
            label="validation (sample of windows)",
        )
    for number, (label, bits) in enumerate(sorted(yardsticks.items(), key=lambda item: item[1])):
        axes.axhline(bits, color=_YARDSTICK, linewidth=1, linestyle=(0, (4, 2 + 2 * number)))
        axes.annotate(
            f"{label}  {bits:.2f}",
            (1, bits),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3 if number else -3),
            textcoords="offset points",
            ha="right",
            va="bottom" if number else "top",
            color=_YARDSTICK,
            fontsize=9,
        )
    shown = [*losses[len(losses) // 20 :], *yardsticks.values()]
    margin = 0.08 * (max(shown) - min(shown)) or 0.1
    axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set_xlim(0, steps[-1])
    axes.set(ylabel="bits per byte")
    axes.set_title(title, fontsize=11, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    for lower in below:
        _plot_fractions(lower, routed)
    (below or [axes])[-1].set_xlabel("update")
    figure.savefig(file, dpi=130)


def _plot_fractions(axes: Any, routed: Sequence[tuple[int, Mapping[str, Sequence[float]]]]) -> None:
    """A line for every layer, from dark to bright with its number."""
    layers = list(routed[-1][1])
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(layers)))
    steps = [step for step, _ in routed]
    named = {layers[0], layers[len(layers) // 2], layers[-1]} if len(layers) > 6 else layers
    for layer, colour in zip(layers, shades, strict=True):
        values = [sum(found[layer]) / len(found[layer]) for _, found in routed]
        label = f"layer {layer}" if layer in named else None
        axes.plot(steps, values, color=colour, linewidth=1.6, marker="o", markersize=3, label=label)
    axes.set(ylim=(-0.03, 1.03), ylabel="fraction of chunks\nin softmax attention")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)


def _curve(points: Sequence[tuple[int, float]], bytes_per_token: float) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [loss / math.log(2) / bytes_per_token for _, loss in points]


def _smooth(values: Sequence[float], part: float = 0.03) -> list[float]:
    """An average over neighbours on both sides, `part` of the curve in all, fewer at its ends."""
    reach = max(1, round(part * len(values) / 2))
    windows = (
        values[max(0, i - min(reach, i, len(values) - 1 - i)) : i + min(reach, i, len(values) - 1 - i) + 1]
        for i in range(len(values))
    )
    return [sum(window) / len(window) for window in windows]
