"""The mixers of jaxmix through `verify`, and what the options refuse."""

import doctest
import inspect
import json

import jax
import numpy as np
import pytest

import jaxmix
import jaxmix.mixers
import jaxmix.verify
from jaxmix.verify import MixerUnderTest, VerifyOptions, verify
from jaxmix.verify.catalogue import catalogue
from jaxmix.verify.options import CHECK_NAMES
from jaxmix.verify.subject import Form, Subject, segment_layout


@pytest.fixture(scope="module")
def report():
    done = []
    result = verify(VerifyOptions(mixers=("linear_attention",)), progress=done.append)
    assert done == ["linear_attention plain, normalised"]
    return result


def test_linear_attention_passes_every_check(report):
    assert report.ok, report.failures
    assert {row.check for row in report.rows} == {
        "explicit sum",
        "forms",
        "operator",
        "gradients",
        "split",
        "packed",
        "causality",
    }


def test_every_option_form_and_kind_of_decay_has_a_row(report):
    cases = {(row.option, row.case) for row in report.rows if row.check == "explicit sum"}
    for option in ("plain", "normalised"):
        for label in ("no decay", "decay per head", "decay per token", "decay per token, segments"):
            assert (option, f"{label}: serial, float64") in cases
        assert (option, "decay per token: token scan, float64") in cases
        assert (option, "decay per token, segments: scan, chunk 4, float64") in cases


def test_every_gradient_has_a_row_of_its_own(report):
    names = {row.case.split(": ")[1] for row in report.rows if row.check == "gradients"}
    assert names == {"q", "k", "v", "log_decay", "initial_state.P", "initial_state.m"}


def test_the_report_says_what_was_run(report):
    document = json.loads(report.to_json())
    assert document["options"]["mixers"] == ["linear_attention"]
    assert document["environment"]["jax"] == jax.__version__


def test_errata_alone_need_no_compilation():
    result = verify(VerifyOptions(checks=("errata",)))
    assert result.ok
    assert {row.mixer for row in result.rows} == {"hla2", "ahla", "hla3", "interdomain_attention", "interdomain_ideal"}


def test_the_example_of_the_package_runs():
    results = doctest.testmod(jaxmix.verify)
    assert results.attempted > 8
    assert results.failed == 0


@pytest.mark.parametrize("mixer", catalogue(), ids=lambda m: f"{m.name} {m.read_outs[0]}")
def test_catalogue_entries_and_their_explicit_sums_have_one_shape(mixer):
    subject = Subject(mixer, VerifyOptions())
    ids = segment_layout(subject.options)
    for label in mixer.input_makers:
        inputs = subject.inputs(label)
        outs, _ = jax.eval_shape(lambda x: subject.apply(Form("scan", 4), x, ids), inputs)
        sums = mixer.brute_force(**inputs)
        assert [out.shape for out in outs] == [x.shape for x in sums]
        assert len(outs) == len(mixer.read_outs)


def test_the_catalogue_has_every_option_of_every_mixer():
    assert {(m.name, option) for m in catalogue() for option in m.read_outs} == {
        ("linear_attention", "plain"),
        ("linear_attention", "normalised"),
        ("hla2", "masked"),
        ("hla2", "unmasked"),
        ("hla2", "ridge"),
        ("hla2", "normalised"),
        ("hla2", "printed decay"),
        ("ahla", "plain"),
        ("ahla", "normalised"),
        ("hla3", "exact mask"),
        ("hla3", "normalised"),
        ("hla3", "printed mask"),
        ("gated_delta_rule", "plain"),
        ("gated_delta_rule", "scale"),
        ("delta_rule", "plain"),
        ("delta_rule", "scale"),
        ("ssd", "plain"),
        ("s4d", "zoh"),
        ("s4d", "bilinear"),
        ("interdomain_attention", "zoh"),
        ("interdomain_attention", "bilinear, conjugate"),
        ("interdomain_attention", "normalised"),
        ("interdomain_ideal", "legs, bilinear"),
        ("interdomain_ideal", "legs, zoh"),
        ("interdomain_ideal", "legt, bilinear"),
        ("interdomain_ideal", "legt, zoh"),
    }


