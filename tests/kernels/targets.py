"""Targets for tests: an interpreter by itself, and the primitive in plain jax.numpy, in place of a kernel."""

import dataclasses

from jaxmix_kernels.target import Target
from tests.kernels import reference


class OneDevice(Target):
    """An interpreter that looks for races calls back in order, which no compiler splits over devices."""

    splits = False


@dataclasses.dataclass(frozen=True)
class ReferenceTarget(Target):
    """Runs the references of the primitive and its gradients, also in float64; `busy` heads fill it.

    Chains are `fusible` or not, and what stands for a kernel may be left to a compiler that `splits` it over devices.
    """

    platform: str = "reference"
    busy: int = 1
    fusible: bool = False
    splits: bool = False

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

    def fused(self, links):
        def forward(q, k, v, decays, *initials, keep, interpret):
            del interpret
            return reference.chain_forward(links, q, k, v, decays, initials, keep=keep)

        return forward if self.fusible else None

    def add_starts(self, *arrays):
        return reference.add_starts(*arrays)
