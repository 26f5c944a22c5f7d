"""NAtS-L against its definition: outputs, every gradient, that of the router's choice, options and special choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import gated_delta_rule, softmax_attention
from tests.contract.agreement import BF16, F32, F64, STRONG_DECAYS
from tests.contract.spec import precision
from tests.mixers.natsl import (
    BATCH,
    CHUNK,
    HEADS,
    IMPLEMENTATIONS,
    TOKENS,
    capped_softmax_gradient,
    cast,
    chosen_only,
    complete_chunks,
    differentiate_definition,
    draw_call,
    evaluate,
    softmax_first,
)
from tests.tolerances import FORMS, ROUTER_GRADIENT, STRONG_DECAY_FLOOR, assert_close

NO_LOG_DECAY = {"log_decay": None}
VARIANTS = {
    "both branches see the own chunk": ({}, {}),
    "softmax sees the own chunk, no decay through softmax": (
        {"own_chunk": "softmax", "decay_through_softmax": False},
        {},
    ),
    "delta rule, linear sees the own chunk": ({"own_chunk": "linear"}, NO_LOG_DECAY),
    "ssd, own chunk detached, no decay through softmax": (
        {"rule": "ssd", "detach_own_chunk": True, "decay_through_softmax": False},
        {"beta": None},
    ),
}
DOCUMENTS = np.array([[1] * 9 + [0] * 2 + [2] * 11, [0] + [1] * 4 + [3] * 3 + [0] + [3] * 4 + [2] * 9], np.int32)
"""Documents that end inside and at the end of a chunk, and padding before, between and inside them."""
CHUNKS = np.arange(TOKENS) // CHUNK
LINEAR_ARRAYS = ("q", "k", "v", "log_decay", "beta")
SOFTMAX_ARRAYS = ("q_softmax", "k_softmax", "v_softmax")


def choose(call, routed):
    """The call with every chunk of every head routed to softmax attention, or none."""
    routed = np.full(call.inputs["choice"].shape[:3], routed)
    return call._replace(inputs=call.inputs | {"choice": softmax_first(routed)})


def assert_is_the_definition(call, options, forms=("serial", "scan"), **sizes):
    out, gradients = differentiate_definition(call, **options)
    soft, choice = gradients.pop("choice"), call.inputs["choice"]
    for implementation in forms:
        actual = evaluate(call, implementation, **options, **sizes)
        router = actual.gradients.pop("choice")
        assert_close(actual.out, out, FORMS[F64], implementation)
        assert_close(actual.gradients, gradients, FORMS[F64], implementation)
        for operation in (0, 1):
            expected = chosen_only(soft, choice, complete_chunks(call))[..., operation]
            assert_close(router[..., operation], expected, ROUTER_GRADIENT, f"{implementation}, operation {operation}")
        assert not np.any(router[choice == 0])


@pytest.mark.parametrize(("options", "replaced"), VARIANTS.values(), ids=VARIANTS)
def test_outputs_and_every_gradient_are_those_of_the_definition(options, replaced):
    call = draw_call()
    assert_is_the_definition(call._replace(inputs=call.inputs | replaced), options)


@pytest.mark.parametrize("length", [3, 8])
def test_sequences_of_few_chunks(length):
    assert_is_the_definition(draw_call(tokens=length), {}, forms=["scan"])


def test_packed_documents_each_by_the_definition():
    assert_is_the_definition(draw_call(DOCUMENTS, max_documents=3), {}, max_documents=3)


def test_counterfactual_gradient_of_the_operation_that_was_not_chosen():
    call = draw_call()
    out, gradients = differentiate_definition(call)
    actual = evaluate(call, "scan", counterfactual_router_grad=True)
    router, soft = actual.gradients.pop("choice"), gradients.pop("choice")
    complete = complete_chunks(call)
    assert_close(actual.out, out, FORMS[F64])
    assert_close(actual.gradients, gradients, FORMS[F64])
    # The linear state is linear in its mask, so its derivative is exact at 0 as well; the last chunk has no successor.
    assert_close(router[..., 1], np.where(complete[..., None], soft[..., 1], 0), ROUTER_GRADIENT)
    capped = np.where(complete[..., None], capped_softmax_gradient(call), 0)
    assert_close(router[..., 0], capped, ROUTER_GRADIENT)
    chosen = call.inputs["choice"][..., 0] == 1
    assert_close(router[chosen][:, 0], soft[chosen][:, 0], ROUTER_GRADIENT)


def linear_reference(call, segment_ids=None):
    """Output and gradients of the gated delta rule for the call's linear branch."""
    with precision():
        arrays = {name: cast(call, np.float64).inputs[name] for name in LINEAR_ARRAYS}
        ids = None if segment_ids is None else jnp.broadcast_to(jnp.int32(segment_ids), (BATCH, TOKENS))

        def run(arrays):
            return gated_delta_rule(**arrays, segment_ids=ids, implementation="serial")[0]

        out, pull_back = jax.vjp(run, arrays)
        return jax.device_get((out, pull_back(call.out_cotangent[0])[0]))


