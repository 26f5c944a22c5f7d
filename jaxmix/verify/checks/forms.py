"""Every form against the float64 serial run, and against the explicit sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmix.verify.options import EXACT, TOLERANCE
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Inputs, Subject, segment_layout

EXPLICIT_TOKENS = 32


def forms(subject: Subject) -> Iterator[Row]:
    """Outputs and final states of all forms, for every way to call the mixer, without and with segments."""
    labels = list(subject.mixer.input_makers)
    for label in labels:
        yield from _compare(subject, label, None)
    if subject.mixer.segments:
        segmented = labels if subject.options.full else labels[-1:]
        for label in segmented:
            yield from _compare(subject, label, segment_layout(subject.options))


def _compare(subject: Subject, label: str, segment_ids: np.ndarray | None) -> Iterator[Row]:
    dtype = subject.options.dtype
    inputs = {name: np.asarray(x, np.float64) for name, x in subject.cast(subject.inputs(label), dtype).items()}
    where = ", ".join(x for x in (label, "segments" if segment_ids is not None else "") if x)
    reference, state = subject.compiled(subject.serial)(inputs, segment_ids)
    explicit = _explicit(subject, inputs, segment_ids)
    if explicit is not None:
        error = relative_error(reference[:, :EXPLICIT_TOKENS], explicit)
        yield _row(subject, "explicit sum", f"{where}: serial, float64".lstrip(": "), error, EXACT)
    for form in subject.forms:
        if dtype == "float64" and form == subject.serial:
            continue
        with jax.enable_x64(dtype == "float64"):
            result = subject.compiled(form)(subject.cast(inputs, dtype), segment_ids)
        case = f"{where}: {form.label}, {dtype}".lstrip(": ")
        yield _row(subject, "forms", f"{case}, outputs", relative_error(result[0], reference), TOLERANCE[dtype])
        yield _row(subject, "forms", f"{case}, final state", relative_error(result[1], state), TOLERANCE[dtype])
        if explicit is not None:
            error = relative_error(result[0][:, :EXPLICIT_TOKENS], explicit)
            yield _row(subject, "explicit sum", case, error, TOLERANCE[dtype])


def _explicit(subject: Subject, inputs: Inputs, segment_ids: np.ndarray | None) -> np.ndarray | None:
    """The brute force on the first tokens, segment by segment."""
    if subject.mixer.brute_force is None:
        return None
    tokens = subject.per_token(inputs)
    head = {name: x[:, :EXPLICIT_TOKENS] if name in tokens else x for name, x in inputs.items()}
    if segment_ids is None:
        return np.asarray(subject.mixer.brute_force(**head))
    return by_segment(subject.mixer.brute_force, head, tokens, segment_ids[:, :EXPLICIT_TOKENS])


def by_segment(
    function: Callable[..., Any], inputs: Inputs, per_token: tuple[str, ...], segment_ids: np.ndarray
) -> np.ndarray:
    """Call `function` on every segment of every row by itself and put the outputs back; padding gives 0.

    Args:
        function: Called with the inputs, batch 1, of one segment; returns out [1, tokens, ...].
        inputs: Arrays by name.
        per_token: Names of the inputs laid out [B, T, ...].
        segment_ids: Int [B, T], 0 = padding. Padding does not end a segment; a change of the id does.

    Returns:
        Out [B, T, ...].
    """
    out: np.ndarray | None = None
    for b, row in enumerate(segment_ids):
        filled = np.flatnonzero(row)
        borders = np.flatnonzero(np.diff(row[filled])) + 1
        for segment in np.split(filled, borders) if filled.size else []:
            part = {name: x[b : b + 1, segment] if name in per_token else x for name, x in inputs.items()}
            result = np.asarray(function(**part))
            if out is None:
                out = np.zeros((*segment_ids.shape, *result.shape[2:]))
            out[b, segment] = result[0]
    if out is None:
        raise ValueError("segment_ids: expected at least one token that is not padding, got only zeros")
    return out


def _row(subject: Subject, check: Any, case: str, error: float, tolerance: float) -> Row:
    mixer = subject.mixer
    return Row(mixer=mixer.name, option=mixer.option, check=check, case=case, error=error, tolerance=tolerance)
