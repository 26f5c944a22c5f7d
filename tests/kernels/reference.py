"""The primitive of the kernels in plain jax.numpy, and random arguments that belong together."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix_kernels.decays import CHUNK, ChunkDecays, Result

LAYOUTS: dict[str, dict[str, Any]] = {
    "mixed decays and segments": {},
    "every array with its own number of heads": {
        "heads": 8,
        "b_heads": 4,
        "c_heads": 2,
        "decay_heads": 1,
        "weights_heads": 4,
        "state_heads": 2,
        "tokens": 2 * CHUNK,
    },
    "decays of -80": {"decay": -80.0, "segments": False},
    "segments without decay": {"decay": None},
    "one chunk": {"tokens": CHUNK, "key_size": 128, "value_size": 32},
}
"""Arguments of `random_case` that every kernel is checked with."""


def decayed_attention(
    a, b, c, decays, initial, *, weights=None, reverse=False, outputs=True, interpret=False, chunk=CHUNK
) -> Result:
    """Chunk after chunk in the dtype of the inputs, float32 at least and without rounding in between."""
    del interpret
    dtype = jnp.promote_types(c.dtype, jnp.float32)
    heads = max(x.shape[2] for x in (a, b, c, weights) if x is not None)
    heads = max(heads, 1 if decays is None else decays.enter.shape[1], 1 if initial is None else initial.shape[1])
    batch, length, _, value_size = c.shape
    count = length // chunk

    def chunks(x):
        """[B, T, H', D] to [N, B, H, C, D] in the dtype of the computation."""
        x = jnp.repeat(x.astype(dtype), heads // x.shape[2], axis=2)
        return jnp.transpose(x.reshape(batch, count, chunk, heads, -1), (1, 0, 3, 2, 4))

    def per_head(x):
        """[B, Hd, N, ...] to [N, B, H, ...]."""
        return jnp.moveaxis(jnp.repeat(x.astype(dtype), heads // x.shape[1], axis=1), 2, 0)

    parts = {"a": None if a is None else chunks(a), "b": chunks(b), "c": chunks(c)}
    if decays is None:
        parts["enter"] = parts["leave"] = jnp.ones((count, batch, heads, chunk), dtype)
        parts["kept"] = jnp.ones((count, batch, heads), dtype)
        parts["mask"] = jnp.broadcast_to(jnp.tri(chunk, dtype=dtype), (count, batch, heads, chunk, chunk))
    else:
        parts |= {name: per_head(getattr(decays, name)) for name in ("enter", "leave", "kept")}
        high, low = per_head(decays.high), per_head(decays.low)
        seen = jnp.tri(chunk, dtype=bool)
        if decays.run is not None:
            run = jnp.moveaxis(decays.run, 1, 0)[:, :, None]
            seen = seen & (run[..., :, None] == run[..., None, :])
        exponents = (high[..., :, None] - high[..., None, :]) + (low[..., :, None] - low[..., None, :])
        parts["mask"] = jnp.exp(jnp.where(seen, exponents, -jnp.inf))
    if reverse:
        parts["mask"] = parts["mask"].mT
        parts["enter"], parts["leave"] = parts["leave"], parts["enter"]
    state = jnp.zeros((batch, heads, b.shape[3], value_size), dtype)
    if initial is not None:
        state = jnp.repeat(initial.astype(dtype), heads // initial.shape[1], axis=1)

    def step(state, part):
        out = None
        if outputs:
            scores = part["mask"] * _product("td,sd->ts", part["a"], part["b"])
            out = part["enter"][..., None] * _product("td,de->te", part["a"], state)
            out = out + _product("ts,se->te", scores, part["c"])
        added = _product("sd,se->de", part["leave"][..., None] * part["b"], part["c"])
        return part["kept"][..., None, None] * state + added, out

    final, out = jax.lax.scan(step, state, parts, reverse=reverse)
    if out is None:
        return Result(None, final, None)
    out = jnp.transpose(out, (1, 0, 3, 2, 4)).reshape(batch, length, heads, value_size)
    dots = None
    if weights is not None:
        repeated = jnp.repeat(weights.astype(dtype), heads // weights.shape[2], axis=2)
        dots = jnp.moveaxis(jnp.sum(out * repeated, axis=-1), 1, 2)
    return Result(out.astype(c.dtype), final, dots)


def _product(spec, x, y):
    left, right = spec.split(",")
    right, out = right.split("->")
    return jnp.einsum(f"bh{left},bh{right}->bh{out}", x, y, precision=jax.lax.Precision.HIGHEST)


class RandomCase(NamedTuple):
    """Arguments of one call, `decayed_attention(a, b, c, decays, initial, weights=weights)`."""

    a: Any
    b: Any
    c: Any
    decays: ChunkDecays | None
    initial: Any
    weights: Any


def random_case(
    seed=0,
    *,
    batch=2,
    tokens=192,
    heads=4,
    b_heads=None,
    c_heads=None,
    decay_heads=None,
    weights_heads=None,
    state_heads=None,
    key_size=32,
    value_size=64,
    dtype=np.float32,
    decay="mixed",
    segments=True,
    chunk=CHUNK,
) -> RandomCase:
    """Random arguments with a state to continue; head counts default to `heads`.

    `decay` is "mixed" (log decays from -1e-4 to -80 a step), "weak" (-1e-3 to -1), a number, or None for no decay;
    with neither decay nor segments, `decays` is None. Gates and states are float64 if `dtype` is, else float32.
    """
    rng = np.random.default_rng(seed)
    gates = np.float64 if dtype == np.float64 else np.float32

    def normal(count, size):
        return jnp.asarray(rng.normal(size=(batch, tokens, count or heads, size)) / np.sqrt(size), dtype)

    arrays = normal(heads, key_size), normal(b_heads, key_size), normal(c_heads, value_size)
    weights = normal(weights_heads, value_size)
    initial = jnp.asarray(rng.normal(size=(batch, state_heads or heads, key_size, value_size)), gates)
    if decay is None and not segments:
        return RandomCase(*arrays, None, initial, weights)
    shape = (batch, decay_heads or heads, tokens)
    if decay is None:
        steps = np.zeros(shape)
    elif isinstance(decay, str):
        low, high = {"mixed": (1e-4, 80.0), "weak": (1e-3, 1.0)}[decay]
        steps = -np.exp(rng.uniform(np.log(low), np.log(high), shape))
    else:
        steps = np.full(shape, float(decay))
    starts = rng.random((batch, tokens)) < 1.5 / chunk if segments else None
    return RandomCase(*arrays, make_decays(steps, starts, chunk, gates), initial, weights)


def make_decays(steps, starts=None, chunk=CHUNK, dtype=np.float32) -> ChunkDecays:
    """Decays of log decays [B, Hd, T] with segments that begin where `starts` [B, T] is true, summed in float64."""
    batch, heads, tokens = np.shape(steps)
    steps = np.asarray(np.asarray(steps, dtype), np.float64).reshape(batch, heads, -1, chunk)
    run = np.zeros((batch, tokens), np.int32) if starts is None else np.asarray(starts, np.int32)
    run = np.cumsum(run.reshape(batch, -1, chunk), axis=-1, dtype=np.int32)
    sums = np.zeros_like(steps)
    for t in range(chunk):
        begins = np.ones(run.shape[:2], bool) if t == 0 else run[:, :, t] != run[:, :, t - 1]
        before = 0.0 if t == 0 else sums[..., t - 1]
        sums[..., t] = steps[..., t] + np.where(begins[:, None], 0.0, before)
    last = (run == run[..., -1:])[:, None]
    high = np.asarray(sums, dtype)
    arrays = {
        "high": high,
        "low": sums - np.asarray(high, np.float64),
        "enter": np.where((run == 0)[:, None], np.exp(sums), 0.0),
        "leave": np.where(last, np.exp(np.where(last, sums[..., -1:] - sums, 0.0)), 0.0),
        "kept": np.where((run[..., -1] == 0)[:, None], np.exp(sums[..., -1]), 0.0),
        "steps": steps,
    }
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    return ChunkDecays(run=None if starts is None else jnp.asarray(run), **arrays)
