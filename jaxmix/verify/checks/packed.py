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
    """Two documents a row, padding between, behind, in front and inside, NaN in the padded inputs.

    Gradients are compared under `options.full` only.
    """
    if not subject.mixer.segments:
        return
    ids = segment_layout(subject.options)
    inputs = subject.inputs()
    holed = subject.mix(ids == 0, inputs, np.nan)
    for form in subject.key_forms:
        out, state = subject.call(form, holed, ids)
        yield from _outputs(subject, form, inputs, ids, (out, state))
        yield from _isolation(subject, form, holed, ids, (out, state))
        if subject.options.full:
            for option, x in subject.by_option(out).items():
                weights = random_weights(subject, (x, state))
                yield from _gradients(subject, form, option, holed, ids, weights)


def _outputs(subject: Subject, form: Form, inputs: Any, ids: np.ndarray, result: Any) -> Iterator[Row]:
    """The documents by themselves, each with padding behind it."""
    size, shape = document_length(subject.options), ids.shape
    alone_ids = np.broadcast_to(np.arange(shape[1]) < size, shape).astype(np.int32)
    expected = jax.tree.map(np.zeros_like, result[0])
    last_state = None
    for document in (1, 2):
        rows, columns = _positions(ids, document)
        moved = np.zeros(shape, int)
        moved[:, :size] = columns
        alone, last_state = subject.call(form, subject.take(inputs, (np.arange(shape[0])[:, None], moved)), alone_ids)
        for whole, piece in zip(jax.tree.leaves(expected), jax.tree.leaves(alone), strict=True):
            whole[rows, columns] = piece[:, :size]
    for option, x in subject.by_option(result[0]).items():
        error = relative_error(x, subject.by_option(expected)[option])
        case = f"{form.label}: outputs against separate documents, 0 at padding"
        yield subject.row("packed", case, error, _tolerance(subject, form), option=option)
    error = relative_error(result[1], last_state)
    case = f"{form.label}: final state against the last document"
    yield subject.row("packed", case, error, _tolerance(subject, form))


def _isolation(subject: Subject, form: Form, holed: Any, ids: np.ndarray, result: Any) -> Iterator[Row]:
    """Document 2 must not move by a bit when document 1 and the initial state are others."""
    other = subject.inputs(stream=1)
    other_state = subject.call(subject.serial, other)[1]
    changed, state = subject.call(form, subject.mix(ids == 1, holed, other), ids, other_state)
    second = _positions(ids, 2)
    case = f"{form.label}: document 2, bit for bit, when document 1 and the initial state change"
    for option, x in subject.by_option(changed).items():
        error = relative_error((x[second], state), (subject.by_option(result[0])[option][second], result[1]))
        yield subject.row("packed", case, error, 0.0, option=option)


def _gradients(subject: Subject, form: Form, option: str, holed: Any, ids: np.ndarray, weights: Any) -> Iterator[Row]:
    gradient = gradient_function(subject, form, option)
    got = gradient({"inputs": holed, "initial_state": None}, weights, ids)["inputs"]
    tokens = subject.per_token(holed)
    expected = {name: np.zeros_like(x) for name, x in holed.items()}
    for document in (1, 2):
        where = _positions(ids, document)
        kept = float(document == 2)
        own = (weights[0][where], jax.tree.map(lambda w, kept=kept: kept * w, weights[1]))
        alone = gradient({"inputs": subject.take(holed, where), "initial_state": None}, own)["inputs"]
        for name, x in alone.items():
            expected[name][where if name in tokens else ...] += np.asarray(x)
    for name, reference in expected.items():
        error = relative_error(got[name], reference)
        case = f"{form.label}: gradient of {name} against separate documents, 0 at padding"
        yield subject.row("packed", case, error, _tolerance(subject, form), option=option)


def _positions(ids: np.ndarray, document: int) -> tuple[np.ndarray, np.ndarray]:
    """Index arrays [B, tokens] of one document in every row."""
    rows, columns = np.nonzero(ids == document)
    return rows.reshape(ids.shape[0], -1), columns.reshape(ids.shape[0], -1)


def _tolerance(subject: Subject, form: Form) -> float:
    return EXACT if form == subject.serial else TOLERANCE["float64"]
