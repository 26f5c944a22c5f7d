"""Name tables: which tensors of a published checkpoint are which parameters of the decoder."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from jaxmix.models.config import DecoderConfig, group_layers
from jaxmix.models.sizes import abstract_parameters

Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of a name table: tensors of theirs that are parameters of ours.

    Our parameters are named as attributes of the decoder and of its blocks, every layer by itself however layers are
    stacked: "embedding", "norm.scale", "layers.3.mixer.query.kernel", "layers.3.mlp.down.kernel".

    Attributes:
        theirs: names in the checkpoint.
        ours: names in the decoder.
        to_ours: their arrays, in the order of `theirs`, to ours, in the order of `ours`.
        to_theirs: its inverse.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: Callable[..., Arrays]
    to_theirs: Callable[..., Arrays]

    def under(self, theirs: str, ours: str) -> Self:
        """The same line with prefixes before all names."""
        return dataclasses.replace(
            self, theirs=tuple(theirs + name for name in self.theirs), ours=tuple(ours + name for name in self.ours)
        )


def same(theirs: str, ours: str) -> Entry:
    """A tensor that is a parameter as it is."""
    return Entry((theirs,), (ours,), _keep, _keep)


def transposed(theirs: str, ours: str) -> Entry:
    """The weight [outputs, inputs] of a linear map that is our kernel [inputs, outputs]."""
    return Entry((theirs,), (ours,), _transpose, _transpose)


def _keep(x: np.ndarray) -> Arrays:
    return (x,)


def _transpose(x: np.ndarray) -> Arrays:
    return (x.T,)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter of one layer is in the decoder's nested dicts.

    Attributes:
        path: keys down to the array.
        unit: index along its first axis, over the units of a group; None for what is outside the layers.
        shape: of the parameter of this one layer.
        dtype: that the decoder keeps it in.
    """

    path: tuple[Any, ...]
    unit: int | None
    shape: tuple[int, ...]
    dtype: np.dtype

    def view(self, arrays: dict[tuple[Any, ...], Any]) -> Any:
        """The parameter in a dict from path to stacked array."""
        array = arrays[self.path]
        return array if self.unit is None else array[self.unit]


def find_places(config: DecoderConfig) -> dict[str, Place]:
    """Every parameter of the decoder, layer by layer, by the names that `Entry.ours` uses."""
    groups = group_layers(config.layers)
    starts = [0]
    for unit, repeats in groups:
        starts.append(starts[-1] + len(unit) * repeats)
    places = {}
    for path, leaf in abstract_parameters(config).items():
        if path[0] != "groups":
            places[".".join(map(str, path))] = Place(path, None, leaf.shape, np.dtype(leaf.dtype))
            continue
        _, group, _, block, *rest = path
        unit, repeats = groups[group]
        for index in range(repeats):
            name = ".".join(map(str, ("layers", starts[group] + index * len(unit) + block, *rest)))
            places[name] = Place(path, index, leaf.shape[1:], np.dtype(leaf.dtype))
    return places
