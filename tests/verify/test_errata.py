"""The rows about the paper's faults pass because the printed formulas fail, and would fail if they did not."""

import numpy as np
import pytest

from jaxmix.verify import errata, errata_interdomain, errata_rows, explicit
from jaxmix.verify.explicit.hippo import impulses


@pytest.mark.parametrize("seed", range(20))
def test_every_row_passes(seed):
    failures = [row for row in errata_rows(seed=seed) if not row.passed]
    assert not failures


def test_each_fault_is_shown_and_told_in_words():
    faults = [row for row in errata_rows() if row.expect == "above"]
    interdomain = ["interdomain_attention"] * 2 + ["interdomain_ideal"] * 2
    assert [row.mixer for row in faults] == ["hla2"] * 3 + ["ahla"] * 2 + ["hla3"] + interdomain
    assert all(row.note.endswith("as documented") and row.error > 0.05 for row in faults)


def exact_third_order(q, k, v):
    return explicit.hla3(*(x[None, :, None] for x in (q, k, v)))[0, :, 0]


SOUND = {
    "printed_hla2_combine": (lambda: errata.corrected_printed_hla2_combine, "not associative"),
    "printed_ahla_combine": (lambda: errata.flat_ahla_combine, "not associative"),
    "hla3_printed_recurrence": (lambda: exact_third_order, "not the masked product"),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_printed_formula_that_holds_fails_its_row(monkeypatch, name):
    replacement, words = SOUND[name]
    monkeypatch.setattr(errata, name, replacement_of(name, replacement()))
    failures = [row for row in errata_rows() if not row.passed]
    assert any(words in row.note for row in failures)


def replacement_of(name, replacement):
    """The corrected printed operator is written in terms of the printed one, so it must keep the original."""
    if name != "printed_hla2_combine":
        return replacement
    original = errata.printed_hla2_combine

    def combine(a, b):
        return original(a, b)._replace(G=b.rho * a.G + b.G + b.X @ a.C)

    return combine


@pytest.mark.parametrize("name", ["corrected_printed_hla2_combine", "masked_hla2_combine", "flat_ahla_combine"])
def test_a_correction_that_fails_fails_its_rows(monkeypatch, name):
    original = getattr(errata, name)

    def broken(a, b):
        combined = original(a, b)
        field = "E" if hasattr(combined, "E") else "G"
        return combined._replace(**{field: getattr(combined, field) * (1 + 1e-9)})

    monkeypatch.setattr(errata, name, broken)
    failures = [row for row in errata_rows() if not row.passed]
    assert failures
    assert all(row.expect == "below" for row in failures)


def test_other_choices_that_worked_would_fail_their_rows(monkeypatch):
    original = errata_interdomain.modal_attention
    monkeypatch.setattr(errata_interdomain, "modal_attention", lambda *x, unit_gain: original(*x, unit_gain=False))
    monkeypatch.setattr(
        errata_interdomain,
        "step_per_token",
        lambda tokens, modes: impulses(tokens, modes, "legs", None, "bilinear")[-1],
    )
    failures = [row for row in errata_rows() if not row.passed]
    assert [row.expect for row in failures] == ["above"] * 3
    assert [row.mixer for row in failures] == ["interdomain_attention"] * 2 + ["interdomain_ideal"]


def test_our_choices_that_failed_would_fail_their_rows(monkeypatch):
    original = errata_interdomain.modal_attention
    monkeypatch.setattr(errata_interdomain, "modal_attention", lambda *x, unit_gain: original(*x, unit_gain=True))
    monkeypatch.setattr(errata_interdomain, "impulses", lambda tokens, modes, *x: [np.eye(modes, tokens) * (1 + 1e-7)])
    failures = {row.mixer for row in errata_rows() if not row.passed and row.expect == "below"}
    assert failures == {"interdomain_attention", "interdomain_ideal"}


def test_folds_order_their_operands():
    words = [np.array(list("abc"), object)[i] for i in range(3)]
    assert errata.left_fold(lambda a, b: f"({a}{b})", words) == "((ab)c)"
    assert errata.right_fold(lambda a, b: f"({a}{b})", words) == "(a(bc))"
