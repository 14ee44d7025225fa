"""Writes docs/api.md: which names of torch_xla 2.9 there are here, where they live, and how they are called.

``python tools/api_table.py`` in an environment that has all packages. The names are in ``api_names.toml``;
``tests/test_api_document.py`` fails when the document is not what this script would write.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
NAMES: Final = Path(__file__).with_name("api_names.toml")
DOCUMENT: Final = ROOT / "docs" / "api.md"
MORE_NAMES: Final = Path(__file__).with_name("api_more_names.toml")
REASONS: Final = Path(__file__).with_name("api_left_out.toml")
NOT_YET: Final = "not yet"
LEFT_OUT: Final = "left out"
HEAD: Final = """\
# The names of torch_xla

Made by `python tools/api_table.py`; `tests/test_api_document.py` holds it to the real modules. The
names are those of torch_xla 2.9 that its API guide documents or a well-known library calls (**A**),
that its other documents or one library use (**B**), its other public module-level names (**C**), and
some that it removed but that are still called (**old**: they work and warn). *Where* is the module that
has the code; `xla_dist`, `xla_spmd`, `xla_debug` and `xla_pjrt_tpu` are packages of their own, and a name
whose package is missing says so when it is used. Every signature takes what torch_xla's takes: the same
parameters in the same order, with defaults that mean the same (an empty list, an empty tuple and None do);
`*` marks one that takes more besides. What **raises** is there to say what to use instead. What is
**left out** (with the reason) or **not yet** there raises ImportError or AttributeError.
"""
LEVELS: Final = {"A": "A", "B": "B", "C": "C", "REMOVED": "old"}
EMPTY: Final[tuple[object, ...]] = (None, (), [], {}, b"", "")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of torch_xla's: ``default`` is its source text, None where there is none."""

    name: str
    keyword_only: bool
    default: str | None


@dataclasses.dataclass(frozen=True)
class Row:
    """A name: what torch_xla has, and what is found here.

    ``where`` is LEFT_OUT or NOT_YET if nothing is; ``why`` says why it is left out, or raises.
    """

    module: str
    name: str
    level: str
    where: str
    signature: str
    differs: str
    why: str = ""

    @property
    def there(self) -> bool:
        """Whether the name can be imported."""
        return self.where not in (NOT_YET, LEFT_OUT)


def rows() -> list[Row]:
    """Every name in the lists, looked up; a module's names together."""
    known: dict[str, dict[str, list[str]]] = {}
    for path in (NAMES, MORE_NAMES):
        for module, levels in tomllib.loads(path.read_text("utf-8")).items():
            if module != "beyond":
                known.setdefault(module, {}).update(levels)
    return [
        _row(module, text, LEVELS[level])
        for module, levels in known.items()
        for level, texts in levels.items()
        for text in texts
    ]


@functools.cache
def reasons() -> dict[tuple[str, str], tuple[str, str]]:
    """By module and name: ``left_out`` or ``raises``, and why."""
    found = tomllib.loads(REASONS.read_text("utf-8"))
    return {
        (module, name): (kind, group["why"])
        for kind, groups in found.items()
        for group in groups
        for module, names in group["names"].items()
        for name in names
    }


def module_level(found: list[Row]) -> list[Row]:
    """The rows that are public module-level names of torch_xla 2.9's Python modules."""
    beyond = tomllib.loads(MORE_NAMES.read_text("utf-8"))["beyond"]
    others = {(module, name) for module, names in beyond.items() for name in names}
    return [
        r
        for r in found
        if "." not in r.name and not r.name.startswith("_") and not r.module.endswith("._XLAC")
        if (r.module, r.name) not in others
    ]


def _row(module: str, text: str, level: str) -> Row:
    name, bracket, _ = text.partition("(")
    kind, why = reasons().get((module, name), ("", ""))
    try:
        found = _look_up(module, name)
    except (ImportError, AttributeError):
        return Row(module, name, level, LEFT_OUT if kind == "left_out" else NOT_YET, "", "", why)
    where = _home(found, module, name)
    if not bracket or not callable(found):
        return Row(module, name, level, where, "", "", why)
    ours = _signature(found)
    method = "." in name and not isinstance(_plain(module, name), (staticmethod, classmethod))
    parameters = list(ours.parameters.values())[1 if method else 0 :]
    wanted, open_end = expected(text)
    differs, more = compare(wanted, parameters, open_end)
    shown = str(
        ours.replace(parameters=[_bare(p) for p in parameters], return_annotation=ours.empty)
    )
    shown += " *" if more and not open_end else ""
    return Row(module, name, level, where, shown, differs, why)


def _look_up(module: str, name: str) -> Any:
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _plain(module: str, name: str) -> Any:
    """A method as it stands in its class, where static and class methods can be told apart."""
    owner, _, last = name.rpartition(".")
    return inspect.getattr_static(_look_up(module, owner), last)


def _home(found: Any, module: str, name: str) -> str:
    home = getattr(found, "__module__", None)
    own = isinstance(home, str) and home.split(".")[0] in _OWN
    if own and "." not in name:
        return str(home)
    return _home(_look_up(module, name.rpartition(".")[0]), module, "") if "." in name else module


