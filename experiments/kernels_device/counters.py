"""Reads hardware counters of the kernels of whole mixers with NVIDIA's profiler `ncu`: what bounds a kernel.

    PYTHONPATH=.:kernels python experiments/kernels_device/counters.py [--mixers M ...] [--shape B T H D ...]
        [--passes forward both] [--no-decay] [--out FILE]

It starts itself under `ncu`, without control of clocks, and prints one row for every kernel that takes more than a
fiftieth of its call. A case is compiled and run once before it is profiled; the profiler runs every kernel several
times. Start it while nothing else compiles: JAX takes long to start under the profiler. `--out` keeps all counters.
"""

import argparse
import csv
import ctypes
import functools
import re
import subprocess
import sys
from pathlib import Path

METRICS = (
    "gpu__time_duration.sum",
    "sm__cycles_active.min",
    "sm__cycles_active.avg",
    "sm__cycles_active.max",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sector_hit_rate.pct",
)
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats", "SchedulerStats", "LaunchStats")
COLUMNS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "programs": ("launch__grid_size", 1),
    "registers": ("launch__registers_per_thread", 1),
    "cycles of a core, least": ("sm__cycles_active.min", 1),
    "mean": ("sm__cycles_active.avg", 1),
    "most": ("sm__cycles_active.max", 1),
    "DRAM %": ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "L2 %": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "DRAM read MB": ("dram__bytes_read.sum", 1e-6),
    "written": ("dram__bytes_write.sum", 1e-6),
    "L2 hits %": ("lts__t_sector_hit_rate.pct", 1),
    "shared memory %": ("l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed", 1),
    "tensor cores %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 1),
    "instructions a cycle": ("sm__inst_executed.avg.per_cycle_active", 1),
}
"""Heading: the counter and what it is multiplied with."""
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")


def profile(options: argparse.Namespace) -> None:
    """The process that is profiled."""
    import jax
    import jax.numpy as jnp
    from mixers import MIXERS, both

    driver = ctypes.CDLL("libcuda.so.1")
    marker, mark = jnp.ones(1), jax.jit(jnp.tan)
    jax.block_until_ready(mark(marker))
    print(jax.__version__, jax.devices(), flush=True)
    for batch, length, heads, size in options.shape:
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v = (
            (jax.random.normal(x, (batch, length, heads, size)) / size**0.5).astype(jnp.bfloat16) for x in keys[:3]
        )
        log_decay = -0.02 * jax.random.uniform(keys[3], (batch, length, heads))
        for name in options.mixers:
            mixer = functools.partial(MIXERS[name], implementation="pallas")

            def forward(q, k, v, log_decay, mixer=mixer):
                return mixer(q, k, v, None if options.no_decay else log_decay)[0]

            for which in options.passes:
                run = jax.jit(forward if which == "forward" else both(forward))
                jax.block_until_ready(run(q, k, v, log_decay))
                print(f"case: {name} | {which} | ({batch}, {length}, {heads}, {size})", flush=True)
                driver.cuProfilerStart()
                jax.block_until_ready(mark(marker))
                jax.block_until_ready(run(q, k, v, log_decay))
                driver.cuProfilerStop()


def read(lines: list[str]) -> tuple[list[str], list[dict[str, str]]]:
    """The case of every profiled kernel, and its counters in base units. A case begins with the kernel of a tangent."""
    names = iter([line.removeprefix("case: ").strip() for line in lines if line.startswith("case: ")])
    _, *table = csv.DictReader(line for line in lines if line.startswith('"'))  # The first row has the units.
    cases: list[str] = []
    rows = []
    case = ""
    for row in table:
        if "tan" in row["Kernel Name"]:
            case = next(names)
        else:
            cases.append(case)
            rows.append(row)
    return cases, rows


def number(row: dict[str, str], counter: str) -> float:
    return float(row.get(counter, "").replace(",", "") or "nan")


def show(cases: list[str], rows: list[dict[str, str]]) -> None:
    """A Markdown table; stalls are the three reasons for which warps waited most, in cycles for each instruction."""
    print("| mixer | pass | (B, T, H, D) | kernel | " + " | ".join(COLUMNS) + " | stalls |")
    print("| - " * (len(COLUMNS) + 5) + "|")
    spent = dict.fromkeys(cases, 0.0)
    for case, row in zip(cases, rows, strict=True):
        spent[case] += number(row, "gpu__time_duration.sum")
    for case, row in zip(cases, rows, strict=True):
        if number(row, "gpu__time_duration.sum") < spent[case] / 50:
            continue
        values = [f"{number(row, counter) * factor:.4g}" for counter, factor in COLUMNS.values()]
        stalls = {found[1]: number(row, name) for name in row if (found := STALL.fullmatch(name))}
        most = sorted(stalls, key=lambda name: -stalls[name])[:3]
        values.append(", ".join(f"{name} {stalls[name]:.2f}" for name in most))
        print(f"| {case} | {row['Kernel Name'][:40]} | " + " | ".join(values) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", nargs="+", default=["hla2", "hla3"])
    parser.add_argument("--shape", type=int, nargs=4, action="append", metavar=tuple("BTHD"))
    parser.add_argument("--passes", nargs="+", choices=("forward", "both"), default=["forward"])
    parser.add_argument("--no-decay", action="store_true")
    parser.add_argument("--out", type=Path, help="CSV of all counters")
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.shape = options.shape or [[4, 4096, 16, 128]]
    if options.profiled:
        profile(options)
        return
    command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--metrics", ",".join(METRICS)]
    for section in SECTIONS:
        command += ["--section", section]
    command += [sys.executable, *sys.argv, "--profiled"]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            lines.append(line)
            if not line.startswith('"'):
                print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(f"ncu ended with {process.returncode}")
    if options.out:
        options.out.write_text("".join(line for line in lines if line.startswith('"')))
    show(*read(lines))


if __name__ == "__main__":
    main()
