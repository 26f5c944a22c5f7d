"""Rows of a benchmark as JSON and as Markdown."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured case of a suite.

    Attributes:
        suite: the suite's name.
        case: what ran.
        shape: its sizes, for the reader.
        values: measured quantities by their column name, units in the name.
    """

    suite: str
    case: str
    shape: str
    values: dict[str, float]


def to_json(rows: Sequence[Row], environment: Mapping[str, str], command: str) -> str:
    """Everything measured, machine-readable."""
    record: dict[str, Any] = {"command": command, "environment": dict(environment)}
    return json.dumps({**record, "rows": [dataclasses.asdict(row) for row in rows]}, indent=2)


def to_markdown(rows: Sequence[Row], environment: Mapping[str, str], command: str) -> str:
    """One table a suite, headed by the command and the machine."""
    lines = [f"Command: `{command}`", "", ", ".join(f"{name} {value}" for name, value in environment.items()), ""]
    for suite in dict.fromkeys(row.suite for row in rows):
        own = [row for row in rows if row.suite == suite]
        columns = list(dict.fromkeys(name for row in own for name in row.values))
        lines += [f"## {suite}", "", "| " + " | ".join(["case", "shape", *columns]) + " |"]
        lines.append("|" + " --- |" * (len(columns) + 2))
        for row in own:
            cells = [format_value(row.values[name]) if name in row.values else "" for name in columns]
            lines.append("| " + " | ".join([row.case, row.shape, *cells]) + " |")
        lines.append("")
    return "\n".join(lines)


def format_value(value: float) -> str:
    """Three significant digits, without an exponent where it can be helped."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.2e}"
