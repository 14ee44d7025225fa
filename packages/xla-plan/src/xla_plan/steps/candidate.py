"""The step to plan, a function or a script, and the candidates (topology, mesh, options) for it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from xla_core.contract.foreign_values import AnyFunction

MSG_MESH: Final = (
    "{text!r} is not a mesh: write axes and their sizes, such as fsdp=16 or data=2,fsdp=4,tensor=2"
)
MSG_SIZE: Final = "the mesh {mesh} is for {size} devices, but {topology} has {count}"
MSG_STEP: Final = (
    "{text!r} names no step: write package.module:function or path/to/file.py:function, or the path of a "
    "script"
)
MSG_NO_FUNCTION: Final = "{home} has no function {name!r}; it has {known}"

Mesh = tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A topology, a mesh over all its devices (empty for a script, which makes its own), and options.

    ``options`` are keyword arguments of the step function (default: none).
    """

    topology: str
    mesh: Mesh = ()
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def mesh_text(self) -> str:
        """The mesh as text, such as ``fsdp=16,tensor=2``."""
        return ",".join(f"{name}={size}" for name, size in self.mesh)

    @property
    def title(self) -> str:
        """Topology, mesh and options in one line."""
        options = " ".join(f"{k}={v}" for k, v in self.options.items())
        return " ".join(filter(None, (self.topology, self.mesh_text, options)))

    def with_options(self, **options: object) -> Candidate:
        """The same candidate with some options added or replaced."""
        return dataclasses.replace(self, options={**self.options, **options})

    def check(self, count: int) -> None:
        """Raise ValueError unless the mesh is empty or for ``count`` devices."""
        size = math.prod(n for _, n in self.mesh)
        if self.mesh and size != count:
            raise ValueError(
                MSG_SIZE.format(mesh=self.mesh_text, size=size, topology=self.topology, count=count)
            )


def parse_mesh(text: str) -> Mesh:
    """Parse ``fsdp=8,tensor=2`` to pairs. Raises ValueError, which shows the form, for other text."""
    pairs = [part.partition("=") for part in text.split(",")]
    if any(
        not name.strip().isidentifier() or not size.strip().isdecimal() for name, _, size in pairs
    ):
        raise ValueError(MSG_MESH.format(text=text))
    return tuple((name.strip(), int(size)) for name, _, size in pairs)


def parse_option(text: str) -> tuple[str, object]:
    """Parse ``batch=2`` to a name and a value: a Python literal if it is one, otherwise a string."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def is_script(step: str) -> bool:
    """Whether ``step`` names a file to run, not a function in it."""
    return step.endswith(".py")


def step_home(step: str) -> str:
    """The module or file of ``step``. Raises ValueError if it names neither."""
    home, _, name = step.rpartition(":")
    if is_script(step):
        return step
    if not home or not name.isidentifier():
        raise ValueError(MSG_STEP.format(text=step))
    return home


def find_step(step: str) -> AnyFunction:
    """The function that ``module:function`` or ``file.py:function`` names. Raises ValueError if there is none."""
    home, name = step_home(step), step.rpartition(":")[2]
    module = _module_of_file(Path(home)) if home.endswith(".py") else _module(home)
    function = getattr(module, name, None)
    if not callable(function):
        names = ", ".join(n for n, v in vars(module).items() if callable(v) and n[0] != "_")
        raise ValueError(MSG_NO_FUNCTION.format(home=home, name=name, known=names))
    return function  # type: ignore[no-any-return]


def _module(name: str) -> object:
    sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def _module_of_file(path: Path) -> object:
    if not path.is_file():
        raise ValueError(MSG_STEP.format(text=str(path)))
    sys.path.insert(0, str(path.resolve().parent))
    return importlib.import_module(path.stem)
