"""Estimates the time of a step from a program's work: a roofline, and a step time with bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from xla_core.contract.foreign_values import JsonValue
from xla_plan.planning.chips import Chip


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated seconds of one step, and of each resource as if it were the only limit.

    ``compute`` is the time of the products at the chip's peak, ``hbm`` that of the reads and writes of HBM,
    ``ici`` and ``dcn`` those of the bytes sent over the networks. ``cycles`` is the compiler's own estimate of
    everything but kernels and networks (the roofline if it makes none), ``kernels`` the time of kernels at the
    chip's peak. ``seconds`` is the step time, between ``low`` (perfect overlap at the peak) and ``high`` (no
    overlap, one axis of the network at a time). ``mfu``, ``mfu_low`` and ``mfu_high`` are model FLOPs over peak
    FLOPs, None if the model's FLOPs are unknown.
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
        """The resource that takes longest: ``compute``, ``memory`` or ``network``."""
        parts = {"compute": self.compute, "memory": self.hbm, "network": self.ici + self.dcn}
        return max(parts, key=lambda name: parts[name])


def estimate(figures: Mapping[str, JsonValue], chip: Chip) -> Estimate:
    """The estimate for the figures of a program (``measure.of_program``) on a chip of this kind."""
    work, sent = figures["work"], figures["sent"]
    peak = chip.flops / chip.devices
    clock = chip.clock
    compute = (work["flops"] + work["kernel_flops"]) / peak
    hbm = work["hbm_bytes"] / (chip.hbm / chip.devices)
    # only the compiler for TPUs estimates cycles; the roofline replaces them
    cycles = work["cycles"] / clock or max(work["flops"] / peak, hbm)
    # a kernel's own figures include the positions that a causal mask hides, about half of them: all work at the
    # peak is the real work at half the peak
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
    """What to change so that the step fits, then so that it is faster; may be empty."""
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
