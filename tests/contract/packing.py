"""Packed documents never see each other, and padding is never seen at all."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.agreement import F64
from tests.contract.spec import (
    BATCH,
    SCAN,
    SERIAL,
    TOKENS,
    Evaluation,
    draw_case,
    evaluate,
    is_per_token,
    over_tokens,
    take_tokens,
    zero_state,
)
from tests.contract.suite import Suite
from tests.tolerances import BRUTE_FORCE, FORMS, assert_close, assert_same_bits

FORM_NAMES = {"serial": SERIAL, "scan": SCAN}
FORMS_UNDER_TEST = pytest.mark.parametrize("form", FORM_NAMES.values(), ids=FORM_NAMES)

LAYOUTS = {
    "two documents": [[1] * 9 + [2] * 15, [1] * 16 + [2] * 8],
    "documents of one token": [[*range(1, 9), *[9] * 16], [1, 2] + [3] * 21 + [4]],
    "an id that comes back": [[1] * 8 + [2] * 8 + [1] * 8, [2, 1] * 3 + [2] * 18],
    "padding in front": [[0] * 7 + [1] * 17, [0] * 23 + [4]],
    "padding at the end": [[1] * 17 + [0] * 7, [1] + [0] * 23],
    "padding between documents": [[1] * 6 + [0] * 5 + [2] * 13, [0] + [1] * 9 + [0] * 10 + [2] * 3 + [0]],
    "padding inside a document": [[1] * 6 + [0] * 5 + [1] * 13, [1, 0] * 6 + [2, 0] * 6],
    "nothing but padding": [[0] * 24, [1] * 5 + [2] * 19],
}


def documents(row) -> list[np.ndarray]:
    """Token positions of each document of one row of segment ids, padding left out."""
    found, last = [], None
    for position, name in enumerate(row):
        if name == 0:
            continue
        if name == last:
            found[-1].append(position)
        else:
            found.append([position])
        last = name
    return [np.array(positions) for positions in found]


def evaluate_separately(spec, variant, case, form) -> Evaluation:
    """What the packed call must give: every document in a call of its own, at the front of an empty row."""
    tokens = case.segment_ids.shape[1]
    rows = [documents(row) for row in np.asarray(case.segment_ids)]
    out = np.zeros_like(case.out_cotangent)
    gradients = jax.tree.map(np.zeros_like, case.inputs)
    fresh = zero_state(spec, variant)
    final, state_gradient = case.state, case.state_cotangent
    for turn in range(max(map(len, rows))):
        present = np.array([turn < len(row) for row in rows])
        last = np.array([turn == len(row) - 1 for row in rows])
        alone = Alone([row[turn] if turn < len(row) else np.array([], int) for row in rows], tokens)
        result = evaluate(
            spec,
            variant,
            case._replace(
                inputs=over_tokens(alone.to_front, case.inputs),
                segment_ids=alone.to_front(np.ones_like(case.segment_ids)),
                state=case.state if turn == 0 else fresh,
                out_cotangent=alone.to_front(case.out_cotangent),
                state_cotangent=choose(last, case.state_cotangent, jax.tree.map(np.zeros_like, fresh)),
            ),
            form,
        )
        out = out + alone.back(result.out)
        gradients = {
            name: total + (alone.back(part) if is_per_token(part) else part)
            for (name, total), part in zip(gradients.items(), result.input_gradients.values(), strict=True)
        }
        final = choose(last, result.state, final)
        if turn == 0:
            state_gradient = choose(present, result.state_gradient, case.state_cotangent)
    return Evaluation(out, final, gradients, state_gradient)


class Alone:
    """Moves one document of each row to the front of an empty row, and back."""

    def __init__(self, positions, tokens):
        self.positions, self.tokens = positions, tokens

    def to_front(self, array):
        moved = np.zeros_like(array)
        for row, positions in enumerate(self.positions):
            moved[row, : len(positions)] = array[row, positions]
        return moved

    def back(self, array):
        moved = np.zeros_like(array)
        for row, positions in enumerate(self.positions):
            moved[row, positions] = array[row, : len(positions)]
        return moved


def choose(rows, state, other):
    """Takes `state` in the rows where `rows` is true and `other` elsewhere."""
    return jax.tree.map(lambda x, y: np.where(rows.reshape(-1, *[1] * (np.ndim(x) - 1)), x, y), state, other)


def poisoned(case, value=np.nan):
    """Writes `value` into every input at padded positions."""
    padded = np.asarray(case.segment_ids) == 0

    def poison(x):
        return np.where(padded.reshape(*padded.shape, *[1] * (x.ndim - 2)), value, x)

    return case._replace(inputs=over_tokens(poison, case.inputs))


def assert_packed(spec, variant, case, form, label=""):
    """Packed equals separate: bit for bit in the serial form, to tolerance in the scan."""
    actual, expected = evaluate(spec, variant, case, form), evaluate_separately(spec, variant, case, form)
    shared = [name for name, x in case.inputs.items() if not is_per_token(x)]
    for name in shared:
        # A gradient that adds over documents adds in another order when they come in separate calls.
        pair = [result.input_gradients.pop(name) for result in (actual, expected)]
        assert_close(*pair, BRUTE_FORCE if form == SERIAL else FORMS[F64], f"{label}: {name}")
    if form == SERIAL:
        assert_same_bits(actual, expected, label)
    else:
        assert_close(actual, expected, FORMS[F64], label)


class Packing(Suite):
    """Documents and padding."""

    @FORMS_UNDER_TEST
    def test_packed_equals_separate_with_every_gradient(self, variant, form):
        for name, layout in LAYOUTS.items():
            case = poisoned(draw_case(self.spec, variant, segment_ids=layout))
            assert_packed(self.spec, variant, case, form, name)

    @FORMS_UNDER_TEST
    def test_any_layout_of_documents_and_padding(self, form):
        base = draw_case(self.spec, self.spec.main)
        runs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12)
        row = runs.map(lambda runs: np.resize(np.repeat(*np.transpose(runs)), TOKENS))

        @settings(max_examples=15, deadline=None, derandomize=True, database=None)
        @given(st.tuples(*[row] * BATCH))
        def check(rows):
            case = poisoned(base._replace(segment_ids=np.array(rows, np.int32)))
            assert_packed(self.spec, self.spec.main, case, form)

        check()

    def test_documents_in_arrays_of_their_own_give_the_same_bits(self):
        case = draw_case(self.spec, self.spec.main, segment_ids=[[1] * 8 + [2] * 8 + [3] * 8] * BATCH)
        packed = evaluate(self.spec, self.spec.main, case, SERIAL)
        state = case.state
        for start in (0, 8, 16):
            part = take_tokens(case, start, start + 8)._replace(state=state)
            alone = evaluate(self.spec, self.spec.main, part, SERIAL)
            assert_same_bits(alone.out, packed.out[:, start : start + 8])
            state = zero_state(self.spec, self.spec.main)
        assert_same_bits(alone.state, packed.state)

    @FORMS_UNDER_TEST
    def test_padding_gives_nothing_and_takes_nothing(self, variant, form):
        for name, layout in LAYOUTS.items():
            case = poisoned(draw_case(self.spec, variant, segment_ids=layout))
            result = evaluate(self.spec, variant, case, form)
            padded = case.segment_ids == 0
            assert not np.any(result.out[padded]), name
            for argument, gradient in result.input_gradients.items():
                if is_per_token(gradient):
                    assert not np.any(gradient[padded]), f"{name}: gradient of {argument}"

    @FORMS_UNDER_TEST
    def test_what_stands_in_padding_does_not_move_a_bit(self, form):
        for layout in LAYOUTS.values():
            case = draw_case(self.spec, self.spec.main, segment_ids=layout)
            results = [
                evaluate(self.spec, self.spec.main, poisoned(case, value), form) for value in (0.0, np.nan, -np.inf)
            ]
            assert_same_bits(results[1], results[0])
            assert_same_bits(results[2], results[0])

    @FORMS_UNDER_TEST
    def test_changing_one_document_does_not_move_the_next_by_a_bit(self, variant, form):
        case = draw_case(self.spec, variant, segment_ids=[[1] * 11 + [2] * 13, [1] * 3 + [0] * 8 + [2] * 13])
        before = evaluate(self.spec, variant, case, form)
        for factor in (-3.0, self.spec.large):
            after = evaluate(self.spec, variant, changed(case, 11, factor, self.spec.decay_signs), form)
            assert_same_document(after, before, 11)

    def test_a_broken_document_does_not_reach_the_next(self, variant):
        case = draw_case(self.spec, variant, segment_ids=[[1] * 11 + [2] * 13] * BATCH)
        before = evaluate(self.spec, variant, case, SERIAL)
        for factor in (np.inf, np.nan):
            after = evaluate(self.spec, variant, changed(case, 11, factor, self.spec.decay_signs), SERIAL)
            assert_same_document(after, before, 11)

    @FORMS_UNDER_TEST
    def test_a_document_gets_no_gradient_from_the_next(self, variant, form):
        case = draw_case(self.spec, variant, segment_ids=[[1] * 11 + [2] * 13] * BATCH)
        cotangent = case.out_cotangent.copy()
        cotangent[:, :11] = 0
        result = evaluate(self.spec, variant, case._replace(out_cotangent=cotangent), form)
        for name, gradient in result.input_gradients.items():
            if is_per_token(gradient):
                assert not np.any(gradient[:, :11]), name
        assert not any(np.any(x) for x in jax.tree.leaves(result.state_gradient))

    @FORMS_UNDER_TEST
    def test_no_token_sees_a_later_one(self, variant, form):
        case = draw_case(self.spec, variant)
        cotangent = case.out_cotangent.copy()
        cotangent[:, 11:] = 0
        case = case._replace(out_cotangent=cotangent, state_cotangent=jax.tree.map(np.zeros_like, case.state))
        other = draw_case(self.spec, variant, seed=5)

        def later_changed(x, y):
            return np.concatenate([x[:, :11], y[:, 11:]], axis=1)

        before = evaluate(self.spec, variant, case, form)
        after = evaluate(
            self.spec, variant, case._replace(inputs=over_tokens(later_changed, case.inputs, other.inputs)), form
        )
        assert_same_bits(after.out[:, :11], before.out[:, :11])
        assert not np.array_equal(after.out[:, 11:], before.out[:, 11:])
        for name, gradient in before.input_gradients.items():
            if is_per_token(gradient):
                assert not np.any(gradient[:, 11:]), name


def changed(case, stop, factor, decay_signs):
    """Multiplies the inputs of the first `stop` tokens; a gate that decays is only ever made to decay more."""
    inputs = dict(case.inputs)
    for name, x in case.inputs.items():
        if is_per_token(x):
            head = x[:, :stop] * (2.0 if name in decay_signs and np.isfinite(factor) else factor)
            inputs[name] = np.concatenate([head, x[:, stop:]], axis=1)
    return case._replace(inputs=inputs)


def assert_same_document(actual, expected, start):
    """The document that begins at `start` and ends the rows has the same outputs, final state and gradients."""
    assert_same_bits(actual.out[:, start:], expected.out[:, start:])
    assert_same_bits(actual.state, expected.state)
    for name, gradient in expected.input_gradients.items():
        if is_per_token(gradient):
            assert_same_bits(actual.input_gradients[name][:, start:], gradient[:, start:], name)
