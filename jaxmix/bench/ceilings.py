"""What the device reaches at best, measured by the method that everything else is measured by."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array
from jaxmix.bench.loop import DeviceTiming, LoopOptions, Step, time_single, time_step


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured limits of a device.

    Attributes:
        copy: bytes a second, read and written, of x + 1.
        matmul: operations a second of a product of square bfloat16 matrices, summed in float32.
        empty: seconds that a call takes which does next to nothing: what the loop itself adds to every call.
    """

    copy: float
    matmul: float
    empty: float


@dataclasses.dataclass(frozen=True)
class CeilingSizes:
    """Sizes of what is measured.

    Attributes:
        entries: float32 numbers that are copied, 1 GiB by default.
        width: rows and columns of the matrices.
    """

    entries: int = 2**28
    width: int = 8192


def measure_ceilings(options: LoopOptions, sizes: CeilingSizes) -> Ceilings:
    """The limits of the device that jax uses."""
    arrays = jax.random.normal(jax.random.key(0), (2, 2, sizes.width, sizes.width), jnp.bfloat16)
    matmul = _time(_multiply, [(arrays[i, 0], arrays[i, 1]) for i in range(2)], options)
    copy = _time(_add_one, [(jnp.full((sizes.entries,), float(i)),) for i in range(2)], options)
    empty = _time(_add_one, [(jnp.full((128,), float(i)),) for i in range(2)], options)
    return Ceilings(
        copy=2 * 4 * sizes.entries / copy.timing.median,
        matmul=2 * sizes.width**3 / matmul.timing.median,
        empty=empty.timing.median,
    )


def _time(step: Step, sets: list[tuple[Array, ...]], options: LoopOptions) -> DeviceTiming:
    call = jax.jit(lambda *arrays: step((), *arrays)[0])
    single = time_single(lambda: call(*sets[0]))
    return time_step(step, [((), arrays) for arrays in sets], single=single, options=options)


def _add_one(_: Any, x: Array) -> tuple[Any, Any]:
    return x + 1, ()


def _multiply(_: Any, a: Array, b: Array) -> tuple[Any, Any]:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype), ()
