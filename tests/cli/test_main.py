import importlib
import re

import pytest

import jaxmix.cli
from jaxmix import __version__
from jaxmix.cli import COMMANDS, EXTRAS, main


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and text in out for name, text in COMMANDS.items())


def test_no_command_shows_the_help_and_fails(capsys):
    assert main([]) == 2
    assert "usage: jaxmix COMMAND" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxmix {__version__}\n"


def test_an_unknown_command_is_one_line(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == (
        "jaxmix: command: expected one of train, generate, router, import, export, verify, info, bench, got 'trian'\n"
    )


@pytest.mark.parametrize("package", sorted(EXTRAS))
def test_a_missing_package_names_its_extra(monkeypatch, capsys, package):
    def absent(module):
        raise ModuleNotFoundError(f"No module named '{package}.part'", name=f"{package}.part")

    monkeypatch.setattr(jaxmix.cli.importlib, "import_module", absent)
    assert main(["train"]) == 1
    expected = f"jaxmix: 'jaxmix train' needs the package {package}: pip install 'jaxmix[{EXTRAS[package]}]'\n"
    assert capsys.readouterr().err == expected


def test_every_extra_is_one_of_the_project():
    metadata = importlib.metadata.metadata("jaxmix") if _installed() else None
    names = set(metadata.get_all("Provides-Extra")) if metadata else _extras_of_pyproject()
    assert set(EXTRAS.values()) <= names


def _installed():
    try:
        importlib.metadata.version("jaxmix")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _extras_of_pyproject():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    return set(project["optional-dependencies"])


def test_a_missing_package_of_no_extra_is_an_error_as_usual(monkeypatch):
    def absent(module):
        raise ModuleNotFoundError("No module named 'jaxmix.typo'", name="jaxmix.typo")

    monkeypatch.setattr(jaxmix.cli.importlib, "import_module", absent)
    with pytest.raises(ModuleNotFoundError):
        main(["train"])


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("x: expected 1, got 2"), 2), (FloatingPointError("loss nan"), 1), (KeyboardInterrupt(), 130)],
    ids=["value", "floating point", "interrupt"],
)
def test_errors_are_one_message_and_a_status(monkeypatch, capsys, error, status):
    class Module:
        @staticmethod
        def run(arguments):
            raise error

    monkeypatch.setattr(jaxmix.cli.importlib, "import_module", lambda module: Module)
    assert main(["train"]) == status
    assert capsys.readouterr().err == f"jaxmix: {str(error) or 'interrupted'}\n"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert re.search(rf"usage: jaxmix {command}", capsys.readouterr().out)
