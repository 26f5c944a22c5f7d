"""Compiles every TPU kernel ahead of time, without a TPU, and prints a table: `make tpu-compile`.

`--rows` takes a regular expression; rows whose first four cells it does not match are left out. `--table` names a table
that was made with the same versions, to be completed: its rows with numbers are kept, those that are missing or aborted
are compiled. The result goes to standard output, to be written to another file:

    make tpu-compile TPU_COMPILE_FLAGS="--rows 'hla3.*v6e' --table experiments/results/tpu_compile.md" > new.md
"""

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

HEADER = ("kernel", "dtype", "D, E", "chip", "seconds", "VMEM bytes", "temp bytes", "flops", "bundles")

LEGEND = """\
Compiled with batch 8, 4096 tokens, 16 heads of queries, decays and states, and 4 heads of keys and values.

Kernels of one token: batch 64, 16 heads, each with a state of its own; a grid step serves up to 8 of them.

- seconds: to lower and compile, on this machine's CPU.
- VMEM bytes: the most that a kernel of the program holds in scoped vector memory, double buffers included.
- temp bytes: HBM that the program takes besides arguments and results. It counts copies between the layout in which
  XLA hands over arguments and that of the kernel, which fuse into the producers of a larger program.
- flops: by XLA's cost analysis of the program, with the estimates that the kernels state.
- bundles: instruction words of the kernel's final schedule, all kernels of the program added: one a cycle, each loop
  body once. A body is one grid step, here of 1024 tokens of one head, in float32 of 512. Waiting for memory is not in
  it.

`for gradients`, a chain keeps states and results of links. `linear_attention, gradient` is the whole program of a
gradient, of which kernels are a part.

It shows that the kernels lower, compile and fit for these chips. No TPU was run: it shows nothing about values on a TPU
(those are checked in the interpreter, on a CPU), about speed, or about races on the device."""


