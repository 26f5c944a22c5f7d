"""What kernels are made for: the platform of the default backend, or one that a `using_target` block names."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from jaxmix_kernels.decays import DTYPES, SIZES, BackwardArguments, BackwardResult, Result
from jaxmix_kernels.links import AHLA, HLA2, HLA3, HLA3_TAIL, Links

_PROGRAMS = {"gpu": 132, "tpu": 1}


@dataclasses.dataclass(frozen=True)
class Target:
    """A platform to make kernels for; hashable, so that it can be static under `jax.jit`.

    Attributes:
        platform: "gpu" (NVIDIA Hopper, Mosaic GPU) or "tpu" (Mosaic TPU).
        interpret: run kernels in an interpreter on a CPU, slowly, instead of compiling them.
    """

    platform: Literal["gpu", "tpu"]
    interpret: bool = False

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes of operands that the kernels take."""
        return DTYPES

    @property
    def programs(self) -> int:
        """Number of programs that the device runs side by side: its cores."""
        return _PROGRAMS[self.platform]

    def blocks(self, value_size: int) -> int:
        """Number of programs that share the value columns of one head."""
        if self.platform != "gpu":
            return 1
        from jaxmix_kernels.gpu_chunks import COLUMNS

        return -(-value_size // COLUMNS)

    def reads_low(self, dtype: Any) -> bool:
        """Whether kernels with operands of `dtype` read `low` of `ChunkDecays`; else `high` is all they know."""
        if self.platform != "gpu":
            return True
        from jaxmix_kernels.gpu_chunks import reads_low

        return reads_low(dtype)

    @property
    def splits(self) -> bool:
        """Whether a compiler may split a kernel over devices under plain `jax.jit`.

        That of TPUs has no place for the rule of `jaxmix_kernels.linear_attention.partition`, and refuses.
        """
        return self.platform == "gpu" or self.interpret

    def decayed_attention(self, *arrays: Any, **options: Any) -> Result:
        """The kernel of the platform; see `jaxmix_kernels.linear_attention`."""
        if self.platform == "gpu":
            from jaxmix_kernels.linear_attention.gpu import decayed_attention
        else:
            from jaxmix_kernels.linear_attention.tpu import decayed_attention
        return decayed_attention(*arrays, interpret=self.interpret, **options)

    def decayed_attention_backward(self, arguments: BackwardArguments) -> BackwardResult:
        """The kernel of all its gradients, from the states that it keeps."""
        if self.platform == "gpu":
            from jaxmix_kernels.linear_attention.gpu_backward import decayed_attention_backward
        else:
            from jaxmix_kernels.linear_attention.tpu_backward import decayed_attention_backward
        return decayed_attention_backward(arguments, interpret=self.interpret)

    def fused(self, links: Links) -> Callable[..., tuple[Any, ...]] | None:
        """The fused kernel of a chain, of q, k, v, decays (on a TPU those of every power) and initial states.

        None where there is none. It gives the output, final states, and with `keep` states and results of links.
        """
        if self.platform == "gpu":
            from jaxmix_kernels.ahla.gpu import ahla_forward
            from jaxmix_kernels.hla2.gpu import hla2_forward
            from jaxmix_kernels.hla3.gpu import hla3_forward, hla3_tail_forward

            kernels = {HLA2: hla2_forward, AHLA: ahla_forward, HLA3: hla3_forward, HLA3_TAIL: hla3_tail_forward}
        else:
            from jaxmix_kernels.ahla.tpu import ahla_forward
            from jaxmix_kernels.hla2.tpu import hla2_forward
            from jaxmix_kernels.hla3.tpu import hla3_forward

            kernels = {HLA2: hla2_forward, AHLA: ahla_forward, HLA3: hla3_forward}
        return kernels.get(links)

    def add_starts(self, *arrays: Any) -> tuple[Any, ...]:
        """The kernel that adds what the starts of pieces give, of a GPU: no other platform cuts time."""
        from jaxmix_kernels.gpu_starts import add_starts

        return add_starts(*arrays, interpret=self.interpret)

    def decode(self, *arrays: Any, **options: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """The kernel of one token; see `jaxmix_kernels.decode.call`, which groups query heads for it."""
        if self.platform == "gpu":
            from jaxmix_kernels.decode.gpu import decode
        else:
            from jaxmix_kernels.decode.tpu import decode
        return decode(*arrays, interpret=self.interpret, **options)

    def refusal(self, dtype: Any, *sizes: int) -> str | None:
        """Why the kernels cannot serve operands of `dtype` with these key and value sizes; None if they can."""
        if str(dtype) not in self.dtypes:
            return f"the {self.platform} kernels take {' or '.join(self.dtypes)}, not {dtype}"
        if max(sizes) > SIZES[-1]:
            return f"the kernels take key and value sizes up to {SIZES[-1]}, not {max(sizes)}"
        return None


_chosen: contextvars.ContextVar[Target | None] = contextvars.ContextVar("jaxmix_kernels_target", default=None)


@contextlib.contextmanager
def using_target(target: Target) -> Iterator[Target]:
    """Makes kernels for `target` inside the block: to interpret them, to lower or to compile ahead of time.

    It counts while a function is traced. A function that was compiled before the block keeps what it was compiled for.
    """
    token = _chosen.set(target)
    try:
        yield target
    finally:
        _chosen.reset(token)


def current_target() -> Target | None:
    """The target of `using_target`, else that of the default backend: a Hopper GPU or a TPU; None for all others."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    backend = jax.default_backend()
    if backend == "tpu":
        return Target("tpu")
    if backend == "gpu" and str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9."):
        return Target("gpu")
    return None
