"""docs/api.md says what the modules really have: every name, its home and its signature."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

import torch_xla

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture(scope="module")
def table():
    sys.path.insert(0, str(TOOLS))
    try:
        import api_table  # a folder of scripts, not a package
    finally:
        sys.path.remove(str(TOOLS))
    return api_table


@pytest.fixture(scope="module")
def rows(table):
    return table.rows()


def test_the_document_is_what_the_modules_have(table, rows):
    written = table.DOCUMENT.read_text("utf-8")
    assert table.render(rows) == written, "run python tools/api_table.py"


def test_every_signature_takes_what_torch_xlas_takes(rows):
    assert not [(r.module, r.name, r.differs) for r in rows if r.differs]


def test_the_names_of_one_process_are_there(table, rows):
    missing = {f"{r.module}.{r.name}" for r in rows if r.where == table.NOT_YET}
    whole = {
        "torch_xla.core.xla_model", "torch_xla.runtime", "torch_xla.version", "torch_xla.amp",
        "torch_xla.amp.syncfree", "torch_xla.backends", "torch_xla.utils.serialization",
        "torch_xla.utils.utils", "torch_xla.utils.checkpoint", "torch_xla.utils.dlpack",
        "torch_xla.utils.closures", "torch_xla.debug.metrics", "torch_xla.debug.profiler",
        "torch_xla.experimental", "torch_xla.experimental.plugins", "lazy_tensor_core.core.lazy_model",
        "torch_xla._XLAC",
    }  # fmt: skip
    assert not {name for name in missing if name.rpartition(".")[0] in whole}
    assert {r.module for r in rows} >= whole


def test_the_cpp_module_has_every_name(rows):
    names = [r.name for r in rows if r.module == "torch_xla._XLAC" and "." not in r.name]
    assert len(set(names)) == 178
    assert set(names) <= set(dir(torch_xla._XLAC))


def test_a_missing_name_raises_as_the_document_says(table, rows):
    for r in rows:
        if r.where == table.NOT_YET:
            with pytest.raises((ImportError, AttributeError)):
                table._look_up(r.module, r.name)


def other(a, b=2, *, c=None):
    return a, b, c


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("other(a, b=2, *, c=())", ""),  # empty and None mean the same
        ("other(a)", ""),
        ("other(a, b=3)", "b=2 instead of 3"),
        ("other(x, b=2)", "takes (a, b)"),
        ("other(a=1)", "needs a"),
        ("other(a, *, d=1)", "lacks d"),
        ("other()", "needs a"),
        ("other(...)", ""),
    ],
)
def test_differences_are_found(table, text, problem):
    wanted, open_end = table.expected(text)
    ours = list(inspect.signature(other).parameters.values())
    assert table.compare(wanted, ours, open_end)[0] == problem
