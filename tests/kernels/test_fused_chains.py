"""The mixers whose forward pass is one fused kernel: equal to the scan, and one kernel each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmix import ahla, hla2, hla3
from jaxmix.parallel import make_mesh
from jaxmix_kernels.linear_attention import pieces
from jaxmix_kernels.links import AHLA, HLA2, HLA3
from jaxmix_kernels.target import Target, using_target
from tests.contract.agreement import BF16, F32
from tests.contract.programs import largest_collective
from tests.kernels.targets import OneDevice
from tests.tolerances import FORMS, assert_close

INTERPRETED = Target("tpu", interpret=True)
MIXERS = {"hla2": (hla2, HLA2), "ahla": (ahla, AHLA), "hla3": (hla3, HLA3)}
IDS = np.array([[1] * 30 + [0] * 6 + [1] * 30 + [2] * 4, [0] * 3 + [1] * 58 + [4] * 9], np.int32)
"""Padding inside a document, and borders in both chunks; 70 tokens."""


def draw(heads=4, groups=2, batch=2, tokens=70, dtype=F32, key_size=32, value_size=16):
    rng = np.random.default_rng(0)

    def normal(count, size):
        return np.asarray(rng.normal(size=(batch, tokens, count, size)) / np.sqrt(size), dtype)

    decay = np.asarray(-rng.uniform(0.0, 0.5, (batch, tokens, groups)), F32)
    return {
        "q": normal(heads, key_size),
        "k": normal(groups, key_size),
        "v": normal(groups, value_size),
        "log_decay": decay,
    }


def with_gradients(function):
    """Output and state of a mixer, and the gradients of a loss that reads both."""

    def loss(inputs):
        out, state = function(inputs)
        return sum(jnp.sum(jnp.sin(x.astype(F32))) for x in jax.tree.leaves((out, state))), (out, state)

    return jax.grad(loss, has_aux=True)


def mix(inputs, mixer=hla2, implementation="pallas", target=INTERPRETED, **options):
    with using_target(target):
        return mixer(**inputs, implementation=implementation, **options)


def kernels(function, *arguments, platform) -> int:
    """Number of kernels in the program for a platform."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    return text.count("custom_call @" + {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu"}[platform])


@pytest.mark.parametrize(("name", "case"), [*((name, "all") for name in MIXERS), ("hla3", "no decay")])
def test_equals_the_scan_with_every_gradient_after_a_state_and_around_padding(name, case):
    mixer, _ = MIXERS[name]
    inputs = draw()
    if case == "no decay":
        del inputs["log_decay"]
    _, state = jax.jit(functools.partial(mix, mixer=mixer, implementation="scan"))(inputs)
    ids = IDS if case == "all" else None
    if case == "all":
        padded = (IDS == 0)[..., None]
        inputs = {name: np.where(padded if x.ndim == 3 else padded[..., None], np.nan, x) for name, x in inputs.items()}
    actual, expected = (
        jax.jit(with_gradients(functools.partial(mix, mixer=mixer, implementation=form, segment_ids=ids)))(
            inputs | {"initial_state": state}
        )
        for form in ("pallas", "scan")
    )
    assert_close(actual, expected, FORMS[F32])


@functools.cache
def by_scan():
    """HLA2 over 64 tokens: inputs, and by the scan the gradients, output and state."""
    inputs = draw(tokens=64)
    return inputs, jax.device_get(jax.jit(with_gradients(functools.partial(mix, implementation="scan")))(inputs))


def test_vmap_and_remat():
    inputs, expected = by_scan()
    actual = jax.jit(jax.vmap(with_gradients(jax.checkpoint(mix))))({name: x[:, None] for name, x in inputs.items()})
    assert_close(jax.tree.map(lambda x: x[:, 0], actual), expected, FORMS[F32])


def test_shard_map_over_batches():
    inputs, expected = by_scan()
    mesh = make_mesh(batch=2)
    sharded = jax.shard_map(mix, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), check_vma=False)
    assert_close(jax.jit(with_gradients(sharded))(inputs), expected, FORMS[F32])


