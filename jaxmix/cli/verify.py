"""`jaxmix verify`: check every form of every recurrent mixer against its serial recurrence and an explicit sum."""

from collections.abc import Sequence

import tyro
from rich.console import Console

from jaxmix.verify import VerifyOptions, verify
from jaxmix.verify.render import render


def run(arguments: Sequence[str]) -> int:
    """Runs the checks; the status is 1 if any failed."""
    options = tyro.cli(VerifyOptions, prog="jaxmix verify", args=arguments, description=__doc__)
    console = Console(stderr=options.json)
    with console.status("verifying") as status:
        report = verify(options, progress=lambda name: status.update(f"verified {name}"))
    if options.json:
        print(report.to_json())
    else:
        console.print(render(report, details=options.details))
    return 0 if report.ok else 1
