"""Every form against the float64 serial run, and against the explicit sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmix.verify.mixer import Inputs
from jaxmix.verify.options import EXACT, TOLERANCE
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Form, Subject, segment_layout

EXPLICIT_TOKENS = 32


def forms(subject: Subject) -> Iterator[Row]:
    """Outputs and final states: the ways to call the mixer, and the last of them with segments.

    Unless `options.full`, the last way alone runs in every form, and the others in the serial one (if there is an
    explicit sum to compare it with).
    """
    last = list(subject.mixer.input_makers)[-1]
    for label in subject.mixer.input_makers:
        if label == last or subject.options.full:
            chosen = subject.forms
        elif subject.mixer.brute_force is None:
            chosen = subject.key_forms
        else:
            chosen = (subject.serial,)
        yield from _compare(subject, label, chosen)
    if subject.mixer.segments:
        yield from _compare(subject, last, subject.key_forms, segment_layout(subject.options))


def _compare(
    subject: Subject, label: str, chosen: Sequence[Form], segment_ids: np.ndarray | None = None
) -> Iterator[Row]:
    """Rows of one way to call the mixer."""
    dtype = subject.options.dtype
    rounded = subject.cast(subject.inputs(label), dtype)
    inputs = {name: np.asarray(x, np.float64) for name, x in rounded.items()}
    where = ", ".join([label] * bool(label) + ["segments"] * (segment_ids is not None))
    where = f"{where}: " if where else ""
    run = _runner(subject, label)
    reference, state = run(subject.serial, inputs, segment_ids)
    explicit = _explicit(subject, inputs, segment_ids)
    yield from _against_explicit(subject, f"{where}serial, float64", reference, explicit, EXACT)
    tolerance = TOLERANCE[dtype]
    for form in chosen:
        if dtype == "float64" and form == subject.serial:
            continue
        if dtype == "float64":
            out, final = run(form, inputs, segment_ids)
        else:
            with jax.enable_x64(False):
                out, final = subject.compiled(form)(subject.cast(inputs, dtype), segment_ids)
        case = f"{where}{form.label}, {dtype}"
        for option, x in subject.by_option(out).items():
            error = relative_error(x, subject.by_option(reference)[option])
            yield subject.row("forms", f"{case}: outputs", error, tolerance, option=option)
        yield subject.row("forms", f"{case}: final state", relative_error(final, state), tolerance)
        yield from _against_explicit(subject, case, out, explicit, tolerance)


def _runner(subject: Subject, label: str) -> Callable[[Form, Inputs, Any], tuple[Any, Any]]:
    """The last way to call the mixer shares its compiled functions with the other checks."""
    if label == list(subject.mixer.input_makers)[-1]:
        return subject.call
    return lambda form, inputs, segment_ids: subject.compiled(form)(dict(inputs), segment_ids)


def _against_explicit(subject: Subject, case: str, out: Any, explicit: Any, tolerance: float) -> Iterator[Row]:
    if explicit is None:
        return
    for option, x in subject.by_option(explicit).items():
        error = relative_error(subject.by_option(out)[option][:, :EXPLICIT_TOKENS], x)
        yield subject.row("explicit sum", case, error, tolerance, option=option)


def _explicit(subject: Subject, inputs: Inputs, segment_ids: np.ndarray | None) -> Any:
    """The brute force on the first tokens, segment by segment."""
    if subject.mixer.brute_force is None:
        return None
    tokens = subject.per_token(inputs)
    head = {name: x[:, :EXPLICIT_TOKENS] if name in tokens else x for name, x in inputs.items()}
    if segment_ids is None:
        return subject.mixer.brute_force(**head)
    return by_segment(subject.mixer.brute_force, head, tokens, segment_ids[:, :EXPLICIT_TOKENS])


def by_segment(function: Callable[..., Any], inputs: Inputs, per_token: Sequence[str], segment_ids: np.ndarray) -> Any:
    """Call `function` on every segment of every row by itself and put the outputs back; padding gives 0.

    Args:
        function: Called with the inputs, batch 1, of one segment; returns out [1, tokens, ...] or a tuple of such.
        inputs: Arrays by name.
        per_token: Names of the inputs laid out [B, T, ...].
        segment_ids: Int [B, T], 0 = padding. Padding does not end a segment; a change of the id does.

    Returns:
        Out [B, T, ...] or a tuple of such.

    Raises:
        ValueError: when there is nothing but padding.
    """
    out: Any = None
    for b, row in enumerate(segment_ids):
        filled = np.flatnonzero(row)
        borders = np.flatnonzero(np.diff(row[filled])) + 1
        for segment in np.split(filled, borders) if filled.size else []:
            part = {name: x[b : b + 1, segment] if name in per_token else x for name, x in inputs.items()}
            result = function(**part)
            if out is None:
                out = jax.tree.map(lambda x: np.zeros((*segment_ids.shape, *x.shape[2:])), result)
            for whole, piece in zip(jax.tree.leaves(out), jax.tree.leaves(result), strict=True):
                whole[b, segment] = piece[0]
    if out is None:
        raise ValueError("segment_ids: expected at least one token that is not padding, got only zeros")
    return out
