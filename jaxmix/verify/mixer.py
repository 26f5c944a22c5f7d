"""What a user says about a mixer to have it verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxmix.verify.options import VerifyOptions

Inputs = Mapping[str, np.ndarray]
InputMaker = Callable[[np.random.Generator, VerifyOptions], Inputs]
SERIAL = "serial"
SCAN = "scan"


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
        operator: Summary class with `token_summary(**inputs)`, `combine(a, b)`, `identity(shape, key_size, value_size,
            dtype)` and, optionally, `read(q)`; see `jaxmix.operators`. Inputs are q, k, v with as many key/value heads
            as query heads, and what else `make_inputs` returns.
        option: The option that is checked, shown in the report.
        read_outs: Names of options that read one and the same state, verified together to save compilation: `function`
            and `brute_force` then return a tuple of outs in this order. Gradients are those of the last, under
            `options.full` those of each; an operator's `read` belongs to the first.
        segments: Whether `segment_ids` is served.
        implementations: Which of "serial" and "scan" the function has; "serial" is required.
        fresh_state: From a state of jax.ShapeDtypeStruct to the state of a stream that has seen nothing; default zeros.
    """

    name: str
    function: Callable[..., tuple[Any, Any]]
    make_inputs: InputMaker | Mapping[str, InputMaker]
    per_token: tuple[str, ...] | None = None
    float32_arguments: tuple[str, ...] = ("log_decay",)
    brute_force: Callable[..., Any] | None = None
    operator: type | None = None
    option: str = ""
    read_outs: tuple[str, ...] = ()
    segments: bool = True
    implementations: tuple[str, ...] = (SERIAL, SCAN)
    fresh_state: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if SERIAL not in self.implementations or set(self.implementations) - {SERIAL, SCAN}:
            raise ValueError(
                f"implementations: expected ('serial',) or ('serial', 'scan'), got {self.implementations}; "
                "the serial form is what everything is compared with"
            )
        if self.option and self.read_outs:
            raise ValueError(f"option: expected none beside read_outs {self.read_outs}, got {self.option!r}")
        if not self.input_makers:
            raise ValueError("make_inputs: expected a function or a mapping with at least one, got an empty mapping")

    @property
    def input_makers(self) -> Mapping[str, InputMaker]:
        """The makers by label."""
        return self.make_inputs if isinstance(self.make_inputs, Mapping) else {"": self.make_inputs}
