"""Targets for tests: the primitive in plain jax.numpy, in place of a kernel."""

import dataclasses

from jaxmix_kernels.target import Target
from tests.kernels import reference


@dataclasses.dataclass(frozen=True)
class ReferenceTarget(Target):
    """Runs the reference of the primitive, also in float64, and has no fused kernels; `busy` heads fill it."""

    platform: str = "reference"
    busy: int = 1

    @property
    def dtypes(self):
        return "bfloat16", "float32", "float64"

    @property
    def programs(self):
        return self.busy

    def decayed_attention(self, *arrays, **options):
        return reference.decayed_attention(*arrays, **options)
