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


def test_every_public_name_of_2_9_is_in_the_table_and_most_are_there(table, rows):
    public = table.module_level(rows)
    assert len({(r.module, r.name) for r in public}) == len(public) == 728
    assert sum(r.there for r in public) >= 0.85 * len(public)


def test_what_is_not_there_has_its_reason(table, rows):
    assert not [(r.module, r.name) for r in rows if r.where == table.NOT_YET]
    found = {(r.module, r.name): r for r in rows}
    for key, (kind, why) in table.reasons().items():
        assert found[key].there == (kind == "raises"), key
        assert why


def test_what_raises_says_what_to_use_instead(table, rows):
    raising = [r for r in rows if r.why and r.there]
    assert raising
    for r in raising:
        with pytest.raises(NotImplementedError, match="use "):
            table._look_up(r.module, r.name)()


def test_the_cpp_module_has_every_name(rows):
    names = [r.name for r in rows if r.module == "torch_xla._XLAC" and "." not in r.name]
    assert len(set(names)) == 178
    assert set(names) <= set(dir(torch_xla._XLAC))


def test_a_missing_name_raises_as_the_document_says(table, rows):
    for r in rows:
        if not r.there:
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
