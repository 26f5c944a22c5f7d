"""Run the checks and collect the report."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from jaxmix.verify import checks
from jaxmix.verify.catalogue import select
from jaxmix.verify.errata import errata_rows
from jaxmix.verify.mixer import MixerUnderTest
from jaxmix.verify.options import VerifyOptions
from jaxmix.verify.report import CheckName, Report, Row, environment
from jaxmix.verify.subject import Subject

WORKERS = 2
Check = Callable[[Subject], Iterator[Row]]

CHECKS: dict[CheckName, Check] = {
    "forms": checks.forms,
    "operator": checks.operator,
    "gradients": checks.gradients,
    "split": checks.split,
    "packed": checks.packed,
    "causality": checks.causality,
}


def verify_mixer(mixer: MixerUnderTest, options: VerifyOptions | None = None) -> Report:
    """Run every check on one mixer; see the package docstring for an example.

    Args:
        mixer: The mixer, how to call it and what to compare it with.
        options: Shape, dtype and seed.

    Returns:
        A report; a check that raised is a failed row with the exception in its note.
    """
    return _report([mixer], options or VerifyOptions(), with_errata=False)


def verify(options: VerifyOptions | None = None, *, progress: Callable[[str], None] | None = None) -> Report:
    """Run every check on every mixer and option of the catalogue, and the errata.

    Args:
        options: Shape, dtype, seed, mixers.
        progress: Called with the name and options of each entry of the catalogue when it is done.

    Raises:
        ValueError: when `options.mixers` names something that is not a mixer.
    """
    options = options or VerifyOptions()
    return _report(select(options.mixers), options, with_errata=True, progress=progress)


def _report(
    mixers: Iterable[MixerUnderTest],
    options: VerifyOptions,
    *,
    with_errata: bool,
    progress: Callable[[str], None] | None = None,
) -> Report:
    start = time.perf_counter()
    mixers = list(mixers)

    def run(mixer: MixerUnderTest) -> list[Row]:
        rows = _rows(mixer, options)
        if progress is not None:
            progress(" ".join([mixer.name, ", ".join(mixer.read_outs or [mixer.option])]).strip())
        return rows

    with ThreadPoolExecutor(WORKERS) as pool:
        rows = [row for part in pool.map(run, mixers) for row in part]
    if with_errata and (not options.checks or "errata" in options.checks):
        names = {mixer.name for mixer in mixers}
        rows += [row for row in errata_rows(seed=options.seed) if row.mixer in names]
    return Report(
        rows=tuple(rows),
        options=dataclasses.asdict(options),
        seconds=time.perf_counter() - start,
        environment=environment(),
    )


def _rows(mixer: MixerUnderTest, options: VerifyOptions) -> list[Row]:
    """All rows of one mixer, in float64 within this thread only."""
    rows: list[Row] = []
    wanted = mixer.checks(options)
    with jax.enable_x64(True):
        subject = Subject(mixer, options)
        for name, check in CHECKS.items():
            if name not in wanted:
                continue
            try:
                rows.extend(check(subject))
            except Exception as error:
                rows.append(_raised(mixer, name, error))
    return rows


def _raised(mixer: MixerUnderTest, name: Any, error: Exception) -> Row:
    lines = str(error).strip().splitlines() or [""]
    return Row(
        mixer=mixer.name,
        option=mixer.option,
        check=name,
        case="the check ran to its end",
        error=math.inf,
        tolerance=0.0,
        note=f"raised {type(error).__name__}: {lines[0]}",
    )
