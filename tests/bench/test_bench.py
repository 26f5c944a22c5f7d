"""The benchmark times what it says and reports all of it."""

import json

import jax
import pytest

from jaxmix.bench import SUITES, BenchOptions, Row, measure, run_suites, suites, to_json, to_markdown
from jaxmix.bench.report import format_value

TINY = BenchOptions(length=16, heads=1, size=4, chunk_size=8, lengths=(8, 16), repeats=2)


@pytest.fixture(scope="module")
def rows():
    """Every suite, with three mixers; under the name of hla2, which is slow to compile, runs linear attention."""
    linear, delta = (suites.FIXED_STATE[name] for name in ("linear_attention", "gated_delta_rule"))
    with pytest.MonkeyPatch.context() as patch:
        few = {"linear_attention": linear, "gated_delta_rule": delta, "hla2": linear}
        patch.setattr(suites, "FIXED_STATE", few)
        patch.setattr(suites, "hla2", linear)
        return list(run_suites(TINY))


@pytest.mark.parametrize("name", suites.FIXED_STATE)
def test_every_mixer_runs_as_the_suites_call_it(name):
    inputs = suites.draw(TINY, TINY.length)
    out, state = jax.eval_shape(lambda *arrays: suites.FIXED_STATE[name](*arrays, chunk_size=8), *inputs)
    assert out.shape == inputs[2].shape
    assert (
        jax.eval_shape(lambda *arrays: suites.FIXED_STATE[name](*arrays)[0], *(x[:, :1] for x in inputs)).shape[1] == 1
    )
    assert jax.tree.leaves(state)


def test_every_suite_gives_rows_with_positive_values(rows):
    assert {row.suite for row in rows} == set(SUITES)
    assert all(value > 0 for row in rows for value in row.values.values())


def test_ratios_are_those_of_the_medians(rows):
    first, second = rows[0].values, rows[1].values
    assert first["times linear_attention"] == 1
    assert second["times linear_attention"] == pytest.approx(second["milliseconds"] / first["milliseconds"])


def test_each_case_runs_once_to_warm_up_and_then_in_turn():
    calls = []
    timings = measure({name: (calls.append, (name,)) for name in "ab"}, repeats=3)
    assert calls == ["a", "b"] * 4
    assert timings["a"].repeats == 3
    assert timings["a"].lower <= timings["a"].median <= timings["a"].upper


def test_reports_hold_every_value_and_the_command():
    rows = [Row("s", "c", "(1,)", {"x": 0.5}), Row("s", "d", "(2,)", {"y": 1234.6})]
    record = json.loads(to_json(rows, {"jax": "1"}, "jaxmix bench"))
    assert record["rows"][1]["values"] == {"y": 1234.6}
    assert record["command"] == "jaxmix bench"
    table = to_markdown(rows, {"jax": "1"}, "jaxmix bench")
    assert "| c | (1,) | 0.5 |  |" in table
    assert "| d | (2,) |  | 1235 |" in table


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (0.12345, "0.123"), (99.96, "100"), (1e-5, "1.00e-05")])
def test_values_keep_three_digits(value, text):
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("options", "name"), [(BenchOptions(suites=("speed",)), "suites"), (BenchOptions(batch=0), "batch")]
)
def test_bad_options_are_named(options, name):
    with pytest.raises(ValueError, match=name):
        list(run_suites(options))
