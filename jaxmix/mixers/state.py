"""Recurrent states: registered frozen dataclasses of float arrays whose first axis is the batch."""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, Dtype, expand_to, fail


@dataclasses.dataclass(frozen=True)
class State:
    """Base of every mixer state. An all-zero state is a stream that has seen nothing."""

    def reset(self, where: Array) -> Self:
        """The state with the streams selected by `where` (bool, [B]) started anew."""
        batch = jax.tree.leaves(self)[0].shape[0]
        if where.shape != (batch,) or where.dtype != jnp.bool_:
            fail("where", f"bool [{batch}]", f"{where.dtype} {list(where.shape)}")
        return jax.tree.map(lambda x: jnp.where(expand_to(where, x.ndim), jnp.zeros_like(x), x), self)


@dataclasses.dataclass(frozen=True)
class RecurrentState(State):
    """Base of the states that `jaxmix.mixers.recurrence` runs: fields [B, H, ...]."""

    shared: ClassVar[tuple[str, ...]] = ()
    """Fields that query heads of one key/value group share; their head axis is G instead of H."""
    axes: ClassVar[tuple[str, ...]] = ()
    """The axes of each field, in order, behind its [B, H]: letters of the legend in `jaxmix.arrays`, or a number."""

    @classmethod
    def zeros(cls, batch: int, heads: int, shared_heads: int | None, extents: dict[str, int], dtype: Dtype) -> Self:
        """The state of streams that have seen nothing, with `extents` for the letters of `axes`."""
        own = heads if shared_heads is None else shared_heads

        def zeros(name: str, axes: str) -> Array:
            sizes = (int(letter) if letter.isdigit() else extents[letter] for letter in axes)
            return jnp.zeros((batch, own if name in cls.shared else heads, *sizes), dtype)

        return cls(*(zeros(f.name, axes) for f, axes in zip(dataclasses.fields(cls), cls.axes, strict=True)))


@dataclasses.dataclass(frozen=True)
class KeyValueState(RecurrentState):
    """Base of the states whose sizes are those of keys and values."""

    @classmethod
    def init(
        cls,
        batch: int,
        heads: int,
        key_size: int,
        value_size: int,
        *,
        shared_heads: int | None = None,
        dtype: Dtype = jnp.float32,
    ) -> Self:
        """The state of streams that have seen nothing; `shared_heads` (Hs) defaults to `heads`."""
        return cls.zeros(batch, heads, shared_heads, {"D": key_size, "E": value_size}, dtype)


def group_heads(state: Any, groups: int) -> Any:
    """The state with the head axis of per-query-head fields split from [B, H, ...] to [B, G, R, ...]."""
    split = {
        f.name: x if f.name in state.shared else x.reshape(x.shape[0], groups, -1, *x.shape[2:])
        for f in dataclasses.fields(state)
        for x in (getattr(state, f.name),)
    }
    return dataclasses.replace(state, **split)


def merge_heads(state: Any) -> Any:
    """The inverse of `group_heads`."""
    merged = {
        f.name: x if f.name in state.shared else x.reshape(x.shape[0], -1, *x.shape[3:])
        for f in dataclasses.fields(state)
        for x in (getattr(state, f.name),)
    }
    return dataclasses.replace(state, **merged)


def check_state(initial_state: Any, expected: Any, dtype: Dtype) -> None:
    """Check that `initial_state` has the type, shapes and dtype of `expected` (a state of ShapeDtypeStructs).

    Raises:
        ValueError: when it is the state of another mixer, batch, head count, size or dtype.
    """
    kind = type(expected).__name__
    if type(initial_state) is not type(expected):
        fail("initial_state", f"a {kind}", type(initial_state).__name__)
    for field in dataclasses.fields(expected):
        got, want = getattr(initial_state, field.name), getattr(expected, field.name)
        if tuple(got.shape) != tuple(want.shape):
            fail(f"initial_state.{field.name}", f"shape {list(want.shape)}", f"shape {list(got.shape)}")
        if got.dtype != dtype:
            fail(f"initial_state.{field.name}", f"dtype {jnp.dtype(dtype).name}", f"dtype {got.dtype}")
