"""From a torch operator to an entry in the trace: one handler per overload, made when first met."""

from __future__ import annotations

from xla_core.dispatch.resolve import install

__all__ = ["install"]
