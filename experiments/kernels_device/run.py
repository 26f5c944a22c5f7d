"""Checks the Hopper kernels against plain jax.numpy on the device, then times them beside cuDNN attention.

    PYTHONPATH=.:kernels python experiments/kernels_device/run.py [--only check|time] [--match TEXT] [--tunings]

Every case prints its line when it is done; a case that fails prints its error and the next one follows. An error is the
root mean square of the difference over that of the reference, which runs in float32 on the same bfloat16 numbers.
Times are device times of chained calls inside one compiled loop, median of 20 runs, over two sets of inputs.
"""

import argparse
import functools
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmix_kernels.decays import ChunkDecays
from jaxmix_kernels.linear_attention import gpu
from tests.kernels import reference

LIMIT = 5e-3
SHAPES = ((8, 4096, 16, 64), (4, 4096, 16, 128), (2, 16384, 16, 128), (1, 32768, 16, 128))
COPY_BYTES_PER_MS = 4.3e9

CASES: dict[str, tuple[dict, dict]] = {
    "one chunk": ({"tokens": 64}, {}),
    "two chunks, reverse": ({"tokens": 128}, {"reverse": True}),
    "D 64, E 64": ({"tokens": 1024, "key_size": 64}, {}),
    "D 64, E 64, reverse": ({"tokens": 1024, "key_size": 64}, {"reverse": True}),
    "D 128, E 128": ({"tokens": 1024, "key_size": 128, "value_size": 128}, {}),
    "D 128, E 128, reverse": ({"tokens": 1024, "key_size": 128, "value_size": 128}, {"reverse": True}),
    "D 128, E 128, final only": ({"tokens": 1024, "key_size": 128, "value_size": 128}, {"outputs": False}),
    "D 32, E 32": ({"tokens": 128, "key_size": 32, "value_size": 32}, {}),
    "D 128, E 32": ({"tokens": 128, "key_size": 128, "value_size": 32}, {}),
    "D 32, E 128, reverse": ({"tokens": 128, "key_size": 32, "value_size": 128}, {"reverse": True}),
    "no decay, no segments": ({"tokens": 1024, "key_size": 64, "decay": None, "segments": False}, {}),
    "no decay, no segments, reverse": (
        {"tokens": 1024, "key_size": 64, "decay": None, "segments": False},
        {"reverse": True},
    ),
    "no decay, segments": ({"tokens": 1024, "key_size": 64, "decay": None}, {}),
    "weak decays, 4096 tokens": (
        {"tokens": 4096, "key_size": 128, "value_size": 128, "decay": "weak", "segments": False},
        {},
    ),
    "weak decays, 4096 tokens, reverse": (
        {"tokens": 4096, "key_size": 128, "value_size": 128, "decay": "weak", "segments": False},
        {"reverse": True},
    ),
    "decays of -80": ({"tokens": 128, "key_size": 64, "decay": -80.0, "segments": False}, {}),
    "grouped heads": (
        {
            "tokens": 128,
            "heads": 8,
            "b_heads": 4,
            "c_heads": 2,
            "decay_heads": 1,
            "weights_heads": 4,
            "state_heads": 2,
        },
        {},
    ),
    "final only, no initial": ({"tokens": 1024, "key_size": 64}, {"outputs": False, "initial": None}),
    "no weights, no initial": ({"tokens": 1024, "key_size": 64}, {"weights": None, "initial": None}),
}


def ratio(actual, expected) -> float:
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))


def check(name: str) -> bool:
    """Prints one line of errors of out, final and dots; True if all are small."""
    arguments, options = CASES[name]
    case = reference.random_case(dtype=jnp.bfloat16, **arguments)
    a, b, c, decays, initial, weights = case
    options = {"weights": weights, "initial": initial} | options
    initial = options.pop("initial")
    start = time.perf_counter()

    def run(function, widen):
        arrays = jax.tree.map(
            lambda x: x.astype(jnp.float32) if widen and x.dtype == jnp.bfloat16 else x,
            (a, b, c, decays, initial, options["weights"]),
        )
        rest = {key: value for key, value in options.items() if key != "weights"}
        return jax.jit(lambda *xs: function(*xs[:5], weights=xs[5], **rest))(*arrays)

    actual = run(gpu.decayed_attention, widen=False)
    expected = run(reference.decayed_attention, widen=True)
    errors = {
        field: ratio(x, y)
        for field, x, y in zip(actual._fields, actual, expected, strict=True)
        if x is not None and y is not None
    }
    good = all(error < LIMIT for error in errors.values())
    text = ", ".join(f"{field} {error:.1e}" for field, error in errors.items())
    print(f"{'ok  ' if good else 'BAD '} {name:36s} {text}   [{time.perf_counter() - start:.1f} s]", flush=True)
    return good


