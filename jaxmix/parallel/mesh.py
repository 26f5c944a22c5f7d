"""Device meshes."""

import math

import jax

from jaxmix.arrays import fail


def make_mesh(**axes: int) -> jax.sharding.Mesh:
    """A mesh over the first devices, axes in the order given, of the Auto type that jit and shard_map both accept.

    Example: `make_mesh(data=2, sequence=4)`.

    Args:
        **axes: size of each axis; the product may not exceed the number of devices.

    Raises:
        ValueError: when no axis is given, a size is not positive, or there are too few devices.
    """
    if not axes or any(size < 1 for size in axes.values()):
        fail("axes", "at least one axis, each of positive size", axes)
    needed = math.prod(axes.values())
    devices = jax.devices()
    if needed > len(devices):
        fail("axes", f"at most {len(devices)} devices in all", f"{axes}, which needs {needed}")
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices[:needed])
