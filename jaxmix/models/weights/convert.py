"""Decoders from published checkpoints, and published checkpoints from decoders."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmix.arrays import check_count, fail
from jaxmix.models.config import DTYPES, DecoderConfig
from jaxmix.models.decoder import Decoder
from jaxmix.models.sizes import abstract_decoder, abstract_parameters
from jaxmix.models.weights.family import Family, PublishedConfig
from jaxmix.models.weights.files import CONFIG, Tensors, check_new_directory, read_json, write_checkpoint
from jaxmix.models.weights.names import Arrays, Entry, Place, find_places
from jaxmix.models.weights.registry import family_of_decoder, family_of_published


def load_decoder(
    source: str | Path, *, dtype: str | None = None, param_dtype: str | None = None, capacity: int | None = None
) -> Decoder:
    """The decoder of a published checkpoint.

    Args:
        source: directory with config.json and model.safetensors, or its parts with an index.
        dtype: compute dtype; `param_dtype` by default.
        param_dtype: dtype of the parameters; by default that of the checkpoint, which loses nothing (float32 for
            float16).
        capacity: slots of every key/value cache, the longest document that the model can serve; by default the
            `max_position_embeddings` of the checkpoint.

    Returns:
        The decoder with the checkpoint's parameters.

    Raises:
        ValueError: for a missing file or key, a bad value, or tensors that are missing, unexpected or of a wrong
            shape; the message names all of them.
        NotImplementedError: for an architecture or option that the decoder has not.
    """
    source = Path(source).expanduser()
    fields = read_json(source / CONFIG)
    family, published = family_of_published(fields), PublishedConfig(fields)
    config = family.read_config(published)
    published.check_all_read()
    tensors = Tensors(source)
    if param_dtype is None:
        stored = {
            tensors.dtype(name) for entry in family.entries(config) for name in entry.theirs if name in tensors.names
        }
        param_dtype = _common_dtype(stored)
    config = dataclasses.replace(config, param_dtype=param_dtype)
    config = dataclasses.replace(config, dtype=dtype or config.param_dtype)
    for name in (config.dtype, config.param_dtype):
        if name == "float64" and not jax.config.read("jax_enable_x64"):
            fail("param_dtype", "float32 or bfloat16 unless jax_enable_x64 is on", name)
    if capacity is not None:
        config = _with_capacity(config, capacity)
    return _fill(config, family, tensors)


def save_decoder(
    model: Decoder, target: str | Path, *, dtype: str | None = None, extra: dict[str, Any] | None = None
) -> None:
    """Writes a decoder as a published checkpoint: config.json and model.safetensors.

    Args:
        model: the decoder.
        target: directory, which must be empty or not exist.
        dtype: dtype of the tensors; by default that of each parameter.
        extra: more keys for config.json, such as `eos_token_id`.

    Raises:
        ValueError: if the target holds something already.
        NotImplementedError: if no published architecture holds this model; the message says why not.
    """
    target = Path(target).expanduser()
    check_new_directory("target", target)
    if dtype is not None and dtype not in DTYPES:
        fail("dtype", f"one of {', '.join(DTYPES)}", repr(dtype))
    config = model.config
    family = family_of_decoder(config)
    entries, places = _table(family, config)
    arrays = nnx.traversals.flatten_mapping(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    stacked = {path: np.asarray(jax.device_get(array)) for path, array in arrays.items()}
    tensors = {}
    for entry in entries:
        ours = [places[name].view(stacked) for name in entry.ours]
        for name, array in zip(entry.theirs, entry.to_theirs(*ours), strict=True):
            tensors[name] = array if dtype is None else array.astype(dtype)
    head = {"architectures": [family.architecture], "dtype": dtype or config.param_dtype}
    head["torch_dtype"] = head["dtype"]  # the name before transformers 5
    write_checkpoint(target, head | family.write_config(config) | (extra or {}), tensors)


def _fill(config: DecoderConfig, family: Family, tensors: Tensors) -> Decoder:
    """The decoder whose parameters are the tensors, after all names and shapes are checked."""
    entries, places = _table(family, config)
    _check_tensors(config, family, entries, places, tensors)
    stacked = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in abstract_parameters(config).items()}
    for entry in entries:
        ours = entry.to_ours(*(tensors.read(name) for name in entry.theirs))
        for name, array in zip(entry.ours, ours, strict=True):
            places[name].view(stacked)[...] = array
    params = nnx.traversals.unflatten_mapping({path: jnp.asarray(array) for path, array in stacked.items()})
    return nnx.merge(nnx.graphdef(abstract_decoder(config)), params)


def _table(family: Family, config: DecoderConfig) -> tuple[Sequence[Entry], dict[str, Place]]:
    """The family's entries and the places that they fill, which must be all parameters of the decoder."""
    entries, places = family.entries(config), find_places(config)
    named = [name for entry in entries for name in entry.ours]
    if sorted(named) != sorted(places):
        differing = sorted(set(named) ^ set(places)) or sorted({name for name in named if named.count(name) > 1})
        raise NotImplementedError(
            f"the names of {family.architecture} do not fit this decoder at {', '.join(differing)}"
        )
    return entries, places


def _check_tensors(
    config: DecoderConfig, family: Family, entries: Sequence[Entry], places: dict[str, Place], tensors: Tensors
) -> None:
    """Refuses a checkpoint whose tensors are not exactly those of the table."""
    wanted = {name: shape for entry in entries for name, shape in _their_shapes(entry, places).items()}
    copies = family.copies(config)
    missing = sorted(set(wanted) - tensors.names)
    extra = sorted(n for n in tensors.names - set(wanted) - set(copies) if not family.is_derived(n))
    shapes = {name: tensors.shape(name) for name in wanted if name in tensors.names}
    wrong = [f"{n} {list(s)} instead of {list(wanted[n])}" for n, s in sorted(shapes.items()) if s != wanted[n]]
    found = {"missing": missing, "unexpected": extra, "of a wrong shape": wrong}
    if faults := [f"{kind}: {', '.join(names)}" for kind, names in found.items() if names]:
        fail("source", f"the tensors of {family.architecture} for its config.json", "; ".join(faults))
    for name in wanted:
        tensors.dtype(name)
    for copy, original in copies.items():
        if copy in tensors.names and tensors.read(copy).tobytes() != tensors.read(original).tobytes():
            fail(f"tensor {copy}", f"the values of {original}, as config.json says", "other values")


def _their_shapes(entry: Entry, places: dict[str, Place]) -> dict[str, tuple[int, ...]]:
    """Shapes of an entry's tensors, from those of our parameters through the table's own conversion."""
    ours = [np.broadcast_to(np.zeros((), places[name].dtype), places[name].shape) for name in entry.ours]
    arrays: Arrays = entry.to_theirs(*ours)
    return {name: array.shape for name, array in zip(entry.theirs, arrays, strict=True)}


def _common_dtype(stored: set[str]) -> str:
    """The least dtype of parameters that holds all values."""
    wide = {"float32" if name == "float16" else name for name in stored}
    return jnp.dtype(functools.reduce(jnp.promote_types, wide or {"float32"})).name


def _with_capacity(config: DecoderConfig, capacity: int) -> DecoderConfig:
    check_count("capacity", capacity)
    layers = tuple(
        dataclasses.replace(layer, capacity=capacity) if hasattr(layer, "capacity") else layer
        for layer in config.layers
    )
    return dataclasses.replace(config, layers=layers)
