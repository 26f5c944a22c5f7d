from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import S4DState, s4d
from jaxmix.mixers.s4d import s4d_poles
from tests.contract import MixerContract, MixerSpec, Shape, Variant
from tests.contract.agreement import F64
from tests.contract.spec import SERIAL, Evaluation, Form, draw_case, evaluate, precision
from tests.mixers.modal import (
    MODES,
    PARAMETERS,
    ModalErrors,
    complex_modes,
    documents,
    draw_modes,
    modal_sums,
    unflattened,
)
from tests.tolerances import FORMS, MODAL_FLOAT32, assert_close, rms_ratio


def draw(rng, batch, tokens, variant):
    shape = variant.shape
    x = rng.normal(size=(batch, tokens, shape.heads, shape.value_size))
    return {"x": x} | draw_modes(rng, shape.heads, MODES)


def brute_force(inputs, segment_ids, variant):
    lam, gain, C = complex_modes(*(inputs[n] for n in ("A", "delta", "C")), variant.options["discretization"])
    out = np.zeros_like(inputs["x"])
    for row, tokens in documents(segment_ids):
        for head in range(out.shape[2]):
            states = modal_sums(lam[head], gain[head], inputs["x"][row, tokens, head])
            out[row, tokens, head] = np.einsum("m,tmf->tf", C[head], states).real
    return out


def init_state(variant, batch, dtype):
    return S4DState.init(batch, variant.shape.heads, MODES, variant.shape.value_size, dtype=dtype)


ZOH = Variant({"discretization": "zoh"}, Shape(value_size=3))


class TestS4D(ModalErrors, MixerContract):
    function = staticmethod(s4d)
    spec = MixerSpec(
        function=unflattened(s4d),
        state=S4DState,
        draw=draw,
        init_state=init_state,
        brute_force=brute_force,
        variants={"zoh": ZOH, "bilinear": Variant({"discretization": "bilinear"}, Shape(heads=3, value_size=1))},
        gates=PARAMETERS,
        log_gates=frozenset(),
        values="x",
        representatives=("zoh",),
        sharded_variants=("zoh",),
        lengths=(5,),
    )

    # Only one argument runs over tokens, so that there is nothing that it could differ from.
    test_lengths_that_differ = None
    test_batches_that_differ = None

    def test_the_long_convolution_equals_the_recurrence_with_every_gradient(self):
        for variant in self.spec.variants.values():
            case = draw_case(self.spec, variant)

            @jax.jit
            def convolved(case, variant=variant):
                def run(inputs, state):
                    return self.spec.call(variant, Form("fft"), inputs, None, state)

                (out, final), pull_back = jax.vjp(run, case.inputs, case.state)
                return Evaluation(out, final, *pull_back((case.out_cotangent, case.state_cotangent)))

            with precision():
                actual = convolved(self.spec.cast(case, np.float64))
            assert_close(actual, evaluate(self.spec, variant, case, SERIAL), FORMS[F64])

    @pytest.mark.parametrize("length", [1, 2, 65, 1000])
    def test_the_long_convolution_at_any_length(self, length):
        case = draw_case(self.spec, self.spec.main, 1000)
        with precision():
            inputs = self.spec.cast_inputs({**case.inputs, "x": case.inputs["x"][:, :length]}, np.float64)
            expected = self.spec.call(self.spec.main, Form("scan"), inputs)
            assert_close(self.spec.call(self.spec.main, Form("fft"), inputs), expected, FORMS[F64])

    def test_the_long_convolution_has_no_segments_and_no_devices(self):
        inputs = self.correct_call()
        ids = jnp.ones(inputs["x"].shape[:2], jnp.int32)
        self.refuse(inputs, "fft", "segment_ids", error=NotImplementedError, implementation="fft", segment_ids=ids)
        self.refuse(inputs, "fft", "sequence_axis", error=NotImplementedError, implementation="fft", sequence_axis="t")

    def test_the_direct_path_adds_and_skips_padding(self):
        inputs = self.correct_call()
        ids = jnp.ones(inputs["x"].shape[:2], jnp.int32).at[:, 3].set(0)
        D = jnp.asarray([2.0, -3.0])
        plain, _ = self.spec.call(self.spec.main, SERIAL, inputs, ids)
        with_path, _ = self.spec.call(self.spec.main, SERIAL, inputs | {"D": D}, ids)
        expected = jnp.where(ids[..., None, None] != 0, D[:, None] * inputs["x"], 0)
        np.testing.assert_allclose(with_path - plain, expected, atol=1e-6)
        spoilt = inputs | {"x": jnp.where(ids[..., None, None] != 0, inputs["x"], jnp.nan)}

        def total(D):
            return jnp.sum(self.spec.call(self.spec.main, SERIAL, spoilt | {"D": D}, ids)[0])

        gradient = jnp.sum(jnp.where(ids[..., None, None] != 0, inputs["x"], 0), axis=(0, 1, 3))
        np.testing.assert_allclose(jax.grad(total)(D), gradient, rtol=1e-5)

    def test_poles_that_grow_and_steps_that_are_not_positive(self):
        inputs = self.correct_call()
        self.refuse_values(inputs | {"A": inputs["A"].at[0, 0].set(0.5)}, r"\bA\b.*below 0.*0\.5")
        self.refuse_values(inputs | {"delta": inputs["delta"].at[1].set(-0.25)}, r"\bdelta\b.*above 0.*-0\.25")

    def refuse_values(self, inputs, pattern):
        with pytest.raises(ValueError, match=pattern):
            self.spec.call(self.spec.main, SERIAL, inputs)


