"""Rules of the repository that no linter knows; each failure names file and line."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import (
    MODULES,
    PACKAGES,
    ROOT,
    SOURCES,
    at,
    module_name,
    package_of,
    parsed,
)

from xla_core.support import own_packages

MOST_FILE_LINES = 500
MOST_FUNCTION_LINES = 50
# Benchmarks and tools may list what they measure in one function.
MOST_LINES_OUTSIDE_PACKAGES = 80
# Longer ones, and why.
LONG_FUNCTIONS = {
    "trace.py record": "runs for each operator: unrolled, as each call would slow down all of them",
}
# The folders that alone touch private parts of torch and of jax.
TORCH_PRIVATE_HOME = "xla_core/torch_bridge"
JAX_PRIVATE_HOME = "xla_core/jax_bridge"
# The folders of xla_core, from the bottom up: each imports only itself and those before it. The same for
# the other packages, whose remaining modules (entry points, settings) may import all of them.
LAYERS = {
    "xla_core": (
        "contract", "support", "jax_bridge", "torch_bridge", "multiprocess", "plugins", "operators",
        "recording", "lowering", "lowering.rules", "compilation", "varying", "pjrt", "launching", "execution",
        "dispatch", "dynamo", "torch_features", "capture", "computations", "builder", "kernels", "export", "api",
        "extension_api", "attach", "testing",
    ),
    "xla_dist": (
        "settings", "operators", "job_health", "processes", "collectives", "data_parallel", "fsdp",
        "testing",
    ),
    "xla_spmd": ("sharding", "lowering", "tensors", "training", "reports", "checkpoint"),
    "xla_plan": ("compiled", "steps", "planning", "reports"),
    "xla_debug": ("settings", "stacks", "steps", "recompile", "tracebacks", "live", "run_report", "cli"),
}  # fmt: skip
MOST_MODULES_IN_A_FOLDER = 16
# One file per family of operators is a catalogue; the names of torch_xla's modules are torch_xla's.
CATALOGUES = ("/lowering/rules", "/torch_xla/experimental")
OWN_CODE = [*SOURCES, *sorted((ROOT / "examples").glob("*.py")), ROOT / "toxfile.py"]
OWN_CODE += [*sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "tools").glob("*.py"))]


IMPORT_NAMES = {
    package.name: {path.parent.name for path in (package / "src").glob("*/__init__.py")}
    for package in PACKAGES
}


def imports(tree: ast.AST) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Every absolute dotted name that import statements in ``tree`` may load."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node, node.module
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def import_graph() -> dict[str, set[str]]:
    """Module -> modules of this repository that it imports, those for types only included."""
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        targets = {target for _, target in imports(parsed(path))}
        graph[name] = {target for target in targets if target in MODULES and target != name}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for following in graph[waiting.pop()] - seen:
                seen.add(following)
                waiting.append(following)
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {frozenset({b for b in reach[a] if a in reach[b]} | {a}) for a in reach}
    return [set(group) for group in groups if len(group) > 1]


def readme_commands() -> list[str]:
    """The commands in README's fenced blocks without a language, in order."""
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    return [block.strip() for block in blocks]


def test_ci_runs_the_readmes_test_command_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line.strip() and not line.startswith("#")]
    strict, into_root, *tests = commands
    assert strict == "set -euo pipefail"
    assert into_root == 'cd "$(dirname "${BASH_SOURCE[0]}")/.."'
    assert tests == [readme_commands()[1]]


def test_readmes_first_command_runs_the_example_on_pinned_versions():
    command = readme_commands()[0]
    assert "pip install -c constraints.txt " in command
    assert command.endswith("python examples/train_digits.py")
    named = set(re.findall(r"packages/([\w-]+)", command))
    assert named <= {package.name for package in PACKAGES}


def test_links_in_documents_lead_somewhere():
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    documents += ROOT.glob("packages/*/README.md")
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text())
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_table_has_a_key_twice(path):
    # Python keeps the last one and says nothing; ruff sees constants only
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Dict):
            keys = [ast.unparse(key) for key in node.keys if key is not None]
            assert len(keys) == len(set(keys)), f"line {node.lineno}"


