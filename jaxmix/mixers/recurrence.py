"""Runs a recurrence in any of its forms: one token, token by token, an associative scan over tokens, or chunks.

A mixer states only its mathematics, as a subclass of `Recurrence`. Shapes inside a recurrence are those of
`Inputs`: states hold [B, G, D, E] where the R query heads of a group share, [B, G, R, D, E] where they do not. A mixer
without queries and keys (S4D) has None in their place.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, check_flag, check_positive, expand_to, from_numpy
from jaxmix.mixers.chunking import Chunks, apart, beside, join_chunks, split_chunks
from jaxmix.mixers.dispatch import Operands, choose
from jaxmix.mixers.inputs import Inputs, Sizes, check_decay_sign, check_inputs, prepare_inputs
from jaxmix.mixers.kernel_chunks import KernelChunks
from jaxmix.mixers.kernel_step import kernel_step
from jaxmix.mixers.prefix import prefix_scan
from jaxmix.mixers.segments import where_valid
from jaxmix.mixers.state import check_state, group_heads, merge_heads
from jaxmix.parallel.collectives import is_checked, vary_like
from jaxmix_kernels.target import Target

Output = tuple[Array, Array]
"""Numerator [..., E] and denominator [...]; None in its place where a mixer has none."""


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """The mathematics of one mixer with its options fixed; hashable, so that compiled code is reused."""

    name: ClassVar[str]
    state: ClassVar[Any]
    """The class of its states, a `RecurrentState`."""
    summary: ClassVar[Any]
    """The operator of the token scan, with the methods that jaxmix.operators lists."""
    normalizes: ClassVar[bool] = True
    """Values have a column of ones beside them in the chunked form, and outputs a denominator."""
    time_invariant: ClassVar[bool] = False
    """Every token moves the state, whatever it holds, so that padding has to be skipped and not only cleared."""

    @property
    def by_token(self) -> bool:
        """Whether there are a direct step for one token and an associative scan over tokens."""
        return True

    def bind(self, parameters: Any) -> Self:
        """The recurrence with its learned arrays, for the time of one trace."""
        return self

    def zero_state(self, sizes: Sizes) -> Any:
        """The state of streams that have seen nothing."""
        return self.state.init(
            sizes.batch, sizes.heads, sizes.key_size, sizes.value_size, shared_heads=sizes.groups, dtype=sizes.dtype
        )

    def step(self, state: Any, q: Array, k: Array, v: Array, a: Array) -> tuple[Any, Output]:
        """One token: q [B, G, R, D], k [B, G, D], v [B, G, E], decay a [B, G]."""
        raise NotImplementedError

    def serial(self, inputs: Inputs, state: Any) -> tuple[Output, Any]:
        """Token by token: the outputs [B, T, G, R, ...] and the final state."""

        def body(state: Any, token: Any) -> tuple[Any, Output]:
            q, k, v, a, segments = token
            if segments is None:
                return self.step(state, q, k, v, a)
            state = jax.tree.map(lambda x: jnp.where(expand_to(segments.reset, x.ndim), 0, x), state)
            after, output = self.step(state, q, k, v, a)
            return _where(segments.valid, after, state) if self.time_invariant else after, output

        tokens = (inputs.q, inputs.k, inputs.v, _decay(inputs), inputs.segments)
        state, outputs = jax.lax.scan(body, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs), state

    def cut(self, inputs: Inputs, size: int, sequence_axis: str | None) -> Any:
        """The chunks that `chunked` works with."""
        return Chunks.cut(inputs.log_decay, inputs.segments, size, sequence_axis, fresh=inputs.fresh)

    def chunked(self, chunks: Any, q: Any, k: Any, v: Array, state: Any) -> tuple[Array, Any]:
        """All chunks at once: q [B, N, G, R, C, D], k [B, N, G, C, D], v [B, N, G, C, E + 1], last column 1.

        Returns:
            The outputs [B, N, G, R, C, E + 1], denominator last, and the final state.
        """
        raise NotImplementedError

    def summarize(self, inputs: Inputs) -> Any:
        """The summary of every token for every query head, [B, T, G, R, ...]."""
        repeats = inputs.q.shape[3]

        def per_head(x: Array) -> Array:
            return jnp.repeat(x[:, :, :, None], repeats, axis=3)

        log_decay = None if inputs.log_decay is None else per_head(inputs.log_decay)
        return self.summary.token_summary(inputs.q, per_head(inputs.k), per_head(inputs.v), log_decay)

    def begin(self, state: Any, inputs: Inputs) -> Any:
        """The state as the summary of all that came before, [B, 1, G, R, ...]."""
        repeats = inputs.q.shape[3]
        nothing = self.summary.identity(
            inputs.q[:, :1].shape[:4], inputs.k.shape[-1], inputs.v.shape[-1], inputs.q.dtype
        )
        fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        shared = {
            name: jnp.repeat(x[:, :, None], repeats, axis=2) for name, x in fields.items() if name in state.shared
        }
        return dataclasses.replace(nothing, **{name: x[:, None] for name, x in (fields | shared).items()})

    def end(self, total: Any, inputs: Inputs) -> Any:
        """The summary of everything, [B, 1, G, R, ...], as a state: the inverse of `begin`."""
        fields = {f.name: getattr(total, f.name)[:, 0] for f in dataclasses.fields(self.state)}
        return self.state(**{name: x[:, :, 0] if name in self.state.shared else x for name, x in fields.items()})

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
    """Check one call of a mixer of queries, keys and values, and run it; see the public mixers for the arguments."""
    q, k, v, log_decay, segment_ids = map(from_numpy, (q, k, v, log_decay, segment_ids))
    check_flag("normalize", normalize)
    check_positive("eps", eps)
    sizes = check_inputs(q, k, v, log_decay, segment_ids)
    check_decay_sign(log_decay, segment_ids)
    dtype = _common_dtype(sizes, q, k, v)
    checked, sharing = any(map(is_checked, (q, k, v))), sizes.heads // sizes.groups
    operands = Operands(dtype, sizes.length, sizes.key_size, sizes.value_size, checked, sharing)
    choice = choose(mixer.name, implementation, chunk_size, sequence_axis, operands=operands)
    arrays = (q, k, v, log_decay, segment_ids, initial_state, None)
    return run_checked(
        mixer, sizes, choice.form, arrays, eps if normalize else None, chunk_size, sequence_axis, choice.target
    )


def _common_dtype(sizes: Sizes, *arrays: Array) -> str:
    """The dtype of all arrays, float64 where only the decays have it, or "mixed"."""
    names = {str(x.dtype) for x in arrays} | ({"float64"} if sizes.dtype == jnp.float64 else set())
    return names.pop() if len(names) == 1 else "mixed"


def run_checked(
    mixer: Recurrence,
    sizes: Sizes,
    form: str,
    arrays: tuple[Any, ...],
    eps: float | None,
    chunk_size: int,
    sequence_axis: str | None,
    target: Target | None = None,
) -> tuple[Array, Any]:
    """Runs a recurrence on arrays that were checked, all but the state.

    Args:
        mixer: the recurrence, not bound to parameters.
        sizes: of the arrays.
        form: what `choose` chose.
        arrays: q, k, v, log_decay, segment_ids, initial_state, and the parameters that `mixer.bind` takes.
        eps: of the normaliser; None for outputs that are not normalised.
        chunk_size: tokens per chunk.
        sequence_axis: shard_map axis over which T is split, or None.
        target: what kernels are made for, if the form is "pallas"; with one token, None is the step by XLA.
    """
    initial_state = arrays[5]
    if initial_state is not None:
        check_state(initial_state, jax.eval_shape(functools.partial(mixer.zero_state, sizes)), sizes.dtype)
    if mixer.by_token and sizes.length == 1 and sequence_axis is None:
        form = "step"
    elif mixer.by_token and form == "scan" and chunk_size == 1:
        form = "tokens"
    return _run(mixer, sizes, form, eps, chunk_size, sequence_axis, target, *arrays)


@functools.partial(jax.jit, static_argnums=range(7))
def _run(
    mixer: Recurrence,
    sizes: Sizes,
    form: str,
    eps: float | None,
    chunk_size: int,
    sequence_axis: str | None,
    target: Target | None,
    q: Array | None,
    k: Array | None,
    v: Array,
    log_decay: Array | None,
    segment_ids: Array | None,
    initial_state: Any,
    parameters: Any,
) -> tuple[Array, Any]:
    state = mixer.zero_state(sizes) if initial_state is None else initial_state
    mixer = mixer.bind(parameters if sequence_axis is None else vary_like(parameters, v))
    by_kernel = form in ("pallas", "step") and target is not None
    fresh = initial_state is None
    inputs = prepare_inputs(sizes, q, k, v, log_decay, segment_ids, sequence_axis, fresh=fresh, for_kernel=by_kernel)
    state = group_heads(state, sizes.groups)
    with jax.named_scope(f"{mixer.name}_{form}"):
        if form == "step":
            (num, den), state = _single_step(mixer, inputs, state, target)
        elif form == "serial":
            (num, den), state = mixer.serial(inputs, state)
        elif form == "tokens":
            (num, den), state = _token_scan(mixer, inputs, state, sequence_axis)
        elif form == "pallas":
            assert target is not None
            (num, den), state = _kernel(mixer, inputs, state, sizes, target, fused=eps is None)
        else:
            (num, den), state = _chunk_scan(mixer, inputs, state, min(chunk_size, sizes.length), sequence_axis)
    out = num if eps is None or den is None else num / (den[..., None] + eps)
    out = out.reshape(sizes.batch, sizes.length, sizes.heads, sizes.value_size)
    if mixer.time_invariant:
        out = where_valid(inputs.segments, out)
    return out.astype(v.dtype), merge_heads(state)


def _decay(inputs: Inputs) -> Array:
    if inputs.log_decay is None:
        return jnp.ones(inputs.v.shape[:3], inputs.v.dtype)
    return jnp.exp(inputs.log_decay)


def _single_step(mixer: Recurrence, inputs: Inputs, state: Any, target: Target | None) -> tuple[Output, Any]:
    if target is not None:
        q, k, v = inputs.q[:, 0], inputs.k[:, 0], inputs.v[:, 0]
        decay = None if inputs.log_decay is None else jnp.exp(inputs.log_decay[:, 0])
        after, output = kernel_step(mixer, target, state, q, k, v, decay)
        return jax.tree.map(lambda x: x[:, None], output), after
    q, k, v, a = jax.tree.map(lambda x: x[:, 0], (inputs.q, inputs.k, inputs.v, _decay(inputs)))
    after, output = mixer.step(state, q, k, v, a)
    if mixer.time_invariant and inputs.segments is not None:
        after = _where(inputs.segments.valid[:, 0], after, state)
    return jax.tree.map(lambda x: x[:, None], output), after


def _token_scan(mixer: Recurrence, inputs: Inputs, state: Any, sequence_axis: str | None) -> tuple[Output, Any]:
    resets = None if inputs.segments is None else inputs.segments.reset
    initial = mixer.begin(state, inputs)
    _, prefixes, total = prefix_scan(mixer.summary.combine, mixer.summarize(inputs), resets, initial, sequence_axis)
    return mixer.read(prefixes, inputs.q), mixer.end(total, inputs)


def _chunk_scan(mixer: Recurrence, inputs: Inputs, state: Any, size: int, sequence_axis: str | None) -> tuple[Any, Any]:
    length = inputs.v.shape[1]
    values = beside(inputs.v, jnp.ones_like(inputs.v[..., 0])) if mixer.normalizes else inputs.v
    q, k, v = jax.tree.map(lambda x: split_chunks(x, size), (inputs.q, inputs.k, values))
    out, state = mixer.chunked(mixer.cut(inputs, size, sequence_axis), q, k, v, state)
    out = join_chunks(out, length)
    return apart(out) if mixer.normalizes else (out, None), state


def _kernel(
    mixer: Recurrence, inputs: Inputs, state: Any, sizes: Sizes, target: Target, *, fused: bool
) -> tuple[Output, Any]:
    chunks: Any = KernelChunks.cut(
        inputs.log_decay,
        inputs.segments,
        sizes.groups,
        sizes.dtype,
        target,
        operand_dtype=inputs.v.dtype,
        fused=fused,
        fresh=inputs.fresh,
    )
    values = chunks.beside(inputs.v, jnp.ones_like(inputs.v[..., 0], sizes.dtype))
    out, state = mixer.chunked(chunks, inputs.q, inputs.k, values, state)
    return chunks.apart(out), state


def _where(condition: Array, a: Any, b: Any) -> Any:
    """a where `condition` [B] holds, else b, for equal trees of [B, ...]."""
    return jax.tree.map(lambda x, y: jnp.where(expand_to(condition, x.ndim), x, y), a, b)
