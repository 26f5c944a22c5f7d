"""Mixers whose chunked form runs on kernels, as the shared contract sees them."""

import dataclasses

from jaxmix_kernels.target import using_target
from tests.contract import MixerSpec


def by_kernel(spec: MixerSpec, target, names=None) -> MixerSpec:
    """The spec with kernels for `target` in place of the scan over chunks, and only the variants in `names`."""

    def function(*, implementation, chunk_size=64, **arguments):
        if implementation == "scan" and chunk_size != 1:
            implementation = "pallas"
        with using_target(target):
            return spec.function(**arguments, implementation=implementation, chunk_size=chunk_size)

    variants = {name: variant for name, variant in spec.variants.items() if names is None or name in names}
    kept = tuple(name for name in spec.representatives if name in variants)
    return dataclasses.replace(spec, function=function, variants=variants, representatives=kept)
