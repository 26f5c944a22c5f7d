"""The NAtS-L layer: its formula, its router, and options that it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmix.nn.natsl as module
from jaxmix.nn import GatedDeltaNet, NAtSL, NAtSLConfig
from jaxmix.nn.parameters import parameter_label
from tests.mixers.natsl import CHUNK, GROUP, HEADS, definition
from tests.tolerances import FORMS, ROUTER_GRADIENT, assert_close, assert_same_bits

WIDTH, BATCH, TOKENS = 16, 2, 15
KEYS, VALUES = 4, 6
F64 = FORMS[np.dtype(np.float64)]
COMPLETE = TOKENS // CHUNK
X = np.random.default_rng(0).normal(size=(BATCH, TOKENS, WIDTH))
COTANGENT = np.random.default_rng(1).normal(size=X.shape)


def build(dtype=jnp.float64, **options):
    """A layer with kernels larger than at the start of training, so that nothing is nearly zero."""
    options = {"key_size": KEYS, "value_size": VALUES, "chunk_size": CHUNK, "capacity": 16} | options
    with jax.enable_x64(dtype == jnp.float64):
        layer = NAtSL(WIDTH, heads=HEADS, group=GROUP, rngs=nnx.Rngs(0), param_dtype=dtype, init_std=0.4, **options)
        names = ("softmax_query_norm", "softmax_key_norm", "linear_norm", "softmax_norm")
        for number, norm in enumerate(filter(None, (getattr(layer, name) for name in names))):
            size = norm.scale.shape[0]
            norm.scale[...] = jnp.linspace(0.5 + 0.1 * number, 1.5, size, dtype=dtype)
        return layer


@pytest.fixture
def precise():
    with jax.enable_x64(True):
        yield


def chunk_means(x):
    """The means over the chunks that are full, [B, N, d]."""
    return x[:, : COMPLETE * CHUNK].reshape(BATCH, COMPLETE, CHUNK, WIDTH).mean(axis=2)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, norm):
    return x if norm is None else x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * norm.scale[...]


def convolved(x, kernel):
    """Causal convolution of width 4 and SiLU."""
    padded = np.pad(x, [(0, 0), (len(kernel) - 1, 0), (0, 0)])
    y = sum(padded[:, w : w + x.shape[1]] * weight for w, weight in enumerate(np.asarray(kernel)))
    return y * sigmoid(y)


def rotated(x, base=10000.0):
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def by_the_formula(layer, x):
    """natsl.md, section 1, in numpy."""
    config = layer.config

    def heads(y, number):
        return y.reshape(*y.shape[:2], number, -1)

    def kernel(part):
        return np.asarray(part.kernel[...])

    streams = zip((layer.query, layer.key, layer.value), layer.convolutions, strict=True)
    q, k, v = (convolved(x @ kernel(part), convolution.kernel[...]) for part, convolution in streams)
    first = (chunk_means(x) @ kernel(layer.router)).reshape(BATCH, COMPLETE, HEADS, 2)
    routed = first[..., 0] >= first[..., 1]
    routed = np.concatenate([routed, np.zeros((BATCH, 1, HEADS), bool)], axis=1)
    softmax_q, softmax_k = rms(heads(q, 4), layer.softmax_query_norm), rms(heads(k, 4), layer.softmax_key_norm)
    if config.rope:
        softmax_q, softmax_k = rotated(softmax_q), rotated(softmax_k)
    step = np.log1p(np.exp(x @ kernel(layer.decay.projection) + np.asarray(layer.decay.dt_bias[...])))
    inputs = {
        "q": unit(heads(q, HEADS)),
        "k": unit(heads(k, HEADS)),
        "v": heads(v, HEADS),
        "log_decay": -np.exp(np.asarray(layer.decay.A_log[...])) * step,
        "beta": sigmoid(x @ kernel(layer.beta)),
        "q_softmax": softmax_q,
        "k_softmax": softmax_k,
        "v_softmax": heads(v, HEADS * GROUP),
        "choice": np.stack([routed, ~routed], axis=-1).astype(float),
    }
    linear, attended = map(np.asarray, definition(inputs, np.ones((BATCH, TOKENS), int)))
    branches = rms(heads(linear, HEADS * GROUP), layer.linear_norm), rms(attended, layer.softmax_norm)
    weights = np.full((BATCH, TOKENS, HEADS * GROUP, 2), 0.5)
    if config.fusion is not None:
        weights = softmax(heads({"queries": q, "input": x}[config.fusion] @ kernel(layer.fusion), HEADS * GROUP))
    fused = (weights[..., :1] * branches[0] + weights[..., 1:] * branches[1]).reshape(BATCH, TOKENS, -1)
    gate = x @ kernel(layer.gate)
    return routed[:, :COMPLETE], (fused * gate * sigmoid(gate)) @ kernel(layer.out)


def unit(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize(
    "options",
    [{}, {"rope": True, "fusion": "input", "branch_norm": False, "key_size": 8}, {"fusion": None}],
    ids=["default", "rope, fusion from the input, no branch norm", "no fusion weights"],
)
def test_the_layer_is_its_formula(options):
    layer = build(**options)
    routed, expected = by_the_formula(layer, X)
    assert 0 < np.mean(routed) < 1
    assert_close(jax.jit(lambda x: layer(x)[0])(X), expected, F64)


@pytest.mark.usefixtures("precise")
def test_the_router_reads_the_mean_of_each_chunk_and_chooses_exactly():
    layer = build()
    choice, seen = layer.route(jnp.asarray(X), None, None)
    assert set(np.unique(choice)) == {0.0, 1.0}
    assert np.all(choice.sum(axis=-1) == 1)
    assert np.array_equal(choice[:, :COMPLETE, :, 0] == 1, by_the_formula(layer, X)[0])
    assert_close(seen, X[:, COMPLETE * CHUNK :].sum(axis=1), F64)


@functools.cache
def router_gradients(counterfactual):
    """Gradient of the router's kernel; that of the choice; probabilities; means of chunks."""
    layer = build(counterfactual_router_grad=counterfactual)
    definition, parameters = nnx.split(layer)
    mixer = module.natsl_attention

    def loss(parameters, shift):
        def shifted(*arrays, **options):
            return mixer(*arrays[:8], arrays[8] + shift, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "natsl_attention", shifted)
            return jnp.sum(nnx.merge(definition, parameters)(jnp.asarray(X))[0] * COTANGENT)

    shift = jnp.zeros((BATCH, COMPLETE + 1, HEADS, 2))
    gradients, D = jax.jit(jax.grad(loss, argnums=(0, 1)))(parameters, shift)
    means = np.pad(chunk_means(X), [(0, 0), (0, 1), (0, 0)])
    kernel = np.asarray(layer.router.kernel[...])
    return np.asarray(gradients["router"]["kernel"][...]), np.asarray(D), means, kernel


