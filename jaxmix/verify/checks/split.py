"""One pass over a stream must equal any split of it with the state handed on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxmix.verify.mixer import Inputs
from jaxmix.verify.options import EXACT, TOLERANCE
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Form, Subject

Result = tuple[Any, Any]


def split(subject: Subject) -> Iterator[Row]:
    """A stream that continues another: one pass, two calls, token by token, and a scan that hands on to serial."""
    inputs = subject.inputs()
    state = subject.call(subject.serial, subject.inputs(stream=1))[1]
    whole = {form: subject.call(form, inputs, None, state) for form in subject.key_forms}
    halves = {form: _halves(subject, form, form, inputs, state) for form in subject.key_forms}
    for form in subject.key_forms:
        yield from _rows(subject, f"{form.label}: two calls", halves[form], whole[form], form)
        if form == subject.serial or subject.options.full:
            steps = _token_by_token(subject, form, inputs, state)
            yield from _rows(subject, f"{form.label}: token by token", steps, whole[form], form)
    if subject.short_scan is not None:
        mixed = _halves(subject, subject.short_scan, subject.serial, inputs, state)
        yield from _rows(subject, "scan, then serial", mixed, whole[subject.serial], subject.short_scan)


def _halves(subject: Subject, first: Form, second: Form, inputs: Inputs, state: Any) -> Result:
    """Two calls: with segments by padding the rest (nothing to compile), without by arrays of half the length."""
    batch, length = subject.options.batch, subject.options.length
    early = np.broadcast_to(np.arange(length) < length // 2, (batch, length))
    if subject.mixer.segments:
        out, state = subject.call(first, subject.mix(~early, inputs, np.nan), early.astype(np.int32), state)
        rest, state = subject.call(second, subject.mix(early, inputs, np.nan), (~early).astype(np.int32), state)
        return jax.tree.map(np.add, out, rest), state
    out, state = subject.call(first, subject.take(inputs, np.s_[:, : length // 2]), None, state)
    rest, state = subject.call(second, subject.take(inputs, np.s_[:, length // 2 :]), None, state)
    return jax.tree.map(lambda *x: np.concatenate(x, axis=1), out, rest), state


def _token_by_token(subject: Subject, form: Form, inputs: Inputs, state: Any) -> Result:
    """As a generating loop does: one token a call, the state handed on."""
    outputs = []
    for t in range(subject.options.length):
        out, state = subject.compiled(form)(subject.take(inputs, np.s_[:, t : t + 1]), None, state)
        outputs.append(out)
    return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *outputs), state


def _rows(subject: Subject, way: str, result: Result, expected: Result, form: Form) -> Iterator[Row]:
    tolerance = EXACT if form == subject.serial else TOLERANCE["float64"]
    for option, out in subject.by_option(result[0]).items():
        error = relative_error(out, subject.by_option(expected[0])[option])
        yield subject.row("split", f"{way} against one pass: outputs", error, tolerance, option=option)
    error = relative_error(result[1], expected[1])
    yield subject.row("split", f"{way} against one pass: final state", error, tolerance)
