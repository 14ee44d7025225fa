"""The progress lines and TensorBoard summaries of torch_xla's example scripts (``torch_xla.test.test_utils``)."""

from __future__ import annotations

import functools
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import Final, SupportsFloat

import torch
import torch.multiprocessing

from xla_core.api import xla_model
from xla_core.contract.foreign_values import ForeignObject
from xla_core.execution import runtime
from xla_core.support import counters
from xla_core.torch_bridge.operands import NamedOperands, Operands

MSG_FAILED: Final = "{name} failed in its process:\n{report}"
MSG_STARTED: Final = (
    "{name}: this process already uses its devices, and a process that is forked from it could not use them. "
    "Use devices only inside the functions under mp_test"
)
MSG_ENDED: Final = "{name} ended its process with code {code} and no report"

_POLL_SECONDS: Final = 0.1
_NOTHING: Final[Mapping[str, SupportsFloat]] = MappingProxyType({})


def now(format: str = "%H:%M:%S") -> str:
    """The time of day as text, in ``time.strftime``'s format."""
    return time.strftime(format)


def device_label(device: torch.device | str) -> str:
    """The device and this replica's global ordinal, such as ``xla:0/3``."""
    ordinal = xla_model.global_ordinal()
    return f"{device}/{ordinal}"


def _print_line(parts: list[str]) -> None:
    sys.stdout.write(" ".join(parts) + "\n")
    sys.stdout.flush()


def print_training_update(
    device: torch.device | str,
    step: int,
    loss: torch.Tensor | float,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: object = None,
) -> None:
    """Print a line with the loss and the rates, in examples per second, of this replica and of all.

    With a ``summary_writer`` (default: None) the rate is also written to it as ``examples/sec``. It reads the value
    of ``loss``, so call it from a step closure.
    """
    parts = [
        f"| Training Device={device_label(device)}",
        *([] if epoch is None else [f"Epoch={epoch}"]),
        f"Step={step}",
        f"Loss={float(loss):.5f}",
        f"Rate={rate:.2f}",
        f"GlobalRate={global_rate:.2f}",
        f"Time={now()}",
    ]
    _print_line(parts)
    if summary_writer is not None:
        write_to_summary(summary_writer, dict_to_write={"examples/sec": rate})


def print_test_update(
    device: torch.device | str,
    accuracy: float | None,
    epoch: int | None = None,
    step: int | None = None,
) -> None:
    """Print a line with the accuracy of a test, in percent, leaving out what is None."""
    parts = [
        f"| Test Device={device_label(device)}",
        *([] if step is None else [f"Step={step}"]),
        *([] if epoch is None else [f"Epoch={epoch}"]),
        *([] if accuracy is None else [f"Accuracy={accuracy:.2f}"]),
        f"Time={now()}",
    ]
    _print_line(parts)


def get_summary_writer(logdir: str | None) -> object:
    """A TensorBoard writer to ``logdir`` on the master ordinal, None on other ordinals or if ``logdir`` is empty.

    Raises ImportError if the package tensorboard is not installed.
    """
    if not logdir or not xla_model.is_master_ordinal(local=False):
        return None
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter(log_dir=logdir)


def write_to_summary(
    summary_writer: ForeignObject,
    global_step: int | None = None,
    dict_to_write: Mapping[str, SupportsFloat] = _NOTHING,
    write_xla_metrics: bool = False,
) -> None:
    """Write the numbers in ``dict_to_write`` to ``summary_writer`` by their names; do nothing if it is None.

    With ``write_xla_metrics`` the counters are written, too, as ``xla/NAME``.
    """
    if summary_writer is None:
        return
    scalars = dict(dict_to_write)
    if write_xla_metrics:
        scalars |= {f"xla/{name}": value for name, value in counters.all_counters().items()}
    for name, value in scalars.items():
        summary_writer.add_scalar(name, float(value), global_step)


def close_summary_writer(summary_writer: ForeignObject) -> None:
    """Close what ``get_summary_writer`` returned, which may be None."""
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()


def mp_test(func: Callable[..., object]) -> Callable[..., None]:
    """A decorator for test methods: each runs in a forked process, and a failure there is raised here.

    A call raises RuntimeError if the test fails, or if this process already uses a device.
    """

    @functools.wraps(func)
    def run(*args: object, **kwargs: object) -> None:
        # forked, not spawned: the undecorated function is not an attribute of a module and cannot be pickled
        if runtime.started():
            raise RuntimeError(MSG_STARTED.format(name=func.__qualname__))
        context = torch.multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_reporting, args=(sender, func, args, kwargs))
        process.start()
        sender.close()
        # before join: a large report blocks its process until it is read
        report = _received(receiver, process)
        process.join()
        if report is not None:
            raise RuntimeError(MSG_FAILED.format(name=func.__qualname__, report=report))
        if process.exitcode:
            text = MSG_ENDED.format(name=func.__qualname__, code=process.exitcode)
            raise RuntimeError(text)

    return run


def _received(receiver: Connection, process: BaseProcess) -> str | None:
    """The report that a process sends, None if it ends without one."""
    alive = True
    # not the end of the pipe alone: processes that the test has started may hold it open
    while not receiver.poll(_POLL_SECONDS if alive else 0):
        if not alive:
            return None
        alive = process.is_alive()
    try:
        report: str = receiver.recv()
    except EOFError:
        return None
    return report


def _reporting(
    sender: Connection, func: Callable[..., object], args: Operands, kwargs: NamedOperands
) -> None:
    """Call ``func``; if it raises, send the traceback and raise again."""
    try:
        func(*args, **kwargs)
    except BaseException:
        sender.send(traceback.format_exc())
        raise
