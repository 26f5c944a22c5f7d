"""Choices that the interdomain attention paper leaves open and that do not work, shown in numbers beside ours.

1. Bbar = 1 for S4D modes: states grow like 1 / delta and outputs like its square; with delta in [1e-3, 1e-1], where
   training starts, outputs are 1e2 to 1e6 times too large. Ours is zero-order hold.
2. HiPPO-LegS by the bilinear rule with a step of 1 / t: no isometry, so that a complete basis does not give kernel
   regression back. Ours is the same rule in log time.
3. HiPPO-LegS by zero-order hold: exact for steps, which polynomials approximate slowly.

Source: Kiyohara et al., "Interdomain Attention: Beyond Token-Level Key-Value Memory", arXiv 2605.24330.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jaxmix.verify import explicit
from jaxmix.verify.explicit.hippo import generator, impulses
from jaxmix.verify.explicit.modes import as_complex, discrete_modes
from jaxmix.verify.report import Row, relative_error

Float64 = NDArray[np.float64]

MODES, DELTA, FINER = 8, 0.03, 4
TOKENS, BASIS = 8, 16
EXACT, COMPLETE, VISIBLE, HUGE = 1e-12, 1e-8, 1e-2, 1e2


def interdomain_rows(q: Float64, k: Float64, v: Float64) -> list[Row]:
    """The rows for q, k [T, D] and v [T, E] of one head."""
    return [*_gain_rows(q, k, v), *_basis_rows()]


def _gain_rows(q: Float64, k: Float64, v: Float64) -> list[Row]:
    ours, unit = (modal_attention(q, k, v, DELTA, unit_gain=x) for x in (False, True))
    long_q, long_k, long_v = (np.repeat(x, FINER, axis=0) for x in (q, k, v))
    held, unit_held = (
        modal_attention(long_q, long_k, long_v, DELTA / FINER, unit_gain=x)[FINER - 1 :: FINER] for x in (False, True)
    )
    name = "interdomain_attention"
    return [
        _row(
            name,
            f"Bbar = 1, delta = {DELTA}: outputs against those of zero-order hold",
            relative_error(unit, ours),
            HUGE,
            fault="with Bbar = 1 outputs are about 1 / delta^2 times too large, as documented",
        ),
        _row(
            name,
            f"Bbar = 1: outputs against those of every token held for {FINER} steps of delta / {FINER}",
            relative_error(unit_held, unit),
            VISIBLE,
            fault="with Bbar = 1 outputs depend on how time is cut, as documented",
        ),
        _row(
            name,
            f"zero-order hold: outputs against those of every token held for {FINER} steps of delta / {FINER}",
            relative_error(held, ours),
            EXACT,
        ),
    ]


def _basis_rows() -> list[Row]:
    def error(w: Float64) -> float:
        return relative_error(w.T @ w, np.eye(TOKENS))

    name, sizes = "interdomain_ideal", f"legs, {TOKENS} tokens, {BASIS} modes"
    ours, hold = (impulses(TOKENS, BASIS, "legs", None, method)[-1] for method in ("bilinear", "zoh"))
    return [
        _row(
            name,
            f"bilinear rule with step 1 / t, {sizes}: kernel over time against the identity",
            error(step_per_token(TOKENS, BASIS)),
            VISIBLE,
            fault="the usual bilinear rule does not give kernel regression back, as documented",
        ),
        _row(
            name,
            f"zero-order hold, {sizes}: kernel over time against the identity",
            error(hold),
            VISIBLE,
            fault="zero-order hold is not close to kernel regression, as documented",
        ),
        _row(name, f"bilinear rule in log time, {sizes}: kernel over time against the identity", error(ours), COMPLETE),
    ]


def modal_attention(q: Float64, k: Float64, v: Float64, delta: float, *, unit_gain: bool) -> Float64:
    """Interdomain attention [T, E] of one head with the poles of S4D-Inv and C = 1; `unit_gain` for Bbar = 1."""
    n = np.arange(MODES)
    poles = np.stack([np.full(MODES, -0.5), MODES / np.pi * (MODES / (2 * n + 1) - 1)])[None]
    step = np.array([delta])
    mixing = np.stack([np.ones(MODES), np.zeros(MODES)])[None]
    if unit_gain:
        # The state is linear in Bbar, so that dividing C by it takes it away.
        quotient = as_complex(mixing) / discrete_modes(poles, step)[1]
        mixing = np.stack([quotient.real, quotient.imag], axis=1)
    q, k, v = (x[None, :, None] for x in (q, k, v))
    return explicit.interdomain_attention(q, k, v, poles, step, mixing)[0, :, 0]


def step_per_token(tokens: int, modes: int) -> Float64:
    """W [M, T] of c' = (-A c + B f) / t by the trapezoidal rule with steps of one token, orthonormal in tokens."""
    a, b = generator("legs", modes)
    w = np.zeros((modes, 0))
    for t in range(1, tokens + 1):
        left = np.eye(modes) + a / (2 * t)
        moved = np.linalg.solve(left, (np.eye(modes) - a / (2 * t)) @ w)
        w = np.concatenate([moved, np.linalg.solve(left, b / t)[:, None]], axis=1)
    return np.sqrt(tokens) * w


def _row(mixer: str, case: str, error: float, tolerance: float, *, fault: str = "") -> Row:
    return Row(
        mixer=mixer,
        option="other choices" if fault else "our choice",
        check="errata",
        case=case,
        error=error,
        tolerance=tolerance,
        expect="above" if fault else "below",
        note=fault,
    )
