"""One token by a kernel, for any leading axes of `jax.vmap`."""

from typing import Any

import jax

from jaxmix_kernels.decays import DTYPES, SIZES
from jaxmix_kernels.linear_attention.partition import spread
from jaxmix_kernels.target import Target

Array = jax.Array

MOST_HEADS = 8
"""Most query heads that share a state."""


def refusal(dtype: Any, key_size: int, value_size: int, heads: int = 1) -> str | None:
    """Why no kernel serves one token of these sizes, with `heads` query heads to a state; None if one does."""
    if str(dtype) not in DTYPES:
        return f"the kernels of one token take {' or '.join(DTYPES)}, not {dtype}"
    if not {key_size, value_size} <= set(SIZES):
        return f"the kernels of one token take key and value sizes {SIZES}, not {key_size} and {value_size}"
    if heads > MOST_HEADS:
        return f"the kernels of one token take up to {MOST_HEADS} query heads to a state, not {heads}"
    return None


def decode(
    name: str,
    q: Array,
    k: Array,
    v: Array,
    decay: Array | None,
    states: tuple[Array, ...],
    *,
    target: Target,
    **options: Any,
) -> tuple[Array, Array, tuple[Array, ...]]:
    """The outputs of one token, itself included, and the states after it. Not differentiable.

    A state that nothing else needs, one that is donated or carried by a loop, is updated in place.

    Args:
        name: the operator, a key of `jaxmix_kernels.decode.steps.OPERATORS`.
        q: queries [B, H, D], bfloat16 or float32; all is computed in float32.
        k: keys [B, Gk, D].
        v: values [B, Gk, E].
        decay: a = exp(log decay) in [0, 1], float32 [B, G]; G heads have a state of their own, Gk divides G and G
            divides H. None for no decay.
        states: the fields of the operator's state in their order, float32, [B, G, ...] where query heads share them,
            else [B, H, ...].
        target: what the kernel is made for.
        **options: those of the operator: `ridge` and `masked` of hla2.

    Returns:
        Numerators [B, H, E] and denominators [B, H], float32, and the states.

    Raises:
        NotImplementedError: for a dtype, sizes or head counts without a kernel.
    """
    groups = states[0].shape[1]
    heads, rest = divmod(q.shape[1], groups)
    if rest or groups % k.shape[1]:
        raise ValueError(f"heads of k divide those of states, and these those of q; got {k.shape}, {groups}, {q.shape}")
    reason = refusal(q.dtype, q.shape[2], v.shape[2], heads)
    if reason is not None:
        raise NotImplementedError(f"{name}: {reason}")

    def kernel(q: Array, k: Array, v: Array, decay: Any, states: Any) -> Any:
        def grouped(x: Array) -> Array:
            return x.reshape(x.shape[0], groups, -1, *x.shape[2:])

        return target.decode(name, grouped(q), k, v, decay, tuple(map(grouped, states)), **options)

    numerator, denominator, after = spread(kernel, (q, k, v, decay, tuple(states)), (), (), splits=False)
    numerator, denominator = (x.reshape(*q.shape[:2], *x.shape[3:]) for x in (numerator, denominator))
    return numerator, denominator, tuple(x.reshape(y.shape) for x, y in zip(after, states, strict=True))
