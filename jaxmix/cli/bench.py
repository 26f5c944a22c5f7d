"""`jaxmix bench`: time the mixers on this machine."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from jaxmix.bench import BenchOptions, Row, environment, run_suites, to_json, to_markdown
from jaxmix.bench.report import format_value
from jaxmix.cli.allocator import keep_freed_memory


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Options of the command.

    Attributes:
        bench: what to time.
        json: print JSON instead of tables.
        out: also write bench.json and bench.md into this directory.
    """

    bench: tyro.conf.OmitArgPrefixes[BenchOptions] = dataclasses.field(default_factory=BenchOptions)
    json: bool = False
    out: Path | None = None


def run(arguments: Sequence[str]) -> int:
    """Times the suites and prints one table each."""
    options = tyro.cli(Arguments, prog="jaxmix bench", args=arguments, description=__doc__)
    keep_freed_memory(one_pool=True)
    command = shlex.join(["jaxmix", "bench", *arguments])
    console = Console(stderr=options.json)
    machine = environment()
    rows: list[Row] = []
    with console.status("timing") as status:
        for row in run_suites(options.bench):
            rows.append(row)
            status.update(f"{row.suite}: {row.case}")
    if options.json:
        print(to_json(rows, machine, command))
    else:
        console.print(", ".join(f"{name} {value}" for name, value in machine.items()), highlight=False)
        for suite in dict.fromkeys(row.suite for row in rows):
            console.print(_table([row for row in rows if row.suite == suite]))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "bench.json").write_text(to_json(rows, machine, command) + "\n")
        (options.out / "bench.md").write_text(to_markdown(rows, machine, command))
        console.print(f"Written to {options.out}")
    return 0


def _table(rows: Sequence[Row]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row.values))
    table = Table(title=rows[0].suite, title_justify="left")
    table.add_column("case")
    table.add_column("(B, T, H, D)")
    for name in columns:
        table.add_column(name, justify="right")
    for row in rows:
        cells = [format_value(row.values[name]) if name in row.values else "" for name in columns]
        table.add_row(row.case, row.shape, *cells)
    return table
