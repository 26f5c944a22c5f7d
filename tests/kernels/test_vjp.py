"""Decayed linear attention over the primitive and its gradients equal a recurrence over tokens and its autodiff."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix_kernels.decays import ChunkDecays
from jaxmix_kernels.linear_attention import pieces
from jaxmix_kernels.linear_attention.pieces import choose_pieces
from jaxmix_kernels.linear_attention.vjp import final_state, known_gradients, linear_attention
from jaxmix_kernels.target import Target
from tests.kernels.reference import make_decays
from tests.kernels.targets import ReferenceTarget
from tests.tolerances import assert_close

BATCH, EXACT = 2, 1e-11
"""float64 against float64 in another order; sums over a thousand tokens."""

CASES = {
    # tokens; heads of q, k, v, decays, initial; D, E; heads that fill the device; segments; range of log decays
    "one chunk": (64, (2, 2, 2, 2, 2), (4, 5), 1, False, (1e-3, 1.0)),
    "ragged, segments, grouped heads": (130, (4, 2, 2, 2, 2), (4, 5), 1, True, (1e-3, 1.0)),
    "odd head counts, two sizes": (130, (4, 2, 1, 4, 1), (40, 5), 1, True, (1e-3, 1.0)),
    "four pieces with segments": (1000, (4, 2, 2, 2, 2), (4, 5), 32, True, (1e-3, 0.1)),
    "four pieces, long memory": (1000, (4, 2, 2, 4, 4), (4, 5), 32, False, (1e-4, 1e-2)),
    "two pieces, strong decay": (1000, (4, 1, 4, 2, 2), (4, 5), 16, True, (1e-4, 80.0)),
    "two pieces without decay": (300, (2, 1, 1, 0, 1), (4, 5), 8, False, None),
}

STATE_CASES = (
    "odd head counts, two sizes",
    "two pieces, strong decay",
    "four pieces with segments",
    "two pieces without decay",
)
"""Without queries the gradients are those of above, of fewer heads: every layout of heads and of pieces once."""


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def _short_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "SHORTEST_PIECE", 2 * 64)


class Drawn(NamedTuple):
    """A random case: what has gradients, the constants of the decays, starts of segments, and what fills a device."""

    arguments: dict[str, Any]
    decays: ChunkDecays | None
    starts: Any
    busy: int

    @property
    def target(self):
        return ReferenceTarget(busy=self.busy)


def draw(tokens, heads, sizes, busy, segments, decay):
    rng = np.random.default_rng(0)
    widths = (sizes[0], sizes[0], sizes[1])
    q, k, v = (rng.normal(size=(BATCH, tokens, h, d)) for h, d in zip(heads[:3], widths, strict=True))
    initial = rng.normal(size=(BATCH, heads[4], *sizes))
    starts = rng.random((BATCH, tokens)) < (0.02 if segments else 0.0)
    fill = [(0, 0), (0, 0), (0, -tokens % 64)]
    steps = decays = None
    if decay is not None:
        steps = -np.exp(rng.uniform(*np.log(decay), (BATCH, heads[3], tokens)))
        decays = make_decays(np.pad(steps, fill), np.pad(starts, fill[1:]) if segments else None, dtype=np.float64)
    return Drawn({"q": q, "k": k, "v": v, "steps": steps, "initial": initial}, decays, starts, busy)


def with_steps(decays, steps):
    """The decays as a function of the log decays of the tokens."""
    if decays is None:
        return None
    fill = [(0, 0), (0, 0), (0, decays.steps[0, 0].size - steps.shape[2])]
    return dataclasses.replace(decays, steps=jnp.pad(steps, fill).reshape(decays.steps.shape))


def by_token(arguments, starts, group):
    """The recurrence, token after token; with a final state for every `group` of heads."""
    q, k, v, steps, initial = (arguments[name] for name in ("q", "k", "v", "steps", "initial"))
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
    return jnp.moveaxis(out, 0, 1), state[:, ::group]


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(function, arguments, cotangents, *constants):
    """The results of `function` and the gradients of its first argument."""
    results, pull_back = jax.vjp(lambda arguments: function(arguments, *constants), arguments)
    return results, pull_back(cotangents)[0]


class Expected(NamedTuple):
    """By the recurrence: results and gradients, those of the final state alone, and the cotangents of both."""

    whole: Any
    alone: Any
    cotangents: Any


@functools.cache
def expect(name):
    arguments, _, starts, _ = draw(*CASES[name])
    heads = {key: x.shape[1 if key in ("steps", "initial") else 2] for key, x in arguments.items() if x is not None}
    group = heads.pop("q") // max(heads.values())
    run = functools.partial(with_gradients, functools.partial(by_token, group=group), arguments)
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(functools.partial(by_token, group=group), arguments, starts)
    d_out, d_final = (rng.normal(size=x.shape) for x in shapes)
    whole, alone = (jax.device_get(run((x, d_final), starts)) for x in (d_out, np.zeros_like(d_out)))
    return Expected(whole, alone, (d_out, d_final))


@pytest.mark.usefixtures("_short_pieces")
@pytest.mark.parametrize("name", CASES)
def test_outputs_final_state_and_gradients(name):
    case, expected = draw(*CASES[name]), expect(name)

    def kernel(x, decays):
        taken = with_steps(decays, x["steps"])
        return linear_attention(x["q"], x["k"], x["v"], taken, x["initial"], target=case.target)

    assert_close(with_gradients(kernel, case.arguments, expected.cotangents, case.decays), expected.whole, EXACT)


@pytest.mark.usefixtures("_short_pieces")
@pytest.mark.parametrize("name", STATE_CASES)
def test_the_final_state_alone(name):
    case, expected = draw(*CASES[name]), expect(name)
    (_, final), gradients = expected.alone

    def kernel(x, decays):
        return final_state(x["k"], x["v"], with_steps(decays, x["steps"]), x["initial"], target=case.target)

    arguments, gradients = ({key: x for key, x in tree.items() if key != "q"} for tree in (case.arguments, gradients))
    actual = with_gradients(kernel, arguments, expected.cotangents[1], case.decays)
    assert_close(actual, (final, gradients), EXACT)


@pytest.mark.parametrize("heads", [2, 4], ids=["grouped heads", "keys of every head"])
def test_gradients_of_a_call_that_is_known(heads):
    """Also of keys that are the values, and added to others."""
    tokens, (q_heads, _, _, *others), (size, _), *rest = CASES["ragged, segments, grouped heads"]
    case = draw(tokens, (q_heads, heads, heads, *others), (size, size), *rest)
    arguments, target = {name: x for name, x in case.arguments.items() if name != "v"}, case.target
    rng = np.random.default_rng(1)
    more = {f"more_d{name}": rng.normal(size=arguments[name].shape) for name in "qk"}
    cotangents = rng.normal(size=arguments["q"].shape), rng.normal(size=(BATCH, heads, size, size))

    def call(x, decays):
        return linear_attention(x["q"], x["k"], x["k"], with_steps(decays, x["steps"]), x["initial"], target=target)

    _, expected = with_gradients(call, arguments, cotangents, case.decays)

    @jax.jit
    def gradients(arguments, decays, cotangents, more):
        q, k, steps, initial = (arguments[name] for name in ("q", "k", "steps", "initial"))
        keys, start = pieces.pad_sizes(k, (3,), 64), pieces.pad_sizes(initial, (2, 3))
        constants = dataclasses.replace(decays, steps=None)
        states = target.decayed_attention(None, keys, keys, constants, start, outputs=False, states=True).states
        given = with_steps(decays, steps)
        return known_gradients(q, k, None, given, initial, states, *cotangents, **more, target=target)

    actual = gradients(arguments, case.decays, cotangents, more)
    assert_close(actual.q, expected["q"] + more["more_dq"], EXACT)
    assert_close(actual.k, expected["k"] + more["more_dk"], EXACT)
    assert actual.v is None
    assert_close(actual.steps.reshape(BATCH, others[0], -1)[..., :tokens], expected["steps"], EXACT)
    assert_close(actual.initial, expected["initial"], EXACT)


def test_without_an_initial_state_it_is_zero():
    arguments, _, _, busy = draw(*CASES["two pieces without decay"])
    q, k, v = (arguments[name] for name in "qkv")
    run = jax.jit(functools.partial(linear_attention, target=ReferenceTarget(busy=busy)))
    assert_close(run(q, k, v, None, None), run(q, k, v, None, np.zeros_like(arguments["initial"])), EXACT)


def test_vmap_joins_the_batch():
    case = draw(*CASES["ragged, segments, grouped heads"])
    scales = np.array([1.0, 0.5, -1.0])[:, None, None, None, None]
    several = {name: scales * case.arguments[name] for name in "qkv"}

    def loss(x, steps, initial, decays):
        given = with_steps(decays, steps)
        out, final = linear_attention(**x, decays=given, initial=initial, target=case.target)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(final))

    constants = case.arguments["steps"], case.arguments["initial"], case.decays
    one = jax.value_and_grad(loss)
    run = jax.jit(one)
    each = [run({name: x[i] for name, x in several.items()}, *constants) for i in range(3)]
    expected = jax.tree.map(lambda *x: np.stack(x), *each)
    assert_close(jax.jit(jax.vmap(one, (0, None, None, None)))(several, *constants), expected, EXACT)


def test_sequences_are_split_only_as_far_as_it_pays():
    for heads, length, programs, count in (
        (1 << 20, 1 << 20, 132, 1),
        (67, 1 << 20, 132, 1),
        (66, 1 << 20, 132, 2),
        (16, 32768, 132, 8),
        (16, 4096, 132, 4),
        (1, 1024, 132, 1),
        (1, 2047, 132, 1),
        (1, 32768, 1, 1),
    ):
        assert choose_pieces(heads, length, programs) == count


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
