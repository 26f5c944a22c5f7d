"""The mixer being verified and its compiled forms."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.verify.mixer import SCAN, SERIAL, Inputs, MixerUnderTest
from jaxmix.verify.options import VerifyOptions
from jaxmix.verify.report import CheckName, Row

FAST_COMPILE = {"xla_backend_optimization_level": 0}
"""Halves the compile time on a CPU, where compiling is most of the cost of a verification."""


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to compute a mixer."""

    implementation: str
    chunk_size: int = 1

    @property
    def label(self) -> str:
        """Name in the report."""
        if self.implementation != SCAN:
            return self.implementation
        return "token scan" if self.chunk_size == 1 else f"scan, chunk {self.chunk_size}"


class Subject:
    """A mixer with its inputs, and its forms compiled once each.

    The key forms (serial, and the scan with several chunks) are always called in one way, with segment ids, an initial
    state and (where a check needs gradients) their gradients, so that one compiled function serves all checks on the
    last of `make_inputs`.

    Args:
        mixer: The mixer under test.
        options: Shape, dtype and seed.
    """

    def __init__(self, mixer: MixerUnderTest, options: VerifyOptions) -> None:
        self.mixer = mixer
        self.options = options
        self.read_outs = mixer.read_outs or (mixer.option,)
        self.serial = Form(SERIAL)
        scans = [Form(SCAN, c) for c in options.chunk_sizes] if SCAN in mixer.implementations else []
        others = [Form(name) for name in mixer.implementations if name not in (SERIAL, SCAN)]
        self.forms = (self.serial, *scans, *others)
        self.short_scan = next((f for f in scans if f.chunk_size == options.short_chunk), None)
        self.key_forms = (self.serial,) if self.short_scan is None else (self.serial, self.short_scan)
        self.unsegmented_forms = tuple(others)
        self.differentiates = not {"gradients", "packed"}.isdisjoint(mixer.checks(options))
        self._compiled: dict[Any, Callable[..., Any]] = {}

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

    def apply(self, form: Form, inputs: Mapping[str, Any], segment_ids: Any = None, initial_state: Any = None) -> Any:
        """Call the mixer in one form."""
        return self.mixer.function(
            **inputs,
            segment_ids=segment_ids,
            initial_state=initial_state,
            implementation=form.implementation,
            chunk_size=form.chunk_size,
        )

    def compiled(self, form: Form) -> Callable[..., tuple[Any, Any]]:
        """The jitted form: `(inputs, segment_ids=None, initial_state=None) -> (out, final_state)`."""
        if form not in self._compiled:
            self._compiled[form] = compile_fast(functools.partial(self.apply, form))
        return self._compiled[form]

    def call(self, form: Form, inputs: Inputs, segment_ids: Any = None, initial_state: Any = None) -> tuple[Any, Any]:
        """The compiled form in float64; the key forms always with segment ids and initial state."""
        if form not in self.key_forms:
            result = self.compiled(form)(dict(inputs), segment_ids, initial_state)
        elif self.differentiates and self.gradient_error is None:
            result, _ = self.evaluate(form, inputs, segment_ids, initial_state)
        else:
            result = self.compiled(form)(dict(inputs), *self._filled(segment_ids, initial_state))
        return jax.tree.map(np.asarray, result)

    def evaluate(
        self,
        form: Form,
        inputs: Inputs,
        segment_ids: Any = None,
        initial_state: Any = None,
        *,
        weights: Any = None,
        option: str | None = None,
    ) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """(out, final_state), and the gradients of the sum of `weights` times (out of one option, final_state).

        Args:
            form: The form.
            inputs: Arguments by name.
            segment_ids: Int32 [B, T]; None is one segment.
            initial_state: State; None is a fresh one.
            weights: In the structure of (out, final_state); None is zero.
            option: The read-out whose gradient is taken; None is the last.

        Returns:
            The result, and a dict of the gradients of "inputs" and "initial_state".
        """
        option = self.read_outs[-1] if option is None else option
        filled, initial_state = self._filled(segment_ids, initial_state)
        segment_ids = filled if form in self.key_forms else segment_ids
        if weights is None:
            out, state = self._shapes
            weights = jax.tree.map(lambda x: np.zeros(x.shape), (self.by_option(out)[option], state))
        if (form, option) not in self._compiled:
            self._compiled[form, option] = compile_fast(self._with_gradients(form, option))
        arguments = {"inputs": dict(inputs), "initial_state": initial_state}
        gradients, result = self._compiled[form, option](arguments, segment_ids, weights)
        return jax.tree.map(np.asarray, result), jax.tree.map(np.asarray, gradients)

    @functools.cached_property
    def gradient_error(self) -> Exception | None:
        """Why there is no gradient, if so; the other checks then run without it."""
        try:
            for form in self.key_forms:
                self.evaluate(form, self.inputs())
        except Exception as error:
            return error
        return None

    def fresh_state(self) -> Any:
        """The state of a stream that has seen nothing."""
        if self.mixer.fresh_state is not None:
            return self.mixer.fresh_state(self._shapes[1])
        return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._shapes[1])

    def cast(self, inputs: Inputs, dtype: str) -> dict[str, Any]:
        """The inputs as jax arrays of `dtype`, gates in float32 at least."""
        gate = "float64" if dtype == "float64" else "float32"
        gates = self.mixer.float32_arguments
        return {name: jnp.asarray(x, gate if name in gates else dtype) for name, x in inputs.items()}

    def by_option(self, out: Any) -> dict[str, Any]:
        """The outputs by option."""
        return dict(zip(self.read_outs, out, strict=True)) if self.mixer.read_outs else {self.mixer.option: out}

    def row(self, check: CheckName, case: str, error: float, tolerance: float, *, option: str | None = None) -> Row:
        """A row of the report about this mixer; without an option, about the state, beside the first read-out."""
        option = self.read_outs[0] if option is None else option
        return Row(mixer=self.mixer.name, option=option, check=check, case=case, error=error, tolerance=tolerance)

    @functools.cached_property
    def _shapes(self) -> tuple[Any, Any]:
        """Shapes of (out, final_state) of the last of `make_inputs`."""
        return jax.eval_shape(functools.partial(self.apply, self.serial), self.inputs())

    def _filled(self, segment_ids: Any, initial_state: Any) -> tuple[Any, Any]:
        """Segment ids and initial state, in place of None those that change nothing."""
        if segment_ids is None and self.mixer.segments:
            segment_ids = np.ones((self.options.batch, self.options.length), np.int32)
        return segment_ids, self.fresh_state() if initial_state is None else initial_state

    def _with_gradients(self, form: Form, option: str) -> Callable[..., Any]:
        def loss(arguments: Any, segment_ids: Any, weights: Any) -> tuple[Any, Any]:
            out, state = self.apply(form, arguments["inputs"], segment_ids, arguments["initial_state"])
            terms = jax.tree.map(jnp.vdot, weights, (self.by_option(out)[option], state))
            return sum(jax.tree.leaves(terms)), (out, state)

        return jax.grad(loss, has_aux=True)


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
