"""The semidirect operator of a mixer: associative, with an identity, and equal to the serial final state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.verify.errata import left_fold, right_fold
from jaxmix.verify.options import EXACT
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import MixerUnderTest, Subject

FOLDED_TOKENS = 16
TREES = 4


def operator(subject: Subject) -> Iterator[Row]:
    """Left fold against right fold and random trees, against the serial state and outputs, and the identity."""
    kind: Any = subject.mixer.operator
    if kind is None:
        return
    alike = _alike(subject)
    made = alike.inputs()
    inputs = alike.take(made, np.s_[:, :FOLDED_TOKENS])
    length = min(FOLDED_TOKENS, subject.options.length)
    combine = jax.jit(kind.combine)
    stacked = jax.jit(kind.token_summary)(**inputs)
    tokens = [jax.tree.map(lambda x, t=t: x[:, t], stacked) for t in range(length)]
    left = left_fold(combine, tokens)
    yield _row(subject, "right fold against left fold", relative_error(right_fold(combine, tokens), left))
    rng = np.random.default_rng([subject.options.seed, 4])
    trees = [random_tree(combine, tokens, rng) for _ in range(TREES)]
    error = max(relative_error(tree, left) for tree in trees)
    yield _row(subject, f"{TREES} random trees against left fold", error)
    yield from _identity(subject, combine, left, inputs)
    out, state = alike.compiled(alike.serial)(inputs)
    shared = _shared_fields(left, state)
    if shared:
        error = max(relative_error(getattr(left, name), getattr(state, name)) for name in shared)
        yield _row(subject, f"left fold against the serial final state ({', '.join(shared)})", error)
    if hasattr(kind, "read"):
        numerator, _ = left.read(jnp.asarray(inputs["q"][:, length - 1]))
        yield _row(subject, "read of the left fold against the serial output", relative_error(numerator, out[:, -1]))


def random_tree[S](combine: Callable[[S, S], S], summaries: Sequence[S], rng: np.random.Generator) -> S:
    """Combine neighbours in random order until one summary is left."""
    rest = list(summaries)
    while len(rest) > 1:
        at = int(rng.integers(len(rest) - 1))
        rest[at : at + 2] = [combine(rest[at], rest[at + 1])]
    return rest[0]


def _alike(subject: Subject) -> Subject:
    """The same mixer with inputs that an operator takes: as many key/value heads as query heads."""
    mixer: MixerUnderTest = subject.mixer
    if mixer.operator_inputs is not None:
        mixer = dataclasses.replace(mixer, make_inputs=mixer.operator_inputs)
    return Subject(mixer, dataclasses.replace(subject.options, kv_heads=subject.options.heads))


def _identity(subject: Subject, combine: Callable[[Any, Any], Any], left: Any, inputs: Any) -> Iterator[Row]:
    kind: Any = subject.mixer.operator
    shape = (subject.options.batch, *inputs["q"].shape[2:-1])
    identity = kind.identity(shape, inputs["k"].shape[-1], inputs["v"].shape[-1], dtype=jnp.float64)
    error = max(relative_error(combine(identity, left), left), relative_error(combine(left, identity), left))
    yield _row(subject, "identity on either side", error)


def _shared_fields(summary: Any, state: Any) -> list[str]:
    if not (dataclasses.is_dataclass(summary) and dataclasses.is_dataclass(state)):
        return []
    names = {field.name for field in dataclasses.fields(summary)}
    return [field.name for field in dataclasses.fields(state) if field.name in names]


def _row(subject: Subject, case: str, error: float) -> Row:
    mixer = subject.mixer
    kind: Any = mixer.operator
    case = f"{kind.__name__}: {case}"
    return Row(mixer=mixer.name, option=mixer.option, check="operator", case=case, error=error, tolerance=EXACT)
