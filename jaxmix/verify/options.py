"""What a verification run is made of: shape, dtype, seed, which mixers and how much."""

from __future__ import annotations

import dataclasses
from typing import Literal

MINIMUM_LENGTH = 8
CHECK_NAMES = ("forms", "operator", "gradients", "split", "packed", "causality", "errata")
"""The checks that can be asked for; "forms" includes the explicit sum."""
TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 2e-2}
"""Largest relative error of a parallel form against the float64 serial run, by dtype of the inputs."""
EXACT = 1e-12
"""Largest relative error between two float64 computations that differ only in the order of a few sums."""
GRADIENT = 1e-10
"""Largest relative error of the gradient of a parallel form against the serial one, in float64."""
FINITE_DIFFERENCE = 1e-7
"""Largest relative error of a directional derivative against a central finite difference, in float64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of `verify`, `verify_mixer` and `jaxmix verify`.

    Attributes:
        batch: Batch size B.
        length: Tokens T, at least 8. Explicit sums cover the first 32 tokens (causality makes that a fair comparison).
        heads: Query heads H.
        kv_heads: Key and value heads G; must divide heads.
        key_size: Key size D.
        value_size: Value size E.
        chunk_sizes: Chunk sizes of the scan form; 1 is the scan over single tokens.
        dtype: Dtype of the inputs in the rows "forms"; everything else runs in float64.
        seed: Seed of all random inputs.
        mixers: Names of the mixers to check, of hla2, hla3, ahla, gated_delta_rule, delta_rule, ssd, s4d,
            interdomain_attention, interdomain_ideal and linear_attention; empty means all.
        checks: Kinds of check to run, of forms, operator, gradients, split, packed, causality and errata; empty means
            all.
        full: Compile more: every check on every option, and every form with every way to call it. Otherwise gradients
            are those of one option for each state, other discretisations and formulas as printed are checked in their
            outputs and operator only, and other ways to call a mixer in its serial form.
        details: Print every comparison instead of the worst one of each check.
        json: Print the report as JSON instead of a table.
    """

    batch: int = 2
    length: int = 11
    heads: int = 4
    kv_heads: int = 2
    key_size: int = 3
    value_size: int = 5
    chunk_sizes: tuple[int, ...] = (1, 4)
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    seed: int = 0
    mixers: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    full: bool = False
    details: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "key_size", "value_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.length < MINIMUM_LENGTH:
            raise ValueError(f"length: expected at least {MINIMUM_LENGTH} tokens, got {self.length}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads = {self.heads}, got {self.kv_heads}")
        if not self.chunk_sizes or min(self.chunk_sizes) < 1:
            raise ValueError(f"chunk_sizes: expected one or more positive integers, got {self.chunk_sizes}")
        if self.dtype not in TOLERANCE:
            raise ValueError(f"dtype: expected one of {', '.join(TOLERANCE)}, got {self.dtype!r}")
        unknown = [name for name in self.checks if name not in CHECK_NAMES]
        if unknown:
            raise ValueError(f"checks: expected names among {', '.join(CHECK_NAMES)}, got {', '.join(unknown)}")
        if self.seed < 0:
            raise ValueError(f"seed: expected a non-negative integer, got {self.seed}")

    @property
    def short_chunk(self) -> int:
        """The chunk size used where one is enough: the largest that gives several chunks, if one above 1 does."""
        several = [c for c in self.chunk_sizes if 1 < c < self.length]
        return max(several or self.chunk_sizes)
