"""One pass over a stream must equal any split of it with the state handed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.verify.options import EXACT, TOLERANCE
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Form, Subject


def split(subject: Subject) -> Iterator[Row]:
    """A stream of 2 T tokens: one pass, two halves, a half and then single tokens, and scan handing on to serial."""
    first, second, whole, tokens = _stream(subject)
    for form in subject.key_forms:
        tolerance = EXACT if form == subject.serial else TOLERANCE["float64"]
        run = subject.compiled(form)
        expected = run(whole)
        out, state = run(first)
        halves = run(second, None, state)
        steps = _stepper(subject, form, tokens)(second, state)
        ways = {"two halves": halves, "a half, then token by token": steps}
        if form != subject.serial:
            ways["a half by scan, the rest by serial"] = subject.compiled(subject.serial)(second, None, state)
        for way, (rest, final) in ways.items():
            joined = np.concatenate([out, rest], axis=1)
            yield _row(subject, f"{form.label}: {way}, outputs", relative_error(joined, expected[0]), tolerance)
            yield _row(subject, f"{form.label}: {way}, final state", relative_error(final, expected[1]), tolerance)


def _stream(subject: Subject) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray], Any]:
    """Two halves, the whole, and the names of the per-token arguments; the other arguments are those of the first."""
    first, second = subject.inputs(), subject.inputs(stream=1)
    tokens = subject.per_token(first)
    second = {name: second[name] if name in tokens else x for name, x in first.items()}
    whole = {name: np.concatenate([x, second[name]], axis=1) if name in tokens else x for name, x in first.items()}
    return first, second, whole, tokens


def _stepper(subject: Subject, form: Form, tokens: tuple[str, ...]) -> Callable[..., tuple[Any, Any]]:
    """The form applied to one token at a time, as a generating loop does; state in, state out, of one type."""

    def steps(inputs: Mapping[str, Any], state: Any) -> tuple[Any, Any]:
        constants = {name: x for name, x in inputs.items() if name not in tokens}

        def step(state: Any, token: dict[str, Any]) -> tuple[Any, Any]:
            one = {name: x[:, None] for name, x in token.items()}
            out, state = subject.apply(form, {**one, **constants}, None, state)
            return state, out[:, 0]

        stream = {name: jnp.moveaxis(inputs[name], 1, 0) for name in tokens}
        final, out = jax.lax.scan(step, state, stream)
        return jnp.moveaxis(out, 0, 1), final

    return jax.jit(steps)


def _row(subject: Subject, case: str, error: float, tolerance: float) -> Row:
    mixer = subject.mixer
    return Row(mixer=mixer.name, option=mixer.option, check="split", case=case, error=error, tolerance=tolerance)
