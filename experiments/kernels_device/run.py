"""Checks the Hopper kernels against plain jax.numpy on the device, then times them beside cuDNN attention.

    PYTHONPATH=.:kernels python experiments/kernels_device/run.py [--only check|time] [--match TEXT] [--shapes N]

Every case prints its line when it is done; a case that fails prints its error and the next one follows. An error is the
root mean square of the difference over that of the reference, which runs in float32 on the same numbers.
Times are device times of chained calls inside one compiled loop, median of 20 runs, over two sets of inputs.
"""

import argparse
import functools
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmix_kernels.ahla import gpu as ahla
from jaxmix_kernels.decays import CHUNK, BackwardArguments, ChunkDecays
from jaxmix_kernels.gpu_chain import chain_forward
from jaxmix_kernels.gpu_starts import add_starts
from jaxmix_kernels.hla2 import gpu as hla2
from jaxmix_kernels.hla3 import gpu as hla3
from jaxmix_kernels.linear_attention import gpu
from jaxmix_kernels.linear_attention.gpu_backward import decayed_attention_backward
from jaxmix_kernels.linear_attention.vjp import linear_attention
from jaxmix_kernels.links import Link
from jaxmix_kernels.target import Target
from tests.kernels import reference

LIMIT = 5e-3
FLOAT32_LIMIT = 2e-5
"""Of float32 operands, which the kernels read as two bfloat16 numbers; the aim is 1e-5."""
SHAPES = ((8, 4096, 16, 64), (4, 4096, 16, 128), (2, 16384, 16, 128), (1, 32768, 16, 128))
ONE = (Link("k", "v", "out"),)

CASES: dict[str, tuple[dict, dict]] = {
    "D 64, E 64": ({"tokens": 1024, "key_size": 64}, {}),
    "D 128, E 128": ({"tokens": 1024, "key_size": 128, "value_size": 128}, {}),
    "D 128, E 128, reverse, state alone": (
        {"tokens": 1024, "key_size": 128, "value_size": 128},
        {"reverse": True, "outputs": False},
    ),
    "no decay, no segments": ({"tokens": 1024, "key_size": 64, "decay": None, "segments": False}, {}),
    "weak decays, 4096 tokens": (
        {"tokens": 4096, "key_size": 128, "value_size": 128, "decay": "weak", "segments": False},
        {},
    ),
}
CASES |= {
    f"float32, {name}": ({"dtype": jnp.float32, **arguments}, {"states": True, **options})
    for name, (arguments, options) in CASES.items()
}
CASES["float32, D 32, E 32"] = ({"dtype": jnp.float32, "tokens": 1024, "value_size": 32}, {"states": True})
CASES["float32, 16384 tokens, no decay"] = (
    {"dtype": jnp.float32, "tokens": 16384, "key_size": 64, "decay": None, "segments": False},
    {},
)

CHAINS: dict[str, tuple[Any, tuple[Link, ...], dict]] = {
    "hla2 D 64": (hla2.hla2_forward, hla2.LINKS, {"key_size": 64}),
    "hla2 D 64 no decay": (hla2.hla2_forward, hla2.LINKS, {"key_size": 64, "decay": None, "segments": False}),
    "hla2 D 128": (hla2.hla2_forward, hla2.LINKS, {"key_size": 128, "value_size": 128}),
    "hla2 D 128 no decay": (
        hla2.hla2_forward,
        hla2.LINKS,
        {"key_size": 128, "value_size": 128, "decay": None, "segments": False},
    ),
    "ahla D 64": (ahla.ahla_forward, ahla.LINKS, {"key_size": 64}),
    "ahla D 128": (ahla.ahla_forward, ahla.LINKS, {"key_size": 128, "value_size": 128, "segments": False}),
    "hla3 D 64": (hla3.hla3_forward, hla3.LINKS, {"key_size": 64}),
    "hla3 tail D 128": (hla3.hla3_tail_forward, hla3.TAIL, {"key_size": 128, "value_size": 128}),
}
"""Fused kernels, their links, and options of the random arguments."""

