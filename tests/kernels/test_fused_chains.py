"""The mixers whose forward pass is one fused kernel: equal to the links one after the other, and to the scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmix import ahla, hla2, hla3
from jaxmix.parallel import make_mesh
from jaxmix_kernels.chain.vjp import chain, is_fused
from jaxmix_kernels.decays import CHUNK
from jaxmix_kernels.linear_attention.vjp import linear_attention
from jaxmix_kernels.links import AHLA, HLA2, HLA3, follow
from jaxmix_kernels.target import Target, using_target
from tests.contract.agreement import BF16, F32
from tests.contract.programs import largest_collective
from tests.kernels import reference
from tests.tolerances import FORMS, assert_close

INTERPRETED = Target("tpu", interpret=True)
MIXERS = {"hla2": (hla2, HLA2), "ahla": (ahla, AHLA), "hla3": (hla3, HLA3)}
IDS = np.array([[1] * 30 + [0] * 6 + [1] * 30 + [2] * 4, [0] * 3 + [1] * 58 + [4] * 9], np.int32)
"""Padding inside a document, and borders in both chunks; 70 tokens."""


def draw(heads=4, groups=2, batch=2, tokens=70, dtype=F32, key_size=32, value_size=16):
    rng = np.random.default_rng(0)

    def normal(count, size):
        return jnp.asarray(rng.normal(size=(batch, tokens, count, size)) / np.sqrt(size), dtype)

    decay = jnp.asarray(-rng.uniform(0.0, 0.5, (batch, tokens, groups)), F32)
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


@pytest.mark.parametrize("name", MIXERS)
def test_equals_the_scan_with_every_gradient_after_a_state_and_around_padding(name):
    mixer, _ = MIXERS[name]
    inputs = draw()
    _, state = mix(inputs, mixer, "scan")
    padded = (IDS == 0)[..., None]
    with_nan = {key: jnp.where(padded if x.ndim == 3 else padded[..., None], jnp.nan, x) for key, x in inputs.items()}
    arguments = with_nan | {"initial_state": state}
    options = {"mixer": mixer, "segment_ids": IDS}
    actual, expected = (
        jax.jit(with_gradients(functools.partial(mix, implementation=form, **options)))(arguments)
        for form in ("pallas", "scan")
    )
    assert_close(actual, expected, FORMS[F32])


@pytest.mark.parametrize("case", [{}, {"decay": None, "segments": False, "state_heads": 1}], ids=["all", "no decay"])
@pytest.mark.parametrize("name", MIXERS)
def test_equals_the_links_one_after_the_other_with_every_gradient(name, case):
    _, links = MIXERS[name]
    options = {"tokens": CHUNK, "heads": 2, "batch": 1, "b_heads": 1, "c_heads": 2, "key_size": 32, "value_size": 32}
    q, k, v, decays, initial, _ = reference.random_case(**options, **case)
    powers = {link.power for link in links}
    by_power = {power: None if decays is None else _raise(decays, power) for power in powers}
    arrays = q, k, v, by_power, (initial,) * len(links)
    assert is_fused(links, *arrays, target=INTERPRETED)

    def composition(q, k, v, decays, initials):
        def attend(link, keys, values, initial):
            return linear_attention(q, keys, values, decays[link.power], initial, target=INTERPRETED)

        return follow(links, k, v, initials, attend)

    def gradients(function):
        def loss(q, k, v, steps, initials):
            given = by_power if steps is None else {p: _with_steps(x, steps[p]) for p, x in by_power.items()}
            result = function(q, k, v, given, initials)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(result)), result

        steps = None if decays is None else {power: x.steps for power, x in by_power.items()}
        which = (0, 1, 2, 4) if steps is None else (0, 1, 2, 3, 4)
        return jax.jit(jax.grad(loss, which, has_aux=True))(q, k, v, steps, arrays[4])

    assert_close(gradients(functools.partial(chain, links, INTERPRETED)), gradients(composition), FORMS[F32])


def _with_steps(decays, steps):
    return type(decays)(**(vars(decays) | {"steps": steps}))


def _raise(decays, power):
    scaled = {name: power * getattr(decays, name) for name in ("high", "low", "steps")}
    raised = {name: getattr(decays, name) ** power for name in ("enter", "leave", "kept")}
    return type(decays)(run=decays.run, **scaled, **raised)


def test_vmap_and_remat():
    inputs = draw(batch=1, tokens=64, heads=2, groups=1)
    several = {name: jnp.stack([x, 0.5 * x]) for name, x in inputs.items()}
    each = jax.jit(with_gradients(mix))
    expected = [each(jax.tree.map(lambda x, i=i: x[i], several)) for i in range(2)]
    actual = jax.jit(jax.vmap(with_gradients(jax.checkpoint(mix))))(several)
    assert_close(actual, jax.tree.map(lambda *x: jnp.stack(x), *expected), FORMS[F32])


def test_shard_map_and_plain_jit_over_batches():
    inputs, mesh = draw(tokens=64, heads=2, groups=1), make_mesh(batch=2)
    expected = jax.jit(with_gradients(mix))(inputs)
    sharded = jax.shard_map(mix, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), check_vma=False)
    assert_close(jax.jit(with_gradients(sharded))(inputs), expected, FORMS[F32])
    split = jax.device_put(inputs, NamedSharding(mesh, P("batch")))
    program = jax.jit(with_gradients(mix)).lower(split).compile()
    assert largest_collective(program.as_text()) <= 1
    assert_close(program(split), expected, FORMS[F32])


def test_plain_jit_splits_groups_of_heads_without_a_gather():
    inputs = draw(tokens=64)
    split = jax.device_put(inputs, NamedSharding(make_mesh(heads=2), P(None, None, "heads")))
    program = jax.jit(lambda inputs: mix(inputs)[0]).lower(split).compile()
    assert largest_collective(program.as_text()) <= 1
    assert_close(program(split), mix(inputs)[0], FORMS[F32])


class OneDevice(Target):
    """The interpreter of GPU kernels calls back in order, which no compiler splits over devices."""

    splits = False


def test_the_gpu_kernels_interpreted_with_every_gradient():
    inputs = draw(batch=1, heads=2, groups=1, tokens=70, dtype=BF16, key_size=64, value_size=32)
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

    def forward(inputs):
        return mix(inputs, mixer, target=target)[0]

    assert kernels(forward, inputs, platform=platform) == 1
    backward = jax.value_and_grad(lambda inputs: jnp.sum(forward(inputs).astype(F32)))
    # All links but the last again, and three gradients of each; or all gradients of each at once.
    expected = 1 + len(links) - 1 + 3 * len(links) if platform == "tpu" else 1 + len(links)
    assert kernels(backward, inputs, platform=platform) == expected


@pytest.mark.parametrize(
    ("change", "count"),
    [({"tokens": 4096, "heads": 2}, 2 * 2), ({"key_size": 32}, 2), ({"normalize": True}, 2)],
    ids=["sequences cut in time", "a size without a fused kernel", "normalised"],
)
def test_where_no_fused_kernel_serves_the_links_run_one_after_the_other(change, count):
    change = dict(change)
    forward = functools.partial(mix, target=Target("gpu"), normalize=change.pop("normalize", False))
    inputs = jax.eval_shape(functools.partial(draw, **({"dtype": BF16, "key_size": 64, "tokens": 128} | change)))
    assert kernels(lambda inputs: forward(inputs)[0], inputs, platform="cuda") == count
