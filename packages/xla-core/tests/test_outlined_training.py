"""Training through outlined repeats gives what training without them gives."""

from __future__ import annotations

import json

import pytest

TRAINING = """
    import json, torch, torch_xla
    from torch import nn
    from xla_core import _jax_compat, programs

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x):
            hidden = nn.functional.gelu(self.up(self.norm(x)))
            return x + self.dropout(self.down(hidden))

    def train(device):
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(16) for _ in range(6)], nn.Linear(16, 3)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data = torch.randn(8, 16).to(device)
        target = torch.randint(3, (8,)).to(device)
        losses = []
        for _ in range(100):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            schedule.step()
            torch_xla.sync()
            losses.append(loss.item())
        return losses

    torch_xla.manual_seed(7)
    losses = train("xla")
    step = max(programs.all_programs(), key=lambda p: p.operations)
    text = _jax_compat.module_text(step.program.stablehlo)
    print(json.dumps({
        "losses": losses,
        "functions": text.count("func.func"),
        "kept": text.count('inlineable = "false"'),
        "donated": len(step.donated),
        "programs": len(programs.all_programs()),
    }))
"""


def run_training(run_python, outlined: bool) -> dict:
    printed = run_python(TRAINING, XLA_OUTLINE_REPEATS=str(int(outlined)))
    return json.loads(printed.splitlines()[-1])


def test_outlined_and_inlined_training_are_the_same(run_python):
    outlined = run_training(run_python, outlined=True)
    inlined = run_training(run_python, outlined=False)
    # float32: other fusions round in another order
    assert outlined["losses"] == pytest.approx(inlined["losses"], rel=1e-4)
    assert outlined["kept"] >= 6  # every block calls the functions of its forward and backward
    assert outlined["functions"] < outlined["kept"]  # ... which are fewer than the calls
    assert inlined["kept"] == 0
    assert outlined["donated"] == inlined["donated"]
    assert outlined["programs"] == inlined["programs"]
