"""The environment variables of this package."""

from __future__ import annotations

from typing import Final

from xla_core.support.flags import Flag, parse_bool

FORMATS: Final = ("text", "dot", "hlo", "stablehlo")


def _parse_format(text: str) -> str:
    if text not in FORMATS:
        raise ValueError(f"expected one of {', '.join(FORMATS)}")
    return text


DEBUG: Final = Flag(
    "PT_XLA_DEBUG", parse_bool, False, "`1` reports compilations, executions and slow habits"
)
DEBUG_LEVEL: Final = Flag(
    "PT_XLA_DEBUG_LEVEL", int, 0, "`1` reports compilations, `2` executions as well"
)
DEBUG_FILE: Final = Flag(
    "PT_XLA_DEBUG_FILE", str, "", "append these reports to this file instead of stderr"
)
MAX_FRAME: Final = Flag(
    "PT_XLA_DEBUG_MAX_FRAME", int, 8, "number of frames of the Python stack in reports"
)
IR_DEBUG: Final = Flag(
    "XLA_IR_DEBUG", parse_bool, False, "`1` names Python lines in dumps of the trace"
)
HLO_DEBUG: Final = Flag(
    "XLA_HLO_DEBUG",
    parse_bool,
    False,
    "`1` writes scopes and Python lines into programs as HLO metadata",
)
DUMP_POST_OPTIMIZATIONS: Final = Flag(
    "XLA_DUMP_POST_OPTIMIZATIONS",
    parse_bool,
    False,
    "`1` makes HLO texts of pending tensors those of the compiled program",
)
TRACK_MEMORY: Final = Flag(
    "XLA_TRACK_MEMORY",
    parse_bool,
    False,
    "`1` remembers the line that made each value, for out-of-memory errors",
    see="docs/troubleshoot.md#out-of-memory",
)
SAVE_TENSORS_FILE: Final = Flag(
    "XLA_SAVE_TENSORS_FILE", str, "", "append every step that is run to this file"
)
SAVE_TENSORS_FMT: Final = Flag(
    "XLA_SAVE_TENSORS_FMT",
    _parse_format,
    "text",
    "format of that file: `text`, `dot`, `hlo` or `stablehlo`",
)
SAVE_GRAPH_FMT: Final = Flag(
    "SAVE_GRAPH_FMT",
    _parse_format,
    "text",
    "format of `graph_saver`: `text`, `dot`, `hlo` or `stablehlo`",
)
METRICS_FILE: Final = Flag(
    "XLA_METRICS_FILE",
    str,
    "",
    "append the metrics report of every step to this file, or to `STDERR` or `STDOUT`",
)
MODELCMP_SAVEDIR: Final = Flag(
    "MODELCMP_SAVEDIR", str, "", "folder in which `model_comparator` saves tensors"
)
FULL_TRACEBACK: Final = Flag(
    "XLA_FULL_TRACEBACK",
    parse_bool,
    False,
    "`1` shows all frames, also those of PyTorch and these packages that `xla_debug.tracebacks` and "
    "`xla-debug run` leave out",
)


def level() -> int:
    """The level of reports: 0 none, 1 compilations, 2 executions as well, 100 everything (PT_XLA_DEBUG=1)."""
    return 100 if DEBUG.get() else DEBUG_LEVEL.get()
