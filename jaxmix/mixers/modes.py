"""Diagonal state-space modes: continuous poles A and a step size Delta made into decays, phases and input gains.

Powers of Lam = exp(Delta A) are taken of its logarithm. Its phase is kept in turns at twice the precision of the dtype,
because Im A of S4D-Inv reaches 1283 for 64 modes: an ordinary float32 product Delta Im A of 128 radians is off by 4e-6,
and its power of 256 by a thousandth.
"""

import dataclasses
import decimal
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.arrays import GATE_DTYPES, Array, Dtype, check_array, check_choice, fail, is_concrete

Discretization = Literal["zoh", "bilinear"]
DISCRETIZATIONS = ("zoh", "bilinear")
_PER_TURN = decimal.Decimal("0.15915494309189533576888376337251436203445964574046")
_COARSE = 4096
"""Multiples of 1/4096 of a turn times a step count up to 4096 are exact in float32."""


@dataclasses.dataclass(frozen=True)
class Modes:
    """Lam = exp(log_modulus + 2 pi i (turns + low)) of H heads with M modes, and what an input is multiplied with.

    Attributes:
        log_modulus: [H, M], at most 0.
        turns: phase of one step in turns, within half a turn, [H, M].
        low: what rounding took from `turns`, [H, M].
        gain: Bbar as pairs, [H, 2, M].
    """

    log_modulus: Array
    turns: Array
    low: Array
    gain: Array

    def powers(self, steps: Array) -> Array:
        """Lam^steps as pairs, [..., H, 2, M], for whole steps >= 0 of any shape [...]."""
        steps = steps[..., None, None].astype(self.turns.dtype)
        coarse = jnp.round(self.turns * _COARSE) / _COARSE
        fine = (self.turns - coarse) + self.low
        whole = steps * coarse
        angle = 2 * math.pi * ((whole - jnp.round(whole)) + steps * fine)
        modulus = jnp.exp(steps * self.log_modulus)
        return jnp.stack([modulus * jnp.cos(angle), modulus * jnp.sin(angle)], axis=-2)


def discretize(A: Array, delta: Array, method: Discretization) -> Modes:
    """Modes of poles A [H, 2, M] (pairs) with steps delta [H], for inputs that are constant on a step or by trapezoids.

    "zoh": Lam = exp(Delta A), Bbar = (Lam - 1) / A. "bilinear": Lam = (1 + Delta A / 2) / (1 - Delta A / 2),
    Bbar = Delta / (1 - Delta A / 2).

    Source: Gu et al., "On the Parameterization and Initialization of Diagonal State Space Models", arXiv 2206.11893.
    """
    re, im = A[:, 0], A[:, 1]
    delta = delta[:, None]
    if method == "zoh":
        log_modulus, (turns, low) = delta * re, _turns(delta, im)
        angle = 2 * math.pi * (turns + low)
        growth = jnp.stack(
            [
                jnp.expm1(log_modulus) * jnp.cos(angle) - 2 * jnp.sin(angle / 2) ** 2,
                jnp.exp(log_modulus) * jnp.sin(angle),
            ],
            axis=1,
        )
        gain = _divide(growth, A)
    else:
        x, y = delta * re / 2, delta * im / 2
        log_modulus = jnp.log1p(4 * x / ((1 - x) ** 2 + y**2)) / 2
        turns = (jnp.arctan2(y, 1 + x) + jnp.arctan2(y, 1 - x)) / (2 * math.pi)
        low = jnp.zeros_like(turns)
        gain = _divide(jnp.stack([delta + 0 * x, 0 * x], axis=1), jnp.stack([1 - x, -y], axis=1))
    return Modes(log_modulus, turns, low, gain)


def check_modes(A: Any, delta: Any, discretization: Any) -> tuple[int, int]:
    """Checks the parameters of the modes against each other.

    Returns:
        Their number of heads and of modes.

    Raises:
        ValueError: for a wrong shape, dtype or discretization, and for poles that grow or steps that are not positive,
            where their values are known.
    """
    check_choice("discretization", discretization, DISCRETIZATIONS)
    check_array("A", A, "[H, 2, M] (real parts, imaginary parts)", (None, 2, None), GATE_DTYPES)
    check_array("delta", delta, "[H]", (A.shape[0],), GATE_DTYPES)
    if A.shape[0] == 0 or A.shape[2] == 0:
        fail("A", "at least one head and one mode", f"shape {list(A.shape)}")
    if is_concrete(A):
        real = np.asarray(A)[:, 0]
        if not (real < 0).all():
            fail("A", "real parts below 0 (a decay)", real[~(real < 0)].flat[0])
    if is_concrete(delta):
        steps = np.asarray(delta)
        if not (steps > 0).all():
            fail("delta", "step sizes above 0", steps[~(steps > 0)].flat[0])
    return A.shape[0], A.shape[2]


def _turns(delta: Array, im: Array) -> tuple[Array, Array]:
    """delta im / (2 pi) less whole turns, as a rounded number and its rounding error."""
    radians, missed = _exact_product(delta, im)
    high, low = _per_turn(radians.dtype)
    turns, error = _exact_product(radians, jnp.asarray(high, radians.dtype))
    error = error + jax.lax.stop_gradient(radians * low + missed * high)
    return turns - jax.lax.stop_gradient(jnp.round(turns)), error


def _per_turn(dtype: Dtype) -> tuple[float, float]:
    high = np.asarray(float(_PER_TURN), dtype).item()
    return high, float(_PER_TURN - decimal.Decimal(high))


def _exact_product(a: Array, b: Array) -> tuple[Array, Array]:
    """a b as a rounded product and its rounding error (Dekker), which has no derivative."""
    product = a * b
    bits = 11 if product.dtype == jnp.float32 else 25
    exponent = jnp.finfo(product.dtype).nexp

    def halves(x: Array) -> tuple[Array, Array]:
        high = jax.lax.reduce_precision(x, exponent_bits=exponent, mantissa_bits=bits)
        return high, x - high

    (a_high, a_low), (b_high, b_low) = halves(a), halves(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, jax.lax.stop_gradient(error)


def _divide(a: Array, b: Array) -> Array:
    """a / b, both pairs [H, 2, M]."""
    size = b[:, 0] ** 2 + b[:, 1] ** 2
    re = (a[:, 0] * b[:, 0] + a[:, 1] * b[:, 1]) / size
    im = (a[:, 1] * b[:, 0] - a[:, 0] * b[:, 1]) / size
    return jnp.stack([re, im], axis=1)
