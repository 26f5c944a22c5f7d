"""What the decoder promises."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jaxmix.models import Decoder, DecoderConfig, DecoderState
from jaxmix.nn import HLAConfig, SoftmaxAttentionConfig
from jaxmix.nn.parameters import AXES
from tests.tolerances import FORMS, assert_close, assert_same_bits

F32, F64 = (FORMS[np.dtype(dtype)] for dtype in (np.float32, np.float64))
BATCH, TOKENS, VOCAB = 2, 12, 50
HLA2 = HLAConfig(heads=2, chunk_size=4)
SOFTMAX = SoftmaxAttentionConfig(heads=2, capacity=16)
HYBRID = DecoderConfig(
    vocab_size=VOCAB,
    d_model=16,
    hidden=24,
    layers=(HLA2, SOFTMAX, HLA2, SOFTMAX, SOFTMAX),
    param_dtype="float64",
    dtype="float64",
    init_std=0.2,
)
"""Two units of two layers and one of one, in float64."""

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, VOCAB, size=(BATCH, TOKENS)).astype(np.int32)
ONE_DOCUMENT = np.ones((BATCH, TOKENS), np.int32)
DOCUMENTS = np.array([[1] * 5 + [2] * 7, [3] * 10 + [4] * 2], np.int32)


@functools.cache
def make(config=HYBRID):
    with jax.enable_x64(config.param_dtype == "float64"):
        return Decoder(config, rngs=nnx.Rngs(0))


@functools.cache
def _compiled(config):
    definition, parameters = nnx.split(make(config))

    @jax.jit
    def run(tokens, segment_ids, state, weights):
        def loss(parameters):
            logits, final = nnx.merge(definition, parameters)(tokens, segment_ids=segment_ids, state=state)
            return jnp.sum(logits * weights), (logits, final)

        gradients, results = jax.grad(loss, has_aux=True)(parameters)
        return *results, nnx.to_pure_dict(gradients)

    return run


def evaluate(tokens, *, segment_ids=ONE_DOCUMENT, state=None, config=HYBRID, weights=None):
    """Logits, final state, and the parameters' gradients of sum(logits * weights)."""
    if weights is None:
        weights = np.random.default_rng(1).normal(size=(*tokens.shape, VOCAB))
    with jax.enable_x64(config.param_dtype == "float64"):
        state = make(config).init_state(len(tokens)) if state is None else state
        arguments = jnp.asarray(tokens, jnp.int32), jnp.asarray(segment_ids, jnp.int32), state, jnp.asarray(weights)
        return jax.device_get(_compiled(config)(*arguments))


def test_logits_are_float32_and_the_state_is_that_of_init_state():
    model = make(dataclasses.replace(HYBRID, dtype="bfloat16", param_dtype="float32"))
    logits, state = jax.eval_shape(lambda: model(jnp.asarray(IDS)))
    assert (logits.shape, logits.dtype) == ((BATCH, TOKENS, VOCAB), jnp.float32)
    assert isinstance(state, DecoderState)
    expected = jax.eval_shape(lambda: model.init_state(BATCH))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)


def test_one_compiled_step_gives_the_logits_of_the_full_pass_for_every_prefix():
    whole, end, _ = evaluate(IDS)
    definition, parameters = nnx.split(make())
    traces = []

    @jax.jit
    def step(tokens, state):
        traces.append(tokens.shape)
        return nnx.merge(definition, parameters)(tokens, state=state)

    with jax.enable_x64(True):
        state = make().init_state(BATCH)
        for t in range(TOKENS):
            logits, state = step(jnp.asarray(IDS[:, t : t + 1]), state)
            assert_close(logits[:, 0], whole[:, t], F64, f"token {t}")
    assert_close(state, end, F64)
    assert traces == [(BATCH, 1)]


def test_prefill_without_a_state_can_be_decoded_from():
    config = dataclasses.replace(HYBRID, layers=(SOFTMAX,), dtype="float32", param_dtype="float32")
    run = nnx.jit(lambda model, tokens, state: model(tokens, state=state))
    whole, _ = run(make(config), jnp.asarray(IDS), None)
    _, state = run(make(config), jnp.asarray(IDS[:, :-1]), None)
    logits, _ = run(make(config), jnp.asarray(IDS[:, -1:]), state)
    assert_close(logits[:, 0], whole[:, -1], F32)


