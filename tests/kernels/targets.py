"""Targets for tests: an interpreter by itself, and the primitive in plain jax.numpy, in place of a kernel."""

import dataclasses

from jaxmix_kernels.target import Target
from tests.kernels import reference


class OneDevice(Target):
    """An interpreter that looks for races calls back in order, which no compiler splits over devices."""

    splits = False


@dataclasses.dataclass(frozen=True)
class ReferenceTarget(Target):
    """Runs the references of the primitive and its gradients, also in float64, unfused; `busy` heads fill it."""

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

    def decayed_attention_backward(self, arguments):
        return reference.decayed_attention_backward(arguments)
