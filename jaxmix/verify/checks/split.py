"""One pass over a stream must equal any split of it with the state handed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmix.verify.mixer import Inputs
from jaxmix.verify.options import EXACT, TOLERANCE
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Form, Subject

Result = tuple[Any, Any]


def split(subject: Subject) -> Iterator[Row]:
    """A stream that continues another: one pass against several calls, down to single tokens.

    Calls of other lengths have to be compiled. Unless `options.full`, the scan form is split by padding only (the first
    call sees the rest as padding, the second the beginning), where the mixer has segments.
    """
    inputs, length = subject.inputs(), subject.options.length
    state = subject.call(subject.serial, subject.inputs(stream=1))[1]
    half, segments = length // 2, subject.mixer.segments
    whole = {form: subject.call(form, inputs, None, state) for form in subject.key_forms}
    for form, expected in whole.items():
        if segments:
            result = _padded(subject, form, form, inputs, state)
            yield from _rows(subject, f"{form.label}: two calls", result, expected, form)
        if form == subject.serial or subject.options.full or not segments:
            result = _calls(subject, [(form, half), (form, half), (form, length - 2 * half)], inputs, state)
            yield from _rows(subject, f"{form.label}: shorter calls", result, expected, form)
            result = _calls(subject, [(form, 1)] * length, inputs, state)
            yield from _rows(subject, f"{form.label}: token by token", result, expected, form)
    if subject.short_scan is not None:
        if segments:
            result = _padded(subject, subject.short_scan, subject.serial, inputs, state)
        else:
            calls = [(subject.short_scan, half), (subject.serial, half), (subject.serial, length - 2 * half)]
            result = _calls(subject, calls, inputs, state)
        yield from _rows(subject, "scan, then serial", result, whole[subject.serial], subject.short_scan)


def _padded(subject: Subject, first: Form, second: Form, inputs: Inputs, state: Any) -> Result:
    """Two calls of the whole length, each with the other's tokens as padding."""
    batch, length = subject.options.batch, subject.options.length
    early = np.broadcast_to(np.arange(length) < length // 2, (batch, length))
    out, state = subject.call(first, subject.mix(~early, inputs, np.nan), early.astype(np.int32), state)
    rest, state = subject.call(second, subject.mix(early, inputs, np.nan), (~early).astype(np.int32), state)
    return jax.tree.map(np.add, out, rest), state


def _calls(subject: Subject, calls: Sequence[tuple[Form, int]], inputs: Inputs, state: Any) -> Result:
    """Calls of so many tokens each, the state handed on, as a generating loop does."""
    outputs, start = [], 0
    for form, tokens in calls:
        if tokens:
            piece = subject.take(inputs, np.s_[:, start : start + tokens])
            out, state = subject.compiled(form)(piece, None, state)
            outputs.append(out)
            start += tokens
    return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *outputs), state


def _rows(subject: Subject, way: str, result: Result, expected: Result, form: Form) -> Iterator[Row]:
    tolerance = EXACT if form == subject.serial else TOLERANCE["float64"]
    for option, out in subject.by_option(result[0]).items():
        error = relative_error(out, subject.by_option(expected[0])[option])
        yield subject.row("split", f"{way} against one pass: outputs", error, tolerance, option=option)
    error = relative_error(result[1], expected[1])
    yield subject.row("split", f"{way} against one pass: final state", error, tolerance)
