"""Lowering: from recorded operators to StableHLO, one rule per operator overload."""

from __future__ import annotations

import importlib


def load_rules() -> None:
    """Import every rule file, which registers its rules."""
    importlib.import_module("xla_core.lowering.rules")
