"""What routing saves on a CPU: the softmax branch over chosen chunks, and decoding from a cache of chosen chunks.

    python experiments/natsl_cpu/run.py [--length 8192] [--context 16384] [--repeats 7]

1. The softmax branch with one chunk in eight chosen, beside the same attention as a masked product of all pairs of
   tokens: temporary memory by compiled analysis, milliseconds forward and forward+backward.
2. One decoded token after a context of which every head has kept one chunk in four, beside full softmax attention over
   that context: bytes of the state, and microseconds a step with the state handed on.

Both sides of a comparison take turns in one process, which keeps freed memory, as `jaxmix bench` does.
"""

import argparse
import math
import os
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix import natsl_attention, softmax_attention
from jaxmix.bench import environment, measure
from jaxmix.cli.allocator import keep_freed_memory

HEADS, GROUP, KEY, VALUE, CHUNK = 2, 2, 128, 128, 64
SOFTMAX_HEADS, SIZE = HEADS * GROUP, KEY // GROUP


def draw(length: int) -> tuple[jax.Array, ...]:
    """Inputs of both branches: q, k, v, log_decay, beta, and q, k, v of the softmax branch."""
    keys = jax.random.split(jax.random.key(0), 8)
    q, k, v = (jax.random.normal(key, (1, length, HEADS, KEY)) / KEY**0.5 for key in keys[:3])
    gates = -0.05 * jax.random.uniform(keys[3], (1, length, HEADS)), jax.random.uniform(keys[4], (1, length, HEADS))
    softmax = (jax.random.normal(key, (1, length, SOFTMAX_HEADS, SIZE)) for key in keys[5:])
    return (q, k, v, *gates, *softmax)


def every(step: int, chunks: int) -> jax.Array:
    """Choices that send one chunk in `step` to softmax attention, another one for each head."""
    chosen = (jnp.arange(chunks)[:, None] + jnp.arange(HEADS)) % step == 0
    return jnp.stack([chosen, ~chosen], axis=-1)[None].astype(jnp.float32)


def dense(q: jax.Array, k: jax.Array, v: jax.Array, choice: jax.Array) -> jax.Array:
    """The softmax branch as a masked product of all pairs."""
    token = jnp.arange(q.shape[1])
    chunk = token // CHUNK
    earlier = (chunk[:, None] > chunk) & (choice[0, chunk, :, 0].T[:, None] > 0)
    mask = earlier | ((chunk[:, None] == chunk) & (token[:, None] >= token))
    logits = jnp.einsum("bthd,bshd->bhts", q, k) * SIZE**-0.5
    p = jax.nn.softmax(jnp.where(jnp.repeat(mask, GROUP, axis=0), logits, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshe->bthe", p, v)


def branch(length: int, repeats: int) -> None:
    """Comparison 1."""
    inputs, choice = draw(length), every(8, length // CHUNK)

    def routed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return natsl_attention(*inputs[:5], q, k, v, choice)[0][1]

    def all_pairs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return dense(q, k, v, choice)

    arrays = inputs[5:]
    programs: dict[str, Any] = {}
    for name, function in (("chosen chunks", routed), ("all pairs", all_pairs)):
        programs[f"{name}, forward"] = jax.jit(function)
        total = jax.grad(lambda *a, f=function: f(*a).sum(), argnums=(0, 1, 2))
        programs[f"{name}, forward+backward"] = jax.jit(total)
    difference = jnp.max(jnp.abs(routed(*arrays) - all_pairs(*arrays)))
    timings = measure({name: (program, arrays) for name, program in programs.items()}, repeats=repeats)
    print(f"\n{length} tokens, one chunk in 8; largest difference of the outputs {difference:.1e}\n")
    print("| program | temporary MB | median ms | quartiles |\n| - | - | - | - |")
    for name, program in programs.items():
        temporary = program.lower(*arrays).compile().memory_analysis().temp_size_in_bytes / 1e6
        t = timings[name]
        print(f"| {name} | {temporary:.0f} | {t.median * 1e3:.0f} | {t.lower * 1e3:.0f}-{t.upper * 1e3:.0f} |")


def decode(context: int, repeats: int) -> None:
    """Comparison 2."""
    inputs, chunks = draw(context), context // CHUNK
    kept = HEADS * -(-chunks // 4)
    _, routed = natsl_attention(*inputs, every(4, chunks), capacity=kept + HEADS)
    _, full = softmax_attention(*inputs[5:], capacity=context + CHUNK)
    token, open_chunk = draw(1), every(4, 1)
    steps = {
        "one chunk in 4 kept": (lambda state: natsl_attention(*token, open_chunk, initial_state=state), routed),
        "full softmax attention": (lambda state: softmax_attention(*token[5:], initial_state=state), full),
    }
    print(f"\none token after {context}\n\n| state | MB | median microseconds | quartiles |\n| - | - | - | - |")
    programs = {name: (jax.jit(step, donate_argnums=0), state) for name, (step, state) in steps.items()}
    states = {name: step(jax.tree.map(jnp.copy, state))[1] for name, (step, state) in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(min(30, CHUNK - 2)):
        for name, (step, _) in programs.items():
            jax.block_until_ready(states[name])
            start = time.perf_counter()
            states[name] = jax.block_until_ready(step(states[name]))[1]
            times[name].append((time.perf_counter() - start) * 1e6)
    for name, (_, state) in programs.items():
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) / 1e6
        low, middle, high = (sorted(times[name])[int(len(times[name]) * share)] for share in (0.25, 0.5, 0.75))
        print(f"| {name} | {size:.1f} | {middle:.0f} | {low:.0f}-{high:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    chosen = parser.parse_args()
    keep_freed_memory(one_pool=True)
    branch(chosen.length, chosen.repeats)
    decode(chosen.context, chosen.repeats)
    print(f"\nheads {HEADS} of {KEY}, {SOFTMAX_HEADS} softmax heads of {SIZE}, chunks of {CHUNK}")
    print(environment(), f"{os.cpu_count()} cores")


if __name__ == "__main__":
    main()
