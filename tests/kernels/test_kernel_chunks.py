"""What mixers hand to the kernels: decays as exact as they are read, no state that is zeros, chains in parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import ahla, hla2, hla3, linear_attention
from jaxmix.mixers.kernel_chunks import KernelChunks
from jaxmix.mixers.segments import find_segments
from jaxmix_kernels.links import AHLA, HLA2, HLA3, HLA3_TAIL, values_first
from jaxmix_kernels.target import Target
from tests.contract.agreement import BF16, F32
from tests.kernels.targets import ReferenceTarget
from tests.kernels.test_fused_chains import IDS, draw, mix, with_gradients
from tests.tolerances import FORMS, assert_close

MIXERS = {"linear_attention": linear_attention, "hla2": hla2, "ahla": ahla, "hla3": hla3}


def cut(log_decay, ids, operand_dtype):
    """The decays that Hopper kernels of operands of that dtype get, and those to the third power."""
    segments = None if ids is None else find_segments(jnp.asarray(ids))
    options = {"operand_dtype": operand_dtype, "fused": True, "fresh": True}
    chunks = KernelChunks.cut(log_decay, segments, 2, F32, Target("gpu"), **options)
    return chunks._decays(1), chunks._decays(3)


@pytest.mark.parametrize("ids", [None, IDS], ids=["no segments", "segments"])
@pytest.mark.parametrize("strongest", [0.5, 80.0])
def test_decays_of_bfloat16_operands_are_those_of_sums_in_float32(strongest, ids):
    rng = np.random.default_rng(0)
    log_decay = jnp.asarray(-strongest * rng.uniform(size=(2, 70, 2)) ** 3, F32)
    for rounded, exact in zip(cut(log_decay, ids, BF16), cut(log_decay, ids, F32), strict=True):
        np.testing.assert_array_equal(rounded.steps, exact.steps)
        sums = np.float64(exact.high) + np.float64(exact.low)
        largest = np.max(-sums)
        np.testing.assert_allclose(rounded.high, sums, atol=4e-7 * largest)
        for name in ("enter", "leave", "kept"):
            np.testing.assert_allclose(getattr(rounded, name), getattr(exact, name), rtol=2e-6 * largest, atol=1e-30)


def test_decays_behind_deep_drops_in_the_same_chunk_are_some_thousandths_off():
    log_decay = jnp.concatenate([jnp.full((1, 50, 1), -500.0), jnp.full((1, 14, 1), -0.003)], axis=1)
    for decays, power in zip(cut(log_decay, None, BF16), (1, 3), strict=True):
        left = np.exp(-0.003 * power * np.arange(13, -1, -1))
        np.testing.assert_allclose(decays.leave[0, 0, 0, 50:], left, rtol=2e-3 * power)
        np.testing.assert_allclose(
            np.exp(decays.high[0, 0, 0, -1:] - decays.high[0, 0, 0, 50:]), left, rtol=2e-3 * power
        )


class Rounded(ReferenceTarget):
    """Reads one number of the log decays, of operands of any dtype."""

    def reads_low(self, dtype):
        return False


@pytest.mark.parametrize("name", MIXERS)
def test_sums_in_float32_serve_all_mixers_across_borders_with_every_gradient(name):
    inputs = draw(tokens=70)
    run, scan = (
        functools.partial(mix, mixer=MIXERS[name], segment_ids=IDS, **options)
        for options in ({"target": Rounded()}, {"implementation": "scan"})
    )
    actual, expected = (jax.jit(with_gradients(x))(inputs) for x in (run, scan))
    assert_close(actual, expected, FORMS[F32])


def test_sums_in_float32_under_vmap_and_remat():
    inputs = draw(tokens=70)
    run = with_gradients(jax.checkpoint(functools.partial(mix, target=Rounded())))
    expected = jax.jit(run)(inputs)
    actual = jax.jit(jax.vmap(run))({name: x[:, None] for name, x in inputs.items()})
    assert_close(jax.tree.map(lambda x: x[:, 0], actual), expected, FORMS[F32])


def test_only_hopper_kernels_of_bfloat16_read_one_number():
    for dtype in (jnp.bfloat16, BF16, "bfloat16"):
        assert not Target("gpu").reads_low(dtype)
        assert Target("tpu").reads_low(dtype)
    for dtype in (jnp.float32, F32, "float32"):
        assert Target("gpu").reads_low(dtype)


@pytest.mark.parametrize("fusible", [False, True], ids=["links", "a fused chain"])
@pytest.mark.parametrize("name", MIXERS)
def test_kernels_read_a_state_only_where_one_is_given(name, fusible):
    given = set()

    class Noting(ReferenceTarget):
        def decayed_attention(self, a, b, c, decays, initial, **options):
            given.add(initial is not None)
            return super().decayed_attention(a, b, c, decays, initial, **options)

        def fused(self, links):
            forward = super().fused(links)

            def noting(q, k, v, decays, *initials, **options):
                given.update(x is not None for x in initials)
                return forward(q, k, v, decays, *initials, **options)

            return forward and noting

    inputs = draw(tokens=70)
    run = functools.partial(mix, mixer=MIXERS[name], target=Noting(fusible=fusible))
    _, state = jax.eval_shape(run, inputs)
    assert given == {False}
    given.clear()
    jax.eval_shape(run, inputs | {"initial_state": state})
    assert given == {True}


@pytest.mark.parametrize("name", MIXERS)
def test_no_state_is_a_state_of_zeros_with_keys_and_values_of_one_head(name):
    inputs = draw(heads=4, groups=4, tokens=70)
    inputs |= {name: inputs[name][:, :, :1] for name in ("k", "v")}
    run = functools.partial(mix, mixer=MIXERS[name], target=ReferenceTarget())
    _, state = jax.eval_shape(run, inputs)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    actual, given = (jax.jit(with_gradients(run))(x) for x in (inputs, inputs | {"initial_state": zeros}))
    given[0].pop("initial_state")
    assert_close(actual, given, FORMS[F32])


class Tail(ReferenceTarget):
    """Fuses what is left of HLA3 behind its values, and nothing else."""

    def fused(self, links):
        return super().fused(links) if links == HLA3_TAIL else None


@pytest.mark.parametrize("given", [False, True], ids=["no state", "a state"])
def test_values_first_then_a_fused_chain_with_every_gradient(given):
    inputs = draw(tokens=70)
    run = functools.partial(mix, mixer=hla3, target=Tail(fusible=True))
    scan = functools.partial(mix, mixer=hla3, implementation="scan")
    if given:
        inputs["initial_state"] = jax.jit(scan)(inputs)[1]
    actual, expected = (jax.jit(with_gradients(x))(inputs) for x in (run, scan))
    assert_close(actual, expected, FORMS[F32])


def test_which_chains_have_values_to_come_first():
    assert values_first(HLA3) == (1, HLA3_TAIL)
    assert values_first(HLA2) is values_first(AHLA) is values_first(HLA3_TAIL) is None
