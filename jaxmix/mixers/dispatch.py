"""Which implementation serves a call."""

from typing import Any, Literal

from jaxmix.arrays import check_count, fail

Implementation = Literal["serial", "scan", "pallas"]
IMPLEMENTATIONS = ("serial", "scan", "pallas")


def choose(
    mixer: str,
    implementation: Any,
    chunk_size: Any,
    sequence_axis: Any,
    *,
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
) -> str:
    """The implementation for one call: what was asked for, or the fastest that exists for this mixer.

    Raises:
        ValueError: for an unknown implementation or a bad `chunk_size` or `sequence_axis`.
        NotImplementedError: when the implementation asked for cannot serve the call.
    """
    if implementation not in (*implementations, None):
        fail("implementation", f"None or one of {implementations}", repr(implementation))
    check_count("chunk_size", chunk_size)
    if not isinstance(sequence_axis, str | None):
        fail("sequence_axis", "None or the name of a shard_map axis", repr(sequence_axis))
    if implementation == "pallas":
        raise NotImplementedError(
            f"{mixer}: no Pallas kernel exists yet; pass implementation='scan', or None to take the fastest that does"
        )
    if implementation == "serial" and sequence_axis is not None:
        raise NotImplementedError(
            f"{mixer}: the serial form cannot split T over the devices of sequence_axis={sequence_axis!r}; "
            "use implementation='scan'"
        )
    return implementation or "scan"
