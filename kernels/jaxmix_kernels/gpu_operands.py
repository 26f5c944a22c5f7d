"""Operands of products on Hopper: bfloat16 as they are, float32 as two bfloat16 tiles, high and low.

The tensor cores read tf32 in one of the two directions that the kernels need, and bfloat16 in both. x = high + low is
right to 2^-16, 2.4e-6 in the root mean square, and a product is four: high high + high low + low high + low low, each
exact and summed in float32. The tiles of `name` are `name` and `name low`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array

LOW = " low"
"""What the name of a low half ends in."""


def halve(name: str, x: Array) -> dict[str, Array]:
    """The arrays that a kernel takes for an operand x, by name."""
    if x.dtype == jnp.bfloat16:
        return {name: x}
    # A cast there and back is one that XLA may leave out.
    high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return {name: high.astype(jnp.bfloat16), name + LOW: (x - high).astype(jnp.bfloat16)}


def join(arrays: dict[str, Array], name: str) -> Array:
    """The inverse of `halve`."""
    if name + LOW not in arrays:
        return arrays[name]
    return arrays[name].astype(jnp.float32) + arrays[name + LOW].astype(jnp.float32)


def halves(name: str, is_wide: bool) -> tuple[str, ...]:
    """Names of the tiles of an operand, which is float32 if it `is_wide`."""
    return (name, name + LOW) if is_wide else (name,)


def parts(known: Any, *names: str) -> list[str]:
    """Those of the names, and of their low halves, that are known."""
    return [part for name in names for part in halves(name, True) if part in known]


@dataclasses.dataclass(frozen=True)
class Operand:
    """A matrix: one of bfloat16, or the sum of two; in shared memory, or as a left operand in registers."""

    parts: tuple[Any, ...]

    @classmethod
    def named(cls, tiles: dict[str, Any], name: str) -> "Operand":
        """The tiles of a name."""
        return cls(tuple(tiles[part] for part in parts(tiles, name)))

    @property
    def transposed(self) -> "Operand":
        """The transpose of what is in shared memory."""
        return Operand(tuple(part.transpose((1, 0)) for part in self.parts))

    def load(self) -> Array:
        """What is in shared memory, as float32 in registers."""
        high, *low = (plgpu.load(part, layout=plgpu.Layout.WGMMA).astype(jnp.float32) for part in self.parts)
        return high + low[0] if low else high

    def like(self, x: Array) -> "Operand":
        """A float32 matrix of registers in as many parts as this one has."""
        high = x.astype(jnp.bfloat16)
        if len(self.parts) == 1:
            return Operand((high,))
        return Operand((high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)))

    def store(self, x: Array) -> None:
        """Writes a float32 matrix of registers to shared memory."""
        for part, value in zip(self.parts, self.like(x).parts, strict=True):
            part[...] = value
