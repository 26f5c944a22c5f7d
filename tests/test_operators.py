"""The public operators: associative, with an identity, and folding tokens gives the serial state."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import ahla, gated_delta_rule, hla2, hla3, linear_attention, operators
from tests.contract.spec import precision
from tests.tolerances import BRUTE_FORCE, FORMS, assert_close, rms_ratio

LENGTH, SHAPE, KEY, VALUE = 9, (2, 3), 4, 3
ASSOCIATIVE = FORMS[np.dtype(np.float64)]


@dataclasses.dataclass(frozen=True)
class Operator:
    """A public operator and the mixer call that it must reproduce.

    Attributes:
        summary: class of the operator.
        mixer: `mixer(q, k, v, log_decay, ...)`, with beta last where `erases`.
        decays: tokens have a log decay.
        erases: tokens have a write strength beta, and outputs no denominator.
        fields: the field of the summary that holds each field of the state, where the names differ.
    """

    summary: type
    mixer: Callable[..., Any]
    decays: bool = True
    erases: bool = False
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)


OPERATORS = {
    "LinearSummary": Operator(operators.LinearSummary, linear_attention),
    "HLA2Summary": Operator(operators.HLA2Summary, hla2),
    "HLA2PrintedSummary": Operator(operators.HLA2PrintedSummary, functools.partial(hla2, decay_form="printed")),
    "AHLASummary": Operator(operators.AHLASummary, ahla),
    "HLA3Summary": Operator(operators.HLA3Summary, hla3),
    "HLA3PrintedSummary": Operator(operators.HLA3PrintedSummary, functools.partial(hla3, mask="printed"), decays=False),
    "DeltaSummary": Operator(
        operators.DeltaSummary, functools.partial(gated_delta_rule, scale=1.0), erases=True, fields={"S": "W"}
    ),
    "DeltaSummary without decay": Operator(
        operators.DeltaSummary,
        functools.partial(gated_delta_rule, scale=1.0),
        decays=False,
        erases=True,
        fields={"S": "W"},
    ),
}
EVERY_OPERATOR = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


def arrays(operator, seed=0):
    """q, k, v, log_decay and any beta with tokens leading, float64; log_decay is None where the operator has none."""
    rng = np.random.default_rng(seed)
    q, k = (jnp.asarray(rng.normal(size=(LENGTH, *SHAPE, KEY))) for _ in range(2))
    v = jnp.asarray(rng.normal(size=(LENGTH, *SHAPE, VALUE)))
    log_decay = jnp.asarray(-rng.exponential(0.3, size=(LENGTH, *SHAPE))) if operator.decays else None
    beta = (jnp.asarray(rng.uniform(0.0, 0.5, size=(LENGTH, *SHAPE))),) if operator.erases else ()
    return q, k, v, log_decay, *beta


def tokens(operator, seed=0) -> list:
    """The summaries of single tokens, in order."""
    summaries = operator.summary.token_summary(*arrays(operator, seed))
    return [jax.tree.map(lambda x, t=t: x[t], summaries) for t in range(LENGTH)]


def fold_left(combine, items):
    return functools.reduce(combine, items)


def fold_right(combine, items):
    return functools.reduce(lambda later, earlier: combine(earlier, later), reversed(items))


def fold_tree(combine, items, rng):
    """Combines neighbours in random order until one is left."""
    items = list(items)
    while len(items) > 1:
        i = rng.integers(len(items) - 1)
        items[i : i + 2] = [combine(items[i], items[i + 1])]
    return items[0]


@EVERY_OPERATOR
class TestOperators:
    def test_left_right_and_tree_folds_agree(self, operator):
        with precision():
            items, combine = tokens(operator), jax.jit(operator.summary.combine)
            left = fold_left(combine, items)
            assert_close(fold_right(combine, items), left, ASSOCIATIVE, "right")
            for seed in range(4):
                assert_close(fold_tree(combine, items, np.random.default_rng(seed)), left, ASSOCIATIVE, f"tree {seed}")

    def test_the_identity_changes_nothing_on_either_side(self, operator):
        with precision():
            whole = fold_left(operator.summary.combine, tokens(operator))
            identity = operator.summary.identity(SHAPE, KEY, VALUE, dtype=jnp.float64)
            assert_close(operator.summary.combine(identity, whole), whole, BRUTE_FORCE, "left")
            assert_close(operator.summary.combine(whole, identity), whole, BRUTE_FORCE, "right")

    def test_the_identity_has_the_structure_of_a_summary(self, operator):
        with precision():
            one = tokens(operator)[0]
            identity = operator.summary.identity(SHAPE, KEY, VALUE, dtype=jnp.float64)
        assert jax.tree.map(jnp.shape, identity) == jax.tree.map(jnp.shape, one)
        default = operator.summary.identity(SHAPE, KEY, VALUE)
        assert {x.dtype for x in jax.tree.leaves(default)} == {np.dtype(np.float32)}

    def test_folding_tokens_gives_the_serial_output_and_state(self, operator):
        with precision():
            q, k, v, *gates = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), arrays(operator))
            whole = fold_left(operator.summary.combine, tokens(operator))
            numerator, denominator = whole.read(q[:, -1])
            out, state = operator.mixer(q, k, v, *gates, implementation="serial")
            assert rms_ratio(numerator, out[:, -1]) <= ASSOCIATIVE
            if operator.erases:
                assert denominator is None
            else:
                ones, _ = operator.mixer(q, k, jnp.ones_like(v), *gates, implementation="serial")
                assert rms_ratio(denominator, ones[:, -1, :, 0]) <= ASSOCIATIVE
            for field in dataclasses.fields(state):
                part = getattr(whole, operator.fields.get(field.name, field.name))
                assert rms_ratio(part, getattr(state, field.name)) <= ASSOCIATIVE, field.name

    def test_an_associative_scan_gives_every_prefix(self, operator):
        with precision():
            combine = operator.summary.combine
            summaries = operator.summary.token_summary(*arrays(operator))
            prefixes = jax.lax.associative_scan(combine, summaries)
            items = tokens(operator)
            for t in range(LENGTH):
                prefix = jax.tree.map(lambda x, t=t: x[t], prefixes)
                assert_close(prefix, fold_left(combine, items[: t + 1]), ASSOCIATIVE, f"prefix {t}")

    def test_a_summary_is_a_frozen_dataclass(self, operator):
        identity = operator.summary.identity(SHAPE, KEY, VALUE)
        name = dataclasses.fields(identity)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(identity, name, getattr(identity, name))

    def test_segmented_combination_forgets_what_comes_before_a_reset(self, operator):
        with precision():
            resets = jnp.zeros((LENGTH, *SHAPE), bool).at[4, :, 0].set(True).at[6, 1].set(True)
            combine = operator.summary.combine
            lifted = operators.segmented(combine)
            items = [(resets[t], item) for t, item in enumerate(tokens(operator))]
            _, left = fold_left(lifted, items)
            for row in range(SHAPE[0]):
                for column in range(SHAPE[1]):
                    start = max(np.flatnonzero(resets[:, row, column]), default=0)
                    alone = fold_left(combine, tokens(operator)[start:])
                    pick = lambda x, at=(row, column): x[at]  # noqa: E731
                    assert_close(jax.tree.map(pick, left), jax.tree.map(pick, alone), BRUTE_FORCE)

    def test_segmented_combination_is_associative(self, operator):
        with precision():
            resets = jnp.asarray(np.random.default_rng(4).random((LENGTH, *SHAPE)) < 0.3)
            lifted = operators.segmented(operator.summary.combine)
            items = [(resets[t], item) for t, item in enumerate(tokens(operator))]
            flag, left = fold_left(lifted, items)
            for seed in range(4):
                tree_flag, tree = fold_tree(lifted, items, np.random.default_rng(seed))
                assert_close(tree, left, ASSOCIATIVE)
                assert np.array_equal(tree_flag, flag)

    def test_a_reset_keeps_even_broken_numbers_out(self, operator):
        with precision():
            first, second = tokens(operator)[:2]
            broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), first)
            lifted = operators.segmented(operator.summary.combine)
            _, result = lifted((jnp.zeros(SHAPE, bool), broken), (jnp.ones(SHAPE, bool), second))
        assert_close(result, second, BRUTE_FORCE)