GRADIENTS: dict[str, dict] = {
    "gradients D 64": {"tokens": 1024, "key_size": 64, "segments": False},
    "gradients D 128, E 128": {"tokens": 1024, "key_size": 128, "value_size": 128, "segments": False},
}
GRADIENTS |= {f"float32, {name}": {"dtype": jnp.float32, **arguments} for name, arguments in GRADIENTS.items()}


STARTS: dict[str, dict] = {
    "starts D 64, E 64": {"key_size": 64, "value_size": 64},
    "starts D 128, E 128": {"key_size": 128, "value_size": 128},
    "starts D 128, E 128, no decay": {"key_size": 128, "value_size": 128, "decay": None, "segments": False},
}
"""What the starts of pieces give, added in place."""


def ratio(actual, expected) -> float:
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))


def check(name: str) -> bool:
    """Prints one line of errors of out and final; True if all are small."""
    arguments, options = CASES[name]
    a, b, c, decays, initial, _ = reference.random_case(**{"dtype": jnp.bfloat16, **arguments})
    start = time.perf_counter()
    actual = jax.jit(functools.partial(gpu.decayed_attention, **options))(a, b, c, decays, initial)
    wide = (x.astype(jnp.float32) for x in (a, b, c))
    expected = jax.jit(functools.partial(reference.decayed_attention, **options))(*wide, decays, initial)
    errors = {
        field: ratio(x, y)
        for field, x, y in zip(actual._fields, actual, expected, strict=True)
        if x is not None and y is not None
    }
    return report(name, errors, start, limit_of(b))


def check_chain(name: str) -> bool:
    """The same for a fused kernel, against its linear attentions one after the other in float32."""
    function, links, options = CHAINS[name]
    options = {"batch": 2, "heads": 4, "tokens": 1024, "b_heads": 2, "decay": "weak", "dtype": jnp.bfloat16} | options
    q, k, v, decays, *_ = reference.random_case(**options)
    start = time.perf_counter()
    actual = jax.jit(lambda q, k, v, d: function(q, k, v, d, *[None] * len(links)))(q, k, v, decays)

    wide = (x.astype(jnp.float32) for x in (q, k, v))
    expected = jax.jit(functools.partial(reference.chain_forward, links))(*wide, decays, [None] * len(links))
    names = ("out", *(f"state {i}" for i in range(len(links))))
    errors = {field: ratio(x, y) for field, x, y in zip(names, actual, expected, strict=True)}
    return report(name, errors, start)


