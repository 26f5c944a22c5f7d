"""Which implementation serves a call."""

import dataclasses
from typing import Any, Literal

import jax

from jaxmix.arrays import check_count, fail
from jaxmix_kernels.decode.call import refusal as refusal_of_a_step
from jaxmix_kernels.target import Target, current_target

Implementation = Literal["serial", "scan", "pallas"]
IMPLEMENTATIONS = ("serial", "scan", "pallas")

KERNELS = ("linear_attention", "hla2", "ahla", "hla3")
"""Mixers that Pallas kernels serve."""
KERNEL_CHUNK = 64
"""Tokens per chunk of the kernels; with another `chunk_size` only an explicit "pallas" takes them."""
SHORTEST, SMALLEST = 64, 32
"""Fewest tokens, and smallest key and value size, for which kernels are taken without being asked for."""

ASKED = "it is asked for"


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a kernel would have to take: the dtype of q, k and v ("mixed" if they differ), T, D and E.

    `is_checked` is true inside a `jax.shard_map` with check_vma=True. `sharing` query heads share a state.
    """

    dtype: str
    length: int
    key_size: int
    value_size: int
    is_checked: bool = False
    sharing: int = 1


@dataclasses.dataclass(frozen=True)
class Choice:
    """An implementation, why it serves, and what kernels are made for if it is "pallas"."""

    form: str
    why: str
    target: Target | None = None


def choose(
    mixer: str,
    implementation: Any,
    chunk_size: Any,
    sequence_axis: Any,
    *,
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    operands: Operands | None = None,
) -> Choice:
    """The implementation for one call: what was asked for, or the fastest that serves it.

    `operands` are those of a mixer of KERNELS; None leaves them out of account. Left to choose, the kernels are taken
    where all of this holds: the mixer has one, the device is a Hopper GPU or a TPU, T is not split over devices, q, k
    and v are bfloat16, T >= 64, D and E are between 32 and 128, and `chunk_size` is 64; with several TPUs the call must
    also be inside `jax.shard_map`. Everything else is served by the scan.

    One token takes a direct step whatever the form is, by the kernel for that if the choice has a target, which it has
    only where "pallas" is asked for: the step by XLA is about as fast where the state is given up, and faster where it
    is not, because the kernel works in place and then needs a copy.

    Raises:
        ValueError: for an unknown implementation or a bad `chunk_size` or `sequence_axis`.
        NotImplementedError: when the implementation asked for cannot serve the call.
    """
    if implementation not in (*implementations, None):
        fail("implementation", f"None or one of {implementations}", repr(implementation))
    check_count("chunk_size", chunk_size)
    if not isinstance(sequence_axis, str | None):
        fail("sequence_axis", "None or the name of a shard_map axis", repr(sequence_axis))
    if implementation == "serial" and sequence_axis is not None:
        raise NotImplementedError(
            f"{mixer}: the serial form cannot split T over the devices of sequence_axis={sequence_axis!r}; "
            "use implementation='scan'"
        )
    if implementation in ("pallas", None):
        one_token = operands is not None and operands.length == 1 and sequence_axis is None
        if implementation == "pallas" and operands is not None and one_token:
            by_step = _find_step(mixer, operands)
            if by_step is not None:
                return Choice("pallas", ASKED, by_step)
        target, refusal = _find_kernel(mixer, sequence_axis, operands)
        if implementation == "pallas":
            if target is None or refusal:
                raise NotImplementedError(
                    f"{mixer}: {refusal}; pass implementation='scan', or None to take the fastest that serves the call"
                )
            return Choice("pallas", ASKED, None if one_token else target)
        refusal = refusal or _not_worthwhile(target, chunk_size, operands)
        if target is None or refusal:
            return Choice("scan", refusal)
        return Choice("pallas", f"a Pallas kernel for {target.platform.upper()}s serves the call", target)
    return Choice(implementation, ASKED)


def _find_step(mixer: str, operands: Operands) -> Target | None:
    """What a kernel of one token is made for; None where the step by XLA serves.

    No compiler splits these kernels over devices. With several, XLA serves outside `jax.shard_map`, unless the target
    is another platform than that of the devices.
    """
    target, refusal = _find_kernel(mixer, None, None)
    if target is None or refusal or operands.is_checked:
        return None
    if not _is_on_one_device() and target.platform == jax.default_backend():
        return None
    if refusal_of_a_step(operands.dtype, operands.key_size, operands.value_size, operands.sharing):
        return None
    return target


def _find_kernel(mixer: str, sequence_axis: str | None, operands: Operands | None) -> tuple[Target | None, str]:
    """What kernels are made for, and why none serves the call ("" if one does)."""
    if mixer not in KERNELS:
        return None, "no Pallas kernel exists for this mixer and its options"
    if sequence_axis is not None:
        return None, f"the Pallas kernels do not split T over the devices of sequence_axis={sequence_axis!r}"
    target = current_target()
    if target is None:
        return None, "the Pallas kernels need a Hopper GPU or a TPU"
    if operands is None:
        return target, ""
    if operands.dtype == "mixed":
        return target, "the Pallas kernels need q, k and v of one dtype"
    if operands.is_checked:
        return target, "inside jax.shard_map the Pallas kernels need check_vma=False"
    return target, target.refusal(operands.dtype, operands.key_size, operands.value_size) or ""


def _not_worthwhile(target: Target | None, chunk_size: int, operands: Operands | None) -> str:
    """Why a kernel is not taken without being asked for, "" if it is."""
    if target is not None and not target.splits and not _is_on_one_device():
        return "under jax.jit no compiler splits TPU kernels over devices; inside jax.shard_map they are taken"
    if operands is None:
        return ""
    if operands.dtype != "bfloat16":
        return f"kernels are taken for bfloat16, not {operands.dtype}, unless asked for"
    if operands.length < SHORTEST or min(operands.key_size, operands.value_size) < SMALLEST:
        return f"kernels are taken from {SHORTEST} tokens and sizes of {SMALLEST} on, unless asked for"
    if chunk_size != KERNEL_CHUNK:
        return f"the kernels have chunks of {KERNEL_CHUNK}, and chunk_size={chunk_size}"
    return ""


def _is_on_one_device() -> bool:
    """Whether what is traced runs on one device, as all does inside a `jax.shard_map` over all axes."""
    mesh = jax.sharding.get_abstract_mesh()
    in_shard_map = bool(mesh.axis_names) and set(mesh.manual_axes) == set(mesh.axis_names)
    return in_shard_map or jax.device_count() == 1
