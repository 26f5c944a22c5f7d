"""Files of a published checkpoint: config.json, and tensors in one safetensors file or in several with an index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxmix.arrays import fail

CONFIG, TENSORS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# What safetensors calls the dtypes that parameters can be read from.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: if there is no such file, or it holds something else.
    """
    if not file.is_file():
        fail("source", f"a directory with {file.name}", f"{str(file.parent)!r} without it")
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"source: expected JSON in {file}, got: {error}") from error
    if not isinstance(content, dict):
        fail("source", f"a JSON object in {file}", type(content).__name__)
    return content


class Tensors:
    """The tensors of a checkpoint by name; values are read when they are asked for.

    Args:
        directory: with model.safetensors, or with the files that model.safetensors.index.json names.

    Raises:
        ValueError: if there is neither, a file is missing or broken, or does not hold what the index says.
    """

    def __init__(self, directory: Path) -> None:
        names = self._shards(directory)
        self._files = {name: _open(directory / name) for name in names}
        self._where = {tensor: name for name, file in self._files.items() for tensor in sorted(file.keys())}
        for tensor, name in {t: n for n, tensors in names.items() for t in tensors}.items():
            if self._where.get(tensor) != name:
                fail("source", f"the tensor {tensor} in {name}, as {INDEX} says", "a file without it")

    @staticmethod
    def _shards(directory: Path) -> dict[str, list[str]]:
        """Files, each with the tensors that the index says are in it."""
        if (directory / TENSORS).is_file():
            return {TENSORS: []}
        if not (directory / INDEX).is_file():
            fail("source", f"a directory with {TENSORS} or {INDEX}", f"{str(directory)!r} without them")
        index = read_json(directory / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            fail("source", f"a weight_map in {INDEX}", repr(index))
        shards: dict[str, list[str]] = {}
        for tensor, name in index.items():
            if not isinstance(name, str) or Path(name).name != name:
                fail("source", f"names of files beside {INDEX}", repr(name))
            shards.setdefault(name, []).append(tensor)
        return shards

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a tensor: float64, float32, float16 or bfloat16.

        Raises:
            ValueError: for another dtype.
        """
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            fail(f"tensor {name}", f"one of the dtypes {', '.join(_DTYPES)}", stored)
        return _DTYPES[stored]

    def read(self, name: str) -> np.ndarray:
        """The values of a tensor."""
        return self._files[self._where[name]].get_tensor(name)

    def _slice(self, name: str) -> Any:
        return self._files[self._where[name]].get_slice(name)


def _open(file: Path) -> Any:
    if not file.is_file():
        fail("source", f"the file {file.name}, as {INDEX} says", f"{str(file.parent)!r} without it")
    try:
        return safe_open(file, framework="np")
    except SafetensorError as error:
        raise ValueError(f"source: expected a safetensors file in {file}, got: {error}") from error


def write_checkpoint(target: Path, config: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Writes model.safetensors and config.json into a directory, which is made."""
    target.mkdir(parents=True, exist_ok=True)
    # transformers reads no file that does not say whose tensors it holds.
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, target / TENSORS, {"format": "pt"})
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def check_new_directory(argument: str, path: Path) -> None:
    """Refuses a path that holds something already.

    Raises:
        ValueError: if it is a file, or a directory that is not empty.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        fail(argument, "a path where nothing is yet, or an empty directory", f"{str(path)!r}, which exists")