def check_backward(name: str) -> bool:
    """The same for the kernel of the gradients, against autodiff of the reference in float32."""
    start = time.perf_counter()
    q, k, v, _, initial, d_out = reference.random_case(**{"decay": "weak", "dtype": jnp.bfloat16, **GRADIENTS[name]})
    steps = -0.02 * jax.random.uniform(jax.random.key(0), (*initial.shape[:2], q.shape[1] // CHUNK, CHUNK))
    d_final = jax.random.normal(jax.random.key(1), initial.shape)

    @jax.jit
    def fused(q, k, v, d_out, steps, initial, d_final):
        decays = decays_of(steps)
        states = gpu.decayed_attention(q, k, v, decays, initial, states=True).states
        return decayed_attention_backward(BackwardArguments(q, k, v, d_out, decays, states, d_final))

    @jax.jit
    def autodiff(q, k, v, d_out, steps, initial, d_final):
        def attend(q, k, v, initial, steps):
            result = reference.decayed_attention(q, k, v, decays_of(steps), initial)
            return result.out, result.final

        arrays = *(x.astype(jnp.float32) for x in (q, k, v)), initial, steps
        return jax.vjp(attend, *arrays)[1]((d_out.astype(jnp.float32), d_final))

    arrays = q, k, v, d_out, steps, initial, d_final
    actual, expected = fused(*arrays), autodiff(*arrays)
    errors = {field: ratio(x, y) for field, x, y in zip(actual._fields, actual, expected, strict=True)}
    return report(name, errors, start, limit_of(q))


def check_starts(name: str) -> bool:
    """The same for what is added to outputs and states."""
    options = {"batch": 4, "tokens": 1024, "heads": 4, "decay": -0.01, "dtype": jnp.bfloat16}
    q, _, _, decays, starts, out = reference.random_case(**(options | STARTS[name]))
    start = time.perf_counter()
    shape = (*starts.shape[:2], q.shape[1] // CHUNK, *starts.shape[2:])
    states = jax.random.normal(jax.random.key(0), shape, q.dtype)
    edges = (None, None) if decays is None else (decays.enter, decays.kept)
    actual = jax.jit(add_starts)(q, out, starts, *edges, states)
    q, out, states = (x.astype(jnp.float32) for x in (q, out, states))
    expected = jax.jit(reference.add_starts)(q, out, starts, *edges, states)
    errors = {field: ratio(x, y) for field, x, y in zip(("out", "states"), actual, expected, strict=True)}
    return report(name, errors, start)


def decays_of(steps: jax.Array) -> ChunkDecays:
    """Decays of log decays [B, Hd, N, C], without segments."""
    sums = jnp.cumsum(steps, axis=-1)
    ends = sums[..., -1:]
    return ChunkDecays(
        high=sums,
        low=jnp.zeros_like(sums),
        enter=jnp.exp(sums),
        leave=jnp.exp(ends - sums),
        kept=jnp.exp(ends[..., 0]),
        run=None,
        steps=steps,
    )


def limit_of(x: jax.Array) -> float:
    """The largest error of operands like x."""
    return FLOAT32_LIMIT if x.dtype == jnp.float32 else LIMIT


def report(name: str, errors: dict[str, float], start: float, limit: float = LIMIT) -> bool:
    good = all(error < limit for error in errors.values())
    text = ", ".join(f"{field} {error:.1e}" for field, error in errors.items())
    print(f"{'ok  ' if good else 'BAD '} {name:36s} {text}   [{time.perf_counter() - start:.1f} s]", flush=True)
    return good


def device_time(function, sets, calls: int) -> float:
    """Milliseconds of one call of function(*set), which takes its inputs from the sets in turn.

    The loop carries the results of all sets and returns them, so that no call is dead; the barrier makes every call
    depend on the one before, so that none leaves the loop. Results are donated, so that nothing is copied.
    """
    function = jax.jit(function)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *sets[0]))

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(sets, results):
        def body(_, results):
            last, results = results[-1], []
            for arrays in sets:
                arrays, last = lax.optimization_barrier((arrays, last))
                last = function(*arrays)
                results.append(last)
            return results

        return lax.fori_loop(0, calls // len(sets), body, results)

    results = [jax.tree.map(jnp.copy, empty) for _ in sets]
    for _ in range(2):
        results = jax.block_until_ready(loop(sets, results))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        results = jax.block_until_ready(loop(sets, results))
        times.append((time.perf_counter() - start) * 1e3 / (calls // len(sets) * len(sets)))
    return float(np.median(times))


def copy_speed() -> float:
    """Bytes read and written a millisecond by x + 1 over 1 GiB, measured like the kernels: a check of the method."""
    sets = [(jnp.full((2**28,), float(seed)),) for seed in (0, 1)]
    return 2 * 2**30 / device_time(lambda x: x + 1, sets, 6)


def inputs(shape: tuple[int, int, int, int], seed: int):
    """Random q, k, v and the decays of log decays around -0.01 a token, made on the device."""
    batch, tokens, heads, size = shape
    keys = jax.random.split(jax.random.key(seed), 4)
    q, k, v = ((jax.random.normal(key, shape) / size**0.5).astype(jnp.bfloat16) for key in keys[:3])
    steps = -0.02 * jax.random.uniform(keys[3], (batch, heads, tokens // 64, 64))
    return q, k, v, decays_of(steps)


def attend(q, k, v, decays, **options):
    return gpu.decayed_attention(q, k, v, decays, None, **options)


def rivals(shape: tuple[int, int, int, int]):
    """Functions of (q, k, v, decays), by name, with the number of chained calls."""
    batch, _, heads, size = shape
    yield "cuDNN causal attention", cudnn, 6
    if batch * heads < 64:
        yield "linear attention, split, decay", split, 20
        return
    yield "linear attention, no decay", lambda q, k, v, d: attend(q, k, v, None), 40
    yield "linear attention, decay", attend, 40
    yield "  with states", lambda q, k, v, d: attend(q, k, v, d, states=True), 40
    yield "  all gradients", gradients, 40
    yield "  all gradients, no decay", lambda q, k, v, d, x: gradients(q, k, v, None, x), 40
    yield "  chain of one, no decay", lambda q, k, v, d: chain_forward(ONE, q, k, v, None, (None,)), 40
    yield "  chain of one, decay", lambda q, k, v, d: chain_forward(ONE, q, k, v, d, (None,)), 40
    yield "hla2, no decay", lambda q, k, v, d: hla2.hla2_forward(q, k, v, None, None, None), 40
    yield "hla2, decay", lambda q, k, v, d: hla2.hla2_forward(q, k, v, d, None, None), 40
    yield "ahla, decay", lambda q, k, v, d: ahla.ahla_forward(q, k, v, d, None, None), 40
    if size == 64:
        yield "hla3, decay", lambda q, k, v, d: hla3.hla3_forward(q, k, v, d, None, None, None), 40


def gradients(q, k, v, decays, states):
    return decayed_attention_backward(BackwardArguments(q, k, v, v, decays, states))


def split(q, k, v, decays):
    return linear_attention(q, k, v, decays, None, target=Target("gpu"))


def cudnn(q, k, v, decays):
    del decays
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def measure(match: str, shapes: tuple[tuple[int, int, int, int], ...]) -> None:
    speed = copy_speed()
    print(f"copy: {speed * 1e3 / 1e12:.2f} TB/s", flush=True)
    for shape in shapes:
        floor = 4 * 2 * np.prod(shape) / speed
        print(f"{shape}: copy floor {floor:.3f} ms", flush=True)
        sets = [inputs(shape, seed) for seed in (0, 1)]
        for name, function, calls in rivals(shape):
            if match not in name:
                continue
            try:
                given = [(*x, attend(*x, states=True).states) for x in sets] if "gradients" in name else sets
                spent = device_time(function, given, calls)
                print(f"  {name:40s} {spent:.3f} ms, {floor / spent:4.0%} of the copy speed", flush=True)
            except Exception as error:
                print(f"  {name:40s} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("check", "time"))
    parser.add_argument("--match", default="", help="cases whose names contain this")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="time the first N shapes")
    options = parser.parse_args()
    print(jax.__version__, jax.devices(), flush=True)
    bad = []
    if options.only != "time":
        cases = dict.fromkeys(CASES, check) | dict.fromkeys(CHAINS, check_chain)
        cases |= dict.fromkeys(GRADIENTS, check_backward) | dict.fromkeys(STARTS, check_starts)
        for name, function in cases.items():
            if options.match not in name:
                continue
            try:
                good = function(name)
            except Exception:
                good = False
                print(f"BAD  {name}\n{traceback.format_exc(limit=-4)[-1500:]}", flush=True)
            bad += [] if good else [name]
        print(f"{len(bad)} bad cases: {bad}", flush=True)
    if options.only != "check":
        measure(options.match, SHAPES[: options.shapes])


if __name__ == "__main__":
    main()
