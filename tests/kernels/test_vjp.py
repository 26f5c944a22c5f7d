"""Decayed linear attention over the primitive and its gradients equal a recurrence over tokens and its autodiff."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix_kernels.linear_attention import pieces
from jaxmix_kernels.linear_attention.pieces import choose_pieces, shorten_sums
from jaxmix_kernels.linear_attention.vjp import Known, final_state, known_gradients, linear_attention
from jaxmix_kernels.target import Target
from tests.kernels.reference import make_decays
from tests.kernels.targets import ReferenceTarget
from tests.tolerances import assert_close

BATCH, EXACT = 2, 1e-11
"""float64 against float64 in another order; sums over a thousand tokens."""

CASES = {
    # tokens; heads of q, k, v, decays, initial; D, E; heads that fill the device; segments; range of log decays
    "one chunk": (64, (2, 2, 2, 2, 2), (4, 5), 1, False, (1e-3, 1.0)),
    "pieces backward only": (400, (2, 2, 1, 1, 2), (4, 5), 1, True, (1e-3, 1.0)),
    "ragged, segments, grouped heads": (130, (4, 2, 2, 2, 2), (4, 5), 1, True, (1e-3, 1.0)),
    "odd head counts, two sizes": (130, (4, 2, 1, 4, 1), (40, 5), 1, True, (1e-3, 1.0)),
    "four pieces with segments": (1000, (4, 2, 2, 2, 2), (4, 5), 32, True, (1e-3, 0.1)),
    "four pieces, long memory": (1000, (4, 2, 2, 4, 4), (4, 5), 32, False, (1e-4, 1e-2)),
    "strong decay, pieces forward and more backward": (1000, (4, 1, 4, 2, 2), (4, 5), 16, True, (1e-4, 80.0)),
    "two pieces without decay": (300, (2, 1, 1, 0, 1), (4, 5), 8, False, None),
}

SPARED = {("one chunk", False), ("four pieces, long memory", False), ("pieces backward only", True)}
"""What adds nothing to the other cases."""
WAYS = {False: "composed", True: "by one kernel"}
"""How gradients are computed, by whether the target keeps states."""
RUNS = [(name, keeps) for name in CASES for keeps in WAYS if (name, keeps) not in SPARED]


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(params=RUNS, ids=[f"{name}, {WAYS[keeps]}" for name, keeps in RUNS])
def case(request, monkeypatch):
    """A random case: the arguments, the decays as a function of the log decays, starts of segments, and the target."""
    monkeypatch.setattr(pieces, "SHORTEST_PIECE", 2 * 64)
    monkeypatch.setattr(pieces, "LONGEST_SUM", 5 * 64)
    name, keeps = request.param
    return draw(*CASES[name], keeps)


def draw(tokens, heads, sizes, busy, segments, decay, keeps=True):
    rng = np.random.default_rng(0)
    widths = (sizes[0], sizes[0], sizes[1])
    q, k, v = (rng.normal(size=(BATCH, tokens, h, d)) for h, d in zip(heads[:3], widths, strict=True))
    initial = rng.normal(size=(BATCH, heads[4], *sizes))
    starts = rng.random((BATCH, tokens)) < (0.02 if segments else 0.0)
    fill = [(0, 0), (0, 0), (0, -tokens % 64)]
    steps = decays = None
    if decay is not None:
        steps = -np.exp(rng.uniform(*np.log(decay), (BATCH, heads[3], tokens)))
        constants = make_decays(np.pad(steps, fill), np.pad(starts, fill[1:]) if segments else None, dtype=np.float64)

        def decays(steps):
            steps = jnp.pad(steps, fill).reshape(constants.steps.shape)
            return dataclasses.replace(constants, steps=steps)

    return (
        {"q": q, "k": k, "v": v, "steps": steps, "initial": initial},
        decays,
        starts,
        ReferenceTarget(busy=busy, keeps=keeps),
    )


def by_token(q, k, v, steps, initial, starts):
    """The recurrence, token after token; with a final state for every head."""
    heads = q.shape[2]

    def spread(x, axis):
        return jnp.moveaxis(jnp.repeat(x, heads // x.shape[axis], axis=axis), 3 - axis, 0)

    decay = jnp.zeros((BATCH, 1, q.shape[1])) if steps is None else steps
    tokens = (spread(q, 2), spread(k, 2), spread(v, 2), spread(decay, 1), starts.T)

    def step(state, token):
        q, k, v, decay, starts = token
        kept = jnp.where(starts[:, None], 0, jnp.exp(decay))[..., None, None]
        state = kept * state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhd,bhde->bhe", q, state)

    state, out = jax.lax.scan(step, jnp.repeat(initial, heads // initial.shape[1], axis=1), tokens)
    return jnp.moveaxis(out, 0, 1), state


def with_gradients(function, arguments):
    """The results of `function` and the gradients under random cotangents."""

    @jax.jit
    def run(arguments):
        results, pull_back = jax.vjp(function, arguments)
        rng = np.random.default_rng(1)
        return results, pull_back(jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), results))

    return jax.device_get(run(arguments))


def test_outputs_final_state_and_gradients(case):
    arguments, decays, starts, target = case

    def kernel(x):
        taken = None if decays is None else decays(x["steps"])
        return linear_attention(x["q"], x["k"], x["v"], taken, x["initial"], target=target)

    def expected(x):
        out, state = by_token(**x, starts=starts)
        return out, state[:, :: x["q"].shape[2] // shared]

    shared = jax.eval_shape(kernel, arguments)[1].shape[1]
    assert_close(with_gradients(kernel, arguments), with_gradients(expected, arguments), EXACT)


def test_the_final_state_alone(case):
    arguments, decays, starts, target = case
    given = {name: x for name, x in arguments.items() if name != "q"}

    def kernel(x):
        taken = None if decays is None else decays(x["steps"])
        return final_state(x["k"], x["v"], taken, x["initial"], target=target)

    shared = jax.eval_shape(kernel, given).shape[1]
    q = jnp.zeros((*arguments["k"].shape[:2], shared, arguments["k"].shape[3]))
    expected = with_gradients(lambda x: by_token(q, **x, starts=starts)[1], given)
    assert_close(with_gradients(kernel, given), expected, EXACT)


@pytest.mark.parametrize("keeps", WAYS, ids=WAYS.values())
@pytest.mark.parametrize("heads", [2, 4], ids=["grouped heads", "keys of every head"])
def test_gradients_of_a_call_that_is_known(keeps, heads):
    """Also of keys that are the values, and added to others."""
    tokens, (q_heads, _, _, *others), (size, _), *rest = CASES["ragged, segments, grouped heads"]
    arguments, decays, _, target = draw(tokens, (q_heads, heads, heads, *others), (size, size), *rest, keeps)
    del arguments["v"]

    def call(x):
        return linear_attention(x["q"], x["k"], x["k"], decays(x["steps"]), x["initial"], target=target)

    out, final = jax.jit(call)(arguments)
    results, pull_back = jax.vjp(call, arguments)
    rng = np.random.default_rng(1)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), results)
    (expected,) = jax.jit(pull_back)(cotangents)
    given = decays(arguments["steps"])
    states = None
    if keeps:
        k, initial = pieces.pad_sizes(arguments["k"], (3,), 64), pieces.pad_sizes(arguments["initial"], (2, 3))
        constants = dataclasses.replace(given, steps=None)
        states = target.decayed_attention(None, k, k, constants, initial, outputs=False, states=True).states
    more = {f"more_d{name}": rng.normal(size=arguments[name].shape) for name in "qk"}
    gradients = functools.partial(known_gradients, target=target)
    known, q, k, initial = Known(out, final, states), *(arguments[name] for name in ("q", "k", "initial"))
    actual = jax.jit(gradients)(q, k, None, given, initial, known, *cotangents, **more)
    assert_close(actual.q, expected["q"] + more["more_dq"], EXACT)
    assert_close(actual.k, expected["k"] + more["more_dk"], EXACT)
    assert actual.v is None
    assert_close(actual.steps.reshape(BATCH, others[0], -1)[..., :tokens], expected["steps"], EXACT)
    assert_close(actual.initial, expected["initial"], EXACT)


def test_without_an_initial_state_it_is_zero():
    arguments, _, _, target = draw(*CASES["two pieces without decay"])
    q, k, v = (arguments[name] for name in "qkv")
    given = linear_attention(q, k, v, None, jnp.zeros_like(arguments["initial"]), target=target)
    assert_close(linear_attention(q, k, v, None, None, target=target), given, EXACT)


def test_vmap_joins_the_batch():
    arguments, decays, _, target = draw(*CASES["ragged, segments, grouped heads"])
    several = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x, -x]), {name: arguments[name] for name in "qkv"})

    def loss(x):
        taken = decays(jnp.asarray(arguments["steps"]))
        out, final = linear_attention(**x, decays=taken, initial=arguments["initial"], target=target)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(final))

    one = jax.jit(jax.value_and_grad(loss))
    each = [one(jax.tree.map(lambda x, i=i: x[i], several)) for i in range(3)]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *each)
    assert_close(jax.jit(jax.vmap(jax.value_and_grad(loss)))(several), expected, EXACT)


def test_sequences_are_split_only_as_far_as_it_pays():
    for heads, length, programs, forward, composed in (
        (1 << 20, 1 << 20, 132, 1, 1024),
        (67, 1 << 20, 132, 1, 1024),
        (66, 1 << 20, 132, 2, 1024),
        (16, 32768, 132, 8, 32),
        (16, 4096, 132, 4, 4),
        (1, 1024, 132, 1, 1),
        (1, 2047, 132, 1, 2),
        (1, 32768, 1, 1, 32),
    ):
        assert choose_pieces(heads, length, programs) == forward
        assert shorten_sums(forward, length) == composed


def test_timed_shapes_are_cut_only_where_heads_and_their_blocks_leave_cores_idle():
    target = Target("gpu")
    for (batch, length, heads, size), expected in (
        ((8, 4096, 16, 64), 1),
        ((4, 4096, 16, 128), 1),
        ((1, 8192, 96, 128), 1),
        ((2, 16384, 16, 128), 2),
        ((1, 32768, 16, 128), 4),
    ):
        assert choose_pieces(batch * heads * target.blocks(size), length, target.programs) == expected


def test_sizes_above_those_of_the_kernels_are_refused():
    q, v = jnp.zeros((1, 64, 1, 129), jnp.bfloat16), jnp.zeros((1, 64, 1, 32), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"sizes up to 128, not 129"):
        linear_attention(q, q, v, None, None, target=ReferenceTarget())
