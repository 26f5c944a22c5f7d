"""Configuration of the decoder, and its plain-dict form."""

import dataclasses
from typing import Any, Literal, Self

import jax.numpy as jnp

from jaxmix.arrays import check_choice, check_count, check_flag, check_positive, fail
from jaxmix.nn.config import MixerConfig, known_fields
from jaxmix.nn.registry import mixer_from_dict

REMATS = ("none", "dots", "full")
DTYPES = ("bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only language model.

    Attributes:
        vocab_size: number of token ids V.
        d_model: width d.
        layers: one mixer configuration per layer; a hybrid is a tuple of different ones.
        hidden: hidden size of every SwiGLU; 0 for blocks of a mixer alone, as in Mamba-2.
        tie_embeddings: the output map is the transpose of the embedding.
        dtype: compute dtype: "bfloat16", "float32" or "float64" (or anything that `jnp.dtype` reads as one of them).
        param_dtype: dtype of the parameters, likewise; gate parameters are float32 or better.
        remat: what the backward pass recomputes: "none"; "dots", all but the products of activations with
            parameters; "full", everything inside a unit of layers.
        norm_eps: eps of the norms before and after the layers.
        init_std: standard deviation of initial embeddings and projections; that of the projections back onto the
            residual stream (every mixer's output, every SwiGLU's down) is init_std / sqrt(2 * number of layers).
    """

    vocab_size: int
    d_model: int
    layers: tuple[MixerConfig, ...]
    hidden: int
    tie_embeddings: bool = False
    dtype: str = "float32"
    param_dtype: str = "float32"
    remat: Literal["none", "dots", "full"] = "none"
    norm_eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model"):
            check_count(name, getattr(self, name))
        check_count("hidden", self.hidden, 0)
        if not isinstance(self.layers, tuple | list) or not self.layers:
            fail("layers", "at least one mixer configuration in a tuple", repr(self.layers))
        object.__setattr__(self, "layers", tuple(self.layers))
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, MixerConfig):
                fail(f"layers[{index}]", "a mixer configuration such as HLAConfig(heads=4)", repr(layer))
            layer.head_sizes(self.d_model)
        check_flag("tie_embeddings", self.tie_embeddings)
        for name in ("dtype", "param_dtype"):
            object.__setattr__(self, name, _dtype_name(name, getattr(self, name)))
        check_choice("remat", self.remat, REMATS)
        check_positive("norm_eps", self.norm_eps)
        check_positive("init_std", self.init_std)

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, fit for JSON, that `from_dict` reads back to an equal configuration."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"layers": [layer.to_dict() for layer in self.layers]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The configuration that `to_dict` wrote.

        Raises:
            ValueError: for an unknown or missing field or mixer, or a bad value.
        """
        if not isinstance(fields, dict) or not isinstance(fields.get("layers", []), list | tuple):
            fail("config", "a dict with a list of layers", repr(fields))
        fields = dict(known_fields(cls, fields))
        fields["layers"] = tuple(mixer_from_dict(layer) for layer in fields["layers"])
        return cls(**fields)


def _dtype_name(argument: str, value: Any) -> str:
    try:
        name = jnp.dtype(value).name
    except TypeError:
        name = None
    if name not in DTYPES:
        fail(argument, f"one of {', '.join(DTYPES)}", repr(value))
    return name


def group_layers(layers: tuple[MixerConfig, ...]) -> tuple[tuple[tuple[MixerConfig, ...], int], ...]:
    """The layers as (unit, repeats): a unit of consecutive layers, repeated.

    At each place the unit is taken that covers most layers by repeating at least twice, the shortest of equals; a
    layer that begins no repetition is a unit by itself. So (a, a, a, b) * n is one unit of four, and (a, a, b, b, b)
    are two units of one layer.
    """
    groups, start = [], 0
    while start < len(layers):
        size, repeats = 1, 1
        for length in range(1, (len(layers) - start) // 2 + 1):
            unit = layers[start : start + length]
            count = 1
            while layers[start + count * length : start + (count + 1) * length] == unit:
                count += 1
            if count > 1 and count * length > size * repeats:
                size, repeats = length, count
        groups.append((layers[start : start + size], repeats))
        start += size * repeats
    return tuple(groups)
