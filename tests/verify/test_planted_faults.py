"""A fault planted in a mixer is found by one of the checks on its entry."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest

from jaxmix.mixers.diagonal import DiagonalChunks
from jaxmix.mixers.interdomain import ideal_chunks
from jaxmix.operators import DeltaSummary
from jaxmix.verify import VerifyOptions, verify_mixer
from jaxmix.verify.catalogue import select
from tests.verify.toys import wrong_gradient

s4d_module, ssd_module, delta_module = (
    importlib.import_module(f"jaxmix.mixers.{name}") for name in ("s4d", "ssd", "delta.delta_rule")
)
"""The packages have functions of these names."""
RECENT = ("s4d", "interdomain_attention", "interdomain_ideal", "gated_delta_rule", "delta_rule", "ssd")


@pytest.fixture(autouse=True)
def nothing_stays_compiled():
    yield
    jax.clear_caches()


def failed(name, check):
    """The cases of the first entry of a mixer that failed a check."""
    options = VerifyOptions(length=9, heads=2, kv_heads=1, key_size=2, value_size=3, chunk_sizes=(4,), checks=(check,))
    rows = verify_mixer(select((name,))[0], options).rows
    assert rows
    return [f"{row.check}: {row.case}" for row in rows if not row.passed]


@pytest.mark.parametrize("name", RECENT)
def test_sound_mixers_and_operators_pass(name):
    assert not failed(name, "operator")


def test_s4d_without_input_gain_is_not_the_explicit_sum(monkeypatch):
    original = s4d_module.discretize

    def unit_gain(*arguments):
        modes = original(*arguments)
        one = jnp.stack([jnp.ones_like(modes.turns), jnp.zeros_like(modes.turns)], axis=1)
        return dataclasses.replace(modes, gain=one)

    monkeypatch.setattr(s4d_module, "discretize", unit_gain)
    cases = failed("s4d", "forms")
    assert "explicit sum: direct path: serial, float64" in cases
    assert all(case.startswith("explicit sum") for case in cases)


def test_interdomain_attention_that_reads_over_a_border_differs_where_there_are_segments(monkeypatch):
    monkeypatch.setattr(DiagonalChunks, "from_start", lambda self, x: x)
    cases = failed("interdomain_attention", "forms")
    assert "forms: full C, segments: scan, chunk 4, float64: outputs" in cases
    assert all("segments: scan" in case for case in cases)


def test_interdomain_ideal_that_forgets_its_clock_cannot_be_split(monkeypatch):
    original = ideal_chunks._clock
    monkeypatch.setattr(ideal_chunks, "_clock", lambda h, x, count, axis: original(h, x, jnp.zeros_like(count), axis))
    assert "split: scan, chunk 4: two calls against one pass: final state" in failed("interdomain_ideal", "split")


def test_a_wrong_gradient_of_the_chunked_delta_rule_is_seen(monkeypatch):
    original = delta_module.delta_chunks

    def faulty(*arguments):
        out, *others = original(*arguments)
        return wrong_gradient(out), *others

    monkeypatch.setattr(delta_module, "delta_chunks", faulty)
    cases = failed("gated_delta_rule", "gradients")
    assert "gradients: scan, chunk 4 against serial: beta" in cases
    assert all(case.startswith("gradients: scan, chunk 4 against serial") for case in cases)


def test_a_delta_rule_operator_in_the_wrong_order_does_not_give_the_state(monkeypatch):
    original = DeltaSummary.combine
    monkeypatch.setattr(DeltaSummary, "combine", staticmethod(lambda a, b: original(b, a)))
    assert "operator: DeltaSummary: left fold against the serial final state (S)" in failed("delta_rule", "operator")


def test_an_ssd_that_decays_at_padding_differs_from_documents_by_themselves(monkeypatch):
    original = ssd_module._SSD.step

    def step(self, state, q, k, v, a):
        return original(self, state, q, k, v, jnp.where(a == 1, 0.999, a))

    monkeypatch.setattr(ssd_module._SSD, "step", step)
    assert any("serial: outputs against separate documents" in case for case in failed("ssd", "packed"))
