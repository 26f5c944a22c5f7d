"""The gated delta rule on a CPU: our chunked scan, our token recurrence, and transformers' chunked form in one run.

    make oracles                                        once: makes the environment of the peer
    python experiments/delta_cpu/run.py [--shape 1 4096 4 64] [--rounds 3]

The programs take turns, so that a machine that slows down slows all of them. Prints medians and quartiles over all
rounds. Inputs have the same distribution in both programs, and the peer gets as many threads as there are cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix import gated_delta_rule
from jaxmix.bench import environment
from jaxmix.bench.suites import forward, forward_backward

PEER = "transformers chunked"


def repeated(function: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> list[float]:
    """Milliseconds of every run but the first."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=4, default=[1, 4096, 4, 64], metavar=("B", "T", "H", "D"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--peer", default=".venv-oracles/bin/python", help="python of the peer's environment")
    chosen = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, chosen.shape) for key in keys[:3])
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = -0.05 * jax.random.uniform(keys[3], q.shape[:3]), jax.random.uniform(keys[4], q.shape[:3])
    forms = {"jaxmix scan": "scan", "jaxmix serial": "serial"}
    cases = {
        f"{name}, {label}": (build(gated_delta_rule, implementation=form), (q, k, v, g, beta))
        for label, build in (("forward", forward), ("forward+backward", forward_backward))
        for name, form in forms.items()
    }
    times: dict[str, list[float]] = {}
    versions = {}
    for _ in range(chosen.rounds):
        for name, case in cases.items():
            times.setdefault(name, []).extend(repeated(*case, chosen.repeats))
        command = [chosen.peer, str(Path(__file__).with_name("peer.py")), *map(str, chosen.shape)]
        command += ["--threads", str(os.cpu_count()), "--repeats", str(chosen.repeats)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for label in ("forward", "forward+backward"):
            times.setdefault(f"{PEER}, {label}", []).extend(found.pop(label))
        versions = found
    print("| program | median ms | quartiles |\n| - | - | - |")
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"| {name} | {middle:.1f} | {low:.1f}-{high:.1f} |")
    print(f"\nshape {tuple(chosen.shape)}, {chosen.rounds} rounds of {chosen.repeats}")
    print(environment(), versions, f"{os.cpu_count()} cores")


if __name__ == "__main__":
    main()
