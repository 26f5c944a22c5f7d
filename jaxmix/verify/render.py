"""The report as a table in a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxmix.verify.report import Report, Row


def render(report: Report, *, details: bool = False) -> RenderableType:
    """One table a mixer, then every failure, then the summary line; print it with a `rich.console.Console`.

    Args:
        report: What `verify` or `verify_mixer` returned.
        details: One line for every comparison, instead of one for the worst of each option and check.
    """
    tables = [
        _table(mixer, list(rows), details=details)
        for mixer, rows in itertools.groupby(sorted(report.rows, key=lambda row: row.mixer), lambda row: row.mixer)
    ]
    parts: list[RenderableType] = [*tables]
    if report.failures and not details:
        parts.append(_table("Failures", list(report.failures), details=True))
    parts.append(Text(report.summary, style="bold green" if report.ok else "bold red"))
    return Group(*parts)


def _table(title: str, rows: list[Row], *, details: bool) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=False)
    for heading in ("option", "check", "comparison" if details else "worst comparison"):
        table.add_column(heading, overflow="fold")
    for heading in ("error", "tolerance", "passed", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    if details:
        groups = [[row] for row in rows]
    else:
        keys = dict.fromkeys((row.option, row.check) for row in rows)
        groups = [[row for row in rows if (row.option, row.check) == key] for key in keys]
    previous = ""
    for group in groups:
        worst = max(group, key=_badness)
        if worst.option != previous:
            table.add_section()
        _add(table, worst, group, option=worst.option if worst.option != previous else "")
        previous = worst.option
    return table


def _add(table: Table, worst: Row, group: Iterable[Row], *, option: str) -> None:
    group = list(group)
    passed = sum(row.passed for row in group)
    good = passed == len(group)
    case = Text(worst.case)
    if worst.note:
        case.append(f" ({worst.note})", style="italic")
    table.add_row(
        option,
        worst.check,
        case,
        f"{worst.error:.1e}",
        f"{'>' if worst.expect == 'above' else '≤'} {worst.tolerance:.0e}",
        f"{passed}/{len(group)}",
        Text("pass" if good else "FAIL", style="green" if good else "bold red"),
    )


def _badness(row: Row) -> tuple[bool, float]:
    """Failed rows first, then by how close the error came to the tolerance."""
    if row.expect == "above":
        return not row.passed, row.tolerance / row.error if row.error else float("inf")
    return not row.passed, row.error / row.tolerance if row.tolerance else row.error
