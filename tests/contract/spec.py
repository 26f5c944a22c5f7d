"""What a mixer tells the shared suite about itself, and how the suite runs it.

A mixer describes itself by a `MixerSpec`. The suite runs it through `evaluate`, which computes the output, the final
state and every gradient at once, so that most tests share a handful of compiled functions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TOKENS = 24
"""Length of the case that most tests share."""
BATCH = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one variant: H query heads, G key/value heads, D key size, E value size."""

    heads: int = 2
    kv_heads: int = 2
    key_size: int = 5
    value_size: int = 7


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """One set of options of a mixer, with the shapes and the kind of gates that it is tested with.

    Attributes:
        options: keyword options passed to the mixer.
        shape: sizes of the arrays.
        gate: kind of decay that `MixerSpec.draw` draws; its meaning belongs to the mixer.
        positive: draw queries and keys above zero, so that a normaliser stays away from zero.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shape: Shape = Shape()
    gate: str = "none"
    positive: bool = False


class Form(NamedTuple):
    """A choice of implementation; `chunk_size` None leaves the default."""

    implementation: str | None
    chunk_size: int | None = None


SERIAL = Form("serial")
SCAN = Form("scan", 16)
TOKEN_SCAN = Form("scan", 1)


class Case(NamedTuple):
    """Arguments of one evaluation, and the cotangents it is differentiated with."""

    inputs: dict[str, Any]
    segment_ids: Any
    state: Any
    out_cotangent: Any
    state_cotangent: Any


class Evaluation(NamedTuple):
    """Everything one call of a mixer gives: output, final state, gradient of every input and of the initial state."""

    out: Any
    state: Any
    input_gradients: dict[str, Any]
    state_gradient: Any


@dataclasses.dataclass(frozen=True, eq=False)
class MixerSpec:
    """A mixer as the shared suite sees it.

    Attributes:
        function: the mixer, `out, state = function(**inputs, **options, segment_ids=..., initial_state=..., ...)`.
        state: class of its state.
        draw: `draw(rng, batch, tokens, variant)`, the inputs by name, float64 numpy. From rank 3 on
            they are [B, T, ...].
        init_state: `init_state(variant, batch, dtype)`, the state of a stream that has seen nothing.
        brute_force: `brute_force(inputs, segment_ids, variant)`, the output by explicit sums in float64 numpy.
        variants: option sets by name; the first is the main one, and has a gate per token if the mixer has gates.
        gates: names of the inputs that are float32 whatever the compute dtype.
        log_gates: names of the gates that must not be positive: log decays.
        step_gates: names of the gates that must not be negative: step sizes, which decay the more the larger they are.
        values: name of the input that gives the output its dtype.
        representatives: names of the variants for tests that compile functions of their own; empty for all.
        sharded_variants: names of the variants that are also tested with tokens split over devices.
        lengths: short sequences that are tested besides those that every mixer is; each is compiled by itself.
        large: factor on every input of a document that still leaves finite numbers.
    """

    function: Callable[..., tuple[Any, Any]]
    state: type
    draw: Callable[..., dict[str, np.ndarray]]
    init_state: Callable[..., Any]
    brute_force: Callable[..., np.ndarray]
    variants: Mapping[str, Variant]
    gates: frozenset[str] = frozenset({"log_decay"})
    log_gates: frozenset[str] = frozenset({"log_decay"})
    step_gates: frozenset[str] = frozenset()
    values: str = "v"
    representatives: tuple[str, ...] = ()
    sharded_variants: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (5, 9, 15)
    large: float = 1e30

    @property
    def decay_signs(self) -> dict[str, float]:
        """The sign that each gate that decays the state must have."""
        return dict.fromkeys(self.log_gates, -1.0) | dict.fromkeys(self.step_gates, 1.0)

    @property
    def main(self) -> Variant:
        """The variant of the tests that need only one."""
        return next(iter(self.variants.values()))

    def sized(self, heads: int, size: int) -> Variant:
        """Returns the main variant with other sizes."""
        return dataclasses.replace(self.main, shape=Shape(heads, heads, size, size))

    def call(self, variant: Variant, form: Form, inputs, segment_ids=None, state=None, **options):
        """Calls the mixer in one form."""
        if form.chunk_size is not None:
            options["chunk_size"] = form.chunk_size
        return self.function(
            **inputs,
            **variant.options,
            segment_ids=segment_ids,
            initial_state=state,
            implementation=form.implementation,
            **options,
        )

    def cast_inputs(self, inputs, dtype):
        """Returns the inputs in `dtype`, gates in float32 or better."""
        return {name: jnp.asarray(x, gate_dtype(dtype) if name in self.gates else dtype) for name, x in inputs.items()}

    def cast(self, case: Case, dtype) -> Case:
        """Returns the case as numpy arrays in `dtype`; gates and states in float32 or better."""

        def as_state(x):
            return np.asarray(x, gate_dtype(dtype))

        return Case(
            inputs={
                name: as_state(x) if name in self.gates else np.asarray(x, dtype) for name, x in case.inputs.items()
            },
            segment_ids=np.asarray(case.segment_ids, np.int32),
            state=jax.tree.map(as_state, case.state),
            out_cotangent=np.asarray(case.out_cotangent, dtype),
            state_cotangent=jax.tree.map(as_state, case.state_cotangent),
        )

    def rounded(self, case: Case, dtype) -> Case:
        """Returns the case as a run in `dtype` sees it, in float64: rounding of the inputs is not the mixer's error."""
        if dtype == np.float64:
            return case
        seen = self.cast(case, dtype)
        return jax.tree.map(lambda x: np.asarray(x, x.dtype if x.dtype == np.int32 else np.float64), seen)


