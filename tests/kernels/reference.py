"""The primitive of the kernels in plain jax.numpy, and random arguments that belong together."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix_kernels.decays import CHUNK, BackwardResult, ChunkDecays, Result

LAYOUTS: dict[str, dict[str, Any]] = {
    "mixed decays and segments": {},
    "every array with its own number of heads": {
        "heads": 8,
        "b_heads": 4,
        "c_heads": 2,
        "decay_heads": 1,
        "state_heads": 2,
        "tokens": 2 * CHUNK,
    },
    "decays of -80": {"decay": -80.0, "segments": False},
    "segments without decay": {"decay": None},
    "one chunk": {"tokens": CHUNK, "key_size": 128, "value_size": 32},
}
"""Arguments of `random_case` that every kernel is checked with."""


def decayed_attention(
    a,
    b,
    c,
    decays,
    initial,
    *,
    reverse=False,
    outputs=True,
    states=False,
    interpret=False,
    chunk=CHUNK,
) -> Result:
    """Chunk after chunk in the dtype of the inputs, float32 at least and without rounding in between."""
    del interpret
    dtype = jnp.promote_types(c.dtype, jnp.float32)
    heads = _count_heads([a, b, c], decays, [initial])
    parts = {"a": None if a is None else _chunks(a, heads, chunk), "b": _chunks(b, heads, chunk)}
    parts |= {"c": _chunks(c, heads, chunk), **_decays_by_head(decays, heads, b, dtype, chunk)}
    if reverse:
        parts["mask"] = parts["mask"].mT
        parts["enter"], parts["leave"] = parts["leave"], parts["enter"]
    state = jnp.zeros((b.shape[0], heads, b.shape[3], c.shape[3]), dtype)
    if initial is not None:
        state = _repeat(initial, heads, 1).astype(dtype)

    def step(state, part):
        out = _read(part, state) if outputs else None
        return _advance(part, state), (out, state if states else None)

    final, (out, before) = jax.lax.scan(step, state, parts, reverse=reverse)
    before = None if before is None else jnp.moveaxis(before, 0, 2).astype(c.dtype)
    return Result(None if out is None else _join(out).astype(c.dtype), final, before)


def decayed_attention_backward(arguments, *, interpret=False) -> BackwardResult:
    """Chunk after chunk, last to first: the gradient of each by autodiff, from the state before it and the decays."""
    del interpret
    q, k, v, d_out, decays, states, d_final, more_dq, more_dk = arguments
    same, v = v is None, k if v is None else v
    dtype = jnp.promote_types(v.dtype, jnp.float32)
    heads = _count_heads([q, k, v, d_out], decays, [states, d_final])
    parts = {name: _chunks(x, heads, CHUNK) for name, x in {"a": q, "b": k, "c": v}.items()}
    parts |= _decays_by_head(decays, heads, q, dtype, CHUNK)
    parts["state"] = jnp.moveaxis(_repeat(states, heads, 1), 2, 0).astype(dtype)

    def step(d_state, part):
        d_out, part = part
        pull_back = jax.vjp(lambda part: (_read(part, part["state"]), _advance(part, part["state"])), part)[1]
        (d_part,) = pull_back((d_out, d_state))
        # What changes with the logarithm of a decay.
        by_log = {name: d_part[name] * part[name] for name in ("mask", "enter", "leave", "kept")}
        return d_part["state"], (d_part["a"], d_part["b"], d_part["c"], by_log)

    d_final = jnp.zeros_like(parts["state"][0]) if d_final is None else _repeat(d_final, heads, 1).astype(dtype)
    d_initial, (dq, dk, dv, by_log) = jax.lax.scan(step, d_final, (_chunks(d_out, heads, CHUNK), parts), reverse=True)
    d_steps = None if decays is None else _steps_from(decays, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), by_log))
    dq, dk, dv = _join(dq), _join(dk + dv if same else dk), None if same else _join(dv).astype(v.dtype)
    dq, dk = (x if more is None else x + more.astype(dtype) for x, more in ((dq, more_dq), (dk, more_dk)))
    return BackwardResult(dq.astype(v.dtype), dk.astype(v.dtype), dv, d_initial, d_steps)


def chain_forward(links, q, k, v, decays, initials, *, keep=False) -> tuple[jax.Array, ...]:
    """The links one after the other, as a fused kernel that takes decays of power 1 gives them."""
    tiles, finals, kept = {"k": k, "v": v}, [], []
    for link, initial in zip(links, initials, strict=True):
        arrays = q, tiles[link.keys], tiles[link.values], to_power(decays, link.power), initial
        result = decayed_attention(*arrays, states=True)
        tiles[link.result] = result.out
        finals.append(result.final)
        kept.append(result.states)
    kept += [tiles[link.result] for link in links[:-1]]
    return tiles["out"], *finals, *(kept if keep else ())


def add_starts(q, out, starts, enter, kept, states) -> tuple[jax.Array, ...]:
    """Outputs and states from zeros, and what they lack where the sequences start from other states."""
    batch, tokens, heads, _ = q.shape
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    if enter is None:
        enter, kept = (jnp.ones((batch, 1, tokens // CHUNK, *shape), dtype) for shape in ((CHUNK,), ()))
    enter, kept = _repeat(enter, heads, 1), _repeat(kept, heads, 1)
    before = jnp.cumprod(jnp.pad(kept[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=1), axis=-1)
    before = before[..., None, None] * starts[:, :, None].astype(dtype)
    queries = jnp.moveaxis(_chunks(q, heads, CHUNK), 0, 2)
    entered = jnp.einsum("bhnt,bhntd,bhnde->nbhte", enter, queries, before, precision=jax.lax.Precision.HIGHEST)
    out = (out.astype(dtype) + _join(entered)).astype(out.dtype)
    return (out,) if states is None else (out, (states.astype(dtype) + before).astype(states.dtype))


def to_power(decays, power):
    """Decays raised to a power."""
    if decays is None:
        return None
    scaled = {name: getattr(decays, name) for name in ("high", "low", "steps")}
    scaled = {name: None if x is None else x * power for name, x in scaled.items()}
    raised = {name: getattr(decays, name) ** power for name in ("enter", "leave", "kept")}
    return dataclasses.replace(decays, **scaled, **raised)


def _steps_from(decays, by_log):
    """[B, H, N, C]: log decay r is in M_ts for s < r <= t, in enter_t for r <= t, in leave_s for s < r, and in kept."""
    before = jnp.tri(CHUNK, k=-1, dtype=by_log["mask"].dtype)
    after = 1 - before
    exact = {"precision": jax.lax.Precision.HIGHEST}
    d_steps = jnp.einsum("...ts,rt,rs->...r", by_log["mask"], after, before, **exact) + by_log["kept"][..., None]
    d_steps += jnp.einsum("...t,rt->...r", by_log["enter"], after, **exact)
    d_steps += jnp.einsum("...s,rs->...r", by_log["leave"], before, **exact)
    if decays.run is None:
        return d_steps
    run = decays.run[:, None]
    begins = run != jnp.pad(run[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0)))
    return jnp.where(begins, 0, d_steps)


def _count_heads(arrays, decays, states):
    counts = [x.shape[2] for x in arrays if x is not None] + [x.shape[1] for x in states if x is not None]
    return max(counts + ([] if decays is None else [decays.enter.shape[1]]))


def _repeat(x, heads, axis):
    return jnp.repeat(x, heads // x.shape[axis], axis=axis)


def _chunks(x, heads, chunk):
    """[B, T, H', D] to [N, B, H, C, D] in the dtype of the computation."""
    x = _repeat(x.astype(jnp.promote_types(x.dtype, jnp.float32)), heads, 2)
    return jnp.transpose(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), (1, 0, 3, 2, 4))


