"""The semidirect operator of a mixer: associative, with an identity, and equal to the serial final state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.verify.errata import left_fold, right_fold
from jaxmix.verify.options import EXACT
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Subject, compile_fast

FOLDED_TOKENS = 16
TREES = 4


def operator(subject: Subject) -> Iterator[Row]:
    """Left fold against right fold and random trees, against the serial state and outputs, and the identity."""
    kind: Any = subject.mixer.operator
    if kind is None:
        return
    # An operator takes as many key/value heads as query heads.
    alike = Subject(subject.mixer, dataclasses.replace(subject.options, kv_heads=subject.options.heads))
    inputs = alike.take(alike.inputs(), np.s_[:, :FOLDED_TOKENS])
    length = min(FOLDED_TOKENS, subject.options.length)
    combine = compile_fast(kind.combine)
    stacked = jax.tree.map(np.asarray, compile_fast(kind.token_summary)(**inputs))
    tokens = [jax.tree.map(lambda x, t=t: x[:, t], stacked) for t in range(length)]
    left = left_fold(combine, tokens)

    def row(case: str, error: float) -> Row:
        return subject.row("operator", f"{kind.__name__}: {case}", error, EXACT)

    yield row("right fold against left fold", relative_error(right_fold(combine, tokens), left))
    rng = np.random.default_rng([subject.options.seed, 4])
    trees = [random_tree(combine, tokens, rng) for _ in range(TREES)]
    yield row(f"{TREES} random trees against left fold", max(relative_error(tree, left) for tree in trees))
    sizes = inputs["k"].shape[-1], inputs["v"].shape[-1]
    leading = (subject.options.batch, *inputs["q"].shape[2:-1])
    identity = compile_fast(lambda: kind.identity(leading, *sizes, dtype=jnp.float64))()
    error = max(relative_error(combine(identity, left), left), relative_error(combine(left, identity), left))
    yield row("identity on either side", error)
    out, state = alike.compiled(alike.serial)(inputs)
    shared = _shared_fields(left, state)
    if shared:
        error = max(relative_error(getattr(left, name), getattr(state, name)) for name in shared)
        yield row(f"left fold against the serial final state ({', '.join(shared)})", error)
    if hasattr(kind, "read"):
        numerator, _ = compile_fast(kind.read)(left, inputs["q"][:, length - 1])
        first = next(iter(subject.by_option(out).values()))
        yield row("read of the left fold against the serial output", relative_error(numerator, first[:, -1]))


def random_tree[S](combine: Callable[[S, S], S], summaries: Sequence[S], rng: np.random.Generator) -> S:
    """Combine neighbours in random order until one summary is left."""
    rest = list(summaries)
    while len(rest) > 1:
        at = int(rng.integers(len(rest) - 1))
        rest[at : at + 2] = [combine(rest[at], rest[at + 1])]
    return rest[0]


def _shared_fields(summary: Any, state: Any) -> list[str]:
    if not (dataclasses.is_dataclass(summary) and dataclasses.is_dataclass(state)):
        return []
    names = {field.name for field in dataclasses.fields(summary)}
    return [field.name for field in dataclasses.fields(state) if field.name in names]
