"""What is timed: the mixers side by side, forms of one mixer, growth with length, decoding, and compiled memory."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, fail
from jaxmix.bench.report import Row
from jaxmix.bench.timing import Timing, measure
from jaxmix.mixers import (
    SoftmaxAttentionState,
    ahla,
    gated_delta_rule,
    hla2,
    hla3,
    interdomain_attention,
    linear_attention,
    s4d,
    softmax_attention,
    ssd,
)
from jaxmix.mixers.s4d import s4d_poles

MODES = 64
"""Complex modes of the mixers that have them."""


def half_delta_rule(q: Array, k: Array, v: Array, log_decay: Array, **options: Any) -> tuple[Array, Any]:
    """`gated_delta_rule` with write strengths of one half."""
    return gated_delta_rule(q, k, v, log_decay, jnp.full(log_decay.shape, 0.5), **options)


def single_group_ssd(q: Array, k: Array, v: Array, log_decay: Array, **options: Any) -> tuple[Array, Any]:
    """`ssd` with rates of one and the B and C of the first head for all."""
    rates = -jnp.ones(v.shape[2])
    return ssd(v, -log_decay, rates, k[:, :, :1], q[:, :, :1], **options)


FIXED_STATE: dict[str, Callable[..., tuple[Array, Any]]] = {
    "linear_attention": linear_attention,
    "ssd": single_group_ssd,
    "gated_delta_rule": half_delta_rule,
    "hla2": hla2,
    "ahla": ahla,
    "hla3": hla3,
}


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """What to time and how often.

    Attributes:
        suites: names from SUITES; all by default.
        batch: sequences.
        length: tokens T.
        heads: query heads H (keys and values have as many).
        size: key and value size D = E.
        chunk_size: tokens per chunk of the scan form.
        lengths: lengths of the growth suite.
        repeats: timed runs of each case; the slow token-level forms take a third.
    """

    suites: tuple[str, ...] = ("mixers", "modes", "forms", "length", "decode", "memory")
    batch: int = 1
    length: int = 4096
    heads: int = 4
    size: int = 64
    chunk_size: int = 64
    lengths: tuple[int, ...] = (1024, 4096, 16384, 32768)
    repeats: int = 15


def run_suites(options: BenchOptions) -> Iterator[Row]:
    """Run the suites asked for, giving each row as it is measured.

    Raises:
        ValueError: for an unknown suite, or a size or count that is not positive.
    """
    for name in options.suites:
        if name not in SUITES:
            fail("suites", f"names from {', '.join(SUITES)}", repr(name))
    for name in ("batch", "length", "heads", "size", "chunk_size", "repeats"):
        if getattr(options, name) < 1:
            fail(name, "a positive number", getattr(options, name))
    for name in options.suites:
        yield from SUITES[name](options)


def draw(options: BenchOptions, length: int) -> tuple[Array, Array, Array, Array]:
    """q, k, v of unit variance over the key size, and decays that remember 20 to 1000 tokens."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (options.batch, length, options.heads, options.size)
    q, k, v = (jax.random.normal(key, shape) / options.size**0.5 for key in keys[:3])
    return q, k, v, -jax.random.uniform(keys[3], shape[:3], minval=1e-3, maxval=5e-2)


def forward(mixer: Callable[..., Any], **keywords: Any) -> Any:
    """The compiled output of a mixer."""
    return jax.jit(lambda *arrays: mixer(*arrays, **keywords)[0])


def forward_backward(mixer: Callable[..., Any], **keywords: Any) -> Any:
    """The compiled gradient of a mixer in all its arguments, under a fixed cotangent of ones."""

    def loss(*arrays: Array) -> Array:
        return mixer(*arrays, **keywords)[0].sum()

    return jax.jit(lambda *arrays: jax.grad(loss, argnums=tuple(range(len(arrays))))(*arrays))


def _mixers(options: BenchOptions) -> Iterator[Row]:
    arrays = draw(options, options.length)
    for pass_name, build in (("forward", forward), ("forward+backward", forward_backward)):
        scan = functools.partial(build, implementation="scan", chunk_size=options.chunk_size)
        timings = measure({n: (scan(f), arrays) for n, f in FIXED_STATE.items()}, repeats=options.repeats)
        base = timings["linear_attention"].median
        for name, timing in timings.items():
            values = {**_milliseconds(timing), "times linear_attention": timing.median / base}
            yield Row("mixers", f"{name} scan, {pass_name}", _shape(options, options.length), values)


