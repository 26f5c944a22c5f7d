"""A user's own mixer, s_t = s_{t-1} / 2 + x_t, with faults to order, and a faulty operator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmix.mixers import linear_attention
from jaxmix.operators import LinearSummary
from jaxmix.verify import MixerUnderTest, key_value_operator
from jaxmix.verify.inputs import mixer_inputs


@jax.custom_vjp
def wrong_gradient(x):
    return x


wrong_gradient.defvjp(lambda x: (x, None), lambda _, g: (g * (1 + 1e-5),))


def decayed_sum(x, *, segment_ids, initial_state, implementation, chunk_size, fault=""):
    batch, length, size = x.shape
    ids = jnp.ones((batch, length), jnp.int32) if segment_ids is None else segment_ids
    state = jnp.zeros((batch, size), x.dtype) if initial_state is None else initial_state
    scan = implementation == "scan"
    if fault == "no other segments" and implementation == "other" and segment_ids is not None:
        raise NotImplementedError("segments")
    if fault == "raises" and scan:
        raise RuntimeError("no scan today")
    if fault == "gradient" or (fault == "scan gradient" and scan):
        x = wrong_gradient(x)
    if fault == "no gradient":
        x = jax.pure_callback(lambda y: np.asarray(y), x, x)
    if fault == "state gradient":
        state = jax.lax.stop_gradient(state)
    if fault == "state ignored" and scan:
        state = jnp.zeros_like(state)
    if fault == "low precision" and x.dtype == jnp.float32:
        x = x.astype(jnp.bfloat16).astype(jnp.float32)
    a, x, real = factors(ids, x, fault)
    if scan:
        decay, total = jax.lax.associative_scan(lambda s, t: (s[0] * t[0], t[0] * s[1] + t[1]), (a, x), axis=1)
        out = decay * state[:, None] + total
    else:
        _, out = jax.lax.scan(lambda s, t: (t[0] * s + t[1],) * 2, state, (a.swapaxes(0, 1), x.swapaxes(0, 1)))
        out = out.swapaxes(0, 1)
    state = out[:, -1]
    return spoiled(out, state, real, scan, fault)


def factors(ids, x, fault):
    """Decay of every token, the inputs cleared at padding, and where there is none."""
    real = ids > 0
    latest = jax.lax.associative_scan(lambda a, b: jnp.where(b > 0, b, a), ids, axis=1)
    before = jnp.pad(latest, ((0, 0), (1, 0)))[:, :-1]
    new = real & (before > 0) & (before != ids)
    at_new = 1e-6 if fault == "leak" else 0.0
    at_padding = 0.5 if fault == "padding decays" else 1.0
    usual = 0.500001 if fault == "wrong sum" else 0.5
    a = jnp.where(new, at_new, jnp.where(real, usual, at_padding)).astype(x.dtype)[..., None]
    return a, x if fault == "padding read" else jnp.where(real[..., None], x, 0.0), real


def spoiled(out, state, real, scan, fault):
    if fault == "scan differs" and scan:
        out = out * (1 + 1e-8)
    if fault == "scan is NaN" and scan:
        out = out.at[0, 0, 0].set(jnp.nan)
    if fault == "scan has another shape" and scan:
        out = out[..., None]
    if fault == "not causal":
        out = out + 1e-9 * out[:, -1:]
    if fault == "constant":
        out = jnp.zeros_like(out)
    if fault == "state of the token before" and out.shape[1] > 1:
        state = out[:, -2]
    keep = real.reshape(*real.shape, *(1,) * (out.ndim - 2))
    return jnp.where(keep, out, 0.0), state


def explicit_sum(x):
    t = np.arange(x.shape[1])
    return np.einsum("ts,bsd->btd", np.tril(0.5 ** np.maximum(t[:, None] - t, 0)), x)


def toy(fault="", **changes):
    settings = {
        "name": "decayed sum",
        "function": functools.partial(decayed_sum, fault=fault),
        "make_inputs": lambda rng, o: {"x": rng.standard_normal((o.batch, o.length, o.key_size))},
        "brute_force": explicit_sum,
    }
    return MixerUnderTest(**{**settings, **changes})


def faulty_operator(fault=""):
    """LinearSummary, or one that looks like it."""

    def combine(a, b):
        if fault == "not associative":
            return LinearSummary.combine(LinearSummary(P=a.P, m=a.m * a.rho[..., None], rho=a.rho), b)
        if fault == "wrong order":
            return LinearSummary.combine(b, a)
        return LinearSummary.combine(a, b)

    def identity(shape, key_size, value_size, dtype):
        summary = LinearSummary.identity(shape, key_size, value_size, dtype)
        return LinearSummary(P=summary.P, m=summary.m, rho=0 * summary.rho) if fault == "identity" else summary

    def read(summary, q):
        numerator, denominator = summary.read(q)
        return numerator * (2 if fault == "read" else 1), denominator

    namespace = {"token_summary": LinearSummary.token_summary, "combine": combine, "identity": identity, "read": read}
    kind = type("Summary", (), {name: staticmethod(f) for name, f in namespace.items()})
    operator = key_value_operator(kind)
    return MixerUnderTest(
        name="linear attention", function=linear_attention, make_inputs=mixer_inputs, operator=operator
    )
