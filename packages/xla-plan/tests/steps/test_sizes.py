"""The files of ``examples/pods`` that are named after a size: each has the step of the published model."""

from __future__ import annotations

from pathlib import Path

import pytest

PODS = Path(__file__).resolve().parents[4] / "examples" / "pods"
PARAMETERS = {"llama_8b": 8_030_261_248, "llama_70b": 70_553_706_496, "llama_405b": 405_853_388_800}
"""Those of Llama 3 (8 B, 70 B) and 3.1 (405 B), as their model cards count them."""


def test_each_size_has_a_file_with_all_its_parameters(script):
    pytest.importorskip(
        "libtpu", reason="tensors of this size need a device that holds only their shapes"
    )
    done = script(
        f"""
        import numpy as np
        import torch_xla.runtime as xr
        import torch_xla.distributed.spmd as xs
        from xla_plan.steps.candidate import find_step

        xr.use_spmd()
        mesh = xs.Mesh(np.arange(4), (4,), ("fsdp",))
        for name in {list(PARAMETERS)}:
            model, _, step, flops = find_step(f"{PODS}/{{name}}.py:training_step")(mesh, batch=2)
            print(name, sum(p.numel() for p in model.parameters()), *step.__defaults__[0].shape)
        """,
        PJRT_DEVICE="TPU", XLA_AOT_TOPOLOGY="v5e:2x2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert {name: int(count) for name, count, *_ in rows} == PARAMETERS
    assert [shape for _, _, *shape in rows] == [["8", "2048"], ["8", "4096"], ["8", "4096"]]
