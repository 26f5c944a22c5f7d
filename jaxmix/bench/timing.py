"""Wall-clock medians that a busy or drifting machine disturbs least."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median and the quartiles of `repeats` runs."""

    median: float
    lower: float
    upper: float
    repeats: int


def measure(cases: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]], *, repeats: int) -> dict[str, Timing]:
    """Time every case, one run of each in turn, so that what slows the machine down slows all of them.

    Args:
        cases: name to a compiled function and its arguments. Each runs once before the clock starts.
        repeats: timed runs of each case, >= 1.

    Returns:
        The timing of each case.
    """
    for function, arguments in cases.values():
        jax.block_until_ready(function(*arguments))
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, (function, arguments) in cases.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            seconds[name].append(time.perf_counter() - start)
    return {
        name: Timing(float(np.median(x)), float(np.quantile(x, 0.25)), float(np.quantile(x, 0.75)), repeats)
        for name, x in seconds.items()
    }
