"""Everything JAX does to a function, done to NAtS-L: transformations, dtypes, odd sizes, and wrong calls."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix.mixers.natsl import count_chunks, natsl_attention
from tests.contract.agreement import BF16, F32, F64
from tests.contract.errors import OtherState
from tests.contract.programs import primitives
from tests.contract.transforms import FULL_PRECISION
from tests.mixers.natsl import (
    BATCH,
    CHUNK,
    GATES,
    HEADS,
    IMPLEMENTATIONS,
    cast,
    draw_call,
    draw_inputs,
    evaluate,
    evaluate_parts,
    fresh_state,
    softmax_first,
)
from tests.tolerances import FORMS, assert_close

TOKENS = 10
IDS = np.array([[1] * 6 + [2] * 4, [0] + [1] * 3 + [2] * 6], np.int32)
CAPACITY = 12


def arguments(dtype=F32):
    """Inputs of a packed call that continues a new stream, and its state."""
    call = draw_call(IDS, state=fresh_state(CAPACITY, dtype=F32), tokens=TOKENS, max_documents=2)
    return jax.tree.map(jnp.asarray, (cast(call, dtype).inputs, call.state))


def mixer(inputs, state, implementation="scan", segment_ids=IDS, **options):
    options = {"chunk_size": CHUNK, "max_documents": 2} | options
    return natsl_attention(
        **inputs, segment_ids=segment_ids, initial_state=state, implementation=implementation, **options
    )


def total(inputs, state, run=mixer):
    return sum(jnp.sum(jnp.sin(x.astype(F32))) for x in run(inputs, state)[0])


@IMPLEMENTATIONS
def test_jit_equals_no_jit(implementation):
    inputs, state = arguments()

    def run(inputs, state):
        return mixer(inputs, state, implementation)

    assert_close(jax.jit(run)(inputs, state), run(inputs, state), FORMS[F32])


def test_no_choice_of_implementation_means_scan_on_a_cpu():
    inputs, state = arguments()
    programs = [
        str(jax.make_jaxpr(lambda inputs, state, form=form: mixer(inputs, state, form))(inputs, state))
        for form in (None, "scan", "serial")
    ]
    assert programs[0] == programs[1] != programs[2]


def test_vmap_equals_one_call_after_another_with_every_gradient():
    inputs, state = arguments()
    calls = {name: jnp.stack([x, 0.5 * x, 0.25 * x]) for name, x in inputs.items()}
    calls["choice"] = jnp.stack([inputs["choice"], inputs["choice"][..., ::-1], inputs["choice"][:, ::-1]])

    def run(inputs):
        return mixer(inputs, state), jax.grad(total)(inputs, state)

    expected = [jax.jit(run)(jax.tree.map(lambda x, i=i: x[i], calls)) for i in range(3)]
    assert_close(jax.jit(jax.vmap(run))(calls), jax.tree.map(lambda *x: jnp.stack(x), *expected), FORMS[F32])


def test_remat_and_a_scan_over_layers_give_the_same_gradients():
    inputs, state = arguments()
    weights = jnp.array([1.0, 0.5, 0.25])

    def layer(scale, weight):
        scaled = inputs | {name: weight * scale * inputs[name] for name in ("v", "v_softmax")}
        out, after = mixer(scaled, state)
        return scale + jnp.tanh(jnp.mean(out[0]) + jnp.mean(out[1])), (out, after)

    def scan(weights):
        return jax.lax.scan(jax.checkpoint(layer), 1.0, weights)

    def loop(weights):
        scale, results = 1.0, []
        for weight in weights:
            scale, result = layer(scale, weight)
            results.append(result)
        return scale, jax.tree.map(lambda *x: jnp.stack(x), *results)

    def with_gradient(run):
        def last(weights):
            scale, results = run(weights)
            return scale, results

        return jax.jit(jax.value_and_grad(last, has_aux=True))(weights)

    assert_close(with_gradient(scan), with_gradient(loop), FORMS[F32])


def test_lengths_inside_one_bucket_compile_once():
    inputs, state = arguments()
    traces = []

    @jax.jit
    def run(inputs, segment_ids, state):
        traces.append(None)
        return mixer(inputs, state, segment_ids=segment_ids)

    for length in (1, 4, 7, TOKENS):
        run(inputs, jnp.tile(jnp.where(jnp.arange(TOKENS) < length, 1, 0), (BATCH, 1)), state)
    assert len(traces) == 1


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_each_result_has_its_dtype(implementation, dtype):
    inputs, _ = arguments(dtype)
    mixed = [inputs | {name: inputs[name].astype(BF16)} for name in sorted(inputs.keys() - set(GATES))]
    counted = count_chunks(TOKENS, CHUNK, packed=True, continued=False, max_documents=2)
    for given in (inputs, *(mixed if dtype == F32 else ())):
        given = given | {"choice": given["choice"][:, :counted]}
        out, state = jax.eval_shape(lambda x: mixer(x, None, implementation), given)
        assert [x.dtype for x in out] == [given["v"].dtype, given["v_softmax"].dtype]
        kept = jnp.result_type(given["k_softmax"], given["v_softmax"])
        for field in dataclasses.fields(state):
            cache = field.name in ("own_k", "own_v", "page_k", "page_v")
            whole = field.name in ("filled", "table", "count", "used")
            assert getattr(state, field.name).dtype == (kept if cache else jnp.int32 if whole else F32), field.name
        gradients = jax.eval_shape(jax.grad(lambda x: total(x, None, lambda x, s: mixer(x, s, implementation))), given)
        assert jax.tree.map(lambda x: x.dtype, gradients) == jax.tree.map(lambda x: x.dtype, given)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_matrix_products_are_forced_to_full_precision(implementation, dtype):
    inputs, state = arguments(dtype)

    def loss(inputs):
        return total(inputs, state, lambda x, s: mixer(x, s, implementation))

    traced = jax.make_jaxpr(jax.grad(loss))(inputs)
    products = [equation for equation in primitives(traced) if equation.primitive.name == "dot_general"]
    assert products
    for equation in products:
        chosen = equation.params["precision"]
        chosen = chosen if isinstance(chosen, tuple) else (chosen,)
        assert {str(x) for x in chosen} <= FULL_PRECISION, equation
        assert {x.aval.dtype for x in equation.invars} == {F32}, equation


@IMPLEMENTATIONS
def test_a_narrow_cache_gives_the_same_for_any_split(implementation):
    state = fresh_state(CAPACITY, dtype=F32)
    cache = {name: np.asarray(getattr(state, name), BF16) for name in ("own_k", "own_v", "page_k", "page_v")}
    call = draw_call(IDS, state=dataclasses.replace(state, **cache), tokens=TOKENS, max_documents=2)
    call = call._replace(state_cotangent=None)
    options = {"dtype": F32, "max_documents": 2}
    early = np.arange(TOKENS) < [[3], [9]]
    parts = evaluate_parts(call, [early, ~early], implementation, **options)
    expected = evaluate(call, "serial", **options)
    assert expected.state.page_k.dtype == BF16
    assert_close((parts.out, parts.state), (expected.out, expected.state), FORMS[F32])
    # Gradients of what waits in the cache are rounded on their way between the parts.
    assert_close(parts.gradients, expected.gradients, FORMS[BF16])


def test_chunks_of_one_token_route_every_token():
    call = draw_call(tokens=6)
    routed = np.random.default_rng(0).random((BATCH, 6, HEADS)) < 0.5
    call = call._replace(inputs=call.inputs | {"choice": softmax_first(routed)})
    actual, expected = (evaluate(call, form, chunk_size=1) for form in ("scan", "serial"))
    assert_close(actual, expected, FORMS[F64])
    assert np.all(np.any(actual.gradients["choice"][:, :5] != 0, axis=-1))
    assert not np.any(actual.gradients["choice"][:, 5])


def test_one_token_takes_the_direct_step():
    inputs = {name: x[:, :1] for name, x in arguments()[0].items()}
    state = jax.tree.map(jnp.asarray, fresh_state(CAPACITY, dtype=F32))
    for implementation in ("serial", "scan", None):
        for ids in (None, IDS[:, :1]):
            step = jax.make_jaxpr(lambda inputs, state, form=implementation, ids=ids: mixer(inputs, state, form, ids))(
                inputs, state
            )
            loops = [equation for equation in primitives(step) if equation.primitive.name == "scan"]
            assert not loops


def correct_call():
    """A correct float32 call of two streams, to be spoilt."""
    rng = np.random.default_rng(0)
    inputs = {name: jnp.asarray(x, jnp.float32) for name, x in draw_inputs(rng, TOKENS).items()}
    return inputs | {"choice": jnp.asarray(softmax_first(np.zeros((BATCH, 3, HEADS), bool)), jnp.float32)}


def refuse(inputs, *patterns, error=ValueError, **options):
    """Calls eagerly and traced, and asserts that both are refused with every pattern in the message."""

    def call(inputs):
        return natsl_attention(**inputs, **{"chunk_size": CHUNK} | options)

    for run in (call, lambda inputs: jax.eval_shape(call, inputs)):
        with pytest.raises(error) as refused:
            run(inputs)
        for pattern in patterns:
            assert re.search(pattern, str(refused.value)), f"{pattern!r} is not in: {refused.value}"


NAMES = ("q", "k", "v", "log_decay", "beta", "q_softmax", "k_softmax", "v_softmax", "choice")


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_array_is_named_with_what_was_expected_and_what_came(name):
    inputs = correct_call()
    x = inputs[name]
    others = "|".join(NAMES)
    for wrong in (x[0], x[None], x[:, :0], x[:, :-1], x[:1], jnp.swapaxes(x, 1, 2)):
        patterns = (rf"\b({others})\b: expected ", r", got ")
        refuse(inputs | {name: wrong}, *patterns)
    shape = ", ".join(map(str, x[0].shape))
    refuse(inputs | {name: x[0]}, rf"^{name}: expected shape ", rf"got shape \[{shape}\]")
    for dtype in ("int32", "float16", "bool", *(("bfloat16",) if name in GATES else ())):
        refuse(inputs | {name: x.astype(dtype)}, rf"^{name}: expected dtype .*float32", rf"got dtype {dtype}")


@pytest.mark.parametrize(
    ("name", "change", "expected", "came"),
    [
        ("k", lambda x: x[..., :-1], r"\[2, 10, 2, 4\]", r"\[2, 10, 2, 3\]"),
        ("v", lambda x: x[:, :, :1], r"2", r"\[2, 10, 1, 6\]"),
        ("log_decay", lambda x: x[:, :, :1], r"\[2, 10, 2\]", r"\[2, 10, 1\]"),
        ("beta", lambda x: x[:, :, :1], r"\[2, 10, 2\]", r"\[2, 10, 1\]"),
        ("q_softmax", lambda x: x[:, :, :3], "a multiple of the 2 heads of q", "3 heads"),
        ("k_softmax", lambda x: x[:, :, :2], r"\[2, 10, 4, 3\]", r"\[2, 10, 2, 3\]"),
        ("v_softmax", lambda x: x[:, :, :2], "4", r"\[2, 10, 2, 5\]"),
        ("choice", lambda x: x[:, :2], r"\[2, 3, 2, 2\]", r"\[2, 2, 2, 2\]"),
        ("choice", lambda x: x[..., :1], r"\[2, 3, 2, 2\]", r"\[2, 3, 2, 1\]"),
        ("choice", lambda x: x[:, :, :1], r"\[2, 3, 2, 2\]", r"\[2, 3, 1, 2\]"),
    ],
)
def test_sizes_that_do_not_fit_each_other(name, change, expected, came):
    inputs = correct_call()
    refuse(inputs | {name: change(inputs[name])}, rf"^{name}: expected .*{expected}.*, got .*{came}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "delta"}, "rule: expected one of 'gated_delta', 'ssd', got 'delta'"),
        ({"own_chunk": None}, "own_chunk: expected one of 'both', 'softmax', 'linear', got None"),
        ({"decay_through_softmax": 1}, "decay_through_softmax: expected True or False, got 1"),
        ({"counterfactual_router_grad": "yes"}, "counterfactual_router_grad: expected True or False, got '?yes"),
        ({"detach_own_chunk": None}, "detach_own_chunk: expected True or False, got None"),
        ({"scale": 0.0}, r"scale: expected .*, got 0\.0"),
        ({"softmax_scale": -1.0}, r"softmax_scale: expected .*, got -1\.0"),
        ({"capacity": 0}, "capacity: expected an int of at least 1, got 0"),
        ({"max_documents": 2.5}, r"max_documents: expected an int of at least 1, got 2\.5"),
        ({"chunk_size": 0}, r"chunk_size: expected .*, got 0"),
        ({"implementation": "triton"}, r"implementation: expected .*'serial'.*, got 'triton'"),
        ({"rule": "ssd"}, r"beta: expected None for rule='ssd', got shape \[2, 10, 2\]"),
        ({"segment_ids": jnp.ones((BATCH, TOKENS))}, "segment_ids: expected dtype int32, got dtype float32"),
        ({"segment_ids": jnp.ones((BATCH, 3), jnp.int32)}, r"segment_ids: expected .*10.*, got shape \[2, 3\]"),
        ({"initial_state": jnp.zeros(3)}, "initial_state: expected a NAtSLState, got "),
        ({"initial_state": OtherState(jnp.zeros((2, 2, 4, 6)))}, "initial_state: expected .*, got OtherState"),
    ],
)
def test_options_that_are_wrong(options, message):
    refuse(correct_call(), f"^{message}", **options)


def test_a_missing_beta():
    refuse(correct_call() | {"beta": None}, r"^beta: expected .*\[B, T, H\].*, got ")


def test_what_a_form_cannot_do():
    inputs = correct_call()
    refuse(inputs, "(?i)pallas", error=NotImplementedError, implementation="pallas")
    patterns = "serial", "counterfactual_router_grad", "'scan'"
    options = {"implementation": "serial", "counterfactual_router_grad": True}
    refuse(inputs, *patterns, error=NotImplementedError, **options)


def test_a_decay_that_amplifies_is_refused_where_it_is_not_padding():
    inputs = correct_call()
    inputs["log_decay"] = inputs["log_decay"].at[1, 2, 0].set(0.25)
    with pytest.raises(ValueError, match=r"(?s)^log_decay: expected .*0\.25"):
        natsl_attention(**inputs, chunk_size=CHUNK)
    ids = jnp.ones((BATCH, TOKENS), jnp.int32).at[1, 2].set(0)
    out, _ = natsl_attention(**inputs, chunk_size=CHUNK, max_documents=1, segment_ids=ids)
    assert all(np.all(np.isfinite(x)) for x in out)


def test_a_state_with_one_field_of_another_shape_or_dtype():
    inputs, state = arguments()
    inputs["choice"] = inputs["choice"][:, :1]
    inputs = {name: x[:, :1] for name, x in inputs.items()}
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if field.name != "page_k":
            # The pages of page_k are the state's capacity.
            spoilt = dataclasses.replace(state, **{field.name: value[:, :-1] if value.ndim > 1 else value[:-1]})
            refuse(inputs, rf"^initial_state\.{field.name}: expected shape .*, got shape ", initial_state=spoilt)
        spoilt = dataclasses.replace(state, **{field.name: value.astype(jnp.float16)})
        refuse(inputs, r"^initial_state\.\w+: expected dtype .*, got dtype ", initial_state=spoilt)
