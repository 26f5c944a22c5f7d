"""Error of `interdomain_ideal` against dense kernel attention, by number of modes and of random features.

python experiments/interdomain_kernel/run.py

Prints the tables, and writes them to table.md and the curves to plot.png beside this file. float64, deterministic.
"""

import functools
import platform
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from jaxmix.mixers.interdomain import (
    Hippo,
    gaussian_frequencies,
    interdomain_ideal,
    positive_softmax_features,
    random_fourier_features,
)

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
TOKENS, SIZE, DRAWS = 48, 8, 4
LENGTH_SCALE = 1.5
MODES = (4, 8, 16, 32, 48, 64, 80, 192)
STREAMS = ("independent tokens", "smooth stream")
FREQUENCIES = (16, 64, 256, 1024)
BASES = {
    "LegS bilinear": {},
    "LegS ZOH": {"discretization": "zoh"},
    "LegT bilinear": {"basis": "legt", "window": 2 * TOKENS},
    "LegT ZOH": {"basis": "legt", "window": 2 * TOKENS, "discretization": "zoh"},
}


def softmax_kernel(q, k):
    return np.exp(q @ k.T / SIZE**0.5)


def rbf_kernel(q, k):
    return np.exp(-((q[:, None] - k[None]) ** 2).sum(axis=-1) / (2 * LENGTH_SCALE**2))


SCALE = SIZE**-0.5
FEATURES = {
    "softmax, positive": (functools.partial(positive_softmax_features, scale=SCALE), softmax_kernel),
    "RBF, Fourier": (functools.partial(random_fourier_features, length_scale=LENGTH_SCALE), rbf_kernel),
}


def streams(smooth: bool) -> list[np.ndarray]:
    """q, k of variance 1/4 and v of variance one, [draws, T, size]: independent tokens, or slowly varying ones."""
    x = np.random.default_rng(0).normal(size=(3, DRAWS, TOKENS + 64, SIZE))
    x[:2] /= 2
    if smooth:
        lags = np.arange(-32, 33)
        weights = np.exp(-((lags / 8) ** 2) / 2)
        weights /= np.linalg.norm(weights)
        x = np.apply_along_axis(lambda row: np.convolve(row, weights, mode="same"), 2, x)
    return list(x[:, :, 32 : 32 + TOKENS])


def dense(kernel, q, k, v) -> np.ndarray:
    """Causal kernel attention of every draw."""
    weights = np.stack([np.tril(kernel(a, b)) for a, b in zip(q, k, strict=True)])
    return weights @ v / weights.sum(axis=-1, keepdims=True)


def error(out, expected) -> float:
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def interdomain(q, k, v, **options) -> np.ndarray:
    q, k, v = (jnp.asarray(x)[:, :, None] for x in (q, k, v))
    return np.asarray(interdomain_ideal(q, k, v, eps=1e-30, implementation="serial", **options)[0][:, :, 0])


def mapped(features, frequencies: int, *arrays) -> list[np.ndarray]:
    """The features of every array, with frequencies of its own for every draw."""
    keys = jax.random.split(jax.random.key(frequencies), DRAWS)
    w = jax.vmap(lambda key: gaussian_frequencies(key, frequencies, SIZE, dtype=jnp.float64))(keys)
    apply = jax.jit(jax.vmap(features))
    return [np.asarray(apply(jnp.asarray(x), w)) for x in arrays]


def by_modes() -> dict[str, list[float]]:
    """Error against attention with the same 16 positive features, so that only the basis is to blame."""
    features, _ = FEATURES["softmax, positive"]
    cases = []
    for smooth in (False, True):
        q, k, v = streams(smooth)
        cases.append((*mapped(features, 16, q, k), v))
    expected = [dense(lambda a, b: a @ b.T, *case) for case in cases]
    together = [np.concatenate(arrays) for arrays in zip(*cases, strict=True)]
    found = {}
    for name, options in BASES.items():
        outs = [np.split(interdomain(*together, modes=modes, **options), 2) for modes in MODES]
        for i, kind in enumerate(STREAMS):
            found[f"{name}, {kind}"] = [error(out[i], expected[i]) for out in outs]
    return found


def by_features(modes: int) -> dict[str, list[float]]:
    """Error against the kernel itself."""
    q, k, v = streams(False)
    found = {}
    for name, (features, kernel) in FEATURES.items():
        expected, errors = dense(kernel, q, k, v), []
        for frequencies in FREQUENCIES:
            q_mapped, k_mapped = mapped(features, frequencies, q, k)
            errors.append(error(interdomain(q_mapped, k_mapped, v, modes=modes), expected))
        found[name] = errors
    return found


