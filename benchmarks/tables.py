"""The figures of ``run.py`` as tables on the screen."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, Final

from rich.console import Console
from rich.table import Table

Figures = dict[str, Any]
Results = Mapping[str, Mapping[str, Figures]]

COLUMNS: list[tuple[str, Callable[[Figures], object], str]] = [
    ("trace ms", lambda f: f.get("trace_ms"), "{:.2f}"),
    ("sync ms", lambda f: f.get("sync_ms"), "{:.2f}"),
    ("step ms", lambda f: f.get("step_ms"), "{:.2f}"),
    ("busy ms", lambda f: f.get("busy_ms"), "{:.2f}"),
    ("captured ms", lambda f: f.get("captured_ms"), "{:.3f}"),
    ("async ms", lambda f: f.get("async_ms"), "{:.2f}"),
    ("executable ms", lambda f: f.get("executable_ms"), "{:.2f}"),
    ("first cold s", lambda f: f.get("cold", {}).get("first_step_s"), "{:.2f}"),
    ("first warm s", lambda f: f.get("warm", {}).get("first_step_s"), "{:.2f}"),
    ("from start cold s", lambda f: f.get("cold", {}).get("start_to_first_step_s"), "{:.1f}"),
    ("from start warm s", lambda f: f.get("warm", {}).get("start_to_first_step_s"), "{:.1f}"),
    ("programs", lambda f: f.get("programs"), "{:d}"),
    ("peak MiB", lambda f: f.get("peak_memory_mib"), "{:.0f}"),
    ("cached warm", lambda f: f.get("warm", {}).get("cached_programs"), "{:d}"),
]


def overall(
    read: Callable[[Figures], Any], by: Callable[[Figures], Any] | None = None
) -> Callable[[Figures, Figures], float | None]:
    """One figure divided by the same of another system, or by its figure ``by``."""

    def divided(ours: Figures, theirs: Figures) -> float | None:
        above, below = read(ours), (by or read)(theirs)
        return above / below if above is not None and below else None

    return divided


def by_turns(
    read: Callable[[Figures], object], by: Callable[[Figures], object] | None = None
) -> Callable[[Figures, Figures], float | None]:
    """A round's figure divided by that of the round beside it: the median over all rounds.

    A machine whose speed changes from minute to minute was about as fast for both of them.
    """
    divided = overall(read, by)

    def median(ours: Figures, theirs: Figures) -> float | None:
        # a system that failed has fewer processes
        both = zip(ours.get("processes", ()), theirs.get("processes", ()), strict=False)
        pairs = [
            divided(round_of_ours, round_of_theirs)
            for own, other in both
            for round_of_ours, round_of_theirs in zip(own["rounds"], other["rounds"], strict=True)
        ]
        known = [pair for pair in pairs if pair is not None]
        return statistics.median(known) if known else None

    return median


STEP: Final = by_turns(lambda f: f["step_ms"])
ASYNC_STEP: Final = by_turns(lambda f: f["async_ms"])
FIRST_STEP: Final = overall(lambda f: f.get("cold", {}).get("first_step_s"))
RATIOS: Final[list[tuple[str, str, Callable[[Figures, Figures], float | None]]]] = [
    ("host (trace + sync)", "torch_xla", by_turns(lambda f: f["trace_ms"] + f["sync_ms"])),
    ("busy", "torch_xla", by_turns(lambda f: f["busy_ms"])),
    ("captured", "torch_xla", by_turns(lambda f: f["captured_ms"], lambda f: f["busy_ms"])),
    ("step", "torch_xla", STEP),
    ("async step", "torch_xla", ASYNC_STEP),
    ("first step, cold", "torch_xla", FIRST_STEP),
    ("step", "xla_inlined", STEP),
    ("first step, cold", "xla_inlined", FIRST_STEP),
    ("peak memory", "xla_inlined", overall(lambda f: f.get("peak_memory_mib"))),
    ("step", "cpu", STEP),
    ("async step", "cpu", ASYNC_STEP),
]
"""What is divided by the same figure of which other system, and how."""


def shown(value: Any, form: str) -> str:
    """``value`` in ``form``, a dash where there is none."""
    return "–" if value is None else form.format(value)


def figures_table(results: Results) -> Table:
    """One row per workload and system."""
    table = Table(title="One training step (medians)")
    table.add_column("workload")
    table.add_column("system")
    for name, _, _ in COLUMNS:
        table.add_column(name, justify="right")
    for workload, row in results.items():
        for system, figures in row.items():
            cells = [shown(read(figures), form) for _, read, form in COLUMNS]
            table.add_row(workload, system, *cells)
        table.add_section()
    return table


def ratios_table(results: Results) -> Table:
    """This project's figures divided by the others', and warm by cold; below 1 is better."""
    table = Table(title="xla, divided by the others (less is better)")
    table.add_column("workload")
    measured = {system for row in results.values() for system in row}
    ratios = [r for r in RATIOS if r[1] in measured]
    for name, other, _ in ratios:
        table.add_column(f"{name} / {other}", justify="right")
    table.add_column("first step, warm / cold", justify="right")
    for workload, row in results.items():
        ours = row.get("xla", {})
        cells = [divide(ours, row.get(other, {})) for _, other, divide in ratios]
        cells.append(FIRST_STEP({"cold": ours.get("warm", {})}, ours))
        table.add_row(workload, *(shown(cell, "{:.2f}x") for cell in cells))
    return table


def print_tables(results: Results) -> None:
    """Both tables, then every error and every operator that fell back to the CPU."""
    console = Console(width=None if Console().is_terminal else 200)
    console.print(figures_table(results))
    if any(len(row) > 1 and "xla" in row for row in results.values()):
        console.print(ratios_table(results))
    for workload, row in results.items():
        for system, figures in row.items():
            if "error" in figures:
                console.print(f"{workload} on {system}: {figures['error']}", markup=False)
            if figures.get("fallbacks"):
                text = f"{workload} on {system} fell back to the CPU: {figures['fallbacks']}"
                console.print(text, markup=False)
