"""All mixers at equal size, tokens and recipe, on associative recall (recall.py) or on text (text.py).

    python experiments/peers/run.py recall [--mixers gdn softmax ...] [--seeds 0 1 2] [--rates 1e-3 3e-3 1e-2] ...
    python experiments/peers/run.py text   [--mixers gdn softmax ...] [--seeds 0 1 2] [--rates 3e-3] ...
    python experiments/peers/run.py text --table DIR... --out DIR     of runs that are there, from several directories

Every model has 4 layers and about the same number of parameters (SwiGLU sizes make up for what the mixers differ in),
and the same sequences for the same seed. On recall every mixer is trained with every learning rate; the one reported
has the best mean over seeds on validation sequences, the accuracies are those on other sequences. On text there is
one rate. A run that is in the directory is kept. Writes measured.json for every run, and of all runs runs.jsonl,
table.md and plot.png. A directory given to --table holds runs.jsonl, or measured.json in its subdirectories.
"""

import argparse
import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
import recall_report
import text_report
from models import ALL, MIXERS, Size, model
from recall import Recall
from text import Text
from train import RECIPE, SSM_RATE, Budget, train

from jaxmix.bench import environment
from jaxmix.models import parameter_count, state_bytes

KINDS = {"recall": Recall, "text": Text}
REPORTS = {"recall": recall_report, "text": text_report}
BUDGETS = {"recall": Budget(steps=3000, batch=64), "text": Budget(steps=1500, batch=16)}
SIZES = {"recall": Size(), "text": Size(width=256, heads=4, parameters=4_000_000)}
RATES = {"recall": [1e-3, 3e-3, 1e-2], "text": [3e-3]}


def measure(name: str, chosen: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Trains what is missing of a mixer's runs."""
    task, budget = KINDS[chosen.task](**settings["task"]), Budget(**settings["budget"])
    decoder = model(name, Size(**settings["size"]), vocabulary=task.vocabulary, length=task.longest)
    facts = {
        "mixer": name,
        "settings": settings,
        "parameters": parameter_count(decoder),
        "state_bytes": state_bytes(decoder),
        "hidden": decoder.hidden,
        "environment": environment(),
    }
    wanted = [(rate, seed) for rate in chosen.rates for seed in chosen.seeds]
    missing = [run for run in wanted if not _file(chosen.out, name, *run).is_file()]
    together = chosen.together or (1 if jax.default_backend() == "cpu" else len(wanted))
    for first in range(0, len(missing), together):
        runs = missing[first : first + together]
        print(name, "rate and seed", *runs, flush=True)
        measured, seconds = train(decoder, task, budget, runs)
        for (rate, seed), found in zip(runs, measured, strict=True):
            file = _file(chosen.out, name, rate, seed)
            file.parent.mkdir(parents=True, exist_ok=True)
            timing = {"seconds_of_all": seconds, "runs_at_once": len(runs)}
            file.write_text(json.dumps(facts | {"rate": rate, "seed": seed} | timing | found) + "\n")
        print(f"{name}: {seconds:.0f} s", flush=True)


def read(directories: list[Path]) -> list[dict[str, Any]]:
    """All runs in the directories, which must have been made with the same settings."""
    runs, seen = [], set()
    for directory in directories:
        all_runs = directory / "runs.jsonl"
        for file in [all_runs] if all_runs.is_file() else sorted(directory.glob("*/measured.json")):
            for run in map(json.loads, file.read_text().splitlines()):
                if runs and run["settings"] != runs[0]["settings"]:
                    raise SystemExit(f"{file}: expected {runs[0]['settings']}, got {run['settings']}")
                what = run["mixer"], run["rate"], run["seed"]
                if what in seen:
                    raise SystemExit(f"{file}: {what} is in two of the directories")
                seen.add(what)
                runs.append(run)
    return runs


def _file(out: Path, name: str, rate: float, seed: int) -> Path:
    return out / f"{name}-{rate:g}-{seed}" / "measured.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    for name in KINDS:
        task = tasks.add_parser(name)
        budget, size = BUDGETS[name], SIZES[name]
        task.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=list(ALL))
        task.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        task.add_argument("--rates", type=float, nargs="+", default=RATES[name], help="peak learning rates")
        task.add_argument("--together", type=int, help="runs trained at once: all of a mixer, one on a CPU")
        task.add_argument("--steps", type=int, default=budget.steps)
        task.add_argument("--batch", type=int, default=budget.batch)
        task.add_argument("--warmup", type=int, help="updates until the rate is at its peak, a tenth by default")
        task.add_argument("--width", type=int, default=size.width)
        task.add_argument("--heads", type=int, default=size.heads)
        task.add_argument("--parameters", type=int, default=size.parameters)
        task.add_argument("--out", type=Path, default=Path("runs") / name)
        task.add_argument("--table", type=Path, nargs="+", metavar="DIR", help="train nothing, report what is there")
    recall, default = tasks.choices["recall"], Recall()
    recall.add_argument("--held-out", type=int, default=default.held_out, help="sequences of every number of pairs")
    recall.add_argument("--pairs", type=int, nargs="+", default=list(default.pairs))
    recall.add_argument("--length", type=int, default=default.length)
    recall.add_argument("--vocabulary", type=int, default=default.vocabulary)
    recall.add_argument("--gaps", default=default.gaps, choices=["power", "far"])
    recall.add_argument("--power", type=float, default=default.power)
    recall.add_argument("--filler", default=default.filler, choices=["blank", "random"])
    recall.add_argument("--easy", type=float, default=default.easy, help="part of training sequences as by default")
    text, window = tasks.choices["text"], Text()
    text.add_argument("--length", type=int, default=window.length)
    text.add_argument("--beyond", type=int, default=window.beyond, help="length of validation windows in the same unit")
    text.add_argument("--windows", type=int, help="the first so many validation windows only")
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    if not chosen.table:
        given = vars(chosen)
        parts = {"task": KINDS[chosen.task], "budget": Budget, "size": Size}
        settings = {
            part: dataclasses.asdict(kind(**{field.name: given[field.name] for field in dataclasses.fields(kind)}))
            for part, kind in parts.items()
        }
        if chosen.warmup is None:
            del settings["budget"]["warmup"]  # Runs from before there was a choice have none either.
        settings = json.loads(json.dumps(settings))
        if any(run["settings"] != settings for run in read([chosen.out])):
            raise SystemExit(f"{chosen.out} holds runs with other settings; give another --out")
        jax.config.update("jax_compilation_cache_dir", str(chosen.out.resolve() / "compiled"))
        (chosen.out / "runs.jsonl").unlink(missing_ok=True)
        for name in chosen.mixers:
            measure(name, chosen, settings)
    runs = read(chosen.table or [chosen.out])
    if not runs:
        raise SystemExit("no runs found")
    chosen.out.mkdir(parents=True, exist_ok=True)
    report = REPORTS[chosen.task]
    text = report.table(runs)
    (chosen.out / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    (chosen.out / "table.md").write_text(text + "\n")
    report.plot(runs, chosen.out / "plot.png")
    print(text)
    print(runs[0]["settings"])
    print(RECIPE, f"times the learning rate, of state spaces at most {SSM_RATE}; warm-up a tenth of the run by default")
    print(shlex.join(["python", *sys.argv]))
    print(environment(), f"{os.cpu_count()} cores")


if __name__ == "__main__":
    main()