def _modes(options: BenchOptions) -> Iterator[Row]:
    q, k, v, g = draw(options, options.length)
    keys = jax.random.split(jax.random.key(1), 2)
    A = jnp.tile(jnp.asarray(s4d_poles(MODES), jnp.float32), (options.heads, 1, 1))
    delta = jnp.exp(jax.random.uniform(keys[0], (options.heads,), minval=jnp.log(1e-3), maxval=jnp.log(1e-1)))
    C = jax.random.normal(keys[1], (options.heads, 2, MODES, MODES)) * (2 * MODES) ** -0.5
    for pass_name, build in (("forward", forward), ("forward+backward", forward_backward)):
        scan = functools.partial(build, implementation="scan", chunk_size=options.chunk_size)
        cases = {
            "linear_attention scan": (scan(linear_attention), (q, k, v, g)),
            "interdomain_attention scan": (scan(interdomain_attention), (q, k, v, A, delta, C)),
            "interdomain_attention serial": (
                build(interdomain_attention, implementation="serial"),
                (q, k, v, A, delta, C),
            ),
            "s4d scan": (scan(s4d), (v, A, delta, C[:, :, 0])),
            "s4d fft": (build(s4d, implementation="fft"), (v, A, delta, C[:, :, 0])),
        }
        timings = measure(cases, repeats=-(-options.repeats // 3))
        base = timings["linear_attention scan"].median
        for name, timing in timings.items():
            values = {**_milliseconds(timing), "times linear_attention": timing.median / base}
            yield Row("modes", f"{name}, {pass_name}", _shape(options, options.length), values)


def _forms(options: BenchOptions) -> Iterator[Row]:
    arrays = draw(options, options.length)
    forms = {
        f"scan, chunks of {options.chunk_size}": {"implementation": "scan", "chunk_size": options.chunk_size},
        "scan over tokens": {"implementation": "scan", "chunk_size": 1},
        "serial": {"implementation": "serial"},
    }
    for mixer in ("hla2", "gated_delta_rule"):
        for pass_name, build in (("forward", forward), ("forward+backward", forward_backward)):
            # The gradient of a scan over tokens keeps a matrix for every token and level.
            kept = {n: f for n, f in forms.items() if pass_name == "forward" or n != "scan over tokens"}
            compiled = {n: (build(FIXED_STATE[mixer], **keywords), arrays) for n, keywords in kept.items()}
            timings = measure(compiled, repeats=-(-options.repeats // 3))
            base = next(iter(timings.values())).median
            for name, timing in timings.items():
                values = {**_milliseconds(timing), "times the chunked scan": timing.median / base}
                yield Row("forms", f"{mixer} {name}, {pass_name}", _shape(options, options.length), values)


def _length(options: BenchOptions) -> Iterator[Row]:
    for pass_name, build in (("forward", forward), ("forward+backward", forward_backward)):
        scan = build(hla2, implementation="scan", chunk_size=options.chunk_size)
        timings = measure({str(n): (scan, draw(options, n)) for n in options.lengths}, repeats=options.repeats)
        for length in options.lengths:
            timing = timings[str(length)]
            tokens = options.batch * length
            values = {**_milliseconds(timing), "microseconds per token": timing.median / tokens * 1e6}
            yield Row("length", f"hla2 scan, {pass_name}", _shape(options, length), values)


def _decode(options: BenchOptions) -> Iterator[Row]:
    contexts = (options.lengths[0], options.lengths[-1])
    cases = {}
    for context in contexts:
        q, k, v, g = draw(options, context)
        states: dict[str, tuple[Callable[..., Any], tuple[Array, ...], Any]] = {
            name: (mixer, (g,), mixer(q, k, v, g)[1]) for name, mixer in FIXED_STATE.items()
        }
        # The cache holds the token to come as well. Prefill would need the scores of all pairs of tokens.
        slot = [(0, 0), (0, 1), (0, 0), (0, 0)]
        length = jnp.full((options.batch,), context, jnp.int32)
        cache = SoftmaxAttentionState(k=jnp.pad(k, slot), v=jnp.pad(v, slot), length=length)
        states["softmax_attention"] = (softmax_attention, (), cache)
        for name, (mixer, gates, state) in states.items():
            token = tuple(x[:, :1] for x in (q, k, v, *gates))
            cases[f"{name}, {context}"] = (jax.jit(lambda s, t, f=mixer: f(*t, initial_state=s)), (state, token))
    timings = measure(cases, repeats=options.repeats * 10)
    for name, timing in timings.items():
        mixer, context = name.split(", ")
        values = {"microseconds": timing.median * 1e6}
        yield Row("decode", f"{mixer}, one token", _shape(options, int(context)), values)


def _memory(options: BenchOptions) -> Iterator[Row]:
    for length in (options.length, 2 * options.length):
        arrays = draw(options, length)
        token_states = options.batch * length * options.heads * options.size**2 * 4
        for name, mixer in FIXED_STATE.items():
            for pass_name, build in (("forward", forward), ("forward+backward", forward_backward)):
                compiled = build(mixer, implementation="scan", chunk_size=options.chunk_size)
                analysis: Any = compiled.lower(*arrays).compile().memory_analysis()
                values = {
                    "temporary MB": analysis.temp_size_in_bytes / 1e6,
                    "of one [B, T, H, D, D]": analysis.temp_size_in_bytes / token_states,
                }
                yield Row("memory", f"{name} scan, {pass_name}", _shape(options, length), values)


def _milliseconds(timing: Timing) -> dict[str, float]:
    return {
        "milliseconds": timing.median * 1e3,
        "lower quartile": timing.lower * 1e3,
        "upper quartile": timing.upper * 1e3,
    }


def _shape(options: BenchOptions, length: int) -> str:
    return f"({options.batch}, {length}, {options.heads}, {options.size})"


SUITES: dict[str, Callable[[BenchOptions], Iterator[Row]]] = {
    "mixers": _mixers,
    "modes": _modes,
    "forms": _forms,
    "length": _length,
    "decode": _decode,
    "memory": _memory,
}
"""Mixers side by side; complex modes; forms of one mixer; growth with T; one decoded token; compiled memory."""
