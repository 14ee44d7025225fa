"""Memory that does not suffice: the error names what holds it. Allocations really fail, under a limit."""

from __future__ import annotations

FILLS = """
    import resource
    from pathlib import Path
    import torch
    from torch import nn
    import torch_xla

    model = nn.Linear(1024, 2048, bias=False).to("xla")  # 8 MB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 1024).to("xla")).sum().backward()
    optimizer.step()
    scale, kept = torch.ones(1, device="xla"), []

    def keep():
        kept.append(torch.zeros(1 << 25, device="xla") + scale)  # 128 MB
        torch_xla.sync(wait=True)

    keep()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (700 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        while len(kept) < 20:
            keep()
    except torch.OutOfMemoryError as error:
        kept.pop()
        print(len(kept), error)
    del kept[2:]
    keep()  # the device works on
    print("the last is", kept[-1][0].item())
"""


def test_the_largest_tensors_that_hold_memory_are_named(run_python):
    said = run_python(FILLS)
    number, _, text = said.partition(" ")
    assert "RESOURCE_EXHAUSTED" in text
    held = text.partition("Tensors hold ")[2]
    assert held, text
    assert int(number) >= 3
    assert f"{number} x float32[33554432]" in held, text
    # weight and momentum, of which each has a name, and the gradient
    assert "3 x float32[2048,1024] (gradient of weight and 2 more)" in held, text
    assert "XLA_TRACK_MEMORY=1" in held
    assert text.rstrip().endswith("the last is 1.0")
