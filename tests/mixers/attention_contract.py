"""What linear attention and the HLA mixers promise beyond the contract of every mixer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.contract import QueryKeyValueErrors, Variant
from tests.contract.agreement import F32, F64
from tests.contract.spec import (
    BATCH,
    SERIAL,
    TOKENS,
    Form,
    draw_case,
    evaluate,
    precision,
    zero_state,
)
from tests.mixers.brute_force import by_document, expanded
from tests.mixers.families import GROUPED, draw, shared_heads
from tests.mixers.recurrences import run
from tests.tolerances import BRUTE_FORCE, FORMS, assert_close, rms_ratio

READ_OUT_OPTIONS = {"normalize", "eps"}


class AttentionContract(QueryKeyValueErrors):
    """Subclasses also set `one_head` (explicit sums) and `step` (the recurrence) of one head."""

    def test_outputs_and_states_follow_the_printed_recurrence_from_any_state(self, any_variant):
        case = any_state(draw_case(self.spec, any_variant))
        result = evaluate(self.spec, any_variant, case, SERIAL)
        options = {name: value for name, value in any_variant.options.items() if name not in READ_OUT_OPTIONS}
        arrays = expanded(**case.inputs)
        for row in range(BATCH):
            for head in range(any_variant.shape.heads):
                tokens = (x[row, :, head] for x in arrays)
                out, expected = run(self.step, *tokens, one_head_state(case.state, row, head, any_variant), **options)
                actual = one_head_state(result.state, row, head, any_variant)
                for name in expected:
                    assert rms_ratio(actual[name], expected[name]) <= BRUTE_FORCE, name
                if not any_variant.options.get("normalize"):
                    assert rms_ratio(result.out[row, :, head], out) <= BRUTE_FORCE

    def test_state_fields_have_the_documented_shapes(self, any_variant):
        state = self.spec.init_state(any_variant, BATCH, jnp.float32)
        sizes = {"D": any_variant.shape.key_size, "E": any_variant.shape.value_size}
        heads = {"own": any_variant.shape.heads, "shared": shared_heads(any_variant)}
        assert {field.name for field in dataclasses.fields(state)} == set(self.fields)
        for name, (kind, *axes) in self.fields.items():
            assert getattr(state, name).shape == (BATCH, heads[kind], *(sizes[axis] for axis in axes)), name

    def test_no_decay_is_a_decay_of_zero(self):
        variant = self.spec.variants["no decay"]
        case = draw_case(self.spec, variant)
        expected = evaluate(self.spec, variant, case, SERIAL)
        zeros = np.zeros((BATCH, TOKENS, variant.shape.heads))
        actual = evaluate(self.spec, variant, case._replace(inputs=case.inputs | {"log_decay": zeros}), SERIAL)
        actual.input_gradients.pop("log_decay")
        assert_close(actual, expected, BRUTE_FORCE)

    def test_decay_per_head_is_the_same_decay_at_every_token(self):
        variant = self.spec.variants["decay per head"]
        case = draw_case(self.spec, variant)
        tokens = np.broadcast_to(case.inputs["log_decay"], (BATCH, TOKENS, variant.shape.heads))
        expected = evaluate(self.spec, variant, case, SERIAL)
        actual = evaluate(self.spec, variant, case._replace(inputs=case.inputs | {"log_decay": tokens}), SERIAL)
        actual.input_gradients["log_decay"] = actual.input_gradients["log_decay"].sum(axis=(0, 1))
        assert_close(actual, expected, BRUTE_FORCE)

    def test_shared_heads_are_repeated_heads(self):
        variant = self.spec.variants["grouped heads, shared decay"]
        zeros = zero_state(self.spec, variant)
        case = draw_case(self.spec, variant)._replace(state=zeros, state_cotangent=zeros)
        actual = evaluate(self.spec, variant, case, SERIAL)

        repeats = GROUPED.heads // GROUPED.kv_heads
        alone = Variant(variant.options, shape=dataclasses.replace(GROUPED, kv_heads=GROUPED.heads), gate="token")
        repeated = {name: x if name == "q" else np.repeat(x, repeats, axis=2) for name, x in case.inputs.items()}
        zeros = zero_state(self.spec, alone)
        case = case._replace(inputs=repeated, state=zeros, state_cotangent=zeros)
        expected = evaluate(self.spec, alone, case, SERIAL)

        assert_close(actual.out, expected.out, BRUTE_FORCE)
        for name, gradient in expected.input_gradients.items():
            grouped = gradient if name == "q" else summed_over_groups(gradient, repeats)
            assert_close(actual.input_gradients[name], grouped, BRUTE_FORCE, name)

    def test_normalised_divides_by_signed_sums_plus_eps(self):
        variant = Variant({"normalize": True, "eps": 0.25}, gate="token")
        inputs = draw(np.random.default_rng(0), BATCH, TOKENS, variant)
        ids = np.ones((BATCH, TOKENS), np.int32)
        numerator = by_document(self.one_head, inputs, ids)
        denominator = by_document(self.one_head, inputs | {"v": np.ones_like(inputs["v"])}, ids)
        assert np.any(denominator + 0.25 < 0)
        with precision():
            for form in (SERIAL, Form("scan", 5)):
                out, _ = self.spec.call(variant, form, self.spec.cast_inputs(inputs, np.float64))
                assert rms_ratio(out * (denominator + 0.25), numerator) <= FORMS[F64]

    def test_read_out_options_do_not_touch_the_state(self):
        inputs = self.spec.cast_inputs(draw(np.random.default_rng(0), BATCH, 3, self.spec.main), jnp.float32)
        for form in (SERIAL, Form("scan", 3)):

            @jax.jit
            def states(inputs, form=form):
                return [self.spec.call(self.spec.main, form, inputs, **options)[1] for options in ({}, *self.read_outs)]

            expected, *others = states(inputs)
            for state in others:
                assert_close(state, expected, FORMS[F32])

    def test_a_decay_for_each_query_head_needs_a_state_of_its_own(self):
        shared, own = (self.spec.variants[f"grouped heads, {name} decay"] for name in ("shared", "own"))
        inputs = self.spec.cast_inputs(draw(np.random.default_rng(0), BATCH, 3, own), jnp.float32)
        state = self.spec.init_state(shared, BATCH, jnp.float32)
        self.refuse(inputs, r"\binitial_state\b", rf"\b{GROUPED.kv_heads}\b", state=state)


def any_state(case):
    """Replaces the initial state by a random one; moments of one vector with itself stay symmetric."""
    rng = np.random.default_rng(11)
    fields = {}
    for field in dataclasses.fields(case.state):
        drawn = rng.normal(size=getattr(case.state, field.name).shape)
        fields[field.name] = drawn + drawn.swapaxes(-1, -2) if field.name in ("S", "Q") else drawn
    return case._replace(state=dataclasses.replace(case.state, **fields))


def one_head_state(state, row, head, variant):
    """The fields that query head `head` reads, shared ones included."""
    fields = {field.name: getattr(state, field.name)[row] for field in dataclasses.fields(state)}
    return {name: x[head // (variant.shape.heads // x.shape[0])] for name, x in fields.items()}


def summed_over_groups(gradient, repeats):
    """Adds the gradients of the copies of each shared head."""
    batch, tokens, heads, *rest = gradient.shape
    return gradient.reshape(batch, tokens, heads // repeats, repeats, *rest).sum(axis=3)
