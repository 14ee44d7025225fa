"""``Graph`` and ``graph``: record a block once and replay it on the same tensors, as with CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from xla_core.capture import errors
from xla_core.capture.errors import CaptureError, refuse
from xla_core.capture.executed_code import noticing_prints
from xla_core.capture.guards import Guards
from xla_core.capture.matching import static_wiring
from xla_core.capture.observation import Observer
from xla_core.capture.reachable import Reachable
from xla_core.capture.replay import Replay
from xla_core.execution import runtime

_NAME = "the block"


class Graph:
    """The recording of a block ``with graph(g):``.

    ``replay()`` runs it again: it reads the present values of the tensors that the block read, and gives new values
    to the tensors that the block wrote or created.
    """

    def __init__(self) -> None:
        self._replay: Replay | None = None

    def replay(self) -> None:
        """Enqueue the recorded step again. Raises CaptureError if something has changed since the recording."""
        if self._replay is None:
            raise CaptureError(errors.MSG_NOT_RECORDED)
        self._replay.run(())

    def reset(self) -> None:
        """Forget the recording."""
        self._replay = None


@contextmanager
def graph(recorded: Graph, device: torch.device | str | None = None) -> Iterator[None]:
    """A block that runs as one step on ``device`` (default: the current one) and is recorded in ``recorded``.

    Python numbers in it are constants, except learning rates, which are read from the optimizers' groups in each
    replay. An optimizer must have its state already, so let it take a step outside first. Raises CaptureError if
    the block does something that a replay could not do.
    """
    trace = runtime.trace_of(device)
    observer = Observer(trace, _NAME, ())
    with noticing_prints(_NAME) as noticed, observer.recording():
        yield
    observed = observer.end(None)
    noticed.check()
    for window in observed.windows:
        if window.changed is not None:
            raise refuse(
                errors.MSG_NEW_STATE, name=_NAME, optimizer=type(window.optimizer).__name__
            )
    wiring = static_wiring(observed)
    guards = Guards(_NAME, Reachable())
    recorded._replay = Replay(_NAME, trace, wiring, observed, observed, guards)
