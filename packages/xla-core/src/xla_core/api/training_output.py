"""What torch_xla's example scripts print and write down while they train (``torch_xla.test.test_utils``)."""

from __future__ import annotations

import functools
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.multiprocessing

from xla_core.api import xla_model
from xla_core.execution import runtime
from xla_core.support import counters
from xla_core.torch_bridge.operands import NamedOperands, Operands

MSG_FAILED: Final = "{name} failed in its process:\n{report}"
MSG_STARTED: Final = (
    "{name}: this process uses its devices already, and a process that is forked from it could not use them. "
    "Keep what needs a device inside the functions under mp_test"
)
MSG_ENDED: Final = "{name} ended its process with code {code} and without a word"

_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


def now(format: str = "%H:%M:%S") -> str:
    """The time of day as text, in ``time.strftime``'s format."""
    return time.strftime(format)


def device_label(device: torch.device | str) -> str:
    """``xla:0/3`` for the device and this replica's number in the job; the device alone without replicas."""
    ordinal = xla_model.global_ordinal()
    return f"{device}/{ordinal}"


def _say(parts: list[str]) -> None:
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
    """Print a line on how training goes; with ``summary_writer`` write ``examples/sec`` there, too.

    Reads the value of ``loss``: call it from a step closure.
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
    _say(parts)
    if summary_writer is not None:
        write_to_summary(summary_writer, dict_to_write={"examples/sec": rate})


def print_test_update(
    device: torch.device | str,
    accuracy: float | None,
    epoch: int | None = None,
    step: int | None = None,
) -> None:
    """Print a line on how a test goes."""
    parts = [
        f"| Test Device={device_label(device)}",
        *([] if step is None else [f"Step={step}"]),
        *([] if epoch is None else [f"Epoch={epoch}"]),
        *([] if accuracy is None else [f"Accuracy={accuracy:.2f}"]),
        f"Time={now()}",
    ]
    _say(parts)


def get_summary_writer(logdir: str | None) -> object:
    """A TensorBoard writer below ``logdir`` on the master ordinal; None on the others and without a folder.

    Raises ImportError without the package tensorboard.
    """
    if not logdir or not xla_model.is_master_ordinal(local=False):
        return None
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter(log_dir=logdir)


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, Any] = _NOTHING,
    write_xla_metrics: bool = False,
) -> None:
    """Write numbers by their names to ``summary_writer``; nothing when it is None.

    With ``write_xla_metrics`` the counters, too, as ``xla/NAME``.
    """
    if summary_writer is None:
        return
    scalars = dict(dict_to_write)
    if write_xla_metrics:
        scalars |= {f"xla/{name}": value for name, value in counters.all_counters().items()}
    for name, value in scalars.items():
        summary_writer.add_scalar(name, float(value), global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """Close what ``get_summary_writer`` returned, which may be None."""
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()


def mp_test(func: Callable[..., object]) -> Callable[..., None]:
    """A decorator for test methods: each runs in a process of its own, and fails here if it fails there.

    The process is forked: call it before this one uses a device. Raises RuntimeError otherwise.
    """

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> None:
        # the decorated function is no module's attribute: it cannot be sent to a spawned process
        if runtime.started():
            raise RuntimeError(MSG_STARTED.format(name=func.__qualname__))
        context = torch.multiprocessing.get_context("fork")
        reports = context.SimpleQueue()
        process = context.Process(target=_reporting, args=(reports, func, args, kwargs))
        process.start()
        process.join()
        if not reports.empty():
            raise RuntimeError(MSG_FAILED.format(name=func.__qualname__, report=reports.get()))
        if process.exitcode:
            text = MSG_ENDED.format(name=func.__qualname__, code=process.exitcode)
            raise RuntimeError(text)

    return run


def _reporting(
    reports: Any, func: Callable[..., Any], args: Operands, kwargs: NamedOperands
) -> None:
    try:
        func(*args, **kwargs)
    except BaseException:
        reports.put(traceback.format_exc())
        raise
