"""What the kernels of all gradients of decayed linear attention are checked with, for either backend."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmix_kernels.decays import CHUNK, BackwardArguments, BackwardResult
from jaxmix_kernels.linear_attention.vjp import linear_attention
from tests.kernels import reference

# bfloat16 operands: products of numbers rounded at 2e-3 relative (RMS), and the results rounded once more.
BFLOAT16 = 5e-3

# Gradients that decay to the smallest numbers of float32 have few digits.
FLOOR = 1e-20

ONE_CHUNK = "one chunk, every array with its own number of heads"

CASES = {
    "weak decays and segments": {"decay": "weak", "key_size": 64, "tokens": 4 * CHUNK},
    "mixed decays and segments": {"value_size": 32},
    "decays of -80": {"decay": -80.0, "segments": False, "tokens": 2 * CHUNK},
    "segments without decay": {"decay": None, "tokens": 2 * CHUNK},
    "neither decay nor segments": {"decay": None, "segments": False, "key_size": 64, "tokens": 4 * CHUNK},
    "two blocks of columns": {"decay": "weak", "key_size": 128, "value_size": 128},
    ONE_CHUNK: {
        "decay": "weak",
        "heads": 4,
        "b_heads": 2,
        "c_heads": 1,
        "decay_heads": 2,
        "tokens": CHUNK,
    },
}
"""A ring of tiles on a GPU has three slots at D = 64 and two at other sizes: so many chunks write every slot again."""


def draw(**options):
    """q, k, v, d_out, decays, the initial state, and the gradient of the final one."""
    options = {"batch": 1, "heads": 1, "tokens": 3 * CHUNK, "dtype": jnp.bfloat16, **options}
    q, k, v, decays, initial, d_out = reference.random_case(**options)
    d_final = jax.random.normal(jax.random.key(1), initial.shape)
    return q, k, v, d_out, decays, initial, d_final


def expect(q, k, v, d_out, decays, initial, d_final, *more):
    """Gradients of every head in float64, and what they come from, with the states before every chunk, rounded."""
    states = jax.jit(_states)(q, k, k if v is None else v, decays, initial)
    given = BackwardArguments(q, k, v, d_out, decays, states, d_final, *more)
    with jax.enable_x64(True):
        wide = [None if x is None else x.astype(jnp.float64) for x in given[:4]]
        result = jax.jit(reference.decayed_attention_backward)(BackwardArguments(*wide, *given[4:]))
        return jax.device_get(result), given


def _states(*arrays):
    return reference.decayed_attention(*arrays, states=True).states


def of_call(target, q, k, v, d_out, decays, initial, d_final):
    """Gradients of a call of linear attention, by its kernels of a target."""

    def attend(q, k, v, initial, steps):
        return linear_attention(q, k, v, dataclasses.replace(decays, steps=steps), initial, target=target)

    return BackwardResult(*jax.vjp(attend, q, k, v, initial, decays.steps)[1]((d_out, d_final)))


def shapes(key_size, value_size, *, states_every=CHUNK, **options):
    """Shapes of arguments of 512 tokens, with states before as many tokens each."""
    options = {"batch": 1, "tokens": 512, "heads": 4, "b_heads": 2, "dtype": jnp.bfloat16, **options}

    def case():
        return reference.random_case(key_size=key_size, value_size=value_size, **options)

    q, k, v, decays, initial, d_out = jax.eval_shape(case)
    states = jax.ShapeDtypeStruct((1, 4, 512 // states_every, key_size, value_size), q.dtype)
    return BackwardArguments(q, k, v, d_out, decays, states, initial)
