"""Runs a program over all replicas on this replica's buffers, and checks that all replicas launch the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from xla_core.contract.device_protocol import ArraySpec, Buffer, Executable, Placement
from xla_core.contract.foreign_values import Attribute, ForeignObject
from xla_core.extension_api import runtime
from xla_core.extension_api.backends import Backend
from xla_core.extension_api.steps import Operation
from xla_dist.job_health.bounded_wait import BoundedWait
from xla_dist.job_health.collective_order import Collectives, OrderCheck, describe
from xla_dist.processes import session


def collectives_of(entries: Sequence[Operation], world: int) -> Collectives:
    """The collectives of a program over ``world`` replicas, in order, which the other replicas must launch too."""
    items = [_described(entry, world) for entry in entries]
    return Collectives(items, [_place(entry) for entry in entries])


def _place(entry: Operation) -> str:
    """The user's line that recorded a collective; empty if it is not known."""
    frames = entry.where.frames if entry.where is not None else ()
    if frames:
        return f"{frames[0].filename}:{frames[0].line} in {frames[0].function}"
    return "{}:{}".format(*entry.line) if entry.line is not None else ""


def _described(entry: Operation, world: int) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """A collective as text, and its replica groups."""
    name = entry.plan.name.removeprefix("xla_dist.").removesuffix(".default")
    args = entry.args
    if name == "collective_permute":
        inputs, pairs = args[0], args[1]
        nested = tuple(tuple(pairs[i : i + 2]) for i in range(0, len(pairs), 2))
        all_replicas = (tuple(range(world)),)
        return f"{name} {list(map(list, nested))} of {inputs.meta}", all_replicas
    flat, size = args[-3], args[-2]
    rows = (flat[i : i + size] for i in range(0, len(flat), size))
    groups = tuple(tuple(r for r in row if r >= 0) for row in rows)
    inputs = args[0] if isinstance(args[0], list) else [args[0]]
    words = [*args[1:-3], "of", ", ".join(str(x.meta) for x in inputs)]
    return describe(name, words, groups, world), groups


class ReplicaExecutable:
    """A program over all replicas, as this replica's process runs it: it takes and returns this replica's buffers.

    ``executable`` is the whole program, ``collectives`` are those in it, ``placement`` has the devices of all
    replicas, and ``device`` is the id of this replica's.
    """

    def __init__(
        self, executable: Executable, collectives: Collectives, placement: Placement, device: int
    ) -> None:
        self.program_name = executable.program_name
        self._executable = executable
        self._collectives = collectives
        self._placement = placement
        self._device = device
        own = getattr(executable, "execute_own", None)
        self._run: Callable[[Sequence[Buffer]], list[Buffer]] = own or self._through_arrays

    def __getattr__(self, name: str) -> Attribute:
        """The attributes of the executable: ``memory_analysis``, ``optimized_hlo`` and others."""
        return getattr(self._executable, name)

    def execute(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Enqueue this replica's run of the program.

        The first run after a different program waits until the other replicas launch this program too. Raises
        RuntimeError if they launch a different one, or none in time.
        """
        self._check_order()
        return self._run(arguments)

    def deferred(
        self, arguments: list[Buffer], results: list[Buffer], checked: bool = False
    ) -> Iterable[object]:
        """``execute`` as an iterator, after the same check; see ``device_protocol.Executable``."""
        own = getattr(self._executable, "deferred_own", None)
        self._check_order()
        if own is not None:
            return own(arguments, results)  # type: ignore[no-any-return]
        return map(results.extend, map(self._run, (arguments,)))

    def _check_order(self) -> None:
        """Log this launch, and compare it with those of the other replicas if it is an unusual one."""
        order_check = session.current().order_check
        if order_check.launch(self._collectives):
            self._wait_for_others(order_check)

    def _wait_for_others(self, order_check: OrderCheck) -> None:
        """Wait until all replicas that take part have launched the program."""
        bounded_wait = BoundedWait(self._collectives.items[-1][0], order_check.log.ordinal)
        with bounded_wait:
            while True:
                order_check.compare()
                missing = order_check.behind(self._collectives)
                if not missing:
                    return
                bounded_wait.wait(missing)

    def _through_arrays(self, arguments: Sequence[ForeignObject]) -> list[Buffer]:
        """Run an executable that takes arrays over all replicas.

        Assembles them, and returns this replica's parts.
        """
        client = runtime.client()
        whole = [
            client.assemble([a], ArraySpec(a.shape, a.dtype), self._placement) for a in arguments
        ]
        results = self._executable.execute(whole)
        return [dict(client.shards(r))[self._device] for r in results]


def replicated_executable(
    executable: Executable, name: str, collectives: Sequence[Operation], backend: Backend
) -> ReplicaExecutable:
    """This package's implementation of the hook ``xla_core_replicated_executable``."""
    del name
    placement = Placement(backend.replicas)
    of_program = collectives_of(collectives, len(backend.replicas))
    device = backend.placement.devices[0]
    return ReplicaExecutable(executable, of_program, placement, device)