def test_plain_jit_splits_batches_and_groups_of_heads_without_a_gather():
    inputs, expected = by_scan()
    split = jax.device_put(inputs, NamedSharding(make_mesh(batch=2, heads=2), P("batch", None, "heads")))
    program = jax.jit(with_gradients(mix)).lower(split).compile()
    assert largest_collective(program.as_text()) <= 1
    assert_close(program(split), expected, FORMS[F32])


@pytest.mark.parametrize(("tokens", "heads"), [(40, 2), (100, 1)], ids=["one chunk", "two pieces in time"])
def test_the_gpu_kernels_interpreted_with_every_gradient(tokens, heads, monkeypatch):
    monkeypatch.setattr(pieces, "SHORTEST_PIECE", 64)
    inputs = draw(batch=1, heads=heads, groups=1, tokens=tokens, dtype=BF16, key_size=64, value_size=32)
    run = functools.partial(mix, target=OneDevice("gpu", interpret=True))
    actual = jax.jit(with_gradients(run))(inputs)
    expected = jax.jit(with_gradients(functools.partial(mix, implementation="scan")))(inputs)
    assert_close(actual, expected, FORMS[np.dtype(jnp.bfloat16)])


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", MIXERS)
def test_one_kernel_forward_and_backward_no_kernel_for_what_nothing_reads(name, platform):
    mixer, links = MIXERS[name]
    inputs = jax.eval_shape(functools.partial(draw, tokens=128, dtype=BF16, key_size=64, value_size=64))
    target = Target("gpu" if platform == "cuda" else "tpu")

    ids = jax.ShapeDtypeStruct((2, 128), np.int32)

    def forward(inputs, ids):
        return mix(inputs, mixer, target=target, segment_ids=ids)[0]

    assert kernels(forward, inputs, ids, platform=platform) == 1
    backward = jax.value_and_grad(lambda inputs, ids: jnp.sum(forward(inputs, ids).astype(F32)))
    assert kernels(backward, inputs, ids, platform=platform) == 1 + len(links)


@pytest.mark.parametrize(("name", "size"), [("hla2", 128), ("ahla", 128), ("hla3", 64)])
def test_in_pieces_one_kernel_more_for_every_link_forward_and_backward(name, size):
    """Forward a first pass over links that read inputs, and the starts of the last; backward a first pass each."""
    mixer, links = MIXERS[name]
    inputs = draw(heads=16, groups=16, batch=1, tokens=1, dtype=BF16, key_size=size, value_size=size)
    inputs = {name: jax.ShapeDtypeStruct((1, 32768, *x.shape[2:]), x.dtype) for name, x in inputs.items()}

    def loss(inputs):
        return jnp.sum(mix(inputs, mixer, target=Target("gpu"))[0].astype(F32))

    assert kernels(jax.value_and_grad(loss), inputs, platform="cuda") == (1 + len(links)) + 2 * len(links)


@pytest.mark.parametrize(
    ("change", "count"),
    [({"key_size": 32}, 2), ({"normalize": True}, 2), ({"mixer": hla3, "key_size": 32}, 3)],
    ids=["a size without a fused kernel", "normalised", "hla3 at that size"],
)
def test_where_no_fused_kernel_serves_the_links_run_one_after_the_other(change, count):
    change = dict(change)
    options = {name: change.pop(name) for name in ("mixer", "normalize") if name in change}
    forward = functools.partial(mix, target=Target("gpu"), **options)
    inputs = jax.eval_shape(functools.partial(draw, **({"dtype": BF16, "key_size": 64, "tokens": 128} | change)))
    assert kernels(lambda inputs: forward(inputs)[0], inputs, platform="cuda") == count


def test_keys_of_size_128_leave_hla3_two_kernels():
    inputs = jax.eval_shape(functools.partial(draw, dtype=BF16, key_size=128, value_size=128, tokens=128))

    def loss(inputs):
        return jnp.sum(mix(inputs, hla3, target=Target("gpu"))[0].astype(F32))

    assert kernels(loss, inputs, platform="cuda") == 2
    assert kernels(jax.value_and_grad(loss), inputs, platform="cuda") == 2 + 3
