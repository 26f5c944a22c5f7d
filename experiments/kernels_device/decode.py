"""Checks the Hopper kernels of one token against the step by XLA on the device, then times both.

    PYTHONPATH=.:kernels python experiments/kernels_device/decode.py [--only check|time] [--mixers hla2 ...]

A decoding loop is one compiled `lax.fori_loop` whose carry, the state, is donated and updated in place; its body is a
few steps, each with queries, keys and values of its own. Barriers keep the steps apart, as the rest of a model would:
without them XLA fuses them and reads and writes the state once for several tokens. Times are of one step, median of
20 loops. Bytes are those of one read and one write of the state, of reading q, k, v and the decay, and of writing the
output. They are held against the speed of x + 1 over 1 GiB, measured in the same run, and against the same in-place
loop over one array that takes as many bytes, which the L2 cache serves where the state fits in it. "in place" says
that the loop copies no state.
"""

import argparse
import functools
import re
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from mixers import MIXERS, ratio
from run import copy_speed

LIMIT = 2e-5
HEADS = 16
TIMED = tuple((size, programs) for size in (64, 128) for programs in (1024, 4096))
TOKENS = 4
"""Steps in the body of a loop."""
LOOP_BYTES = 32 * 2**30
"""About how many bytes a loop moves, so that it takes 7 ms at the speed of a copy."""
BY = {"kernel": "pallas", "XLA": "scan"}

Token = dict[str, jax.Array]


def token(batch: int, size: int, seed: int, *, groups: int = HEADS, dtype: Any = jnp.bfloat16) -> Token:
    """q, k, v [B, 1, H, D] and decays of about 0.99."""
    keys = jax.random.split(jax.random.key(seed), 4)

    def draw(key: jax.Array, heads: int) -> jax.Array:
        return (jax.random.normal(key, (batch, 1, heads, size)) / size**0.5).astype(dtype)

    log_decay = -0.02 * jax.random.uniform(keys[3], (batch, 1, groups))
    return {"q": draw(keys[0], HEADS), "k": draw(keys[1], groups), "v": draw(keys[2], groups), "log_decay": log_decay}


def one(name: str, by: str, given: Token, state: Any, **options: Any) -> tuple[jax.Array, Any]:
    return MIXERS[name](**given, initial_state=state, implementation=BY[by], **options)


def drawn_state(name: str, given: Token) -> Any:
    """A state of random numbers."""
    shapes = jax.eval_shape(lambda given: one(name, "XLA", given, None)[1], given)
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    drawn = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


CASES: dict[str, dict[str, Any]] = {
    "D 64": {"size": 64},
    "D 128, normalised": {"size": 128, "normalize": True, "eps": 1e3},
    "D 32, float32, 4 heads a state": {"size": 32, "groups": 4, "dtype": jnp.float32},
    "D 128, 8 heads a state": {"size": 128, "groups": 2},
}


def check(name: str, case: str) -> bool:
    """Three tokens by the kernel and by XLA, all outputs in float32; True if outputs and states agree."""
    options = dict(CASES[case])
    drawn = {key: options.pop(key) for key in ("size", "groups", "dtype") if key in options}
    inputs = [token(6, seed=seed, **drawn) for seed in range(3)]
    before = drawn_state(name, inputs[0])
    # The same numbers in float32, so that outputs are not rounded; the kernel takes both dtypes.
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)

    @functools.partial(jax.jit, static_argnums=0)
    def run(by: str, inputs: list[Token], state: Any) -> Any:
        outs = []
        for given in inputs:
            out, state = one(name, by, given, state, **options)
            outs.append(out)
        return outs, state

    expected, errors = run("XLA", wide, before), {}
    for label, given in (("", wide), (" bfloat16 inputs", inputs)):
        outs, state = run("kernel", given, before)
        limit = LIMIT if given is wide or inputs[0]["q"].dtype == jnp.float32 else 5e-3
        errors[f"out{label}"] = max(map(ratio, outs, expected[0])) / limit
        errors[f"state{label}"] = max(map(ratio, jax.tree.leaves(state), jax.tree.leaves(expected[1]))) / LIMIT
    good = all(error < 1 for error in errors.values())
    shown = ", ".join(f"{key} {error:.2f}" for key, error in errors.items())
    print(f"{'ok  ' if good else 'BAD '} {name:18s} {case:32s} error / limit: {shown}", flush=True)
    return good


