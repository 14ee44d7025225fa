"""``XLA_SAVE_TENSORS_FILE``: appends every step that runs to a file, in the format that the user chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from xla_core.contract import events
from xla_core.extension_api import programs, runtime
from xla_core.extension_api.steps import Entry, Trace
from xla_core.support import caches
from xla_debug import settings
from xla_debug.live import analysis
from xla_debug.steps import graphs

_SUFFIXES: Final = {"text": "txt", "dot": "dot", "hlo": "hlo", "stablehlo": "mlir"}
MSG_UNKNOWN: Final = "(a program that was recorded earlier, whose graph is not known any more)\n"

# The graphs of the latest programs. Graphs of torch.compile and captured steps run long after they were recorded.
_graphs: Final[caches.Bounded[str, tuple[Sequence[Entry], tuple[int, ...]]]] = caches.Bounded(
    "graphs of programs"
)


def on_missing(event: events.ProgramMissing) -> None:
    """A program is going to be compiled or loaded: keep the entries and outputs of its step."""
    _graphs.keep(event.name, (event.entries, event.outputs))


def on_evicted(event: events.ProgramEvicted) -> None:
    """A program was evicted: drop its graph."""
    _graphs.pop(event.program.name, None)


def on_forgotten(_event: events.StepsForgotten) -> None:
    """All steps of a device were dropped: release the entries, each of which keeps the whole tree alive."""
    _graphs.clear()


def on_executed(event: events.ProgramExecuted) -> None:
    """A step runs: append it to the file that ``XLA_SAVE_TENSORS_FILE`` names."""
    trace, program = event.trace, event.program
    outputs = tuple(program.output_index)
    form = settings.SAVE_TENSORS_FMT.get()
    graph = (trace.cur.path(), outputs) if trace.cur.depth else _graphs.get(program.name)
    text = MSG_UNKNOWN if graph is None else _in_format(form, trace, program, *graph)
    name = f"Graph Name: {trace.graph_name}\n" if trace.graph_name else ""
    frames = "".join(f"  {f.function} ({f.filename}:{f.line})\n" for f in analysis.entry_frames())
    roots = ", ".join(f"{vid:x}" for vid in outputs)
    digest = analysis.digest_of(program.name)
    record = (
        f"[ScheduleSyncTensorsGraph]\n{name}TensorsGraphInfo:\n{frames}\nRoot Hashes: ({roots})\n\n"
        f"## BEGIN_GRAPH\n{text}Graph Hash: {digest}\n\n## END_GRAPH\n\n"
    )
    path = Path(f"{settings.SAVE_TENSORS_FILE.get()}.{runtime.global_ordinal()}")
    with path.open("a") as file:
        file.write(record)


def _in_format(
    form: str,
    trace: Trace,
    program: programs.StepProgram,
    entries: Sequence[Entry],
    outputs: tuple[int, ...],
) -> str:
    if form == "text":
        return graphs.graph_as_text(entries, outputs)
    if form == "dot":
        return graphs.graph_as_dot(entries, outputs)
    lowered = program.program
    if lowered is None and not trace.cur.depth:
        return MSG_UNKNOWN  # its arguments, on which the layout depends, are not known here
    if lowered is None:  # it was loaded from the persistent cache, and not lowered in this process
        layout = trace.backend.layout(trace, entries, outputs, ())
        lowered = programs.lower_step(trace, entries, outputs, layout, program.name)
    if form == "hlo":
        return graphs.graph_as_hlo(lowered.stablehlo)
    return programs.module_text(lowered.stablehlo)


def save_tensors_graph(save_dir: str, name: str, tensors: Sequence[torch.Tensor]) -> Path:
    """Write the pending operations that compute ``tensors`` to ``save_dir/name.EXTENSION``, and return that path.

    ``SAVE_GRAPH_FMT`` sets the format: ``text`` (default), ``dot``, ``hlo`` or ``stablehlo``. Raises ValueError for
    other formats.
    """
    form = settings.SAVE_GRAPH_FMT.get()
    writers: dict[str, Callable[[Sequence[torch.Tensor]], str]] = {
        "text": graphs.tensors_text,
        "dot": graphs.tensors_dot,
        "hlo": graphs.tensors_hlo,
        "stablehlo": lambda t: programs.module_text(graphs.tensors_stablehlo(t)),
    }
    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.{_SUFFIXES[form]}"
    path.write_text(writers[form](tensors))
    return path
