"""What a verification found: rows with an error, a tolerance and a verdict."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

CheckName = Literal["explicit sum", "forms", "operator", "gradients", "split", "packed", "causality", "errata"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        mixer: Name of the mixer.
        option: The option of the mixer that was checked, such as "masked" or "normalised".
        check: Kind of check.
        case: What exactly was compared, in words.
        error: Largest relative error; infinite where a value was not finite or a shape differed.
        tolerance: Bound on the error.
        expect: "below" when the error must not exceed the tolerance; "above" when it must exceed it (a fault of the
            paper that has to show).
        note: What happened, in words, where the number does not say it.
    """

    mixer: str
    option: str
    check: CheckName
    case: str
    error: float
    tolerance: float
    expect: Literal["below", "above"] = "below"
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error lies on the expected side of the tolerance."""
        if self.expect == "above":
            return math.isfinite(self.error) and self.error > self.tolerance
        return self.error <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values; an infinite error becomes None, since JSON has no infinity."""
        values = dataclasses.asdict(self)
        values["error"] = self.error if math.isfinite(self.error) else None
        return {**values, "passed": self.passed}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All rows of a run.

    Attributes:
        rows: The comparisons, in the order in which they were made.
        options: The options of the run, as plain values.
        seconds: Wall-clock time of the run, compilation included.
        environment: Versions and device.
    """

    rows: tuple[Row, ...]
    options: Mapping[str, Any]
    seconds: float
    environment: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether there is at least one row and every row passed."""
        return bool(self.rows) and not self.failures

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that failed."""
        return tuple(row for row in self.rows if not row.passed)

    @property
    def summary(self) -> str:
        """One line: how many comparisons passed, in how much time, on what."""
        passed = len(self.rows) - len(self.failures)
        verdict = "all passed" if self.ok else f"{len(self.failures)} FAILED" if self.rows else "nothing was checked"
        where = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        return f"{passed} of {len(self.rows)} comparisons passed in {self.seconds:.1f} s: {verdict} ({where})"

    def to_json(self) -> str:
        """The report as JSON text: ok, summary, counts, options, environment, seconds, rows."""
        document = {
            "ok": self.ok,
            "summary": self.summary,
            "passed": len(self.rows) - len(self.failures),
            "failed": len(self.failures),
            "seconds": round(self.seconds, 3),
            "options": dict(self.options),
            "environment": dict(self.environment),
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(document, indent=2, allow_nan=False)


def environment() -> dict[str, str]:
    """Versions and device of this process."""
    return {"jax": jax.__version__, "numpy": np.__version__, "device": jax.devices()[0].device_kind}


def relative_error(actual: Any, reference: Any) -> float:
    """max |actual - reference| / max |reference|, the largest over the leaves of two pytrees of one structure.

    Args:
        actual: Array or pytree of arrays.
        reference: The same structure and shapes.

    Returns:
        The error; infinity where the structure or a shape differs, a value is not finite, or the reference is all zero
        and `actual` is not.
    """
    left, left_tree = jax.tree.flatten(actual)
    right, right_tree = jax.tree.flatten(reference)
    if left_tree != right_tree:
        return math.inf
    return max((_leaf_error(np.asarray(a), np.asarray(b)) for a, b in zip(left, right, strict=True)), default=0.0)


def _leaf_error(actual: np.ndarray, reference: np.ndarray) -> float:
    if actual.shape != reference.shape:
        return math.inf
    actual, reference = actual.astype(np.float64), reference.astype(np.float64)
    if not (np.isfinite(actual).all() and np.isfinite(reference).all()):
        return math.inf
    difference = float(np.abs(actual - reference).max(initial=0.0))
    scale = float(np.abs(reference).max(initial=0.0))
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0.0 else math.inf