def _join(x):
    """The inverse of `_chunks`, with all heads."""
    x = jnp.transpose(x, (1, 0, 3, 2, 4))
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _decays_by_head(decays, heads, like, dtype, chunk):
    """enter, leave, kept and M [C, C] as [N, B, H, ...]."""
    count, batch = like.shape[1] // chunk, like.shape[0]
    if decays is None:
        shapes = {"enter": (chunk,), "leave": (chunk,), "kept": ()}
        parts = {name: jnp.ones((count, batch, heads, *shape), dtype) for name, shape in shapes.items()}
        return parts | {"mask": jnp.broadcast_to(jnp.tri(chunk, dtype=dtype), (count, batch, heads, chunk, chunk))}

    def per_head(x):
        return jnp.moveaxis(_repeat(x.astype(dtype), heads, 1), 2, 0)

    parts = {name: per_head(getattr(decays, name)) for name in ("enter", "leave", "kept")}
    high, low = per_head(decays.high), per_head(decays.low)
    seen = jnp.tri(chunk, dtype=bool)
    if decays.run is not None:
        run = jnp.moveaxis(decays.run, 1, 0)[:, :, None]
        seen = seen & (run[..., :, None] == run[..., None, :])
    exponents = (high[..., :, None] - high[..., None, :]) + (low[..., :, None] - low[..., None, :])
    return parts | {"mask": jnp.exp(jnp.where(seen, exponents, -jnp.inf))}


def _read(part, state):
    scores = part["mask"] * _product("td,sd->ts", part["a"], part["b"])
    out = part["enter"][..., None] * _product("td,de->te", part["a"], state)
    return out + _product("ts,se->te", scores, part["c"])


def _advance(part, state):
    added = _product("sd,se->de", part["leave"][..., None] * part["b"], part["c"])
    return part["kept"][..., None, None] * state + added


def _product(spec, x, y):
    left, right = spec.split(",")
    right, out = right.split("->")
    return jnp.einsum(f"bh{left},bh{right}->bh{out}", x, y, precision=jax.lax.Precision.HIGHEST)


class RandomCase(NamedTuple):
    """Arguments of one call, `decayed_attention(a, b, c, decays, initial)`, and the gradient of its outputs."""

    a: Any
    b: Any
    c: Any
    decays: ChunkDecays | None
    initial: Any
    d_out: Any


def random_case(
    seed=0,
    *,
    batch=2,
    tokens=192,
    heads=4,
    b_heads=None,
    c_heads=None,
    decay_heads=None,
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
    d_out = normal(heads, value_size)
    initial = jnp.asarray(rng.normal(size=(batch, state_heads or heads, key_size, value_size)), gates)
    if decay is None and not segments:
        return RandomCase(*arrays, None, initial, d_out)
    shape = (batch, decay_heads or heads, tokens)
    if decay is None:
        steps = np.zeros(shape)
    elif isinstance(decay, str):
        low, high = {"mixed": (1e-4, 80.0), "weak": (1e-3, 1.0)}[decay]
        steps = -np.exp(rng.uniform(np.log(low), np.log(high), shape))
    else:
        steps = np.full(shape, float(decay))
    starts = rng.random((batch, tokens)) < 1.5 / chunk if segments else None
    return RandomCase(*arrays, make_decays(steps, starts, chunk, gates), initial, d_out)


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
