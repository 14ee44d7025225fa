"""``XLA_QUIET``: nothing is said that nobody asked for."""

from __future__ import annotations

PROGRAM = """
import logging, time, warnings
import torch, torch_xla
from xla_core.compilation import progress_line
from xla_core.support.messages import LOGGERS

x = torch.eye(3).to("xla")
for end in (1, 2, 3):  # the same cause three times is told
    torch.linalg.ldl_factor(x * end)
for name in LOGGERS:
    logging.getLogger(f"{name}.module").warning("a warning of %s", name)
logging.getLogger("xla_core.module").error("an error")
"""


def test_nothing_but_errors(run_python):
    checked = "import sys; sys.stderr = sys.stdout\n" + PROGRAM
    loud = run_python(checked)
    assert "FallbackWarning" in loud and "a warning of xla_spmd" in loud and "an error" in loud
    assert run_python(checked, XLA_QUIET="1") == "an error\n"


def test_no_progress_line(run_python):
    checked = (
        "import io, time\nimport torch_xla\nfrom xla_core.compilation import progress_line\n"
        "progress_line.AFTER_SECONDS = 0.01\n"
        "stream = io.StringIO()\nstream.isatty = lambda: True\n"
        "with progress_line.watching('step', 10, stream):\n    time.sleep(0.2)\n"
        "print(len(stream.getvalue()) > 0)"
    )
    assert run_python(checked) == "True\n"
    assert run_python(checked, XLA_QUIET="1") == "False\n"
