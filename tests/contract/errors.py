"""A wrong call is told which argument is wrong, what was expected and what came."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract.spec import BATCH, Form, is_per_token
from tests.contract.suite import Suite

LENGTH = 9


def in_words(shape) -> str:
    """A pattern for a shape in a message, whatever its brackets."""
    return re.escape(", ".join(map(str, shape)))


@dataclasses.dataclass(frozen=True)
class OtherState:
    """A state that belongs to no mixer."""

    S: jax.Array


jax.tree_util.register_dataclass(OtherState, data_fields=["S"], meta_fields=[])


class Errors(Suite):
    """Every misuse raises at trace time, with a message that can be acted on."""

    def correct_call(self):
        """A correct float32 call, to be spoilt."""
        return self.spec.cast_inputs(
            self.spec.draw(np.random.default_rng(0), BATCH, LENGTH, self.spec.main), jnp.float32
        )

    def refuse(self, inputs, *patterns, error=ValueError, **options):
        """Calls the mixer, eagerly and traced, and asserts that both are refused with every pattern in the message."""
        form = Form(options.pop("implementation", None))

        def call(inputs):
            return self.spec.call(self.spec.main, form, inputs, **options)

        for run in (call, lambda inputs: jax.eval_shape(call, inputs)):
            with pytest.raises(error) as refused:
                run(inputs)
            for pattern in patterns:
                assert re.search(pattern, str(refused.value)), f"{pattern!r} is not in: {refused.value}"

    def test_a_missing_axis(self):
        inputs = self.correct_call()
        for name, x in inputs.items():
            if is_per_token(x):
                self.refuse(inputs | {name: x[0]}, rf"\b{name}\b", in_words(x[0].shape))

    def test_an_extra_axis(self):
        inputs = self.correct_call()
        for name, x in inputs.items():
            self.refuse(inputs | {name: x[None]}, rf"\b{name}\b", in_words(x[None].shape))

    def test_lengths_that_differ(self):
        inputs = self.correct_call()
        for name, x in inputs.items():
            if is_per_token(x):
                self.refuse(inputs | {name: x[:, :-1]}, r"\b(" + "|".join(inputs) + r")\b", rf"\b{LENGTH - 1}\b")

    def test_batches_that_differ(self):
        inputs = self.correct_call()
        for name, x in inputs.items():
            if is_per_token(x):
                self.refuse(inputs | {name: x[:1]}, r"\b(" + "|".join(inputs) + r")\b", in_words((1, LENGTH)))

    def test_tokens_and_heads_exchanged(self):
        inputs = self.correct_call()
        for name, x in inputs.items():
            if is_per_token(x):
                self.refuse(inputs | {name: jnp.swapaxes(x, 1, 2)}, r"\b(" + "|".join(inputs) + r")\b.*shape")

    def test_tokens_and_heads_exchanged_everywhere_but_in_the_segment_ids(self):
        inputs = {
            name: jnp.swapaxes(x, 1, 2) if is_per_token(x) else jnp.resize(x, (LENGTH, *x.shape[1:]))
            for name, x in self.correct_call().items()
        }
        segment_ids = jnp.ones((BATCH, LENGTH), jnp.int32)
        self.refuse(inputs, r"\bsegment_ids\b", in_words((BATCH, LENGTH)), segment_ids=segment_ids)

    def test_no_tokens(self):
        inputs = {name: x[:, :0] if is_per_token(x) else x for name, x in self.correct_call().items()}
        self.refuse(inputs, r"\b(T|tokens?)\b", r"\b0\b")

    @pytest.mark.parametrize("dtype", ["int32", "float16", "complex64", "bool"])
    def test_dtypes_that_are_not_served(self, dtype):
        inputs = self.correct_call()
        for name in inputs:
            self.refuse(inputs | {name: inputs[name].astype(dtype)}, rf"\b{name}\b", dtype)

    def test_gates_in_bfloat16(self):
        inputs = self.correct_call()
        for name in self.spec.gates & inputs.keys():
            self.refuse(inputs | {name: inputs[name].astype(jnp.bfloat16)}, rf"\b{name}\b", "bfloat16", "float32")

    def test_a_gate_that_amplifies(self):
        inputs = self.correct_call()
        for name in self.spec.decay_signs.keys() & inputs.keys():
            wrong = -0.25 * self.spec.decay_signs[name]
            spoilt = inputs | {name: inputs[name].at[1, 2, 0].set(wrong)}
            with pytest.raises(ValueError, match=rf"(?s)\b{name}\b.*{re.escape(str(wrong))}"):
                self.spec.call(self.spec.main, Form(None), spoilt)

    def test_padding_may_hold_anything_where_gates_are_checked(self):
        inputs = self.correct_call()
        segment_ids = jnp.ones((BATCH, LENGTH), jnp.int32).at[:, 2].set(0)
        gates = {name: inputs[name].at[:, 2].set(jnp.nan) for name in self.spec.decay_signs.keys() & inputs.keys()}
        out, _ = self.spec.call(self.spec.main, Form(None), inputs | gates, segment_ids)
        assert np.all(np.isfinite(out))

    def test_segment_ids_of_another_shape(self):
        for shape in [(BATCH, LENGTH + 1), (LENGTH,), (BATCH, LENGTH, 1)]:
            wrong = jnp.ones(shape, jnp.int32)
            self.refuse(self.correct_call(), r"\bsegment_ids\b", in_words(shape), segment_ids=wrong)

    @pytest.mark.parametrize("dtype", ["float32", "bool"])
    def test_segment_ids_that_are_not_integers(self, dtype):
        wrong = jnp.ones((BATCH, LENGTH), dtype)
        self.refuse(self.correct_call(), r"\bsegment_ids\b", "int32", dtype, segment_ids=wrong)

    @pytest.mark.parametrize("chunk_size", [0, -4, 2.5, "64"])
    @pytest.mark.parametrize("implementation", ["scan", "serial", None])
    def test_chunk_sizes_that_are_not_positive_integers(self, chunk_size, implementation):
        patterns = r"\bchunk_size\b", re.escape(str(chunk_size))
        self.refuse(self.correct_call(), *patterns, chunk_size=chunk_size, implementation=implementation)

    def test_an_unknown_implementation(self):
        self.refuse(
            self.correct_call(), r"\bimplementation\b", "serial", "scan", "pallas", "triton", implementation="triton"
        )

    def test_pallas_is_not_replaced_silently_on_a_cpu(self):
        self.refuse(self.correct_call(), "(?i)pallas", error=NotImplementedError, implementation="pallas")

    def test_serial_over_a_split_sequence(self):
        refusal = (ValueError, NotImplementedError)
        patterns = "serial", r"\bsequence_axis\b"
        self.refuse(self.correct_call(), *patterns, error=refusal, implementation="serial", sequence_axis="sequence")

    def test_the_state_of_another_mixer(self):
        for other in (OtherState(jnp.zeros((BATCH, 2, 5, 5))), (jnp.zeros(3),), jnp.zeros(3)):
            patterns = r"\binitial_state\b", self.spec.state.__name__, type(other).__name__
            self.refuse(self.correct_call(), *patterns, state=other)

    def test_a_state_of_another_batch(self):
        state = self.spec.init_state(self.spec.main, BATCH + 1, jnp.float32)
        self.refuse(self.correct_call(), r"\binitial_state\b", rf"\b{BATCH + 1}\b", state=state)

    def test_a_state_with_one_field_of_another_shape_or_dtype(self):
        state = self.spec.init_state(self.spec.main, BATCH, jnp.float32)
        for field in dataclasses.fields(state):
            value = getattr(state, field.name)
            for wrong, pattern in [
                (value[..., :-1], in_words(value[..., :-1].shape)),
                (value.astype(jnp.bfloat16), "bfloat16"),
            ]:
                patterns = r"\binitial_state\b", rf"\b{field.name}\b", pattern
                self.refuse(self.correct_call(), *patterns, state=dataclasses.replace(state, **{field.name: wrong}))


class QueryKeyValueErrors(Errors):
    """Misuse of mixers that take q, k, v with grouped heads and log_decay."""

    def test_head_counts_that_do_not_divide(self):
        inputs = self.correct_call()
        inputs = inputs | {"q": jnp.concatenate([inputs["q"]] * 2, axis=2)[:, :, :3]}
        self.refuse(inputs, r"\bq\b", r"\b3\b", r"\b2\b")

    def test_more_key_heads_than_query_heads(self):
        inputs = self.correct_call()
        self.refuse(inputs | {"q": inputs["q"][:, :, :1]}, r"\bq\b", r"\b1\b", r"\b2\b")

    def test_keys_and_values_with_different_heads(self):
        inputs = self.correct_call()
        self.refuse(inputs | {"v": inputs["v"][:, :, :1]}, r"\bv\b", r"\b1\b", r"\b2\b")

    def test_queries_and_keys_of_different_size(self):
        inputs = self.correct_call()
        self.refuse(inputs | {"k": inputs["k"][..., :-1]}, r"\bk\b", rf"\b{inputs['k'].shape[-1] - 1}\b")

    def test_a_decay_of_another_number_of_heads(self):
        inputs = self.correct_call()
        for wrong in (inputs["log_decay"][:, :, :1], inputs["log_decay"][0, 0, :1]):
            self.refuse(inputs | {"log_decay": wrong}, r"\blog_decay\b", in_words(wrong.shape))