def test_every_constraint_pins_one_version():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    loose = [line for line in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][\w.]*", line)]
    assert not loose
    names = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in pins]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_package_is_complete(package):
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["name"] == package.name
    assert (package / "README.md").read_text().strip()
    # a link, so that wheels have it: license files lie inside of a project
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert list((package / "tests").rglob("test_*.py"))
    for name in IMPORT_NAMES[package.name]:
        assert (package / "src" / name / "py.typed").is_file(), name


def test_packages_are_listed_once():
    folders = {package.name.replace("-", "_") for package in PACKAGES}
    assert {*own_packages.PACKAGES, "torch_xla"} == folders


def test_packages_have_one_version():
    projects = [tomllib.loads((p / "pyproject.toml").read_text())["project"] for p in PACKAGES]
    versions = {project["name"]: project["version"] for project in projects}
    # the name that libraries look for carries the version of the API that they compare, and ours
    alias = versions.pop("torch-xla")
    assert len(set(versions.values())) == 1
    assert alias.endswith(f"+xla.core.{versions['xla-core']}")


def test_there_are_no_init_files_in_tests():
    # Under --import-mode=importlib the second package's modules of one name would not run.
    assert not list(ROOT.glob("packages/*/tests/**/__init__.py"))
    assert not list(ROOT.glob("tests/**/__init__.py"))


def test_folders_of_tests_mirror_those_of_sources():
    for package in PACKAGES:
        tests = {path.parent for path in (package / "tests").rglob("test_*.py")}
        names = {folder.relative_to(package / "tests") for folder in tests}
        sources = [path for path in (package / "src").glob("*") if path.is_dir()]
        known = {path.relative_to(source) for source in sources for path in source.rglob("*")}
        assert names <= known | {Path()}
        sizes = {folder: len(list(folder.glob("test_*.py"))) for folder in tests}
        sizes = {f: size for f, size in sizes.items() if not f.as_posix().endswith(CATALOGUES)}
        assert not [f for f, size in sizes.items() if size > MOST_MODULES_IN_A_FOLDER]


def test_modules_do_not_import_each_other_in_circles():
    graph = import_graph()
    edges = [
        f"{name} imports {', '.join(sorted(graph[name] & group))}"
        for group in cycles(graph)
        for name in sorted(group)
    ]
    assert not edges, "\n".join(edges)


def test_the_cycle_finder_finds_a_cycle():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]


def layer_of(module: str) -> int | None:
    """The position of a module's folder among its package's layers; None beside them."""
    package, _, rest = module.partition(".")
    layers = LAYERS.get(package, ())
    held = [n for n, layer in enumerate(layers) if f"{rest}.".startswith(f"{layer}.")]
    return max(held, key=lambda n: len(layers[n]), default=None)


