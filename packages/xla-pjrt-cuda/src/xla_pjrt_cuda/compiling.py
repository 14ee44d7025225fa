"""What is particular to XLA's compiler for GPUs: measurements that are kept, precision, determinism."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from xla_core.contract.device_protocol import Capabilities, Program
from xla_core.support import flags

# XLA's own options (jaxlib 0.10.2). What was measured is kept by GPU and by what was compiled, so that all
# programs share one folder.
_FOLDER: Final = "xla_gpu_per_fusion_autotune_cache_dir"
_MODE: Final = "xla_gpu_experimental_autotune_cache_mode"
_DETERMINISTIC: Final = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
TUNING: Final = "autotuning"
"""The folder inside the persistent cache's."""


class Tuning:
    """Where XLA keeps which kernels were fastest: nowhere, until the persistent cache's folder is set."""

    def __init__(self) -> None:
        self.options: dict[str, str] = {}

    def keep(self, folder: Path, readonly: bool) -> None:
        """Keep them in a folder of ``folder``, or just read what is there."""
        kept = folder / TUNING
        if not readonly:
            try:
                kept.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError:
                readonly = True
        if kept.is_dir():
            mode = "AUTOTUNE_CACHE_MODE_READ" if readonly else "AUTOTUNE_CACHE_MODE_UPDATE"
            self.options = {_FOLDER: str(kept), _MODE: mode}

    def added_to(self, program: Program) -> Program:
        """``program`` with these options, unless it or ``XLA_FLAGS`` says where."""
        if not self.options or _FOLDER in flags.XLA_FLAGS.get():
            return program
        return dataclasses.replace(program, options={**self.options, **program.options})


def of_gpus(common: Capabilities) -> Capabilities:
    """``common``, with what GPUs are: they multiply as TF32 where they may, and add in any order."""
    return dataclasses.replace(common, tf32=True, unordered_scatter=not _deterministic())


def _deterministic() -> bool:
    """Whether ``XLA_FLAGS`` has the compiler take ordered sums only."""
    chosen = dict(part.lstrip("-").partition("=")[::2] for part in flags.XLA_FLAGS.get().split())
    return any(chosen.get(name, "false").lower() in ("", "1", "true") for name in _DETERMINISTIC)
