"""Softmax attention keeps the mixer contract, and its cache has a fixed capacity."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.mixers.linear_attention import LinearAttentionState
from jaxmix.mixers.segments import find_segments
from jaxmix.mixers.softmax_attention import SoftmaxAttentionState, softmax_attention
from tests.contract import MixerSpec, QueryKeyValueErrors, Shape, Variant
from tests.contract.agreement import Agreement
from tests.contract.packing import Packing
from tests.contract.spec import BATCH
from tests.contract.streaming import Streaming
from tests.mixers.brute_force import by_document
from tests.mixers.families import draw
from tests.tolerances import FORMS, assert_close, assert_same_bits

CAPACITY = 192
F32 = np.dtype(np.float32)


def mixer(q, k, v, *, segment_ids, initial_state, chunk_size=None, **options):
    """`softmax_attention` as the suite calls it: without chunks, and with a length that is a differentiable float."""
    del chunk_size
    given = isinstance(initial_state, SoftmaxAttentionState)
    cache = initial_state
    if given:
        cache = dataclasses.replace(cache, length=jnp.round(cache.length).astype(jnp.int32))
    out, state = softmax_attention(q, k, v, segment_ids=segment_ids, initial_state=cache, capacity=CAPACITY, **options)
    length = state.length.astype(jnp.promote_types(k.dtype, jnp.float32))
    if given:
        went_on = True if segment_ids is None else ~find_segments(segment_ids).reset.any(axis=1)
        change = initial_state.length - jax.lax.stop_gradient(initial_state.length)
        length = length + jnp.where(went_on, change, 0)
    return out, dataclasses.replace(state, length=length)


def init_state(variant, batch, dtype):
    shape = variant.shape
    state = SoftmaxAttentionState.init(
        batch,
        shape.heads,
        shape.key_size,
        shape.value_size,
        shared_heads=shape.kv_heads,
        capacity=CAPACITY,
        dtype=dtype,
    )
    return dataclasses.replace(state, length=state.length.astype(dtype))


def one_head(q, k, v, log_decay, scale=None):
    """Softmax attention of one head and document by explicit sums."""
    del log_decay
    out = np.zeros((len(q), v.shape[1]))
    for t in range(len(q)):
        weights = [np.exp((q.shape[1] ** -0.5 if scale is None else scale) * q[t] @ k[s]) for s in range(t + 1)]
        out[t] = sum(weight * v[s] for s, weight in enumerate(weights)) / sum(weights)
    return out


class TestSoftmaxAttention(Agreement, Streaming, Packing, QueryKeyValueErrors):
    spec = MixerSpec(
        function=mixer,
        state=SoftmaxAttentionState,
        draw=draw,
        init_state=init_state,
        brute_force=lambda inputs, ids, variant: by_document(one_head, inputs, ids, **variant.options),
        variants={
            "a key head per query head": Variant(),
            "grouped heads, scaled": Variant({"scale": 0.3}, Shape(heads=4, kv_heads=2, key_size=8, value_size=8)),
        },
    )

    # Softmax attention has no chunks, decays or shards for the suite to vary.
    test_a_chunk_longer_than_the_sequence = None
    test_token_scan_equals_serial_with_every_gradient = None
    test_chunks_with_every_gradient = None
    test_every_length_to_sixteen = None
    test_short_lengths_with_every_gradient = None
    test_one_token_more_than_a_chunk_with_every_gradient = None
    test_lengths_around_the_chunk = None
    test_a_thousand_tokens = None
    test_strong_decay_stays_finite_and_exact = None
    test_chunk_sizes_that_are_not_positive_integers = None
    test_serial_over_a_split_sequence = None
    test_a_decay_of_another_number_of_heads = None
    # The cache keeps keys and values in their own dtype and has more fields than floats: both are tested below.
    test_one_state_type_from_every_form = None
    test_a_state_with_one_field_of_another_shape_or_dtype = None


def tokens(length, *, dtype=jnp.float32, batch=BATCH, seed=0):
    variant = Variant(shape=Shape(heads=4, kv_heads=2))
    inputs = draw(np.random.default_rng(seed), batch, length, variant)
    return {name: jnp.asarray(x, dtype) for name, x in inputs.items()}


def part(inputs, start, stop):
    return {name: x[:, start:stop] for name, x in inputs.items()}


def empty_cache(capacity, dtype=jnp.float32):
    return SoftmaxAttentionState.init(BATCH, 2, 5, 7, capacity=capacity, dtype=dtype)


@pytest.mark.parametrize("implementation", ["serial", "scan"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_prefill_decode_and_init_make_one_type_of_cache(implementation, dtype):
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), empty_cache(12, dtype))
    for length in (1, 5):
        _, state = softmax_attention(**tokens(length, dtype=dtype), implementation=implementation, capacity=12)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == expected
        _, state = softmax_attention(
            **tokens(length, dtype=dtype), implementation=implementation, initial_state=empty_cache(12, dtype)
        )
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == expected


def test_a_cache_keeps_only_the_current_segment_from_slot_zero():
    inputs = tokens(6)
    ids = jnp.array([[1, 1, 2, 0, 2, 2], [3, 3, 3, 0, 0, 0]], jnp.int32)
    _, state = softmax_attention(**inputs, segment_ids=ids)
    assert state.length.tolist() == [3, 3]
    assert_same_bits(state.k[0, :3], inputs["k"][0, jnp.array([2, 4, 5])])
    assert_same_bits(state.v[1, :3], inputs["v"][1, :3])
    assert not np.any(state.k[:, 3:])


def test_a_wider_cache_keeps_narrower_tokens_exactly():
    inputs = tokens(5, dtype=jnp.bfloat16)
    out, state = softmax_attention(**inputs, initial_state=empty_cache(8))
    assert state.k.dtype == jnp.float32
    assert out.dtype == jnp.bfloat16
    assert_same_bits(state.k[:, :5], inputs["k"].astype(jnp.float32))


def test_a_cache_can_be_made_longer():
    inputs = tokens(9)
    whole, _ = softmax_attention(**inputs)
    first, state = softmax_attention(**part(inputs, 0, 4))
    second, state = softmax_attention(**part(inputs, 4, 9), initial_state=state, capacity=11)
    assert_close(jnp.concatenate([first, second], axis=1), whole, FORMS[F32])
    assert state.capacity == 11


def test_a_full_cache_is_an_error_where_it_can_be_known():
    inputs = tokens(6)
    with pytest.raises(ValueError, match=r"capacity: expected at most 4 tokens.*got 6 tokens in one call"):
        jax.eval_shape(lambda: softmax_attention(**inputs, capacity=4))
    _, state = softmax_attention(**part(inputs, 0, 4))
    with pytest.raises(ValueError, match=r"capacity: expected at most 4 tokens.*up to 5 tokens"):
        softmax_attention(**part(inputs, 4, 5), initial_state=state)
    ids = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], jnp.int32)
    with pytest.raises(ValueError, match=r"capacity: expected at most 4 tokens.*up to 6 tokens"):
        softmax_attention(**inputs, segment_ids=ids, capacity=4)


@pytest.mark.parametrize("implementation", ["serial", "scan"])
def test_in_compiled_code_only_tokens_that_do_not_fit_are_nan(implementation):
    inputs = tokens(7)
    ids = jnp.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 0, 1, 1, 0]], jnp.int32)
    expected, _ = softmax_attention(**inputs, segment_ids=ids)

    @jax.jit
    def run(ids):
        return softmax_attention(**inputs, segment_ids=ids, implementation=implementation, capacity=3)

    out, state = run(ids)
    lost = np.array([[0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0]], bool)
    assert np.array_equal(np.isnan(out).all(axis=(2, 3)), lost)
    assert_close(out[~lost], expected[~lost], FORMS[F32])
    assert state.length.tolist() == [3, 5]
    assert np.all(np.isfinite(state.k))


def test_one_token_costs_the_capacity_and_no_more():
    inputs = tokens(1)

    def flops(capacity):
        step = jax.jit(lambda state: softmax_attention(**inputs, initial_state=state))
        return step.lower(empty_cache(capacity)).compile().cost_analysis()["flops"]

    small, large = flops(512), flops(1024)
    assert 1.8 * small < large < 2.2 * small


def test_logits_of_any_size_stay_finite_with_their_gradients():
    inputs = {name: 1e4 * x for name, x in tokens(6).items()}

    def loss(inputs):
        return jnp.sum(softmax_attention(**inputs)[0])

    value, gradients = jax.value_and_grad(loss)(inputs)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("implementation", ["serial", "scan"])
def test_it_can_be_mapped(implementation):
    inputs = {name: jnp.stack([x, -x]) for name, x in tokens(5).items()}

    def run(inputs):
        return softmax_attention(**inputs, implementation=implementation)

    expected = [run(jax.tree.map(lambda x, i=i: x[i], inputs)) for i in range(2)]
    mapped = jax.vmap(run)(inputs)
    assert_close(mapped, jax.tree.map(lambda *x: jnp.stack(x), *expected), FORMS[F32])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity": 0}, r"capacity: expected None or a positive int, got 0"),
        ({"capacity": 2.0}, r"capacity: expected None or a positive int, got 2\.0"),
        ({"initial_state": empty_cache(8), "capacity": 7}, r"capacity: expected at least the 8 slots"),
        (
            {"initial_state": LinearAttentionState.init(2, 4, 5, 7)},
            r"initial_state: expected a SoftmaxAttentionState, got LinearAttentionState",
        ),
        (
            {"initial_state": empty_cache(8, jnp.bfloat16)},
            r"initial_state\.k: expected a dtype that holds k \(float32\) exactly, got dtype bfloat16",
        ),
        (
            {"initial_state": dataclasses.replace(empty_cache(8), v=jnp.zeros((2, 7, 2, 7)))},
            r"initial_state\.v: expected shape \[B, S, G, E\] = \[2, 8, 2, 7\], got shape \[2, 7, 2, 7\]",
        ),
        (
            {"initial_state": dataclasses.replace(empty_cache(8), length=jnp.zeros((2,)))},
            r"initial_state\.length: expected dtype int32, got dtype float32",
        ),
    ],
)
def test_a_wrong_cache_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        softmax_attention(**tokens(3), **change)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN needs an NVIDIA GPU")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [128, 129])
def test_cudnn_agrees_with_the_serial_form(packed, length):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, heads, 64)), jnp.bfloat16) for heads in (4, 2, 2))
    ids = jnp.asarray([[1] * 50 + [2] * (length - 60) + [0] * 10, [0] * 7 + [3] * (length - 7)], jnp.int32)
    cotangent = jnp.asarray(rng.normal(size=q.shape), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation):
        def attend(q, k, v):
            return softmax_attention(q, k, v, segment_ids=ids if packed else None, implementation=implementation)[0]

        out, pull_back = jax.vjp(attend, q, k, v)
        return out, pull_back(cotangent)

    assert_close(run("scan"), run("serial"), FORMS[np.dtype(jnp.bfloat16)])
