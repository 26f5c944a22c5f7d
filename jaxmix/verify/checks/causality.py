"""Outputs must not depend on later tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from jaxmix.verify.options import EXACT
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Form, Subject

POSITIONS = 8


def causality(subject: Subject) -> Iterator[Row]:
    """Every form: replace all tokens behind a position, compare the outputs up to it."""
    for form in subject.forms:
        for option, (error, moved) in _worst(subject, form).items():
            case = f"{form.label}: outputs up to t when the tokens behind t change"
            if not moved:
                case, error = f"{form.label}: changing tokens changed no output at all, nothing was tested", math.inf
            yield subject.row("causality", case, error, EXACT, option=option)


def _worst(subject: Subject, form: Form) -> dict[str, tuple[float, bool]]:
    """By option: the largest error over the positions, and whether the changed tokens changed anything behind them."""
    length = subject.options.length
    positions = np.unique(np.linspace(0, length - 2, min(POSITIONS, length - 1)).astype(int))
    before, other = subject.inputs(), subject.inputs(stream=1)
    reference = subject.by_option(subject.call(form, before)[0])
    worst: dict[str, tuple[float, bool]] = dict.fromkeys(reference, (0.0, False))
    for t in positions:
        later = np.broadcast_to(np.arange(length) > t, (subject.options.batch, length))
        changed = subject.by_option(subject.call(form, subject.mix(later, before, other))[0])
        for option, (error, moved) in worst.items():
            out, expected = changed[option], reference[option]
            error = max(error, relative_error(out[:, : t + 1], expected[:, : t + 1]))
            worst[option] = error, moved or not np.array_equal(out[:, t + 1 :], expected[:, t + 1 :])
    return worst
