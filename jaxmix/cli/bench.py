"""`jaxmix bench`: time the mixers on this machine."""

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from jaxmix.arrays import fail
from jaxmix.bench import SUITES, BenchOptions, Row, environment, run_suites, to_json, write_reports
from jaxmix.bench.costs import PASSES, Pass
from jaxmix.bench.named_shapes import NamedOptions, entries, run_entries
from jaxmix.bench.report import table_cells
from jaxmix.bench.shapes import SHAPES
from jaxmix.cli.allocator import keep_freed_memory


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Options of the command.

    Attributes:
        bench: what to time; beside the suites that are timed by default there are those of named shapes in bfloat16,
            for accelerators: anchors, common, long, models, streams.
        passes: passes of the suites of named shapes.
        match: a regular expression; of the suites of named shapes only rows in whose titles it is found.
        seconds: start no more rows of named shapes after this many seconds.
        list: print the titles of the rows of named shapes instead of running them.
        json: print JSON instead of tables.
        out: also write bench.json and bench.md into this directory, after every row.
    """

    bench: tyro.conf.OmitArgPrefixes[BenchOptions] = dataclasses.field(default_factory=BenchOptions)
    passes: tuple[Pass, ...] = PASSES
    match: str = ""
    seconds: float | None = None
    list: bool = False
    json: bool = False
    out: Path | None = None


def run(arguments: Sequence[str]) -> int:
    """Times the suites and prints one table each."""
    options = tyro.cli(Arguments, prog="jaxmix bench", args=arguments, description=__doc__)
    plain, named = _split_suites(options)
    waiting = entries(named) if named.suites else []
    if options.list:
        print("\n".join(entry.title for entry in waiting))
        return 0
    keep_freed_memory(one_pool=True)
    command = shlex.join(["jaxmix", "bench", *arguments])
    console = Console(stderr=options.json)
    machine = environment()
    rows: list[Row] = []
    with console.status("timing") as status:
        for row in itertools.chain(run_suites(plain), run_entries(waiting, named) if waiting else []):
            rows.append(row)
            status.update(f"{row.suite}: {row.case}")
            if options.out is not None:
                write_reports(options.out, rows, machine, command)
    if options.json:
        print(to_json(rows, machine, command))
    else:
        console.print(", ".join(f"{name} {value}" for name, value in machine.items()), highlight=False)
        for suite in dict.fromkeys(row.suite for row in rows):
            console.print(_table([row for row in rows if row.suite == suite]))
    if options.out is not None:
        console.print(f"Written to {options.out}")
    return 0


def _split_suites(options: Arguments) -> tuple[BenchOptions, NamedOptions]:
    """The suites of the machine at hand and those of named shapes."""
    suites = options.bench.suites
    for name in suites:
        if name not in SUITES and name not in SHAPES:
            fail("suites", f"names from {', '.join([*SUITES, *SHAPES])}", repr(name))
    named = NamedOptions(
        suites=tuple(name for name in suites if name in SHAPES),
        passes=options.passes,
        match=options.match,
        seconds=options.seconds,
    )
    return dataclasses.replace(options.bench, suites=tuple(name for name in suites if name in SUITES)), named


def _table(rows: Sequence[Row]) -> Table:
    titles, cells = table_cells(rows)
    table = Table(title=rows[0].suite, title_justify="left")
    table.add_column("case")
    table.add_column("(B, T, H, D)")
    for name in titles:
        table.add_column(name, justify="left" if name == "note" else "right")
    for row, values in zip(rows, cells, strict=True):
        table.add_row(row.case, row.shape, *values)
    return table
