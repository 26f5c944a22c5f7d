"""The mixers over the TPU kernel, interpreted on a CPU; over both kernels, lowered; and when kernels are taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmix import hla2, linear_attention
from jaxmix.mixers import dispatch
from jaxmix.mixers.dispatch import Operands, choose
from jaxmix.parallel import make_mesh
from jaxmix_kernels.target import Target, using_target
from tests.contract.agreement import BF16, F32
from tests.contract.programs import largest_collective
from tests.contract.spec import SERIAL, Form, draw_case, evaluate
from tests.kernels.by_kernel import by_kernel
from tests.kernels.targets import OneDevice, ReferenceTarget
from tests.mixers import test_hla2, test_hla3, test_linear_attention
from tests.tolerances import FORMS, assert_close

INTERPRETED = Target("tpu", interpret=True)
SPLIT = ReferenceTarget(interpret=True)
"""The two kernels in plain jax.numpy, which devices share like those of a GPU."""
SPECS = {
    "linear_attention": test_linear_attention.TestLinearAttention.spec,
    "hla2": test_hla2.TestHLA2.spec,
    "hla3": test_hla3.TestHLA3.spec,
}
BY_KERNEL = {name: by_kernel(spec, INTERPRETED) for name, spec in SPECS.items()}
DOCUMENTS = [[1] * 30 + [0] * 6 + [1] * 30 + [2] * 4, [0] * 3 + [1] * 58 + [4] * 9]
"""Padding inside a document, and borders in both chunks; 70 tokens."""


@pytest.mark.parametrize(("mixer", "dtype"), [("linear_attention", F32), ("hla2", BF16), ("hla3", BF16)], ids=str)
def test_the_tpu_kernel_equals_the_serial_form_with_every_gradient(mixer, dtype):
    spec, ours = SPECS[mixer], BY_KERNEL[mixer]
    variant = spec.variants["grouped heads, shared decay"]
    case = draw_case(spec, variant, 70, segment_ids=DOCUMENTS)
    expected = evaluate(spec, variant, spec.rounded(case, dtype), SERIAL)
    assert_close(evaluate(ours, variant, case, Form("scan"), dtype), expected, FORMS[dtype])


def test_after_a_decay_to_nothing_those_that_follow_are_still_told_apart_on_a_gpu():
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (1, 64, 1, 32), BF16) for key in keys[:3])
    weights = jax.random.normal(jax.random.key(1), v.shape, BF16).astype(F32)
    log_decay = (-0.1 * jax.random.uniform(keys[3], (1, 64, 1))).at[0, 20].set(-1e9)

    def loss(arrays, implementation):
        out, state = linear_attention(*arrays, implementation=implementation)
        return jnp.sum(weights * out) + jnp.sum(state.P), out

    def run(implementation, dtype):
        arrays = *(x.astype(dtype) for x in (q, k, v)), log_decay
        return jax.device_get(
            jax.jit(jax.grad(functools.partial(loss, implementation=implementation), has_aux=True))(arrays)
        )

    with using_target(OneDevice("gpu", interpret=True)):
        actual = run("pallas", BF16)
    assert_close(actual, run("scan", F32), FORMS[BF16])


def mix(inputs, target=INTERPRETED):
    with using_target(target):
        return linear_attention(**inputs, implementation="pallas")


mix_split = functools.partial(mix, target=SPLIT)


def gradient(function):
    def loss(inputs):
        out, state = function(inputs)
        return jnp.sum(jnp.sin(out)) + sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(state))

    return jax.value_and_grad(loss)


@functools.cache
def on_one_device():
    """Inputs, and what one device gives for them."""
    described = SPECS["linear_attention"]
    variant = described.variants["grouped heads, shared decay"]
    inputs = described.cast_inputs(described.draw(np.random.default_rng(0), 2, 6, variant), F32)
    return inputs, jax.device_get(jax.jit(gradient(mix_split))(inputs))


def test_shard_map_over_batches():
    inputs, expected = on_one_device()
    mesh = make_mesh(batch=2)
    sharded = jax.shard_map(mix_split, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), check_vma=False)
    assert_close(jax.jit(gradient(sharded))(inputs), expected, FORMS[F32])


def test_a_shard_map_that_keeps_account_of_devices_is_refused():
    sharded = jax.shard_map(mix, mesh=make_mesh(batch=2), in_specs=P("batch"), out_specs=P("batch"))
    with pytest.raises(NotImplementedError, match="need check_vma=False"):
        jax.eval_shape(sharded, on_one_device()[0])


def test_plain_jit_splits_kernels_over_batches_and_groups_of_heads_without_a_gather():
    inputs, expected = on_one_device()
    spec = P("batch", None, "heads")
    split = jax.device_put(inputs, NamedSharding(make_mesh(batch=2, heads=2), spec))
    program = jax.jit(gradient(mix_split)).lower(split).compile()
    assert largest_collective(program.as_text()) <= 1  # the sum of the loss
    actual = program(split)
    assert_close(actual, expected, FORMS[F32])
    assert {x.sharding.spec for x in actual[1].values()} == {spec}


@pytest.mark.parametrize(
    ("platform", "shape", "count"),
    [("tpu", (1, 4096, 2, 128), None), ("cuda", (8, 4096, 16, 64), 1 + 1), ("cuda", (1, 32768, 16, 128), 2 + 2)],
    ids=str,
)
def test_forward_and_backward_lower_for_the_device(platform, shape, count):
    wide = jax.ShapeDtypeStruct(shape, BF16)
    decay, ids = jax.ShapeDtypeStruct(shape[:3], F32), jax.ShapeDtypeStruct(shape[:2], np.int32)

    def loss(q, k, v, log_decay, ids):
        out, _ = linear_attention(q, k, v, log_decay, segment_ids=ids, implementation="pallas")
        return jnp.sum(out.astype(F32))

    with using_target(Target("gpu" if platform == "cuda" else "tpu")):
        traced = jax.jit(jax.value_and_grad(loss, argnums=range(4))).trace(wide, wide, wide, decay, ids)
        program = traced.lower(lowering_platforms=(platform,)).as_text()
    if platform == "tpu":
        assert "tpu_custom_call" in program
        return
    assert program.count("custom_call @mosaic_gpu") == count
    # One sequence of 16 heads does not fill the card: it is cut in four, forward and backward.
    assert ("4x8192x16x128" in program) == (shape[0] == 1)


def test_kernels_are_taken_where_they_serve(monkeypatch):
    fine = Operands("bfloat16", 64, 64, 128)

    def form(mixer="hla2", chunk_size=64, sequence_axis=None, **change):
        operands = Operands(**(vars(fine) | change))
        return choose(mixer, None, chunk_size, sequence_axis, operands=operands).form

    assert form() == "scan"
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    for target in (Target("gpu"), Target("tpu")):
        monkeypatch.setattr(dispatch, "current_target", lambda target=target: target)
        assert choose("hla2", None, 64, None, operands=fine) == dispatch.Choice(
            "pallas", f"a Pallas kernel for {target.platform.upper()}s serves the call", target
        )
        for change in (
            {"mixer": "hla2_printed"},
            {"mixer": "gated_delta_rule"},
            {"chunk_size": 16},
            {"sequence_axis": "sequence"},
            {"dtype": "float32"},
            {"dtype": "mixed"},
            {"length": 63},
            {"key_size": 129},
            {"value_size": 16},
            {"is_checked": True},
        ):
            assert form(**change) == "scan", change
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert form() == "scan"


@pytest.mark.parametrize(
    ("platform", "change", "reason"),
    [
        ("gpu", {"v": (1, 8, 2, 129)}, "key and value sizes up to 128, not 129"),
        ("tpu", {"k": F32}, "q, k and v of one dtype"),
        ("tpu", {"decay_form": "printed"}, "hla2_printed: no Pallas kernel exists"),
        ("tpu", {"sequence_axis": "sequence"}, "do not split T"),
    ],
)
def test_what_a_kernel_cannot_serve_is_refused_with_the_reason(platform, change, reason):
    shapes = {name: change.get(name, (1, 8, 2, 32)) for name in "qkv"}
    dtypes = {name: change.get("dtype", BF16) for name in "qkv"}
    if "k" in change:
        shapes["k"], dtypes["k"] = (1, 8, 2, 32), F32
    options = {name: x for name, x in change.items() if name in ("decay_form", "sequence_axis")}
    inputs = {name: jnp.zeros(shapes[name], dtypes[name]) for name in "qkv"}
    with using_target(Target(platform)), pytest.raises(NotImplementedError, match=reason):
        hla2(**inputs, implementation="pallas", **options)


def test_each_target_has_a_program_of_its_own():
    inputs = {name: jnp.zeros((1, 64, 2, 32), BF16) for name in "qkv"}

    def program(target):
        with using_target(target):
            return str(jax.make_jaxpr(lambda inputs: hla2(**inputs, implementation="pallas"))(inputs))

    targets = Target("tpu"), INTERPRETED, Target("gpu")
    assert len({program(target) for target in targets}) == len(targets)
