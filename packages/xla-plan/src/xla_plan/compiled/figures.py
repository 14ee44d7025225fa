"""The figures of a compiled program for one run on one chip, as plain numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from xla_core.contract.device_protocol import Executable
from xla_core.contract.foreign_values import JsonObject
from xla_plan.compiled import hlo_module, hlo_work
from xla_plan.compiled.collectives import by_kind, collectives


def figures_of(executable: Executable, devices: int, slices: int = 1) -> JsonObject:
    """The figures, on one chip, of a program over ``devices`` chips in ``slices`` slices (default: 1)."""
    memory, cost = dict(executable.memory_analysis()), dict(executable.cost_analysis())
    return of_texts(executable.optimized_hlo(), memory, cost, devices, slices)


def of_texts(
    hlo: str,
    memory: Mapping[str, int],
    cost: Mapping[str, float],
    devices: int,
    slices: int = 1,
) -> dict[str, object]:
    """The figures from the text ``hlo`` of a compiled module and its compiler's memory and cost analyses."""
    module = hlo_module.parse(hlo)
    between = collectives(module, devices // slices if slices > 1 else 0)
    inside = [c for c in between if not c.crosses]
    return {
        "devices": devices,
        "memory": dict(memory),
        "cost": {k: cost[k] for k in ("flops", "bytes accessed", "estimated cycles") if k in cost},
        "work": dataclasses.asdict(hlo_work.work(module)),
        "collectives": by_kind(between),
        "sent": {
            "ici": sum(c.sent * c.times for c in inside),
            "ici exposed": sum(c.sent * c.times for c in inside if not c.overlapped),
            "dcn": sum(c.sent * c.times for c in between if c.crosses),
        },
        "instructions": sum(map(len, module.computations.values())),
    }
