"""The kernels of one token: values, races, updates in place, and lowering, for Hopper GPUs and TPUs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmix import ahla, hla2, hla3, linear_attention
from jaxmix_kernels.decode import call, gpu, tpu
from jaxmix_kernels.decode.steps import OPERATORS
from jaxmix_kernels.target import Target
from tests.kernels import gpu_checks, tpu_checks
from tests.tolerances import FORMS, assert_close

MIXERS = {"linear_attention": linear_attention, "hla2": hla2, "ahla": ahla, "hla3": hla3}
SHARED = {"linear_attention": ("P", "m"), "hla2": ("S",), "ahla": ("P", "m"), "hla3": ("S", "P", "m")}
KERNELS = {"gpu": gpu.decode, "tpu": tpu.decode}
CHECKS = {"gpu": gpu_checks, "tpu": tpu_checks}
CASES = {
    "a state a head": {},
    "shared states and sizes that differ": {"groups": 2, "heads": 4, "key_heads": 1, "key_size": 64},
    "no decay, bfloat16": {"decay": False, "value_size": 64, "dtype": jnp.bfloat16},
    "matrices in several blocks": {"batch": 1, "groups": 1, "heads": 2, "key_size": 128, "value_size": 128},
}


def arguments(
    name,
    *,
    batch=2,
    heads=2,
    groups=2,
    key_heads=None,
    key_size=32,
    value_size=32,
    decay=True,
    dtype=jnp.float32,
):
    """q, k, v, decay and states that no recurrence need have reached: no matrix is symmetric."""
    rng = np.random.default_rng(0)
    sizes = {"D": key_size, "E": value_size}

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    def state(field, axes):
        return draw(batch, groups if field in SHARED[name] else heads, *(sizes[letter] for letter in axes))

    q, k, v = (
        draw(batch, count, size).astype(dtype)
        for count, size in ((heads, key_size), (key_heads or groups, key_size), (key_heads or groups, value_size))
    )
    states = tuple(state(*field) for field in OPERATORS[name].fields.items())
    return q, k, v, jnp.exp(-jnp.abs(draw(batch, groups))) if decay else None, states


def options(name):
    return {"ridge": 0.0, "masked": True} if name == "hla2" else {}


def decode(name, platform, *arrays, **changed):
    return call.decode(
        name, *arrays, target=Target(platform, interpret=changed.pop("interpret", True)), **(options(name) | changed)
    )


@functools.partial(jax.jit, static_argnames=("name", "ridge", "masked"))
def step(name, q, k, v, decay, states, **changed):
    """Numerator and states by the serial form."""
    groups = states[0].shape[1]
    k, v = (jnp.repeat(x, groups // x.shape[1], axis=1) for x in (k, v))
    q, k, v = (x[:, None] for x in (q, k, v))
    log_decay = jnp.zeros((q.shape[0], 1, groups)) if decay is None else jnp.log(decay)[:, None]
    state = MIXERS[name](q, k, v, log_decay, implementation="serial")[1]
    state = type(state)(*states)
    out, after = MIXERS[name](q, k, v, log_decay, initial_state=state, implementation="serial", **changed)
    return out[:, 0], tuple(jax.tree.leaves(after))


def exact(name, *arrays, **changed):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), arrays)
        return jax.tree.map(np.asarray, step(name, *wide, **changed))


def denominator(name, q, k, v, decay, states, **changed):
    """The numerator over values of one, with the normaliser's moments in place of the first value column."""
    vectors = {"P": "m", "C": "m", "G": "h", "E": "n", "F": "f"}
    fields = dict(zip(OPERATORS[name].fields, states, strict=True))
    columns = tuple(fields[vectors[n]][..., None] if n in vectors else x for n, x in fields.items())
    return exact(name, q, k, jnp.ones_like(v[..., :1]), decay, columns, **changed)[0][..., 0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("platform", KERNELS)
def test_equals_the_serial_step(platform, name, case):
    arrays = arguments(name, **CASES[case])
    num, den, after = jax.jit(functools.partial(decode, name, platform))(*arrays)
    assert {str(x.dtype) for x in (num, den, *after)} == {"float32"}
    expected, states = exact(name, *arrays)
    assert_close((num, after), (expected, states), FORMS[np.dtype(np.float32)])
    assert_close(den, denominator(name, *arrays), FORMS[np.dtype(np.float32)])


@pytest.mark.parametrize("changed", [{"ridge": 0.5}, {"masked": False}], ids=str)
@pytest.mark.parametrize("platform", KERNELS)
def test_options_of_hla2(platform, changed):
    arrays = arguments("hla2", heads=4)
    num, den, after = decode("hla2", platform, *arrays, **changed)
    assert_close((num, after), exact("hla2", *arrays, **changed), FORMS[np.dtype(np.float32)])
    assert_close(den, denominator("hla2", *arrays, **changed), FORMS[np.dtype(np.float32)])


@pytest.mark.parametrize("heads", [2, 4], ids=["a head a group", "two heads a group"])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("platform", KERNELS)
def test_no_race_and_no_read_of_what_was_never_written(platform, name, heads):
    arrays = arguments(name, heads=heads, key_size=128 if platform == "gpu" else 32)
    with CHECKS[platform].races_forbidden() as interpret:
        num, _, after = decode(name, platform, *arrays, interpret=interpret)
    assert_close((num, after), exact(name, *arrays), FORMS[np.dtype(np.float32)])


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("platform", KERNELS)
def test_a_donated_state_is_updated_in_place(platform, name):
    arrays = jax.eval_shape(functools.partial(arguments, name, groups=1, key_size=64, dtype=jnp.bfloat16))
    run = jax.jit(functools.partial(decode, name, platform, interpret=False), donate_argnums=4)
    text = run.trace(*arrays).lower(lowering_platforms=("cuda" if platform == "gpu" else "tpu",)).as_text()
    states = len(OPERATORS[name].fields)
    (kernel,) = (line for line in text.splitlines() if re.search("mosaic_gpu|tpu_custom_call", line))
    assert kernel.count("output_operand_alias<") == states
    assert text.count("tf.aliasing_output") == states


@pytest.mark.parametrize("sizes", [(32, 32), (64, 64), (128, 128), (128, 32), (32, 128), (64, 128)], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("platform", KERNELS)
def test_lowers_for_the_device(platform, name, sizes):
    variants = ({"dtype": jnp.bfloat16}, {"groups": 2, "heads": 16, "key_heads": 1, "decay": False})
    for variant in variants if sizes in ((128, 128), (64, 128)) else variants[:1]:
        shape = {"batch": 3, "key_size": sizes[0], "value_size": sizes[1], **variant}
        arrays = jax.eval_shape(functools.partial(arguments, name, **shape))
        CHECKS[platform].lower(functools.partial(decode, name, platform, interpret=False), *arrays)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key_size": 48}, "key and value sizes"),
        ({"value_size": 256}, "key and value sizes"),
        ({"heads": 9, "groups": 1}, "up to 8 query heads"),
        ({"dtype": jnp.float16}, "bfloat16 or float32, not float16"),
    ],
    ids=str,
)
def test_what_a_kernel_cannot_serve_is_refused_with_the_reason(change, reason):
    arrays = jax.eval_shape(functools.partial(arguments, "ahla", **change))
    with pytest.raises(NotImplementedError, match=f"ahla: .*{reason}"):
        jax.eval_shape(functools.partial(decode, "ahla", "tpu"), *arrays)