_OWN: Final = {
    "xla_core", "xla_dist", "xla_spmd", "xla_debug", "xla_pjrt_tpu", "torch_xla", "lazy_tensor_core",
}  # fmt: skip


def _signature(found: Any) -> inspect.Signature:
    if isinstance(found, enum.EnumType):
        return _enumeration_signature()
    try:
        return inspect.signature(found)
    except ValueError:  # classes of C++ have none
        return inspect.Signature()


def _enumeration_signature() -> inspect.Signature:
    """What a call of an enumeration takes, in the words of Python 3.11.

    Newer ones say ``(*values)`` of the class, and add that to the call itself; 3.13 names a default of its own.
    """
    of_call = inspect.signature(enum.EnumType.__call__)
    _, *parameters = (p for p in of_call.parameters.values() if p.kind is not p.VAR_POSITIONAL)
    without = [p.replace(default=None) if p.name == "names" else p for p in parameters]
    return of_call.replace(parameters=without)


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    """Without annotation, and with a default that reads the same on every machine."""
    default = parameter.default
    if default is not parameter.empty and " at 0x" in repr(default):
        default = _Shown(getattr(default, "__name__", type(default).__name__))
    if default is sys.stdout or default is sys.__stdout__:
        default = _Shown("sys.stdout")
    return parameter.replace(annotation=parameter.empty, default=default)


class _Shown:
    """Stands for a default value whose ``repr`` would say nothing."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def expected(text: str) -> tuple[list[Parameter], bool]:
    """The parameters in ``name(a, b=1, *, c=2)``; whether ``...`` says that others follow."""
    name, _, rest = text.partition("(")
    inside = rest.rpartition(")")[0]
    open_end = bool(re.search(r"(^|, )\.\.\.$", inside))
    inside = re.sub(r"(^|, )\.\.\.$", "", inside)
    arguments = ast.parse(f"def {name.rpartition('.')[2]}({inside}): ...").body[0].args  # type: ignore[attr-defined]
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = [
        Parameter(a.arg, False, None if d is None else ast.unparse(d))
        for a, d in zip(positional, defaults, strict=True)
    ]
    found += [
        Parameter(a.arg, True, None if d is None else ast.unparse(d))
        for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return found, open_end or arguments.vararg is not None or arguments.kwarg is not None


def compare(
    wanted: list[Parameter], ours: list[inspect.Parameter], open_end: bool
) -> tuple[str, bool]:
    """What a caller of torch_xla's would stumble over, and whether there are more parameters here."""
    named = {p.name: p for p in ours}
    order = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    kinds = {p.kind for p in ours}
    positional = [p.name for p in wanted if not p.keyword_only]
    if (
        order[: len(positional)] != positional
        and not {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        }
        <= kinds
    ):
        return f"takes ({', '.join(order)})", False
    for parameter in wanted:
        problem = _problem(parameter, named.get(parameter.name), kinds)
        if problem:
            return problem, False
    extra = [p for p in ours if p.name not in {w.name for w in wanted}]
    needed = [
        p
        for p in extra
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if needed and not open_end:
        return f"needs {needed[0].name}", False
    return "", bool(extra)


def _problem(wanted: Parameter, ours: inspect.Parameter | None, kinds: set[Any]) -> str:
    if ours is None:
        return "" if inspect.Parameter.VAR_KEYWORD in kinds else f"lacks {wanted.name}"
    if wanted.default is None:
        return ""
    if ours.default is ours.empty:
        return f"needs {wanted.name}"
    try:
        default = ast.literal_eval(wanted.default)
    except ValueError:  # an expression, such as sys.stdout
        return ""
    if default is ... or default == ours.default or (default in EMPTY and ours.default in EMPTY):
        return ""
    return f"{wanted.name}={ours.default!r} instead of {wanted.default}"


def render(found: list[Row]) -> str:
    """The document."""
    public = module_level(found)
    counted = (
        f"{sum(r.there for r in found)} of {len(found)} names are there; of the {len(public)} public "
        f"module-level names of torch_xla 2.9, {sum(r.there for r in public)}.\n"
    )
    parts = [HEAD, counted]
    for module in dict.fromkeys(r.module for r in found):
        parts.append(f"## `{module}`\n")
        parts.append("\n".join(_table([r for r in found if r.module == module])) + "\n")
    return "\n".join(parts)


def _table(found: list[Row]) -> Iterator[str]:
    yield "| name | | where | signature |"
    yield "|---|---|---|---|"
    for r in found:
        where = f"`{r.where}`" if r.there else f"**{r.where}**"
        signature = f"`{r.signature}`".replace("|", "\\|") if r.signature else ""
        if r.why:
            signature = f"**raises**: {r.why}" if r.there else r.why
        yield f"| `{r.name}` | {r.level} | {where} | {signature}{f' ({r.differs})' if r.differs else ''} |"


def main() -> None:
    """Write the document, and say what is not there and what differs."""
    found = rows()
    DOCUMENT.write_text(render(found), "utf-8")
    for r in found:
        if r.where == NOT_YET or r.differs:
            print(f"{r.module}.{r.name} ({r.level}): {r.differs or r.where}")


if __name__ == "__main__":
    main()
