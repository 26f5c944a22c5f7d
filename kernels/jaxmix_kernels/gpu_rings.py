"""Rings of tiles in shared memory, by which warpgroups of a Hopper kernel pass on chunk after chunk.

A ring has a few slots. For each there are two barriers: "full", at which those arrive who fill it, and "empty", at
those arrive who have read it. The chunk that is walked after n others is in slot n modulo their number. Where that is
no power of two, the slot is counted along instead of divided out: a remainder takes instructions and registers, and
more of both in long sequences.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Turn:
    """A chunk of a walk.

    Attributes:
        number: how many chunks are walked before it.
        slots: its slot in rings of so many slots, for numbers that are no power of two.
    """

    number: Any
    slots: dict[int, Any]


@dataclasses.dataclass(frozen=True)
class Rings:
    """The rings of a program.

    Attributes:
        ref: tiles and barriers by name: "tile x", "full ring", "empty ring".
        slots: number of slots of a ring.
        count: number of chunks that pass through every ring.
    """

    ref: dict[str, Any]
    slots: Callable[[str], int]
    count: int

    def walk(self, step: Callable[[Turn, Any], Any], carry: Any = None) -> Any:
        """Takes a step for every chunk, from a carry to the next; returns the last."""
        names = [name.removeprefix("full ") for name in self.ref if name.startswith("full ")]
        counts = sorted({self.slots(ring) for ring in names if not _is_power_of_two(self.slots(ring))})

        def turn(n: Any, carried: tuple[dict[int, Any], Any]) -> tuple[dict[int, Any], Any]:
            slots, carry = carried
            carry = step(Turn(n, slots), carry)
            return {count: jnp.where(slot == count - 1, 0, slot + 1) for count, slot in slots.items()}, carry

        return lax.fori_loop(0, self.count, turn, (dict.fromkeys(counts, jnp.int32(0)), carry))[1]

    def slot(self, ring: str, turn: Turn) -> Any:
        """The slot of a chunk."""
        count = self.slots(ring)
        return lax.rem(turn.number, jnp.int32(count)) if _is_power_of_two(count) else turn.slots[count]

    def full(self, ring: str, turn: Turn) -> Any:
        """The barrier of those who fill the slot of a chunk."""
        return self.ref[f"full {ring}"].at[self.slot(ring, turn)]

    def wait_until_free(self, ring: str, turn: Turn) -> Any:
        """Waits until the slot of a chunk may be written; returns it."""
        slot = self.slot(ring, turn)

        @pl.when(turn.number >= self.slots(ring))
        def _() -> None:
            plgpu.barrier_wait(self.ref[f"empty {ring}"].at[slot])

        return slot

    def drain(self, ring: str) -> None:
        """Waits until all that was written to a ring has been read, at the end."""
        for slot in range(min(self.slots(ring), self.count)):
            plgpu.barrier_wait(self.ref[f"empty {ring}"].at[slot])

    def take(self, rings: dict[str, tuple[str, ...]], turn: Turn) -> dict[str, Any]:
        """Waits until the slots of a chunk are full: the tiles of all rings, by name, from the names in each ring."""
        tiles = {}
        for ring, members in rings.items():
            slot = self.slot(ring, turn)
            plgpu.barrier_wait(self.ref[f"full {ring}"].at[slot])
            tiles |= {name: self.ref[f"tile {name}"].at[slot] for name in members}
        return tiles

    def release(self, rings: Iterable[str], turn: Turn) -> None:
        """Lets the slots of a chunk be written again."""
        for ring in rings:
            plgpu.barrier_arrive(self.ref[f"empty {ring}"].at[self.slot(ring, turn)])

    def fill(self, rings: Iterable[str], sources: Callable[[Any], dict[str, dict[str, Any]]]) -> None:
        """Copies all chunks from global memory, as far ahead as there is room.

        Args:
            rings: names of the rings.
            sources: of a chunk, from its number among those walked: for every ring the arrays of its tiles, by name.
        """

        def step(turn: Turn, _: None) -> None:
            for ring, members in sources(turn.number).items():
                slot = self.wait_until_free(ring, turn)
                for name, source in members.items():
                    plgpu.copy_gmem_to_smem(source, self.ref[f"tile {name}"].at[slot], self.full(ring, turn))

        self.walk(step)
        for ring in rings:
            self.drain(ring)


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0