def imported_modules(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """Every import of a module of ours, those for types only included."""
    for node, target in imports(parsed(path)):
        if target in MODULES and not (
            isinstance(node, ast.ImportFrom)
            and target == node.module
            and all(f"{target}.{alias.name}" in MODULES for alias in node.names)
        ):
            yield node, target


def test_a_layer_imports_only_those_below():
    upwards = [
        f"{at(path, node)} imports {target}"
        for name, path in MODULES.items()
        for node, target in imported_modules(path)
        if (own := layer_of(name)) is not None and target.split(".")[0] == name.split(".")[0]
        if (other := layer_of(target)) is None or other > own
    ]
    assert not upwards, "\n".join(upwards)


# Dotted names in strings that are no modules: entry point groups, a name in saved models, a rendezvous.
NO_MODULES = {
    "xla_core.devices",
    "xla_core.extensions",
    "xla_core.export.Nothing",
    "torch_xla.plugins",
    "torch_xla.core.xla_model.do_on_ordinals",
}


def names_of(module: str) -> set[str]:
    """What a module defines or imports at its top level."""
    names: set[str] = set()
    for node in ast.walk(parsed(MODULES[module])):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_modules_named_in_strings_exist():
    # one that was renamed would be looked for in vain, without an error
    own = "|".join(sorted(name for names in IMPORT_NAMES.values() for name in names))
    lost = []
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            name = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
            if not isinstance(name, str) or not re.fullmatch(rf"(?:{own})(?:\.\w+)+", name):
                continue
            module, _, last = name.rpartition(".")
            found = name in MODULES or (module in MODULES and last in names_of(module))
            if not found and name not in NO_MODULES:
                lost.append(f"{at(path, node)} {name}")
    assert not lost


def test_every_folder_is_a_layer_or_in_one():
    flat = [name for name, path in MODULES.items() if path.name == "__init__.py"]
    nowhere = [n for n in flat if n.split(".")[0] in LAYERS and "." in n and layer_of(n) is None]
    assert not nowhere


def test_no_folder_has_too_many_modules():
    folders = {path.parent for path in SOURCES}
    folders = {folder for folder in folders if not folder.as_posix().endswith(CATALOGUES)}
    sizes = {folder: len(list(folder.glob("[!_]*.py"))) for folder in folders}
    assert not [folder for folder, size in sizes.items() if size > MOST_MODULES_IN_A_FOLDER]


def test_no_function_imports_our_own_packages():
    own = {name for names in IMPORT_NAMES.values() for name in names}
    found = [
        f"{at(path, node)} imports {target}"
        for path in SOURCES
        for function in functions(path)
        for node, target in imports(function)
        if target.split(".")[0] in own
    ]
    assert not found


def test_packages_beside_each_other_do_not_import_each_other():
    allowed = IMPORT_NAMES["xla-core"]
    siblings = {name for names in IMPORT_NAMES.values() for name in names} - allowed
    found = [
        f"{at(path, node)} imports {target}"
        for path in SOURCES
        for node, target in imports(parsed(path))
        if target.split(".")[0] in siblings - IMPORT_NAMES[package_of(path)]
    ]
    assert not found


RECORDING = [path for path in SOURCES if path.parent.as_posix().endswith("xla_core/recording")]
# What a step is made of. What stores their attributes by name counts as well.
STEP_CLASSES = (
    "Entry", "Input", "Operation", "Root", "StepState", "StepValues", "Storage", "Trace", "View",
    "XLATensor",
)  # fmt: skip
STORES_BY_NAME = ("setattr", "storing", "storing_each")
# Attributes of other classes that have the same names, as they are written down.
NAMESAKES = frozenset({"error.plan", "failure.plan", "log.first", "output.args", "node.values"})


def attributes_of(definition):
    """The attributes of a class: its slots, and what its body and its methods give a type or a value."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from ast.literal_eval(node.value)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []
    for node in definition.body:
        if isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)


def stores(tree):
    """What a module writes to: attributes of something else than ``self``, also those named in texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield from [(node, node.attr)] if ast.unparse(node.value) != "self" else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in STORES_BY_NAME:
            for text in (n for a in node.args for n in ast.walk(a) if isinstance(n, ast.Constant)):
                if isinstance(text.value, str):
                    yield node, text.value


def test_what_a_step_is_made_of_is_written_in_one_folder():
    """By methods of ``Trace``, ``Storage`` and ``Entry`` and by ``tensor_on`` elsewhere: none is half written."""
    classes = {
        node.name: node
        for path in RECORDING
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and node.name in STEP_CLASSES
    }
    assert sorted(classes) == sorted(STEP_CLASSES)
    fields = {name for node in classes.values() for name in attributes_of(node)}
    assert {
        "_s",
        "vid",
        "buffer",
        "annotation",
        "forbidden",
        "unreadable",
        "region",
        "tally",
    } <= fields
    written = [
        f"{at(path, node)} {name}"
        for path in SOURCES
        if path not in RECORDING
        for node, name in stores(parsed(path))
        if name in fields and ast.unparse(node) not in NAMESAKES
    ]
    assert not written


def test_a_plugin_never_sees_torch():
    found = [
        f"{at(path, node)} imports {target}"
        for path in SOURCES
        if package_of(path).startswith("xla-pjrt-")
        for node, target in imports(parsed(path))
        if target.split(".")[0] in {"torch", "torch_xla"}
    ]
    assert not found


def attribute_chains(path: Path) -> Iterator[tuple[ast.expr, str]]:
    """Dotted names in expressions, such as ``torch._C.Generator``."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if re.fullmatch(r"[\w.]+", text):
                yield node, text


def private_uses(pattern: str, home: str) -> list[str]:
    found = set()
    for path in SOURCES:
        if f"/{home}/" in path.as_posix():
            continue
        names = [*imports(parsed(path)), *attribute_chains(path)]
        found |= {at(path, node) for node, name in names if re.match(pattern, name)}
    return sorted(found)


def test_torchs_private_parts_are_used_in_one_place():
    assert not private_uses(r"(torch\._C|ctypes)(\.|$)", TORCH_PRIVATE_HOME)


def test_jaxs_private_parts_are_used_in_one_place():
    assert not private_uses(r"(jax\._src|jaxlib)(\.|$)", JAX_PRIVATE_HOME)


def reads_of_error_texts(tree: ast.AST) -> Iterator[ast.AST]:
    """Places that look for words in the text of an error: ``in str(error)``, ``str(error).startswith``, ..."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)}
    names |= {"error", "exception"}

    def is_text(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("str", "repr")
            and len(node.args) == 1
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id in names
        )

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            if any(map(is_text, [node.left, *node.comparators])):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            if method in ("startswith", "endswith", "find") and is_text(node.func.value):
                yield node
            if method in ("search", "match", "fullmatch") and any(map(is_text, node.args)):
                yield node


def test_errors_are_told_apart_by_class():
    """Errors of torch and of XLA that have no class of their own: in the bridges, each in one function."""
    homes = (TORCH_PRIVATE_HOME, "xla_core/jax_bridge")
    reads = [
        at(path, node)
        for path in SOURCES
        if not any(home in path.as_posix() for home in homes)
        for node in reads_of_error_texts(parsed(path))
    ]
    assert not reads


def test_reads_of_error_texts_are_seen():
    script = """
try:
    run()
except RuntimeError as e:
    a = "words" in str(e)
    b = str(e).startswith("words")
    c = PATTERN.search(str(e))
    d = str(e)
"""
    assert len(list(reads_of_error_texts(ast.parse(script)))) == 3


@pytest.mark.parametrize("path", OWN_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    assert len(path.read_text("utf-8").splitlines()) <= MOST_FILE_LINES
    most = MOST_FUNCTION_LINES if path in SOURCES else MOST_LINES_OUTSIDE_PACKAGES
    long = [
        f"{at(path, node)} {node.name}"
        for node in functions(path)
        if node.end_lineno - node.lineno + 1 > most
        and f"{path.name} {node.name}" not in LONG_FUNCTIONS
    ]
    assert not long


# Functions that nothing in the repository names but their definition, and who calls them.
CALLED_FROM_OUTSIDE = {
    "set_device": "torch.xla: torch asks the module of a device type for it",
    "counter_increment": "xla_debug.metrics: users count in their own code",
}


def test_every_function_is_used():
    folders = ("packages", "tests", "examples", "benchmarks", "tools")
    files = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in (".py", ".toml")]
    words = Counter(word for path in files for word in re.findall(r"\w+", path.read_text("utf-8")))
    found = [
        f"{at(path, node)} {node.name}"
        for path in SOURCES
        if not module_name(path).startswith("torch_xla")
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list
        if words[node.name] < 2 and node.name not in CALLED_FROM_OUTSIDE
    ]
    assert not found


def is_empty(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether nothing but ``pass`` or ``...`` follows the docstring."""
    rest = [
        statement
        for statement in node.body
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]
    return all(isinstance(statement, ast.Pass) for statement in rest)


def declares_only(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a protocol, an abstract method, an overload or a hook specification."""
    marks = [*node.decorator_list, *getattr(node, "bases", ())]
    return any(
        re.search("Protocol|abstract|overload|hookspec", ast.unparse(mark)) for mark in marks
    )


def test_public_functions_do_something():
    found = []
    for path in OWN_CODE:
        declared = {
            id(inner)
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.ClassDef) and declares_only(node)
            for inner in ast.walk(node)
        }
        found += [
            f"{at(path, node)} {node.name}"
            for node in functions(path)
            if not node.name.startswith("_") and id(node) not in declared
            if is_empty(node) and not declares_only(node)
        ]
    assert not found


VAGUE = {"found", "made", "said", "told"}


def test_variables_say_what_they_hold():
    named = [
        f"{at(path, name)} {name.id}"
        for path in SOURCES
        for function in functions(path)
        for name in ast.walk(function)
        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name.id in VAGUE
    ]
    assert not named
