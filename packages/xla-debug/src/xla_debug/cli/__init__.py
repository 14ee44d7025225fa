"""The command line ``xla-debug``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from xla_debug.cli import cache, doctor, flight, run

DESCRIPTION: Final = "Shows what a script does on PyTorch's xla device, and why."


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    top = argparse.ArgumentParser("xla-debug", description=DESCRIPTION)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for module in (run, flight, cache, doctor):
        module.add_parser(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    chosen = parser().parse_args(arguments)
    status: int = chosen.command(chosen)
    return status
