"""What every mixer layer promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmix.nn import LayerState, MixerLayer, S4DConfig
from jaxmix.nn.parameters import AXES
from tests.nn.layers import (
    BATCH,
    LAYERS,
    TOKENS,
    WIDTH,
    draw_case,
    draw_fresh_case,
    evaluate,
    fresh_state,
    make_layer,
)
from tests.tolerances import FORMS, assert_close, assert_same_bits

F64 = FORMS[np.dtype(np.float64)]
BF16 = FORMS[np.dtype(jnp.bfloat16)]

every_layer = pytest.mark.parametrize("name", LAYERS)


def add(a, b):
    return jax.tree.map(np.add, a, b)


@every_layer
def test_shapes_and_dtypes_are_those_of_the_input_and_of_init_state(name):
    for dtype in (jnp.float32, jnp.bfloat16):
        layer = LAYERS[name].build(WIDTH, rngs=nnx.Rngs(0), dtype=dtype)
        assert isinstance(layer, MixerLayer)
        y, state = jax.eval_shape(layer, jnp.zeros((3, 5, WIDTH)))
        assert (y.shape, y.dtype) == ((3, 5, WIDTH), dtype)
        expected = jax.eval_shape(lambda layer=layer: layer.init_state(3))
        assert isinstance(state, LayerState)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == jax.tree.map(lambda a: (a.shape, a.dtype), expected)


@every_layer
def test_two_parts_equal_one_pass_with_every_gradient(name):
    case = draw_case(name)
    expected = evaluate(name, case)
    early = np.arange(TOKENS) < np.array([[5], [8]])
    first = case._replace(segment_ids=early.astype(np.int32))
    second = case._replace(segment_ids=(~early).astype(np.int32), state=evaluate(name, first).state)
    later = evaluate(name, second)
    earlier = evaluate(name, first._replace(state_cotangent=later.state_gradient))
    assert_close(earlier.out + later.out, expected.out, F64)
    assert_close(later.state, expected.state, F64)
    assert_close(earlier.state_gradient, expected.state_gradient, F64)
    assert_close(add(earlier.parameter_gradients, later.parameter_gradients), expected.parameter_gradients, F64)
    assert_close(earlier.input_gradient + later.input_gradient, expected.input_gradient, F64)


@every_layer
def test_single_tokens_equal_one_pass(name):
    case = draw_case(name)
    expected = evaluate(name, case)
    definition, parameters = nnx.split(make_layer(name))
    with jax.enable_x64(True):
        step = jax.jit(lambda x, state: nnx.merge(definition, parameters)(x, state=state))
        outs, state = [], case.state
        for t in range(TOKENS):
            y, state = step(case.x[:, t : t + 1], state)
            outs.append(y)
    assert_close(np.concatenate(outs, axis=1), expected.out, F64)
    assert_close(state, expected.state, F64)


@every_layer
def test_packed_documents_equal_separate_ones_with_every_gradient(name):
    case = draw_fresh_case(name)
    lengths = np.array([[5], [1]])
    place = np.arange(TOKENS)
    packed = evaluate(name, case._replace(segment_ids=np.where(place < lengths, 7, 3).astype(np.int32)))
    first = evaluate(name, case._replace(segment_ids=(place < lengths).astype(np.int32)))
    second = evaluate(name, case._replace(segment_ids=(place >= lengths).astype(np.int32)))
    assert_close(packed.out, first.out + second.out, F64)
    assert_close(packed.state, second.state, F64)
    assert_close(packed.input_gradient, first.input_gradient + second.input_gradient, F64)
    assert_close(packed.parameter_gradients, add(first.parameter_gradients, second.parameter_gradients), F64)


@every_layer
def test_padding_changes_nothing_and_may_hold_nan(name):
    case = draw_case(name)
    ids = np.array([[0, 1, 1, 0, 0, 1, 2, 2, 0, 2, 0, 0], [1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1]], np.int32)
    real = ids != 0
    # Sorting is stable, so this brings the real tokens to the front of every row in their order.
    order = np.argsort(~real, axis=1, kind="stable")

    def to_front(x):
        return np.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1)

    expected = evaluate(
        name,
        case._replace(x=to_front(case.x), segment_ids=to_front(ids), out_cotangent=to_front(case.out_cotangent)),
    )
    spoilt = np.where(real[..., None], case.x, np.nan)
    actual = evaluate(name, case._replace(x=spoilt, segment_ids=ids))
    assert not np.any(actual.out[~real])
    assert not np.any(actual.input_gradient[~real])
    actual = actual._replace(out=to_front(actual.out), input_gradient=to_front(actual.input_gradient))
    assert_close(actual, expected, F64)


@every_layer
def test_changing_one_document_does_not_move_the_next_by_a_bit(name):
    case = draw_case(name)
    ids = np.array([[1] * 5 + [2] * 7, [1] * 2 + [2] * 8 + [3] * 2], np.int32)
    before = evaluate(name, case._replace(segment_ids=ids))
    after = evaluate(name, case._replace(segment_ids=ids, x=np.where(ids[..., None] == 1, -3 * case.x, case.x)))
    assert np.any(before.out[ids == 1] != after.out[ids == 1])
    assert_same_bits(after.out[ids != 1], before.out[ids != 1])
    assert_same_bits(after.state, before.state)


@every_layer
def test_no_token_sees_a_later_one(name):
    case = draw_case(name)
    moved = case.x.copy()
    moved[:, 7:] += 1
    before, after = evaluate(name, case), evaluate(name, case._replace(x=moved))
    assert_same_bits(after.out[:, :7], before.out[:, :7])
    assert np.any(after.out[:, 7:] != before.out[:, 7:])


@every_layer
def test_every_parameter_has_a_finite_gradient(name):
    gradients = evaluate(name, draw_case(name)).parameter_gradients
    for path, gradient in jax.tree.leaves_with_path(gradients):
        assert np.all(np.isfinite(gradient)), path
        assert np.any(gradient), path


@every_layer
def test_a_reset_stream_starts_anew_and_the_others_go_on(name):
    case = draw_case(name)
    with jax.enable_x64(True):
        state = jax.device_get(jax.tree.map(jnp.asarray, case.state).reset(jnp.array([True, False])))
    expected = jax.tree.map(lambda new, old: np.stack([new[0], old[1]]), fresh_state(name), case.state)
    assert_same_bits(state, expected)


@every_layer
def test_in_bfloat16_states_and_gates_stay_float32(name):
    layer = LAYERS[name].build(WIDTH, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    for path, parameter in nnx.to_flat_state(nnx.state(layer)):
        wide = not {"beta", "decay", "direct", "readout", "router", "ssm"}.isdisjoint(path)
        assert parameter.dtype == (jnp.float32 if wide else jnp.bfloat16), path
    state = jax.eval_shape(lambda: layer.init_state(BATCH))
    # Keys and values of softmax attention are a record of inputs.
    caches = {
        "softmax": (".mixer.k", ".mixer.v"),
        "natsl": tuple(f".mixer.attention.{kind}_{x}" for kind in ("own", "page") for x in "kv"),
    }.get(name.replace(",", " ").split()[0], ())
    for path, leaf in jax.tree.leaves_with_path(state):
        place = jax.tree_util.keystr(path)
        if leaf.dtype != jnp.int32:
            assert leaf.dtype == (jnp.bfloat16 if place in caches else jnp.float32), place


@pytest.mark.parametrize(
    "name", ["hla, second order", "hla, asymmetric", "interdomain attention", "softmax attention, every option"]
)
def test_bfloat16_computes_the_same(name):
    case = draw_fresh_case(name)
    kinds = {"wide": jnp.float32, "narrow": jnp.bfloat16}
    y = {}
    for kind, dtype in kinds.items():
        layer = LAYERS[name].build(WIDTH, rngs=nnx.Rngs(0), dtype=dtype, init_std=0.3)
        y[kind] = jax.jit(lambda x, layer=layer: layer(x)[0])(jnp.asarray(case.x, jnp.bfloat16))
    assert_close(y["narrow"], y["wide"], BF16)


@every_layer
def test_every_parameter_names_the_axes_it_may_be_sharded_over(name):
    layer = LAYERS[name].build(WIDTH, rngs=nnx.Rngs(0))
    for path, parameter in nnx.to_flat_state(nnx.state(layer)):
        axes = parameter.get_metadata("out_sharding")
        assert len(axes) == parameter.ndim, path
        assert set(axes) <= {None, *AXES}, path
    with nnx.logical_axis_rules(tuple((axis, "model" if axis == "heads" else None) for axis in AXES)):
        specs = nnx.get_partition_spec(nnx.state(layer))
    assert specs["key"]["kernel"].get_value() == jax.P(None, "model")
    assert specs["out"]["kernel"].get_value() == jax.P("model", None)


def test_the_state_space_layer_equals_its_long_convolution():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 300, WIDTH)), jnp.float32)
    outputs = []
    for form in ("scan", "fft"):
        layer = S4DConfig(heads=2, modes=16, implementation=form).build(WIDTH, rngs=nnx.Rngs(0), init_std=0.3)
        outputs.append(nnx.jit(lambda layer: layer(x))(layer))
    assert_close(outputs[1], outputs[0], 1e-5)