def kappa_error(tokens: int, hippo: Hippo) -> float:
    """Largest entry of kappa_T - I at the last of `tokens`."""
    a, b = jax.device_get(jax.jit(jax.vmap(hippo.transition))(jnp.arange(1.0, tokens + 1)))
    w = np.zeros((hippo.modes, 0))
    for t in range(tokens):
        w = np.concatenate([a[t] @ w, b[t][:, None]], axis=1)
    return float(np.abs(w.T @ w - np.eye(tokens)).max())


SHARES = (1.0, 1.5, 1.75, 2.0)


def completeness(lengths: tuple[int, ...]) -> dict[str, list[float]]:
    """How far kappa_T is from the identity, and the smallest M that brings it within 1e-6, by bisection."""
    found = {}
    for share in SHARES:
        found[f"error of LegS bilinear, M = {share:g} T"] = [
            kappa_error(tokens, Hippo("legs", int(share * tokens), None, "bilinear")) for tokens in lengths
        ]
    for name, basis, windows in (("LegS bilinear", "legs", None), ("LegT bilinear, window 2 T", "legt", 2)):
        smallest = []
        for tokens in lengths:
            low, high = tokens, 2 * (windows or 1) * tokens + 2
            while high - low > 1:
                middle = (low + high) // 2
                hippo = Hippo(basis, middle, windows and windows * tokens, "bilinear")
                low, high = (low, middle) if kappa_error(tokens, hippo) <= 1e-6 else (middle, high)
            smallest.append(high)
        found[f"modes for 1e-6, {name}"] = smallest
    return found


def table(first: str, columns, rows) -> str:
    lines = [
        "| " + " | ".join([first, *map(str, columns)]) + " |",
        "| " + " | ".join(["---"] * (len(columns) + 1)) + " |",
    ]
    lines += [
        "| " + " | ".join([name, *(f"{x:.1e}" if isinstance(x, float) else str(x) for x in errors)]) + " |"
        for name, errors in rows.items()
    ]
    return "\n".join(lines)


def plot(modes: dict[str, list[float]], features: dict[int, dict[str, list[float]]]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for i, name in enumerate(BASES):
        left.loglog(MODES, modes[f"{name}, independent tokens"], "o-", color=f"C{i}", label=name)
        left.loglog(MODES, modes[f"{name}, smooth stream"], "--", color=f"C{i}")
    left.axvline(TOKENS, color="0.7", linewidth=1)
    left.set(title=f"Basis, {TOKENS} tokens (dashed: smooth stream)", xlabel="modes M", ylabel="relative error")
    left.set_ylim(1e-15, 20)
    left.legend()
    styles = dict(zip(sorted(features), ("--", "-"), strict=True))
    for m, rows in sorted(features.items()):
        for i, (name, errors) in enumerate(rows.items()):
            right.loglog(FREQUENCIES, errors, "o" + styles[m], color=f"C{i}", label=f"{name}, M = {m}")
    guide = np.array(FREQUENCIES, float)
    right.loglog(guide, 1.5 * guide**-0.5 / 1.5, color="0.7", linewidth=1, label="slope -1/2")
    right.set(title="Random features, LegS bilinear", xlabel="frequencies F", ylabel="relative error")
    right.legend(fontsize=8)
    figure.savefig(HERE / "plot.png", dpi=110)


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    modes = by_modes()
    features = {m: by_features(m) for m in (TOKENS, 2 * TOKENS)}
    parts = [
        f"{platform.machine()} CPU, jax {jax.__version__}, numpy {np.__version__}, float64",
        f"Error against attention with the same features, T = {TOKENS}, by modes M:",
        table("basis", MODES, modes),
    ]
    for m, rows in features.items():
        parts += [f"Error against the dense kernel, M = {m}, by frequencies F:", table("features", FREQUENCIES, rows)]
    lengths = (4, 8, 16, 32)
    parts += ["Largest entry of kappa_T - I, by tokens T:", table("", lengths, completeness(lengths))]
    text = "\n\n".join(parts)
    print(text)
    (HERE / "table.md").write_text(text + "\n", encoding="utf-8")
    plot(modes, features)


if __name__ == "__main__":
    main()
