"""The operators of the mixers whose inputs are not q, k, v and log_decay alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.operators import DeltaSummary, DiagonalSummary, LinearSummary, TransitionSummary
from jaxmix.verify.explicit.hippo import transition
from jaxmix.verify.explicit.modes import as_complex, discrete_modes
from jaxmix.verify.mixer import OperatorUnderTest


def delta_operator() -> OperatorUnderTest:
    """`DeltaSummary` of the delta rules, its W the state S."""

    def token_summaries(q: Any, k: Any, v: Any, beta: Any, log_decay: Any = None) -> Any:
        q, k, v = (_spread(x, beta.shape[2]) for x in (q, k, v))
        return jax.jit(DeltaSummary.token_summary)(q, k, v, log_decay, beta)

    def identity(k: Any, v: Any, beta: Any, **others: Any) -> Any:
        return _identity(DeltaSummary, k.shape[0], beta.shape[2], k.shape[-1], v.shape[-1])

    def read(summary: Any, q: Any, beta: Any, **others: Any) -> Any:
        stored, _ = jax.jit(DeltaSummary.read)(summary, _spread(q, beta.shape[2])[:, -1])
        return q.shape[-1] ** -0.5 * np.asarray(stored)

    return OperatorUnderTest(
        name=DeltaSummary.__name__,
        token_summaries=token_summaries,
        combine=DeltaSummary.combine,
        identity=identity,
        states=lambda summary, state: {"S": (summary.W, state.S)},
        read=read,
    )


def ssd_operator() -> OperatorUnderTest:
    """`LinearSummary` of keys B, values dt x and log decays dt A."""

    def token_summaries(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None) -> Any:
        readouts, maps = (_spread(y, x.shape[2]) for y in (C, B))
        return jax.jit(LinearSummary.token_summary)(readouts, maps, dt[..., None] * x, dt * A)

    def identity(x: Any, B: Any, **others: Any) -> Any:
        return _identity(LinearSummary, x.shape[0], x.shape[2], B.shape[-1], x.shape[-1])

    def read(summary: Any, x: Any, C: Any, D: Any = None, **others: Any) -> Any:
        y, _ = jax.jit(LinearSummary.read)(summary, _spread(C, x.shape[2])[:, -1])
        return np.asarray(y) + (0.0 if D is None else D[:, None] * x[:, -1])

    return OperatorUnderTest(
        name=LinearSummary.__name__,
        token_summaries=token_summaries,
        combine=LinearSummary.combine,
        identity=identity,
        states=lambda summary, state: {"P": (summary.P, state.P)},
        read=read,
    )


def s4d_operator(discretization: str) -> OperatorUnderTest:
    """`DiagonalSummary` of inputs x."""

    def read(summary: Any, x: Any, C: Any, D: Any = None, **others: Any) -> Any:
        states = summary.X[:, :, 0] + 1j * summary.X[:, :, 1]
        y = np.einsum("hm,bhme->bhe", as_complex(C), states).real
        return y + (0.0 if D is None else D[:, None] * x[:, -1])

    return OperatorUnderTest(
        name=DiagonalSummary.__name__,
        token_summaries=lambda x, A, delta, **others: _diagonal_tokens(x, A, delta, discretization),
        combine=DiagonalSummary.combine,
        identity=lambda x, A, **others: _identity(DiagonalSummary, len(x), len(A), A.shape[-1], x.shape[-1]),
        states=lambda summary, state: {"X": (summary.X, state.X)},
        read=read,
    )


def interdomain_operator(discretization: str) -> OperatorUnderTest:
    """`DiagonalSummary` of keys, values and ones side by side, as they are in the state."""

    def signals(k: Any, v: Any, A: Any) -> Any:
        return np.concatenate([_spread(x, len(A)) for x in (k, v, np.ones_like(v[..., :1]))], axis=-1)

    def identity(k: Any, v: Any, A: Any, **others: Any) -> Any:
        return _identity(DiagonalSummary, len(k), len(A), A.shape[-1], k.shape[-1] + v.shape[-1] + 1)

    def states(summary: Any, state: Any) -> dict[str, tuple[Any, Any]]:
        size = state.Xk.shape[-1]
        return {
            "Xk": (summary.X[..., :size], state.Xk),
            "Xv": (summary.X[..., size:-1], state.Xv),
            "X1": (summary.X[..., -1], state.X1),
        }

    return OperatorUnderTest(
        name=DiagonalSummary.__name__,
        token_summaries=lambda k, v, A, delta, **others: _diagonal_tokens(signals(k, v, A), A, delta, discretization),
        combine=DiagonalSummary.combine,
        identity=identity,
        states=states,
    )


def ideal_operator(modes: int, basis: str, window: float | None, discretization: str) -> OperatorUnderTest:
    """`TransitionSummary` of keys, values and ones, its transitions those of the explicit sums."""

    def token_summaries(q: Any, k: Any, v: Any) -> Any:
        steps = [transition(t, modes, basis, window, discretization) for t in range(1, k.shape[1] + 1)]
        phi, b = (np.stack(x)[None, :, None] for x in zip(*steps, strict=True))
        phi, b = (np.broadcast_to(x, (*k.shape[:3], *x.shape[3:])) for x in (phi, b))
        return jax.jit(TransitionSummary.token_summary)(k, v, phi, b)

    def identity(k: Any, v: Any, **others: Any) -> Any:
        return _identity(TransitionSummary, k.shape[0], k.shape[2], modes, k.shape[-1], v.shape[-1])

    def states(summary: Any, state: Any) -> dict[str, tuple[Any, Any]]:
        size = state.U.shape[-1]
        return {
            "U": (summary.X[..., :size], state.U),
            "Gamma": (summary.X[..., size:-1], state.Gamma),
            "eta": (summary.X[..., -1], state.eta),
        }

    return OperatorUnderTest(
        name=TransitionSummary.__name__,
        token_summaries=token_summaries,
        combine=TransitionSummary.combine,
        identity=identity,
        states=states,
    )


def _diagonal_tokens(z: Any, A: Any, delta: Any, discretization: str) -> Any:
    lam, gain = (np.stack([x.real, x.imag], axis=1) for x in discrete_modes(A, delta, discretization))
    return jax.jit(DiagonalSummary.token_summary)(z, lam, gain)


def _identity(kind: Any, batch: int, heads: int, *sizes: int) -> Any:
    return jax.jit(lambda: kind.identity((batch, heads), *sizes, jnp.float64))()


def _spread(x: Any, heads: int) -> Any:
    return np.repeat(x, heads // x.shape[2], axis=2)
