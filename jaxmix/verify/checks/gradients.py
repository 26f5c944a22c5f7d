"""The gradient of every argument by itself: scan against serial, and serial against finite differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmix.verify.options import FINITE_DIFFERENCE, GRADIENT
from jaxmix.verify.report import Row, relative_error
from jaxmix.verify.subject import Form, Subject

DIRECTIONS = 3
STEP = 3e-4
"""Step of the finite differences, as a fraction of the size of the argument."""
ROUNDING = 1e-12
STENCIL = ((1.0, 8.0 / 12.0), (-1.0, -8.0 / 12.0), (2.0, -1.0 / 12.0), (-2.0, 1.0 / 12.0))
"""Central differences of fourth order: (offset, weight)."""


def gradients(subject: Subject) -> Iterator[Row]:
    """Gradients of a random weighting of outputs and final state, with an initial state, in float64.

    Unless `options.full`, those of the last read-out, and not of forms other than serial and scan.
    """
    if subject.gradient_error is not None:
        raise subject.gradient_error
    inputs = subject.inputs()
    state = subject.call(subject.serial, subject.inputs(stream=1))[1]
    out, final_state = subject.call(subject.serial, inputs, None, state)
    for option in subject.read_outs if subject.options.full else subject.read_outs[-1:]:
        weights = random_weights(subject, (subject.by_option(out)[option], final_state))
        yield from _rows(subject, option, {"inputs": inputs, "initial_state": state}, weights)


def _rows(subject: Subject, option: str, arguments: Any, weights: Any) -> Iterator[Row]:
    def loss(values: Any) -> float:
        out, state = subject.call(subject.serial, values["inputs"], None, values["initial_state"])
        terms = jax.tree.map(np.vdot, weights, (subject.by_option(out)[option], state))
        return float(sum(jax.tree.leaves(terms)))

    def gradient_of(form: Form) -> dict[str, np.ndarray]:
        given = arguments["inputs"], None, arguments["initial_state"]
        return _named(subject.evaluate(form, *given, weights=weights, option=option)[1])

    others = subject.unsegmented_forms if subject.options.full else ()
    by_form = {form: gradient_of(form) for form in (*subject.key_forms, *others)}
    for name, gradient in by_form[subject.serial].items():
        error = _finite_difference_error(loss, arguments, name, gradient, subject.options.seed)
        case = f"serial against finite differences: {name}"
        yield subject.row("gradients", case, error, FINITE_DIFFERENCE, option=option)
    for form in list(by_form)[1:]:
        for name, gradient in by_form[subject.serial].items():
            error = relative_error(by_form[form][name], gradient)
            yield subject.row("gradients", f"{form.label} against serial: {name}", error, GRADIENT, option=option)


def random_weights(subject: Subject, result: Any) -> Any:
    """Normal numbers in the structure of a result (out, final_state), so scaled that no array outweighs the others."""
    rng = np.random.default_rng([subject.options.seed, 2])
    return jax.tree.map(lambda x: rng.standard_normal(x.shape) / (np.abs(x).max() or 1.0), result)


def _finite_difference_error(
    loss: Callable[[Any], float], arguments: Any, name: str, gradient: np.ndarray, seed: int
) -> float:
    """Differences in random directions of one argument, against the gradient's inner products with them."""
    rng = np.random.default_rng([seed, 3])
    step = STEP * _typical_size(_named(arguments)[name])
    slopes, products = [], []
    for _ in range(DIRECTIONS):
        direction = step * rng.standard_normal(gradient.shape)
        slopes.append(sum(w * loss(_moved(arguments, name, offset * direction)) for offset, w in STENCIL))
        products.append(np.vdot(gradient, direction))
    return relative_error(np.asarray(products), np.asarray(slopes))


def _typical_size(x: np.ndarray) -> float:
    """The median size of the elements that are more than rounding errors, 1 where there is none."""
    sizes = np.abs(x)
    sizes = sizes[sizes > ROUNDING * sizes.max(initial=0.0)]
    return float(np.median(sizes)) if sizes.size else 1.0


def _moved(arguments: Any, name: str, by: np.ndarray) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: x + by if _name(path) == name else x, arguments)


def _named(tree: Any) -> dict[str, np.ndarray]:
    return {_name(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _name(path: Any) -> str:
    """The argument's name: q, or initial_state.S."""
    kind, *rest = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
    return ".".join(rest if kind == "inputs" else [kind, *rest])
