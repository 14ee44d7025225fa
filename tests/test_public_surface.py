"""What extensions, benchmarks and tools may import of xla-core: modules that list their names, and nothing else."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from source_tree import MODULES, PACKAGES, ROOT, SOURCES, at, package_of, parsed


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
        "forked_programs",
        "indivisible",
        "once",
        "own_packages",
        "protobuf_wire",
        "svg",
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
    """The names in a module's ``__all__``; without it, as in ``testing``, what it defines."""
    tree = parsed(MODULES[module])
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return [name for name in defined_names(tree) if not name.startswith("_")]


def inner_names(tree: ast.AST, may_import: Callable[[str], bool]) -> Iterator[tuple[ast.AST, str]]:
    """What code takes of xla_core that is not public: modules, and names of public modules.

    Modules that it names in strings, and scripts in strings, count as well; ``may_import`` tells of a module
    whether the code may import it.
    """
    inner = {name for name in MODULES if name.startswith("xla_core.") and not may_import(name)}
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "xla_core":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in MODULES:
                    aliases[alias.asname or alias.name] = full
                if not may_import(full if full in MODULES else node.module) or (
                    full not in MODULES and alias.name not in exported(node.module)
                ):
                    yield node, full
        elif isinstance(node, ast.Import):
            yield from ((node, a.name) for a in node.names if "xla_core" in a.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in inner:
                yield node, repr(node.value)
            elif "import" in node.value and "xla_core" in node.value:
                yield from ((node, name) for _, name in inner_names(script(node.value), may_import))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = aliases.get(node.value.id)
            if module is not None and node.attr not in exported(module):
                yield node, f"{module}.{node.attr}"


def script(text: str) -> ast.AST:
    """A string as a program; nothing if it is none."""
    try:
        return ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return ast.Module([], [])


@pytest.mark.parametrize("path", EXTENSIONS, ids=lambda path: str(path.relative_to(ROOT)))
def test_extensions_use_nothing_of_the_core_but_its_public_surface(path):
    to_plugins = path.is_relative_to(ROOT / "examples") or package_of(path).startswith("xla-pjrt-")
    found = inner_names(parsed(path), lambda module: is_public(module, to_plugins))
    assert not [f"{at(path, node)} {name}" for node, name in found]


def is_public_to_tests(module: str) -> bool:
    """Whether tests of plugins and extensions, benchmarks and tools may import a module of xla_core."""
    return is_public(module, True) or module.startswith("xla_core.testing.")


# What these tests look at is the core itself.
TESTS_OF_THE_CORE = {
    "test_process_state.py",  # the state of each of its modules
    "test_public_surface.py",  # which of its modules are public
    "test_vendors.py",  # replaces how it loads a vendor's library
    "test_versions.py",  # the versions of torch and jax that it allows
}
TESTS = [
    *(
        path
        for path in sorted(ROOT.glob("packages/*/tests/**/*.py"))
        if package_of(path) not in ("xla-core", "torch-xla")
    ),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "examples" / "pods").glob("*.py")),
    *sorted((ROOT / "benchmarks").glob("*.py")),
    *sorted((ROOT / "tools").glob("*.py")),
    *(
        path
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.name not in TESTS_OF_THE_CORE
    ),
]


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_benchmarks_and_tools_stand_on_the_public_surface_too(path):
    """With ``xla_core.testing``: what is there besides the conformance suite, no extension may use."""
    found = inner_names(parsed(path), is_public_to_tests)
    assert not [f"{at(path, node)} {name}" for node, name in found]


def test_an_inner_name_is_found_in_code_and_in_scripts():
    code = (
        "from xla_core.recording import trace\n"
        "from xla_core.extension_api import steps\n"
        "from xla_core.extension_api.runtime import client, secret\n"
        "steps.Entry, steps.secret\n"
        "'xla_core.lowering.replay'\n"
        "SCRIPT = '''\n    import os\n    from xla_core.dispatch import views\n'''\n"
    )
    assert [name for _, name in inner_names(ast.parse(code), is_public_to_tests)] == [
        "xla_core.recording.trace",
        "xla_core.extension_api.runtime.secret",
        "'xla_core.lowering.replay'",
        "xla_core.dispatch.views",
        "xla_core.extension_api.steps.secret",
    ]


# What users read; documents for those who work on the core name its modules as they are.
USER_DOCUMENTS = [
    ROOT / "README.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *(
        path
        for path in sorted((ROOT / "docs").glob("*.md"))
        # api.md says of each name of torch_xla where it comes from
        if path.name not in ("api.md", "architecture.md", "dataflow.md")
    ),
]


@pytest.mark.parametrize("path", USER_DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_send_users_to_public_names(path):
    text = path.read_text("utf-8")
    blocks = re.findall(r"^```(?:python)?\n(.*?)^```$", text, re.M | re.S)
    found = [name for block in blocks for _, name in inner_names(script(block), is_public_to_users)]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for named in set(re.findall(r"`(xla_core\.[\w.]*\w)", prose)) - ENTRY_POINT_GROUPS:
        module = max((m for m in MODULES if f"{named}.".startswith(f"{m}.")), key=len)
        name = named.removeprefix(module).strip(".").partition(".")[0]
        if not is_public_to_users(module) or (name and name not in exported(module)):
            found.append(named)
    assert not found


def is_public_to_users(module: str) -> bool:
    """Whether a document may name a module of xla_core, or a folder of public modules."""
    return is_public(module, True) or f"{module}." in PUBLIC_FOLDERS


ENTRY_POINT_GROUPS = {"xla_core.devices", "xla_core.extensions"}
PUBLIC_FOLDERS = {f"xla_core.{name}." for name in ("contract", "extension_api", "pjrt", "testing")}


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
