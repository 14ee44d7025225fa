"""``benchmarks/published_mfu.py``: what it makes of a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*-published-mfu.json"))
CANDIDATE = {
    "topology": "v6e:16x16",
    "mesh": [["fsdp", 256]],
    "options": {"size": "8b", "length": 8192, "batch": 3, "loop": True, "loss_chunks": 4},
}


def test_an_estimate_is_compared_with_what_was_published(tmp_path):
    plan = {
        "candidate": CANDIDATE, "error": "", "fits": True, "memory": {"total": 5},
        "estimate": {"mfu": 0.5005, "mfu_low": 0.4, "mfu_high": 0.6, "seconds": 2.0},
        "figures": {"seconds": {"compile": 3.0}, "host_peak_bytes": 7},
    }  # fmt: skip
    path, target = tmp_path / "plans.json", tmp_path / "rows.json"
    path.write_text(json.dumps([plan]))
    command = [sys.executable, str(ROOT / "benchmarks" / "published_mfu.py"), "--row", "v6e-8b"]
    done = subprocess.run(
        [*command, "--plans", str(path), "--json", str(target)], capture_output=True, text=True, timeout=240
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "compiling" not in done.stderr
    (row,) = json.loads(target.read_text())
    assert row["error"] == pytest.approx(0.1) and row["published_mfu"] == 0.455
    assert row["assumed"].startswith("v6e:16x16 fsdp=256 size=8b")


def test_the_document_has_the_figures_of_the_results():
    text = (ROOT / "docs" / "plan.md").read_text()
    # a later result replaces an earlier one of the same run
    rows = {row["row"]: row for path in RESULTS for row in json.loads(path.read_text())}
    estimated = [row for row in rows.values() if "bounds" in row]
    assert len(estimated) >= 3
    for row in estimated:
        low, high = (f"{bound:.1%}".replace("%", "") for bound in row["bounds"])
        shown = (
            f"{row['estimated_mfu'] * 100:.1f} %",
            f"{low} to {high} %",
            f"{row['error'] * 100:.1f} %",
        )
        assert all(figure in text for figure in shown), shown
