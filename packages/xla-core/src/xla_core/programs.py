"""The compiled programs of the process, and what is known about each."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from xla_core import counters
from xla_core.protocol import ArraySpec


class StepProgram:
    """One compiled program of a step.

    ``output_index`` maps value numbers to positions among the results; ``aliases`` pairs inputs with
    the results that take over their memory. ``histogram`` counts the operators recorded in it.
    """

    __slots__ = (
        "name", "executable", "program", "inputs", "output_index", "aliases", "donated", "operations", "histogram",
        "runs", "counted_runs", "counter_rows", "copied_donations", "compile_seconds", "from_cache", "output_bytes",
        "backend",
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
        # under the names of counters: they are summed up at every step with XLA_METRICS_FILE
        self.counter_rows = tuple(
            ("xla::" + name.removeprefix("put:").split(".")[1], count)
            for name, count in histogram.items()
        )
        self.runs = 0
        self.counted_runs = 0
        self.copied_donations = 0
        self.compile_seconds = compile_seconds
        self.from_cache = from_cache
        self.output_bytes = output_bytes
        self.backend = backend

    def wasteful(self, wanted: set[int]) -> bool:
        """Whether the results nobody wants weigh more than those wanted (and more than a MiB)."""
        extra = sum(size for vid, size in self.output_bytes.items() if vid not in wanted)
        useful = sum(size for vid, size in self.output_bytes.items() if vid in wanted)
        return extra > max(useful, 1 << 20)


_programs: list[StepProgram] = []
_operators: dict[str, int] = {}
_lock = threading.Lock()


def register(program: StepProgram) -> None:
    """Remember a program for reports."""
    with _lock:
        _programs.append(program)


def operator_counts() -> dict[str, int]:
    """How often each operator ran on the device, under torch_xla's counter names (``xla::add``)."""
    with _lock:
        for program in _programs:
            # reports may be wanted every step: only what ran since the last one is added
            ran = program.runs - program.counted_runs
            if ran:
                program.counted_runs += ran
                for name, count in program.counter_rows:
                    _operators[name] = _operators.get(name, 0) + count * ran
        return dict(_operators)


def handle_counts() -> dict[str, int]:
    """How many executables and how many results of programs there were, as torch_xla names them."""
    known = all_programs()
    return {
        "CreateCompileHandles": sum(not p.from_cache for p in known),
        "CreateDataHandles": sum(len(p.output_index) * p.runs for p in known),
    }


def clear() -> None:
    """Forget all programs; their runs are no longer counted."""
    with _lock:
        _programs.clear()


def all_programs() -> list[StepProgram]:
    """Every program compiled or loaded in this process, oldest first."""
    with _lock:
        return list(_programs)


counters.add_collector(operator_counts)
counters.add_collector(handle_counts)
