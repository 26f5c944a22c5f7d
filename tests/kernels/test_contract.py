"""The mixer contract, kernels in place of the scan: with the primitive in plain jax.numpy, so that float64 is exact."""

import functools

import pytest

from tests.contract.agreement import Agreement
from tests.contract.packing import Packing
from tests.contract.streaming import Streaming
from tests.contract.suite import Suite
from tests.contract.transforms import Transforms
from tests.kernels.by_kernel import by_kernel
from tests.kernels.targets import ReferenceTarget
from tests.mixers import test_ahla, test_hla2, test_hla3, test_linear_attention
from tests.mixers.families import NORMALISED, PLAIN

TARGET = ReferenceTarget()
FEW = (PLAIN, NORMALISED, "grouped heads, own decay")
ABOUT_OTHER_FORMS = (
    "test_serial_is_the_explicit_sum",
    "test_serial_is_the_explicit_sum_of_each_packed_document",
    "test_serial_gradients_are_finite_differences",
    "test_token_scan_equals_serial_with_every_gradient",
    "test_chunks_with_every_gradient",
    "test_documents_in_arrays_of_their_own_give_the_same_bits",
    "test_a_broken_document_does_not_reach_the_next",
    "test_single_tokens_equal_one_pass_with_every_gradient",
    "test_a_state_is_a_frozen_dataclass_and_a_pytree",
    "test_reset_starts_only_the_named_streams_anew",
    "test_reset_clears_even_a_broken_state",
    "test_reset_stops_the_gradient_of_the_streams_it_clears",
    "test_no_choice_means_scan_on_a_cpu",
    "test_inputs_of_mixed_dtypes",
    "test_matrix_products_are_forced_to_full_precision",
    "test_scan_memory_grows_with_chunks_and_holds_no_square",
)
SHOWN_ELSEWHERE = (
    "test_vmap_equals_one_call_after_another",
    "test_training_in_bfloat16_stays_finite_and_learns",
    "test_lengths_inside_one_bucket_compile_once",
)
"""By `test_vjp` with every gradient in float64; by the gradients in bfloat16; by the scan, which is called the same."""
ABOUT_FEWER_TOKENS = ("test_as_many_tokens_as_heads", "test_a_chunk_longer_than_the_sequence")
"""One of the lengths to sixteen; kernels have chunks of their own."""


def without(*names):
    """Leaves out inherited tests, and what the others say of the serial form."""

    def leave_out(suite):
        for name in names:
            setattr(suite, name, None)
        for name in dir(suite):
            marks = getattr(getattr(suite, name), "pytestmark", ())
            if name.startswith("test_") and any("form" in mark.args[0] for mark in marks):
                setattr(suite, name, only(getattr(suite, name), form=is_by_kernels))
        return suite

    return leave_out


def only(test, **choices):
    """The test with those values of its parameters for which a function is true."""

    @functools.wraps(test)
    def chosen(*arguments, **options):
        return test(*arguments, **options)

    chosen.pytestmark = [_choose(mark, choices) for mark in test.pytestmark]
    return chosen


def _choose(mark, choices):
    names, rows = mark.args
    columns = names if isinstance(names, tuple) else (names,)
    for name in choices.keys() & set(columns):
        position = columns.index(name)
        rows = [row for row in rows if choices[name](row if isinstance(names, str) else row[position])]
    return pytest.mark.parametrize(names, rows, ids=str).mark


def is_by_kernels(form):
    return form.implementation == "scan"


@without(*ABOUT_OTHER_FORMS, *SHOWN_ELSEWHERE, *ABOUT_FEWER_TOKENS)
class TestLinearAttention(Agreement, Streaming, Packing, Transforms):
    """The mixer that is cheapest to compile keeps all of the contract that kernels have a part in."""

    spec = by_kernel(test_linear_attention.TestLinearAttention.spec, TARGET)


class HigherOrder(Suite):
    """What the higher orders add: chains of linear attentions, and states made of several."""

    test_scan_equals_serial_with_every_gradient = Agreement.test_scan_equals_serial_with_every_gradient
    test_packed_equals_separate_with_every_gradient = only(
        Packing.test_packed_equals_separate_with_every_gradient, form=is_by_kernels
    )
    test_a_document_gets_no_gradient_from_the_next = only(
        Packing.test_a_document_gets_no_gradient_from_the_next, form=is_by_kernels
    )


class TestHLA2(HigherOrder):
    own = ("unmasked", "ridge, normalised, shared heads")
    spec = by_kernel(test_hla2.TestHLA2.spec, TARGET, (*FEW, *own))
    # Squares of decays; the other orders differ in powers only.
    test_strong_decay_stays_finite_and_exact = Agreement.test_strong_decay_stays_finite_and_exact


class TestAHLA(HigherOrder):
    spec = by_kernel(test_ahla.TestAHLA.spec, TARGET, FEW)


class TestHLA3(HigherOrder):
    spec = by_kernel(test_hla3.TestHLA3.spec, TARGET, FEW)
