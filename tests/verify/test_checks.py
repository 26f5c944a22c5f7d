"""Every kind of check passes a sound mixer and catches the fault that it is there for."""

import math

import jax
import pytest

from jaxmix.verify import VerifyOptions, verify_mixer
from tests.verify.toys import faulty_operator, toy


def rows(mixer, check, **changes):
    settings = {"length": 8, "chunk_sizes": (3,), "checks": (check,), **changes}
    return verify_mixer(mixer, VerifyOptions(**settings)).rows


def failed(mixer, check, **changes):
    return [row.case for row in rows(mixer, check, **changes) if not row.passed]


@pytest.fixture(scope="module")
def sound():
    return verify_mixer(toy(), VerifyOptions(length=8, chunk_sizes=(1, 3)))


def test_a_sound_mixer_passes_every_check(sound):
    assert sound.ok, sound.failures
    assert {row.check for row in sound.rows} == {
        "explicit sum",
        "forms",
        "gradients",
        "split",
        "packed",
        "causality",
    }


def test_the_checks_leave_the_precision_of_the_process_alone(sound):
    assert sound.ok
    assert not jax.config.jax_enable_x64


CAUGHT = {
    "wrong sum": ("forms", "serial, float64", ""),
    "scan differs": ("forms", "scan, chunk 3, float64: outputs", "scan"),
    "scan is NaN": ("forms", "scan, chunk 3, float64: outputs", "scan"),
    "scan has another shape": ("forms", "scan, chunk 3, float64: outputs", "scan"),
    "not causal": ("causality", "serial: outputs up to t when the tokens behind t change", ""),
    "state of the token before": ("split", "serial: shorter calls against one pass: outputs", "serial"),
    "state ignored": ("split", "scan, chunk 3: two calls against one pass: outputs", "scan"),
    "leak": ("packed", "serial: document 2, bit for bit, when document 1 and the initial state change", ""),
    "padding decays": ("packed", "serial: outputs against separate documents, 0 at padding", ""),
    "padding read": ("packed", "serial: outputs against separate documents, 0 at padding", ""),
    "gradient": ("gradients", "serial against finite differences: x", "finite differences: x"),
    "scan gradient": ("gradients", "scan, chunk 3 against serial: x", "scan, chunk 3 against serial: x"),
    "state gradient": ("gradients", "serial against finite differences: initial_state", "initial_state"),
}


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_fault_is_caught_by_its_check_and_blamed_on_the_right_form(fault):
    check, case, words = CAUGHT[fault]
    cases = failed(toy(fault), check)
    assert case in cases
    assert all(words in other for other in cases)


def test_a_fault_of_low_precision_shows_in_that_precision_only():
    assert not failed(toy("low precision"), "forms")
    assert failed(toy("low precision"), "forms", dtype="float32")
    assert not failed(toy(), "forms", dtype="float32")


def test_causality_needs_outputs_that_move():
    found = rows(toy("constant"), "causality")
    assert all(row.error == math.inf and "nothing was tested" in row.case for row in found)


def test_a_check_that_raises_is_a_failed_row_with_the_message():
    (row,) = [row for row in rows(toy("raises"), "causality") if row.error == math.inf]
    assert not row.passed
    assert row.note == "raised RuntimeError: no scan today"


def test_a_mixer_without_gradient_fails_the_gradients_alone():
    report = verify_mixer(toy("no gradient"), VerifyOptions(length=8, chunk_sizes=(3,)))
    assert [row.check for row in report.failures] == ["gradients"]


def test_a_mixer_without_segments_or_scan_is_checked_in_what_it_has():
    report = verify_mixer(toy(segments=False, implementations=("serial",)), VerifyOptions(length=8))
    assert report.ok
    assert {row.check for row in report.rows} == {"explicit sum", "gradients", "split", "causality"}
    assert failed(toy("state of the token before", segments=False, implementations=("serial",)), "split")


def test_any_other_form_is_compared_without_segments_and_its_gradient_in_a_full_run():
    mixer = toy("no other segments", implementations=("serial", "other"))
    report = verify_mixer(mixer, VerifyOptions(length=8, full=True))
    assert report.ok, report.failures
    cases = {row.case for row in report.rows}
    assert {"other, float64: outputs", "other against serial: x", "other against serial: initial_state"} <= cases
    assert not any("other" in row.case for row in report.rows if row.check in ("packed", "split"))


OPERATOR_FAULTS = {
    "not associative": "right fold against left fold",
    "wrong order": "left fold against the serial final state",
    "identity": "identity on either side",
    "read": "read of the left fold against the serial output",
}


def test_a_sound_operator_passes():
    assert not failed(faulty_operator(), "operator")


@pytest.mark.parametrize("fault", OPERATOR_FAULTS)
def test_a_faulty_operator_is_caught(fault):
    cases = failed(faulty_operator(fault), "operator")
    assert any(OPERATOR_FAULTS[fault] in case for case in cases)
