"""Definitions and inputs of the mixers with complex diagonal modes, for their tests.

Parameters of the modes are drawn flat, [H, 2 M] for pairs [H, 2, M]: arrays of rank 3 and more run over tokens in the
shared suite. `unflattened` gives them their shapes back.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.mixers.s4d import s4d_poles
from tests.contract.errors import Errors, in_words

MODES = 3
PARAMETERS = frozenset({"A", "delta", "C"})


def draw_modes(rng, heads: int, mixing: int) -> dict[str, np.ndarray]:
    """Poles near those of S4D-Inv, steps between 1e-2 and 0.5, and C with `mixing` complex numbers per head."""
    poles = np.stack([s4d_poles(MODES)] * heads) * rng.uniform(0.8, 1.2, (heads, 2, MODES))
    return {
        "A": poles.reshape(heads, -1),
        "delta": np.exp(rng.uniform(np.log(1e-2), np.log(0.5), heads)),
        "C": rng.normal(size=(heads, 2 * mixing)),
    }


def unflattened(function):
    """`function` for flat A and C; C has M or M * M complex numbers per head."""

    @functools.wraps(function)
    def call(*arrays, A, C, **options):
        axes = (2, MODES, MODES) if C.shape[-1] == 2 * MODES**2 else (2, MODES)
        return function(*arrays, A=A.reshape(*A.shape[:-1], 2, -1), C=C.reshape(*C.shape[:-1], *axes), **options)

    return call


class ModalErrors(Errors):
    """Misuse of the parameters, in the shapes that the mixer itself takes; `function` is the mixer without wrapper."""

    def test_an_extra_axis(self):
        inputs = self.correct_call()
        for name in inputs.keys() - PARAMETERS:
            x = inputs[name]
            self.refuse(inputs | {name: x[None]}, rf"\b{name}\b", in_words(x[None].shape))

    def test_parameters_of_another_shape(self):
        inputs = self.correct_call()
        modes = {name: inputs.pop(name) for name in PARAMETERS}
        heads = len(modes["A"])
        modes["A"] = modes["A"].reshape(heads, 2, MODES)
        modes["C"] = modes["C"].reshape(heads, 2, *((MODES, MODES) if modes["C"].shape[1] > 2 * MODES else (MODES,)))
        for name, x in modes.items():
            for wrong in (x[None], x[:1], x[..., :-1] if x.ndim > 1 else x[:0], jnp.concatenate([x, x], axis=-1)):
                names = "|".join(PARAMETERS)
                with pytest.raises(ValueError, match=rf"^({names}): expected .*, got .*\d"):
                    self.function(**inputs, **modes | {name: wrong})


def complex_modes(A, delta, C, discretization):
    """Lam [H, M], Bbar [H, M] and C as complex numbers."""
    A = as_complex(A.reshape(len(A), 2, -1))
    C = as_complex(C.reshape(len(C), 2, *((MODES, MODES) if C.shape[-1] == 2 * MODES**2 else (MODES,))))
    delta = np.asarray(delta)[:, None]
    if discretization == "zoh":
        lam = np.exp(delta * A)
        return lam, (lam - 1) / A, C
    return (1 + delta * A / 2) / (1 - delta * A / 2), delta / (1 - delta * A / 2), C


def as_complex(pairs):
    """Pairs [H, 2, ...] as complex numbers [H, ...]."""
    return pairs[:, 0] + 1j * pairs[:, 1]


def modal_sums(lam, gain, z):
    """X_t = sum_{j <= t} Bbar Lam^(t - j) z_j of one head and document, [T, M, F]: every sum by itself."""
    steps = np.arange(len(z))
    return np.stack(
        [np.einsum("m,jm,jf->mf", gain, lam[None, :] ** (t - steps[: t + 1, None]), z[: t + 1]) for t in steps]
    )


def documents(segment_ids):
    """Yields (row, token positions) of every document, padding left out."""
    for row, names in enumerate(np.asarray(segment_ids)):
        real = np.flatnonzero(names)
        borders = np.flatnonzero(np.diff(names[real])) + 1
        for tokens in filter(len, np.split(real, borders)):
            yield row, tokens
