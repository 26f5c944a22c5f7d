"""Configuration shared by all mixer layers: frozen dataclasses that build layers and go to plain dicts and back."""

import dataclasses
import typing
from typing import Any, ClassVar, Literal, Self

import jax.numpy as jnp
from flax import nnx

from jaxmix.arrays import Dtype, check_choice, check_count, check_flag, check_positive, fail
from jaxmix.mixers.dispatch import IMPLEMENTATIONS

if typing.TYPE_CHECKING:
    from jaxmix.nn.layer import MixerLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixerConfig:
    """What every mixer layer can be told; a subclass adds its own options and sets its own defaults.

    Attributes:
        heads: query heads H.
        kv_heads: key/value heads G, a divisor of `heads`; `heads` by default. 1 is multi-query attention.
        key_size: size D of a query or key; d_model / heads by default.
        value_size: size E of a value; d_model / heads by default.
        rope: rotate queries and keys by their position in the segment.
        rope_base: base of the rotation.
        conv_width: width of a short causal convolution over the mixer's inputs; 0 for none.
        output_norm: RMSNorm over every head's output, with one learned scale [E] for all heads.
        gate: multiply the heads' outputs by SiLU(x Wg).
        gate_activation: "sigmoid" for sigmoid(x Wg) instead.
        norm_eps: eps of all norms of the layer.
        implementation: form of the mixer: None, "serial", "scan" or "pallas"; S4D also has "fft".
    """

    name: ClassVar[str]
    """Key in the registry."""
    implementations: ClassVar[tuple[str, ...]] = IMPLEMENTATIONS
    """Forms that the mixer has."""
    has_cache: ClassVar[bool] = False
    """A state keeps a limited number of tokens, so that a document may be too long for it."""

    heads: int
    kv_heads: int | None = None
    key_size: int | None = None
    value_size: int | None = None
    rope: bool = False
    rope_base: float = 10000.0
    conv_width: int = 0
    output_norm: bool = False
    gate: bool = False
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    norm_eps: float = 1e-6
    implementation: Literal["serial", "scan", "fft", "pallas"] | None = None

    def __post_init__(self) -> None:
        check_count("heads", self.heads)
        for name in ("kv_heads", "key_size", "value_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.heads % self.groups:
            fail("kv_heads", f"a divisor of heads={self.heads}", self.kv_heads)
        check_choice("implementation", self.implementation, (None, *self.implementations))
        for name in ("rope", "output_norm", "gate"):
            check_flag(name, getattr(self, name))
        check_choice("gate_activation", self.gate_activation, ("silu", "sigmoid"))
        check_positive("rope_base", self.rope_base)
        check_positive("norm_eps", self.norm_eps)
        check_count("conv_width", self.conv_width, 0)
        if self.conv_width == 1:
            fail("conv_width", "0 for no convolution, or at least 2", 1)

    @property
    def layer(self) -> "type[MixerLayer]":
        """The class of the layers that this builds."""
        raise NotImplementedError

    @property
    def mixer_name(self) -> str:
        """The name that `jaxmix.mixers.dispatch` knows the mixer function by, its options included."""
        return self.name

    @property
    def groups(self) -> int:
        """The number of key/value heads G."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def stream_heads(self) -> tuple[int, int, int]:
        """The number of heads that queries, keys and values are projected to."""
        return self.heads, self.groups, self.groups

    def head_sizes(self, d_model: int) -> tuple[int, int]:
        """Key size D and value size E in a model of width `d_model`.

        Raises:
            ValueError: when a size is left to d_model / heads and that is not an integer, or when RoPE meets an
                odd D.
        """
        if (self.key_size is None or self.value_size is None) and d_model % self.heads:
            fail("heads", f"a divisor of d_model={d_model}, or key_size and value_size given", self.heads)
        sizes = self.key_size or d_model // self.heads, self.value_size or d_model // self.heads
        if self.rope and sizes[0] % 2:
            fail("key_size", "an even number, since rope=True rotates pairs", sizes[0])
        return sizes

    def mixer_products(self, d_model: int, length: int) -> int:
        """Multiply-adds of the mixer function for one token of a sequence of `length` tokens, projections not counted.

        Those of the matrix products of the form that trains; inside a chunk both halves of a triangle count, because
        both are computed.
        """
        raise NotImplementedError

    def build(
        self,
        d_model: int,
        *,
        rngs: nnx.Rngs,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        init_std: float = 0.02,
        out_init_std: float | None = None,
    ) -> "MixerLayer":
        """The layer that this describes; the arguments are those of `MixerLayer`."""
        return self.layer(
            d_model,
            self,
            rngs=rngs,
            dtype=dtype,
            param_dtype=param_dtype,
            init_std=init_std,
            out_init_std=out_init_std,
        )

    def to_dict(self) -> dict[str, Any]:
        """A plain dict of all fields and the mixer's name, which `jaxmix.nn.mixer_from_dict` reads back."""
        return {"mixer": self.name} | dataclasses.asdict(self)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """The config with these fields, strict about names."""
        return cls(**known_fields(cls, fields))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryKeyConfig(MixerConfig):
    """Options of the layers of queries, keys and values beside those of `MixerConfig`.

    Their short convolution runs over queries, keys and values and is followed by SiLU.

    Attributes:
        qk_norm: "l2" makes every query and key a unit vector; "rms" makes it one of unit root mean square with a
            learned scale per channel, times D^-1/2, so that it starts as "l2"; None leaves them.
        scale: factor on q.k; None takes the mixer's default.
        rope_fraction: share of the channels of a query or key that `rope` rotates, the first ones.
    """

    qk_norm: Literal["l2", "rms"] | None = None
    scale: float | None = None
    rope_fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("qk_norm", self.qk_norm, (None, "l2", "rms"))
        if self.scale is not None:
            check_positive("scale", self.scale)
        check_positive("rope_fraction", self.rope_fraction)
        if self.rope_fraction > 1:
            fail("rope_fraction", "at most 1", self.rope_fraction)

    def rotated_size(self, key_size: int) -> int:
        """Channels of a query or key that are rotated.

        Raises:
            ValueError: if `rope_fraction` makes them other than an even number of at least 2.
        """
        rotated = key_size * self.rope_fraction
        if rotated < 2 or rotated % 2:
            fail("rope_fraction", f"a share of key_size={key_size} that is an even number", self.rope_fraction)
        return int(rotated)

    def head_sizes(self, d_model: int) -> tuple[int, int]:
        """See `MixerConfig`; what is rotated must be an even number of channels."""
        sizes = super().head_sizes(d_model)
        if self.rope:
            self.rotated_size(sizes[0])
        return sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueHeadConfig(QueryKeyConfig):
    """Options of the layers with a state per value head, which queries and keys may have fewer heads than.

    `heads` counts value heads H; `kv_heads` is not used.

    Attributes:
        key_heads: heads of queries and keys, a divisor of `heads`; `heads` by default.
        chunk_size: tokens per chunk of the scan form.
    """

    key_heads: int | None = None
    chunk_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads is not None:
            fail("kv_heads", "None (key_heads says how many heads queries and keys have)", self.kv_heads)
        if self.key_heads is not None:
            check_count("key_heads", self.key_heads)
            if self.heads % self.key_heads:
                fail("key_heads", f"a divisor of heads={self.heads}", self.key_heads)
        check_count("chunk_size", self.chunk_size)

    @property
    def stream_heads(self) -> tuple[int, int, int]:
        """Fewer queries and keys than values."""
        keys = self.heads if self.key_heads is None else self.key_heads
        return keys, keys, self.heads


def known_fields(cls: type, fields: dict[str, Any]) -> dict[str, Any]:
    """`fields`, if every key is a field of dataclass `cls` and no field without a default is missing.

    Raises:
        ValueError: names the keys that are unknown or missing.
    """
    names = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := sorted(set(fields) - set(names)):
        fail(f"{cls.__name__} fields", f"only {', '.join(names)}", f"also {', '.join(unknown)}")
    required = {name for name, f in names.items() if f.default is f.default_factory is dataclasses.MISSING}
    if missing := sorted(required - set(fields)):
        fail(f"{cls.__name__} fields", f"also {', '.join(missing)}", f"only {', '.join(sorted(fields))}")
    return fields
