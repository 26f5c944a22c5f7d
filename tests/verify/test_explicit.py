"""The explicit sums equal the recurrences that define the same mixers, in numpy."""

import numpy as np
import pytest

from jaxmix.verify import explicit
from jaxmix.verify.checks.forms import by_segment
from jaxmix.verify.explicit.hippo import impulses, transition

RNG = np.random.default_rng(0)
T, H, G = 12, 4, 2
Q, K, V = (RNG.standard_normal((2, T, heads, size)) for heads, size in ((H, 3), (G, 3), (G, 5)))
LOG_DECAY = -RNG.uniform(0.0, 1.0, (2, T, H))
LOG_DECAY[1, 5] = -80.0


def linear(q, k, v, log_decay, power=1, strict=False):
    """LA(q, k, v; a^power) by its recurrence; `strict` leaves the current token out."""
    state = np.zeros((*k[:, 0].shape, v.shape[-1]))
    outputs = []
    for t in range(T):
        before = state
        state = np.exp(power * log_decay[:, t])[..., None, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(np.einsum("bhd,bhde->bhe", q[:, t], before if strict else state))
    return np.stack(outputs, axis=1)


def arrays():
    return Q, np.repeat(K, H // G, axis=2), np.repeat(V, H // G, axis=2)


def assert_equal(actual, expected):
    assert np.abs(actual - expected).max() < 1e-13 * np.abs(expected).max()


def test_linear_attention():
    assert_equal(explicit.linear_attention(Q, K, V, LOG_DECAY), linear(*arrays(), LOG_DECAY))


def test_hla2():
    q, k, v = arrays()
    expected = linear(q, linear(q, k, k, LOG_DECAY), v, LOG_DECAY, power=2)
    assert_equal(explicit.hla2(Q, K, V, LOG_DECAY), expected)


def test_hla2_ridge_adds_linear_attention_of_the_queries():
    q, _, v = arrays()
    added = explicit.hla2(Q, K, V, LOG_DECAY, ridge=0.3) - explicit.hla2(Q, K, V, LOG_DECAY)
    assert_equal(added, 0.3 * linear(q, q, v, LOG_DECAY))


def test_hla2_unmasked_and_printed():
    q, k, v = arrays()
    unmasked = linear(linear(q, k, k, LOG_DECAY), q, v, LOG_DECAY)
    subtracted = linear(q, k, linear(k, q, v, LOG_DECAY, strict=True), LOG_DECAY)
    assert_equal(explicit.hla2(Q, K, V, LOG_DECAY, masked=False), unmasked)
    assert_equal(explicit.hla2(Q, K, V, LOG_DECAY, decay_form="printed"), unmasked - subtracted)


def test_ahla():
    q, k, v = arrays()
    assert_equal(explicit.ahla(Q, K, V, LOG_DECAY), linear(q, k, linear(q, k, v, LOG_DECAY), LOG_DECAY))


def test_hla3_exact():
    q, k, v = arrays()
    expected = linear(q, linear(q, k, k, LOG_DECAY), linear(q, k, v, LOG_DECAY), LOG_DECAY, power=3)
    assert_equal(explicit.hla3(Q, K, V, LOG_DECAY), expected)


def test_hla3_printed():
    q, k, v = arrays()
    none = np.zeros((2, T, H))
    qk = (q * k).sum(-1, keepdims=True)
    first = linear(q, linear(q, k, k, none, strict=True), qk * v, none)
    kqq = (k * linear(k, q, q, none, strict=True)).sum(-1, keepdims=True)
    second = (kqq + qk**2) * v + qk * linear(q, k, v, none, strict=True)
    assert_equal(explicit.hla3(Q, K, V, mask="printed"), first + linear(q, k, second, none))


@pytest.mark.parametrize("mixer", [explicit.linear_attention, explicit.hla2, explicit.ahla, explicit.hla3])
def test_normalised_outputs_of_constant_values_are_one(mixer):
    out = mixer(np.abs(Q), np.abs(K), np.ones_like(V), LOG_DECAY, normalize=True, eps=0.0)
    assert_equal(out, np.ones_like(out))


def test_a_decay_per_head_and_none():
    per_head = np.array([-0.1, -0.2, -0.3, -0.4])
    assert_equal(explicit.ahla(Q, K, V, per_head), explicit.ahla(Q, K, V, np.broadcast_to(per_head, (2, T, H))))
    assert_equal(explicit.ahla(Q, K, V), explicit.ahla(Q, K, V, np.zeros(H)))


@pytest.mark.parametrize("gated", [True, False])
def test_delta_rules(gated):
    """S = a S, then S = S + beta k (v - S^T k)^T and o = scale S^T q."""
    k, beta = K / np.linalg.norm(K, axis=-1, keepdims=True), RNG.uniform(0.1, 1.9, (2, T, H))
    keys, values = (np.repeat(x, H // G, axis=2) for x in (k, V))
    S, expected = np.zeros((2, H, 3, 5)), []
    for t in range(T):
        S = np.exp(LOG_DECAY[:, t] if gated else 0 * LOG_DECAY[:, t])[..., None, None] * S
        error = values[:, t] - np.einsum("bhde,bhd->bhe", S, keys[:, t])
        S = S + (beta[:, t, :, None] * keys[:, t])[..., None] * error[..., None, :]
        expected.append(0.7 * np.einsum("bhd,bhde->bhe", Q[:, t], S))
    gates = (LOG_DECAY, beta) if gated else (beta,)
    rule = explicit.gated_delta_rule if gated else explicit.delta_rule
    assert_equal(rule(Q, k, V, *gates, scale=0.7), np.stack(expected, axis=1))


def test_ssd():
    dt, A, D = RNG.uniform(0.01, 0.5, (2, T, H)), np.array([-1.0, -2.0, -3.0, -0.5]), np.array([1.0, -1.0, 2.0, 0.0])
    x = np.repeat(V, H // G, axis=2)
    B, C = np.repeat(K, H // G, axis=2), np.repeat(Q[:, :, :G], H // G, axis=2)
    expected = linear(C, B, dt[..., None] * x, dt * A) + D[:, None] * x
    assert_equal(explicit.ssd(x, dt, A, K, Q[:, :, :G], D), expected)
    assert_equal(explicit.ssd(x, dt, A, K, Q[:, :, :G]), expected - D[:, None] * x)


POLES = np.stack([-RNG.uniform(0.3, 1.0, (H, 3)), RNG.uniform(0.0, 2.0, (H, 3))], axis=1)
STEPS = RNG.uniform(0.1, 0.5, H)


def states(z, discretization):
    """X_t = Lam X_{t-1} + Bbar z_t^T of z [B, T, H, F], complex [B, T, H, M, F]."""
    poles, step = POLES[:, 0] + 1j * POLES[:, 1], STEPS[:, None]
    if discretization == "zoh":
        lam, gain = np.exp(step * poles), (np.exp(step * poles) - 1) / poles
    else:
        lam, gain = (2 + step * poles) / (2 - step * poles), 2 * step / (2 - step * poles)
    X, found = np.zeros((2, H, 3, z.shape[-1]), complex), []
    for t in range(T):
        X = lam[..., None] * X + gain[..., None] * z[:, t, :, None]
        found.append(X)
    return np.stack(found, axis=1)


@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_s4d(discretization):
    x, C, D = Q, RNG.standard_normal((H, 2, 3)), RNG.standard_normal(H)
    read = np.einsum("hm,bthme->bthe", C[:, 0] + 1j * C[:, 1], states(x, discretization)).real
    assert_equal(explicit.s4d(x, POLES, STEPS, C, D, discretization=discretization), read + D[:, None] * x)


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("discretization", ["zoh", "bilinear"])
def test_interdomain_attention(conjugate, discretization):
    q, k, v = arrays()
    C = RNG.standard_normal((H, 2, 3, 3))
    mixed = [
        np.einsum("hnm,bthmf->bthnf", C[:, 0] + 1j * C[:, 1], states(x, discretization))
        for x in (k, v, np.ones_like(v[..., :1]))
    ]
    weights = np.einsum("bthd,bthnd->bthn", q, mixed[0])
    weights = weights.conj() if conjugate else weights
    num, den = (np.einsum("bthn,bthnf->bthf", weights, x).real for x in mixed[1:])
    options = {"conjugate": conjugate, "discretization": discretization}
    assert_equal(explicit.interdomain_attention(Q, K, V, POLES, STEPS, C, **options), num)
    normalised = explicit.interdomain_attention(Q, K, V, POLES, STEPS, C, normalize=True, eps=0.5, **options)
    assert_equal(normalised, num / (den + 0.5))


def test_interdomain_attention_with_a_diagonal_and_shared_modes():
    C = RNG.standard_normal((G, 2, 3))
    shared = explicit.interdomain_attention(Q, K, V, POLES[:G], STEPS[:G], C)
    own = [np.repeat(x, H // G, axis=0) for x in (POLES[:G], STEPS[:G], C[..., None] * np.eye(3))]
    assert_equal(shared, explicit.interdomain_attention(Q, K, V, *own))


@pytest.mark.parametrize("options", [{"modes": 24}, {"modes": 44, "basis": "legt", "window": 24.0}], ids=str)
def test_interdomain_ideal_with_a_complete_basis_is_normalised_linear_attention(options):
    q, k = np.abs(Q) + 0.1, np.abs(K) + 0.1
    expected = explicit.linear_attention(q, k, V, normalize=True)
    assert np.abs(explicit.interdomain_ideal(q, k, V, **options) - expected).max() < 1e-6


@pytest.mark.parametrize("basis", ["legs", "legt"])
def test_interdomain_ideal_averages_equal_values(basis):
    options = {"modes": 4, "basis": basis, "window": None if basis == "legs" else 9.0, "eps": 0.0}
    for discretization in ("bilinear", "zoh"):
        out = explicit.interdomain_ideal(
            np.abs(Q) + 0.1, np.abs(K) + 0.1, np.ones_like(V), discretization=discretization, **options
        )
        assert np.abs(out - 1).max() < 1e-12


def test_legs_by_zero_order_hold_steps_to_the_projection_of_all_tokens():
    projected = impulses(9, 4, "legs", None, "zoh")
    for t in range(2, 10):
        a, b = transition(t, 4, "legs", None, "zoh")
        assert_equal(np.concatenate([a @ projected[t - 2], b[:, None]], axis=1), projected[t - 1])


def test_segments_are_summed_by_themselves_and_padding_does_not_end_one():
    x = np.arange(1.0, 9.0).reshape(1, 8, 1)
    ids = np.array([[1, 0, 1, 2, 2, 0, 1, 0]])
    out = by_segment(lambda x: np.cumsum(x, axis=1), {"x": x}, ("x",), ids)
    assert out[0, :, 0].tolist() == [1, 0, 4, 4, 9, 0, 7, 0]


def test_segments_need_a_token():
    with pytest.raises(ValueError, match="segment_ids: expected at least one token"):
        by_segment(np.negative, {"x": np.ones((1, 4, 1))}, ("x",), np.zeros((1, 4), int))
