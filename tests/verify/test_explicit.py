"""The explicit sums equal the chained linear attentions that define the same mixers."""

import numpy as np
import pytest

from jaxmix.verify import explicit
from jaxmix.verify.checks.forms import by_segment

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


def test_segments_are_summed_by_themselves_and_padding_does_not_end_one():
    x = np.arange(1.0, 9.0).reshape(1, 8, 1)
    ids = np.array([[1, 0, 1, 2, 2, 0, 1, 0]])
    out = by_segment(lambda x: np.cumsum(x, axis=1), {"x": x}, ("x",), ids)
    assert out[0, :, 0].tolist() == [1, 0, 4, 4, 9, 0, 7, 0]


def test_segments_need_a_token():
    with pytest.raises(ValueError, match="segment_ids: expected at least one token"):
        by_segment(np.negative, {"x": np.ones((1, 4, 1))}, ("x",), np.zeros((1, 4), int))
