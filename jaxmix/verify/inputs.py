"""Random inputs of every recurrent mixer, as numpy float64."""

from __future__ import annotations

from typing import Literal

import numpy as np

from jaxmix.verify.options import VerifyOptions

Gate = Literal["none", "per head", "per token"]
MODES = 3


def mixer_inputs(
    rng: np.random.Generator, options: VerifyOptions, *, gate: Gate = "per token"
) -> dict[str, np.ndarray]:
    """Random q [B, T, H, D], k [B, T, G, D], v [B, T, G, E] and log_decay as `gate` says.

    q and k have mean 1 and standard deviation 1/2, so that the denominators of normalised mixers stay away from 0.

    Args:
        rng: Source of the numbers.
        options: Shapes.
        gate: See `log_decays`.
    """
    size = options.key_size
    inputs = {
        "q": 1.0 + 0.5 * _normal(rng, options, options.heads, size),
        "k": 1.0 + 0.5 * _normal(rng, options, options.kv_heads, size),
        "v": _normal(rng, options, options.kv_heads, options.value_size),
    }
    return inputs | log_decays(rng, options, gate)


def log_decays(rng: np.random.Generator, options: VerifyOptions, gate: Gate) -> dict[str, np.ndarray]:
    """No log_decay, [H] or [B, T, H], with values in [-1, -0.02].

    With a token axis and B > 1, the last row also has one step of -80 and one of 0.
    """
    if gate == "none":
        return {}
    if gate == "per head":
        return {"log_decay": -rng.uniform(0.02, 1.0, options.heads)}
    log_decay = -rng.uniform(0.02, 1.0, (options.batch, options.length, options.heads))
    if options.batch > 1:
        log_decay[-1, options.length // 2] = -80.0
        log_decay[-1, options.length // 3] = 0.0
    return {"log_decay": log_decay}


def delta_inputs(
    rng: np.random.Generator, options: VerifyOptions, *, gate: Gate = "per token"
) -> dict[str, np.ndarray]:
    """Random q, k [B, T, G, D] with keys of length one, v [B, T, H, E], and beta [B, T, H] in [0.1, 1.9].

    `gate` is that of `log_decays`.
    """
    keys = _normal(rng, options, options.kv_heads, options.key_size)
    inputs = {
        "q": _normal(rng, options, options.kv_heads, options.key_size),
        "k": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        "v": _normal(rng, options, options.heads, options.value_size),
        "beta": rng.uniform(0.1, 1.9, (options.batch, options.length, options.heads)),
    }
    return inputs | log_decays(rng, options, gate)


def ssd_inputs(rng: np.random.Generator, options: VerifyOptions, *, direct: bool = True) -> dict[str, np.ndarray]:
    """Random x [B, T, H, E], dt in [0.01, 0.5], A [H] in [-3, -1], B and C [B, T, G, D], and D [H] if `direct`."""
    inputs = {
        "x": _normal(rng, options, options.heads, options.value_size),
        "dt": rng.uniform(0.01, 0.5, (options.batch, options.length, options.heads)),
        "A": rng.uniform(-3.0, -1.0, options.heads),
        "B": _normal(rng, options, options.kv_heads, options.key_size),
        "C": _normal(rng, options, options.kv_heads, options.key_size),
    }
    return inputs | ({"D": rng.standard_normal(options.heads)} if direct else {})


def s4d_inputs(rng: np.random.Generator, options: VerifyOptions, *, direct: bool = True) -> dict[str, np.ndarray]:
    """Random x [B, T, H, E], modes with C [H, 2, M], and D [H] if `direct`."""
    inputs = {"x": _normal(rng, options, options.heads, options.value_size), **_modes(rng, options.heads, fastest=3.0)}
    inputs["C"] = rng.standard_normal((options.heads, 2, MODES))
    return inputs | ({"D": rng.standard_normal(options.heads)} if direct else {})


def feature_inputs(rng: np.random.Generator, options: VerifyOptions) -> dict[str, np.ndarray]:
    """v of `mixer_inputs`, q and k positive, as features of a kernel are."""
    inputs = mixer_inputs(rng, options, gate="none")
    return inputs | {name: rng.uniform(0.5, 1.5, inputs[name].shape) for name in ("q", "k")}


def interdomain_inputs(
    rng: np.random.Generator, options: VerifyOptions, *, diagonal: bool = False
) -> dict[str, np.ndarray]:
    """q, k, v of `feature_inputs` and modes: for every query head with a full C, or for every key head with a diagonal.

    Modes turn slowly and C is the identity and noise, so that denominators stay away from 0.
    """
    inputs = feature_inputs(rng, options)
    heads = options.kv_heads if diagonal else options.heads
    size = (MODES,) if diagonal else (MODES, MODES)
    mixing = 0.1 * rng.standard_normal((heads, 2, *size))
    mixing[:, 0] += 1.0 if diagonal else np.eye(MODES)
    return inputs | _modes(rng, heads, fastest=0.25) | {"C": mixing}


def _modes(rng: np.random.Generator, heads: int, *, fastest: float) -> dict[str, np.ndarray]:
    """Poles A [heads, 2, M], real parts in [-1, -0.5] and imaginary ones up to `fastest`, and delta in [0.05, 0.5]."""
    poles = np.stack([-rng.uniform(0.5, 1.0, (heads, MODES)), fastest * rng.uniform(0.2, 1.0, (heads, MODES))], axis=1)
    return {"A": poles, "delta": rng.uniform(0.05, 0.5, heads)}


def _normal(rng: np.random.Generator, options: VerifyOptions, heads: int, size: int) -> np.ndarray:
    return rng.standard_normal((options.batch, options.length, heads, size))
