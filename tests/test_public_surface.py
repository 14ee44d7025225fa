"""What extensions may import of xla-core: modules that list their names, and nothing else."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def at(path: Path, node: ast.stmt | ast.expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def path_of_src(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.name == "src")


def module_name(path: Path) -> str:
    parts = path.relative_to(path_of_src(path)).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(path: Path) -> str:
    return path_of_src(path).parent.name


MODULES = {module_name(path): path for path in SOURCES}


def imported_modules(path: Path) -> set[str]:
    """The modules of this repository that a file imports, or whose names it does."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= full & MODULES.keys() or {node.module} & MODULES.keys()
    return found


# What sibling packages, device plugins and vendors may import of xla-core.
EXTENSION_API = "xla_core.extension_api"
PUBLIC_SUPPORT = {
    f"xla_core.support.{name}"
    for name in (
        "caches",
        "counters",
        "flags",
        "flight_files",
        "flight_report",
        "flight_ring",
        "indivisible",
        "once",
        "protobuf_wire",
    )
}
CONFORMANCE = "xla_core.testing.conformance"


def is_public(module: str, to_plugins: bool) -> bool:
    """Whether extensions, or device plugins, may import a module of xla_core."""
    folder = module.rpartition(".")[0]
    if folder == "xla_core.pjrt" or module in ("xla_core.pjrt", CONFORMANCE):
        return to_plugins
    return folder in ("xla_core.contract", EXTENSION_API) or module in PUBLIC_SUPPORT


PUBLIC_MODULES = sorted(
    name
    for name in MODULES
    if name != CONFORMANCE and is_public(name, True) and name.count(".") == 2
)
EXTENSIONS = [
    *(path for path in SOURCES if package_of(path) not in ("xla-core", "torch-xla")),
    *sorted((ROOT / "examples" / "acme").rglob("*.py")),
]


def exported(module: str) -> list[str]:
    """The names in a module's ``__all__``."""
    for node in parsed(MODULES[module]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def inner_names(path: Path) -> Iterator[str]:
    """What a file takes of xla_core that is not public: modules, named in strings too, and names."""
    to_plugins = path.is_relative_to(ROOT / "examples") or package_of(path).startswith("xla-pjrt-")
    inner = {n for n in MODULES if n.startswith("xla_core.") and not is_public(n, to_plugins)}
    aliases = {}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "xla_core":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in MODULES:
                    aliases[alias.asname or alias.name] = full
                if not is_public(full if full in MODULES else node.module, to_plugins) or (
                    full not in MODULES
                    and node.module != CONFORMANCE
                    and alias.name not in exported(node.module)
                ):
                    yield f"{at(path, node)} {full}"
        elif isinstance(node, ast.Import):
            yield from (f"{at(path, node)} {a.name}" for a in node.names if "xla_core" in a.name)
        elif isinstance(node, ast.Constant) and node.value in inner:
            yield f"{at(path, node)} {node.value!r}"
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = aliases.get(node.value.id)
            if module is not None and node.attr not in exported(module):
                yield f"{at(path, node)} {module}.{node.attr}"


@pytest.mark.parametrize("path", EXTENSIONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_extensions_use_nothing_of_the_core_but_its_public_surface(path):
    assert not list(inner_names(path))


def test_the_conformance_suite_stands_on_the_public_surface():
    modules, waiting = set(), [CONFORMANCE]
    while waiting:
        module = waiting.pop()
        modules.add(module)
        for target in imported_modules(MODULES[module]):
            if target.startswith("xla_core.testing.") and target not in modules:
                waiting.append(target)
            else:
                assert target in modules or is_public(target, True), f"{module}: {target}"
    assert len(modules) > 1


def defined_names(tree: ast.Module) -> set[str]:
    """What a module binds at its top level by itself, imports left out."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)
            }
    return names


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_a_public_module_lists_its_names_in_order(module):
    tree = parsed(MODULES[module])
    listed = exported(module)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xla_core.")
        for alias in node.names
    }
    public = {n for n in defined_names(tree) if not n.startswith(("_", "MSG_"))}
    if module.startswith(f"{EXTENSION_API}."):
        public |= imported - used
        assert ast.get_docstring(tree)
    assert listed == sorted(set(listed))
    assert public <= set(listed) <= public | imported


def test_the_architecture_names_the_public_modules():
    text = (ROOT / "docs" / "architecture.md").read_text().split("## The public surface")[1]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", text.split("\n## ")[0], re.M)
    sizes = {n.rpartition(".")[2]: len(exported(n)) for n in PUBLIC_MODULES if EXTENSION_API in n}
    assert {name: int(count) for name, count in rows} == sizes


def private_names(paths: Iterable[Path]) -> set[str]:
    """The names with an underscore that the classes and modules in ``paths`` give attributes."""
    found = set()
    for path in paths:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)  # in __slots__
    return {name for name in found if re.fullmatch(r"_(?!_)\w+", name)}


@pytest.mark.parametrize(
    "package", [p for p in PACKAGES if p.name not in ("xla-core", "torch-xla")]
)
def test_extensions_use_no_private_attribute_of_the_core(package):
    own = [path for path in EXTENSIONS if path.is_relative_to(package)]
    foreign = private_names(MODULES[n] for n in MODULES if n.split(".")[0] == "xla_core")
    foreign -= private_names(own) | {"_buffers", "_parameters"}  # torch.nn.Module has them, too
    found = [
        f"{at(path, node)} {ast.unparse(node)}"
        for path in own
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr in foreign
        if ast.unparse(node.value).split(".")[0] not in ("sys", "os", "torch")
    ]
    assert not found
