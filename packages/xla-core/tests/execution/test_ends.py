"""How a process ends while threads of ours are inside C++: with the status that it would have without them."""

from __future__ import annotations

import functools
import itertools
import os
import textwrap

import pytest

BUSY = {
    "a step closure": """
        def note(value):
            value.cpu()
            print("done", flush=True)

        for _ in range(3):
            xm.add_step_closure(note, (long(),), run_async=True)
            xm.mark_step()
    """,
    "a callback": """
        from xla_core.torch_features.ready_callbacks import on_ready_callback

        for _ in range(3):
            on_ready_callback(long(), lambda _tensor: print("done", flush=True))
    """,
    "the compiler": """
        for number in range(3):
            value = torch.ones(number + 20, 20, device="xla")
            for other in range(80):
                value = value.sin() + other
            torch_xla.sync()
            print("done", flush=True)
    """,
    "an upload": """
        import torch_xla.distributed.parallel_loader as pl

        data = [torch.randn(1000, 1000) for _ in range(300)]
        batches = iter(pl.MpDeviceLoader(data, torch_xla.device(), device_prefetch_size=200))
        for _ in range(3):
            next(batches)
            print("done", flush=True)
    """,
}
ENDS = {
    "falls off": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "raises": ("raise ValueError", 1),
    "is interrupted": ("raise KeyboardInterrupt", -2),
}
PROGRAM = """
    import faulthandler, sys
    import torch, torch_xla
    import torch_xla.core.xla_model as xm

    faulthandler.enable()

    def long():
        value = torch.ones(500, 500, device="xla")
        for _ in range(60):
            value = value @ value * 1e-3
        return value
"""


@pytest.fixture
def ends(program_servers):
    """A function that runs a program which keeps a thread busy and ends; it says how often that was done."""
    return functools.partial(_ends, program_servers)


def _ends(program_servers, busy, end):
    code, status = ENDS[end]
    program = "\n".join(map(textwrap.dedent, (PROGRAM, BUSY[busy], code)))
    options = {"cwd": ".", "environment": dict(os.environ), "timeout": 240}
    done = next(program_servers).run(program, **options)
    assert done.returncode == status, done.stderr
    assert "terminate" not in done.stderr
    return done.stdout.split().count("done")


@pytest.mark.parametrize(
    ("busy", "end"),
    [
        ("a step closure", "falls off"),
        ("a step closure", "raises"),
        ("a callback", "sys.exit"),
        ("the compiler", "falls off"),
    ],
)
def test_a_busy_thread_ends_before_python(ends, busy, end):
    """It aborted the process (SIGABRT) when it came back from C++; what it was given is done."""
    assert ends(busy, end) == 3


@pytest.mark.sweep
@pytest.mark.parametrize(("busy", "end"), list(itertools.product(BUSY, ENDS)))
def test_every_busy_thread_ends_whichever_way_the_process_does(ends, busy, end):
    for _ in range(5):
        assert ends(busy, end) == 3
