"""The shapes that accelerators are timed at, by name."""

import dataclasses

from jaxmix.arrays import check_count, fail

GENERAL = ("linear_attention", "hla2", "ahla", "hla3", "gated_delta_rule", "ssd", "softmax_attention")
"""Mixers that take any shape with as many key/value heads as query heads."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one call.

    Attributes:
        batch: sequences B.
        length: tokens T; for decoding the tokens that came before.
        heads: query heads H; for delta rules value heads.
        key_size: D.
        value_size: E; D by default.
        shared_heads: key/value heads G, for delta rules heads of queries and keys; H by default.
        name: what it stands for.
        mixers: those that the shape is for.
    """

    batch: int
    length: int
    heads: int
    key_size: int
    value_size: int = 0
    shared_heads: int = 0
    name: str = ""
    mixers: tuple[str, ...] = GENERAL

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_size", self.value_size or self.key_size)
        object.__setattr__(self, "shared_heads", self.shared_heads or self.heads)
        for field in ("batch", "length", "heads", "key_size", "value_size", "shared_heads"):
            check_count(field, getattr(self, field))
        if self.heads % self.shared_heads:
            fail("shared_heads", f"a divisor of heads={self.heads}", self.shared_heads)

    @property
    def repeats(self) -> int:
        """Query heads that share a key/value head, R."""
        return self.heads // self.shared_heads

    def __str__(self) -> str:
        heads = str(self.heads) if self.repeats == 1 else f"{self.heads}/{self.shared_heads}"
        sizes = str(self.key_size) if self.key_size == self.value_size else f"{self.key_size}/{self.value_size}"
        return f"({self.batch}, {self.length}, {heads}, {sizes})" + (f" {self.name}" if self.name else "")


ANCHORS = (
    Shape(8, 4096, 16, 64),
    Shape(4, 4096, 16, 128),
    Shape(2, 16384, 16, 128),
    Shape(2, 16384, 16, 64),
    Shape(8, 2048, 16, 64),
    Shape(4, 2048, 16, 128),
    Shape(1, 8192, 96, 128),
    Shape(1, 32768, 16, 128),
)
"""Where measured times of softmax attention and of Triton kernels are known for an H200, and the shortest sequences of
size 64 at which no mixer should be slower than softmax attention."""

COMMON = (
    Shape(1, 8192, 96, 128),
    Shape(2, 16384, 16, 128),
    Shape(4, 2048, 16, 128),
    Shape(4, 4096, 64, 128),
    Shape(8, 2048, 32, 256),
    Shape(8, 1024, 8, 64),
)
"""Shapes that other libraries of linear attention report."""

TOKENS = 2**18
LENGTHS = tuple(
    Shape(TOKENS // length, length, 16, 128) for length in (2**12, 2**13, 2**14, 2**15, 2**16, 2**17, 2**18)
)
"""4096 to 262,144 tokens a sequence, 262,144 tokens in all: time per token over the length."""

DECODE = (
    Shape(64, 4096, 16, 128),
    Shape(128, 4096, 16, 64),
    Shape(64, 32768, 16, 128, mixers=("softmax_attention",)),
)
"""1024 heads and more at once; fixed states do not depend on the tokens before."""

_DELTA = ("gated_delta_rule",)
_ATTENTION = ("linear_attention", "hla2", "ahla", "softmax_attention")
MODELS = (
    Shape(16, 4096, 12, 64, name="decoder 125M"),
    Shape(8, 4096, 32, 64, name="decoder 1.3B"),
    Shape(1, 8192, 32, 128, shared_heads=8, name="Llama 3.1 8B", mixers=_ATTENTION),
    Shape(1, 8192, 32, 128, shared_heads=16, name="Qwen3-Next 80B", mixers=_DELTA),
    Shape(1, 32768, 32, 128, shared_heads=16, name="Qwen3-Next 80B", mixers=_DELTA),
    Shape(8, 4096, 6, 128, 256, name="Gated DeltaNet 380M", mixers=_DELTA),
    Shape(2, 8192, 80, 128, 64, name="Mamba-2 2.7B", mixers=("ssd",)),
)
"""Heads and sizes of models, with batches that train on one card."""

SHAPES = {"anchors": ANCHORS, "common": COMMON, "long": LENGTHS, "models": MODELS, "streams": DECODE}
"""Shapes by suite."""