def compiled_loop(body: Any, inputs: Any, carry: Any, rounds: int) -> Any:
    """`rounds` of carry = body(inputs, carry), compiled; the carry is donated."""

    def loop(inputs: Any, carry: Any) -> Any:
        return lax.fori_loop(0, rounds, lambda _, carry: body(inputs, carry), carry)

    return jax.jit(loop, donate_argnums=1).lower(inputs, carry).compile()


def round_time(program: Any, inputs: Any, carry: Any, rounds: int) -> float:
    """Milliseconds of one round of a loop."""
    times = []
    for n in range(22):
        start = time.perf_counter()
        carry = jax.block_until_ready(program(inputs, carry))
        if n > 1:
            times.append((time.perf_counter() - start) * 1e3 / rounds)
    return float(np.median(times))


def copies(program: Any, state: Any) -> bool:
    """Whether the loop body copies an array as large as a matrix of the state."""
    sizes = {int(np.prod(x.shape)) for x in jax.tree.leaves(state) if x.size >= np.prod(x.shape[:2]) * 1024}
    found = re.findall(r"f32\[([\d,]+)\][^=\n]* copy(?:-start)?\(", program.as_text())
    return any(int(np.prod([int(n) for n in shape.split(",")])) in sizes for shape in found)


def measure(names: list[str]) -> None:
    speed = copy_speed()
    print(f"copy of 1 GiB: {speed * 1e3 / 1e12:.2f} TB/s", flush=True)
    header = (
        "mixer",
        "D = E",
        "B H",
        "by",
        "ms a step",
        "MB",
        "TB/s",
        "share of copy",
        "same bytes in place",
        "in place",
    )
    print("| " + " | ".join(header) + " |\n|" + " --- |" * len(header), flush=True)
    for name in names:
        for size, programs in TIMED:
            inputs = [token(programs // HEADS, size, seed) for seed in range(TOKENS)]
            state_bytes = sum(x.nbytes for x in jax.tree.leaves(drawn_state(name, inputs[0])))
            moved = 2 * state_bytes + sum(x.nbytes for x in inputs[0].values()) + inputs[0]["q"].nbytes
            rounds = max(1, LOOP_BYTES // (moved * TOKENS))
            flat = jnp.ones(moved // 8, jnp.float32)
            plain = compiled_loop(lambda scale, x: x * scale, jnp.float32(0.999), flat, rounds * TOKENS)
            floor = round_time(plain, jnp.float32(0.999), flat, rounds * TOKENS)
            for by in BY:
                try:
                    spent, in_place = timed(name, by, inputs, rounds)
                except Exception as error:
                    print(f"{name} {size} {by} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
                cells = (name, size, programs, by, f"{spent:.4f}", f"{moved / 1e6:.0f}", f"{moved / spent / 1e9:.2f}")
                shares = (f"{moved / spent / speed:.0%}", f"{floor / spent:.0%}", "yes" if in_place else "no")
                print("| " + " | ".join(map(str, (*cells, *shares))) + " |", flush=True)


def timed(name: str, by: str, inputs: list[Token], rounds: int) -> tuple[float, bool]:
    """Milliseconds of one step, and whether the loop copies no state."""
    carry = jnp.zeros_like(inputs[0]["q"]), drawn_state(name, inputs[0])

    def body(inputs: list[Token], carry: Any) -> Any:
        for given in inputs:
            carry = lax.optimization_barrier(one(name, by, given, carry[1]))
        return carry

    program = compiled_loop(body, inputs, carry, rounds)
    in_place = not copies(program, carry[1])
    return round_time(program, inputs, carry, rounds) / TOKENS, in_place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("check", "time"))
    parser.add_argument("--mixers", nargs="+", choices=list(MIXERS), default=list(MIXERS))
    chosen = parser.parse_args()
    print(jax.__version__, jax.devices(), flush=True)
    bad = []
    if chosen.only != "time":
        for name in chosen.mixers:
            for case in CASES:
                try:
                    good = check(name, case)
                except Exception:
                    good = False
                    print(f"BAD  {name} {case}\n{traceback.format_exc(limit=-4)[-1500:]}", flush=True)
                bad += [] if good else [f"{name} {case}"]
        print(f"{len(bad)} bad cases: {bad}", flush=True)
    if chosen.only != "check":
        measure(chosen.mixers)


if __name__ == "__main__":
    main()
