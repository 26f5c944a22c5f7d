"""Compiles the Hopper kernels ahead of time, without a GPU, and prints what the assembler says: `make gpu-compile`.

`--rows` takes a regular expression; rows whose first four cells it does not match are left out. The result goes to
standard output, to be written to a file:

    make gpu-compile GPU_COMPILE_FLAGS="--rows 'hla2.*128'" > new.md
"""

import argparse
import datetime
import functools
import os
import re
import shlex
import subprocess
import sys

from tests.kernels.aot_tpu import versions

HEADER = ("kernel", "dtype", "D, E", "of tokens", "registers", "spilled bytes", "products")

LEGEND = """\
Compiled with 1 sequence of 32,768 tokens and 16 heads of everything.

- of tokens: whether they have decays, and segments as well.
- registers: of a thread at the start of the program; warpgroups that compute take more where one only copies.
- spilled bytes: what a thread writes to local memory, in all warpgroups together.
- products: "one by one" where ptxas waits for every matrix product before the next (its message C7512 or one like it).

It shows that the kernels compile for a Hopper GPU and what they have to do without. No GPU was run."""

DEVICE = """\
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
"""
"""An H200 as XLA describes it."""


def cases():
    """Title, function and shapes of the arguments of every kernel."""
    import jax
    import jax.numpy as jnp

    from jaxmix_kernels.ahla.gpu import ahla_forward
    from jaxmix_kernels.decays import BackwardArguments
    from jaxmix_kernels.gpu_starts import add_starts
    from jaxmix_kernels.hla2.gpu import hla2_forward
    from jaxmix_kernels.hla3.gpu import hla3_forward, hla3_tail_forward
    from jaxmix_kernels.linear_attention.gpu import decayed_attention
    from jaxmix_kernels.linear_attention.gpu_backward import decayed_attention_backward
    from tests.kernels import reference

    layouts = {"nothing": (None, False), "decays": ("weak", False), "decays, segments": ("weak", True)}
    for dtype in (jnp.bfloat16, jnp.float32):
        for size in (64, 128):
            for layout, (decay, segments) in layouts.items():
                shapes = {"batch": 1, "tokens": 32768, "heads": 16, "key_size": size, "value_size": size}
                case = functools.partial(reference.random_case, **shapes, dtype=dtype, decay=decay, segments=segments)
                q, k, v, decays, initial, d_out = jax.eval_shape(case)
                kept = jax.eval_shape(functools.partial(decayed_attention, states=True), q, k, v, decays, initial)
                edges = (None, None) if decays is None else (decays.enter, decays.kept)
                backward = BackwardArguments(q, k, v, d_out, decays, kept.states, initial)
                found = {
                    "decayed_attention": (decayed_attention, (q, k, v, decays, initial)),
                    "decayed_attention, for gradients": (
                        functools.partial(decayed_attention, states=True),
                        (q, k, v, decays, initial),
                    ),
                    "decayed_attention, final state": (
                        functools.partial(decayed_attention, outputs=False),
                        (None, k, v, decays, None),
                    ),
                    "decayed_attention_backward": (decayed_attention_backward, (backward,)),
                }
                if dtype == jnp.bfloat16:
                    if not segments:  # With them it is the same kernel, which is compiled once.
                        found["add_starts"] = add_starts, (q, d_out, initial, *edges, kept.states)
                    chains = {"hla2_forward": (hla2_forward, 2), "ahla_forward": (ahla_forward, 2)}
                    if size == 64:
                        chains["hla3_forward"] = hla3_forward, 3
                    elif decays is not None:  # Without them it is the kernel of hla2.
                        chains["hla3_tail_forward"] = hla3_tail_forward, 2
                    for name, (function, count) in chains.items():
                        arguments = q, k, v, decays, *[None] * (count - 1), initial
                        found[name] = function, arguments
                        found[f"{name}, for gradients"] = functools.partial(function, keep=True), arguments
                for name, (function, arguments) in found.items():
                    yield f"{name} | {dtype.__name__} | {size}, {size} | {layout}", function, arguments


def compile_all(rows: str) -> None:
    """Compiles the chosen kernels, each behind a line with its title; the assembler's output follows on stdout."""
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc("", platform="cuda", topology="1x1x1", target_config=DEVICE)
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    for title, function, arguments in cases():
        if not re.search(rows, title):
            continue
        print(f"case: {title}", flush=True)
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
        jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()


def row(title: str, said: str) -> str:
    """A row of the table, from what the assembler said of the one kernel of a case."""
    registers = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"stack frame, (\d+) bytes spill stores", said)
    assert len(registers) == len(spilled) == 1, said
    products = "one by one" if re.search(r"wgmma.mma_async instructions are serialized", said) else "together"
    return f"| {title} | {registers[0]} | {spilled[0]} | {products} |"


def main(options: list[str]) -> None:
    """Prints the table in Markdown."""
    given = f' GPU_COMPILE_FLAGS="{shlex.join(options)}"' if options else ""
    made_with = versions("jax-cuda13-plugin", "nvidia-cuda-nvcc")
    print(f"Command: `make gpu-compile{given}`\n\n{made_with}, date {datetime.date.today()}\n\n{LEGEND}\n")
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER), flush=True)
    settings = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, "-m", "tests.kernels.aot_gpu", *options, "--inside"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | settings
    ) as child:
        assert child.stdout is not None
        title, said = "", ""
        for line in child.stdout:
            if not line.startswith("case: "):
                said += line
                continue
            if title:
                print(row(title, said), flush=True)
            title, said = line.removeprefix("case: ").strip(), ""
        if child.wait():
            raise RuntimeError(f"{title}: {said}")
    if title:
        print(row(title, said))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compiles Hopper kernels ahead of time and prints a table.")
    parser.add_argument("--rows", default="", help="regular expression that the first four cells of a row match")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        compile_all(arguments.rows)
    else:
        main(sys.argv[1:])