def test_packed_documents_equal_separate_ones_with_every_gradient():
    first = np.cumsum(np.diff(DOCUMENTS, axis=1, prepend=DOCUMENTS[:, :1]), axis=1) == 0
    packed, end, gradients = evaluate(IDS, segment_ids=DOCUMENTS)
    before, _, gradients_before = evaluate(IDS, segment_ids=first)
    after, end_after, gradients_after = evaluate(IDS, segment_ids=~first)
    assert_close(packed, before + after, F64)
    assert_close(end, end_after, F64)
    assert_close(gradients, jax.tree.map(np.add, gradients_before, gradients_after), F64)


def test_changing_one_document_does_not_move_the_next_by_a_bit():
    other = np.where(DOCUMENTS % 2 == 1, (IDS + 1) % VOCAB, IDS)
    before, end, _ = evaluate(IDS, segment_ids=DOCUMENTS)
    after, other_end, _ = evaluate(other, segment_ids=DOCUMENTS)
    assert_same_bits(after[DOCUMENTS % 2 == 0], before[DOCUMENTS % 2 == 0])
    assert_same_bits(other_end, end)


def test_padding_may_hold_any_token_and_gives_no_logits():
    ids = DOCUMENTS * (np.arange(TOKENS) % 4 != 3)
    weights = np.random.default_rng(1).normal(size=(BATCH, TOKENS, VOCAB)) * (ids != 0)[..., None]
    expected = evaluate(IDS, segment_ids=ids, weights=weights)
    actual = evaluate(np.where(ids == 0, -1, IDS), segment_ids=ids, weights=weights)
    assert_same_bits(actual, expected)
    assert not np.any(expected[0][ids == 0])


def test_a_token_outside_the_vocabulary_gives_nan():
    for wrong in (-1, VOCAB):
        tokens = IDS.copy()
        tokens[0, 3] = wrong
        logits, _, _ = evaluate(tokens)
        assert np.all(np.isnan(logits[0, 3:]))
        assert np.all(np.isfinite(logits[1]))


def test_scanned_layers_equal_the_same_layers_one_after_another():
    expected, _, _ = evaluate(IDS)

    @jax.jit
    def unrolled(tokens):
        model = make()
        x = model.embedding[...][tokens]
        for group, repeats in zip(model.groups, (2, 1), strict=True):
            definition, parameters = nnx.split(group)
            for i in range(repeats):
                for block in nnx.merge(definition, jax.tree.map(lambda p, i=i: p[i], parameters)).blocks:
                    x = x + block.mixer(block.mixer_norm(x))[0]
                    x = x + block.mlp(block.mlp_norm(x))
        return model.norm(x) @ model.head.kernel[...]

    with jax.enable_x64(True):
        assert_close(unrolled(IDS), expected, F64)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_recomputing_changes_no_gradient(remat):
    config = dataclasses.replace(HYBRID, layers=(SOFTMAX, SOFTMAX))
    assert_close(evaluate(IDS, config=dataclasses.replace(config, remat=remat)), evaluate(IDS, config=config), F64)


def test_a_reset_stream_starts_anew_and_the_others_go_on():
    _, state, _ = evaluate(IDS)
    with jax.enable_x64(True):
        reset = jax.tree.map(jnp.asarray, state).reset(jnp.array([True, False]))
        fresh = make().init_state(BATCH)
    expected = jax.tree.map(lambda new, old: np.stack([new[:, 0], old[:, 1]], axis=1), jax.device_get(fresh), state)
    assert_same_bits(jax.device_get(reset), expected)


def test_every_parameter_has_a_finite_gradient():
    _, _, gradients = evaluate(IDS, segment_ids=DOCUMENTS)
    for path, gradient in jax.tree.leaves_with_path(gradients):
        assert np.all(np.isfinite(gradient)), path
        assert np.any(gradient), path


