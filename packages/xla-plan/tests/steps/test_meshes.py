"""The steps of ``examples/pods`` compute the same over every mesh and with every way to save memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PODS = Path(__file__).resolve().parents[4] / "examples" / "pods"
LOOP = {"loop": True}
VARIANTS = {
    "batch": ("llama", {"data": 2, "fsdp": 4}, LOOP),
    "positions and heads": ("llama", {"fsdp": 2, "sequence": 2, "tensor": 2}, LOOP),
    "products saved": ("llama", {"fsdp": 8}, {**LOOP, "remat": "products"}),
    "narrow products saved": ("llama", {"fsdp": 8}, {**LOOP, "remat": "narrow"}),
    "stages and heads": ("pipeline", {"stage": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 4}),
}


@pytest.mark.long
def test_losses_are_those_of_a_split_batch(script):
    done = script(
        f"""
        import importlib, json, sys
        sys.path.insert(0, {str(PODS)!r})
        import numpy as np
        import torch, torch_xla
        import torch_xla.runtime as xr
        import torch_xla.distributed.spmd as xs

        xr.use_spmd()
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(1024, (16, 33), generator=generator)

        def fill(model):
            # the same values for the layers of a loop and those of stages
            with torch.no_grad():
                for p in model.parameters():
                    values = torch.Generator().manual_seed(p.numel())
                    flat = torch.randn(p.numel(), generator=values) * 0.02
                    p.copy_(flat.reshape(p.shape).to("xla"))

        losses = {{}}
        for name, (module, axes, options) in json.loads({json.dumps(VARIANTS)!r}).items():
            mesh = xs.Mesh(np.arange(8), tuple(axes.values()), tuple(axes))
            model, _, step, _ = importlib.import_module(module).training_step(
                mesh, size="tiny", sequences=16, length=32, attention="plain", **options
            )
            fill(model)
            batch = ids.to("xla")
            losses[name] = []
            for _ in range(3):
                loss = step(batch[:, :-1], batch[:, 1:])
                torch_xla.sync()
                losses[name].append(loss.item())
        # what a pipeline cannot do is refused, not left out
        for options in ({{"attention": "flash"}}, {{"remat": "narrow", "loop": True}}, {{"layers": 3}}):
            try:
                importlib.import_module("pipeline").training_step(mesh, **options)
                raise SystemExit(f"{{options}} were taken")
            except ValueError:
                pass
        print(json.dumps(losses))
        """
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads(done.stdout.splitlines()[-1])
    assert list(losses) == list(VARIANTS)
    wanted = losses.pop("batch")
    assert wanted[0] > wanted[1] > wanted[2]
    for name, found in losses.items():  # sums in bfloat16 are taken in other orders
        assert found == pytest.approx(wanted, abs=1e-3), name
