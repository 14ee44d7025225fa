"""docs/gpu.md: its Python blocks run, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "gpu.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)


def test_python_blocks_run():
    assert len(BLOCKS) == 2
    names = {}
    try:
        for block in BLOCKS:
            exec(compile(block, "<gpu.md>", "exec"), names)  # noqa: S102 - the document's own text
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    for plugin in (names["rocm"], names["oneapi"]):
        assert not plugin.is_available({})  # neither package is installed where this runs


def test_runs_in_the_table_are_those_of_the_tool():
    listed = re.findall(r"^\| `([\w-]+)` \|", PAGE.split("## The runs")[1].split("##")[0], re.M)
    text = (ROOT / "tools" / "gpu_runs.py").read_text("utf-8")
    assert listed == re.findall(r'Run\(\s*"([\w-]+)"', text)


def test_names_of_switches_and_counters_are_there():
    source = "".join(path.read_text("utf-8") for path in ROOT.glob("packages/*/src/**/*.py"))
    for counter in ("DlpackToDevice", "DlpackFromDevice", "XLA_CLIENT_MEM_FRACTION"):
        assert f'"{counter}"' in source and f"`{counter}" in PAGE
    assert hasattr(torch.backends.cudnn, "allow_tf32")
