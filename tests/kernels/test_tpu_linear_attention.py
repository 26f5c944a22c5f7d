"""The TPU kernel of decayed linear attention, interpreted on a CPU and lowered for a TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix_kernels import tpu_tiles
from jaxmix_kernels.decays import CHUNK
from jaxmix_kernels.linear_attention.tpu import decayed_attention
from tests.kernels import reference, tpu_checks
from tests.tolerances import FORMS, assert_close

CASES = {
    **reference.LAYOUTS,
    "weak decays": {"decay": "weak", "segments": False},
    "neither decay nor segments": {"decay": None, "segments": False},
    "padded to two grid steps": {"tokens": 5 * CHUNK, "batch": 1, "heads": 2},
    "bfloat16": {"dtype": jnp.bfloat16, "value_size": 128},
}


@pytest.fixture(autouse=True)
def _short_steps(monkeypatch):
    """Several grid steps for few tokens, so that they are interpreted fast."""
    monkeypatch.setattr(tpu_tiles, "TILES_PER_STEP", 2)


@functools.cache
def _case(name):
    return reference.random_case(**CASES[name])


def _run(function, *args, weights=None, **options):
    return jax.jit(functools.partial(function, interpret=True, **options))(*args, weights=weights)


# Reversed, masks and decays are used the other way round: whatever reads them, or the layout of arrays, once.
REVERSED = (
    "mixed decays and segments",
    "every array with its own number of heads",
    "padded to two grid steps",
    "bfloat16",
)
RUNS = [(name, reverse) for name in CASES for reverse in ((False, True) if name in REVERSED else (False,))]


@pytest.mark.parametrize(
    ("name", "reverse"), RUNS, ids=lambda x: x if isinstance(x, str) else ("forward", "reverse")[x]
)
def test_equals_the_reference(name, reverse):
    a, b, c, decays, initial, weights = _case(name)
    expected = _run(reference.decayed_attention, a, b, c, decays, initial, weights=weights, reverse=reverse)
    actual = _run(decayed_attention, a, b, c, decays, initial, weights=weights, reverse=reverse)
    assert actual.out is not None
    assert actual.out.dtype == c.dtype
    assert_close(actual, expected, FORMS[np.dtype(c.dtype)])


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_final_state_alone(reverse):
    a, b, c, decays, initial, _ = _case("mixed decays and segments")
    whole = _run(decayed_attention, a, b, c, decays, initial, reverse=reverse)
    alone = _run(decayed_attention, None, b, c, decays, initial, reverse=reverse, outputs=False)
    assert alone.out is None
    assert whole.dots is None
    assert_close(alone.final, whole.final, 1e-6)


def test_no_initial_state_is_a_state_of_zeros():
    a, b, c, decays, initial, _ = _case("weak decays")
    nothing = _run(decayed_attention, a, b, c, decays, None)
    zeros = _run(decayed_attention, a, b, c, decays, jnp.zeros_like(initial))
    assert_close(nothing, zeros, 1e-6)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_no_race_and_no_read_of_what_was_never_written(reverse):
    a, b, c, decays, initial, weights = reference.random_case(
        batch=1, heads=2, b_heads=1, tokens=5 * CHUNK, key_size=32, value_size=32
    )
    expected = _run(reference.decayed_attention, a, b, c, decays, initial, weights=weights, reverse=reverse)
    with tpu_checks.races_forbidden() as interpret:
        actual = decayed_attention(a, b, c, decays, initial, weights=weights, reverse=reverse, interpret=interpret)
    assert_close(actual, expected, FORMS[np.dtype(np.float32)])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [(32, 32), (64, 64), (128, 128), (128, 32), (32, 64)], ids=str)
def test_lowers_for_a_tpu(dtype, sizes):
    for name, reverse in (
        ("every array with its own number of heads", False),
        ("every array with its own number of heads", True),
        ("neither decay nor segments", False),
    ):
        case = functools.partial(reference.random_case, **CASES[name])
        case = functools.partial(case, dtype=dtype, key_size=sizes[0], value_size=sizes[1])
        a, b, c, decays, initial, weights = jax.eval_shape(case)
        kernel = functools.partial(decayed_attention, reverse=reverse)
        tpu_checks.lower(kernel, a, b, c, decays, initial, weights=weights)
        tpu_checks.lower(functools.partial(kernel, outputs=False), None, b, c, decays, None)


def test_refuses_what_it_cannot_serve():
    a, b, c, *_ = _case("one chunk")
    with pytest.raises(NotImplementedError, match="float16"):
        decayed_attention(*(x.astype(jnp.float16) for x in (a, b, c)), None, None)
    with pytest.raises(NotImplementedError, match="head sizes"):
        decayed_attention(a[..., :48], b[..., :48], c, None, None)
    with pytest.raises(NotImplementedError, match="multiples of 64 tokens"):
        decayed_attention(a[:, :63], b[:, :63], c[:, :63], None, None)
    with pytest.raises(ValueError, match="a: needed"):
        decayed_attention(None, b, c, None, None)
