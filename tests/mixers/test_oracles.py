"""Our mixers give what independent PyTorch code gives: the vectors of tests/oracles, which its README explains."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import delta_rule, gated_delta_rule, linear_attention, ssd
from jaxmix.mixers import DeltaState, LinearAttentionState, SSDState
from tests.contract.agreement import F32, F64
from tests.contract.spec import precision
from tests.tolerances import FORMS, STORED_FLOAT32, assert_close, rms_ratio

VECTORS = Path(__file__).resolve().parents[1] / "oracles" / "vectors"
TOLERANCES = {F64: STORED_FLOAT32, F32: FORMS[F32]}
LENGTHS, STARTS = (1, 7, 64, 100), ("zero", "given")
GRADIENT_CASES = (("zero", 1), ("zero", 7), ("given", 7), ("given", 100))


@functools.cache
def vectors(file) -> dict[str, np.ndarray]:
    with np.load(VECTORS / f"{file}.npz") as arrays:
        return dict(arrays)


INPUTS = vectors("inputs")
SCALE = float(INPUTS["scale"])


@dataclasses.dataclass(frozen=True)
class Oracle:
    """A file of vectors and our function for it.

    Attributes:
        file: name of the vectors.
        ours: `ours(inputs, state, **options)`, the output and the final state [B, H, D, E].
        reads: names of the inputs.
        gradients: the file has gradients.
    """

    file: str
    ours: Callable[..., Any]
    reads: tuple[str, ...]
    gradients: bool = False


def gated(inputs, S, scale=None, normalise=False, **options):
    if normalise:
        unit = {name: inputs[name] / jnp.sqrt(jnp.sum(inputs[name] ** 2, -1, keepdims=True) + 1e-6) for name in "qk"}
        inputs = inputs | unit
    out, state = gated_delta_rule(**inputs, scale=scale, initial_state=DeltaState(S), **options)
    return out, state.S


def ungated(inputs, S, **options):
    out, state = delta_rule(**inputs, initial_state=DeltaState(S), **options)
    return out, state.S


def linear(inputs, P, **options):
    state = LinearAttentionState(P, jnp.zeros(P.shape[:3], P.dtype))
    out, state = linear_attention(**inputs | {"q": SCALE * inputs["q"]}, initial_state=state, **options)
    return out, state.P


def state_space(inputs, P, **options):
    """Steps of the size of the log decay and rates of -1, so that x is the value over the step."""
    dt = -inputs["log_decay"]
    A = jnp.full(dt.shape[2], -1, dt.dtype)
    x = inputs["v"] / dt[..., None]
    out, state = ssd(x, dt, A, inputs["k"], SCALE * inputs["q"], initial_state=SSDState(P), **options)
    return out, state.P


DELTA = ("q", "k", "v", "log_decay", "beta")
NORMALISED = functools.partial(gated, normalise=True)
ORACLES = {
    "fla gated_delta_rule": Oracle("fla_gated_delta_rule", functools.partial(gated, scale=SCALE), DELTA, True),
    "fla delta_rule": Oracle("fla_delta_rule", ungated, ("q", "k", "v", "beta"), True),
    "fla simple_gla, linear_attention": Oracle("fla_simple_gla", linear, ("q", "k", "v", "log_decay"), True),
    "fla simple_gla, ssd": Oracle("fla_simple_gla", state_space, ("q", "k", "v", "log_decay"), True),
    "fla linear_attn": Oracle("fla_linear_attn", linear, ("q", "k", "v")),
    "transformers gated_delta_rule": Oracle("transformers_gated_delta_rule", gated, DELTA),
    "transformers gated_delta_rule, l2norm": Oracle("transformers_gated_delta_rule_l2norm", NORMALISED, DELTA),
}
EVERY_ORACLE = pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES)
EVERY_FORM = pytest.mark.parametrize("implementation", ["serial", "scan"])
EVERY_DTYPE = pytest.mark.parametrize("dtype", [F64, F32], ids=str)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(oracle, implementation, inputs, state, segment_ids):
    return oracle.ours(inputs, state, segment_ids=segment_ids, implementation=implementation)


@functools.partial(jax.jit, static_argnums=(0, 1))
def differentiate(oracle, implementation, inputs, state, segment_ids, cotangents):
    call = functools.partial(oracle.ours, segment_ids=segment_ids, implementation=implementation)
    return jax.vjp(call, inputs, state)[1](cotangents)


def arguments(oracle, start, dtype):
    """Inputs of all tokens and the initial state."""
    inputs = {name: jnp.asarray(INPUTS[name], dtype) for name in oracle.reads}
    state = jnp.asarray(INPUTS["initial_state"], dtype)
    return inputs, state if start == "given" else jnp.zeros_like(state)


def first(length):
    """Segment ids of one document of `length` tokens and padding: every length shares the compiled function."""
    return jnp.tile(jnp.where(jnp.arange(100) < length, 1, 0).astype(jnp.int32), (2, 1))


@EVERY_ORACLE
@EVERY_FORM
@EVERY_DTYPE
def test_outputs_and_final_states(oracle, implementation, dtype):
    stored = vectors(oracle.file)
    with precision(dtype):
        for start in STARTS:
            for length in LENGTHS:
                out, state = run(oracle, implementation, *arguments(oracle, start, dtype), first(length))
                expected = stored[f"{start}.out"][:, :length], stored[f"{start}.T{length}.final_state"]
                assert_close((out[:, :length], state), expected, TOLERANCES[dtype], f"{start}, {length} tokens")


@pytest.mark.parametrize(
    "oracle", [x for x in ORACLES.values() if x.gradients], ids=[name for name, x in ORACLES.items() if x.gradients]
)
@EVERY_FORM
@EVERY_DTYPE
def test_gradients(oracle, implementation, dtype):
    stored = vectors(oracle.file)
    with precision(dtype):
        for start, length in GRADIENT_CASES:
            cotangents = jnp.asarray(INPUTS["w"], dtype), jnp.asarray(INPUTS["ws"], dtype)
            inputs, state = arguments(oracle, start, dtype)
            gradients, of_state = differentiate(oracle, implementation, inputs, state, first(length), cotangents)
            for name, gradient in gradients.items():
                expected = stored[f"{start}.T{length}.grad.{name}"]
                # The decay of a first token has no gradient. In `state_space` two parts of size one cancel to that.
                error = rms_ratio(gradient[:, :length], expected, floor=0.0 if np.any(expected) else 1.0)
                assert error <= TOLERANCES[dtype], f"{start}, {length} tokens, {name}: {error:.1e}"
            if start == "given":
                assert rms_ratio(of_state, stored[f"given.T{length}.grad.initial_state"]) <= TOLERANCES[dtype]


@EVERY_ORACLE
@pytest.mark.parametrize("length", LENGTHS)
def test_arrays_of_their_own_length(oracle, length):
    stored = vectors(oracle.file)
    inputs, state = arguments(oracle, "given", F32)
    inputs = {name: x[:, :length] for name, x in inputs.items()}
    expected = stored["given.out"][:, :length], stored[f"given.T{length}.final_state"]
    assert_close(oracle.ours(inputs, state), expected, FORMS[F32])
