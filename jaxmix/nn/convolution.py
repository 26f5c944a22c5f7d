"""Short causal depthwise convolution over the tokens of one segment."""

import functools
from collections.abc import Sequence

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
    dtype = compute_dtype(x)
    tail = (batch, kernel.shape[0] - 1, channels)
    if initial_state is None:
        initial_state = jnp.zeros(tail, dtype)
    check_array("initial_state", initial_state, "[B, W-1, C]", tail, (jnp.dtype(dtype).name,))
    segments = None
    if segment_ids is not None:
        check_segment_ids(segment_ids, batch, length)
        segments = find_segments(segment_ids)
    ((y, state),) = convolve_streams([x], [kernel], [initial_state], segments)
    return y, state


def convolve_streams(
    xs: Sequence[Array], kernels: Sequence[Array], tails: Sequence[Array], segments: Segments | None
) -> list[tuple[Array, Array]]:
    """`short_convolution` of several streams with the same segments and widths, unchecked."""
    history = kernels[0].shape[0] - 1
    length = xs[0].shape[1]
    xs = [where_valid(segments, x) for x in xs]
    streams = [jnp.concatenate([tail, x.astype(tail.dtype)], axis=1) for x, tail in zip(xs, tails, strict=True)]
    if segments is None:
        shifted = [[stream[:, w : w + length] for w in range(history + 1)] for stream in streams]
        ys, new = map(_weigh, shifted, kernels), [stream[:, length:] for stream in streams]
    else:
        ys = _convolve_segments(streams, kernels, segments)
        new = _last_inputs(streams, segments, history)
    return [(where_valid(segments, y.astype(x.dtype)), tail) for x, y, tail in zip(xs, ys, new, strict=True)]


def _weigh(taps: list[Array], kernel: Array) -> Array:
    weighed = [tap * weight for tap, weight in zip(taps, kernel.astype(taps[0].dtype), strict=True)]
    return functools.reduce(jnp.add, weighed)


def _convolve_segments(streams: list[Array], kernels: Sequence[Array], segments: Segments) -> list[Array]:
    history, length = kernels[0].shape[0] - 1, segments.valid.shape[1]
    run = _stream_runs(segments, history)

    def neighbours() -> list[Array]:
        same = [(run[:, w : w + length] == run[:, history:])[..., None] for w in range(history + 1)]
        return [
            _weigh([jnp.where(same[w], stream[:, w : w + length], 0) for w in range(history + 1)], kernel)
            for stream, kernel in zip(streams, kernels, strict=True)
        ]

    def earlier_real_tokens() -> list[Array]:
        before = _previous_real(segments, history)
        places = [history + jnp.arange(length) + jnp.zeros_like(run[:, :1])]
        for _ in range(history):
            places.insert(0, _take(before, places[0]))
        same = [(_take(run, at) == run[:, history:])[..., None] for at in places]
        return [
            _weigh([jnp.where(mask, _take(stream, at), 0) for mask, at in zip(same, places, strict=True)], kernel)
            for stream, kernel in zip(streams, kernels, strict=True)
        ]

    # Only a token that follows padding has real predecessors elsewhere than beside it, and gathers are slow.
    resumes = jnp.any(segments.valid[:, 1:] & ~segments.valid[:, :-1])
    return jax.lax.cond(resumes, earlier_real_tokens, neighbours)


def _stream_runs(segments: Segments, history: int) -> Array:
    """Which segment each place in the stream of `history` earlier inputs and T tokens belongs to, counted from 0."""
    return jnp.pad(count_resets(segments), [(0, 0), (history, 0)])


def _previous_real(segments: Segments, history: int) -> Array:
    """For each place in the stream, the last real one before it."""
    real = jnp.pad(segments.valid, [(0, 0), (history, 0)], constant_values=True)
    place = jnp.where(real, jnp.arange(real.shape[1]), 0)
    return jnp.pad(jax.lax.cummax(place, axis=1)[:, :-1], [(0, 0), (1, 0)])


def _last_inputs(streams: list[Array], segments: Segments, history: int) -> list[Array]:
    """The last real inputs of the last segment, zeros where it has fewer."""
    before, run = _previous_real(segments, history), _stream_runs(segments, history)
    places = [jnp.where(segments.valid[:, -1:], run.shape[1] - 1, before[:, -1:])]
    for _ in range(history - 1):
        places.insert(0, _take(before, places[0]))
    at = jnp.concatenate(places, axis=1)
    same = (_take(run, at) == run[:, -1:])[..., None]
    return [jnp.where(same, _take(stream, at), 0) for stream in streams]


def _take(x: Array, at: Array) -> Array:
    """x[b, at[b, t]] for x [B, S, ...] and `at` [B, T]."""
    return jax.vmap(lambda row, i: row[i])(x, at)


class ShortConvolution(nnx.Module):
    """`short_convolution` with a learned kernel, initially uniform in +-W^-1/2, and a bias, initially 0, if asked for.

    Args:
        channels: number of channels C.
        width: kernel width W, at least 2.
        rngs: source of the initial values.
        param_dtype: dtype of the kernel.
        axis: logical axis name of the channels, for sharding.
        bias: add a learned number per channel, at padding too.
    """

    def __init__(
        self,
        channels: int,
        width: int = 4,
        *,
        rngs: nnx.Rngs,
        param_dtype: Dtype = jnp.float32,
        axis: str | None = None,
        bias: bool = False,
    ):
        bound = width**-0.5
        kernel = jax.random.uniform(rngs.params(), (width, channels), param_dtype, -bound, bound)
        self.kernel = nnx.Param(kernel, **partitioned(None, axis))
        self.bias = nnx.Param(jnp.zeros((channels,), param_dtype), **partitioned(axis)) if bias else None
        self.channels = channels
        self.width = width

    def __call__(
        self, x: Array, *, segment_ids: Array | None = None, state: Array | None = None
    ) -> tuple[Array, Array]:
        """See `short_convolution`; `state` is its `initial_state`."""
        y, state = short_convolution(x, self.kernel[...], segment_ids=segment_ids, initial_state=state)
        return self.shift(y), state

    def shift(self, y: Array) -> Array:
        """y [B, T, C] with the bias added, if there is one."""
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    def init_state(self, batch_size: int, dtype: Dtype = jnp.float32) -> Array:
        """The state of streams that have seen nothing, [B, W-1, C]."""
        return jnp.zeros((batch_size, self.width - 1, self.channels), dtype)
