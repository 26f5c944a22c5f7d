"""The layers under test, and one compiled evaluation of each that most tests share."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmix.nn import (
    DeltaNetConfig,
    GatedDeltaNetConfig,
    HLAConfig,
    InterdomainAttentionConfig,
    LinearAttentionConfig,
    Mamba2Config,
    MixerConfig,
    NAtSLConfig,
    S4DConfig,
    SoftmaxAttentionConfig,
)

WIDTH = 16
BATCH = 2
TOKENS = 12

LAYERS: dict[str, MixerConfig] = {
    "hla, second order": HLAConfig(heads=2, chunk_size=4),
    "hla, asymmetric": HLAConfig(
        heads=4, kv_heads=2, order="asymmetric", decay="data", qk_norm="rms", rope=True, chunk_size=4
    ),
    "hla, third order": HLAConfig(heads=2, order=3, decay=None, conv_width=0, gate=False, scale=2.0, chunk_size=4),
    "linear attention": LinearAttentionConfig(
        heads=4, kv_heads=2, shared_decay=True, conv_width=2, value_size=6, chunk_size=4
    ),
    "interdomain attention": InterdomainAttentionConfig(heads=2, modes=3, chunk_size=4),
    "interdomain attention, single stream": InterdomainAttentionConfig(
        heads=4, kv_heads=2, modes=3, streams="single", mixing="diagonal", conjugate=True, gate=True, chunk_size=4
    ),
    "s4d": S4DConfig(heads=2, modes=3, chunk_size=4),
    "s4d, keys and values": S4DConfig(
        heads=2, modes=3, streams="keys and values", rope=True, value_size=6, output_norm=True, chunk_size=4
    ),
    "delta net": DeltaNetConfig(heads=2, rope=True, gate=True, chunk_size=4),
    "gated delta net": GatedDeltaNetConfig(
        heads=4, key_heads=2, key_size=4, value_size=6, negative_eigenvalues=True, chunk_size=4
    ),
    "mamba2": Mamba2Config(heads=4, key_heads=2, key_size=5, chunk_size=4),
    "natsl": NAtSLConfig(heads=2, key_size=4, value_size=6, chunk_size=4, capacity=8, max_documents=4),
    "natsl, every option": NAtSLConfig(
        heads=2,
        key_size=8,
        value_size=4,
        rule="ssd",
        rope=True,
        chunk_size=3,
        capacity=10,
        decay_through_softmax=False,
        branch_norm=False,
        fusion="input",
        max_documents=4,
    ),
    "softmax attention": SoftmaxAttentionConfig(heads=4, kv_heads=2, capacity=16),
    "softmax attention, every option": SoftmaxAttentionConfig(
        heads=2, capacity=16, qk_norm="l2", conv_width=3, output_norm=True, gate=True, value_size=6
    ),
}


class Case(NamedTuple):
    """Arguments of one evaluation in float64, and the cotangents it is differentiated with."""

    x: Any
    segment_ids: Any
    state: Any
    out_cotangent: Any
    state_cotangent: Any


class Evaluation(NamedTuple):
    """Output, final state, and the gradients of parameters, input and the initial state's arrays of floats."""

    out: Any
    state: Any
    parameter_gradients: Any
    input_gradient: Any
    state_gradient: Any


@functools.cache
def make_layer(name: str) -> Any:
    """The float64 layer. Kernels are larger than at the start of training, so that nothing is nearly zero."""
    with jax.enable_x64(True):
        return LAYERS[name].build(WIDTH, rngs=nnx.Rngs(0), param_dtype=jnp.float64, init_std=0.3)


def floats(state):
    """The arrays of a state that have gradients."""
    return [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]


def with_floats(state, values):
    """The state with those arrays replaced."""
    leaves, structure = jax.tree.flatten(state)
    values = iter(values)
    return jax.tree.unflatten(structure, [next(values) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in leaves])


@functools.cache
def _compiled(name: str):
    definition, parameters = nnx.split(make_layer(name))

    @jax.jit
    def run(case: Case) -> Evaluation:
        def layer(parameters, x, values):
            state = with_floats(case.state, values)
            y, state = nnx.merge(definition, parameters)(x, segment_ids=case.segment_ids, state=state)
            return (y, floats(state)), state

        (out, _), pull_back, state = jax.vjp(layer, parameters, case.x, floats(case.state), has_aux=True)
        gradients = pull_back((case.out_cotangent, case.state_cotangent))
        return Evaluation(out, state, nnx.to_pure_dict(gradients[0]), *gradients[1:])

    return run


def evaluate(name: str, case: Case) -> Evaluation:
    """Output, final state and every gradient, as numpy arrays."""
    with jax.enable_x64(True):
        return jax.device_get(_compiled(name)(case))


def fresh_state(name: str):
    """The state of streams that have seen nothing, as numpy arrays."""
    with jax.enable_x64(True):
        return jax.device_get(make_layer(name).init_state(BATCH))


@functools.cache
def draw_case(name: str, *, seed: int = 0) -> Case:
    """A random case that continues a stream of three tokens, one document in each row."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(BATCH, TOKENS, WIDTH))
    fresh = fresh_state(name)
    cotangents = [rng.normal(size=leaf.shape) for leaf in floats(fresh)]
    ids = np.ones((BATCH, TOKENS), np.int32)
    case = Case(x, ids, fresh, rng.normal(size=x.shape), cotangents)
    earlier = case._replace(x=rng.normal(size=x.shape), segment_ids=np.where(np.arange(TOKENS) < 3, ids, 0))
    return case._replace(state=evaluate(name, earlier).state)


def draw_fresh_case(name: str) -> Case:
    """A random case of new streams whose final state does not matter."""
    case = draw_case(name)
    zeros = [np.zeros_like(x) for x in case.state_cotangent]
    return case._replace(state=fresh_state(name), state_cotangent=zeros)
