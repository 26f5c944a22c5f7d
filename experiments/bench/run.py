"""Times the mixers at named shapes beside their peers, and training steps, on an accelerator.

    PYTHONPATH=.:kernels python experiments/bench/run.py --suites anchors --out runs/bench [--match hla2]
    PYTHONPATH=.:kernels python experiments/bench/run.py --suites --training --out runs/bench-training
    PYTHONPATH=.:kernels python experiments/bench/run.py --suites anchors long --list
    PYTHONPATH=.:kernels python experiments/bench/run.py --report runs/bench* --out runs/all

Every row is checked against the float32 scan before it is timed. A row that fails says why and the next one follows.
bench.json and bench.md are written after every row, bench.png at the end.
"""

import argparse
import importlib.util
import json
import shlex
import sys
from pathlib import Path

from experiments.bench.torch_peers import torch_cases
from experiments.bench.training import training_entries
from jaxmix.bench import Row, environment, from_json, write_reports
from jaxmix.bench.costs import PASSES
from jaxmix.bench.environment import installed
from jaxmix.bench.loop import LoopOptions
from jaxmix.bench.named_shapes import NamedOptions, RowToBe, entries, matching, run_entries
from jaxmix.bench.report import format_value
from jaxmix.bench.shapes import SHAPES


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="*", choices=list(SHAPES), default=["anchors"])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--training", action="store_true", help="also time training steps")
    parser.add_argument("--match", default="", help="a regular expression: only rows in whose titles it is found")
    parser.add_argument("--seconds", type=float, help="start no row after this many seconds")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of a row")
    parser.add_argument("--list", action="store_true", help="print the titles of the rows and stop")
    parser.add_argument("--report", nargs="+", type=Path, help="make one report of these directories, time nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    return parser.parse_args(arguments)


def rows_to_be(options: argparse.Namespace, named: NamedOptions) -> list[RowToBe]:
    found: list[RowToBe] = [*entries(named, torch_cases)]
    if options.training:
        found += matching(training_entries(), options.match)
    return found


def show(row: Row) -> None:
    """One line as soon as there is a row."""
    values = ", ".join(f"{name} {format_value(value)}" for name, value in row.values.items())
    print(f"{row.suite}: {row.case} {row.shape}: {values}{' | ' if values and row.note else ''}{row.note}", flush=True)


def draw(rows: list[Row], directory: Path) -> None:
    """The picture, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no bench.png: matplotlib is not installed; --report draws it elsewhere from bench.json")
        return
    from jaxmix.bench.plots import plot_rows

    if plot_rows(rows, directory / "bench.png"):
        print(f"{directory / 'bench.png'}")


def collect(directories: list[Path], out: Path) -> list[Row]:
    """One report of several runs on the same machine; of a row that several have, the last one with values counts."""
    kept: dict[tuple[str, str, str], Row] = {}
    machines, commands = [], []
    for directory in directories:
        rows, machine, command = from_json((directory / "bench.json").read_text())
        machines.append(machine)
        commands.append(command)
        for row in rows:
            key = (row.suite, row.case, row.shape)
            if row.values or key not in kept:
                kept[key] = row
    if any(machine != machines[0] for machine in machines):
        raise SystemExit(f"the runs are of different machines, versions or dates: {json.dumps(machines)}")
    write_reports(out, list(kept.values()), machines[0], "; ".join(commands))
    return list(kept.values())


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    if options.report:
        draw(collect(options.report, options.out), options.out)
        return
    named = NamedOptions(
        suites=tuple(options.suites),
        passes=tuple(options.passes),
        match=options.match,
        seconds=options.seconds,
        loop=LoopOptions(runs=options.runs),
    )
    waiting = rows_to_be(options, named)
    if options.list:
        print("\n".join(entry.title for entry in waiting))
        return
    machine = environment() | installed("torch", "triton", "fla-core", "flash-linear-attention")
    command = shlex.join(["python", "experiments/bench/run.py", *arguments])
    print(machine, flush=True)
    rows: list[Row] = []
    for row in run_entries(waiting, named):
        rows.append(row)
        show(row)
        write_reports(options.out, rows, machine, command)
    draw(rows, options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
