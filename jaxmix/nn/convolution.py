"""Short causal depthwise convolution over the tokens of one segment."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import INPUT_DTYPES, Array, Dtype, check_array, compute_dtype, fail
from jaxmix.mixers.positions import count_resets
from jaxmix.mixers.segments import Segments, check_segment_ids, find_segments, where_valid
from jaxmix.nn.parameters import partitioned


def short_convolution(
    x: Array, kernel: Array, *, segment_ids: Array | None = None, initial_state: Array | None = None
) -> tuple[Array, Array]:
    r"""Causal depthwise convolution: every channel looks at its own last W inputs in the segment.

        y_t = sum_{w < W} kernel_w x_{t - W + 1 + w}

    where x_{t-1}, x_{t-2}, ... are the real tokens before t in t's own segment, and zero before its start.

    Args:
        x: [B, T, C].
        kernel: [W, C]; the last row belongs to the current token.
        segment_ids: int32 [B, T], 0 = padding; padding is skipped, a new id sees nothing of earlier segments.
        initial_state: the last W - 1 inputs of the stream, oldest first, [B, W-1, C] float32 (float64 for float64
            x), which the first segment continues; zeros by default.

    Returns:
        y [B, T, C] in the dtype of x, zeros at padding, and the state after the last token.

    Raises:
        ValueError: for arrays of a wrong shape or dtype.
    """
    check_array("x", x, "[B, T, C]", (None,) * 3, INPUT_DTYPES)
    batch, length, channels = x.shape
    check_array("kernel", kernel, "[W, C]", (None, channels), INPUT_DTYPES)
    if kernel.shape[0] < 2:
        fail("kernel", "a width W of at least 2", f"shape {list(kernel.shape)}")
    history = kernel.shape[0] - 1
    dtype = compute_dtype(x)
    if initial_state is None:
        initial_state = jnp.zeros((batch, history, channels), dtype)
    check_array("initial_state", initial_state, "[B, W-1, C]", (batch, history, channels), (jnp.dtype(dtype).name,))
    if segment_ids is None:
        stream = jnp.concatenate([initial_state, x.astype(dtype)], axis=1)
        taps = [stream[:, w : w + length] for w in range(history + 1)]
        return _weigh(taps, kernel).astype(x.dtype), stream[:, length:]
    check_segment_ids(segment_ids, batch, length)
    segments = find_segments(segment_ids)
    x = where_valid(segments, x)
    stream = jnp.concatenate([initial_state, x.astype(dtype)], axis=1)
    run = jnp.pad(count_resets(segments), [(0, 0), (history, 0)])
    y = _convolve_segments(stream, run, segments, kernel)
    return where_valid(segments, y.astype(x.dtype)), _last_inputs(stream, run, segments, history)


def _weigh(taps: list[Array], kernel: Array) -> Array:
    weighed = [tap * weight for tap, weight in zip(taps, kernel.astype(taps[0].dtype), strict=True)]
    return functools.reduce(jnp.add, weighed)


def _convolve_segments(stream: Array, run: Array, segments: Segments, kernel: Array) -> Array:
    history = kernel.shape[0] - 1
    length = segments.valid.shape[1]

    def neighbours() -> Array:
        taps = []
        for w in range(history + 1):
            same = run[:, w : w + length] == run[:, history:]
            taps.append(jnp.where(same[..., None], stream[:, w : w + length], 0))
        return _weigh(taps, kernel)

    def earlier_real_tokens() -> Array:
        before = _previous_real(segments, history)
        at, taps = history + jnp.arange(length) + jnp.zeros_like(run[:, :1]), []
        for _ in range(history + 1):
            same = _take(run, at) == run[:, history:]
            taps.insert(0, jnp.where(same[..., None], _take(stream, at), 0))
            at = _take(before, at)
        return _weigh(taps, kernel)

    # Only a token that follows padding has real predecessors elsewhere than beside it, and gathers are slow.
    resumes = jnp.any(segments.valid[:, 1:] & ~segments.valid[:, :-1])
    return jax.lax.cond(resumes, earlier_real_tokens, neighbours)


def _previous_real(segments: Segments, history: int) -> Array:
    """For each place in the stream of `history` earlier inputs and T tokens, the last real one before it."""
    real = jnp.pad(segments.valid, [(0, 0), (history, 0)], constant_values=True)
    place = jnp.where(real, jnp.arange(real.shape[1]), 0)
    return jnp.pad(jax.lax.cummax(place, axis=1)[:, :-1], [(0, 0), (1, 0)])


def _last_inputs(stream: Array, run: Array, segments: Segments, history: int) -> Array:
    before = _previous_real(segments, history)
    at = jnp.where(segments.valid[:, -1:], stream.shape[1] - 1, before[:, -1:])
    taps = []
    for _ in range(history):
        taps.insert(0, jnp.where((_take(run, at) == run[:, -1:])[..., None], _take(stream, at), 0))
        at = _take(before, at)
    return jnp.concatenate(taps, axis=1)


def _take(x: Array, at: Array) -> Array:
    """x[b, at[b, t]] for x [B, S, ...] and `at` [B, T]."""
    return jax.vmap(lambda row, i: row[i])(x, at)


class ShortConvolution(nnx.Module):
    """`short_convolution` with a learned kernel, initially uniform in +-W^-1/2.

    Args:
        channels: number of channels C.
        width: kernel width W, at least 2.
        rngs: source of the initial values.
        param_dtype: dtype of the kernel.
        axis: logical axis name of the channels, for sharding.
    """

    def __init__(
        self,
        channels: int,
        width: int = 4,
        *,
        rngs: nnx.Rngs,
        param_dtype: Dtype = jnp.float32,
        axis: str | None = None,
    ):
        bound = width**-0.5
        kernel = jax.random.uniform(rngs.params(), (width, channels), param_dtype, -bound, bound)
        self.kernel = nnx.Param(kernel, **partitioned(None, axis))
        self.channels = channels
        self.width = width

    def __call__(
        self, x: Array, *, segment_ids: Array | None = None, state: Array | None = None
    ) -> tuple[Array, Array]:
        """See `short_convolution`; `state` is its `initial_state`."""
        return short_convolution(x, self.kernel[...], segment_ids=segment_ids, initial_state=state)

    def init_state(self, batch_size: int, dtype: Dtype = jnp.float32) -> Array:
        """The state of streams that have seen nothing, [B, W-1, C]."""
        return jnp.zeros((batch_size, self.width - 1, self.channels), dtype)
