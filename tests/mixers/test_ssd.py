import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import linear_attention, ssd
from jaxmix.mixers import LinearAttentionState, SSDState
from tests.contract import MixerContract, MixerSpec, Shape, Variant
from tests.contract.agreement import DOCUMENTS, F32, F64
from tests.contract.errors import in_words
from tests.contract.spec import BATCH, SCAN, SERIAL, TOKENS, draw_case, evaluate, precision
from tests.mixers import brute_force
from tests.mixers.modal import documents
from tests.tolerances import BRUTE_FORCE, FORMS, assert_close, assert_same_bits, rms_ratio

FORMS_UNDER_TEST = pytest.mark.parametrize("form", [SERIAL, SCAN], ids=["serial", "scan"])
DIRECT, TWO_GROUPS, ONE_GROUP = (
    Variant(gate="direct"),
    Variant(shape=Shape(heads=4, kv_heads=2, key_size=3, value_size=4)),
    Variant(shape=Shape(heads=3, kv_heads=1, key_size=4, value_size=4), gate="direct"),
)


def draw(rng, batch, tokens, variant):
    """x, B, C of variance one, dt between 1e-3 and 0.5, A between -3 and -1, and D where the gate is "direct"."""
    shape = variant.shape
    inputs = {
        "x": rng.normal(size=(batch, tokens, shape.heads, shape.value_size)),
        "dt": np.exp(rng.uniform(np.log(1e-3), np.log(0.5), (batch, tokens, shape.heads))),
        "A": rng.uniform(-3.0, -1.0, shape.heads),
        "B": rng.normal(size=(batch, tokens, shape.kv_heads, shape.key_size)),
        "C": rng.normal(size=(batch, tokens, shape.kv_heads, shape.key_size)),
    }
    if variant.gate == "direct":
        inputs["D"] = rng.normal(size=shape.heads)
    return inputs


def explicit_sums(inputs, segment_ids, variant):
    """y_t = sum_{j <= t} exp(A sum of dt over (j, t]) dt_j (C_t . B_j) x_j + D x_t."""
    x, dt, A, B, C = (inputs[name] for name in ("x", "dt", "A", "B", "C"))
    D = inputs.get("D", np.zeros_like(A))
    out = np.zeros_like(x)
    for row, tokens in documents(segment_ids):
        for head in range(x.shape[2]):
            group = head // (x.shape[2] // B.shape[2])
            values, step = x[row, tokens, head], dt[row, tokens, head]
            summed = brute_force.linear_attention(
                C[row, tokens, group], B[row, tokens, group], step[:, None] * values, A[head] * step
            )
            out[row, tokens, head] = summed + D[head] * values
    return out


def init_state(variant, batch, dtype):
    shape = variant.shape
    return SSDState.init(batch, shape.heads, shape.key_size, shape.value_size, dtype=dtype)


