"""The long convolution of S4D by the fast Fourier transform."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmix.arrays import Array, einsum
from jaxmix.mixers import pairs
from jaxmix.mixers.inputs import Sizes
from jaxmix.mixers.modes import Modes
from jaxmix.mixers.recurrence import Recurrence
from jaxmix.mixers.state import check_state

_BLOCK = 64
"""Powers of Lam up to T are products of those up to 64 and those of multiples of 64."""


def s4d_fft(mixer: Recurrence, sizes: Sizes, x: Array, parameters: Any, initial_state: Any) -> tuple[Array, Any]:
    """Outputs and final state of `s4d` for checked arguments without segments."""
    if initial_state is not None:
        check_state(initial_state, jax.eval_shape(functools.partial(mixer.zero_state, sizes)), sizes.dtype)
    return _convolve(mixer, sizes, x, parameters, initial_state)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _convolve(mixer: Any, sizes: Sizes, x: Array, parameters: Any, initial_state: Any) -> tuple[Array, Any]:
    mixer = mixer.bind(parameters)
    wide = x.astype(sizes.dtype)
    length = sizes.length
    powers = _powers(mixer.system, length)
    responses = pairs.multiply(powers, mixer.system.gain[:, None])
    kernel = einsum("hpm,htpm->ht", mixer.readout, responses)
    # A circular convolution of twice the length is the causal one in its first half.
    spectrum = jnp.fft.rfft(kernel, 2 * length).T[..., None] * jnp.fft.rfft(wide, 2 * length, axis=1)
    y = jnp.fft.irfft(spectrum, 2 * length, axis=1)[:, :length]
    final = einsum("htpm,bthe->bhpme", jnp.flip(responses, axis=1), wide)
    if initial_state is not None:
        one = mixer.system.powers(jnp.asarray(1))
        reach = pairs.multiply(powers, one[:, None])
        read = pairs.conjugate(pairs.multiply(pairs.conjugate(mixer.readout)[:, None], reach))
        y = y + einsum("htpm,bhpme->bthe", read, initial_state.X)
        final = final + pairs.scale_rows(reach[:, -1], initial_state.X)
    return y.astype(x.dtype), mixer.state(final)


def _powers(system: Modes, length: int) -> Array:
    """Lam^t for t < length, [H, T, 2, M]."""
    blocks = -(-length // _BLOCK)
    fine = jnp.moveaxis(system.powers(jnp.arange(_BLOCK)), 0, 1)
    coarse = jnp.moveaxis(system.powers(_BLOCK * jnp.arange(blocks)), 0, 1)
    product = pairs.multiply(coarse[:, :, None], fine[:, None])
    return product.reshape(fine.shape[0], blocks * _BLOCK, *fine.shape[2:])[:, :length]
