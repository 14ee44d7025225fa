"""``Graph`` and ``graph``: a block that is recorded once and replayed on the same tensors, as with CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from xla_core.capture import errors
from xla_core.capture.errors import CaptureError, refuse
from xla_core.capture.guards import Guards
from xla_core.capture.matching import static_wiring
from xla_core.capture.observation import Observer
from xla_core.capture.printing import noticing_prints
from xla_core.capture.reachable import Reachable
from xla_core.capture.replay import Replay
from xla_core.execution import runtime

_NAME = "the block"


class Graph:
    """What a block ``with graph(g):`` recorded.

    ``replay()`` runs it again: it reads the tensors that the block read, with the values that they have now, and
    gives the tensors that the block wrote or made new values.
    """

    def __init__(self) -> None:
        self._replay: Replay | None = None

    def replay(self) -> None:
        """Run the recorded step again, enqueued. Raises CaptureError where something is not as it was recorded."""
        if self._replay is None:
            raise CaptureError(errors.MSG_NOT_RECORDED)
        self._replay.run(())

    def reset(self) -> None:
        """Forget what was recorded."""
        self._replay = None


@contextmanager
def graph(recorded: Graph, device: torch.device | str | None = None) -> Iterator[None]:
    """A block that runs as one step on ``device`` (default: the current one) and is kept in ``recorded``.

    Python numbers in it are constants, except learning rates, which are read from the optimizers' groups in
    each replay. An optimizer needs its state before: let it take a step outside first. Raises CaptureError for
    what no replay could do.
    """
    trace = runtime.trace_of(device)
    observer = Observer(trace, _NAME, ())
    with noticing_prints(_NAME) as noticed, observer.recording():
        yield
    observed = observer.end(None, (), ())
    noticed.check()
    for window in observed.windows:
        if window.changed is not None:
            raise refuse(
                errors.MSG_NEW_STATE, name=_NAME, optimizer=type(window.optimizer).__name__
            )
    wiring = static_wiring(observed)
    guards = Guards(_NAME, Reachable())
    recorded._replay = Replay(_NAME, trace, wiring, observed, observed, guards)
