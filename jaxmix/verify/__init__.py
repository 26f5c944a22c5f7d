"""Check that a mixer is what it says: every form, gradient, split, packing and operator, with numbers.

`verify(options)` checks the mixers of jaxmix (the command `jaxmix verify`); `verify_mixer(mixer, options)` runs the
same checks on yours. Everything is compared with the serial form in float64, and that with an explicit sum. The float64
mode is switched on for the duration of the checks and in their threads only. A mixer of one's own:

    >>> import functools
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> from jaxmix.verify import MixerUnderTest, VerifyOptions, verify_mixer
    >>>
    >>> def decayed_sum(x, *, segment_ids, initial_state, implementation, chunk_size):
    ...     '''s_t = s_{t-1} / 2 + x_t, x [B, T, D]; a new segment starts at 0, padding (id 0) is skipped.'''
    ...     batch, length, size = x.shape
    ...     ids = jnp.ones((batch, length), jnp.int32) if segment_ids is None else segment_ids
    ...     state = jnp.zeros((batch, size), x.dtype) if initial_state is None else initial_state
    ...     real = ids > 0
    ...     latest = jax.lax.associative_scan(lambda a, b: jnp.where(b > 0, b, a), ids, axis=1)
    ...     before = jnp.pad(latest, ((0, 0), (1, 0)))[:, :-1]
    ...     new = real & (before > 0) & (before != ids)
    ...     factor = jnp.where(new, 0.0, jnp.where(real, 0.5, 1.0)).astype(x.dtype)[..., None]
    ...     x = jnp.where(real[..., None], x, 0.0)
    ...     if implementation == "serial":
    ...         def step(s, token):
    ...             a, b = token
    ...             return a * s + b, a * s + b
    ...         state, out = jax.lax.scan(step, state, (factor.swapaxes(0, 1), x.swapaxes(0, 1)))
    ...         out = out.swapaxes(0, 1)
    ...     else:
    ...         def combine(a, b):
    ...             return a[0] * b[0], b[0] * a[1] + b[1]
    ...         decay, total = jax.lax.associative_scan(combine, (factor, x), axis=1)
    ...         out = decay * state[:, None] + total
    ...         state = out[:, -1]
    ...     return jnp.where(real[..., None], out, 0.0), state
    >>>
    >>> def explicit_sum(x):
    ...     t = np.arange(x.shape[1])
    ...     return np.einsum("ts,bsd->btd", np.tril(0.5 ** np.maximum(t[:, None] - t, 0)), x)
    >>>
    >>> mixer = MixerUnderTest(
    ...     name="decayed sum",
    ...     function=decayed_sum,
    ...     make_inputs=lambda rng, o: {"x": rng.standard_normal((o.batch, o.length, o.key_size))},
    ...     brute_force=explicit_sum,
    ... )
    >>> report = verify_mixer(mixer, VerifyOptions(chunk_sizes=(4,)))
    >>> report.ok
    True
    >>> sorted({row.check for row in report.rows})
    ['causality', 'explicit sum', 'forms', 'gradients', 'packed', 'split']

`print(report.summary)` is one line, `report.to_json()` everything, and `rich.print(render(report))` a table, where
`render` is in `jaxmix.verify.render`.
"""

from jaxmix.verify.errata import errata_rows
from jaxmix.verify.mixer import MixerUnderTest, OperatorUnderTest, key_value_operator
from jaxmix.verify.options import VerifyOptions
from jaxmix.verify.report import Report, Row, relative_error
from jaxmix.verify.runner import verify, verify_mixer

__all__ = [
    "MixerUnderTest",
    "OperatorUnderTest",
    "Report",
    "Row",
    "VerifyOptions",
    "errata_rows",
    "key_value_operator",
    "relative_error",
    "verify",
    "verify_mixer",
]
