"""JAX's transformations, dtypes, precision, compilation and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract.agreement import BF16, DOCUMENTS, F32, F64
from tests.contract.programs import largest_array, primitives
from tests.contract.spec import (
    BATCH,
    SCAN,
    SERIAL,
    TOKENS,
    Form,
    draw_case,
    evaluate,
    forward,
    precision,
    traced_forms,
)
from tests.contract.suite import Suite
from tests.tolerances import FORMS, assert_close

FORMS_UNDER_TEST = pytest.mark.parametrize("form", [SERIAL, SCAN], ids=["serial", "scan"])
FULL_PRECISION = {
    "HIGHEST",
    "Precision.HIGHEST",
    "F32_F32_F32",
    "DotAlgorithmPreset.F32_F32_F32",
}
LONG, HEADS, SIZE, CHUNK = 1024, 2, 64, 64


class Transforms(Suite):
    """Everything JAX does to a function, done to a mixer."""

    def mixer(self, form, segment_ids=None):
        """The main variant as a function of (inputs, state)."""

        def run(inputs, state):
            return self.spec.call(self.spec.main, form, inputs, segment_ids, state)

        return run

    def packed(self):
        """A packed case of the main variant."""
        return draw_case(self.spec, self.spec.main, segment_ids=DOCUMENTS)

    def arguments(self, dtype=F32):
        """A packed float32 case: inputs, segment ids and initial state."""
        case = self.spec.cast(self.packed(), dtype)
        return jax.tree.map(jnp.asarray, (case.inputs, case.segment_ids, case.state))

    @FORMS_UNDER_TEST
    def test_jit_equals_no_jit(self, form):
        inputs, segment_ids, state = self.arguments()
        compiled = forward(self.spec, self.spec.main, self.packed(), form, F32)
        assert_close(compiled, self.mixer(form, segment_ids)(inputs, state), FORMS[F32])

    def test_no_choice_means_scan_on_a_cpu(self):
        inputs, segment_ids, state = self.arguments()
        programs = [
            jax.make_jaxpr(self.mixer(Form(implementation, 5), segment_ids))(inputs, state)
            for implementation in (None, "scan", "serial")
        ]
        assert str(programs[0]) == str(programs[1]) != str(programs[2])

    def test_vmap_equals_one_call_after_another(self):
        _, segment_ids, state = self.arguments()
        case = self.packed()
        calls = [case._replace(inputs={name: x * scale for name, x in case.inputs.items()}) for scale in (1, 0.5, 0.25)]
        expected = [forward(self.spec, self.spec.main, call, SCAN, F32) for call in calls]
        per_call = jax.tree.map(lambda *x: np.stack(x), *(self.spec.cast(call, F32).inputs for call in calls))
        run = jax.jit(jax.vmap(lambda inputs: self.mixer(SCAN, segment_ids)(inputs, state)))
        assert_close(run(per_call), jax.tree.map(lambda *x: np.stack(x), *expected), FORMS[F32])

    def test_remat_gives_the_same_gradients(self):
        case = self.packed()
        expected = evaluate(self.spec, self.spec.main, case, SCAN, F32)

        @jax.jit
        def gradients(case):
            run = jax.checkpoint(self.mixer(SCAN, case.segment_ids))
            return jax.vjp(run, case.inputs, case.state)[1]((case.out_cotangent, case.state_cotangent))

        actual = gradients(self.spec.cast(case, F32))
        assert_close(actual, (expected.input_gradients, expected.state_gradient), FORMS[F32])

    def test_scan_over_layers_equals_a_loop(self):
        case, gates = self.packed(), np.array([1.0, 0.5, 0.25])
        states = jax.tree.map(lambda x: np.stack([x, 2 * x, 3 * x]), case.state)

        @jax.jit
        def scan(case, gates, states):
            def layer(scale, given):
                gate, state = given
                scaled = case.inputs | {self.spec.values: gate * scale * self.values(case.inputs)}
                out, state = self.mixer(SCAN, case.segment_ids)(scaled, state)
                return scale + jnp.tanh(jnp.mean(out)), (out, state)

            def total(gates, states):
                scale, results = jax.lax.scan(layer, 1.0, (gates, states))
                return jnp.mean(results[0]), (scale, results)

            gradients, (scale, results) = jax.grad(total, argnums=(0, 1), has_aux=True)(gates, states)
            return scale, *results, *gradients

        with precision():
            actual = jax.device_get(scan(self.spec.cast(case, F64), gates, states))
        assert_close(actual, self.loop_over_layers(case, gates, states), FORMS[F64])

    def loop_over_layers(self, case, gates, states):
        """What the scan above gives, by one call a layer and the chain rule back through the calls."""
        values, scales, calls = self.values(case.inputs), [1.0], []
        for i, gate in enumerate(gates):
            scaled = case.inputs | {self.spec.values: gate * scales[i] * values}
            state = jax.tree.map(lambda x, i=i: x[i], states)
            calls.append(case._replace(inputs=scaled, state=state, state_cotangent=jax.tree.map(np.zeros_like, state)))
            scales.append(scales[i] + np.tanh(np.mean(evaluate(self.spec, self.spec.main, calls[i], SCAN).out)))
        to_scale, results, to_gates = 0.0, [], np.zeros_like(gates)
        for i in reversed(range(len(gates))):
            # The total is the mean over layers; tanh' = 1 - tanh^2.
            to_mean = 1 / len(gates) + to_scale * (1 - (scales[i + 1] - scales[i]) ** 2)
            cotangent = np.full_like(case.out_cotangent, to_mean / case.out_cotangent.size)
            call = calls[i]._replace(out_cotangent=cotangent)
            results.insert(0, evaluate(self.spec, self.spec.main, call, SCAN))
            to_product = np.sum(results[0].input_gradients[self.spec.values] * values)
            to_gates[i] = scales[i] * to_product
            to_scale += gates[i] * to_product
        out, state, to_state = (
            jax.tree.map(lambda *x: np.stack(x), *(getattr(result, name) for result in results))
            for name in ("out", "state", "state_gradient")
        )
        return scales[-1], out, state, to_gates, to_state

    def values(self, inputs):
        """The input that gives the output its dtype."""
        return inputs[self.spec.values]

    def test_lengths_inside_one_bucket_compile_once(self):
        forward(self.spec, self.spec.main, self.packed(), SCAN, F32)
        before = len(traced_forms)
        for length in (1, 5, 17, TOKENS):
            segment_ids = np.tile(np.arange(TOKENS) < length, (BATCH, 1))
            forward(self.spec, self.spec.main, self.packed()._replace(segment_ids=segment_ids), SCAN, F32)
        assert len(traced_forms) == before

    @FORMS_UNDER_TEST
    @pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
    def test_each_result_has_its_dtype(self, form, dtype):
        inputs, segment_ids, state = self.arguments(dtype)
        self.check_dtypes(inputs, segment_ids, state, form)

    def test_inputs_of_mixed_dtypes(self):
        inputs, segment_ids, state = self.arguments()
        for odd in inputs.keys() - self.spec.gates:
            mixed = {
                name: x.astype(BF16) if (name == odd and name not in self.spec.gates) else x
                for name, x in inputs.items()
            }
            self.check_dtypes(mixed, segment_ids, state, SCAN)

    def check_dtypes(self, inputs, segment_ids, state, form):
        """The output has the dtype of the values, states are float32, each gradient has its argument's dtype."""
        out, final = jax.eval_shape(self.mixer(form, segment_ids), inputs, state)
        assert out.dtype == self.values(inputs).dtype
        assert {x.dtype for x in jax.tree.leaves(final)} == {F32}

        def loss(inputs, state):
            out, final = self.mixer(form, segment_ids)(inputs, state)
            return jnp.sum(out.astype(F32)) + sum(jnp.sum(x) for x in jax.tree.leaves(final))

        gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), inputs, state)
        assert jax.tree.map(lambda x: x.dtype, gradients) == jax.tree.map(lambda x: x.dtype, (inputs, state))

    @FORMS_UNDER_TEST
    @pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
    def test_matrix_products_are_forced_to_full_precision(self, form, dtype):
        inputs, segment_ids, state = self.arguments(dtype)

        def loss(inputs, state):
            return jnp.sum(self.mixer(form, segment_ids)(inputs, state)[0].astype(F32))

        traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(inputs, state)
        products = [equation for equation in primitives(traced) if equation.primitive.name == "dot_general"]
        assert products
        for equation in products:
            chosen = equation.params["precision"]
            chosen = chosen if isinstance(chosen, tuple) else (chosen,)
            assert {str(x) for x in chosen} <= FULL_PRECISION, equation
            assert {x.aval.dtype for x in equation.invars} == {F32}, equation

    def test_training_in_bfloat16_stays_finite_and_learns(self):
        inputs, segment_ids, state = self.arguments(BF16)
        fresh = jax.tree.map(jnp.zeros_like, state)
        scaled = sorted(inputs.keys() - self.spec.gates)
        shapes = {name: inputs[name].shape[2:] for name in scaled}
        shapes["read"] = jax.eval_shape(self.mixer(SCAN), inputs, fresh)[0].shape[2:]

        def model(weights):
            given = inputs | {name: inputs[name] * weights[name].astype(BF16) for name in scaled}
            out = self.mixer(SCAN, segment_ids)(given, fresh)[0].astype(F32)
            out = out * jax.lax.rsqrt(jnp.mean(out**2, axis=-1, keepdims=True) + 1e-6)
            return jnp.sum(out * weights["read"], axis=(2, 3))

        rng = np.random.default_rng(3)
        target_weights = {name: np.asarray(rng.normal(size=shape), F32) for name, shape in shapes.items()}

        def step(target, carry):
            weights, average = carry
            loss, gradient = jax.value_and_grad(lambda weights: jnp.mean((model(weights) - target) ** 2))(weights)
            average = jax.tree.map(lambda m, g: 0.9 * m + g, average, gradient)
            return (jax.tree.map(lambda w, m: w - 0.005 * m, weights, average), average), loss

        @jax.jit
        def train(weights, target_weights):
            target = model(target_weights)
            start = (weights, jax.tree.map(jnp.zeros_like, weights))
            return jax.lax.scan(lambda carry, _: step(target, carry), start, length=300)

        (weights, _), losses = train({name: np.ones(shape, F32) for name, shape in shapes.items()}, target_weights)
        assert np.all(np.isfinite(losses))
        assert all(np.all(np.isfinite(x)) for x in weights.values())
        assert np.mean(losses[-10:]) < 0.3 * losses[0]

    def test_scan_memory_grows_with_chunks_and_holds_no_square(self):
        small, large = (self.compiled_program(tokens) for tokens in (LONG // 2, LONG))
        half, whole = (program.memory_analysis().temp_size_in_bytes for program in (small, large))
        assert whole < 2.1 * half  # anything quadratic in the length would be near 4
        assert largest_array(large.as_text()) < min(LONG * SIZE * SIZE, LONG * LONG)

    def compiled_program(self, tokens):
        """The scan over one long row, forward and backward, compiled but not run."""
        variant = self.spec.sized(heads=HEADS, size=SIZE)
        inputs = self.spec.cast_inputs(self.spec.draw(np.random.default_rng(0), 1, tokens, variant), F32)
        state = self.spec.init_state(variant, 1, F32)

        def forward(inputs, state):
            return self.spec.call(variant, Form("scan", CHUNK), inputs, None, state)

        def backward(inputs, state, cotangents):
            return jax.vjp(forward, inputs, state)[1](cotangents)

        cotangents = jax.eval_shape(forward, inputs, state)
        return jax.jit(backward).lower(inputs, state, cotangents).compile()
