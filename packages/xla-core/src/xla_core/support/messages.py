"""The one switch for what these packages say without being asked: ``XLA_QUIET``."""

from __future__ import annotations

import logging
from typing import Final

from xla_core.support import flags
from xla_core.support.own_packages import PACKAGES

LOGGERS: Final = ("torch_xla", *PACKAGES)
"""The roots of the packages' loggers: each module has one below them."""


def obey() -> None:
    """Do what ``XLA_QUIET`` says about logging: errors only. Called once, at the start."""
    if flags.QUIET.get():
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
