"""Runs float32 reference code in float64; random numbers that depend on a name only."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SEED = 20261130


class _CastToDouble(TorchFunctionMode):
    """Answers every request for float32 with float64: `x.float()`, `x.to(torch.float32)`, `dtype=torch.float32`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = [_widen(x) for x in args], {name: _widen(x) for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _widen(value):
    return torch.float64 if value is torch.float32 else value


class _RefuseFloat32(TorchDispatchMode):
    """Raises where an operation still gives float32."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.float32 for x in tree_leaves(result)):
            raise TypeError(f"{func} computed in float32 inside double_precision()")
        return result


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Inside, code that casts to float32 casts to float64 instead; a float32 result of any operation raises TypeError.

    The references cast their inputs to float32 themselves. Their arithmetic is not touched.
    """
    torch.set_default_dtype(torch.float64)
    try:
        with _CastToDouble(), _RefuseFloat32():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def generator(name: str) -> np.random.Generator:
    """A generator whose stream depends on `name` and SEED, so that one file can change without the others."""
    return np.random.default_rng([SEED, *name.encode()])


def short(array: np.ndarray) -> np.ndarray:
    """`array` as float32 multiples of 2^-14, which take little more than half the room when compressed."""
    return (np.round(array * 2**14) / 2**14).astype(np.float32)


def relative_rms(value: np.ndarray, reference: np.ndarray) -> float:
    """sqrt(mean((value - reference)^2)) / sqrt(mean(reference^2))."""
    return float(np.sqrt(np.mean((value - reference) ** 2) / np.mean(reference**2)))
