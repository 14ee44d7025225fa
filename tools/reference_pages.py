"""Writes the pages of the API reference, ``docs/reference/*.md``: one per public module.

``python tools/reference_pages.py`` looks at the modules and writes, for each public function and class, where it
is defined: many names of torch_xla are found when they are asked for, which only a running module knows.
mkdocstrings reads signatures and docstrings from the sources when the site is built, and needs nothing installed.
``tests/test_reference_pages.py`` says when a page was forgotten.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import shutil
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

REFERENCE: Final = Path(__file__).resolve().parents[1] / "docs" / "reference"
OURS: Final = ("torch_xla", "xla_core", "xla_dist", "xla_spmd", "xla_debug", "xla_pjrt_cpu")
MODULES: Final = {
    "Training": (
        "torch_xla", "torch_xla.core.xla_model", "torch_xla.runtime", "torch_xla.amp",
        "torch_xla.utils.checkpoint", "torch_xla.utils.serialization", "torch_xla.stablehlo",
        "torch_xla.core.xla_builder", "torch_xla.backends",
    ),
    "Several devices": (
        "torch_xla.distributed.xla_multiprocessing", "torch_xla.distributed.parallel_loader",
        "torch_xla.distributed.fsdp", "torch_xla.distributed.spmd",
        "torch_xla.distributed.spmd.debugging", "torch_xla.experimental.distributed_checkpoint",
        "torch_xla.experimental.spmd_fully_sharded_data_parallel",
    ),
    "Experimental": (
        "torch_xla.experimental.capture", "torch_xla.experimental.resume",
        "torch_xla.experimental.eager", "torch_xla.experimental.scan",
        "torch_xla.experimental.fori_loop", "torch_xla.experimental.custom_kernel",
    ),
    "Looking at it": (
        "torch_xla.debug.metrics", "torch_xla.debug.profiler", "torch_xla.debug.model_comparator",
        "xla_debug.recompile", "xla_debug.memory",
    ),
    "Plugins and extensions": (
        "xla_core.contract.device_protocol", "xla_core.contract.events",
        "xla_core.contract.hookspecs", "xla_core.extension_api.autograd",
        "xla_core.extension_api.backends", "xla_core.extension_api.jobs",
        "xla_core.extension_api.lowering", "xla_core.extension_api.operators",
        "xla_core.extension_api.plugins", "xla_core.extension_api.programs",
        "xla_core.extension_api.runtime", "xla_core.extension_api.steps",
        "xla_core.extension_api.tensors", "xla_core.extension_api.training",
    ),
}  # fmt: skip
"""The modules of the reference, in the order of its table of contents."""
WRITTEN: Final = "<!-- written by tools/reference_pages.py -->\n"


def public_names(module: types.ModuleType) -> list[str]:
    """The names that a module offers: its ``__all__``, else what it defines or imports ``as`` its own; sorted."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        used = {
            alias.name
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname is None
        }
        listed = [name for name in dir(module) if not name.startswith("_") and name not in used]
    return sorted(listed, key=str.lower)


def place(value: Any) -> str | None:
    """Where a function or class of this repository is defined, if it has a docstring; else None."""
    value = inspect.unwrap(value) if inspect.isfunction(value) else value
    if not (inspect.isfunction(value) or inspect.isclass(value)) or not value.__doc__:
        return None
    if value.__module__.split(".")[0] not in OURS or "<" in value.__qualname__:
        return None
    return f"{value.__module__}.{value.__qualname__}"


def page(name: str, seen: dict[str, str]) -> str:
    """The Markdown of a module's page; ``seen`` has the pages of what was written before, and is added to."""
    module = importlib.import_module(name)
    first = (module.__doc__ or "").strip().splitlines()[0]
    said = first.partition(": ")[2] or first
    said = said if "_" in said.split()[0] else f"{said[0].upper()}{said[1:]}"
    lines = [WRITTEN, f"# `{name}`\n", f"{said}\n"]
    again = []
    for public in public_names(module):
        target = place(getattr(module, public))
        if target is None:
            continue
        if target in seen:
            again.append(f"- [`{public}`]({seen[target]}.md#{target})")
        else:
            seen[target] = name
            lines += [f"::: {target}", "    options:", f"      heading: {public}", ""]
    if again:
        lines += ["## Also here\n", *again, ""]
    return "\n".join(lines)


def index() -> str:
    """The Markdown of the table of contents."""
    lines = [WRITTEN, "# API reference\n", "Signatures and docstrings of the public modules.\n"]
    for heading, names in MODULES.items():
        lines += [f"## {heading}\n", *(f"- [`{name}`]({name}.md)" for name in names), ""]
    lines.append(
        "[All names of torch_xla](../api.md) says for each where it is here, or why it is not."
    )
    return "\n".join(lines) + "\n"


def written() -> dict[Path, str]:
    """The files and what should be in them."""
    seen: dict[str, str] = {}
    listed = [name for names in MODULES.values() for name in names]
    pages = {REFERENCE / f"{name}.md": page(name, seen) for name in listed}
    return pages | {REFERENCE / "index.md": index()}


def main(arguments: Sequence[str]) -> None:
    """Rewrite the pages; with ``--check`` only name those that would be others, or are left over."""
    pages = written()
    if "--check" in arguments:
        there = {path: path.read_text("utf-8") for path in REFERENCE.glob("*.md")}
        for path in sorted(pages.keys() | there.keys()):
            if pages.get(path) != there.get(path):
                print(path.name)
        return
    shutil.rmtree(REFERENCE, ignore_errors=True)
    REFERENCE.mkdir()
    for path, text in pages.items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
