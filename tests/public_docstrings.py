"""Prints what docstrings of the public surface leave out, a line each (run by test_public_docstrings.py).

Functions with three parameters and more name each of them, functions that raise name each class of errors. The
fields of a data class are the parameters of its constructor, and a constructor is described by its class.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

FEW = 2
OWN = ("xla_core", "xla_spmd", "xla_dist", "xla_debug", "torch_xla")
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def modules(folder: Path, name: str) -> Iterator[str]:
    """The public modules of the package whose path below ``folder`` is ``name``."""
    for path in sorted((folder / name).rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if not any(part.startswith("_") and part != "__init__" for part in parts):
            yield ".".join(part for part in parts if part != "__init__")


def functions(module: str) -> Iterator[tuple[str, Callable[..., object], str]]:
    """Name, function and docstring of all that the module's ``__all__`` offers, methods included."""
    content = importlib.import_module(module)
    for name in getattr(content, "__all__", ()):
        value = getattr(content, name, None)  # None: of a package that is not installed
        if inspect.isfunction(value):
            yield name, value, inspect.getdoc(value) or ""
        elif inspect.isclass(value) and value.__module__.startswith(OWN):
            for method, function in vars(value).items():
                if inspect.isfunction(function) and method == "__init__":
                    text = (inspect.getdoc(value) or "") + (function.__doc__ or "")
                    yield f"{name}.{method}", function, text
                elif inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", function, inspect.getdoc(function) or ""


def left_out(function: Callable[..., object], text: str) -> Iterator[str]:
    """Parameters and classes of errors that the docstring ``text`` does not name."""
    parameters = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self" and parameter.kind not in VARIADIC
    ]
    if len(parameters) > FEW:
        yield from (p for p in parameters if p[0] != "_" and not re.search(rf"\b{p}\b", text))
    yield from sorted(raised(function) - set(re.findall(r"\w+", text)))


def raised(function: Callable[..., object]) -> set[str]:
    """The classes that the function itself raises, by name."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except OSError:  # written by dataclasses
        return set()
    return {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if isinstance(node.exc.func, ast.Name)
    }


def main(folder: Path) -> None:
    """Print the gaps of all public modules below ``folder``, and how many functions were looked at."""
    seen: set[tuple[str, str]] = set()
    for package in ("torch_xla", "xla_core/contract", "xla_core/extension_api"):
        for module in modules(folder, package):
            for name, function, text in functions(module):
                home = (function.__module__, function.__qualname__)
                if home in seen or not home[0].startswith(OWN):
                    continue
                seen.add(home)
                for gap in left_out(function, text):
                    sys.stdout.write(f"{module}.{name} does not say: {gap}\n")
    sys.stdout.write(f"{len(seen)} functions\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
