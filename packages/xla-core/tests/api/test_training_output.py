"""torch_xla.test.test_utils: what example scripts print and write down while they train."""

from __future__ import annotations

import multiprocessing
import re
import textwrap

import pytest
import torch

from torch_xla.test import test_utils


class Writer:
    def __init__(self):
        self.written = {}
        self.closed = False

    def add_scalar(self, name, value, step):
        self.written[name] = (value, step)

    def flush(self):
        self.closed = False

    def close(self):
        self.closed = True


def test_lines_of_training_and_tests(capsys):
    writer = Writer()
    loss = torch.tensor(0.25, device="xla")
    test_utils.print_training_update("xla:0", 7, loss, 12.0, 11.5, epoch=2, summary_writer=writer)
    test_utils.print_test_update("xla:0", 98.765, epoch=2, step=9)
    training, test = capsys.readouterr().out.splitlines()
    time = r"Time=\d\d:\d\d:\d\d"
    wanted = r"\| Training Device=xla:0/0 Epoch=2 Step=7 Loss=0.25000 Rate=12.00 GlobalRate=11.50 "
    assert re.fullmatch(wanted + time, training)
    assert re.fullmatch(r"\| Test Device=xla:0/0 Step=9 Epoch=2 Accuracy=98.77 " + time, test)
    assert writer.written == {"examples/sec": (12.0, None)}


def test_numbers_and_counters_in_a_summary():
    (torch.ones(2, device="xla") + 1).cpu()
    writer = Writer()
    test_utils.write_to_summary(writer, 3, {"loss": torch.tensor(0.5)}, write_xla_metrics=True)
    assert writer.written["loss"] == (0.5, 3)
    assert any(name.startswith("xla/") for name in writer.written)
    test_utils.close_summary_writer(writer)
    assert writer.closed
    assert test_utils.get_summary_writer("") is None
    test_utils.write_to_summary(None, 3, {"loss": 0.5})


SCRIPT = """
import os, sys
from torch_xla.test import test_utils

@test_utils.mp_test
def passes():
    assert os.getpid() != {pid}

@test_utils.mp_test
def fails():
    raise KeyError("lost")

@test_utils.mp_test
def dies():
    os._exit(3)

passes()
for case in (fails, dies):
    try:
        case()
    except RuntimeError as error:
        print(error)
"""


def test_tests_in_processes_of_their_own(run_python):
    script = textwrap.dedent(SCRIPT).replace("{pid}", "os.getppid() and MAIN")
    script = script.replace("import os, sys", "import os, sys\nMAIN = os.getpid()")
    output = run_python(script)
    assert "fails failed in its process" in output
    assert "KeyError: 'lost'" in output
    assert "dies ended its process with code 3" in output


LARGE_REPORT = """
from torch_xla.test import test_utils

@test_utils.mp_test
def fails():
    raise ValueError("x" * 500_000)

try:
    fails()
except RuntimeError as error:
    print(len(str(error)))
"""


def test_a_report_larger_than_a_pipe_arrives(run_python):
    assert int(run_python(LARGE_REPORT)) > 500_000


def test_no_process_is_forked_from_one_that_uses_a_device():
    torch.ones(1, device="xla").cpu()
    with pytest.raises(RuntimeError, match="already uses its devices"):
        test_utils.mp_test(multiprocessing.cpu_count)()
