"""From what a program does to how long it takes: a roofline, and a step time with its bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from xla_plan.planning.chips import Chip


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of one step, and what would take them if nothing else did.

    ``compute`` is the products at the chip's peak, ``hbm`` what the program's instructions read and write
    at the memory's rate, ``ici`` and ``dcn`` what is sent at the networks' rates, ``cycles`` the compiler's own
    estimate of everything but kernels and networks (the roofline where it makes none), ``kernels`` kernels at the
    chip's peak. ``seconds`` lies between ``low`` (perfect overlap at the peak) and ``high`` (no overlap, one axis
    of the network at a time). ``mfu`` likewise: model FLOPs over peak FLOPs; None where the model's are not known.
    """

    compute: float
    hbm: float
    ici: float
    dcn: float
    cycles: float
    kernels: float
    low: float
    seconds: float
    high: float
    mfu: float | None
    mfu_low: float | None
    mfu_high: float | None

    @property
    def bound(self) -> str:
        """What alone would take longest: ``compute``, ``memory`` or ``network``."""
        parts = {"compute": self.compute, "memory": self.hbm, "network": self.ici + self.dcn}
        return max(parts, key=lambda name: parts[name])


def estimate(figures: Mapping[str, Any], chip: Chip) -> Estimate:
    """The estimate for a measured program (``measure.of_program``) on a chip of this kind."""
    work, sent = figures["work"], figures["sent"]
    peak = chip.flops / chip.devices
    clock = chip.clock
    compute = (work["flops"] + work["kernel_flops"]) / peak
    hbm = work["hbm_bytes"] / (chip.hbm / chip.devices)
    # compilers of other devices than TPUs tell no cycles: the roofline stands for them
    cycles = work["cycles"] / clock or max(work["flops"] / peak, hbm)
    # hidden positions of a causal mask count in a kernel's own figures: full work at the peak is the real
    # half of it at half the peak
    kernels = max(work["kernel_flops"] / peak, work["kernel_bytes"] / (chip.hbm / chip.devices))
    all_links, one_axis = chip.ici / chip.devices, chip.ici / chip.devices * 2 / chip.links
    fast, slow = sent["ici"] / all_links, sent["ici"] / one_axis
    network = (fast + slow) / 2
    exposed = network * (sent["ici exposed"] / sent["ici"]) if sent["ici"] else 0.0
    dcn = sent["dcn"] / (chip.dcn / chip.devices)
    busy = cycles + kernels
    seconds = max(busy, network - exposed, dcn) + exposed
    low = max((work["flops"] + work["kernel_flops"] / 2) / peak, fast, dcn)
    high = cycles + 2 * kernels + slow + dcn
    model = figures.get("model_flops")
    ideal = model / (figures["devices"] * peak) if model else None
    return Estimate(
        compute=compute,
        hbm=hbm,
        ici=network,
        dcn=dcn,
        cycles=cycles,
        kernels=kernels,
        low=min(low, seconds),
        seconds=seconds,
        high=max(high, seconds),
        mfu=ideal / seconds if ideal else None,
        mfu_low=ideal / max(high, seconds) if ideal else None,
        mfu_high=ideal / min(low, seconds) if ideal else None,
    )


def advice(memory: Mapping[str, int], limit: int, estimated: Estimate | None) -> list[str]:
    """What to change, first what makes it fit, then what makes it faster; empty where nothing stands out."""
    hints = []
    total = memory["total"]
    if total > limit:
        kinds = {k: memory.get(k, 0) for k in ("parameters", "optimizer state", "temporaries")}
        worst = max(kinds, key=lambda k: kinds[k])
        hints.append(
            f"{(total - limit) / 2**30:.1f} GiB too much, most of it {worst}: {_SMALLER[worst]}"
        )
    elif total > 0.92 * limit:
        hints.append("less than 8 % of HBM is free: the next change of the model may not fit")
    if estimated is None:
        return hints
    if estimated.bound == "network":
        hints.append(
            "the network is the limit: more sequences per chip, or a mesh that sends less (tensor parallelism "
            "inside a host, fsdp over fewer chips and data over the rest)"
        )
    elif estimated.bound == "memory" and total < 0.6 * limit:
        hints.append(
            "HBM traffic is the limit and there is room: more sequences per chip read weights more seldom"
        )
    return hints


_SMALLER = {
    "parameters": "split them over more chips (a larger fsdp or tensor axis)",
    "optimizer state": "split it over more chips, or keep it in bfloat16",
    "temporaries": "fewer sequences per chip (microbatches), rematerialization, the loss in chunks, or tensor "
    "parallelism, which splits activations too",
}
