"""The Hopper kernel that adds what the starts of pieces give, interpreted on a CPU and lowered for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix_kernels.decays import CHUNK
from jaxmix_kernels.gpu_starts import add_starts
from tests.kernels import gpu_checks, reference
from tests.tolerances import assert_close

# An output is rounded to bfloat16, and so is the start as an operand: each 2e-3 relative (RMS).
TOLERANCE = 4e-3

CASES = {
    "decays and segments, states": ({"batch": 2, "tokens": 5 * CHUNK, "heads": 2, "decay_heads": 1}, True),
    "decays, two blocks of values, states": (
        {"tokens": 4 * CHUNK, "heads": 1, "key_size": 128, "value_size": 128, "segments": False},
        True,
    ),
    "neither": ({"tokens": 3 * CHUNK, "heads": 2, "value_size": 32, "decay": None, "segments": False}, False),
}


def _case(options, keep=True):
    options = {"batch": 1, "key_size": 64, "value_size": 64, "decay": -0.01, "dtype": jnp.bfloat16, **options}
    q, _, _, decays, starts, out = reference.random_case(**options)
    shape = (*starts.shape[:2], q.shape[1] // CHUNK, *starts.shape[2:])
    states = jnp.asarray(np.random.default_rng(1).normal(size=shape), q.dtype) if keep else None
    edges = (None, None) if decays is None else (decays.enter, decays.kept)
    return q, out, starts, *edges, states


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_without_races(name):
    arrays = _case(*CASES[name])
    with gpu_checks.races_forbidden() as interpret:
        actual = add_starts(*arrays, interpret=interpret)
    q, out, starts, *edges, states = arrays
    wide = [None if x is None else x.astype(jnp.float32) for x in (q, out, states)]
    assert_close(actual, reference.add_starts(wide[0], wide[1], starts, *edges, wide[2]), TOLERANCE)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_what_a_border_stops_is_not_multiplied():
    q, out, starts, enter, kept, states = _case({"tokens": 3 * CHUNK, "heads": 1, "segments": False})
    enter, kept = enter.at[:, :, 1, 10:].set(0), kept.at[:, :, 1].set(0)
    actual = add_starts(q, out, jnp.full_like(starts, jnp.inf), enter, kept, states, interpret=True)
    np.testing.assert_array_equal(actual[0][:, CHUNK + 10 :], out[:, CHUNK + 10 :])
    np.testing.assert_array_equal(actual[1][:, :, 2:], states[:, :, 2:])
    assert not np.isfinite(np.asarray(actual[0][:, : CHUNK + 10], np.float32)).any()


def test_only_what_a_start_reaches_is_read():
    """The start of the first head is zeros; of the second nothing is left after a chunk."""
    q, out, starts, enter, kept, states = _case({"tokens": 3 * CHUNK, "heads": 2, "segments": False})
    starts, kept = starts.at[:, 0].set(0), kept.at[:, 1, 0].set(0)
    poisoned = q.at[:, :, 0].set(jnp.nan).at[:, CHUNK:, 1].set(jnp.nan)
    actual = add_starts(poisoned, out, starts, enter, kept, states, interpret=True)
    expected = add_starts(q, out, starts, enter, kept, states, interpret=True)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[0][:, :, 0], out[:, :, 0])
    np.testing.assert_array_equal(actual[1][:, 0], states[:, 0])
    assert (np.asarray(actual[0] != out)[:, :CHUNK, 1]).any()


@pytest.mark.parametrize("sizes", [(64, 32), (64, 64), (64, 128), (128, 32), (128, 128)], ids=str)
def test_lowers_for_a_gpu(sizes):
    """Four pieces of 32,768 tokens of 16 heads."""
    key_size, value_size = sizes

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((4, *sizes), dtype)

    count = 32768 // 4 // CHUNK
    q, out = shape(count * CHUNK, 16, key_size), shape(count * CHUNK, 16, value_size)
    starts = shape(16, key_size, value_size, dtype=jnp.float32)
    enter, kept = shape(4, count, CHUNK, dtype=jnp.float32), shape(4, count, dtype=jnp.float32)
    states = shape(16, count, key_size, value_size)
    gpu_checks.lower(add_starts, q, out, starts, enter, kept, states)
    gpu_checks.lower(add_starts, q, out, starts, None, None, None)


def test_changes_in_place_what_is_given_up_without_effects():
    """JAX splits nothing over devices that has an effect, as a mutable array has one."""
    arrays = _case({"tokens": CHUNK, "heads": 1})
    assert not jax.make_jaxpr(add_starts)(*arrays).effects
    lowered = jax.jit(add_starts).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("#stablehlo.output_operand_alias<") == 2


def test_refuses_what_it_cannot_serve():
    q, out, starts, *rest = _case({"tokens": CHUNK, "heads": 1})
    with pytest.raises(NotImplementedError, match="key size of at least 64"):
        add_starts(q[..., :32], out, starts[:, :, :32], *rest)
    with pytest.raises(ValueError, match="must divide that of q, 1; got 2"):
        add_starts(q, out, starts, *(jnp.repeat(x, 2, axis=1) for x in rest[:2]), None)
