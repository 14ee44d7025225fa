"""Runs a program over all replicas on this replica's buffers, after the replicas agreed on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xla_core.contract.device_protocol import ArraySpec, Buffer, Executable, Placement
from xla_core.extension_api import runtime
from xla_core.extension_api.steps import Operation
from xla_dist.job_health.bounded_wait import BoundedWait
from xla_dist.job_health.collective_order import Collectives, describe
from xla_dist.processes import session


def collectives_of(entries: Sequence[Operation], world: int) -> Collectives:
    """What the others have to agree with: the program's collectives in order."""
    items = [_described(entry, world) for entry in entries]
    return Collectives(items, [_place(entry) for entry in entries])


def _place(entry: Operation) -> str:
    """The user's line that recorded a collective, empty where it is not known."""
    frames = entry.where.frames if entry.where is not None else ()
    if frames:
        return f"{frames[0].filename}:{frames[0].line} in {frames[0].function}"
    return "{}:{}".format(*entry.line) if entry.line is not None else ""


def _described(entry: Operation, world: int) -> tuple[str, tuple[tuple[int, ...], ...]]:
    name = entry.plan.name.removeprefix("xla_dist.").removesuffix(".default")
    args = entry.args
    if name == "collective_permute":
        inputs, pairs = args[0], args[1]
        nested = tuple(tuple(pairs[i : i + 2]) for i in range(0, len(pairs), 2))
        everyone = (tuple(range(world)),)
        return f"{name} {list(map(list, nested))} of {inputs.meta}", everyone
    flat, size = args[-3], args[-2]
    rows = (flat[i : i + size] for i in range(0, len(flat), size))
    groups = tuple(tuple(r for r in row if r >= 0) for row in rows)
    inputs = args[0] if isinstance(args[0], list) else [args[0]]
    words = [*args[1:-3], "of", ", ".join(str(x.meta) for x in inputs)]
    return describe(name, words, groups, world), groups


class ReplicaExecutable:
    """A program over all replicas, as this replica's process runs it: its own buffers in and out."""

    def __init__(
        self, executable: Executable, collectives: Collectives, placement: Placement, device: int
    ) -> None:
        self.program_name = executable.program_name
        self._executable = executable
        self._collectives = collectives
        self._placement = placement
        self._device = device
        own = getattr(executable, "execute_own", None)
        self._run: Callable[[Sequence[Any]], list[Any]] = own or self._through_arrays

    def __getattr__(self, name: str) -> Any:
        """What the compiler says of the program (``memory_analysis``, ``optimized_hlo``, ...)."""
        return getattr(self._executable, name)

    def execute(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Enqueue this replica's run. The first waits until all others run a program that agrees.

        Raises RuntimeError when they run another, or do not come.
        """
        self._agree()
        return self._run(arguments)

    def deferred(
        self, arguments: list[Buffer], results: list[Buffer], checked: bool = False
    ) -> Iterable[object]:
        """``execute`` as an iterator, after the replicas agreed; see ``device_protocol.Executable``."""
        own = getattr(self._executable, "deferred_own", None)
        self._agree()
        if own is not None:
            return own(arguments, results)  # type: ignore[no-any-return]
        return map(results.extend, map(self._run, (arguments,)))

    def _agree(self) -> None:
        agreement = session.current().agreement
        if agreement.launch(self._collectives):
            self._meet(agreement)

    def _meet(self, agreement: Any) -> None:
        patience = BoundedWait(self._collectives.items[-1][0], agreement.log.ordinal)
        with patience:
            while True:
                agreement.look()
                missing = agreement.behind(self._collectives)
                if not missing:
                    return
                patience.wait(missing)

    def _through_arrays(self, arguments: Sequence[Any]) -> list[object]:
        client = runtime.client()
        whole = [
            client.assemble([a], ArraySpec(a.shape, a.dtype), self._placement) for a in arguments
        ]
        results = self._executable.execute(whole)
        return [dict(client.shards(r))[self._device] for r in results]


def replicated_executable(
    executable: Executable, name: str, collectives: Sequence[Operation], backend: Any
) -> ReplicaExecutable:
    """The answer to the hook ``xla_core_replicated_executable``."""
    del name
    placement = Placement(backend.replicas)
    described = collectives_of(collectives, len(backend.replicas))
    device = backend.placement.devices[0]
    return ReplicaExecutable(executable, described, placement, device)
