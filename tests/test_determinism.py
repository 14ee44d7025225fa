"""What docs/determinism.md promises: the same bits cold and warm, again, and from a second compilation."""

from __future__ import annotations

import json

import pytest

_TRAINS = '''
import hashlib, json, os
from pathlib import Path
import torch, torch_xla
from torch import nn
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from xla_core.extension_api import runtime


def bits():
    """A digest of what three steps with dropout, normalization and an embedding make of the parameters."""
    torch.manual_seed(0)
    xm.set_rng_state(7)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.2), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(11, 32), *blocks, nn.Linear(32, 11)).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words = (torch.arange(96).reshape(8, 12) % 11).to("xla")
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        torch_xla.sync()
    whole = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return loss.item().hex() + " " + hashlib.sha256(whole).hexdigest()


def compiled():
    return met.counter_value("UncachedCompile") or 0


found = {"first": bits(), "again": bits(), "compiled": compiled()}
if not found["compiled"]:
    assert met.counter_value("PersistentCacheHit")
else:
    for path in Path(os.environ["XLA_PERSISTENT_CACHE_PATH"]).rglob("*"):
        if path.is_file():
            path.unlink()
    for trace in runtime.traces():
        trace.forget()
    found["second compilation"] = bits()
    assert compiled() > found["compiled"], compiled()
print(json.dumps(found))
'''


@pytest.mark.long
def test_the_same_bits_cold_and_warm_and_again(run_file, tmp_path):
    script = tmp_path / "trains.py"
    script.write_text(_TRAINS)
    runs = []
    for _ in ("cold", "warm"):
        process = run_file(
            script, PJRT_DEVICE="CPU", XLA_PERSISTENT_CACHE_PATH=str(tmp_path / "cache")
        )
        assert process.returncode == 0, process.stderr
        runs.append(json.loads(process.stdout.splitlines()[-1]))
    cold, warm = runs
    assert cold.pop("compiled") > 0
    assert warm.pop("compiled") == 0
    assert len({*cold.values(), *warm.values()}) == 1, runs