def softmax_reference(call, segment_ids=None):
    """Output and gradients of causal softmax attention for the call's softmax branch."""
    with precision():
        arrays = tuple(jnp.asarray(call.inputs[name]) for name in SOFTMAX_ARRAYS)
        ids = None if segment_ids is None else jnp.broadcast_to(jnp.int32(segment_ids), (BATCH, TOKENS))

        def run(*arrays):
            return softmax_attention(*arrays, segment_ids=ids)[0]

        out, pull_back = jax.vjp(run, *arrays)
        gradients = dict(zip(SOFTMAX_ARRAYS, pull_back(call.out_cotangent[1]), strict=True))
        return jax.device_get((out, gradients))


def assert_branches(call, linear, softmax):
    for implementation in ("serial", "scan"):
        actual = evaluate(call, implementation)
        for branch, (out, gradients) in enumerate((linear, softmax)):
            assert_close(actual.out[branch], out, FORMS[F64], implementation)
            assert_close({name: actual.gradients[name] for name in gradients}, gradients, FORMS[F64], implementation)


def test_all_linear_is_the_gated_delta_rule_and_softmax_inside_chunks():
    call = choose(draw_call(), False)
    assert_branches(call, linear_reference(call), softmax_reference(call, CHUNKS + 1))


def test_all_softmax_is_causal_softmax_attention_and_a_linear_state_inside_chunks():
    call = choose(draw_call(), True)
    assert_branches(call, linear_reference(call, CHUNKS + 1), softmax_reference(call))


@IMPLEMENTATIONS
def test_the_choice_of_a_chunk_moves_later_chunks_only(implementation):
    call = draw_call()
    before = evaluate(call, implementation).out
    for chunk in range(5):
        other = call._replace(inputs={name: np.array(x) for name, x in call.inputs.items()})
        other.inputs["choice"][1, chunk, 0] = other.inputs["choice"][1, chunk, 0, ::-1]
        after = evaluate(other, implementation).out
        for a, b, heads in zip(after, before, (1, 2), strict=True):
            moved = (a != b).any(axis=-1)
            expected = np.zeros_like(moved)
            expected[1, CHUNK * (chunk + 1) :, :heads] = True
            assert np.array_equal(moved, expected)


@IMPLEMENTATIONS
@pytest.mark.parametrize("value", [0.0, 7.0, np.nan])
def test_a_chunk_that_is_not_full_needs_no_choice(implementation, value):
    call = draw_call(DOCUMENTS, max_documents=3)
    other = call._replace(inputs={name: np.array(x) for name, x in call.inputs.items()})
    other.inputs["choice"][~complete_chunks(call)] = value
    actual, expected = (evaluate(x, implementation, max_documents=3) for x in (other, call))
    assert_close(actual, expected, 0.0)


@IMPLEMENTATIONS
def test_no_token_sees_a_later_one(implementation):
    call, other = draw_call(), draw_call(seed=5)
    for stop in (1, 8, 11):
        cotangent = tuple(np.where(np.arange(TOKENS)[:, None, None] < stop, x, 0) for x in call.out_cotangent)
        inputs = dict(call.inputs)
        for name, x in other.inputs.items():
            start = stop // CHUNK if name == "choice" else stop
            inputs[name] = np.concatenate([inputs[name][:, :start], x[:, start:]], axis=1)
        before = evaluate(call._replace(out_cotangent=cotangent), implementation)
        after = evaluate(call._replace(inputs=inputs), implementation)
        for a, b in zip(after.out, before.out, strict=True):
            assert np.array_equal(a[:, :stop], b[:, :stop])
            assert not np.array_equal(a[:, stop:], b[:, stop:])
        for name, gradient in before.gradients.items():
            assert not np.any(gradient[:, stop // CHUNK if name == "choice" else stop :]), name


def rounded(call, dtype):
    """The call as a run in `dtype` sees it, in float64."""
    return jax.tree.map(lambda x: np.asarray(x, x.dtype if x.dtype == np.int32 else np.float64), cast(call, dtype))


@pytest.mark.parametrize(("implementation", "dtype"), [("scan", F32), ("serial", BF16), ("scan", BF16)], ids=str)
def test_lower_precision(implementation, dtype):
    call = draw_call()
    expected = evaluate(rounded(call, dtype), "serial")
    actual = evaluate(call, implementation, dtype)
    assert [x.dtype for x in actual.out] == [dtype, dtype]
    assert_close((actual.out, actual.gradients), (expected.out, expected.gradients), FORMS[dtype])


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_strong_decay_stays_finite_and_exact(dtype):
    call = draw_call()
    for decay in STRONG_DECAYS.values():
        call.inputs["log_decay"] = decay(np.random.default_rng(2), (BATCH, TOKENS, HEADS))
        expected = evaluate(rounded(call, dtype), "serial")
        actual = evaluate(call, "scan", dtype)
        pair = ((x.out, x.gradients) for x in (actual, expected))
        assert_close(*pair, FORMS[dtype], floor=STRONG_DECAY_FLOOR)