def test_initial_values_are_those_of_the_recipe():
    config = DecoderConfig(vocab_size=500, d_model=64, hidden=160, layers=(SoftmaxAttentionConfig(heads=4),) * 8)
    model = Decoder(config, rngs=nnx.Rngs(0))
    block = model.groups[0].blocks[0]
    wide = (model.embedding, model.head.kernel, block.mixer.query.kernel, block.mixer.value.kernel, block.mlp.up.kernel)
    for parameter in wide:
        assert np.std(parameter[...]) == pytest.approx(0.02, rel=0.03)
    for parameter in (block.mixer.out.kernel, block.mlp.down.kernel):
        assert np.std(parameter[...]) == pytest.approx(0.02 / 4, rel=0.03)
    layers = np.asarray(block.mixer.query.kernel[...]).reshape(8, -1)
    assert np.all(np.abs(np.corrcoef(layers) - np.eye(8)) < 0.1)


def test_tied_embeddings_are_the_output_map():
    config = dataclasses.replace(HYBRID, layers=(SOFTMAX,), dtype="float32", param_dtype="float32")
    tied, untied = (Decoder(dataclasses.replace(config, tie_embeddings=tie), rngs=nnx.Rngs(0)) for tie in (True, False))
    assert tied.head is None
    nnx.update(untied, nnx.state(tied))
    untied.head.kernel[...] = tied.embedding[...].T
    run = nnx.jit(lambda model: model(jnp.asarray(IDS))[0])
    assert_close(run(tied), run(untied), F32)


def test_every_parameter_names_the_axes_it_may_be_sharded_over():
    state = nnx.state(make())
    for path, parameter in nnx.to_flat_state(state):
        axes = parameter.get_metadata("out_sharding")
        assert len(axes) == parameter.ndim, path
        assert set(axes) <= {None, *AXES}, path
        assert (axes[0] == "layers") == (path[0] == "groups"), path
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = tuple((axis, "model" if axis in ("heads", "mlp") else None) for axis in AXES)
    with nnx.logical_axis_rules(rules):
        shardings = nnx.get_named_sharding(state, mesh)
    up = shardings["groups"][0]["blocks"][0]["mlp"]["up"]["kernel"].get_value()
    assert up == jax.NamedSharding(mesh, jax.P(None, None, "model"))


@pytest.mark.parametrize("graph", [True, False], ids=["graph mode", "tree mode"])
def test_split_merge_and_jit(graph):
    expected, _, _ = evaluate(IDS)
    definition, state = nnx.split(make(), graph=graph)
    with jax.enable_x64(True):
        run = nnx.jit(lambda model, tokens: model(tokens)[0], graph=graph)
        assert_close(run(nnx.merge(definition, state), jnp.asarray(IDS)), expected, F64)


def test_a_decoder_is_a_linen_module_through_the_bridge():
    config = dataclasses.replace(HYBRID, dtype="float32", param_dtype="float32")
    model = nnx.bridge.to_linen(Decoder, config)
    assert isinstance(model, linen.Module)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.asarray(IDS))
    values = linen.meta.unbox(variables)["params"]
    own = nnx.to_pure_dict(nnx.state(make(config)))
    assert jax.tree.map(jnp.shape, values) == jax.tree.map(jnp.shape, own)
    logits, _ = jax.jit(model.apply)({"params": own}, jnp.asarray(IDS))
    assert_close(logits, nnx.jit(lambda model: model(jnp.asarray(IDS))[0])(make(config)), F32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": jnp.zeros((2, 3))}, r"tokens: expected dtype int32, got dtype float32"),
        ({"tokens": jnp.zeros((3,), jnp.int32)}, r"tokens: expected shape \[B, T\] = \[\*, \*\], got shape \[3\]"),
        ({"segment_ids": jnp.ones((2, 4), jnp.int32)}, r"segment_ids: expected shape \[B, T\] = \[2, 3\]"),
        ({"state": "empty"}, r"state: expected the structure that init_state gives"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    model = make(dataclasses.replace(HYBRID, dtype="float32", param_dtype="float32"))
    arguments = {"tokens": jnp.zeros((2, 3), jnp.int32)} | change
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: model(**arguments))
