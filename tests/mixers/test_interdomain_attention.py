import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import InterdomainAttentionState, interdomain_attention
from jaxmix.mixers.s4d import s4d_poles
from tests.contract import MixerContract, MixerSpec, QueryKeyValueErrors, Shape, Variant
from tests.contract.agreement import F64
from tests.contract.programs import primitives
from tests.contract.spec import SERIAL, TOKENS, Form, draw_case, evaluate, precision
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
    inputs = {
        "q": rng.normal(size=(batch, tokens, shape.heads, shape.key_size)),
        "k": rng.normal(size=(batch, tokens, shape.kv_heads, shape.key_size)),
        "v": rng.normal(size=(batch, tokens, shape.kv_heads, shape.value_size)),
    }
    if variant.positive:
        inputs |= {name: np.abs(inputs[name]) + 0.1 for name in ("q", "k")}
    mixing = MODES if variant.gate.endswith("diagonal") else MODES**2
    return inputs | draw_modes(rng, state_heads(variant), mixing)


def state_heads(variant):
    return variant.shape.kv_heads if variant.gate.startswith("shared") else variant.shape.heads


def brute_force(inputs, segment_ids, variant):
    """U, Gamma and eta of every token as the definition has them, then the readout."""
    options = {"discretization": "zoh", **variant.options}
    q, heads = inputs["q"], inputs["q"].shape[2]
    k, v = (np.repeat(inputs[n], heads // inputs[n].shape[2], axis=2) for n in "kv")
    modes = complex_modes(*(inputs[n] for n in ("A", "delta", "C")), options["discretization"])
    lam, gain, C = (np.repeat(x, heads // len(x), axis=0) for x in modes)
    C = C if C.ndim == 3 else np.stack([np.diag(c) for c in C])
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for row, tokens in documents(segment_ids):
        for head in range(heads):
            z = np.concatenate([k[row, tokens, head], v[row, tokens, head], np.ones((len(tokens), 1))], axis=1)
            mixed = np.einsum("nm,tmf->tnf", C[head], modal_sums(lam[head], gain[head], z))
            size = k.shape[-1]
            weights = np.einsum("td,tnd->tn", q[row, tokens, head], mixed[..., :size])
            weights = weights.conj() if options.get("conjugate") else weights
            read = np.einsum("tn,tnf->tf", weights, mixed[..., size:]).real
            normalized = read[:, :-1] / (read[:, -1:] + options.get("eps", 0))
            out[row, tokens, head] = normalized if options.get("normalize") else read[:, :-1]
    return out


def init_state(variant, batch, dtype):
    shape = variant.shape
    sizes = (batch, shape.heads, shape.key_size, shape.value_size)
    return InterdomainAttentionState.init(*sizes, modes=MODES, shared_heads=state_heads(variant), dtype=dtype)


SMALL = Shape(key_size=3, value_size=4)
GROUPED = Shape(heads=4, kv_heads=2, key_size=3, value_size=4)


class TestInterdomainAttention(ModalErrors, QueryKeyValueErrors, MixerContract):
    function = staticmethod(interdomain_attention)
    spec = MixerSpec(
        function=unflattened(interdomain_attention),
        state=InterdomainAttentionState,
        draw=draw,
        init_state=init_state,
        brute_force=brute_force,
        variants={
            "full": Variant(shape=SMALL, gate="own full"),
            "shared modes, normalised": Variant(
                {"normalize": True, "eps": 0.5}, GROUPED, gate="shared full", positive=True
            ),
            "diagonal, conjugate, bilinear": Variant(
                {"conjugate": True, "discretization": "bilinear"}, GROUPED, gate="own diagonal"
            ),
            "conjugate": Variant({"conjugate": True}, SMALL, gate="own full"),
        },
        gates=PARAMETERS,
        log_gates=frozenset(),
        representatives=("full",),
        sharded_variants=("shared modes, normalised",),
        lengths=(5,),
    )
    test_a_decay_of_another_number_of_heads = None

    def test_modes_of_another_number_of_heads(self):
        inputs = self.correct_call()
        self.refuse(inputs | {name: inputs[name][:1] for name in PARAMETERS}, r"\bA\b", r"\b2 heads\b")

    def test_the_state_gives_inducing_keys_values_and_ones(self):
        for variant in self.spec.variants.values():
            if variant.options.get("normalize"):
                continue
            case = draw_case(self.spec, variant)
            result = evaluate(self.spec, variant, case, SERIAL)
            C = case.inputs["C"]
            C = C.reshape(len(C), 2, *((MODES, MODES) if C.shape[1] > 2 * MODES else (MODES,)))
            with precision():
                state, C = jax.tree.map(jnp.asarray, (result.state, C))
                U, Gamma, eta = (np.asarray(f(C)) for f in (state.U, state.Gamma, state.eta))
            repeats = variant.shape.heads // U.shape[1]
            U, Gamma = (np.repeat(x[:, :, 0] + 1j * x[:, :, 1], repeats, axis=1) for x in (U, Gamma))
            weights = np.einsum("bhd,bhmd->bhm", case.inputs["q"][:, -1], U)
            weights = weights.conj() if variant.options.get("conjugate") else weights
            expected = np.einsum("bhm,bhme->bhe", weights, Gamma).real
            assert rms_ratio(result.out[:, -1], expected) <= FORMS[F64]
            assert eta.shape == (*U.shape[:1], state.X1.shape[1], 2, MODES)

    def test_a_diagonal_mixing_is_a_full_one_with_zeros(self):
        variant = self.spec.variants["diagonal, conjugate, bilinear"]
        case = draw_case(self.spec, variant)
        C = case.inputs["C"].reshape(-1, 2, MODES)
        full = (C[..., None] * np.eye(MODES)).reshape(len(C), -1)
        expected = evaluate(self.spec, variant, case, SERIAL)
        actual = evaluate(self.spec, variant, case._replace(inputs=case.inputs | {"C": full}), SERIAL)
        assert_close((actual.out, actual.state), (expected.out, expected.state), FORMS[F64])

    def test_the_scan_keeps_no_modes_of_tokens(self):
        """The largest array is smaller than T M (D + E)."""
        tokens, size, modes = 1024, 32, 16
        shapes = {n: jax.ShapeDtypeStruct((1, tokens, 1, size), jnp.float32) for n in "qkv"}
        A, delta, C = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 2, modes), (1,), (1, 2, modes, modes)))
        traced = jax.make_jaxpr(lambda **x: interdomain_attention(**x))(**shapes, A=A, delta=delta, C=C)
        largest = max(v.aval.size for equation in primitives(traced) for v in equation.outvars)
        assert largest < tokens * modes * 2 * size


def paper_layer(step, real, tokens=512):
    """One head with 64 modes and the initial values of the paper's layer."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(2, 1, tokens, 1, 8))
    q, k = features / np.linalg.norm(features, axis=-1, keepdims=True)
    poles = s4d_poles(64)[None] * np.array([real / 0.5, 1.0])[:, None]
    C = rng.normal(size=(1, 2, 64, 64)) * 128**-0.5
    arrays = {"q": q, "k": k, "v": rng.normal(size=q.shape), "A": poles, "delta": np.array([step]), "C": C}
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}


@functools.partial(jax.jit, static_argnums=(2, 3))
def gradient_of_all(arrays, weights, form, chunk_size):
    """Gradients of a loss that reads output and final state, then these two."""

    def loss(arrays):
        out, state = interdomain_attention(**arrays, implementation=form, chunk_size=chunk_size)
        return jnp.sum(weights * out) + sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(state)), (out, state)

    return jax.grad(loss, has_aux=True)(arrays)


@pytest.mark.parametrize(("step", "real", "chunk_size"), [(1e-3, 0.5, 16), (0.5, 20.0, 256)])
def test_float64_scan_of_4096_tokens_with_every_gradient(step, real, chunk_size):
    arrays = paper_layer(step, real, 4096)
    with precision():
        arrays = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
        weights = jnp.cos(jnp.arange(arrays["v"].size, dtype=jnp.float64)).reshape(arrays["v"].shape)

        expected = jax.device_get(gradient_of_all(arrays, weights, "serial", 64))
        assert_close(gradient_of_all(arrays, weights, "scan", chunk_size), expected, FORMS[F64])


@pytest.mark.parametrize(("step", "real"), [(1e-3, 0.5), (1e-1, 0.5), (0.5, 0.5), (0.5, 1e3), (10.0, 1e4)])
def test_float32_is_finite_and_exact_whatever_the_decay(step, real):
    """Decays up to exp(-100000) a step: no power of Lam below zero is taken, so that nothing can overflow."""
    arrays = paper_layer(step, real, 200)
    with precision(F64):
        exact = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
        expected = jax.device_get(interdomain_attention(**exact, implementation="serial")[0])
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}

    def loss(arrays, form):
        out, _ = interdomain_attention(**arrays, implementation=form, chunk_size=64)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)), out

    for form in ("serial", "scan"):
        gradients, out = jax.grad(loss, has_aux=True)(arrays, form)
        assert rms_ratio(out, expected) <= MODAL_FLOAT32, form
        assert all(np.all(np.isfinite(x)) for x in gradients.values()), form


def test_time_does_not_pass_in_padding():
    spec = TestInterdomainAttention.spec
    case = draw_case(spec, spec.main)
    ids = np.ones((2, TOKENS), np.int32)
    ids[:, 5:20] = 0
    packed = evaluate(spec, spec.main, case._replace(segment_ids=ids), SERIAL)
    real = np.flatnonzero(ids[0])
    short = {n: x[:, real] if x.ndim >= 3 else x for n, x in case.inputs.items()}
    with precision():
        out, state = spec.call(spec.main, Form("scan", 4), spec.cast_inputs(short, np.float64), None, case.state)
        assert_close((out, state), (packed.out[:, real], packed.state), FORMS[F64])
