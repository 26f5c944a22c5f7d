"""Outputs must not depend on later tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxmix.verify.options import EXACT
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Form, Subject

POSITIONS = 8


def causality(subject: Subject) -> Iterator[Row]:
    """Every form: replace all tokens behind a position, compare the outputs up to it."""
    for form in subject.forms:
        error, moved = _worst(subject, form)
        yield Row(
            mixer=subject.mixer.name,
            option=subject.mixer.option,
            check="causality",
            case=f"{form.label}: outputs up to t when the tokens behind t change",
            error=error if moved else float("inf"),
            tolerance=EXACT,
            note="" if moved else "changing the tokens changed no output at all, so nothing was tested",
        )


def _worst(subject: Subject, form: Form) -> tuple[float, bool]:
    """Largest error over the positions, and whether the changed tokens changed anything behind them."""
    length = subject.options.length
    positions = np.unique(np.linspace(0, length - 2, min(POSITIONS, length - 1)).astype(int))
    before, other = subject.inputs(), subject.inputs(stream=1)
    run = subject.compiled(form)
    reference = np.asarray(run(before)[0])
    errors, moved = [], False
    for t in positions:
        changed = {name: x.copy() for name, x in before.items()}
        for name in subject.per_token(before):
            changed[name][:, t + 1 :] = other[name][:, t + 1 :]
        out = np.asarray(run(changed)[0])
        errors.append(relative_error(out[:, : t + 1], reference[:, : t + 1]))
        moved |= not np.array_equal(out[:, t + 1 :], reference[:, t + 1 :])
    return max(errors), moved
