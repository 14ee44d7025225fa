"""The compiled programs of the process, and what is known about each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from xla_core import counters
from xla_core.failures import Value
from xla_core.protocol import ArraySpec


def execution(
    executable: Any, arguments: list[Any], results: list[Any], known: bool = False
) -> Iterable[Any]:
    """For ``indivisible.do``: one run of ``executable``, whose results ``results`` is extended by.

    With ``known`` the arguments need no check, and are in their list only when the run begins.
    """
    deferred = getattr(executable, "deferred", None)
    if deferred is not None:
        return deferred(arguments, results, known)  # type: ignore[no-any-return]
    return map(results.extend, map(executable.execute, (arguments,)))


class StepProgram:
    """One compiled program of a step.

    ``output_index`` maps value numbers to positions among the results; ``aliases`` pairs inputs with
    the results that take over their memory. ``histogram`` counts the operators recorded in it, which
    are counted under torch_xla's names (``xla::add``) with each run.
    """

    __slots__ = (
        "name", "executable", "program", "inputs", "output_index", "aliases", "donated", "operations", "histogram",
        "runs", "tally", "copied_donations", "compile_seconds", "from_cache", "output_bytes",
        "backend", "largest", "_needed",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        executable: Any,
        program: Any,
        inputs: tuple[ArraySpec, ...],
        output_index: dict[int, int],
        aliases: tuple[tuple[int, int], ...],
        histogram: Counter[str],
        compile_seconds: float,
        from_cache: bool,
        output_bytes: dict[int, int],
        backend: Any,
        largest: tuple[Value, ...] = (),
    ) -> None:
        self.name = name
        self.executable = executable
        self.program = program
        self.inputs = inputs
        self.output_index = output_index
        self.aliases = aliases
        self.donated = tuple(slot for slot, _ in aliases)
        self.operations = histogram.total()
        self.histogram = histogram
        self.tally = counters.Tally(
            (
                ("CreateDataHandles", len(output_index)),
                *(
                    ("xla::" + name.removeprefix("put:").split(".")[1], count)
                    for name, count in histogram.items()
                ),
            )
        )
        self.runs = 0
        self.copied_donations = 0
        self.compile_seconds = compile_seconds
        self.from_cache = from_cache
        self.output_bytes = output_bytes
        self.backend = backend
        self.largest = largest
        self._needed: int | None = None

    def memory_needed(self) -> int:
        """Bytes that a run takes besides its arguments; 0 where the compiler does not tell."""
        if self._needed is None:
            try:
                figures = self.executable.memory_analysis()
            except (NotImplementedError, RuntimeError):
                figures = {}
            grown = figures.get("outputs", 0) - figures.get("aliased", 0)
            self._needed = max(0, figures.get("temporaries", 0) + grown)
        return self._needed

    def count_run(self) -> None:
        """One more run: of the program, and so of its operators."""
        self.runs += 1
        self.tally.count()

    def wasteful(self, wanted: set[int]) -> bool:
        """Whether the results nobody wants weigh more than those wanted (and more than a MiB)."""
        extra = sum(size for vid, size in self.output_bytes.items() if vid not in wanted)
        useful = sum(size for vid, size in self.output_bytes.items() if vid in wanted)
        return extra > max(useful, 1 << 20)


_programs: list[StepProgram] = []
_lock = threading.Lock()


def register(program: StepProgram) -> None:
    """Remember a program for reports."""
    if not program.from_cache:
        counters.increment("CreateCompileHandles")
    with _lock:
        _programs.append(program)


def clear() -> None:
    """Forget all programs; what they ran so far stays counted."""
    with _lock:
        _programs.clear()


def all_programs() -> list[StepProgram]:
    """Every program compiled or loaded in this process, oldest first."""
    with _lock:
        return list(_programs)
