"""Documents packed into one row must equal the same documents by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxmix.verify.checks.gradients import random_weights
from jaxmix.verify.options import EXACT, TOLERANCE
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Form, Subject, document_length, segment_layout


def packed(subject: Subject) -> Iterator[Row]:
    """Two documents a row, padding between, behind, in front and inside, NaN in the padded inputs."""
    if not subject.mixer.segments:
        return
    ids = segment_layout(subject.options)
    inputs = subject.inputs()
    holed = subject.mix(ids == 0, inputs, np.nan)
    for form in subject.key_forms:
        result = subject.call(form, holed, ids)
        yield from _outputs(subject, form, inputs, ids, result)
        yield from _isolation(subject, form, holed, ids, result)
        if subject.gradient_error is None:
            options = subject.read_outs if subject.options.full else subject.read_outs[-1:]
            for option in options:
                yield from _gradients(subject, form, option, inputs, holed, ids)


def _outputs(subject: Subject, form: Form, inputs: Any, ids: np.ndarray, result: Any) -> Iterator[Row]:
    """Outputs and final state against those of the documents by themselves, each with padding behind it."""
    size = document_length(subject.options)
    expected = jax.tree.map(np.zeros_like, result[0])
    last_state = None
    for document in (1, 2):
        alone, last_state = subject.call(form, *_alone(subject, inputs, ids, document))
        where = _positions(ids, document)
        for whole, piece in zip(jax.tree.leaves(expected), jax.tree.leaves(alone), strict=True):
            whole[where] = piece[:, :size]
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


def _gradients(subject: Subject, form: Form, option: str, inputs: Any, holed: Any, ids: np.ndarray) -> Iterator[Row]:
    """Gradients of a weighting of outputs and final state against those of the documents by themselves."""
    size, tokens = document_length(subject.options), subject.per_token(inputs)
    out, state = subject.call(form, holed, ids)
    weights = random_weights(subject, (subject.by_option(out)[option], state))
    got = subject.evaluate(form, holed, ids, weights=weights, option=option)[1]["inputs"]
    expected = {name: np.zeros_like(x) for name, x in inputs.items()}
    for document in (1, 2):
        where = _positions(ids, document)
        own = np.zeros_like(weights[0])
        own[:, :size] = weights[0][where]
        kept = float(document == 2)
        own_weights = (own, jax.tree.map(lambda w, kept=kept: kept * w, weights[1]))
        alone, alone_ids = _alone(subject, inputs, ids, document)
        gradient = subject.evaluate(form, alone, alone_ids, weights=own_weights, option=option)[1]["inputs"]
        for name, x in gradient.items():
            if name in tokens:
                expected[name][where] = x[:, :size]
            else:
                expected[name] += x
    for name, reference in expected.items():
        error = relative_error(got[name], reference)
        case = f"{form.label}: gradient of {name} against separate documents, 0 at padding"
        yield subject.row("packed", case, error, _tolerance(subject, form), option=option)


def _alone(subject: Subject, inputs: Any, ids: np.ndarray, document: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The inputs and segment ids of one document by itself, at the front, padding behind it."""
    rows, columns = _positions(ids, document)
    front = np.zeros(ids.shape, int)
    front[:, : columns.shape[1]] = columns
    alone_ids = np.zeros_like(ids)
    alone_ids[:, : columns.shape[1]] = 1
    return subject.take(inputs, (rows[:, :1], front)), alone_ids


def _positions(ids: np.ndarray, document: int) -> tuple[np.ndarray, np.ndarray]:
    """Index arrays [B, tokens] of one document in every row."""
    rows, columns = np.nonzero(ids == document)
    return rows.reshape(ids.shape[0], -1), columns.reshape(ids.shape[0], -1)


def _tolerance(subject: Subject, form: Form) -> float:
    return EXACT if form == subject.serial else TOLERANCE["float64"]
