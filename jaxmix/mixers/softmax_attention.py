"""Causal softmax attention over a key/value cache of fixed capacity."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax.extend import backend

from jaxmix.arrays import INPUT_DTYPES, Array, Dtype, check_array, compute_dtype, einsum, fail, is_concrete
from jaxmix.mixers.dispatch import choose
from jaxmix.mixers.inputs import Sizes, check_inputs
from jaxmix.mixers.positions import count_resets, find_places
from jaxmix.mixers.segments import Segments, find_segments, where_valid
from jaxmix.mixers.state import State


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SoftmaxAttentionState(State):
    """Keys and values of the current segment in a cache of S slots.

    The cache is a record of inputs and not an accumulator, so it keeps them in their own dtype without loss.

    Attributes:
        k: keys [B, S, G, D], filled from slot 0 on; zeros in the rest.
        v: values [B, S, G, E].
        length: tokens of the current segment so far, int32 [B]. Above S the stream has outgrown the cache.
    """

    shared: ClassVar[tuple[str, ...]] = ("k", "v")
    k: Array
    v: Array
    length: Array

    @property
    def capacity(self) -> int:
        """The number of slots S."""
        return self.k.shape[1]

    @classmethod
    def init(
        cls,
        batch: int,
        heads: int,
        key_size: int,
        value_size: int,
        *,
        capacity: int,
        shared_heads: int | None = None,
        dtype: Dtype = jnp.float32,
    ) -> Self:
        """An empty cache of `capacity` slots; `shared_heads` is G, by default `heads`."""
        slots = (batch, capacity, heads if shared_heads is None else shared_heads)
        return cls(
            k=jnp.zeros((*slots, key_size), dtype),
            v=jnp.zeros((*slots, value_size), dtype),
            length=jnp.zeros((batch,), jnp.int32),
        )


def softmax_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    segment_ids: Array | None = None,
    initial_state: SoftmaxAttentionState | None = None,
    implementation: str | None = None,
    capacity: int | None = None,
) -> tuple[Array, SoftmaxAttentionState]:
    r"""Causal softmax attention, with every token attending to its own segment up to itself.

        o_t = sum_{s <= t} p_ts v_s ,   p_ts = exp(scale q_t.k_s) / sum_{r <= t} exp(scale q_t.k_r)

    A token whose place in its segment lies beyond the capacity cannot be served. Where that is known when the call
    is made it is an error; in compiled code, where lengths are not known, the output of such a token is NaN (no
    token is ever evicted or attended to in part). Tokens that fit are not affected, and a new segment starts anew.

    Args:
        q: queries [B, T, H, D], bfloat16, float32 or float64.
        k: keys [B, T, G, D]; query head h reads key/value head h // (H / G).
        v: values [B, T, G, E].
        scale: factor on the logits; D^-1/2 by default.
        segment_ids: int32 [B, T], 0 = padding; a new id starts a new segment, which sees nothing of earlier ones.
        initial_state: cache that the first segment continues; empty by default.
        implementation: "serial" writes and reads the cache token by token; "scan" (the default) serves all tokens at
            once through `jax.nn.dot_product_attention`, by cuDNN on NVIDIA GPUs for bfloat16 where it accepts the
            shapes. One token costs O(capacity) in either. float64 uses the arithmetic of "serial" in both, since
            the library's softmax is float32.
        capacity: slots of the returned cache, at least those of `initial_state`. By default those of
            `initial_state`, or T without one. Only tokens of the current segment take slots.

    Returns:
        The output [B, T, H, E] in the dtype of v, zeros at padding, and the cache after the last token.

    Raises:
        ValueError: for wrong shapes, dtypes or head counts, a cache of another shape or of a dtype that cannot hold k
            and v exactly, or more tokens than the cache can take.
        NotImplementedError: for implementation="pallas".
    """
    form = choose("softmax_attention", implementation, 1, None).form
    sizes = check_inputs(q, k, v, None, segment_ids)
    cache = _checked_cache(sizes, k, v, initial_state, capacity)
    if segment_ids is None and sizes.length > cache.capacity:
        _fail_full(f"{sizes.length} tokens in one call", cache.capacity)
    scale = sizes.key_size**-0.5 if scale is None else float(scale)
    out, state, overflow = _run(sizes, form, scale, initial_state is None, q, k, v, segment_ids, cache)
    if is_concrete(overflow) and overflow.any():
        _fail_full(f"streams of up to {int(state.length.max())} tokens", cache.capacity)
    return out, state


def _fail_full(came: str, capacity: int) -> None:
    fail("capacity", f"at most {capacity} tokens in a segment (the slots of the key/value cache)", came)


def _checked_cache(sizes: Sizes, k: Array, v: Array, state: Any, capacity: int | None) -> SoftmaxAttentionState:
    """The cache that the call starts from, extended to `capacity`."""
    if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
        fail("capacity", "None or a positive int", repr(capacity))
    slots = (sizes.batch, capacity or sizes.length, sizes.groups)
    if state is None:
        return SoftmaxAttentionState(
            jnp.zeros((*slots, sizes.key_size), k.dtype),
            jnp.zeros((*slots, sizes.value_size), v.dtype),
            jnp.zeros((sizes.batch,), jnp.int32),
        )
    if not isinstance(state, SoftmaxAttentionState):
        fail("initial_state", "a SoftmaxAttentionState", type(state).__name__)
    for name, new, size in (("k", k, sizes.key_size), ("v", v, sizes.value_size)):
        old = getattr(state, name)
        shape = (sizes.batch, None if name == "k" else state.capacity, sizes.groups, size)
        check_array(f"initial_state.{name}", old, f"[B, S, G, {'DE'[name == 'v']}]", shape, INPUT_DTYPES)
        if jnp.promote_types(old.dtype, new.dtype) != old.dtype:
            fail(f"initial_state.{name}", f"a dtype that holds {name} ({new.dtype}) exactly", f"dtype {old.dtype}")
    check_array("initial_state.length", state.length, "[B]", (sizes.batch,), ("int32",))
    grow = (capacity or state.capacity) - state.capacity
    if grow < 0:
        fail("capacity", f"at least the {state.capacity} slots of initial_state", capacity)
    wider = [(0, 0), (0, grow), (0, 0), (0, 0)]
    return dataclasses.replace(state, k=jnp.pad(state.k, wider), v=jnp.pad(state.v, wider))


@functools.partial(jax.jit, static_argnums=range(4))
def _run(
    sizes: Sizes,
    form: str,
    scale: float,
    empty: bool,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    cache: SoftmaxAttentionState,
) -> tuple[Array, SoftmaxAttentionState, Array]:
    """Output, final cache, and where a token did not fit (bool [B, T]). `empty` says that the cache holds nothing."""
    everywhere = jnp.ones((sizes.batch, sizes.length), jnp.bool_)
    segments = Segments(everywhere, ~everywhere) if segment_ids is None else find_segments(segment_ids)
    q, k, v = (where_valid(segments, jnp.asarray(x)) for x in (q, k, v))
    exact = form == "serial" or sizes.dtype == jnp.float64
    attend = functools.partial(_attend_exactly if exact else _attend_by_library, scale=scale)
    with jax.named_scope(f"softmax_attention_{form}"):
        if sizes.length == 1 or form == "serial":
            out, cache, overflow = _serial(attend, q, k, v, segments, cache)
        else:
            out, cache, overflow = _all_at_once(attend, q, k, v, segments, cache, empty, segment_ids is not None)
    out = jnp.where(overflow[:, :, None, None], jnp.nan, out).astype(v.dtype)
    return where_valid(segments, out), cache, overflow


# Attention of q [B, T, H, D] to k [B, S, G, D] and v [B, S, G, E] where a mask (bool [B, T, S]) allows it. Without a
# mask S = T and the attention is causal. A query that may attend to nothing gets a finite value.
Attend = Callable[[Array, Array, Array, Array | None], Array]


def _serial(
    attend: Attend, q: Array, k: Array, v: Array, segments: Segments, cache: SoftmaxAttentionState
) -> tuple[Array, SoftmaxAttentionState, Array]:
    def step(cache: SoftmaxAttentionState, token: Any) -> tuple[SoftmaxAttentionState, Any]:
        q, k, v, valid, reset = token
        cache = cache.reset(reset)
        cache = _write(cache, k[:, None], v[:, None], cache.length[:, None], valid[:, None])
        filled = jnp.arange(cache.capacity) < cache.length[:, None]
        out = attend(q[:, None], cache.k, cache.v, filled[:, None])[:, 0]
        return cache, (out, valid & (cache.length > cache.capacity))

    tokens = (q, k, v, segments.valid, segments.reset)
    if q.shape[1] == 1:
        cache, outputs = step(cache, jax.tree.map(lambda x: x[:, 0], tokens))
        out, overflow = (x[:, None] for x in outputs)
    else:
        cache, outputs = jax.lax.scan(step, cache, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
        out, overflow = (jnp.moveaxis(x, 0, 1) for x in outputs)
    return out, cache, overflow


def _all_at_once(
    attend: Attend,
    q: Array,
    k: Array,
    v: Array,
    segments: Segments,
    cache: SoftmaxAttentionState,
    empty: bool,
    packed: bool,
) -> tuple[Array, SoftmaxAttentionState, Array]:
    tokens = jnp.arange(q.shape[1])
    run = count_resets(segments)
    mask = (tokens[:, None] >= tokens) & (run[:, :, None] == run[:, None, :]) & segments.valid[:, None]
    if empty:
        out = attend(q, k, v, mask if packed else None)
    else:
        filled = (run == 0)[:, :, None] & (jnp.arange(cache.capacity) < cache.length[:, None])[:, None]
        keys, values = jnp.concatenate([cache.k, k], axis=1), jnp.concatenate([cache.v, v], axis=1)
        out = attend(q, keys, values, jnp.concatenate([filled, mask], axis=2))
    slot = find_places(segments, cache.length)
    cache = cache.reset(run[:, -1] > 0)
    cache = _write(cache, k, v, slot, segments.valid & (run == run[:, -1:]))
    return out, cache, segments.valid & (slot >= cache.capacity)


def _write(cache: SoftmaxAttentionState, k: Array, v: Array, slot: Array, keep: Array) -> SoftmaxAttentionState:
    """The cache with the tokens selected by `keep` written to their slots (both [B, T]); too high a slot is dropped."""
    at = jnp.arange(slot.shape[0])[:, None], jnp.where(keep, slot, cache.capacity)
    return SoftmaxAttentionState(
        k=cache.k.at[at].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[at].set(v.astype(cache.v.dtype), mode="drop"),
        length=cache.length + keep.sum(axis=1, dtype=jnp.int32),
    )


def _attend_exactly(q: Array, k: Array, v: Array, mask: Array | None, *, scale: float) -> Array:
    dtype = compute_dtype(q, k, v)
    if mask is None:
        mask = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), jnp.bool_))[None]
    grouped = q.astype(dtype).reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    logits = scale * einsum("btgrd,bsgd->bgrts", grouped, k.astype(dtype))
    p = jax.nn.softmax(jnp.where(mask[:, None, None], logits, jnp.finfo(dtype).min), axis=-1)
    return einsum("bgrts,bsge->btgre", p, v.astype(dtype)).reshape(*q.shape[:3], -1)


def _attend_by_library(q: Array, k: Array, v: Array, mask: Array | None, *, scale: float) -> Array:
    value_size = v.shape[-1]
    # The library wants D = E, and cuDNN a multiple of 8; zeros change neither the logits nor the values kept.
    size = -(-max(q.shape[-1], value_size) // 8) * 8 if _on_cuda() else max(q.shape[-1], value_size)
    dtype = jnp.result_type(q, k, v)
    q, k, v = (jnp.pad(x.astype(dtype), [(0, 0)] * 3 + [(0, size - x.shape[-1])]) for x in (q, k, v))
    lengths_fit = q.shape[1] % 2 == 0 and k.shape[1] % 2 == 0
    cudnn = _on_cuda() and dtype == jnp.bfloat16 and size <= 128 and lengths_fit
    with jax.default_matmul_precision("highest"):
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=None if mask is None else mask[:, None],
            scale=scale,
            is_causal=mask is None,
            implementation="cudnn" if cudnn else "xla",
        )
    return out[..., :value_size]


def _on_cuda() -> bool:
    return jax.default_backend() == "gpu" and "cuda" in backend.get_backend().platform_version
