"""Interdomain attention in its theory form keeps the mixer contract; with a complete basis it is kernel regression."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.mixers.interdomain import Hippo, InterdomainState, TransitionSummary, interdomain_ideal
from tests.contract import MixerContract, MixerSpec, QueryKeyValueErrors, Shape, Variant
from tests.contract.spec import precision
from tests.mixers.brute_force import by_document
from tests.mixers.families import draw
from tests.mixers.hippo_by_definition import readout
from tests.tolerances import assert_close, rms_ratio

LEGS, LEGT = "legs, bilinear", "legt, bilinear, grouped heads"


def init_state(variant, batch, dtype):
    shape = variant.shape
    return InterdomainState.init(
        batch, shape.kv_heads, variant.options["modes"], shape.key_size, shape.value_size, dtype=dtype
    )


class TestInterdomainIdeal(QueryKeyValueErrors, MixerContract):
    spec = MixerSpec(
        function=interdomain_ideal,
        state=InterdomainState,
        draw=draw,
        init_state=init_state,
        brute_force=lambda inputs, ids, variant: by_document(readout, inputs, ids, normalize=True, **variant.options),
        variants={
            LEGS: Variant({"modes": 6}, positive=True),
            LEGT: Variant(
                {"modes": 4, "basis": "legt", "window": 9.5, "eps": 1e-3},
                Shape(heads=4, kv_heads=2, key_size=3, value_size=4),
                positive=True,
            ),
            "legs, zoh, one key head": Variant(
                {"modes": 5, "discretization": "zoh"}, Shape(heads=3, kv_heads=1), positive=True
            ),
        },
        gates=frozenset(),
        log_gates=frozenset(),
        representatives=(LEGS,),
        sharded_variants=(LEGS,),
        lengths=(5,),
    )

    test_a_decay_of_another_number_of_heads = None


def kernel_regression(q, k, v, window=None):
    """sum_j (q_t . k_j) v_j / sum_j (q_t . k_j) over the newest `window` tokens, for one row of one head."""
    out = np.zeros((len(q), v.shape[1]))
    for t in range(len(q)):
        first = 0 if window is None else max(0, t + 1 - window)
        weights = k[first : t + 1] @ q[t]
        out[t] = weights @ v[first : t + 1] / weights.sum()
    return out


def one_head(tokens, seed=0):
    """Positive features q, k and values v of one head, [T, R] and [T, E] float64."""
    inputs = draw(np.random.default_rng(seed), 1, tokens, Variant(shape=Shape(1, 1), positive=True))
    return [inputs[name][0, :, 0] for name in "qkv"]


def error_against(expected, arrays, dtype=np.float64, **options):
    """RMS ratio of `interdomain_ideal` to `expected` on one head."""
    with precision(dtype):
        q, k, v = (jnp.asarray(x, dtype)[None, :, None] for x in arrays)
        return rms_ratio(interdomain_ideal(q, k, v, eps=1e-30, **options)[0][0, :, 0], expected)


@pytest.mark.parametrize("implementation", ["serial", "scan"])
def test_a_complete_basis_is_kernel_regression(implementation):
    tokens = 16
    arrays = one_head(tokens)
    expected = kernel_regression(*arrays)
    for options in ({"modes": 2 * tokens}, {"modes": 4 * tokens, "basis": "legt", "window": 2 * tokens}):
        assert error_against(expected, arrays, implementation=implementation, **options) <= 1e-9, options


def test_a_complete_basis_is_kernel_regression_in_float32():
    arrays = one_head(16)
    assert error_against(kernel_regression(*arrays), arrays, np.float32, modes=32) <= 5e-6


@pytest.mark.parametrize("tokens", [4, 8, 16, 32])
def test_one_and_three_quarter_modes_a_token_are_enough_for_six_digits(tokens):
    """The smallest number with an error of 1e-6 is 8, 14, 26 and 49; no basis does it with less than one a token."""
    worst = error_of_kappa(tokens, 7 * tokens // 4, "legs", None, "bilinear")
    assert worst <= 2e-6 < 1e-2 < error_of_kappa(tokens, tokens, "legs", None, "bilinear")


@pytest.mark.parametrize(("basis", "window"), [("legs", None), ("legt", 32)])
def test_the_error_of_zero_order_hold_falls_like_one_over_the_modes(basis, window):
    few, many = (error_of_kappa(16, modes, basis, window, "zoh") for modes in (64, 256))
    assert 3 <= few / many <= 6


def error_of_kappa(tokens, modes, basis, window, discretization):
    """Largest entry of kappa_t - I at the last of `tokens`, from the library's transitions."""
    kappa = kappa_of(tokens, modes, basis, window, discretization)
    return np.abs(kappa - np.eye(tokens)).max()


