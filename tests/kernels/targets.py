"""Targets for tests: the primitive in plain jax.numpy, in place of a kernel."""

import dataclasses

from jaxmix_kernels.target import Target
from tests.kernels import reference


@dataclasses.dataclass(frozen=True)
class ReferenceTarget(Target):
    """Runs the reference of the primitive, also in float64, and has no fused kernels; `busy` heads fill it.

    With `keeps` its gradients are those of a GPU, by one kernel, for which there is a reference too.
    """

    platform: str = "reference"
    busy: int = 1
    keeps: bool = False

    @property
    def dtypes(self):
        return "bfloat16", "float32", "float64"

    @property
    def programs(self):
        return self.busy

    @property
    def keeps_states(self):
        return self.keeps

    def decayed_attention(self, *arrays, **options):
        return reference.decayed_attention(*arrays, **options)

    def decayed_attention_backward(self, *arrays):
        return reference.decayed_attention_backward(*arrays)
