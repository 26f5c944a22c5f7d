"""Device time: many calls in one compiled loop, so that launching the loop is divided among all of them."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmix.arrays import Array
from jaxmix.bench.hlo import carry_copies
from jaxmix.bench.timing import Timing

L2_BYTES = 64 * 2**20
"""What a cache may keep of a call's arrays for the next call; that of an H200 holds 60 MB."""

Step = Callable[..., tuple[Any, Any]]
"""(state, *arrays) -> (results, new state); the state is () unless calls continue each other, as in decoding."""


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How long to measure.

    Attributes:
        runs: timed runs of the loop, of which the median and the quartiles are taken.
        seconds: aim for one run of the loop, by what a call takes from the host; turns are rounded down to a power of
            two.
        longest: seconds of one call above which nothing is timed.
        most_calls: calls in one run of the loop.
    """

    runs: int = 20
    seconds: float = 0.03
    longest: float = 1.0
    most_calls: int = 2000


@dataclasses.dataclass(frozen=True)
class DeviceTiming:
    """Seconds of one call in a loop.

    Attributes:
        timing: median and quartiles over the runs of the loop.
        calls: calls in one run.
        copies: arrays that a turn of the loop copies because it carries them, in the compiled program; 0 is right.
    """

    timing: Timing
    calls: int
    copies: int


class TooLong(Exception):
    """One call takes longer than is measured; the message has its time."""


def count_sets(nbytes: int) -> int:
    """How many sets of inputs take turns, so that none is read from the cache: 2 to 4, or 1 if it is far larger.

    Args:
        nbytes: bytes that one call reads and writes.
    """
    return 1 if nbytes >= 4 * L2_BYTES else min(4, max(2, math.ceil(2 * L2_BYTES / max(nbytes, 1))))


def make_loop(step: Step, *, sets: int, rounds: int) -> Any:
    """A compiled loop of `rounds` turns, each of which calls `step` once with every set of inputs.

    No call can leave the loop, be merged with another or be computed in part: all inputs pass a barrier together with
    a number from the results of the call before; the first entry of the last argument becomes NaN if that number is
    NaN, which no compiler can rule out; all results pass a barrier before the number is taken from them. Nothing but
    that number, the last arguments (changed in place) and the states is carried.

    Returns:
        (moving, fixed) -> moving, both from `loop_arguments`; `moving` is given up.
    """

    def body(moving: Any, fixed: Any) -> Any:
        token, marked, states = moving
        marked, states = list(marked), list(states)
        for i in range(sets):
            marked[i] = _mark(marked[i], token)
            inputs = lax.optimization_barrier((token, states[i], (*fixed[i], marked[i])))
            _, state, arrays = inputs
            results, states[i] = lax.optimization_barrier(step(state, *arrays))
            token = _probe((results, states[i]))
        return token, tuple(marked), tuple(states)

    def loop(moving: Any, fixed: Any) -> Any:
        return lax.fori_loop(0, rounds, lambda _, carried: body(carried, fixed), moving)

    return jax.jit(loop, donate_argnums=0)


def loop_arguments(sets: Sequence[tuple[Any, tuple[Any, ...]]]) -> tuple[Any, Any]:
    """What `make_loop` takes: copies of what it changes, and what it only reads.

    Args:
        sets: a state and the arrays of one call, for every set of inputs.
    """
    copied = jax.tree.map(jnp.copy, [(state, arrays[-1]) for state, arrays in sets])
    moving = (jnp.zeros(()), tuple(last for _, last in copied), tuple(state for state, _ in copied))
    return moving, tuple(arrays[:-1] for _, arrays in sets)


def time_step(
    step: Step, sets: Sequence[tuple[Any, tuple[Any, ...]]], *, single: float, options: LoopOptions
) -> DeviceTiming:
    """The time of one call of `step`.

    Args:
        step: what is timed.
        sets: a state and the arrays of one call, for every set of inputs.
        single: seconds of one call from the host, from `time_single`.
        options: how long to measure.

    Raises:
        TooLong: if one call takes more than `options.longest`.
    """
    if single > options.longest:
        raise TooLong(f"one call takes {single:.2g} s, more than {options.longest:g} s")
    wanted = options.seconds / max(single - _launch_seconds(), 5e-6)
    # A power of two, so that a cache of compiled programs has the loop of another run. It cannot be an argument of the
    # program: a GPU would ask the host after every turn.
    rounds = 1 << int(math.log2(max(1, min(wanted, options.most_calls) / len(sets))))
    moving, fixed = loop_arguments(sets)
    compiled = make_loop(step, sets=len(sets), rounds=rounds).lower(moving, fixed).compile()
    for _ in range(2):
        moving = jax.block_until_ready(compiled(moving, fixed))
    seconds = []
    for _ in range(options.runs):
        start = time.perf_counter()
        moving = jax.block_until_ready(compiled(moving, fixed))
        seconds.append((time.perf_counter() - start) / (rounds * len(sets)))
    if not np.isfinite(float(moving[0])):
        raise FloatingPointError("results are not finite after the timed calls")
    copies = len(carry_copies(compiled.as_text() or "", at_least=_smallest_result(step, sets[0])))
    return DeviceTiming(to_timing(seconds), rounds * len(sets), copies)


def to_timing(seconds: Sequence[float]) -> Timing:
    """Median and quartiles."""
    lower, median, upper = (float(np.quantile(seconds, part)) for part in (0.25, 0.5, 0.75))
    return Timing(median, lower, upper, len(seconds))


def time_single(call: Callable[[], Any], *, repeats: int = 3) -> float:
    """Seconds of one call from the host, the least of some after one that does not count."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
        if seconds[0] > 1:
            break
    return min(seconds)


@functools.cache
def _launch_seconds() -> float:
    """What `time_single` gives for a call that does nothing."""
    x, call = jnp.zeros(()), jax.jit(lambda x: x + 1)
    return time_single(lambda: call(x), repeats=10)


def _mark(x: Array, token: Array) -> Array:
    """`x` with its first entry NaN if `token` is."""
    first = (0,) * x.ndim
    return x.at[first].set(jnp.where(jnp.isnan(token), jnp.nan, x[first]).astype(x.dtype))


def _probe(results: Any) -> Array:
    """A number that needs every array of the results."""
    leaves = [x for x in jax.tree.leaves(results) if jnp.issubdtype(x.dtype, jnp.floating) and x.size]
    return jnp.stack([x[(0,) * x.ndim].astype(jnp.float32) for x in leaves]).sum()


def _smallest_result(step: Step, given: tuple[Any, tuple[Any, ...]]) -> int:
    """Entries of the smallest result that is not negligible."""
    state, arrays = given
    sizes = [x.size for x in jax.tree.leaves(jax.eval_shape(step, state, *arrays))]
    return max(2, min((size for size in sizes if size * 64 > max(sizes)), default=2))