class TestSSD(MixerContract):
    spec = MixerSpec(
        function=ssd,
        state=SSDState,
        draw=draw,
        init_state=init_state,
        brute_force=explicit_sums,
        variants={"direct path": DIRECT, "two groups of four heads": TWO_GROUPS, "one group, direct path": ONE_GROUP},
        gates=frozenset({"dt", "A", "D"}),
        log_gates=frozenset(),
        step_gates=frozenset({"dt"}),
        values="x",
        representatives=("direct path", "two groups of four heads"),
        sharded_variants=("direct path",),
        lengths=(5,),
    )

    @FORMS_UNDER_TEST
    def test_it_is_linear_attention_with_every_gradient(self, any_variant, form):
        case = draw_case(self.spec, any_variant, segment_ids=DOCUMENTS)
        with precision():
            inputs, state = self.spec.cast_inputs(case.inputs, np.float64), jax.tree.map(jnp.asarray, case.state)
            heads, repeats = any_variant.shape.heads, any_variant.shape.heads // any_variant.shape.kv_heads

            @jax.jit
            def run(inputs, state):
                def attention(inputs, state):
                    x, dt, A, B, C = (inputs[name] for name in ("x", "dt", "A", "B", "C"))
                    state = LinearAttentionState(state.P, jnp.zeros((BATCH, heads, B.shape[3])))
                    out, final = linear_attention(
                        jnp.repeat(C, repeats, axis=2),
                        jnp.repeat(B, repeats, axis=2),
                        dt[..., None] * x,
                        dt * A,
                        segment_ids=case.segment_ids,
                        initial_state=state,
                        implementation=form.implementation,
                        chunk_size=16,
                    )
                    return out + inputs["D"][:, None] * x if "D" in inputs else out, SSDState(final.P)

                (out, final), pull_back = jax.vjp(attention, inputs, state)
                return out, final, *pull_back((case.out_cotangent, case.state_cotangent))

            expected = jax.device_get(run(inputs, state))
        assert_close(tuple(evaluate(self.spec, any_variant, case, form)), expected, FORMS[F64])

    @FORMS_UNDER_TEST
    def test_a_step_of_zero_leaves_the_state(self, form):
        case = draw_case(self.spec, self.spec.main)
        case.inputs["dt"] = np.zeros((BATCH, TOKENS, 2))
        actual = evaluate(self.spec, self.spec.main, case, form)
        assert_same_bits(actual.state, case.state)
        read = np.einsum("bthn,bhne->bthe", case.inputs["C"], case.state.P)
        assert rms_ratio(actual.out, read + case.inputs["D"][:, None] * case.inputs["x"]) <= BRUTE_FORCE

    def test_without_the_direct_path_it_is_one_of_zero(self):
        inputs = self.correct_call()
        expected = ssd(**inputs | {"D": jnp.zeros(2)})
        del inputs["D"]
        assert_same_bits(ssd(**inputs), expected)
        assert_same_bits(ssd(**inputs, D=None), expected)

    @FORMS_UNDER_TEST
    def test_heads_of_a_group_share_their_maps(self, form):
        case = draw_case(self.spec, TWO_GROUPS)
        actual = evaluate(self.spec, TWO_GROUPS, case, form)
        own = Variant(shape=Shape(heads=4, kv_heads=4, key_size=3, value_size=4))
        repeated = {name: np.repeat(case.inputs[name], 2, axis=2) for name in ("B", "C")}
        expected = evaluate(self.spec, own, case._replace(inputs=case.inputs | repeated), form)
        for name in repeated:
            gradient = expected.input_gradients[name]
            expected.input_gradients[name] = gradient.reshape(BATCH, TOKENS, 2, 2, -1).sum(axis=3)
        assert_close(actual, expected, FORMS[F64])

    def test_padding_has_no_direct_path(self):
        inputs = self.correct_call()
        ids = jnp.ones(inputs["x"].shape[:2], jnp.int32).at[:, 3].set(0)
        plain, _ = ssd(**inputs | {"D": None}, segment_ids=ids)
        with_path, _ = ssd(**inputs, segment_ids=ids)
        expected = jnp.where(ids[..., None, None] != 0, inputs["D"][:, None] * inputs["x"], 0)
        np.testing.assert_allclose(with_path - plain, expected, atol=1e-6)

    def test_rates_and_direct_paths_of_another_shape(self):
        inputs = self.correct_call()
        for name in ("A", "D"):
            for wrong in (inputs[name][:1], jnp.ones((2, 2)), jnp.ones(())):
                self.refuse(
                    inputs | {name: -wrong}, rf"\b{name}: expected shape", in_words((2,)), in_words(wrong.shape)
                )

    def test_rates_that_do_not_decay(self):
        inputs = self.correct_call()
        for value in (0.0, 0.5, float("nan")):
            with pytest.raises(ValueError, match=rf"\bA: expected values below 0, got {value}"):
                ssd(**inputs | {"A": inputs["A"].at[1].set(value)})

    def test_groups_that_do_not_divide_the_heads(self):
        inputs = self.correct_call()
        three = {name: jnp.concatenate([inputs[name]] * 2, axis=2)[:, :, :3] for name in ("B", "C")}
        self.refuse(inputs | three, r"\bB: expected a group count that divides the 2 heads of x", r"got 3 groups")

    def test_maps_and_readouts_of_different_shape(self):
        inputs = self.correct_call()
        for wrong in (inputs["C"][:, :, :1], inputs["C"][..., :-1]):
            self.refuse(inputs | {"C": wrong}, r"\bC: expected shape", in_words(wrong.shape))

    def test_forward_mode(self):
        inputs = self.correct_call()
        directions = {name: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for name, x in inputs.items()}

        def run(inputs):
            return ssd(**inputs, chunk_size=4)

        (out, state), tangents = jax.jvp(run, (inputs,), (directions,))
        cotangents = jax.tree.map(jnp.sin, (out, state))
        (gradients,) = jax.vjp(run, inputs)[1](cotangents)
        forward = sum(jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (tangents, cotangents)), strict=True))
        backward = sum(jnp.vdot(gradients[name], directions[name]) for name in inputs)
        assert rms_ratio(forward, backward) <= FORMS[F32]
