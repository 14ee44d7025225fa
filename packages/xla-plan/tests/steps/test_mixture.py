"""``examples/pods/mixture.py``: experts over a mesh compute what a loop over tokens does; its step is planned."""

from __future__ import annotations

from pathlib import Path

import pytest

PODS = Path(__file__).resolve().parents[4] / "examples" / "pods"


@pytest.mark.parametrize("capacity", [8.0, 0.5])
def test_experts_compute_what_a_loop_over_tokens_does(script, capacity):
    done = script(
        f"""
        import sys, dataclasses, math
        sys.path.insert(0, {str(PODS)!r})
        import numpy as np
        import torch, torch_xla
        import torch_xla.runtime as xr
        import torch_xla.distributed.spmd as xs
        from torch.nn import functional as F
        from llama import Sharding
        from mixture import Mixture, MixtureShape

        xr.use_spmd()
        mesh = xs.Mesh(np.arange(8), (2, 4), ("fsdp", "expert"))
        shape = MixtureShape(1, 32, 2, 1, 64, 16, head=16, experts=4, capacity={capacity})
        torch.manual_seed(0)
        layer = Mixture(shape, Sharding(mesh, "plain", False, False))
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=0.3)
        x = torch.randn(8, 12, 32)
        places = min(12, math.ceil({capacity} * 2 * 12 / 4))

        def looped(x):
            rows = []
            for sequence in x:
                used = [0] * 4
                out = []
                for token in sequence:
                    likes, experts = torch.softmax(layer.router(token), -1).topk(2)
                    y = torch.zeros(32)
                    for like, expert in zip(likes / likes.sum(), experts.tolist()):
                        used[expert] += 1
                        if used[expert] > places:
                            continue
                        hidden = F.silu(layer.gate.weight[expert] @ token) * (layer.up.weight[expert] @ token)
                        y = y + like * (layer.down.weight[expert] @ hidden)
                    out.append(y)
                rows.append(torch.stack(out))
            return torch.stack(rows)

        expected = looped(x)
        expected.square().sum().backward()
        wanted = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        layer.to("xla")
        for module in layer.modules():
            for p in module.parameters(recurse=False):
                layer.how.mark(p, *module.axes)
        result = layer(x.to("xla"))
        result.square().sum().backward()
        torch.testing.assert_close(result.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-4)
        for p, gradient in zip(layer.parameters(), wanted):
            torch.testing.assert_close(p.grad.cpu(), gradient, rtol=1e-3, atol=1e-3)
        print(xs.wrap_if_sharded(layer.gate.weight).sharding_spec)
        """
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "{devices=[4,1,2]0,4,1,5,2,6,3,7}"


@pytest.mark.long
def test_the_step_is_planned_with_tokens_sent_from_all_to_all(command):
    done = command(
        "run", PODS / "mixture.py:training_step", "--topology", "v5e:2x2", "--mesh", "expert=4",
        "--set", "length=256", "--set", "attention=plain", "--set", "remat=False",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (plan,) = done.plans
    kinds = {row["kind"]: row["count"] for row in plan["figures"]["collectives"]}
    # in each of two layers tokens go to the experts and come back, and so do their gradients; the embedding is
    # split in the features, and its rows are needed by sequences
    assert kinds["all-to-all"] == 2 * 2 * 2 + 2
    lines = {row["kind"]: row["lines"] for row in plan["figures"]["collectives"]}["all-to-all"]
    source = (PODS / "llama.py").read_text().splitlines()
    looked_up = next(n for n, line in enumerate(source, 1) if "F.embedding(" in line)
    assert f"llama.py:{looked_up}" in lines
    assert plan["fits"] and plan["estimate"]["mfu"] > 0