def test_the_catalogue_has_every_recurrent_mixer():
    others = {"block_softmax_attention", "natsl_attention", "softmax_attention"}
    functions = {name for name, x in vars(jaxmix.mixers).items() if inspect.isfunction(x) and name in jaxmix.__all__}
    assert {mixer.name for mixer in catalogue()} == functions - others


def test_the_help_names_every_mixer_and_check():
    assert VerifyOptions.__doc__
    words = VerifyOptions.__doc__.replace(",", " ").replace(";", " ").split()
    assert {mixer.name for mixer in catalogue()} | set(CHECK_NAMES) <= set(words)


def test_a_quick_run_limits_an_entry_that_says_so_and_a_full_one_does_not():
    mixer = MixerUnderTest(name="mine", function=None, make_inputs=dict, quick_checks=("forms", "split"))
    assert mixer.checks(VerifyOptions()) == ("forms", "split")
    assert mixer.checks(VerifyOptions(checks=("split", "packed"))) == ("split",)
    assert mixer.checks(VerifyOptions(checks=("split", "packed"), full=True)) == ("split", "packed")
    assert mixer.checks(VerifyOptions(full=True)) == CHECK_NAMES


def test_a_quick_run_makes_every_check_on_an_entry_of_every_mixer():
    assert {mixer.name for mixer in catalogue() if not mixer.quick_checks} == {mixer.name for mixer in catalogue()}


@pytest.mark.parametrize("length", [8, 11, 12, 31])
def test_segment_layout_has_two_documents_of_one_size_and_padding(length):
    ids = segment_layout(VerifyOptions(batch=3, length=length))
    sizes = [(row == document).sum() for row in ids for document in (1, 2)]
    assert set(sizes) == {(length - 2) // 2}
    assert (ids == 0).any(axis=1).all()
    assert all((np.diff(row[row > 0]) >= 0).all() for row in ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch: expected at least 1, got 0"),
        ({"length": 7}, "length: expected at least 8 tokens, got 7"),
        ({"heads": 3, "kv_heads": 2}, "kv_heads: expected a divisor of heads = 3, got 2"),
        ({"chunk_sizes": ()}, "chunk_sizes: expected one or more positive integers"),
        ({"chunk_sizes": (0, 4)}, "chunk_sizes: expected one or more positive integers"),
        ({"dtype": "float16"}, "dtype: expected one of float64, float32, bfloat16, got 'float16'"),
        ({"seed": -1}, "seed: expected a non-negative integer, got -1"),
        ({"checks": ("form",)}, "checks: expected names among forms, .*, got form"),
    ],
)
def test_bad_options_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        VerifyOptions(**changes)


def test_an_unknown_mixer_is_refused():
    with pytest.raises(ValueError, match=r"mixers: expected names among .*hla2.*, got hla4"):
        verify(VerifyOptions(mixers=("hla4",)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"implementations": ("scan",)}, "implementations: expected"),
        ({"quick_checks": ("form",)}, "quick_checks: expected names among forms, .*, got form"),
        ({"make_inputs": {}}, "make_inputs: expected a function or a mapping with at least one"),
        ({"option": "a", "read_outs": ("b",)}, "option: expected none beside read_outs"),
    ],
)
def test_a_bad_description_of_a_mixer_is_refused(changes, message):
    settings = {"name": "mine", "function": None, "make_inputs": dict, **changes}
    with pytest.raises(ValueError, match=message):
        MixerUnderTest(**settings)


@pytest.mark.parametrize(
    ("chunk_sizes", "short"), [((1, 4), 4), ((1, 4, 16), 4), ((1,), 1), ((1, 64), 64), ((2, 5), 5)]
)
def test_the_short_chunk_gives_several_chunks_where_it_can(chunk_sizes, short):
    assert VerifyOptions(length=11, chunk_sizes=chunk_sizes).short_chunk == short