@pytest.mark.usefixtures("precise")
def test_the_routers_gradient_is_that_of_the_chosen_operation():
    gradient, D, means, kernel = router_gradients(False)
    p = softmax((means @ kernel).reshape(*means.shape[:2], HEADS, 2))
    chosen = p == p.max(axis=-1, keepdims=True)
    assert not np.any(D[~chosen])
    assert np.all(D[:, : COMPLETE - 1].sum(axis=-1) != 0)
    p_chosen, D_chosen = (np.sum(np.where(chosen, x, 0), axis=-1, keepdims=True) for x in (p, D))
    dz = p_chosen * (1 - p_chosen) * D_chosen * np.where(chosen, 1, -1)
    assert_close(gradient, np.einsum("bnd,bnz->dz", means, dz.reshape(*means.shape[:2], -1)), ROUTER_GRADIENT)


@pytest.mark.usefixtures("precise")
def test_the_counterfactual_gradient_weighs_both_operations():
    gradient, D, means, kernel = router_gradients(True)
    p = softmax((means @ kernel).reshape(*means.shape[:2], HEADS, 2))
    assert np.all(D[:, : COMPLETE - 1] != 0)
    dz = p * (D - np.sum(p * D, axis=-1, keepdims=True))
    assert_close(gradient, np.einsum("bnd,bnz->dz", means, dz.reshape(*means.shape[:2], -1)), ROUTER_GRADIENT)


