"""Errors of the scan forms, float32 on the first device, against the serial forms in float64 on the CPU.

python experiments/scan_errors/scan_errors.py
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxmix

MIXERS = ("linear_attention", "hla2", "ahla", "hla3")


def relative_error(a: jax.Array, b: jax.Array) -> float:
    """RMS of the difference over RMS of `b`."""
    return float(np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


def inputs(length: int) -> list[np.ndarray]:
    """q, k, v [2, T, 4, 64] and decays with one step of -80 in every 97."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, length, 4, 64)) / 8
    log_decay = -rng.exponential(size=(2, length, 4)) * 0.05
    log_decay[:, ::97] = -80
    return [q, k, v, log_decay]


def run(name: str, form: str, arrays: list[np.ndarray], dtype: type, device: jax.Device) -> list[jax.Array]:
    """The output, and the gradients in q, k, v and log_decay under a cotangent of v."""
    mixer = getattr(jaxmix, name)
    placed = [jax.device_put(jnp.asarray(x, dtype), device) for x in arrays]

    def loss(*arrays):
        return (mixer(*arrays, implementation=form)[0] * placed[2]).sum()

    return [mixer(*placed, implementation=form)[0], *jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*placed)]


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    device, cpu = jax.devices()[0], jax.devices("cpu")[0]
    print(f"{device.device_kind}, jax {jax.__version__}")
    for length in (65, 1000):
        for name in MIXERS:
            with jax.default_device(cpu):
                reference = run(name, "serial", inputs(length), np.float64, cpu)
            got = run(name, "scan", inputs(length), np.float32, device)
            errors = [relative_error(a, b) for a, b in zip(got, reference, strict=True)]
            print(f"T={length} {name} out, dq, dk, dv, dlog_decay:", *(f"{e:.1e}" for e in errors), flush=True)


if __name__ == "__main__":
    main()
