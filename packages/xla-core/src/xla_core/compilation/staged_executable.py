"""A step that runs as several programs one after another, but is run, reported and stored as one executable."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from xla_core.compilation.program_table import execution
from xla_core.contract.device_protocol import Buffer, DeviceClient, Executable, Placement
from xla_core.contract.foreign_values import JsonValue
from xla_core.lowering.stage_schedule import Run, Schedule
from xla_core.recording.storage import HeldBuffer
from xla_core.support import indivisible

_MAGIC: Final = b"XLASTG01"
_LENGTH: Final = struct.Struct("<Q")

MSG_DAMAGED: Final = "{name}: the description of the stored stages is damaged"


class StagedExecutable:
    """The executable of one step, which consists of several executables that may each run several times."""

    __slots__ = (
        "_client",
        "_executables",
        "_numbers",
        "_placement",
        "_runs",
        "_schedule",
        "program_name",
    )

    def __init__(
        self,
        client: DeviceClient,
        name: str,
        executables: Sequence[Executable],
        plan: Schedule,
        placement: Placement,
    ) -> None:
        self.program_name = name
        self._client = client
        self._executables = list(executables)
        self._placement = placement
        self._schedule = plan
        # registers are numbered in the order in which they are filled: results are appended to the list
        self._runs = [(self._executables[r.executable], r.arguments, r.freed) for r in plan.runs]
        self._numbers: list[Buffer] | None = None

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """Pairs of an argument that a run donates and the result that reuses its memory."""
        return self._schedule.aliases

    @property
    def executables(self) -> Sequence[Executable]:
        """The programs of the stages, each once."""
        return self._executables

    def execute(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Enqueue one run of every stage and return the step's results."""
        results: list[Buffer] = []
        indivisible.do(self.deferred(arguments, results))
        return results

    def deferred(
        self, arguments: Sequence[Buffer], results: list[Buffer], checked: bool = False
    ) -> Iterator[object]:
        """The work of ``execute``, done by exhausting the iterator; the results are appended to ``results``.

        ``checked`` (default: False) says that the ``arguments`` have been checked already (see ``execution``). The
        iterator runs no Python function unless the stages' ``deferred`` do, so that no exception can occur between
        two stages: the values that the first stages donated would be lost.
        """
        values: list[HeldBuffer] = [*arguments, *self._constants()]
        work: list[Iterable[object]] = []
        for executable, places, freed in self._runs:
            given: list[Buffer] = []
            work += (
                map(given.extend, (map(values.__getitem__, places),)),
                execution(executable, given, values, checked=True),
                map(operator.call, (given.clear,)),
                map(values.__setitem__, freed, itertools.repeat(None)),
            )
        work.append(map(results.extend, (map(values.__getitem__, self._schedule.outputs),)))
        return itertools.chain.from_iterable(work)

    def _constants(self) -> list[Buffer]:
        """The registers that follow the arguments; they are copied to the device at the first run."""
        if self._numbers is None:
            put = self._client.put
            numbers = self._schedule.constants
            self._numbers = [put(np.array(c, np.uint32), self._placement) for c in numbers]
        return self._numbers

    def serialize(self) -> bytes:
        """The schedule and all executables as bytes, for ``deserialize``; may raise NotImplementedError."""
        payloads = [executable.serialize() for executable in self._executables]
        plan = dataclasses.asdict(self._schedule)
        header = json.dumps({"schedule": plan, "sizes": list(map(len, payloads))}).encode()
        return b"".join((_MAGIC, _LENGTH.pack(len(header)), header, *payloads))

    def memory_analysis(self) -> Mapping[str, int]:
        """Bytes by use; temporaries are what a run needs at its peak beyond arguments and results."""
        plan = self._schedule
        each = [executable.memory_analysis() for executable in self._executables]
        live = peak = aliased = 0
        for run in plan.runs:
            figures = each[run.executable]
            aliased += figures.get("aliased", 0)
            live += sum(plan.nbytes[r] for r in run.results) - figures.get("aliased", 0)
            peak = max(peak, live + figures.get("temporaries", 0))
            live -= sum(plan.nbytes[r] for r in run.freed if r >= plan.arguments)
        outputs = sum(plan.nbytes[r] for r in plan.outputs)
        return {
            "arguments": sum(plan.nbytes[: plan.arguments]),
            "outputs": outputs,
            "temporaries": max(0, peak - (outputs - aliased)),
            "aliased": aliased,
            "code": sum(figures.get("code", 0) for figures in each),
        }

    def cost_analysis(self) -> Mapping[str, float]:
        """The compiler's estimates for all runs together."""
        each = [executable.cost_analysis() for executable in self._executables]
        total: Counter[str] = Counter()
        for run in self._schedule.runs:
            total.update(each[run.executable])  # type: ignore[arg-type]
        return dict(total)

    def optimized_hlo(self) -> str:
        """The compiled modules as HLO text, in the order in which they first run."""
        order = dict.fromkeys(run.executable for run in self._schedule.runs)
        return "\n\n".join(self._executables[i].optimized_hlo() for i in order)

    def input_shardings(self) -> tuple[str | None, ...]:
        """Stages run on one device: None for each argument."""
        return (None,) * self._schedule.arguments

    def output_shardings(self) -> tuple[str | None, ...]:
        """Stages run on one device: None for each result."""
        return (None,) * len(self._schedule.outputs)


def parts(executable: Executable) -> Sequence[Executable]:
    """The programs of a step's stages, each once, or the one program."""
    return executable.executables if isinstance(executable, StagedExecutable) else (executable,)


def deserialize(
    client: DeviceClient, payload: bytes, name: str, placement: Placement
) -> Executable:
    """The executable of a stored payload, in stages or not; ``name`` and ``placement`` are the program's.

    Raises ValueError if it does not fit the client or is damaged.
    """
    if not payload.startswith(_MAGIC):
        return client.deserialize(payload, name, placement)
    start = len(_MAGIC) + _LENGTH.size
    try:
        (length,) = _LENGTH.unpack_from(payload, len(_MAGIC))
        header = json.loads(payload[start : start + length])
        plan = _schedule(header["schedule"])
        sizes = [int(size) for size in header["sizes"]]
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise ValueError(MSG_DAMAGED.format(name=name)) from error
    executables = []
    position = start + length
    for number, size in enumerate(sizes):
        part = payload[position : position + size]
        executables.append(client.deserialize(part, f"{name}_{number}", placement))
        position += size
    return StagedExecutable(client, name, executables, plan, placement)


def _schedule(stored: Mapping[str, JsonValue]) -> Schedule:
    runs = (
        Run(int(r["executable"]), tuple(r["arguments"]), tuple(r["results"]), tuple(r["freed"]))
        for r in stored["runs"]
    )
    return Schedule(
        int(stored["arguments"]),
        tuple(stored["constants"]),
        tuple(runs),
        tuple(stored["outputs"]),
        tuple((slot, target) for slot, target in stored["aliases"]),
        tuple(stored["nbytes"]),
    )
