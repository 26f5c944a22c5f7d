"""Checks the mixers over kernels against their float32 scan on the device, and times them forward and backward.

    PYTHONPATH=.:kernels python experiments/kernels_device/mixers.py [--only check|time] [--mixers M ...] [--lengths T]
        [--dtype bfloat16|float32] [--shape B T H D] [--documents N]

An error is the root mean square of the difference over that of the scan, which gets the same numbers in float32. For G
and h of hla2, which only ever leave S C and S m, it is over those products, since G and h are what cancelling leaves.
Padding holds NaN. Times are device times of chained calls inside one compiled loop, median of 20 runs, over two sets of
inputs.
"""

import argparse
import dataclasses
import functools
import time
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from run import cudnn, device_time, limit_of, report

import jaxmix
from jaxmix.mixers.hla import HLA2State

MIXERS = {
    "linear_attention": jaxmix.linear_attention,
    "hla2": jaxmix.hla2,
    "ahla": jaxmix.ahla,
    "hla3": jaxmix.hla3,
}
SHORT, LONG = (1, 2, 15, 16, 63, 64, 65, 127), (1000, 4096)
TIMED = ((8, 4096, 16, 64), (4, 4096, 16, 128))


def case(length: int, size: int, seed: int, narrow: Any, strongest: float = -0.2) -> dict[str, jax.Array]:
    """q, k, v of 4 and 2 heads, in the dtype `narrow`; decays from 0 to `strongest` a token."""
    keys = jax.random.split(jax.random.key(seed), 5)
    q = jax.random.normal(keys[0], (2, length, 4, size)) / size**0.5
    k, v = (jax.random.normal(key, (2, length, 2, size)) / size**0.5 for key in keys[1:3])
    log_decay = strongest * jax.random.uniform(keys[3], (2, length, 4)) ** 3
    arrays = {"q": q, "k": k, "v": v}
    return {name: x.astype(narrow) for name, x in arrays.items()} | {"log_decay": log_decay}