def gate_dtype(dtype):
    """Returns the dtype of gates and states for inputs of `dtype`."""
    return jnp.float64 if dtype == np.float64 else jnp.float32


def precision(dtype=np.float64):
    """Returns the context in which arrays of `dtype` exist: 64-bit types are switched on for the block only."""
    return jax.enable_x64(dtype == np.float64)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _evaluate(case: Case, spec: MixerSpec, variant: Variant, form: Form) -> Evaluation:
    def mixer(inputs, state):
        return spec.call(variant, form, inputs, case.segment_ids, state)

    (out, state), pull_back = jax.vjp(mixer, case.inputs, case.state)
    return Evaluation(out, state, *pull_back((case.out_cotangent, case.state_cotangent)))


def evaluate(spec: MixerSpec, variant: Variant, case: Case, form: Form, dtype=np.float64) -> Evaluation:
    """Returns the output, final state and all gradients of one call, as numpy arrays."""
    with precision(dtype):
        return jax.device_get(_evaluate(spec.cast(case, dtype), spec, variant, form))


traced_forms: list[Form] = []
"""The form of every call that `forward` has traced so far, to see that it is not traced again."""


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _forward(case: Case, spec: MixerSpec, variant: Variant, form: Form):
    traced_forms.append(form)
    return spec.call(variant, form, case.inputs, case.segment_ids, case.state)


def forward(spec: MixerSpec, variant: Variant, case: Case, form: Form, dtype=np.float64):
    """Returns the output and the final state of one call, as numpy arrays."""
    with precision(dtype):
        return jax.device_get(_forward(spec.cast(case, dtype), spec, variant, form))


def draw_case(spec: MixerSpec, variant: Variant, tokens: int = TOKENS, *, segment_ids=None, seed: int = 0) -> Case:
    """Returns a random case that continues a stream, with cotangents on the output and on the final state."""
    rng = np.random.default_rng(seed)
    inputs = spec.draw(rng, BATCH, tokens, variant)
    state = earlier_state(spec, variant)
    return Case(
        inputs=inputs,
        segment_ids=np.ones((BATCH, tokens), np.int32) if segment_ids is None else np.asarray(segment_ids, np.int32),
        state=state,
        out_cotangent=rng.normal(size=out_shape(spec, variant, inputs)),
        state_cotangent=jax.tree.map(lambda field: rng.normal(size=field.shape), state),
    )


@functools.cache
def earlier_state(spec: MixerSpec, variant: Variant):
    """Returns the float64 state after `TOKENS` other tokens."""
    rng = np.random.default_rng(1234)
    inputs = spec.draw(rng, BATCH, TOKENS, variant)
    zeros = zero_state(spec, variant)
    case = Case(inputs, np.ones((BATCH, TOKENS)), zeros, np.zeros(out_shape(spec, variant, inputs)), zeros)
    return evaluate(spec, variant, case, SERIAL).state


def out_shape(spec: MixerSpec, variant: Variant, inputs) -> tuple[int, ...]:
    """Returns the shape of the output, without computing it."""
    return jax.eval_shape(lambda: spec.call(variant, SERIAL, spec.cast_inputs(inputs, np.float32))[0]).shape


def zero_state(spec: MixerSpec, variant: Variant, batch: int = BATCH):
    """Returns the float64 state of streams that have seen nothing, as numpy arrays."""
    with precision():
        return jax.device_get(spec.init_state(variant, batch, np.float64))


def is_per_token(array) -> bool:
    """Says whether an input runs over tokens ([B, T, ...]) rather than over heads only."""
    return np.ndim(array) >= 3


def over_tokens(function: Callable, inputs: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Applies `function` to the inputs that run over tokens and keeps the rest."""
    return {
        name: function(x, *(other[name] for other in others)) if is_per_token(x) else x for name, x in inputs.items()
    }


def state_fields(state) -> dict[str, Any]:
    """Returns the fields of a state, under names that cannot be those of inputs."""
    return {f"state.{field.name}": getattr(state, field.name) for field in dataclasses.fields(state)}


def moved(case: Case, name: str, step) -> Case:
    """Returns the case with `step` added to one input, or to one field of the initial state ("state.S")."""
    if name in case.inputs:
        return case._replace(inputs=case.inputs | {name: case.inputs[name] + step})
    field = name.removeprefix("state.")
    return case._replace(state=dataclasses.replace(case.state, **{field: getattr(case.state, field) + step}))


def take_tokens(case: Case, start: int, stop: int) -> Case:
    """Returns the case cut to the tokens [start, stop); states and their cotangents stay."""
    return case._replace(
        inputs=over_tokens(lambda x: x[:, start:stop], case.inputs),
        segment_ids=case.segment_ids[:, start:stop],
        out_cotangent=case.out_cotangent[:, start:stop],
    )


def fill_up(case, tokens):
    """Appends padding up to `tokens`, NaN in every input."""

    def fill(x, value):
        return np.pad(x, [(0, 0), (0, tokens - x.shape[1])] + [(0, 0)] * (x.ndim - 2), constant_values=value)

    return case._replace(
        inputs=over_tokens(lambda x: fill(x, np.nan), case.inputs),
        segment_ids=fill(case.segment_ids, 0),
        out_cotangent=fill(case.out_cotangent, 1.0),
    )
