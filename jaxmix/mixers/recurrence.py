"""Runs a recurrence in any of its forms: one token, token by token, an associative scan over tokens, or chunks.

A mixer states only its mathematics, as a subclass of `Recurrence`. Shapes inside a recurrence are those of
`Inputs`: states hold [B, G, D, E] where the R query heads of a group share, [B, G, R, D, E] where they do not.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, check_flag, check_positive, expand_to, from_numpy
from jaxmix.mixers.chunking import Chunks, join_chunks, split_chunks
from jaxmix.mixers.dispatch import choose
from jaxmix.mixers.inputs import Inputs, Sizes, check_decay_sign, check_inputs, prepare_inputs
from jaxmix.mixers.prefix import prefix_scan
from jaxmix.mixers.state import RecurrentState, check_state, group_heads, merge_heads

Output = tuple[Array, Array]
"""Numerator [..., E] and denominator [...]."""


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """The mathematics of one mixer with its options fixed; hashable, so that compiled code is reused."""

    name: ClassVar[str]
    state: ClassVar[type[RecurrentState]]
    summary: ClassVar[Any]
    """The operator of the token scan, with the methods that jaxmix.operators lists."""

    def step(self, state: Any, q: Array, k: Array, v: Array, a: Array) -> tuple[Any, Output]:
        """One token: q [B, G, R, D], k [B, G, D], v [B, G, E], decay a [B, G]."""
        raise NotImplementedError

    def chunked(self, chunks: Chunks, q: Array, k: Array, v: Array, state: Any) -> tuple[Output, Any]:
        """All chunks at once: numerator [B, N, G, R, C, E], denominator [B, N, G, R, C, 1] and the final state."""
        raise NotImplementedError

    def read(self, state: Any, q: Array) -> Output:
        """The output that query q [..., D] reads from a state or summary with the same leading axes."""
        raise NotImplementedError


def run(
    mixer: Recurrence,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    *,
    normalize: bool,
    eps: float,
    segment_ids: Array | None,
    initial_state: Any,
    implementation: str | None,
    chunk_size: int,
    sequence_axis: str | None,
) -> tuple[Array, Any]:
    """Check one call and run it; see the public mixers for the arguments."""
    q, k, v, log_decay, segment_ids = map(from_numpy, (q, k, v, log_decay, segment_ids))
    form = choose(mixer.name, implementation, chunk_size, sequence_axis)
    check_flag("normalize", normalize)
    check_positive("eps", eps)
    sizes = check_inputs(q, k, v, log_decay, segment_ids)
    check_decay_sign(log_decay, segment_ids)
    if initial_state is not None:
        check_state(initial_state, jax.eval_shape(functools.partial(_zero_state, mixer, sizes)), sizes.dtype)
    if sizes.length == 1 and sequence_axis is None:
        form = "step"
    elif form == "scan" and chunk_size == 1:
        form = "tokens"
    return _run(
        mixer, sizes, form, normalize, eps, chunk_size, sequence_axis, q, k, v, log_decay, segment_ids, initial_state
    )


def _zero_state(mixer: Recurrence, sizes: Sizes) -> Any:
    return mixer.state.init(
        sizes.batch, sizes.heads, sizes.key_size, sizes.value_size, shared_heads=sizes.groups, dtype=sizes.dtype
    )


@functools.partial(jax.jit, static_argnums=range(7))
def _run(
    mixer: Recurrence,
    sizes: Sizes,
    form: str,
    normalize: bool,
    eps: float,
    chunk_size: int,
    sequence_axis: str | None,
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array | None,
    segment_ids: Array | None,
    initial_state: Any,
) -> tuple[Array, Any]:
    state = _zero_state(mixer, sizes) if initial_state is None else initial_state
    inputs = prepare_inputs(sizes, q, k, v, log_decay, segment_ids, sequence_axis)
    state = group_heads(state, sizes.groups)
    with jax.named_scope(f"{mixer.name}_{form}"):
        if form == "step":
            (num, den), state = _single_step(mixer, inputs, state)
        elif form == "serial":
            (num, den), state = _serial(mixer, inputs, state)
        elif form == "tokens":
            (num, den), state = _token_scan(mixer, inputs, state, sequence_axis)
        else:
            (num, den), state = _chunk_scan(mixer, inputs, state, min(chunk_size, sizes.length), sequence_axis)
    out = num / (den[..., None] + eps) if normalize else num
    out = out.reshape(sizes.batch, sizes.length, sizes.heads, sizes.value_size)
    return out.astype(v.dtype), merge_heads(state)


def _decay(inputs: Inputs) -> Array:
    if inputs.log_decay is None:
        return jnp.ones(inputs.k.shape[:3], inputs.k.dtype)
    return jnp.exp(inputs.log_decay)


def _single_step(mixer: Recurrence, inputs: Inputs, state: Any) -> tuple[Output, Any]:
    q, k, v, a = (x[:, 0] for x in (inputs.q, inputs.k, inputs.v, _decay(inputs)))
    state, (num, den) = mixer.step(state, q, k, v, a)
    return (num[:, None], den[:, None]), state


def _serial(mixer: Recurrence, inputs: Inputs, state: Any) -> tuple[Output, Any]:
    def body(state: Any, token: Any) -> tuple[Any, Output]:
        q, k, v, a, reset = token
        if reset is not None:
            state = jax.tree.map(lambda x: jnp.where(expand_to(reset, x.ndim), 0, x), state)
        return mixer.step(state, q, k, v, a)

    resets = None if inputs.segments is None else inputs.segments.reset
    tokens = (inputs.q, inputs.k, inputs.v, _decay(inputs), resets)
    state, outputs = jax.lax.scan(body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    num, den = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
    return (num, den), state


def _token_scan(mixer: Recurrence, inputs: Inputs, state: Any, sequence_axis: str | None) -> tuple[Output, Any]:
    repeats = inputs.q.shape[3]
    shared = mixer.state.shared

    def per_head(x: Array) -> Array:
        return jnp.repeat(x[:, :, :, None], repeats, axis=3)

    log_decay = None if inputs.log_decay is None else per_head(inputs.log_decay)
    summaries = mixer.summary.token_summary(inputs.q, per_head(inputs.k), per_head(inputs.v), log_decay)
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    fields = {name: jnp.repeat(x[:, :, None], repeats, axis=2) if name in shared else x for name, x in fields.items()}
    nothing = mixer.summary.identity(inputs.q[:, :1].shape[:4], inputs.k.shape[-1], inputs.v.shape[-1], inputs.q.dtype)
    initial = dataclasses.replace(nothing, **{name: x[:, None] for name, x in fields.items()})
    resets = None if inputs.segments is None else inputs.segments.reset
    _, prefixes, total = prefix_scan(mixer.summary.combine, summaries, resets, initial, sequence_axis)
    final = {name: getattr(total, name)[:, 0] for name in fields}
    final = {name: x[:, :, 0] if name in shared else x for name, x in final.items()}
    return mixer.read(prefixes, inputs.q), mixer.state(**final)


def _chunk_scan(
    mixer: Recurrence, inputs: Inputs, state: Any, size: int, sequence_axis: str | None
) -> tuple[Output, Any]:
    length = inputs.q.shape[1]
    q, k, v = (split_chunks(x, size) for x in (inputs.q, inputs.k, inputs.v))
    chunks = Chunks.cut(inputs.log_decay, inputs.segments, size, sequence_axis)
    (num, den), state = mixer.chunked(chunks, q, k, v, state)
    return (join_chunks(num, length), join_chunks(den, length)[..., 0]), state