@pytest.mark.usefixtures("precise")
def test_changing_a_token_moves_no_earlier_output_though_the_choice_changes():
    layer = build()
    run = jax.jit(lambda x: (layer(x)[0], layer.route(x, None, None)[0]))
    before, choice = run(jnp.asarray(X))
    kernel = np.asarray(layer.router.kernel[...]).reshape(WIDTH, HEADS, 2)
    changed = X.copy()
    # The last token of the second chunk turns the choice of the first head.
    signs = np.where(np.asarray(choice)[:, 1, 0, 0] == 1, -1, 1)
    changed[:, 7] += 100 * signs[:, None] * (kernel[:, 0, 0] - kernel[:, 0, 1])
    after, other = run(jnp.asarray(changed))
    assert np.all(other[:, 1, 0] != choice[:, 1, 0])
    assert_same_bits(np.delete(other, 1, axis=1), np.delete(choice, 1, axis=1))
    assert_same_bits(after[:, :7], before[:, :7])
    assert np.all(np.any(after[:, 7:] != before[:, 7:], axis=-1))


def test_the_router_is_float32_in_a_bfloat16_layer():
    layer = build(jnp.bfloat16)
    x = jnp.asarray(X, jnp.bfloat16)
    choice, seen = layer.route(x, None, None)
    assert choice.dtype == seen.dtype == layer.router.kernel.dtype == jnp.float32
    wide = np.asarray(x, np.float32)
    z = (chunk_means(wide) @ np.asarray(layer.router.kernel[...])).reshape(BATCH, COMPLETE, HEADS, 2)
    assert np.array_equal(choice[:, :COMPLETE, :, 0] == 1, z[..., 0] >= z[..., 1])
    assert layer.query.kernel.dtype == jax.eval_shape(layer, x)[0].dtype == jnp.bfloat16


def test_bfloat16_computes_the_same():
    x = jnp.asarray(X, jnp.bfloat16)
    kinds = {"wide": jnp.float32, "narrow": jnp.bfloat16}
    y = {}
    for kind, dtype in kinds.items():
        layer = NAtSL(
            WIDTH, heads=HEADS, key_size=4, value_size=6, chunk_size=4, rngs=nnx.Rngs(0), dtype=dtype, init_std=0.3
        )
        y[kind] = jax.jit(lambda x, layer=layer: layer(x)[0])(x)
    assert_close(y["narrow"], y["wide"], FORMS[np.dtype(jnp.bfloat16)])


@pytest.mark.usefixtures("precise")
def test_a_router_that_chooses_linear_only_leaves_gated_delta_net(monkeypatch):
    layer = build()
    sizes = {"heads": HEADS, "key_size": KEYS, "value_size": VALUES, "chunk_size": CHUNK}
    peer = GatedDeltaNet(WIDTH, rngs=nnx.Rngs(1), param_dtype=jnp.float64, **sizes)
    shared = parts(peer) & parts(layer)
    assert parts(peer) - shared == {"out_norm"}
    nnx.update(peer, {name: nnx.state(getattr(layer, name)) for name in shared})
    # A channel that is always one, and a router that sees nothing else.
    x = jnp.asarray(X).at[..., 0].set(1.0)
    layer.router.kernel[...] = jnp.zeros((WIDTH, 2 * HEADS)).at[0, 1::2].set(1.0)
    seen = []
    mixer = module.natsl_attention

    def watched(*arrays, **options):
        seen.append(mixer(*arrays, **options))
        return seen[-1]

    monkeypatch.setattr(module, "natsl_attention", watched)
    _, state = layer(x)
    assert not np.any(state.mixer.attention.used)
    tails = peer.init_state(BATCH).convolutions
    streams, _ = peer.project(x, None, tails, jnp.zeros((BATCH, TOKENS), jnp.int32))
    assert_close(seen[0][0][0], peer.mix(streams, x, None, None)[0], F64)


def parts(layer):
    return {path[0] for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))}


def test_capacity_is_an_error_and_nan_in_compiled_code():
    layer = NAtSL(WIDTH, heads=HEADS, key_size=4, value_size=4, chunk_size=4, capacity=1, rngs=nnx.Rngs(0))
    layer.router.kernel[...] = jnp.zeros((WIDTH, 2 * HEADS)).at[0, 0::2].set(1.0)
    x = jnp.asarray(X, jnp.float32).at[..., 0].set(1.0)
    with pytest.raises(ValueError, match=r"^capacity: expected room for 6 pages .*, got 1$"):
        layer(x)
    first, second = jax.jit(lambda x: (lambda y, state: (y, layer(x, state=state)[0]))(*layer(x)))(x)
    assert np.all(np.isfinite(first))
    # Two heads chose softmax for their first chunk, so that the stream is lost from the next call on.
    assert np.all(np.isnan(second))


