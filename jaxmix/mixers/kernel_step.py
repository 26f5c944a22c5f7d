"""One token of a recurrence by a Pallas kernel, differentiated as the step that it replaces."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array
from jaxmix.mixers.state import group_heads, merge_heads
from jaxmix_kernels.decode.call import decode
from jaxmix_kernels.target import Target


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def kernel_step(
    mixer: Any, target: Target, state: Any, q: Array, k: Array, v: Array, a: Array | None
) -> tuple[Any, tuple[Array, Array]]:
    """`mixer.step` by a kernel, which reads and writes every state once, in place where it can.

    Args:
        mixer: a recurrence of the mixers in `dispatch.KERNELS`.
        target: what the kernel is made for.
        state: before the token, float32, heads grouped as in a step.
        q: [B, G, R, D], bfloat16 or float32, as k and v.
        k: [B, Gk, D]; Gk divides G.
        v: [B, Gk, E].
        a: decay [B, G]; None for none.

    Returns:
        The state after the token, and numerator [B, G, R, E] and denominator [B, G, R], float32.
    """
    merged = merge_heads(state)
    fields = tuple(getattr(merged, field.name) for field in dataclasses.fields(merged))
    options = dataclasses.asdict(mixer)
    queries = q.reshape(q.shape[0], -1, q.shape[3])
    num, den, fields = decode(mixer.name, queries, k, v, a, fields, target=target, **options)
    after = group_heads(type(state)(*fields), q.shape[1])
    return after, (num.reshape(*q.shape[:3], -1), den.reshape(q.shape[:3]))


def _forward(mixer: Any, target: Target, *arguments: Any) -> tuple[Any, Any]:
    return kernel_step(mixer, target, *arguments), arguments


def _backward(mixer: Any, target: Target, arguments: Any, cotangents: Any) -> Any:
    del target

    def step(state: Any, q: Array, k: Array, v: Array, a: Array | None) -> Any:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        return mixer.step(state, q, k, v, jnp.ones(q.shape[:2], q.dtype) if a is None else a)

    return jax.vjp(step, *arguments)[1](cotangents)


kernel_step.defvjp(_forward, _backward)
