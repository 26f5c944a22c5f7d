"""The script for accelerators, as far as a CPU can run it: every row says what it is or why it is missing."""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest

from experiments.bench import run as script
from experiments.bench.torch_peers import sdpa, torch_case, torch_cases
from experiments.bench.training import LENGTHS, TOKENS, TrainingEntry, training_entries
from jaxmix.bench import Row, named_shapes, write_reports
from jaxmix.bench.ceilings import Ceilings
from jaxmix.bench.gate import Work, WrongResult
from jaxmix.bench.loop import LoopOptions
from jaxmix.bench.plots import plot_rows
from jaxmix.bench.shapes import Shape
from jaxmix.models import flops_per_token, get_preset, parameter_count

LOOP = LoopOptions(runs=3)
TORCH = ("softmax_attention", "linear_attention", "gated_delta_rule")
CEILINGS = Ceilings(copy=1e10, matmul=1e12, empty=1e-6)


def test_peers_have_rows_for_sequences_and_for_decoding():
    titles = [title for suite in ("anchors", "streams") for mixer in TORCH for title in torch_cases(mixer, suite)]
    assert titles == [
        "torch SDPA",
        "fla chunk_simple_gla",
        "fla chunk_gated_delta_rule",
        "torch SDPA, full cache",
        "fla fused_recurrent_simple_gla",
        "fla fused_recurrent_gated_delta_rule",
    ]
    assert torch_cases("hla2", "anchors") == {}


def test_a_peer_that_cannot_run_here_says_why():
    reason = "No module named 'torch'" if importlib.util.find_spec("torch") is None else "no CUDA device"
    with pytest.raises((ImportError, RuntimeError), match=reason):
        torch_case(sdpa)(Work("softmax_attention", Shape(1, 64, 1, 8), "forward"), LOOP)


def test_training_covers_two_sizes_two_lengths_and_softmax_beside_each():
    found = training_entries()
    assert len(found) == 8
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert (first.name[:4], second.name[:7]) == ("hla2", "softmax")
        assert first.length == second.length <= second.config.layers[0].capacity
        same = dataclasses.replace(first.config, layers=second.config.layers, hidden=second.config.hidden)
        assert same == second.config
        assert parameter_count(first.config) == pytest.approx(parameter_count(second.config), rel=0.01)
        assert first.batch * first.length in TOKENS.values()
    assert {entry.length for entry in found} == set(LENGTHS)


def test_a_training_step_is_timed_and_its_loss_falls():
    entry = TrainingEntry("hla2 tiny", get_preset("hla2-tiny"), batch=2, length=32)
    row = entry.measure(LOOP, CEILINGS)
    assert row.values["last loss"] < row.values["first loss"]
    assert row.values["first loss"] == pytest.approx(np.log(256), abs=0.5)
    seconds = row.values["milliseconds"] / 1e3
    assert row.values["tokens/s"] == pytest.approx(64 / seconds)
    flops = 64 * sum(flops_per_token(entry.config, 32).values())
    assert row.values["MFU"] == pytest.approx(flops / seconds / CEILINGS.matmul)
    assert row.values["peak MB"] > 0


def test_a_step_that_does_not_learn_has_no_time(monkeypatch):
    monkeypatch.setattr("jaxmix.train.step.make_train_step", lambda *_: StandStill())
    entry = TrainingEntry("hla2 tiny", get_preset("hla2-tiny"), batch=1, length=16)
    with pytest.raises(WrongResult, match=r"the loss went from 1\.000 to 1\.000"):
        entry.measure(LOOP, CEILINGS)


class StandStill:
    """A training step that changes nothing."""

    def lower(self, *_):
        return self

    def compile(self):
        return lambda state, batch: (state, {"loss": 1.0})


def test_the_script_lists_its_rows(capsys):
    script.main(["--suites", "streams", "--training", "--list"])
    titles = capsys.readouterr().out.splitlines()
    assert "streams: hla2, decode, (64, 4096, 16, 128)" in titles
    assert "streams: fla fused_recurrent_gated_delta_rule, decode, (128, 4096, 16, 64)" in titles
    assert titles[-1] == "training: softmax 1.3b, (2, 16384)"


def test_the_script_writes_what_it_has(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(named_shapes, "measure_ceilings", lambda *_: CEILINGS)
    monkeypatch.setitem(named_shapes.SHAPES, "anchors", (Shape(1, 64, 1, 8, mixers=("linear_attention",)),))
    script.main(["--passes", "forward", "--match", "linear_attention, forward", "--runs", "3", "--out", str(tmp_path)])
    assert "anchors: linear_attention, forward (1, 64, 1, 8): milliseconds" in capsys.readouterr().out
    script.main(["--passes", "forward", "--match", "chunk_simple_gla", "--runs", "3", "--out", str(tmp_path / "peer")])
    rows = json.loads((tmp_path / "peer" / "bench.json").read_text())["rows"]
    assert [row["case"] for row in rows[3:]] == ["fla chunk_simple_gla, forward"]
    assert "torch" in rows[-1]["note"]
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "bench.md", "bench.png", "peer"}


def test_reports_of_several_runs_become_one(tmp_path):
    done, missing = (
        Row("anchors", "x, forward", "(1, 2)", {"milliseconds": 1.0}),
        Row("anchors", "x, forward", "(1, 2)", {}),
    )
    other = Row("anchors", "y, forward", "(1, 2)", {}, "not started")
    for name, rows in (("a", [done, other]), ("b", [missing])):
        write_reports(tmp_path / name, rows, {"jax": "1"}, name)
    assert script.collect([tmp_path / "a", tmp_path / "b"], tmp_path / "all") == [done, other]
    write_reports(tmp_path / "b", [missing], {"jax": "2"}, "b")
    with pytest.raises(SystemExit, match="different machines"):
        script.collect([tmp_path / "a", tmp_path / "b"], tmp_path / "all")


def test_rows_become_a_picture(tmp_path):
    values = {"milliseconds": 1.0, "ns/token": 2.0}
    rows = [Row("long", "hla2, forward", f"(1, {n}, 16, 128)", values) for n in (4096, 8192)]
    rows += [
        Row("anchors", "hla2, scan, backward", "(8, 4096, 16, 64)", values),
        Row("anchors", "z, forward", "", {}, "no"),
    ]
    assert plot_rows(rows, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    assert not plot_rows([rows[-1]], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