def device_time(function, sets, calls: int) -> float:
    """Milliseconds of one call of function(*set), which takes its inputs from the sets in turn."""

    @jax.jit
    def loop(sets):
        def body(_, last):
            for arrays in sets:
                arrays, _ = lax.optimization_barrier((arrays, last))
                last = function(*arrays)
            return last

        return lax.fori_loop(0, calls // len(sets), body, function(*sets[0]))

    for _ in range(2):
        jax.block_until_ready(loop(sets))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(loop(sets))
        times.append((time.perf_counter() - start) * 1e3 / (calls // len(sets) * len(sets) + 1))
    return float(np.median(times))


def inputs(shape: tuple[int, int, int, int], seed: int):
    """Random q, k, v and the decays of log decays around -0.01 a token, made on the device."""
    batch, tokens, heads, size = shape
    keys = jax.random.split(jax.random.key(seed), 4)
    q, k, v = ((jax.random.normal(key, shape) / size**0.5).astype(jnp.bfloat16) for key in keys[:3])
    steps = -0.02 * jax.random.uniform(keys[3], (batch, heads, tokens // 64, 64))
    sums = jnp.cumsum(steps, axis=-1)
    ends = sums[..., -1:]
    decays = ChunkDecays(
        high=sums,
        low=jnp.zeros_like(sums),
        enter=jnp.exp(sums),
        leave=jnp.exp(ends - sums),
        kept=jnp.exp(ends[..., 0]),
        run=None,
        steps=steps,
    )
    return q, k, v, decays


def attend(q, k, v, decays, **options):
    return gpu.decayed_attention(q, k, v, decays, None, **options)


def rivals(tunings: bool):
    """Functions of (q, k, v, decays), by name, with the number of chained calls."""
    yield "linear attention, no decay", lambda q, k, v, d: attend(q, k, v, None), 60
    yield "linear attention, decay", attend, 60
    yield "  reverse, dots", lambda q, k, v, d: attend(q, k, v, d, weights=v, reverse=True), 60
    yield "  final only", lambda q, k, v, d: attend(None, k, v, d, outputs=False), 60
    if tunings:
        for stages in (2, 4):
            for columns in (32, 64):
                tuning = gpu.Tuning(stages=stages, columns=columns)
                yield f"  decay {tuning}", functools.partial(attend, tuning=tuning), 60
    yield "cuDNN causal attention", cudnn, 10


def no_decay(q, k, v, decays, **options):
    del decays
    return attend(q, k, v, None, **options)


def cudnn(q, k, v, decays):
    del decays
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def measure(match: str, tunings: bool) -> None:
    for shape in SHAPES:
        floor = 4 * 2 * np.prod(shape) / COPY_BYTES_PER_MS
        print(f"{shape}: copy floor {floor:.3f} ms", flush=True)
        sets = [inputs(shape, seed) for seed in (0, 1)]
        for name, function, calls in rivals(tunings and shape in SHAPES[:2]):
            if match not in name:
                continue
            try:
                print(f"  {name:40s} {device_time(function, sets, calls):.3f} ms", flush=True)
            except Exception as error:
                print(f"  {name:40s} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("check", "time"))
    parser.add_argument("--match", default="", help="cases whose names contain this")
    parser.add_argument("--tunings", action="store_true", help="time the layouts of the work one by one")
    options = parser.parse_args()
    print(jax.__version__, jax.devices(), flush=True)
    bad = []
    if options.only != "time":
        for name in CASES:
            if options.match not in name:
                continue
            try:
                good = check(name)
            except Exception:
                good = False
                print(f"BAD  {name}\n{traceback.format_exc(limit=-4)[-1500:]}", flush=True)
            bad += [] if good else [name]
        print(f"{len(bad)} bad cases: {bad}", flush=True)
    if options.only != "check":
        measure(options.match, options.tunings)


if __name__ == "__main__":
    main()
