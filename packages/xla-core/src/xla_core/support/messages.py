"""The one switch for what these packages say without being asked: ``XLA_QUIET``."""

from __future__ import annotations

import logging
from typing import Final

from xla_core.support import flags

LOGGERS: Final = (
    "torch_xla",
    "xla_core",
    "xla_debug",
    "xla_dist",
    "xla_pjrt_cpu",
    "xla_pjrt_tpu",
    "xla_plan",
    "xla_spmd",
)
"""The roots of the packages' loggers: each module has one below them."""


def obey() -> None:
    """Do what ``XLA_QUIET`` says about logging: errors only. Called once, at the start."""
    if flags.QUIET.get():
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
