"""Cache keys hold the source of all code that lowers: an edited rule of another package is never old code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from xla_core.compilation import program_identity
from xla_core.execution import runtime
from xla_core.operators import lowering_registry, source_digests
from xla_core.operators.extensions import extensions

RULES = """
import torch
from xla_core.operators.lowering_registry import rule
from acme_rules import (
    helper,  # the factor
)

library = torch.library.Library("acme", "DEF")
library.define("scaled(Tensor x) -> Tensor")
library.impl("scaled", torch.empty_like, "Meta")

@rule(torch.ops.acme.scaled.default)
def scaled(x):
    return x * helper.factor() + 1
"""
HELPER = """
def factor():
    from .constants import FACTOR
    return FACTOR
"""
SCRIPT = """
import sys
sys.dont_write_bytecode = True  # a file edited within a second is another one
sys.path.insert(0, {folder!r})
import torch, torch_xla
import acme_rules.rules
from xla_core.support import counters

x = torch.ones(1).to("xla")
value = torch.ops.acme.scaled(x).item()
found = counters.all_counters()
print(int(value), found.get("UncachedCompile", 0), found.get("PersistentCacheHit", 0))
"""


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "vendor" / "acme_rules"
    folder.mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "rules": RULES,
        "helper": HELPER,
        "constants": "FACTOR = 2\n",
        "training": "print('unrelated')\n",
    }.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_an_edited_rule_of_another_package_misses(run_python, package, tmp_path):
    def outcome(folder=package.parent):
        cache = str(tmp_path / "cache")
        said = run_python(SCRIPT.format(folder=str(folder)), XLA_PERSISTENT_CACHE_PATH=cache)
        return said.splitlines()[-1]

    assert outcome() == "3 1 0"
    elsewhere = tmp_path / "checkout"
    shutil.copytree(package.parent, elsewhere)
    (elsewhere / "acme_rules" / "training.py").write_text("print('edited')\n")
    assert outcome(elsewhere) == "3 0 1"
    (package / "constants.py").write_text("FACTOR = 5\n")
    assert outcome() == "6 1 0"
    (package / "rules.py").write_text(RULES.replace("+ 1", "+ 4"))
    assert outcome() == "9 1 0"


def test_a_file_stands_for_what_it_imports_of_its_package(package):
    rules = str(package / "rules.py")

    def changes(name, text):
        path = package / name
        former = path.read_text() if path.exists() else None
        before = fresh(rules)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        changed = fresh(rules) != before
        if former is None:
            path.unlink()
        else:
            path.write_text(former)
        return changed

    assert changes("rules.py", RULES + "\n")
    assert changes("helper.py", HELPER + "\n")
    assert changes("constants.py", "FACTOR = 3\n")
    assert changes("__init__.py", "ANSWER = 42\n")  # "from acme_rules import helper" may mean it
    assert not changes("training.py", "")
    assert not changes("another.py", "")


def fresh(*starts):
    source_digests._digest.cache_clear()
    source_digests._read.cache_clear()
    return source_digests.digest(starts)


@pytest.mark.parametrize(
    "text",
    [
        "import pack.inner.deep",
        "import os, pack.inner.deep as deep",
        "from pack.inner import deep",
        "from pack.inner import \\\n    deep as d",
        "from pack.inner.deep import value",
        "from .inner import deep",
        "from .inner.deep import (\n    value,\n)",
        "def f():\n    from pack.inner import deep",
        "from . import second",
        "from .inner import *",
    ],
)
def test_every_form_of_import_is_followed(tmp_path, text):
    inner = tmp_path / "pack" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("from ..inner.deep import value\n")
    (inner / "deep.py").write_text("value = 1\n")
    (inner.parent / "second.py").write_text("from .inner import deep\n")
    start = inner.parent / "start.py"
    start.write_text(text + "\n")
    before = fresh(str(start))
    assert fresh(str(start)) == before
    (inner / "deep.py").write_text("value = 2\n")
    assert fresh(str(start)) != before


def test_a_script_stands_for_the_modules_beside_it(tmp_path):
    (tmp_path / "script.py").write_text("import numpy\nimport beside\n")
    (tmp_path / "beside.py").write_text("a = 1\n")
    before = fresh(str(tmp_path / "script.py"))
    (tmp_path / "beside.py").write_text("a = 2\n")
    assert fresh(str(tmp_path / "script.py")) != before


def test_what_cannot_be_read_is_left_out(tmp_path):
    assert fresh("<string>", str(tmp_path / "none.py")) == fresh()


def test_two_checkouts_have_one_digest(tmp_path, monkeypatch):
    root = Path(program_identity.__file__).parents[1]
    shutil.copytree(root, tmp_path / "elsewhere" / "xla_core")
    here = program_identity.lowering_version()
    monkeypatch.setattr(program_identity, "_ROOT", tmp_path / "elsewhere" / "xla_core")
    assert program_identity.lowering_version.__wrapped__() == here
    (tmp_path / "elsewhere" / "xla_core" / "lowering" / "evaluate.py").write_text("")
    assert program_identity.lowering_version.__wrapped__() != here


def test_a_function_without_a_file_counts_by_its_code():
    def digest(text):
        return source_digests.code_digest(compile(text, "<prompt>", "exec"))

    text = "def f(x):\n    def g():\n        return {}\n    return g() + x\n"
    assert digest(text.format(1)) == digest(text.format(1)) != digest(text.format(2))
    assert digest("def f(x):\n    return x.sin()\n") != digest("def f(x):\n    return x.cos()\n")


def test_all_that_registers_rules_is_in_the_key():
    outside = {name for name in lowering_registry.source_files() if "xla_core" not in name}
    entries = dict(program_identity.environment(runtime.client()))
    assert len(entries["rules"]) == 32
    assert all(Path(name).is_file() for name in outside)
    modules = program_identity._shaping_modules(runtime.client(), extensions())
    assert "xla_pjrt_cpu.client" in modules
    assert not any(name.startswith("xla_debug") for name in modules)
