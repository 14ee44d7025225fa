"""Training through outlined repeats gives what training without them gives."""

from __future__ import annotations

import json

import pytest

TRAINING = """
    from xla_core.jax_bridge import jax_private
    from xla_core.compilation import program_table

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
    step = max(program_table.all_programs(), key=lambda p: p.operations)
    text = jax_private.module_text(step.program.stablehlo)
    print(json.dumps({
        "losses": losses,
        "functions": text.count("func.func"),
        "kept": text.count('inlineable = "false"'),
        "donated": len(step.donated),
        "programs": len(program_table.all_programs()),
    }))
"""


def run_training(run_python, script: str, outlined: bool) -> dict:
    # what is compared does not depend on how well the programs are compiled
    options = {"XLA_OUTLINE_REPEATS": str(int(outlined)), "XLA_COMPILE_EFFORT": "fast"}
    printed = run_python(script, **options)
    return json.loads(printed.splitlines()[-1])


def test_outlined_and_inlined_training_are_the_same(run_python, blocks):
    outlined = run_training(run_python, blocks + TRAINING, outlined=True)
    inlined = run_training(run_python, blocks + TRAINING, outlined=False)
    # float32: other fusions round in another order
    assert outlined["losses"] == pytest.approx(inlined["losses"], rel=1e-4)
    assert outlined["kept"] >= 6  # every block calls the functions of its forward and backward
    assert outlined["functions"] < outlined["kept"]  # ... which are fewer than the calls
    assert inlined["kept"] == 0
    assert outlined["donated"] == inlined["donated"]
    assert outlined["programs"] == inlined["programs"]


CONVOLUTIONS = """
    from xla_core.jax_bridge import jax_private
    from xla_core.compilation import program_table

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.block = nn.Conv2d(4, 4, 3, padding=1), Block(8)

        def forward(self, x):
            return self.block(self.convolution(x))

    torch.manual_seed(0)
    model = nn.Sequential(*[Mixed() for _ in range(6)]).to("xla")
    model(torch.randn(2, 4, 8, 8).to("xla")).sum().backward()
    torch_xla.sync()
    step = max(program_table.all_programs(), key=lambda p: p.operations)
    functions = jax_private.module_text(step.program.stablehlo).split("func.func private @")[1:]
    functions = [text for text in functions if text.startswith("xla_repeat")]
    print(json.dumps({"functions": len(functions),
        "inside": sum(text.count("stablehlo.convolution") for text in functions)}))
"""


def test_convolutions_stay_where_their_layouts_are_chosen(run_python, blocks):
    found = run_training(run_python, blocks + CONVOLUTIONS, outlined=True)
    assert found["functions"] > 0
    assert found["inside"] == 0


# Five steps in one program. Some of the function's numbers lie in front of the one that its index argument names.
OUT_OF_ORDER = """
    def train(device):
        torch.manual_seed(0)
        parameters = [torch.randn(3).to(device).requires_grad_() for _ in range(4)]
        optimizer = torch.optim.RAdam(parameters, lr=0.01, capturable=device == "xla")
        for _ in range(5):
            optimizer.zero_grad()
            sum((p * p).sum() for p in parameters).backward()
            optimizer.step()
        return torch.stack([p.detach() for p in parameters]).cpu()

    print(json.dumps({"difference": (train("xla") - train("cpu")).abs().max().item()}))
"""


def test_numbers_of_a_repeat_that_are_in_another_order(run_python, blocks):
    assert run_training(run_python, blocks + OUT_OF_ORDER, outlined=True)["difference"] < 1e-5
