"""The mixer contract, kernels in place of the scan: with the primitive in plain jax.numpy, so that float64 is exact."""

from tests.contract.agreement import Agreement
from tests.contract.packing import Packing
from tests.contract.streaming import Streaming
from tests.contract.suite import Suite
from tests.contract.transforms import Transforms
from tests.kernels.by_kernel import by_kernel
from tests.kernels.targets import ReferenceTarget
from tests.mixers import test_ahla, test_hla2, test_hla3, test_linear_attention
from tests.mixers.families import NORMALISED, PLAIN

COMPOSED, KEPT = ReferenceTarget(), ReferenceTarget(keeps=True)
"""With gradients as on a TPU, and as on a GPU."""
FEW = (PLAIN, NORMALISED, "grouped heads, own decay")
ABOUT_OTHER_FORMS = (
    "test_serial_is_the_explicit_sum",
    "test_serial_is_the_explicit_sum_of_each_packed_document",
    "test_serial_gradients_are_finite_differences",
    "test_token_scan_equals_serial_with_every_gradient",
    "test_any_chunk_size",
    "test_chunks_with_every_gradient",
    "test_a_broken_document_does_not_reach_the_next",
    "test_no_choice_means_scan_on_a_cpu",
    "test_inputs_of_mixed_dtypes",
    "test_matrix_products_are_forced_to_full_precision",
    "test_scan_memory_grows_with_chunks_and_holds_no_square",
)


def without(*names):
    """Leaves out inherited tests."""

    def leave_out(suite):
        for name in names:
            setattr(suite, name, None)
        return suite

    return leave_out


@without(*ABOUT_OTHER_FORMS)
class TestLinearAttention(Agreement, Streaming, Packing, Transforms):
    """The mixer that is cheapest to compile keeps all of the contract that kernels have a part in."""

    spec = by_kernel(test_linear_attention.TestLinearAttention.spec, KEPT)


class HigherOrder(Suite):
    """What the higher orders add: chains of linear attentions, and states made of several."""

    test_scan_equals_serial_with_every_gradient = Agreement.test_scan_equals_serial_with_every_gradient
    test_packed_equals_separate_with_every_gradient = Packing.test_packed_equals_separate_with_every_gradient
    test_a_document_gets_no_gradient_from_the_next = Packing.test_a_document_gets_no_gradient_from_the_next
    test_prefill_then_decode_equals_one_pass = Streaming.test_prefill_then_decode_equals_one_pass


class TestHLA2(HigherOrder):
    own = ("unmasked", "ridge, normalised, shared heads")
    spec = by_kernel(test_hla2.TestHLA2.spec, KEPT, (*FEW, *own))
    # Squares of decays; the other orders differ in powers only.
    test_strong_decay_stays_finite_and_exact = Agreement.test_strong_decay_stays_finite_and_exact


class TestAHLA(HigherOrder):
    spec = by_kernel(test_ahla.TestAHLA.spec, COMPOSED, FEW)


class TestHLA3(HigherOrder):
    spec = by_kernel(test_hla3.TestHLA3.spec, COMPOSED, FEW)
