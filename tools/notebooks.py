"""Writes the first pages of the documentation as notebooks, without outputs.

``python tools/notebooks.py`` writes ``docs/notebooks/*.ipynb`` from the pages in PAGES: their Python blocks are
the code cells, what stands between them the text. ``tests/test_pages.py`` runs the blocks in their order, and
says when a notebook was forgotten.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
NOTEBOOKS: Final = DOCS / "notebooks"
PAGES: Final = ("get_started", "migration", "how_it_works")

_CODE: Final = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
# What a page says that its blocks print: a notebook shows what they do print. Other comments are for tests.
_SHOWN: Final = re.compile(r"^<!-- output -->\n+```text\n.*?^```\n|^<!-- .*?-->\n", re.M | re.S)
_LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)(?=\))")


def cells(text: str) -> list[tuple[str, str]]:
    """The cells of a page, each ``(kind, text)`` with the kinds of Jupyter."""
    parts = _CODE.split(_SHOWN.sub("", text))
    kinds = (("markdown", "code")[n % 2] for n in range(len(parts)))
    return [(kind, part.strip()) for kind, part in zip(kinds, parts, strict=True) if part.strip()]


def notebook(text: str) -> str:
    """A page as the JSON of a notebook (format 4.5); links lead to the pages beside its folder."""
    listed: list[dict[str, object]] = []
    for number, (kind, part) in enumerate(cells(text)):
        shown = part if kind == "code" else _LINK.sub(r"../\1", part)
        cell: dict[str, object] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        listed.append(cell | {"source": shown.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": listed,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def written() -> dict[Path, str]:
    """The files and what should be in them."""
    return {
        NOTEBOOKS / f"{page}.ipynb": notebook((DOCS / f"{page}.md").read_text("utf-8"))
        for page in PAGES
    }


def main() -> None:
    """Rewrite the notebooks."""
    NOTEBOOKS.mkdir(exist_ok=True)
    for path, text in written().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
