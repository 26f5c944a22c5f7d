"""The suites of named shapes: which rows there are, and that each is measured, refused or explained."""

import json

import pytest

from jaxmix.bench import named_shapes, to_json
from jaxmix.bench.ceilings import Ceilings, CeilingSizes
from jaxmix.bench.gate import Work
from jaxmix.bench.jax_cases import mixer_case, refuse
from jaxmix.bench.loop import LoopOptions
from jaxmix.bench.named_shapes import Entry, NamedOptions, describe, entries, mixer_cases, run_entries
from jaxmix.bench.report import from_json, to_markdown
from jaxmix.bench.shapes import SHAPES, Shape
from jaxmix.cli.bench import run as run_command

TINY = Shape(2, 64, 2, 8)
LOOP = LoopOptions(runs=3, seconds=1e-4, most_calls=4)
QUICK = NamedOptions(suites=("anchors",), loop=LOOP, ceilings=CeilingSizes(entries=64, width=8))
COLUMNS = ["milliseconds", "lower quartile", "upper quartile", "runs", "calls a run", "ns/token", "MB", "GFLOP"]
COLUMNS += ["floor ms", "roofline share", "error", "peak MB"]


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch):
    """The machine's own are measured by one test; the others are quicker without."""
    monkeypatch.setattr(named_shapes, "measure_ceilings", lambda *_: Ceilings(copy=1e10, matmul=1e11, empty=1e-6))


def entry(case, part="forward", mixer="linear_attention"):
    return Entry("anchors", f"{mixer}, {part}", Work(mixer, TINY, part), case)


def rows_of(*found, options=QUICK):
    rows = list(run_entries(found, options))
    assert [row.suite for row in rows[:3]] == ["ceilings"] * 3
    return rows[3:]


@pytest.mark.parametrize(
    ("mixer", "part"),
    [
        ("linear_attention", "backward"),
        ("ssd", "forward+backward"),
        ("hla2", "decode"),
        ("softmax_attention", "decode"),
    ],
)
def test_a_row_has_every_column(mixer, part):
    (row,) = rows_of(entry(mixer_case(mixer), part, mixer))
    assert list(row.values) == COLUMNS, row.note
    assert all(value > 0 for value in row.values.values())
    assert row.values["runs"] == LOOP.runs
    tokens = 2 if part == "decode" else 128
    assert row.values["ns/token"] == pytest.approx(row.values["milliseconds"] / tokens * 1e6)
    assert row.values["roofline share"] == pytest.approx(row.values["floor ms"] / row.values["milliseconds"])


@pytest.mark.parametrize("part", ["forward", "decode"])
def test_peers_of_jax_run_beside_the_mixers(part):
    name = "softmax_attention, jax.nn XLA"
    case = mixer_cases("softmax_attention", "streams" if part == "decode" else "anchors")[name]
    (row,) = rows_of(entry(case, part, "softmax_attention"))
    assert list(row.values) == COLUMNS, row.note


def test_what_fails_says_why_and_the_next_row_follows():
    def wrong(work, options):
        return mixer_case("linear_attention", implementation="pallas")(work, options)

    refused, failed, measured = rows_of(
        entry(refuse("not installed")), entry(wrong), entry(mixer_case("linear_attention"))
    )
    assert (refused.values, refused.note) == ({}, "NotImplementedError: not installed")
    assert "the Pallas kernels need a Hopper GPU or a TPU" in failed.note
    assert list(measured.values) == COLUMNS, measured.note


def test_softmax_of_xla_is_refused_where_its_logits_are_too_large():
    case = mixer_cases("softmax_attention", "long")["softmax_attention, jax.nn XLA"]
    with pytest.raises(MemoryError, match="the logits take 4398 GB"):
        case(Work("softmax_attention", SHAPES["long"][-1], "forward"), LOOP)


def test_no_row_is_started_late():
    def late(work, options):
        raise AssertionError("started")

    options = NamedOptions(suites=("anchors",), seconds=0.0, loop=LOOP, ceilings=QUICK.ceilings)
    (row,) = rows_of(entry(late), options=options)
    assert row.note == "not started: 0 s were over"


def test_ceilings_are_measured_like_everything_else(monkeypatch):
    monkeypatch.undo()
    rows = list(run_entries([], QUICK))
    assert [list(row.values) for row in rows] == [["TB/s"], ["TFLOP/s"], ["microseconds"]]
    assert all(value > 0 for row in rows for value in row.values.values())


def test_every_suite_lists_mixers_and_peers_at_every_shape():
    found = entries(NamedOptions(), lambda mixer, suite: {f"{mixer} elsewhere": refuse("")})
    assert {x.suite for x in found} == set(SHAPES)
    titles = [x.title for x in found]
    assert len(titles) == len(set(titles))
    assert "anchors: hla2, scan, backward, (8, 4096, 16, 64)" in titles
    assert "long: softmax_attention, jax.nn cuDNN, forward, (1, 262144, 16, 128)" in titles
    assert "streams: softmax_attention, decode, (64, 32768, 16, 128)" in titles
    assert "models: gated_delta_rule elsewhere, forward, (1, 8192, 32/16, 128) Qwen3-Next 80B" in titles


def test_titles_are_matched():
    found = entries(NamedOptions(suites=("long",), passes=("forward",), match="hla3|ssd, back"))
    assert [x.work.shape for x in found] == list(SHAPES["long"])


@pytest.mark.parametrize("wrong", [{"suites": ("speed",)}, {"passes": ("sideways",)}, {"match": "("}])
def test_bad_options_are_named(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected (names from|a regular expression)"):
        entries(NamedOptions(**wrong))


def test_notes_are_kept_in_reports():
    rows = rows_of(entry(refuse("a | b")))
    text = to_json(rows, {"jax": "1"}, "command")
    assert from_json(text) == (rows, {"jax": "1"}, "command")
    assert json.loads(text)["rows"][0]["note"] == "NotImplementedError: a | b"
    table = to_markdown(rows, {"jax": "1"}, "command")
    assert "| linear_attention, forward | (2, 64, 2, 8) | NotImplementedError: a / b |" in table


def test_errors_become_one_short_line():
    assert describe(ValueError("a\n  b")) == "ValueError: a b"
    assert describe(ValueError("x" * 400), longest=10) == "ValueError: xxxxxxxxxx..."


def test_the_command_lists_and_runs_named_shapes(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(named_shapes.SHAPES, "anchors", (Shape(1, 64, 1, 8, mixers=("linear_attention",)),))
    chosen = ["--suites", "anchors", "--passes", "forward", "--match", "scan"]
    assert run_command([*chosen, "--list"]) == 0
    assert capsys.readouterr().out == "anchors: linear_attention, scan, forward, (1, 64, 1, 8)\n"
    assert run_command([*chosen, "--seconds", "0", "--out", str(tmp_path)]) == 0
    rows, _, command = from_json((tmp_path / "bench.json").read_text())
    assert rows[-1].note == "not started: 0 s were over"
    assert command.startswith("jaxmix bench --suites anchors")
    assert "## anchors" in (tmp_path / "bench.md").read_text()


def test_the_command_names_an_unknown_suite():
    with pytest.raises(ValueError, match=r"suites: expected names from mixers, .*anchors, .*got 'speed'"):
        run_command(["--suites", "speed"])