def packed(length: int) -> np.ndarray:
    """Two documents and padding behind them in the first row, padding in the middle of the second."""
    ids = np.ones((2, length), np.int32)
    ids[0, length // 3 :] = 2
    ids[0, length - length // 8 :] = 0
    ids[1, length // 2 : length // 2 + length // 8] = 0
    return ids


def compare(name: str, length: int, size: int, narrow: Any, **given: Any) -> dict[str, float]:
    """Errors of out, states and all gradients, of a sum with random weights over out and all states."""
    arrays = case(length, size, length, narrow, **given)
    ids = packed(length) if length >= 16 else None
    if ids is not None:
        hidden = jnp.asarray(ids == 0)
        arrays = {n: jnp.where(hidden.reshape(2, length, *[1] * (x.ndim - 2)), jnp.nan, x) for n, x in arrays.items()}
    _, before = MIXERS[name](**case(7, size, 1, narrow))

    def run(implementation: str, dtype: Any) -> tuple[Any, Any]:
        def loss(arrays: dict[str, jax.Array], state: Any) -> tuple[jax.Array, Any]:
            out, after = MIXERS[name](
                **arrays, segment_ids=ids, initial_state=state, implementation=implementation, chunk_size=64
            )
            parts = [out.astype(jnp.float32), *jax.tree.leaves(after)]
            weights = [jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(parts)]
            sizes = [size_of(x) for x in jax.lax.stop_gradient([out.astype(jnp.float32), *beside(after).values()])]
            return sum(jnp.sum(x * w / s) for x, w, s in zip(parts, weights, sizes, strict=True)), (out, after)

        wide = {n: x.astype(dtype) if n != "log_decay" else x for n, x in arrays.items()}
        grads, found = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(wide, before)
        return found, grads

    (out, after), (by_input, by_state) = run("pallas", narrow)
    (out32, after32), (by_input32, by_state32) = run("scan", jnp.float32)
    errors = {"out": error(out, out32)} | {f"d {n}": error(by_input[n], by_input32[n]) for n in by_input}
    for field, size in beside(after32).items():
        errors[field] = error(getattr(after, field), getattr(after32, field), size)
    for field in beside(by_state32):
        errors[f"d {field}"] = error(getattr(by_state, field), getattr(by_state32, field))
    return errors


def beside(state: Any) -> dict[str, jax.Array]:
    """What the errors of a state's fields are compared with: the field, or the product that it is taken from."""
    found = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    if isinstance(state, HLA2State):
        found |= {
            "G": jnp.einsum("bhde,bhef->bhdf", state.S, state.C),
            "h": jnp.einsum("bhde,bhe->bhd", state.S, state.m),
        }
    return found


def size_of(x: jax.Array) -> jax.Array:
    """Root mean square; a tiny number for an array of zeros."""
    return jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2)) + 1e-30


def error(actual: jax.Array, expected: jax.Array, size: jax.Array | None = None) -> float:
    """Root mean square of the difference over that of `size`, which is `expected` if not given.

    Arrays that vanish in both agree.
    """
    wide = [np.asarray(x, np.float64) for x in (actual, expected, expected if size is None else size)]
    return float(np.sqrt(np.mean((wide[0] - wide[1]) ** 2)) / max(np.sqrt(np.mean(wide[2] ** 2)), 1e-30))


def check(names: list[str], lengths: list[int] | None, narrow: Any) -> None:
    bad, limit = [], limit_of(jnp.zeros((), narrow))
    for name in names:
        cases = [(length, size, {}) for size in (64, 128) for length in LONG] + [(127, 32, {"strongest": -80.0})]
        cases += [(length, 64, {}) for length in SHORT] if name == "hla2" else [(65, 64, {})]
        for length, size, given in cases:
            if lengths and length not in lengths:
                continue
            title = f"{name} T {length} D {size} {given or ''}"
            start = time.perf_counter()
            try:
                good = report(title, compare(name, length, size, narrow, **given), start, limit)
            except Exception:
                good = False
                print(f"BAD  {title}\n{traceback.format_exc(limit=-4)[-1500:]}", flush=True)
            bad += [] if good else [title]
    print(f"{len(bad)} bad cases (limit {limit:g}): {bad}", flush=True)


def both(function: Any) -> Any:
    """Gradients of a sum of squares."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array) -> jax.Array:
        return jnp.sum(function(q, k, v, log_decay).astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2, 3))


def measure(names: list[str], narrow: Any, shapes: Sequence[Sequence[int]], documents: int) -> None:
    for batch, length, heads, size in shapes:
        print((batch, length, heads, size), f"{documents} documents" if documents else "", flush=True)
        ids = jnp.broadcast_to(1 + jnp.arange(length) * documents // length, (batch, length)) if documents else None
        sets = []
        for seed in (0, 1):
            keys = jax.random.split(jax.random.key(seed), 4)
            q, k, v = (jax.random.normal(x, (batch, length, heads, size)) / size**0.5 for x in keys[:3])
            log_decay = -0.02 * jax.random.uniform(keys[3], (batch, length, heads))
            sets.append((*(x.astype(narrow) for x in (q, k, v)), log_decay))

        functions = {"cuDNN causal attention": cudnn} if narrow == jnp.bfloat16 and not documents else {}
        for name in names:
            mixer = functools.partial(MIXERS[name], implementation="pallas", segment_ids=ids)
            functions[name] = lambda q, k, v, g, mixer=mixer: mixer(q, k, v, g)[0]
            functions[f"{name}, no decay"] = lambda q, k, v, g, mixer=mixer: mixer(q, k, v)[0]
            if narrow == jnp.float32:
                scan = functools.partial(MIXERS[name], implementation="scan", segment_ids=ids)
                functions[f"{name}, scan"] = lambda q, k, v, g, mixer=scan: mixer(q, k, v, g)[0]
        for name, function in functions.items():
            for what, made in (("forward", function), ("forward and backward", both(function))):
                try:
                    print(f"  {name:24s} {what:22s} {device_time(made, sets, 20):.3f} ms", flush=True)
                except Exception as error:
                    print(f"  {name:24s} {what:22s} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("check", "time"))
    parser.add_argument("--mixers", nargs="+", choices=list(MIXERS), default=list(MIXERS))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of q, k and v")
    parser.add_argument("--lengths", type=int, nargs="+", help="check sequences of these lengths only")
    parser.add_argument("--shape", type=int, nargs=4, action="append", metavar=tuple("BTHD"), help="time at this one")
    parser.add_argument("--documents", type=int, default=0, help="time sequences packed of so many documents")
    chosen = parser.parse_args()
    print(jax.__version__, jax.devices(), flush=True)
    if chosen.only != "time":
        check(chosen.mixers, chosen.lengths, jnp.dtype(chosen.dtype))
    if chosen.only != "check":
        measure(chosen.mixers, jnp.dtype(chosen.dtype), chosen.shape or TIMED, chosen.documents)


if __name__ == "__main__":
    main()
