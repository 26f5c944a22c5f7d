"""The report as a table in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
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
    parts: list[RenderableType] = []
    for mixer in dict.fromkeys(row.mixer for row in report.rows):
        parts.append(_table(mixer, [row for row in report.rows if row.mixer == mixer], details=details))
    if report.failures and not details:
        parts.append(_table("failures", report.failures, details=True))
    parts.append(Text(report.summary, style="bold green" if report.ok else "bold red"))
    return Group(*parts)


def _table(title: str, rows: Sequence[Row], *, details: bool) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("option", "check", "comparison" if details else "worst comparison"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "option")
    for heading in ("error", "tolerance", "passed", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    for option in dict.fromkeys(row.option for row in rows):
        own = [row for row in rows if row.option == option]
        checks = dict.fromkeys(row.check for row in own)
        groups = [[row] for row in own] if details else [[row for row in own if row.check == check] for check in checks]
        for at, group in enumerate(groups):
            _add(table, option if at == 0 else "", group, last=at == len(groups) - 1)
    return table


def _add(table: Table, option: str, group: Sequence[Row], *, last: bool) -> None:
    worst = max(group, key=_badness)
    passed = sum(row.passed for row in group)
    good = passed == len(group)
    table.add_row(
        option,
        worst.check,
        Text.assemble(worst.case, (f" ({worst.note})" if worst.note else "", "italic")),
        f"{worst.error:.1e}",
        f"{'>' if worst.expect == 'above' else '≤'} {worst.tolerance:.0e}",
        f"{passed}/{len(group)}",
        Text("pass" if good else "FAIL", style="green" if good else "bold red"),
        end_section=last,
    )


def _badness(row: Row) -> tuple[bool, float]:
    """Failed rows first, then by how close the error came to the tolerance."""
    if row.expect == "above":
        return not row.passed, row.tolerance / row.error if row.error else float("inf")
    return not row.passed, row.error / row.tolerance if row.tolerance else row.error
