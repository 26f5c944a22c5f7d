"""Fused chains over pieces in time: equal to their linear attentions one after the other with no time cut."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmix.parallel import make_mesh
from jaxmix_kernels.chain.vjp import chain, is_fused
from jaxmix_kernels.linear_attention import pieces
from jaxmix_kernels.linear_attention.vjp import linear_attention
from jaxmix_kernels.links import AHLA, HLA2, HLA3, follow
from tests.contract.programs import largest_collective
from tests.kernels.reference import make_decays, to_power
from tests.kernels.targets import ReferenceTarget
from tests.tolerances import assert_close

BATCH, HEADS, EXACT = 2, 4, 1e-11
"""float64 against float64 in another order."""

LINKS = {"hla2": HLA2, "ahla": AHLA, "hla3": HLA3}
BORDERS = ((0, 100), (0, 300), (1, 384), (1, 390))
"""Sequence and token: inside two pieces of 192 tokens, where one begins, and shortly behind."""

CASES = {
    # tokens; heads of k, v, decays, initial states; D, E; heads that fill the device; segments
    "four pieces with segments, grouped heads, one piece of padding": (520, (2, 1, 2, 2), (4, 5), 32, True),
    "two pieces without decay": (300, (1, 4, 0, 1), (40, 5), 16, False),
    "two pieces, a decay for every head": (256, (4, 2, 4, 4), (4, 36), 16, False),
}
SEGMENTED, UNDECAYED, DEVICES = CASES


@pytest.fixture(autouse=True)
def _float64(monkeypatch):
    monkeypatch.setattr(pieces, "SHORTEST_PIECE", 2 * 64)
    with jax.enable_x64(True):
        yield


def draw(links, tokens, heads, sizes, busy, segments):
    """Arrays that have gradients, constants of the decays, and the target."""
    assert pieces.choose_pieces(BATCH * HEADS, tokens, busy) > 1
    rng = np.random.default_rng(0)
    widths = {"k": sizes[0], "v": sizes[1]}
    q, k, v = (
        rng.normal(size=(BATCH, tokens, count, width)) / np.sqrt(width)
        for count, width in ((HEADS, sizes[0]), (heads[0], sizes[0]), (heads[1], sizes[1]))
    )
    initials = []
    for link in links:
        widths[link.result] = widths[link.values]
        initials.append(rng.normal(size=(BATCH, heads[3], sizes[0], widths[link.values])))
    fill = [(0, 0), (0, 0), (0, -tokens % 64)]
    steps = decays = None
    if heads[2]:
        starts = np.zeros((BATCH, tokens + fill[2][1]), bool)
        if segments:
            starts[tuple(zip(*BORDERS, strict=True))] = True
        steps = -np.exp(rng.uniform(*np.log((1e-4, 3e-2)), (BATCH, heads[2], tokens)))
        decays = make_decays(np.pad(steps, fill), starts if segments else None, dtype=np.float64)
    arguments = {"q": q, "k": k, "v": v, "steps": steps, "initials": tuple(initials)}
    return arguments, decays, ReferenceTarget(busy=busy, fusible=True)


def by_power(links, decays, steps):
    """The decays of every link as functions of the log decays of the tokens."""
    if decays is not None:
        fill = [(0, 0), (0, 0), (0, decays.steps[0, 0].size - steps.shape[2])]
        decays = dataclasses.replace(decays, steps=jnp.pad(steps, fill).reshape(decays.steps.shape))
    return {link.power: to_power(decays, link.power) for link in links}


def fused(arguments, decays, *, links, target):
    """Output and final states."""
    x = arguments
    arrays = x["q"], x["k"], x["v"], by_power(links, decays, x["steps"]), x["initials"]
    assert is_fused(links, *arrays, target=target)
    return chain(links, target, *arrays)


def uncut(arguments, decays, *, links):
    """The same, one link after the other."""
    x, powers = arguments, by_power(links, decays, arguments["steps"])

    def attend(link, keys, values, initial):
        return linear_attention(x["q"], keys, values, powers[link.power], initial, target=ReferenceTarget())

    return follow(links, x["k"], x["v"], x["initials"], attend)


def with_gradients(function):
    """What a function gives, and the gradients of a loss that reads all of it."""

    def loss(arguments, decays):
        results = function(arguments, decays)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(results)), results

    return jax.grad(loss, has_aux=True)


@functools.cache
def expect(name, case):
    links = LINKS[name]
    arguments, decays, _ = draw(links, *CASES[case])
    return jax.device_get(jax.jit(with_gradients(functools.partial(uncut, links=links)))(arguments, decays))


@pytest.mark.parametrize(("name", "case"), [*((name, SEGMENTED) for name in LINKS), ("hla2", UNDECAYED)])
def test_outputs_final_states_and_gradients(name, case):
    links = LINKS[name]
    arguments, decays, target = draw(links, *CASES[case])
    run = jax.jit(with_gradients(functools.partial(fused, links=links, target=target)))
    assert_close(run(arguments, decays), expect(name, case), EXACT)


def test_heads_that_share_neither_all_nor_nothing_are_refused():
    q, k, v = (jnp.zeros((1, 64, count, 32), jnp.float32) for count in (6, 2, 3))
    initials = (jnp.zeros((1, 1, 32, 32), jnp.float32),) * 2
    with pytest.raises(ValueError, match=r"must divide one another, got \(2, 3, 1\)"):
        chain(AHLA, ReferenceTarget(fusible=True), q, k, v, {1: None}, initials)
    with pytest.raises(ValueError, match="must divide one another"):
        linear_attention(q, k, v, None, initials[0], target=ReferenceTarget())


def test_vmap_and_plain_jit_over_devices_without_a_gather():
    arguments, decays, target = draw(HLA2, *CASES[DEVICES])
    target = dataclasses.replace(target, splits=True)
    run = with_gradients(functools.partial(fused, links=HLA2, target=target))
    mesh = make_mesh(batch=2, heads=2)
    heads_at = {"q": 2, "k": 2, "v": 2, "steps": 1, "initials": 1}

    def place(x, axis):
        spec = P("batch", *[None] * (axis - 1), "heads")
        return jax.device_put(x, NamedSharding(mesh, spec))

    split = {name: jax.tree.map(functools.partial(place, axis=heads_at[name]), x) for name, x in arguments.items()}
    split_decays = jax.tree.map(functools.partial(place, axis=1), decays)
    program = jax.jit(run).lower(split, split_decays).compile()
    assert largest_collective(program.as_text()) <= 1
    assert_close(program(split, split_decays), expect("hla2", DEVICES), EXACT)
    several = jax.tree.map(lambda x: x[:, None], (arguments, decays))
    actual = jax.jit(jax.vmap(run))(*several)
    assert_close(jax.tree.map(lambda x: x[:, 0], actual), expect("hla2", DEVICES), EXACT)
