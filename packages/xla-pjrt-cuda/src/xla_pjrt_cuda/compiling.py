"""Settings of XLA's compiler for GPUs: stored measurements of kernels, precision, determinism."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from xla_core.contract.device_protocol import Capabilities, Program
from xla_core.support import flags

# XLA's own options (jaxlib 0.10.2). XLA stores measurements by GPU and by the measured fusion, so that all programs
# can share one folder.
_FOLDER: Final = "xla_gpu_per_fusion_autotune_cache_dir"
_MODE: Final = "xla_gpu_experimental_autotune_cache_mode"
_DETERMINISTIC: Final = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
TUNING: Final = "autotuning"
"""The name of the folder of measurements in the persistent cache's folder."""


class Tuning:
    """The compiler options by which XLA stores its measurements of kernels; empty until ``keep`` sets a folder."""

    def __init__(self) -> None:
        self.options: dict[str, str] = {}

    def keep(self, folder: Path, readonly: bool) -> None:
        """Store measurements in a subfolder of ``folder``; only read them if ``readonly``, or if that fails."""
        measurements = folder / TUNING
        if not readonly:
            try:
                measurements.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError:
                readonly = True
        if measurements.is_dir():
            mode = "AUTOTUNE_CACHE_MODE_READ" if readonly else "AUTOTUNE_CACHE_MODE_UPDATE"
            self.options = {_FOLDER: str(measurements), _MODE: mode}

    def added_to(self, program: Program) -> Program:
        """``program`` with these options; its own options and ``XLA_FLAGS`` override them."""
        if not self.options or _FOLDER in flags.values_in(flags.XLA_FLAGS.get()):
            return program
        return dataclasses.replace(program, options={**self.options, **program.options})


def of_gpus(common: Capabilities) -> Capabilities:
    """``common`` with the capabilities of GPUs: products in TF32 if allowed, and sums in any order."""
    return dataclasses.replace(common, tf32=True, unordered_scatter=not _deterministic())


def _deterministic() -> bool:
    """Whether ``XLA_FLAGS`` makes the compiler use only sums in a fixed order."""
    settings = flags.values_in(flags.XLA_FLAGS.get())
    return any(settings.get(name, "false").lower() in ("", "1", "true") for name in _DETERMINISTIC)
