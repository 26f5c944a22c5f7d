"""The loop that times: every call is made, whole and in turn, and nothing is copied because it is carried."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmix
from jaxmix.bench.hlo import carry_copies, computations, loop_bodies
from jaxmix.bench.loop import (
    L2_BYTES,
    LoopOptions,
    TooLong,
    count_sets,
    loop_arguments,
    make_loop,
    time_single,
    time_step,
    to_timing,
)

QUICK = LoopOptions(runs=3, seconds=1e-4, most_calls=6)
Q, G = jnp.ones((1, 32, 2, 8)) / 4, -jnp.ones((1, 32, 2)) / 10


def add_one(_, x):
    return x + 1, ()


def multiply(_, a, b):
    return a @ b, ()


def attend(_, q, k, v, g):
    return jaxmix.linear_attention(q, k, v, g, implementation="scan", chunk_size=16)[0], ()


def text_of(step, sets, rounds=5):
    moving, fixed = loop_arguments(sets)
    return make_loop(step, sets=len(sets), rounds=rounds).lower(moving, fixed).compile().as_text()


def two(*arrays, state=()):
    return [(state, tuple(x * i for x in arrays)) for i in (1, 2)]


STEPS = {
    "x + 1": (add_one, two(jnp.ones((64, 32)))),
    "matrix product": (multiply, two(jnp.ones((64, 32)), jnp.ones((32, 48)))),
    "linear attention": (attend, two(Q, Q, Q, G)),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_loop_copies_no_result(name):
    assert carry_copies(text_of(*STEPS[name]), at_least=16) == []


def test_a_loop_that_carries_its_results_is_found_to_copy_them():
    def carrying(x, y):
        return lax.fori_loop(0, 5, lambda _, last: (last[1], last[0] + 1), (x, y))

    x = jnp.ones((64, 32))
    assert carry_copies(jax.jit(carrying).lower(x, x).compile().as_text(), at_least=16)


def whole_results(text, operation, entries):
    """How many results of an operation with so many entries a turn of the loop makes, and how many are outside."""
    every, bodies = computations(text), loop_bodies(text)

    def count(lines):
        found = 0
        for line in lines:
            found += line.operation == operation and line.entries == entries
            for called in every:
                if f"={called}," in line.rest.replace("%", "") + ",":
                    found += count(every[called]) if line.operation in ("fusion", "call") else 0
        return found

    inside = sum(count(lines) for lines in bodies.values())
    return inside, sum(line.operation == operation for name in every for line in every[name]) - inside


@pytest.mark.parametrize(("name", "operation", "entries"), [("x + 1", "add", 2048), ("matrix product", "dot", 3072)])
def test_a_turn_calls_every_set_once_and_computes_all_of_it(name, operation, entries):
    inside, outside = whole_results(text_of(*STEPS[name]), operation, entries)
    assert inside == 2
    assert outside == (1 if operation == "add" else 0)


def test_calls_continue_each_other_where_there_is_a_state():
    def count(state, x):
        return x * 2, state + 1

    moving, fixed = loop_arguments([(jnp.zeros(()), (jnp.ones(3),))] * 2)
    token, _, states = make_loop(count, sets=2, rounds=7)(moving, fixed)
    assert [float(state) for state in states] == [7, 7]
    assert float(token) == 2 + 7


def test_the_arguments_stay_as_they_were():
    arrays = (jnp.arange(6.0).reshape(2, 3),)
    moving, fixed = loop_arguments([((), arrays)])
    _, (marked,), _ = make_loop(add_one, sets=1, rounds=3)(moving, fixed)
    np.testing.assert_array_equal(marked, arrays[0])
    np.testing.assert_array_equal(arrays[0], np.arange(6.0).reshape(2, 3))


def test_time_is_positive_and_counts_its_calls():
    found = time_step(*STEPS["matrix product"], single=1e-4, options=QUICK)
    assert 0 < found.timing.lower <= found.timing.median <= found.timing.upper
    assert (found.timing.repeats, found.copies) == (3, 0)
    assert found.calls in (2, 4), "turns of two calls, at most three of them, a power of two"


def test_results_that_are_not_finite_have_no_time():
    with pytest.raises(FloatingPointError, match="finite"):
        time_step(lambda _, x: (x / 0, ()), two(jnp.ones(3)), single=1e-4, options=QUICK)


def test_calls_that_take_too_long_are_not_timed():
    with pytest.raises(TooLong, match="one call takes 2 s"):
        time_step(*STEPS["x + 1"], single=2.0, options=QUICK)


@pytest.mark.parametrize(
    ("nbytes", "sets"), [(1, 4), (L2_BYTES // 2, 4), (L2_BYTES, 2), (3 * L2_BYTES, 2), (4 * L2_BYTES, 1)]
)
def test_inputs_take_turns_so_that_no_cache_holds_them(nbytes, sets):
    assert count_sets(nbytes) == sets


def test_single_calls_and_quartiles():
    calls = []
    assert time_single(lambda: calls.append(1), repeats=2) >= 0
    assert len(calls) == 3
    timing = to_timing([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (timing.lower, timing.median, timing.upper, timing.repeats) == (2, 3, 4, 5)