@pytest.mark.parametrize("kind", ["inv", "lin", "legs"])
def test_initial_poles(kind):
    poles = s4d_poles(8, kind)
    assert poles.shape == (2, 8)
    np.testing.assert_array_equal(poles[0], -0.5)
    n = np.arange(8)
    if kind == "inv":
        np.testing.assert_allclose(poles[1], 8 / np.pi * (8 / (2 * n + 1) - 1))
    elif kind == "lin":
        np.testing.assert_allclose(poles[1], np.pi * n)
    else:
        # The eigenvalues of the normal part of HiPPO-LegS with 16 states, in conjugate pairs.
        N = np.arange(16)
        legs = -np.sqrt((2 * N[:, None] + 1) * (2 * N + 1)) * (N[:, None] > N) - np.diag(N + 1.0)
        normal = legs + np.outer(np.sqrt(N + 0.5), np.sqrt(N + 0.5))
        eigenvalues = np.linalg.eigvals(normal)
        np.testing.assert_allclose(np.sort(eigenvalues.imag)[8:], poles[1], atol=1e-9)
        np.testing.assert_allclose(eigenvalues.real, -0.5, atol=1e-9)


def test_unknown_poles():
    kind: Any = "hippo"
    with pytest.raises(ValueError, match="kind: expected one of 'inv', 'lin', 'legs', got 'hippo'"):
        s4d_poles(4, kind)


@pytest.mark.parametrize("step", [1e-3, 0.5])
def test_float32_follows_the_fast_phases_of_many_modes(step):
    """64 modes of S4D-Inv turn by up to 641 radians a token: products in float32 would lose the phase."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.normal(size=(1, 512, 1, 2)),
        "A": s4d_poles(64)[None],
        "delta": np.array([step]),
        "C": rng.normal(size=(1, 2, 64)),
    }
    single = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
    with precision(F64):
        exact = {name: jnp.asarray(x, jnp.float64) for name, x in single.items()}
        expected = jax.device_get(s4d(**exact, implementation="serial"))
    for implementation in ("serial", "scan", "fft"):
        out, _ = s4d(**{n: jnp.asarray(x) for n, x in single.items()}, implementation=implementation)
        assert rms_ratio(out, expected[0]) <= MODAL_FLOAT32, implementation
