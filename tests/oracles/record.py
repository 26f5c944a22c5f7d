"""Writes vector files, their checksums (vectors.json) and the table of README.md."""

import hashlib
import importlib.metadata
import json
import re
from pathlib import Path

import numpy as np
import safetensors.numpy

FOLDER = Path(__file__).resolve().parent
PACKAGES = ("torch", "transformers", "fla-core", "safetensors", "einops", "numpy")
TABLE = re.compile(r"(?<=<!-- files -->\n).*(?=<!-- /files -->)", re.DOTALL)


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Stores float arrays as float32, in the order of their names; raises ValueError where one is not finite."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{path.name}: {name} is not finite")
    narrow = {name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in sorted(arrays.items())}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **narrow)


def shapes_in(path: Path) -> dict[str, list[int]]:
    """Name and shape of every array of a file; none for a configuration."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: list(arrays[name].shape) for name in sorted(arrays)}
    if path.suffix == ".safetensors":
        return {name: list(a.shape) for name, a in sorted(safetensors.numpy.load_file(path).items())}
    return {}


def describe(shapes: dict[str, list[int]]) -> str:
    """Names grouped by shape; the layers of a model, which are alike, as one name with a star."""
    groups = {}
    for name, shape in shapes.items():
        groups.setdefault(str(shape), {})[re.sub(r"\.layers\.\d+\.", ".layers.*.", name)] = None
    cells = [", ".join(f"`{name}`" for name in names) + f" {shape}" for shape, names in groups.items()]
    return "; ".join(cells) or "configuration"


def write_record(seed: int) -> None:
    """Writes vectors.json and the table of README.md from the files that are there."""
    paths = sorted(path for part in ("checkpoints", "vectors") for path in (FOLDER / part).rglob("*") if path.is_file())
    files = {
        path.relative_to(FOLDER).as_posix(): {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "shapes": shapes_in(path),
        }
        for path in paths
    }
    versions = {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES}
    lines = [f'    "{name}": {json.dumps(entry)}' for name, entry in files.items()]
    header = f'  "seed": {seed},\n  "versions": {json.dumps(versions)},\n  "files": {{\n'
    (FOLDER / "vectors.json").write_text("{\n" + header + ",\n".join(lines) + "\n  }\n}\n")

    rows = [f"| `{name}` | {describe(entry['shapes'])} |\n" for name, entry in files.items()]
    readme = FOLDER / "README.md"
    table = "| file | arrays |\n| --- | --- |\n" + "".join(rows)
    readme.write_text(TABLE.sub(lambda _: table, readme.read_text()))
