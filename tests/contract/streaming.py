"""A stream may be cut anywhere: the state handed on carries everything, forward and backward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract.agreement import F64
from tests.contract.programs import primitives
from tests.contract.spec import (
    BATCH,
    SCAN,
    SERIAL,
    TOKENS,
    Evaluation,
    Form,
    draw_case,
    evaluate,
    fill_up,
    is_per_token,
    over_tokens,
    precision,
    take_tokens,
    zero_state,
)
from tests.contract.suite import Suite
from tests.tolerances import FORMS, assert_close, assert_same_bits

STEP = Form(None)
IDS_INSIDE = np.array([[1] * 9 + [2] * 15, [1] * 3 + [2] * 21], np.int32)
"""Two documents a row, with borders inside the parts below (a part's first token continues the document before it)."""


def evaluate_in_parts(spec, variant, case, cuts, form, *, filled_up=False) -> Evaluation:
    """Runs the parts between `cuts` one after the other, handing the state on, and the chain rule back through them.

    Filled up, every part is padded with NaN to the whole length, so that all parts share one compiled function.
    """
    tokens = case.segment_ids.shape[1]

    def evaluate_part(part):
        if not filled_up:
            return evaluate(spec, variant, part, form)
        length = part.segment_ids.shape[1]
        whole = evaluate(spec, variant, fill_up(part, tokens), form)
        gradients = over_tokens(lambda x: x[:, :length], whole.input_gradients)
        return whole._replace(out=whole.out[:, :length], input_gradients=gradients)

    parts, state = [], case.state
    for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True):
        parts.append(take_tokens(case, start, stop)._replace(state=state))
        state = evaluate_part(parts[-1]).state
    final, results, cotangent = state, [], case.state_cotangent
    for part in reversed(parts):
        results.insert(0, evaluate_part(part._replace(state_cotangent=cotangent)))
        cotangent = results[0].state_gradient
    gradients = [result.input_gradients for result in results]
    return Evaluation(
        out=np.concatenate([result.out for result in results], axis=1),
        state=final,
        input_gradients={name: joined([gradient[name] for gradient in gradients]) for name in case.inputs},
        state_gradient=cotangent,
    )


def joined(gradients):
    """Joins per-token gradients of consecutive parts; adds gradients of what all parts share."""
    return np.concatenate(gradients, axis=1) if is_per_token(gradients[0]) else np.sum(gradients, axis=0)


