"""The gate before the clock: a result that is wrong has no time."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.arrays import Array
from jaxmix.bench.costs import Pass
from jaxmix.bench.operands import MIXERS, checked_part, reference
from jaxmix.bench.shapes import Shape

LIMIT = 2e-2
"""Largest root mean square of a difference over that of the float32 reference, for bfloat16 arguments and results."""


PLAIN = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""How a GPU compiles references: without a search for the fastest kernels, which takes far longer than running them."""


class WrongResult(Exception):
    """A result is further from the reference than the limit; the message has all errors."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What is to be computed.

    Attributes:
        mixer: name in `jaxmix.bench.operands.MIXERS`.
        shape: sizes.
        part: which pass.
    """

    mixer: str
    shape: Shape
    part: Pass

    def arrays(self, seed: int) -> tuple[Array, ...]:
        """The mixer's arguments; those of one token in decoding."""
        return MIXERS[self.mixer].draw(self.shape, seed, length=1 if self.part == "decode" else None)

    def state(self, seed: int) -> Any:
        """What decoding starts from."""
        return MIXERS[self.mixer].draw_state(self.shape, seed)

    def cotangent(self, seed: int) -> Array:
        """A random gradient of the output, [B, T, H, E]."""
        shape = (self.shape.batch, self.shape.length, self.shape.heads, self.shape.value_size)
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
        return draw(jax.random.key(seed + 1000), shape, jnp.bfloat16)


def check(work: Work, results: Mapping[str, Any]) -> float:
    """Compares results for the arguments of seed 0 with the float32 reference.

    Compared are the last sequence and, where heads do not depend on each other, its first group of heads; in decoding
    all heads of the last stream.

    Args:
        work: what was computed.
        results: "out" [B, T, H, E], and the gradients under the names of the arguments, as far as the pass gives them;
            anything that numpy can read.

    Returns:
        The largest error.

    Raises:
        WrongResult: if it is above the limit, or a result is not finite.
    """
    if work.part == "decode":
        expected = _decode_reference(work)
    else:
        expected = _reference(work.mixer, work.shape, gradients=work.part != "forward")
    heads = checked_part(work.mixer, work.shape)
    errors = {}
    for name, result in results.items():
        part = result[-1:] if work.part == "decode" else result[-1:, :, heads[name]]
        actual = np.asarray(part).astype(np.float32)
        errors[name] = error_ratio(actual, expected[name])
    text = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    worst = max(errors.values())
    if not worst <= LIMIT:
        raise WrongResult(f"errors above {LIMIT:g}: {text}")
    return worst


def error_ratio(actual: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference over that of `expected`.

    Raises:
        WrongResult: if the shapes differ.
    """
    if actual.shape != expected.shape:
        raise WrongResult(f"expected shape {expected.shape}, got {actual.shape}")
    size = float(np.sqrt(np.mean(np.square(expected, dtype=np.float64))))
    return float(np.sqrt(np.mean(np.square(actual - expected, dtype=np.float64)))) / max(size, 1e-30)


def _compiled(function: Callable[..., Any]) -> Any:
    return jax.jit(function, compiler_options=PLAIN if jax.default_backend() == "gpu" else None)


@functools.lru_cache(maxsize=4)
def _reference(mixer: str, shape: Shape, *, gradients: bool) -> dict[str, np.ndarray]:
    """Output, and perhaps gradients, in float32 from the same rounded arguments, of the part that is compared."""
    work = Work(mixer, shape, "forward")
    heads = checked_part(mixer, shape)
    names = MIXERS[mixer].arguments
    given = tuple(x[-1:, :, heads[name]].astype(jnp.float32) for name, x in zip(names, work.arrays(0), strict=True))
    cotangent = work.cotangent(0)[-1:, :, heads["out"]].astype(jnp.float32) if gradients else None

    @_compiled
    def run(given: tuple[Array, ...], cotangent: Array | None) -> dict[str, Array]:
        if cotangent is None:
            return {"out": reference(mixer)(*given)}
        out, pull = jax.vjp(reference(mixer), *given)
        return {"out": out} | dict(zip(names, pull(cotangent), strict=True))

    return {name: np.asarray(x) for name, x in run(given, cotangent).items()}


def _decode_reference(work: Work) -> dict[str, np.ndarray]:
    """The output of one token of the last stream by the serial form in float32."""
    given = tuple(x[-1:].astype(jnp.float32) for x in work.arrays(0))
    state = jax.tree.map(lambda x: x[-1:], work.state(0))
    state = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state)

    @_compiled
    def run(state: Any, given: tuple[Array, ...]) -> Array:
        return MIXERS[work.mixer].call(*given, initial_state=state, implementation="serial")[0]

    return {"out": np.asarray(run(state, given))}