def kappa_of(tokens, modes, basis, window, discretization):
    """kappa_t [T, T] at the last token."""
    hippo = Hippo(basis, modes, window, discretization)
    w = np.zeros((modes, 0))
    with precision():
        a, b = jax.device_get(jax.jit(jax.vmap(hippo.transition))(jnp.arange(1.0, tokens + 1)))
    for t in range(tokens):
        w = np.concatenate([a[t] @ w, b[t][:, None]], axis=1)
    return w.T @ w


@pytest.mark.parametrize("discretization", ["bilinear", "zoh"])
@pytest.mark.parametrize(("basis", "window"), [("legs", None), ("legt", 20)])
def test_kappa_is_positive_semidefinite_below_one_and_of_rank_m(basis, window, discretization):
    values = np.linalg.eigvalsh(kappa_of(40, 24, basis, window, discretization))
    assert -1e-12 <= values[0] <= values[-1] <= 1 + 1e-12
    assert np.all(np.abs(values[: 40 - 24]) < 1e-12)


def test_zero_order_hold_forgets_what_left_the_window_and_bilinear_does_not():
    sharp, blurred = (np.diag(kappa_of(96, 64, "legt", 16, name)) for name in ("zoh", "bilinear"))
    assert np.all(sharp[:-32] < 1e-12)
    assert np.all(sharp[-16:] > 0.85)
    assert np.all(blurred[-16:] > 0.95)
    assert np.max(blurred[:-32]) > 0.4


def test_zero_order_hold_keeps_the_denominator_of_kernel_regression():
    assert_close(kappa_of(40, 5, "legs", None, "zoh").sum(axis=0), np.ones(40), 1e-12)


@pytest.mark.parametrize("options", [{}, {"discretization": "zoh"}, {"basis": "legt", "window": 9.0}], ids=str)
def test_equal_values_are_their_own_average(options):
    q, k, v = one_head(20)
    error = error_against(np.ones_like(v), (q, k, np.ones_like(v)), modes=4, **options)
    assert error <= 1e-12


def test_the_count_is_the_length_of_the_last_segment():
    ids = jnp.array([[1, 1, 0, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 1]], jnp.int32)
    q, k, v = jnp.ones((3, 3, 7, 2, 4))
    state = InterdomainState.init(3, 2, 3, 4, 4)
    for expected in ([[3, 3], [0, 0], [4, 4]], [[3, 3], [0, 0], [8, 8]]):
        _, state = interdomain_ideal(q, k, v, modes=3, segment_ids=ids, initial_state=state, chunk_size=4)
        assert np.array_equal(state.count, expected)


def test_the_operator_is_associative_and_folds_to_the_serial_state():
    @jax.jit
    def folds(q, k, v):
        phi, b = Hippo("legs", 4, None, "bilinear").transition(jnp.arange(1.0, 6.0))
        tokens = TransitionSummary.token_summary(k, v, phi, b)
        one_by_one = [jax.tree.map(lambda x, t=t: x[t], tokens) for t in range(5)]
        nothing = TransitionSummary.identity((), 4, k.shape[1], v.shape[1], k.dtype)
        left = functools.reduce(TransitionSummary.combine, one_by_one, nothing)
        right = functools.reduce(lambda later, earlier: TransitionSummary.combine(earlier, later), one_by_one[::-1])
        num, den = jax.lax.associative_scan(TransitionSummary.combine, tokens).read(q)
        return left, right, num / den[:, None]

    arrays = one_head(5)
    with precision():
        left, right, read = jax.device_get(folds(*map(jnp.asarray, arrays)))
        tokens = (jnp.asarray(x)[None, :, None] for x in arrays)
        out, state = interdomain_ideal(*tokens, modes=4, eps=1e-30, implementation="serial")
        final = state.pack()
    assert_close(right, left, 1e-12)
    assert_close(read, out[0, :, 0], 1e-12)
    assert_close(left.X, final[0, 0], 1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"basis": "legt"}, "window: expected a positive number, got None"),
        ({"basis": "legt", "window": 0}, "window: expected a positive number, got 0"),
        ({"window": 8}, "window: expected None with basis='legs'.*got 8"),
        ({"basis": "fourier"}, "basis: expected one of 'legs', 'legt', got 'fourier'"),
        ({"discretization": "euler"}, "discretization: expected one of 'bilinear', 'zoh', got 'euler'"),
        ({"modes": 0}, "modes: expected an int of at least 1, got 0"),
        ({"eps": 0.0}, "eps: expected a positive number, got 0.0"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        interdomain_ideal(*jnp.ones((3, 1, 4, 2, 3)), **options)
