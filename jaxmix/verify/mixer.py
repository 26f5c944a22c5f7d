"""What a user says about a mixer and its operator to have them verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxmix.verify.options import CHECK_NAMES, VerifyOptions

Inputs = Mapping[str, np.ndarray]
InputMaker = Callable[[np.random.Generator, VerifyOptions], Inputs]
SERIAL = "serial"
SCAN = "scan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorUnderTest:
    """The associative operator of a mixer, and how its summaries belong to states and outputs.

    Attributes:
        name: Name shown in the report.
        token_summaries: `token_summaries(**inputs)` returns the summaries of single tokens, a pytree of [B, T, ...].
        combine: `combine(a, b)` returns the summary of a's tokens followed by b's.
        identity: `identity(**inputs)` returns the summary of no tokens, a pytree of [B, ...].
        states: `states(summary, final_state)` returns by name the pairs of arrays, one of the summary of a whole stream
            and one of its final state, that must be equal.
        read: `read(summary, **inputs)` returns the output [B, ...] of the last token of `inputs`, for the first of
            `read_outs`; None if the summary cannot be read.
    """

    name: str
    token_summaries: Callable[..., Any]
    combine: Callable[[Any, Any], Any]
    identity: Callable[..., Any]
    states: Callable[[Any, Any], Mapping[str, tuple[Any, Any]]]
    read: Callable[..., Any] | None = None


def key_value_operator(kind: Any) -> OperatorUnderTest:
    """The operator of a mixer of q, k, v and an optional log_decay.

    Args:
        kind: Summary class with `token_summary(q, k, v, log_decay)`, `combine(a, b)`, `identity(shape, key_size,
            value_size, dtype)` and, optionally, `read(q)`, which returns a numerator first; see `jaxmix.operators`. Its
            fields that the state has as well must be equal in both; shared heads are repeated for every query head.
    """

    def token_summaries(q: Any, k: Any, v: Any, log_decay: Any = None) -> Any:
        k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return jax.jit(kind.token_summary)(q, k, v, log_decay)

    def identity(q: Any, v: Any, **others: Any) -> Any:
        leading = q.shape[0], q.shape[2]
        return jax.jit(lambda: kind.identity(leading, q.shape[-1], v.shape[-1], dtype=q.dtype))()

    def states(summary: Any, final_state: Any) -> dict[str, tuple[Any, Any]]:
        shared = {name: x for name, x in getattr(final_state, "__dict__", {}).items() if hasattr(summary, name)}
        own = {name: getattr(summary, name) for name in shared}
        return {name: (own[name], np.repeat(x, own[name].shape[1] // x.shape[1], axis=1)) for name, x in shared.items()}

    def read(summary: Any, q: Any, **others: Any) -> Any:
        return jax.jit(kind.read)(summary, q[:, -1])[0]

    return OperatorUnderTest(
        name=kind.__name__,
        token_summaries=token_summaries,
        combine=kind.combine,
        identity=identity,
        states=states,
        read=read if hasattr(kind, "read") else None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerUnderTest:
    """A mixer, how to call it and what to compare it with.

    Attributes:
        name: Name shown in the report.
        function: The mixer, called as `function(**inputs, segment_ids=..., initial_state=..., implementation=...,
            chunk_size=...)`; returns (out, final_state), out [B, T, ...]. `implementation` is "serial" or "scan",
            `chunk_size` an int, `segment_ids` None or int32 [B, T] with 0 = padding, `initial_state` None or a state
            that the function returned.
        make_inputs: `make_inputs(rng, options)` returns the array arguments by name, as numpy float64. Several ways to
            call one mixer (with and without gates, say) are a mapping from a label to such a function; the last is used
            for gradients, split, packed, causality and the operator, so put the richest last.
        per_token: Names of the arguments laid out [B, T, ...]. Default: every argument whose shape begins (B, T).
        float32_arguments: Names of arguments that stay float32 when `options.dtype` is lower (gates).
        brute_force: `brute_force(**inputs)` returns the same out, in numpy float64, by any independent route.
        operator: Its associative operator; `key_value_operator` makes one of a summary class like those of
            `jaxmix.operators`.
        option: The option that is checked, shown in the report.
        read_outs: Names of options that read one and the same state, verified together to save compilation: `function`
            and `brute_force` then return a tuple of outs in this order. Gradients are those of the last, under
            `options.full` those of each; an operator's `read` belongs to the first.
        segments: Whether `segment_ids` is served.
        implementations: What `implementation` may be; "serial" is required. "scan" is run with the chunk sizes of the
            options. Any other is a form for calls without segments.
        quick_checks: The kinds of check to which a run without `options.full` is limited; empty means all. For an
            entry that mostly runs code that another one has covered.
        fresh_state: From a state of jax.ShapeDtypeStruct to the state of a stream that has seen nothing; default zeros.
    """

    name: str
    function: Callable[..., tuple[Any, Any]]
    make_inputs: InputMaker | Mapping[str, InputMaker]
    per_token: tuple[str, ...] | None = None
    float32_arguments: tuple[str, ...] = ("log_decay",)
    brute_force: Callable[..., Any] | None = None
    operator: OperatorUnderTest | None = None
    option: str = ""
    read_outs: tuple[str, ...] = ()
    segments: bool = True
    implementations: tuple[str, ...] = (SERIAL, SCAN)
    quick_checks: tuple[str, ...] = ()
    fresh_state: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if SERIAL not in self.implementations:
            raise ValueError(
                f"implementations: expected 'serial' among them, got {self.implementations}; "
                "the serial form is what everything is compared with"
            )
        unknown = [name for name in self.quick_checks if name not in CHECK_NAMES]
        if unknown:
            raise ValueError(f"quick_checks: expected names among {', '.join(CHECK_NAMES)}, got {', '.join(unknown)}")
        if self.option and self.read_outs:
            raise ValueError(f"option: expected none beside read_outs {self.read_outs}, got {self.option!r}")
        if not self.input_makers:
            raise ValueError("make_inputs: expected a function or a mapping with at least one, got an empty mapping")

    @property
    def input_makers(self) -> Mapping[str, InputMaker]:
        """The makers by label."""
        return self.make_inputs if isinstance(self.make_inputs, Mapping) else {"": self.make_inputs}

    def checks(self, options: VerifyOptions) -> tuple[str, ...]:
        """The kinds of check that a run with these options makes."""
        quick = () if options.full else self.quick_checks
        return tuple(name for name in CHECK_NAMES if all(not some or name in some for some in (options.checks, quick)))
