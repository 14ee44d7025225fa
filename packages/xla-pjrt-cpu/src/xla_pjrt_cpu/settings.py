"""The environment variables that the CPU plugin alone reads, each declared once."""

from __future__ import annotations

from typing import Final

from xla_core.support.flags import Flag, parse_bool

ASYNC_CLIENT: Final = Flag(
    "PJRT_CPU_ASYNC_CLIENT",
    parse_bool,
    True,
    "`0` makes the CPU plugin run programs synchronously, for debugging",
)
