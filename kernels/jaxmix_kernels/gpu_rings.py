"""Rings of tiles in shared memory, by which warpgroups of a Hopper kernel pass on chunk after chunk.

A ring has a few slots. For each there are two barriers: "full", at which those arrive who fill it, and "empty", at
which those arrive who have read it. The chunk that is walked after n others is in slot n modulo their number.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


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

    def slot(self, ring: str, n: Any) -> Any:
        """The slot of a chunk."""
        return lax.rem(n, jnp.int32(self.slots(ring)))

    def full(self, ring: str, n: Any) -> Any:
        """The barrier of those who fill the slot of a chunk."""
        return self.ref[f"full {ring}"].at[self.slot(ring, n)]

    def wait_until_free(self, ring: str, n: Any) -> Any:
        """Waits until the slot of a chunk may be written; returns it."""
        slot = self.slot(ring, n)

        @pl.when(n >= self.slots(ring))
        def _() -> None:
            plgpu.barrier_wait(self.ref[f"empty {ring}"].at[slot])

        return slot

    def drain(self, ring: str) -> None:
        """Waits until all that was written to a ring has been read, at the end."""
        for slot in range(min(self.slots(ring), self.count)):
            plgpu.barrier_wait(self.ref[f"empty {ring}"].at[slot])

    def take(self, rings: dict[str, tuple[str, ...]], n: Any) -> dict[str, Any]:
        """Waits until the slots of a chunk are full: the tiles of all rings, by name, from the names in each ring."""
        tiles = {}
        for ring, members in rings.items():
            slot = self.slot(ring, n)
            plgpu.barrier_wait(self.ref[f"full {ring}"].at[slot])
            tiles |= {name: self.ref[f"tile {name}"].at[slot] for name in members}
        return tiles

    def release(self, rings: Iterable[str], n: Any) -> None:
        """Lets the slots of a chunk be written again."""
        for ring in rings:
            plgpu.barrier_arrive(self.ref[f"empty {ring}"].at[self.slot(ring, n)])

    def fill(self, rings: Iterable[str], sources: Callable[[Any], dict[str, dict[str, Any]]]) -> None:
        """Copies all chunks from global memory, as far ahead as there is room.

        Args:
            rings: names of the rings.
            sources: of a chunk, from its number among those walked: for every ring the arrays of its tiles, by name.
        """

        @pl.loop(0, self.count)
        def _(n: Any) -> None:
            for ring, members in sources(n).items():
                slot = self.wait_until_free(ring, n)
                for name, source in members.items():
                    plgpu.copy_gmem_to_smem(source, self.ref[f"tile {name}"].at[slot], self.full(ring, n))

        for ring in rings:
            self.drain(ring)
