"""Rows of a benchmark as JSON and as Markdown."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured case of a suite.

    Attributes:
        suite: the suite's name.
        case: what ran.
        shape: its sizes, for the reader.
        values: measured quantities by their column name, units in the name.
        note: what else the reader should know, or why there are no values.
    """

    suite: str
    case: str
    shape: str
    values: dict[str, float]
    note: str = ""


def to_json(rows: Sequence[Row], environment: Mapping[str, str], command: str) -> str:
    """Everything measured, machine-readable."""
    record: dict[str, Any] = {"command": command, "environment": dict(environment)}
    return json.dumps({**record, "rows": [_record(row) for row in rows]}, indent=2)


def from_json(text: str) -> tuple[list[Row], dict[str, str], str]:
    """The rows, the environment and the command that `to_json` wrote."""
    record = json.loads(text)
    return [Row(**row) for row in record["rows"]], record["environment"], record["command"]


def to_markdown(rows: Sequence[Row], environment: Mapping[str, str], command: str) -> str:
    """One table a suite, headed by the command and the machine."""
    lines = [f"Command: `{command}`", "", ", ".join(f"{name} {value}" for name, value in environment.items()), ""]
    for suite in dict.fromkeys(row.suite for row in rows):
        own = [row for row in rows if row.suite == suite]
        titles, cells = table_cells(own)
        lines += [f"## {suite}", "", "| " + " | ".join(["case", "shape", *titles]) + " |"]
        lines.append("|" + " --- |" * (len(titles) + 2))
        for row, values in zip(own, cells, strict=True):
            lines.append("| " + " | ".join([row.case, row.shape, *values]) + " |")
        lines.append("")
    return "\n".join(lines)


def table_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles of the columns beside case and shape, and the cells of every row; notes are a column if there are any."""
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    cells = [[format_value(row.values[name]) if name in row.values else "" for name in columns] for row in rows]
    if not any(row.note for row in rows):
        return columns, cells
    notes = [row.note.replace("|", "/") for row in rows]
    return [*columns, "note"], [[*values, note] for values, note in zip(cells, notes, strict=True)]


def _record(row: Row) -> dict[str, Any]:
    record = dataclasses.asdict(row)
    return record if row.note else {name: value for name, value in record.items() if name != "note"}


def write_reports(directory: Path, rows: Sequence[Row], environment: Mapping[str, str], command: str) -> None:
    """Writes bench.json and bench.md into a directory, which is made if it is not there."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "bench.json").write_text(to_json(rows, environment, command) + "\n")
    (directory / "bench.md").write_text(to_markdown(rows, environment, command))


def format_value(value: float) -> str:
    """Three significant digits, without an exponent where it can be helped."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.2e}"
