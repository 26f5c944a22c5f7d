"""Functions of JAX as rows of the suites of named shapes: checked, compiled, timed on the device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxmix.arrays import Array
from jaxmix.bench.costs import cost
from jaxmix.bench.gate import Work, check
from jaxmix.bench.hlo import custom_calls
from jaxmix.bench.loop import LoopOptions, Step, count_sets, time_single, time_step
from jaxmix.bench.operands import MIXERS
from jaxmix.bench.timing import Timing


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What is known about a row.

    Attributes:
        timing: seconds of one call.
        error: the largest error against the float32 reference.
        peak: bytes of arguments, results and temporaries together; None where it is not known.
        calls: calls in one timed run.
        notes: what the reader should know.
    """

    timing: Timing
    error: float
    peak: int | None
    calls: int
    notes: tuple[str, ...] = ()


MOST_LOGITS = 2**34
"""Bytes of float32 logits up to which XLA's softmax attention is run; it needs several arrays of that size."""

Case = Callable[[Work, LoopOptions], Measurement]
"""Measures a piece of work; raises what went wrong."""


def jax_case(function: Callable[..., Array]) -> Case:
    """A row of `function(*arrays) -> output`, with the arrays of the mixer."""
    return lambda work, options: _measure(work, options, *_pass_step(work, function))


def mixer_case(name: str, **keywords: Any) -> Case:
    """A row of a mixer of `MIXERS`; `keywords` such as implementation="scan" go to the mixer."""
    call = MIXERS[name].call

    def decode(state: Any, *arrays: Array) -> tuple[Any, Any]:
        out, after = call(*arrays, initial_state=state)
        if hasattr(after, "length"):
            # The cache stays as full as it was, so that every call writes the last slot.
            after = dataclasses.replace(after, length=state.length)
        return {"out": out}, after

    def measure(work: Work, options: LoopOptions) -> Measurement:
        if work.part == "decode":
            return _measure(work, options, decode, lambda seed: (work.state(seed), work.arrays(seed)))
        return jax_case(lambda *arrays: call(*arrays, **keywords)[0])(work, options)

    return measure


def xla_softmax_case() -> Case:
    """Softmax attention by XLA, which keeps the logits of all pairs; refused where they take too much memory."""

    def measure(work: Work, options: LoopOptions) -> Measurement:
        needed = 4 * work.shape.batch * work.shape.heads * work.shape.length**2
        if needed > MOST_LOGITS:
            raise MemoryError(f"the logits take {needed / 1e9:.0f} GB, more than {MOST_LOGITS / 1e9:.0f} GB")
        return jax_case(lambda q, k, v: dot_product_attention(q, k, v, "xla"))(work, options)

    return measure


def cached_softmax_case(implementation: str) -> Case:
    """Softmax attention of one token over a full cache by jax.nn, which writes nothing."""

    def attend(_: Any, k: Array, v: Array, q: Array) -> tuple[Any, Any]:
        return {"out": dot_product_attention(q, k, v, implementation, causal=False)}, ()

    def measure(work: Work, options: LoopOptions) -> Measurement:
        def draw(seed: int) -> tuple[Any, tuple[Array, ...]]:
            q, k, v = work.arrays(seed)
            cache = work.state(seed)
            return (), (cache.k.at[:, -1].set(k[:, 0]), cache.v.at[:, -1].set(v[:, 0]), q)

        return _measure(work, options, attend, draw)

    return measure


def dot_product_attention(q: Array, k: Array, v: Array, implementation: Any, *, causal: bool = True) -> Array:
    """`jax.nn.dot_product_attention` with its default scale."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)


def _pass_step(work: Work, function: Callable[..., Array]) -> tuple[Step, Callable[[int], Any]]:
    """The step that is timed, and what draws its state and arrays from a seed."""
    names = MIXERS[work.mixer].arguments

    def forward(_: Any, *arrays: Array) -> tuple[Any, Any]:
        return {"out": function(*arrays)}, ()

    def both(_: Any, cotangent: Array, *arrays: Array) -> tuple[Any, Any]:
        out, pull = jax.vjp(function, *arrays)
        return {"out": out} | dict(zip(names, pull(cotangent), strict=True)), ()

    def backward(_: Any, pull: Any, cotangent: Array) -> tuple[Any, Any]:
        return dict(zip(names, pull(cotangent), strict=True)), ()

    def draw(seed: int) -> Any:
        arrays = work.arrays(seed)
        if work.part == "forward":
            return (), arrays
        if work.part == "forward+backward":
            return (), (work.cotangent(seed), *arrays)
        return (), (jax.jit(lambda *arrays: jax.vjp(function, *arrays)[1])(*arrays), work.cotangent(seed))

    return {"forward": forward, "forward+backward": both, "backward": backward}[work.part], draw


def _measure(work: Work, options: LoopOptions, step: Step, draw: Callable[[int], Any]) -> Measurement:
    first = draw(0)
    compiled = jax.jit(step).lower(first[0], *first[1]).compile()
    error = check(work, compiled(first[0], *first[1])[0])
    memory: Any = compiled.memory_analysis()
    single = time_single(lambda: compiled(first[0], *first[1]))
    sets = [first, *(draw(seed) for seed in range(1, count_sets(cost(work.mixer, work.shape, work.part).nbytes)))]
    timing = time_step(step, sets, single=single, options=options)
    served = custom_calls(compiled.as_text() or "")
    notes = [f"custom calls: {', '.join(served)}"] if served else []
    if timing.copies:
        notes.append(f"the loop copies {timing.copies} carried arrays a turn")
    return Measurement(timing.timing, error, peak_bytes(memory), timing.calls, tuple(notes))


def peak_bytes(memory: Any) -> int | None:
    """Arguments, results and temporaries of a compiled program, counted once where they share memory."""
    if memory is None:
        return None
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return int(total - memory.alias_size_in_bytes)


def refuse(reason: str) -> Case:
    """A row that cannot be measured, and says why."""

    def measure(work: Work, options: LoopOptions) -> Measurement:
        raise NotImplementedError(reason)

    return measure
