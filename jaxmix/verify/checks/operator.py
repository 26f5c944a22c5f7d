"""The operator of a mixer: associative, with an identity, and equal to the serial final state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxmix.verify.errata import left_fold, right_fold
from jaxmix.verify.options import EXACT
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Subject, compile_fast

FOLDED_TOKENS = 16
TREES = 4


def operator(subject: Subject) -> Iterator[Row]:
    """Left fold against right fold and random trees, against the serial state and output, and the identity."""
    kind = subject.mixer.operator
    if kind is None:
        return
    inputs, (out, state) = _beginning(subject)
    combine = compile_fast(kind.combine)
    stacked = jax.tree.map(np.asarray, kind.token_summaries(**inputs))
    length = min(FOLDED_TOKENS, subject.options.length)
    tokens = [jax.tree.map(lambda x, t=t: x[:, t], stacked) for t in range(length)]
    left = left_fold(combine, tokens)

    def row(case: str, error: float) -> Row:
        return subject.row("operator", f"{kind.name}: {case}", error, EXACT)

    yield row("right fold against left fold", relative_error(right_fold(combine, tokens), left))
    rng = np.random.default_rng([subject.options.seed, 4])
    trees = [random_tree(combine, tokens, rng) for _ in range(TREES)]
    yield row(f"{TREES} random trees against left fold", max(relative_error(tree, left) for tree in trees))
    identity = kind.identity(**inputs)
    error = max(relative_error(combine(identity, left), left), relative_error(combine(left, identity), left))
    yield row("identity on either side", error)
    pairs = kind.states(left, state)
    if pairs:
        error = max(relative_error(part, expected) for part, expected in pairs.values())
        yield row(f"left fold against the serial final state ({', '.join(pairs)})", error)
    if kind.read is not None:
        first = next(iter(subject.by_option(out).values()))
        yield row(
            "read of the left fold against the serial output", relative_error(kind.read(left, **inputs), first[:, -1])
        )


def _beginning(subject: Subject) -> tuple[dict[str, np.ndarray], tuple[Any, Any]]:
    """The first tokens of the inputs and the serial outputs and final state of them."""
    inputs = subject.inputs()
    if subject.options.length <= FOLDED_TOKENS:
        return inputs, subject.call(subject.serial, inputs)
    inputs = subject.take(inputs, np.s_[:, :FOLDED_TOKENS])
    return inputs, jax.tree.map(np.asarray, subject.compiled(subject.serial)(inputs))


def random_tree[S](combine: Callable[[S, S], S], summaries: Sequence[S], rng: np.random.Generator) -> S:
    """Combine neighbours in random order until one summary is left."""
    rest = list(summaries)
    while len(rest) > 1:
        at = int(rng.integers(len(rest) - 1))
        rest[at : at + 2] = [combine(rest[at], rest[at + 1])]
    return rest[0]
