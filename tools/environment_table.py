"""Writes README's table of environment variables from their declarations.

``python tools/environment_table.py`` puts the table between README's two marks, and
``tests/test_environment_variables.py`` says when it was forgotten. A variable is declared as a ``Flag``: in
xla-core's ``support/flags.py``, or in the module ``settings`` of another package.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from xla_core.support.flags import FLAGS, Flag

README: Final = Path(__file__).resolve().parents[1] / "README.md"
HOMES: Final[Mapping[str, str]] = {
    "xla-core": "xla_core.support.flags",
    "xla-pjrt-cpu": "xla_pjrt_cpu.settings",
    "xla-pjrt-tpu": "xla_pjrt_tpu.settings",
    "xla-pjrt-cuda": "xla_pjrt_cuda.settings",
    "xla-dist": "xla_dist.settings",
    "xla-debug": "xla_debug.settings",
}
"""The modules that declare variables, by package, in the order of the table."""
BEGIN: Final = "<!-- written by tools/environment_table.py -->"
END: Final = "<!-- end -->"


def declared() -> dict[str, list[Flag[Any]]]:
    """Each package's flags, in the order of their declarations."""
    found: dict[str, list[Flag[object]]] = {}
    for package, home in HOMES.items():
        module = importlib.import_module(home)
        flags = [value for value in vars(module).values() if isinstance(value, Flag)]
        found[package] = [flag for flag in flags if flag.name in FLAGS]
    return found


def default_text(flag: Flag[Any]) -> str:
    """A default as one writes it in the environment; ``none`` where nothing is assumed."""
    if flag.shown is not None:
        return flag.shown
    value = flag.default
    if isinstance(value, bool):
        value = int(value)
    elif isinstance(value, tuple):
        value = ":".join(map(str, value))
    return f"`{value}`" if value not in ("", None) else "none"


def table() -> str:
    """The rows of all packages, each under a line with the package's name."""
    lines = ["| variable | default | meaning |", "|---|---|---|"]
    for package, flags in declared().items():
        lines.append(f"| **{package}** | | |")
        for flag in flags:
            more = f" ([more]({flag.see}))" if flag.see else ""
            lines.append(f"| `{flag.name}` | {default_text(flag)} | {flag.meaning}{more} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """README's text with the table as it is declared now."""
    pattern = f"{re.escape(BEGIN)}\n.*?{re.escape(END)}"
    return re.sub(pattern, lambda _match: f"{BEGIN}\n{table()}\n{END}", text, flags=re.S)


def main() -> None:
    """Rewrite README."""
    README.write_text(written(README.read_text()))


if __name__ == "__main__":
    main()
