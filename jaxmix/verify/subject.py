"""The mixer being verified and its compiled forms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.verify.options import VerifyOptions
from jaxmix.verify.report import CheckName, Row

Inputs = Mapping[str, np.ndarray]
InputMaker = Callable[[np.random.Generator, VerifyOptions], Inputs]
SERIAL = "serial"
SCAN = "scan"
FAST_COMPILE = {"xla_backend_optimization_level": 0}
"""Halves the compile time on a CPU. Only for float64 runs: forms of lower dtype are compiled as users compile them."""


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


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to compute a mixer."""

    implementation: str
    chunk_size: int = 1

    @property
    def label(self) -> str:
        """Name in the report."""
        if self.implementation == SERIAL:
            return "serial"
        return "token scan" if self.chunk_size == 1 else f"scan, chunk {self.chunk_size}"


class Subject:
    """A mixer with its inputs, and its forms compiled once each.

    Compiling is most of the cost of a verification. The key forms (serial, and the scan with several chunks) are
    therefore always called in one way, with segment ids and with an initial state, so that one compiled function serves
    all checks on the last of `make_inputs`.

    Args:
        mixer: The mixer under test.
        options: Shape, dtype and seed.
    """

    def __init__(self, mixer: MixerUnderTest, options: VerifyOptions) -> None:
        self.mixer = mixer
        self.options = options
        self.serial = Form(SERIAL)
        scans = [Form(SCAN, c) for c in options.chunk_sizes] if SCAN in mixer.implementations else []
        self.forms = (self.serial, *scans)
        self.short_scan = next((f for f in scans if f.chunk_size == options.short_chunk), None)
        self.key_forms = (self.serial,) if self.short_scan is None else (self.serial, self.short_scan)
        self._compiled: dict[tuple[Form, bool], Callable[..., tuple[Any, Any]]] = {}

    def inputs(self, label: str | None = None, *, stream: int = 0) -> dict[str, np.ndarray]:
        """Random inputs of one way to call the mixer (default: the last); another `stream`, other numbers."""
        label = list(self.mixer.input_makers)[-1] if label is None else label
        rng = np.random.default_rng([self.options.seed, stream])
        made = self.mixer.input_makers[label](rng, self.options)
        return {name: np.asarray(x, np.float64) for name, x in made.items()}

    def per_token(self, inputs: Inputs) -> tuple[str, ...]:
        """Names of the arguments laid out [B, T, ...]."""
        if self.mixer.per_token is not None:
            return tuple(name for name in self.mixer.per_token if name in inputs)
        stream = (self.options.batch, self.options.length)
        return tuple(name for name, x in inputs.items() if x.shape[:2] == stream)

    def take(self, inputs: Inputs, where: Any) -> dict[str, np.ndarray]:
        """The inputs with every per-token argument indexed by `where`."""
        tokens = self.per_token(inputs)
        return {name: x[where] if name in tokens else x for name, x in inputs.items()}

    def mix(self, where: np.ndarray, first: Inputs, second: Inputs | float) -> dict[str, np.ndarray]:
        """The inputs of `first`, at the tokens `where` (bool [B, T]) those of `second` instead."""
        tokens = self.per_token(first)

        def choose(name: str, x: np.ndarray) -> np.ndarray:
            other = second[name] if isinstance(second, Mapping) else second
            return np.where(where.reshape(*where.shape, *(1,) * (x.ndim - 2)), other, x)

        return {name: choose(name, x) if name in tokens else x for name, x in first.items()}

    def compiled(self, form: Form, *, fast: bool = True) -> Callable[..., tuple[Any, Any]]:
        """The jitted form: `(inputs, segment_ids=None, initial_state=None) -> (out, final_state)`."""
        if (form, fast) not in self._compiled:
            function = functools.partial(self.apply, form)
            self._compiled[form, fast] = compile_fast(function) if fast else jax.jit(function)
        return self._compiled[form, fast]

    def apply(self, form: Form, inputs: Mapping[str, Any], segment_ids: Any = None, initial_state: Any = None) -> Any:
        """Call the mixer in one form."""
        return self.mixer.function(
            **inputs,
            segment_ids=segment_ids,
            initial_state=initial_state,
            implementation=form.implementation,
            chunk_size=form.chunk_size,
        )

    def call(self, form: Form, inputs: Inputs, segment_ids: Any = None, initial_state: Any = None) -> tuple[Any, Any]:
        """The compiled form in float64; the key forms always with segment ids and initial state."""
        if form in self.key_forms:
            if segment_ids is None and self.mixer.segments:
                segment_ids = np.ones((self.options.batch, self.options.length), np.int32)
            initial_state = self.fresh_state(inputs) if initial_state is None else initial_state
        result = self.compiled(form)(dict(inputs), segment_ids, initial_state)
        return jax.tree.map(np.asarray, result)

    def fresh_state(self, inputs: Inputs) -> Any:
        """The state of a stream that has seen nothing."""
        _, state = jax.eval_shape(functools.partial(self.apply, self.serial), dict(inputs))
        if self.mixer.fresh_state is not None:
            return self.mixer.fresh_state(state)
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)

    def cast(self, inputs: Inputs, dtype: str) -> dict[str, Any]:
        """The inputs as jax arrays of `dtype`, gates in float32 at least."""
        gate = "float64" if dtype == "float64" else "float32"
        gates = self.mixer.float32_arguments
        return {name: jnp.asarray(x, gate if name in gates else dtype) for name, x in inputs.items()}

    def by_option(self, out: Any) -> dict[str, Any]:
        """The outputs by option."""
        return dict(zip(self.mixer.read_outs, out, strict=True)) if self.mixer.read_outs else {self.mixer.option: out}

    def row(self, check: CheckName, case: str, error: float, tolerance: float, *, option: str | None = None) -> Row:
        """A row of the report about this mixer; without an option, about the state, beside the first read-out."""
        if option is None:
            option = (self.mixer.read_outs or (self.mixer.option,))[0]
        return Row(mixer=self.mixer.name, option=option, check=check, case=case, error=error, tolerance=tolerance)


def compile_fast(function: Callable[..., Any]) -> Callable[..., Any]:
    """jax.jit with little optimisation where the backend is a CPU."""
    return jax.jit(function, compiler_options=FAST_COMPILE if jax.default_backend() == "cpu" else None)


def segment_layout(options: VerifyOptions) -> np.ndarray:
    """Two documents of equal length in every row, with padding between, behind and inside; int32 [B, T].

    Rows of even index read 1..1 0 2..2 0.., the others have padding in front and inside the first document, which
    goes on behind it.
    """
    size = document_length(options)
    ids = np.zeros((options.batch, options.length), np.int32)
    ids[0::2, :size] = 1
    ids[0::2, size + 1 : 2 * size + 1] = 2
    ids[1::2, 1:2] = 1
    ids[1::2, 3 : size + 2] = 1
    ids[1::2, size + 2 : 2 * size + 2] = 2
    return ids


def document_length(options: VerifyOptions) -> int:
    """Tokens of each document of `segment_layout`."""
    return (options.length - 2) // 2
