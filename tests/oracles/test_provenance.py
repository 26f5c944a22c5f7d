"""The files of tests/oracles are the ones that README.md and vectors.json say they are."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parent
ON_DISK = sorted(path for part in ("checkpoints", "vectors") for path in (FOLDER / part).rglob("*") if path.is_file())
RECORD = json.loads((FOLDER / "vectors.json").read_text())
SIZE_LIMIT = 1_500_000
# A decay at the first token has nothing to decay.
ZERO = {"zero.T1.grad.log_decay"}

Arrays = dict[str, tuple[str, tuple[int, ...]]]


def name_of(path: Path) -> str:
    return path.relative_to(FOLDER).as_posix()


def arrays_in(path: Path) -> Arrays:
    """dtype and shape of every array of a file, read without the code that wrote it."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: (str(arrays[name].dtype), arrays[name].shape) for name in arrays}
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        header.pop("__metadata__", None)
        dtypes = {"F32": "float32"}
        return {name: (dtypes.get(x["dtype"], x["dtype"]), tuple(x["shape"])) for name, x in header.items()}
    return {}


def table_of(readme: str) -> dict[str, set[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of every file in the table of README.md."""
    body = readme.split("<!-- files -->")[1].split("<!-- /files -->")[0]
    rows = {}
    for file, cell in re.findall(r"^\| `([^`]+)` \| (.+) \|$", body, re.MULTILINE):
        assert file not in rows, f"{file} is listed twice"
        rows[file] = {
            (name, tuple(int(size) for size in shape.split(",") if size.strip()))
            for names, shape in re.findall(r"((?:`[^`]+`(?:, )?)+) \[([\d, ]*)\]", cell)
            for name in re.findall(r"`([^`]+)`", names)
        }
    return rows


TABLE = table_of((FOLDER / "README.md").read_text())
each_file = pytest.mark.parametrize("path", ON_DISK, ids=name_of)


def test_there_are_vectors():
    assert {path.suffix for path in ON_DISK} == {".json", ".npz", ".safetensors"}


def test_the_table_lists_the_files_that_are_there():
    assert set(TABLE) == {name_of(path) for path in ON_DISK}


def test_the_record_lists_the_files_that_are_there():
    assert set(RECORD["files"]) == {name_of(path) for path in ON_DISK}


@each_file
def test_the_checksum_is_the_recorded_one(path):
    assert hashlib.sha256(path.read_bytes()).hexdigest() == RECORD["files"][name_of(path)]["sha256"]


@each_file
def test_the_recorded_shapes_are_those_of_the_file(path):
    actual = {name: list(shape) for name, (_, shape) in arrays_in(path).items()}
    assert RECORD["files"][name_of(path)]["shapes"] == actual


@each_file
def test_the_table_lists_the_arrays_of_the_file(path):
    arrays = arrays_in(path)
    assert bool(arrays) == (path.name != "config.json")
    assert TABLE[name_of(path)] == {
        (re.sub(r"\.layers\.\d+\.", ".layers.*.", name), shape) for name, (_, shape) in arrays.items()
    }


@each_file
def test_every_array_but_the_tokens_is_float32(path):
    assert {(name, dtype) for name, (dtype, _) in arrays_in(path).items() if dtype != "float32"} <= {
        ("tokens", "int32")
    }


@pytest.mark.parametrize("path", [path for path in ON_DISK if path.suffix == ".npz"], ids=name_of)
def test_every_array_is_finite_and_says_something(path):
    with np.load(path) as arrays:
        assert [name for name, array in arrays.items() if not np.isfinite(array).all()] == []
        assert {name for name, array in arrays.items() if not array.any()} == ZERO & set(arrays)


def test_the_pins_are_the_versions_that_made_the_files():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (FOLDER / "requirements.txt").read_text(), re.MULTILINE))
    assert {name: pins[name] for name in RECORD["versions"]} == RECORD["versions"]


def test_the_readme_names_the_seed_and_the_versions():
    readme = (FOLDER / "README.md").read_text()
    named = [f"{name} {version}" for name, version in RECORD["versions"].items()]
    assert [entry for entry in [*named, str(RECORD["seed"])] if entry not in readme] == []


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in ON_DISK) < SIZE_LIMIT
