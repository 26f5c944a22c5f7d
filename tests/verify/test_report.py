"""Rows, verdicts, JSON and the table."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

from jaxmix.verify import Report, Row, relative_error
from jaxmix.verify.render import render


def row(**changes):
    settings = {
        "mixer": "hla2",
        "option": "masked",
        "check": "forms",
        "case": "scan, chunk 4",
        "error": 1e-12,
        "tolerance": 1e-10,
    }
    return Row(**{**settings, **changes})


def report(*rows):
    return Report(rows=rows, options={"seed": 0}, seconds=1.25, environment={"jax": "0.0"})


def text(thing, **options):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(thing, **options))
    return console.export_text()


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, True),
        ({"error": 1e-10}, True),
        ({"error": 1e-9}, False),
        ({"error": math.inf}, False),
        ({"error": 0.0, "tolerance": 0.0}, True),
        ({"error": 0.2, "tolerance": 1e-2, "expect": "above"}, True),
        ({"error": 1e-3, "tolerance": 1e-2, "expect": "above"}, False),
        ({"error": math.inf, "tolerance": 1e-2, "expect": "above"}, False),
    ],
)
def test_verdict_of_a_row(changes, passed):
    assert row(**changes).passed is passed


def test_a_report_is_ok_when_every_row_passed_and_there_is_one():
    assert report(row(), row()).ok
    assert not report(row(), row(error=1.0)).ok
    assert not report().ok
    assert "nothing was checked" in report().summary


def test_json_has_every_row_and_no_infinity():
    document = json.loads(report(row(), row(error=math.inf, note="raised")).to_json())
    assert document["ok"] is False
    assert (document["passed"], document["failed"]) == (1, 1)
    assert document["rows"][1]["error"] is None
    assert document["rows"][1]["note"] == "raised"
    assert [r["passed"] for r in document["rows"]] == [True, False]


def test_the_table_shows_the_worst_of_each_check_and_every_failure():
    shown = text(report(row(case="small"), row(case="large", error=9e-11), row(check="split", error=1.0, case="bad")))
    assert "large" in shown
    assert "small" not in shown
    assert "2/2" in shown
    assert shown.count("bad") == 2
    assert "FAIL" in shown
    assert "1 FAILED" in shown


def test_a_failure_is_worse_than_any_large_error_that_passed():
    shown = text(report(row(case="documented", error=0.5, tolerance=0.01, expect="above"), row(case="bad", error=1e-9)))
    assert "bad" in shown.split("failures")[0]


def test_details_show_every_row():
    shown = text(report(row(case="small"), row(case="large", error=9e-11)), details=True)
    assert "small" in shown
    assert "large" in shown


@pytest.mark.parametrize(
    ("actual", "reference", "error"),
    [
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-30], [0.0, 0.0], math.inf),
        ([math.nan, 2.0], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [math.inf, 2.0], math.inf),
        ([1.0], [1.0, 2.0], math.inf),
    ],
)
def test_relative_error(actual, reference, error):
    assert relative_error(np.array(actual), np.array(reference)) == pytest.approx(error)


def test_relative_error_of_trees_is_that_of_the_worst_leaf():
    reference = {"small": np.array([1e-6]), "large": np.array([1.0])}
    assert relative_error({**reference, "small": np.array([2e-6])}, reference) == pytest.approx(1.0)
    assert relative_error({"large": reference["large"]}, reference) == math.inf
