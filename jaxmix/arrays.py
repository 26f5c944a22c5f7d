"""Dimension letters, array aliases, dtype policy and argument checks shared by every floor.

Dimension letters, used in every docstring and einsum:

    B batch          T tokens           H query heads      G key/value heads (H = G * R)
    D key size       E value size       C chunk length     N chunks (N = ceil(T / C))
    M state modes    d model width      L layers           V vocabulary

Inputs may be bfloat16, float32 or (under x64) float64. Gates, states and accumulators are float32, or float64
when any input is float64. Reference paths always multiply at full precision.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Array = jax.Array
Dtype = Any

INPUT_DTYPES = ("bfloat16", "float32", "float64")
GATE_DTYPES = ("float32", "float64")


def einsum(spec: str, *operands: Array) -> Array:
    """`jnp.einsum` at full matrix-product precision on every backend (TF32 and bf16 passes are never used)."""
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST)


def compute_dtype(*arrays: Array | None) -> Dtype:
    """The dtype of states and accumulators for these inputs: float64 if any is float64, else float32."""
    return jnp.float64 if any(a is not None and a.dtype == jnp.float64 for a in arrays) else jnp.float32


def expand_to(x: Array, ndim: int) -> Array:
    """`x` with trailing axes of size one appended up to rank `ndim`."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def is_concrete(x: Any) -> bool:
    """Whether the values of `x` can be inspected now (it is not being traced)."""
    return not isinstance(x, Tracer)


def from_numpy(x: Any) -> Any:
    """`x` as a jax array if it is a numpy array, else `x` itself."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def fail(argument: str, expected: str, came: Any) -> NoReturn:
    """Raise the library's one form of argument error.

    Raises:
        ValueError: always; names the argument, what was expected and what came.
    """
    raise ValueError(f"{argument}: expected {expected}, got {came}")


def check_flag(argument: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        fail(argument, "True or False", repr(value))


def check_count(argument: str, value: Any, minimum: int = 1) -> None:
    """Raise ValueError unless `value` is an int of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        fail(argument, f"an int of at least {minimum}", repr(value))


def check_choice(argument: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        fail(argument, "one of " + ", ".join(repr(choice) for choice in choices), repr(value))


def check_positive(argument: str, value: Any) -> None:
    """Raise ValueError unless `value` is a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        fail(argument, "a positive number", repr(value))


def check_array(argument: str, x: Any, shape: str, sizes: Sequence[int | None], dtypes: Sequence[str]) -> None:
    """Check that `x` is an array with `sizes` (None accepts any size) and one of `dtypes`.

    Args:
        argument: name used in the error.
        x: the value to check.
        shape: the expected shape in dimension letters, for the error, such as "[B, T, H, D]".
        sizes: expected size of each axis.
        dtypes: accepted dtype names.

    Raises:
        ValueError: when rank, a size or the dtype differs.
    """
    if not isinstance(x, jax.Array):
        fail(argument, f"an array of shape {shape}", type(x).__name__)
    wanted = "[" + ", ".join("*" if size is None else str(size) for size in sizes) + "]"
    if x.ndim != len(sizes) or any(size is not None and size != got for size, got in zip(sizes, x.shape, strict=True)):
        fail(argument, f"shape {shape} = {wanted}", f"shape {list(x.shape)}")
    if str(x.dtype) not in dtypes:
        fail(argument, f"dtype {' or '.join(dtypes)}", f"dtype {x.dtype}")


def check_sizes(argument: str, x: Array, axes: Sequence[str]) -> None:
    """Raise ValueError if `x` has no element along one of its axes, named by their letters."""
    for axis, (letter, size) in enumerate(zip(axes, x.shape, strict=True)):
        if size == 0:
            fail(argument, f"at least one element along {letter}, axis {axis}", f"shape {list(x.shape)}")