def cases():
    """Name, sizes and dtype of every kernel, with a function and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    from jaxmix_kernels.ahla.tpu import ahla_forward
    from jaxmix_kernels.decays import BackwardArguments
    from jaxmix_kernels.decode.call import decode
    from jaxmix_kernels.decode.steps import OPERATORS
    from jaxmix_kernels.hla2.tpu import hla2_forward
    from jaxmix_kernels.hla3.tpu import hla3_forward
    from jaxmix_kernels.linear_attention import tpu, tpu_backward, vjp
    from jaxmix_kernels.target import Target
    from tests.kernels import reference

    def gradient(q, k, v, decays, initial):
        def loss(q, k, v, steps, initial):
            given = decays.__class__(**{**vars(decays), "steps": steps})
            out, final = vjp.linear_attention(q, k, v, given, initial, target=Target("tpu"))
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(final)

        return jax.grad(loss, argnums=(0, 1, 2, 3, 4))(q, k, v, decays.steps, initial)

    for dtype in (jnp.bfloat16, jnp.float32):
        size = 128
        shapes = {"batch": 8, "tokens": 4096, "heads": 16, "key_size": size, "value_size": size, "dtype": dtype}
        shapes |= {"b_heads": 4, "c_heads": 4}
        *case, d_out = jax.eval_shape(functools.partial(reference.random_case, **shapes))
        *tensors, decays, initial = case
        chains = {
            "hla2_forward": (hla2_forward, (*tensors, decays, decays, initial, initial)),
            "ahla_forward": (ahla_forward, (*tensors, decays, initial, initial)),
            "hla3_forward": (hla3_forward, (*tensors, decays, decays, initial, initial, initial)),
        }
        yield "decayed_attention", dtype, size, tpu.decayed_attention, case
        states = jax.eval_shape(functools.partial(tpu.decayed_attention, states=True), *case).states
        given = BackwardArguments(*tensors, d_out, decays, states, initial, d_out, d_out)
        yield "decayed_attention_backward", dtype, size, tpu_backward.decayed_attention_backward, (given,)
        for name, (function, arguments) in chains.items():
            yield name, dtype, size, function, arguments
            yield f"{name}, for gradients", dtype, size, functools.partial(function, keep=True), arguments
        token, decay = jax.ShapeDtypeStruct((64, 16, size), dtype), jax.ShapeDtypeStruct((64, 16), jnp.float32)
        for name, operator in OPERATORS.items():
            options = {"ridge": 0.0, "masked": True} if name == "hla2" else {}
            function = functools.partial(decode, name, target=Target("tpu"), **options)
            shapes = ((64, 16, *[size] * len(axes)) for axes in operator.fields.values())
            states = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
            yield f"{name}, one token", dtype, size, function, (token, token, token, decay, states)
        yield "linear_attention, gradient", dtype, size, gradient, case


def compile_for(device, function, arguments):
    """The program compiled for `device` and the seconds that took."""
    import jax

    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    start = time.perf_counter()
    program = jax.jit(function).trace(*arguments).lower().compile()
    return program, time.perf_counter() - start


def vmem_bytes(program) -> int:
    """The most scoped VMEM of a kernel, as the compiler notes it in the optimised program."""
    kernels = [line for line in program.as_text().splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    noted = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
    return max(int(size) for line in kernels for size in re.findall(noted, line))


def bundles(program, folder: Path) -> int:
    """Instruction bundles of the kernels of the program, from the schedules that the compiler wrote to `folder`."""
    names = re.findall(r'%(\S+) = [^\n]*custom_call_target="tpu_custom_call"', program.as_text())
    total = 0
    for name in names:
        (file,) = folder.glob(f"*-{name}-*schedule-analysis_final_bundles.txt")
        total += int(re.findall(r"total scheduled bundles:\s+(\d+)", file.read_text())[0])
    for file in folder.iterdir():
        file.unlink()
    return total


def finished(table: Path | None) -> dict[str, str]:
    """Lines of the rows of a table that have numbers, by their first four cells."""
    if table is None:
        return {}
    text = table.read_text()
    if f"{versions('libtpu')}, date" not in text:
        raise ValueError(f"{table} was not made with {versions('libtpu')}; compile all rows anew")
    kept = {}
    for line in text.splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) == len(HEADER) and cells[-1].isdigit():
            kept[" | ".join(cells[:4])] = line
    return kept


def compile_all(rows: str, table: Path | None, first: int) -> None:
    """Prints the rows of the table from the given one on."""
    kept = finished(table)
    with tempfile.TemporaryDirectory() as folder:
        flags = (f"dump_to={folder}", "dump_llo_text=true", "dump_llo_pass_label_regex=.*final_bundles.*")
        os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_{flag}" for flag in flags)
        from jax.experimental import topologies

        chips = {
            chip: topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
            for chip, name in TOPOLOGIES.items()
        }
        chosen = (
            (f"{name} | {dtype.__name__} | {size}, {size} | {chip}", device, function, arguments)
            for (name, dtype, size, function, arguments), (chip, device) in itertools.product(cases(), chips.items())
        )
        chosen = (row for row in chosen if row[0] in kept or re.search(rows, row[0]))
        for cells, device, function, arguments in itertools.islice(chosen, first, None):
            if cells in kept:
                print(kept[cells], flush=True)
                continue
            print(f"| {cells} | ", end="", flush=True)
            program, seconds = compile_for(device, function, arguments)
            flops = int(program.cost_analysis()["flops"])
            temp = program.memory_analysis().temp_size_in_bytes
            row = (f"{seconds:.1f}", vmem_bytes(program), temp, flops, bundles(program, Path(folder)))
            print(" | ".join(map(str, row)) + " |", flush=True)


def versions(*compilers: str) -> str:
    """Versions of what compiles: of Python, JAX and these packages."""
    packages = (f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", *compilers))
    return ", ".join((f"python {platform.python_version()}", *packages))


def main(options: list[str]) -> int:
    """Prints the table in Markdown; returns the number of rows at which the compiler aborted."""
    given = f' TPU_COMPILE_FLAGS="{shlex.join(options)}"' if options else ""
    print(f"Command: `make tpu-compile{given}`\n")
    print(f"{versions('libtpu')}, date {datetime.date.today()}\n")
    print(LEGEND, end="\n\n")
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER), flush=True)
    done = aborted = 0
    while True:
        # A failed check inside the compiler ends its process, so that rows are compiled in one that may be replaced.
        command = [sys.executable, "-m", "tests.kernels.aot_tpu", *options, "--first", str(done)]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
        ):
            assert child.stdout is not None
            before = done
            for line in child.stdout:
                print(line, end="", flush=True)
                done += 1
            if child.wait() == 0:
                return aborted
            errors.seek(0)
            if done == before:
                raise RuntimeError(errors.read())
            reasons = re.findall(r"Check failed: [^%\n]*%\S+ = \S+|\w*Error: .*", errors.read()) or ["no reason given"]
        print(f"aborted: {reasons[-1].replace('|', ' ')} | | | | |", flush=True)
        aborted += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compiles TPU kernels ahead of time and prints a table.")
    parser.add_argument("--rows", default="", help="regular expression that the first four cells of a row match")
    parser.add_argument("--table", type=Path, help="a table of the same versions: its finished rows are kept")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first is None:
        sys.exit(main(sys.argv[1:]))
    compile_all(arguments.rows, arguments.table, arguments.first)
