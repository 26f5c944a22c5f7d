"""Pictures of how a text was routed."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from jaxmix.evaluation.router import LayerRoutes, RouterMap

_LINEAR, _SOFTMAX = "#dbe4ee", "#1f4e8c"
_FIXED, _FULL = "#9aa5b1", "#b3541e"
# From so many layers on, only the first, one in the middle and the last are named: colours go from dark to bright.
_MANY_LAYERS = 9
# With more rows of heads than this, rows are low and have no numbers.
_MANY_ROWS = 40


def plot_router_map(found: RouterMap, file: Path, *, title: str) -> None:
    """Draws a row for every layer and head, and along it the text, coloured by where its chunks went.

    Args:
        found: what `router_map` gave.
        file: the PNG.
        title: of the picture.
    """
    heads = [layer.softmax.shape[0] for layer in found.layers]
    many = sum(heads) > _MANY_ROWS
    row = 0.12 if many else 0.24
    figure = Figure(figsize=(10, 1.5 + row * sum(heads) + 0.12 * len(heads)), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.035)  # pyright: ignore[reportOptionalMemberAccess, reportCallIssue]
    grid = figure.subplots(len(heads), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heads})
    for axes, layer in zip(grid[:, 0], found.layers, strict=True):
        _draw_layer(axes, layer, many=many)
    grid[0, 0].set_title("chunks kept", loc="right", fontsize=8, pad=3)
    last = grid[-1, 0]
    last.set_xlim(0, found.tokens)
    last.tick_params(axis="x", bottom=True, labelbottom=True)
    last.set_xlabel("position in the text (tokens)")
    figure.supylabel("layer and head", fontsize=10)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    handles = [
        Patch(facecolor=_SOFTMAX, label="kept by softmax attention"),
        Patch(facecolor=_LINEAR, label="written to the linear state"),
    ]
    figure.legend(handles=handles, loc="outside lower right", ncols=2, frameon=False, fontsize=9)
    figure.savefig(file, dpi=130)


def _draw_layer(axes: Any, layer: LayerRoutes, *, many: bool) -> None:
    heads, chunks = layer.softmax.shape
    colours = ListedColormap([_LINEAR, _SOFTMAX])
    axes.pcolormesh(
        np.arange(chunks + 1) * layer.chunk_size, np.arange(heads + 1), layer.softmax, cmap=colours, vmin=0, vmax=1
    )
    for head in range(1, heads):
        axes.axhline(head, color="white", linewidth=0.4 if many else 1)
    axes.invert_yaxis()
    axes.set_yticks(np.arange(heads) + 0.5, [] if many else [str(head) for head in range(heads)], fontsize=7)
    axes.tick_params(length=0, bottom=False)
    axes.set_ylabel(f"layer {layer.layer}", rotation=0, ha="right", va="center", fontsize=9)
    axes.spines[:].set_visible(False)
    share = axes.secondary_yaxis("right")
    share.set_yticks([heads / 2], [f"{100 * layer.softmax.mean():.0f} %"], fontsize=8)
    share.tick_params(length=0)
    share.spines[:].set_visible(False)


def plot_cache(found: RouterMap, file: Path, *, title: str) -> None:
    """Draws over the text how many pages each layer keeps, and the bytes of all beside full softmax attention.

    Args:
        found: what `router_map` gave.
        file: the PNG.
        title: of the picture.
    """
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    pages, held = figure.subplots(1, 2)
    at = found.positions
    shades = colormaps["viridis"](np.linspace(0, 0.9, len(found.layers)))
    many = len(found.layers) >= _MANY_LAYERS
    for number, (layer, colour) in enumerate(zip(found.layers, shades, strict=True)):
        shown = not many or number in (0, len(found.layers) // 2, len(found.layers) - 1)
        label = f"layer {layer.layer}" if shown else None
        pages.plot(at, layer.pages(at), drawstyle="steps-post", color=colour, linewidth=1.6, label=label)
    pages.set(ylabel="pages (one chunk of one head)", title="kept by each layer")
    unit, scale = _unit(max(int(found.full_bytes[-1]), found.fixed_bytes))
    fixed = np.full(len(at), found.fixed_bytes / scale)
    kept = fixed + found.kept_bytes / scale
    held.fill_between(
        at, 0, fixed, step="post", color=_FIXED, alpha=0.6, linewidth=0, label="linear states, open chunk"
    )
    held.fill_between(at, fixed, kept, step="post", color=_SOFTMAX, linewidth=0, label="pages kept")
    held.plot(
        at,
        found.full_bytes / scale,
        drawstyle="steps-post",
        color=_FULL,
        linewidth=1.8,
        label="full softmax attention in these layers",
    )
    held.set(ylabel=unit, title="held by all NAtS-L layers for one stream")
    for axes in (pages, held):
        axes.set_xlabel("position in the text (tokens)")
        axes.set_xlim(0, found.tokens)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
        axes.legend(frameon=False, loc="upper left", fontsize=9)
    pages.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.savefig(file, dpi=130)


def _unit(largest: int) -> tuple[str, float]:
    for name, size in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if largest >= size:
            return name, size
    return "bytes", 1.0