def test_parameters_and_their_labels():
    labels = {
        ".".join(map(str, path)): parameter_label(path) for path, _ in nnx.to_flat_state(nnx.state(build(), nnx.Param))
    }
    vectors = {"decay.A_log", "decay.dt_bias", "decay.projection.kernel"} | {
        f"{name}_norm.scale" for name in ("linear", "softmax", "softmax_query", "softmax_key")
    }
    assert {name for name, label in labels.items() if label == "vector"} == vectors
    matrices = ("query", "key", "value", "gate", "out", "router", "fusion", "beta")
    convolutions = {f"convolutions.{i}.kernel" for i in range(3)}
    assert {name for name, label in labels.items() if label == "matrix"} == convolutions | {
        f"{name}.kernel" for name in matrices
    }


def test_parts_that_an_option_leaves_out():
    left = {
        "branch_norm": ({"branch_norm": False}, {"linear_norm", "softmax_norm"}),
        "fusion": ({"fusion": None}, {"fusion"}),
        "delta": ({"rule": "delta"}, {"decay"}),
        "ssd": ({"rule": "ssd"}, {"beta"}),
        "gate": ({"gate": False}, {"gate"}),
    }
    everything = parts(build())
    for name, (options, missing) in left.items():
        assert parts(build(**options)) == everything - missing, name


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_decays_of_ssd_start_with_a_rate_for_each_head_and_a_bias_of_one(dtype, precise):
    decay = NAtSL(WIDTH, heads=4, rule="ssd", rngs=nnx.Rngs(0), param_dtype=dtype).decay
    wide = jnp.promote_types(dtype, jnp.float32)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(decay, nnx.Param))} == {wide}
    assert np.allclose(decay.rates(), [1, 2, 3, 4], rtol=1e-6)
    assert np.array_equal(decay.dt_bias[...], np.ones(4))
    drawn = NAtSL(WIDTH, heads=4, rngs=nnx.Rngs(0), param_dtype=dtype).decay
    assert not np.any(drawn.dt_bias[...] == 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 1}, "kv_heads: expected None, .*, got 1"),
        ({"qk_norm": "rms"}, "qk_norm: expected None, .*, got 'rms'"),
        ({"output_norm": True}, "output_norm: expected False, .*, got True"),
        ({"rule": "gated"}, "rule: expected one of 'gated_delta', 'delta', 'ssd', got 'gated'"),
        ({"own_chunk": "none"}, "own_chunk: expected one of 'both', 'softmax', 'linear', got 'none'"),
        ({"fusion": "x"}, "fusion: expected one of None, 'queries', 'input', got 'x'"),
        ({"group": 0}, "group: expected an int of at least 1, got 0"),
        ({"chunk_size": 2.5}, r"chunk_size: expected an int of at least 1, got 2\.5"),
        ({"capacity": 0}, "capacity: expected an int of at least 1, got 0"),
        ({"max_documents": 0}, "max_documents: expected an int of at least 1, got 0"),
        ({"branch_norm": 1}, "branch_norm: expected True or False, got 1"),
        ({"decay_through_softmax": None}, "decay_through_softmax: expected True or False, got None"),
        ({"counterfactual_router_grad": 1}, "counterfactual_router_grad: expected True or False, got 1"),
        ({"detach_own_chunk": "no"}, "detach_own_chunk: expected True or False, got '?no"),
    ],
)
def test_options_that_are_wrong(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        NAtSLConfig(heads=4, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_size": 5}, "key_size: expected a multiple of group=2, got 5"),
        ({"value_size": 7}, "value_size: expected a multiple of group=2, got 7"),
        ({"key_size": 5, "rope": True}, "key_size: expected a multiple of group=2, got 5"),
        ({"key_size": 6, "rope": True}, "rope_fraction: expected a share of key_size=3 that is an even number"),
        ({"key_size": 8, "value_size": 3, "rope": True}, "value_size: expected a multiple of group=2, got 3"),
    ],
)
def test_sizes_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        NAtSL(WIDTH, heads=4, rngs=nnx.Rngs(0), **options)


def test_counterfactual_gradients_need_the_scan():
    layer = NAtSL(
        WIDTH, heads=2, counterfactual_router_grad=True, implementation="serial", chunk_size=4, rngs=nnx.Rngs(0)
    )
    with pytest.raises(NotImplementedError, match="counterfactual_router_grad"):
        layer(jnp.asarray(X, jnp.float32))