class Streaming(Suite):
    """States: one type, exact continuation, differentiable, cleared on request."""

    @pytest.mark.parametrize("form", [SERIAL, SCAN], ids=["serial", "scan"])
    def test_parts_equal_one_pass_with_every_gradient(self, variant, form):
        case = draw_case(self.spec, variant, segment_ids=IDS_INSIDE)
        expected = evaluate(self.spec, variant, case, SERIAL)
        for cuts in ([12], [1, 17], [5, 6, 7, 23]):
            actual = evaluate_in_parts(self.spec, variant, case, cuts, form, filled_up=True)
            assert_close(actual, expected, FORMS[F64], f"cuts at {cuts}")

    @pytest.mark.parametrize(("form", "cuts"), [(SERIAL, (8, 16)), (Form("scan", 8), (3, 19, 21, 22))], ids=str)
    def test_parts_in_arrays_of_their_own_equal_one_pass(self, form, cuts):
        # Serial parts of 8 tokens and scans of 1, 2, 3 and 16 with chunks of 8 are compiled for other tests as well.
        case = draw_case(self.spec, self.spec.main)
        actual = evaluate_in_parts(self.spec, self.spec.main, case, cuts, form)
        assert_close(actual, evaluate(self.spec, self.spec.main, case, SERIAL), FORMS[F64])

    def test_single_tokens_equal_one_pass_with_every_gradient(self, variant):
        case = draw_case(self.spec, variant)
        actual = evaluate_in_parts(self.spec, variant, case, range(1, TOKENS), STEP)
        assert_close(actual, evaluate(self.spec, variant, case, SERIAL), FORMS[F64])

    def test_prefill_then_decode_equals_one_pass(self, variant):
        case, half = draw_case(self.spec, variant), TOKENS // 2
        expected = evaluate(self.spec, variant, case, SERIAL)
        prefill = evaluate(self.spec, variant, fill_up(take_tokens(case, 0, half), TOKENS), SCAN)
        rest = take_tokens(case, half, TOKENS)._replace(state=prefill.state)
        decode = evaluate_in_parts(self.spec, variant, rest, range(1, half), STEP)
        assert_close(prefill.out[:, :half], expected.out[:, :half], FORMS[F64])
        assert_close((decode.out, decode.state), (expected.out[:, half:], expected.state), FORMS[F64])

    @pytest.mark.parametrize("form", [SERIAL, SCAN], ids=["serial", "scan"])
    def test_no_state_and_no_segments_mean_a_new_stream_of_one_document(self, form):
        case = draw_case(self.spec, self.spec.main)._replace(state=zero_state(self.spec, self.spec.main))
        expected = evaluate(self.spec, self.spec.main, case, form)
        with precision():
            run = jax.jit(lambda inputs: self.spec.call(self.spec.main, form, inputs))
            actual = run(self.spec.cast_inputs(case.inputs, np.float64))
        assert_close(actual, (expected.out, expected.state), FORMS[F64])

    def test_one_state_type_from_every_form(self, variant):
        inputs = self.spec.cast_inputs(self.spec.draw(np.random.default_rng(0), BATCH, 2, variant), jnp.bfloat16)
        one = {name: x[:, :1] if is_per_token(x) else x for name, x in inputs.items()}
        expected = self.spec.init_state(variant, BATCH, jnp.float32)
        assert isinstance(expected, self.spec.state)
        for form, given in [(SERIAL, inputs), (SCAN, inputs), (STEP, inputs), (SERIAL, one), (SCAN, one), (STEP, one)]:
            state = jax.eval_shape(lambda given, form=form: self.spec.call(variant, form, given)[1], given)
            assert jax.tree.structure(state) == jax.tree.structure(expected)
            assert signature(state) == signature(expected), form
            assert all(dtype == jnp.float32 for _, dtype in signature(state))

    def test_a_state_is_a_frozen_dataclass_and_a_pytree(self):
        state = self.spec.init_state(self.spec.main, BATCH, jnp.float32)
        fields = dataclasses.fields(state)
        assert len(jax.tree.leaves(state)) == len(fields)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(state, fields[0].name, getattr(state, fields[0].name))

    def test_reset_starts_only_the_named_streams_anew(self):
        case = draw_case(self.spec, self.spec.main)
        with precision():
            used = self.spec.cast(case, np.float64).state
            reset = used.reset(jnp.array([True, False]))
        zeros = zero_state(self.spec, self.spec.main)
        expected = jax.tree.map(lambda zero, x: np.stack([zero[0], x[1]]), zeros, case.state)
        assert_same_bits(jax.device_get(reset), expected)

    def test_reset_clears_even_a_broken_state(self):
        broken = jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan), self.spec.init_state(self.spec.main, BATCH, jnp.float32)
        )
        reset = jax.jit(lambda state, where: state.reset(where))(broken, jnp.array([True, False]))
        fresh = self.spec.init_state(self.spec.main, BATCH, jnp.float32)
        for actual, expected in zip(jax.tree.leaves(reset), jax.tree.leaves(fresh), strict=True):
            assert np.array_equal(actual[0], expected[0])
            assert np.all(np.isnan(actual[1]))

    def test_reset_stops_the_gradient_of_the_streams_it_clears(self):
        state = self.spec.init_state(self.spec.main, BATCH, jnp.float32)

        def total(state):
            return sum(jnp.sum(x) for x in jax.tree.leaves(state.reset(jnp.array([True, False]))))

        for gradient in jax.tree.leaves(jax.jit(jax.grad(total))(state)):
            assert not np.any(gradient[0])
            assert np.all(gradient[1] == 1)

    @pytest.mark.parametrize("form", [SERIAL, SCAN, STEP], ids=["serial", "scan", "default"])
    def test_one_token_takes_the_direct_step(self, form):
        inputs = self.spec.cast_inputs(self.spec.draw(np.random.default_rng(0), BATCH, 1, self.spec.main), jnp.float32)
        state = self.spec.init_state(self.spec.main, BATCH, jnp.float32)
        step = jax.make_jaxpr(lambda inputs, state: self.spec.call(self.spec.main, form, inputs, None, state))(
            inputs, state
        )
        assert not {"scan", "while"} & {equation.primitive.name for equation in primitives(step)}


def signature(state):
    """Shape and dtype of every field."""
    return [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
