"""Documents packed into one row must equal the same documents by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxmix.verify.checks.gradients import gradient_function, random_weights
from jaxmix.verify.options import EXACT, TOLERANCE
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Form, Subject, document_length, segment_layout


def packed(subject: Subject) -> Iterator[Row]:
    """Two documents a row, padding between, behind, in front and inside, NaN in the padded inputs."""
    if not subject.mixer.segments:
        return
    ids = segment_layout(subject.options)
    inputs = subject.inputs()
    holes = {name: _fill(inputs[name], ids == 0, np.nan) for name in subject.per_token(inputs)}
    packed_inputs = {**inputs, **holes}
    for form in subject.key_forms:
        yield from _outputs(subject, form, inputs, packed_inputs, ids)
        yield from _gradients(subject, form, inputs, packed_inputs, ids)


def _outputs(subject: Subject, form: Form, inputs: Any, packed_inputs: Any, ids: np.ndarray) -> Iterator[Row]:
    tolerance = _tolerance(subject, form)
    run = subject.compiled(form)
    out, state = (jax.tree.map(np.asarray, x) for x in run(packed_inputs, ids))
    expected = np.zeros_like(out)
    for document in (1, 2):
        where = _positions(ids, document)
        alone, last_state = run(subject.take(inputs, where))
        if expected[where].shape == alone.shape:
            expected[where] = alone
    yield _row(subject, f"{form.label}: outputs, 0 at padding", relative_error(out, expected), tolerance)
    yield _row(subject, f"{form.label}: final state", relative_error(state, last_state), tolerance)

    other = subject.inputs(stream=1)
    names = subject.per_token(inputs)
    changed = {**packed_inputs, **{n: np.where(_mask(ids == 1, inputs[n]), other[n], packed_inputs[n]) for n in names}}
    moved_out, moved_state = run(changed, ids)
    second = _positions(ids, 2)
    error = relative_error((np.asarray(moved_out)[second], moved_state), (out[second], state))
    yield _row(subject, f"{form.label}: document 2, bit for bit, when document 1 changes", error, 0.0)


def _gradients(subject: Subject, form: Form, inputs: Any, packed_inputs: Any, ids: np.ndarray) -> Iterator[Row]:
    gradient = gradient_function(subject, form)
    out_weights, state_weights = random_weights(subject, subject.compiled(form)(packed_inputs, ids))
    got = gradient({"inputs": packed_inputs, "initial_state": None}, (out_weights, state_weights), ids)["inputs"]
    expected = {name: np.zeros_like(x) for name, x in inputs.items()}
    for document in (1, 2):
        where = _positions(ids, document)
        weights = (out_weights[where], jax.tree.map(lambda w: w * (document == 2), state_weights))  # noqa: B023
        arguments = {"inputs": subject.take(inputs, where), "initial_state": None}
        alone = gradient(arguments, weights)["inputs"]
        for name, x in alone.items():
            if name in subject.per_token(inputs):
                expected[name][where] = x
            else:
                expected[name] += x
    for name, reference in expected.items():
        error = relative_error(got[name], reference)
        yield _row(subject, f"{form.label}: gradient of {name}, 0 at padding", error, _tolerance(subject, form))


def _positions(ids: np.ndarray, document: int) -> tuple[np.ndarray, np.ndarray]:
    """Index arrays [B, tokens] of one document in every row."""
    size = np.count_nonzero(ids[0] == document)
    rows, columns = np.nonzero(ids == document)
    return rows.reshape(-1, size), columns.reshape(-1, size)


def _mask(where: np.ndarray, like: np.ndarray) -> np.ndarray:
    return where.reshape(*where.shape, *(1,) * (like.ndim - 2))


def _fill(x: np.ndarray, where: np.ndarray, value: float) -> np.ndarray:
    return np.where(_mask(where, x), value, x)


def _tolerance(subject: Subject, form: Form) -> float:
    return EXACT if form == subject.serial else TOLERANCE["float64"]


def _row(subject: Subject, case: str, error: float, tolerance: float) -> Row:
    mixer = subject.mixer
    return Row(mixer=mixer.name, option=mixer.option, check="packed", case=case, error=error, tolerance=tolerance)
