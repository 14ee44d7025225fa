"""docs/operators.md says how the dispatcher carries out every operator, and what was compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from xla_core.testing.internals import overloads_with_rules

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@pytest.fixture(scope="module")
def page():
    sys.path.insert(0, str(TOOLS))
    try:
        import operators_page  # a folder of scripts, not a package
    finally:
        sys.path.remove(str(TOOLS))
    return operators_page


@pytest.fixture(scope="module")
def results(page):
    return json.loads(page.RESULTS.read_text("utf-8"))


@pytest.fixture(autouse=True)
def of_the_same_torch(results):
    if torch.__version__.split("+")[0] != results["torch"]:
        pytest.skip("other versions of PyTorch have other operators")


def test_the_document_is_what_the_dispatcher_does(page):
    assert page.render() == page.DOCUMENT.read_text("utf-8"), "run python tools/operators_page.py"


def test_every_operator_with_a_rule_is_in_it_as_lowered(page):
    rows = {line.split("`")[1]: line for line in page.aten_rows()[2:]}
    registered = [o for o in overloads_with_rules() if o.namespace == "aten"]
    names = {str(o._schema.name).removeprefix("aten::") for o in registered}
    assert len(names) > 600
    # A form that writes stands in the row of the one that does not.
    missing = [n for n in names if "lowered" not in rows.get(n, rows.get(n.removesuffix("_"), ""))]
    assert missing == ["to"]  # its rule is for decompositions; the handler gives the tensor itself


def test_every_row_of_the_results_is_counted(page, results):
    rows = page.rows_of(results["operators"])
    counted = [line.split("|") for line in page.figures(results["operators"])[2:]]
    whole = counted.pop()
    assert int(whole[2]) == sum(letter != "." for letter in rows.values())
    for column in (2, 3, 5, 6, 7):
        assert int(whole[column]) == sum(int(cells[column]) for cells in counted)
    assert all(int(c[2]) == int(c[3]) + int(c[6]) + int(c[7]) for c in counted)


def test_at_least_99_of_100_rows_are_right_and_the_others_have_their_reason(page, results):
    for cells in (line.split("|") for line in page.figures(results["operators"])[2:]):
        # Three operators are about sparse tensors, which may be more than one of 100 of a dtype's rows.
        # Of four a mistake is one by its values only, which are not there when it is recorded.
        apart = 4 if cells[1].strip().startswith("errors") else 3
        assert int(cells[2]) - int(cells[3]) <= max(0.01 * int(cells[2]), apart), cells
    unsaid = {
        name
        for (name, _, _), letter in page.rows_of(results["operators"]).items()
        if letter in page.WORDS and not page.reason("database", name)
    }
    assert not unsaid


def test_every_operator_that_the_cpu_computes_or_that_is_refused_has_its_reason(page):
    unsaid = [
        line
        for line in page.aten_rows()
        if line.endswith("|  |") and ("CPU " in line or "refused" in line)
    ]
    assert not [line for line in unsaid if "not for the CPU |" not in line]
