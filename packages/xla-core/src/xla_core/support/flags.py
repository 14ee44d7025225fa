"""The environment variables that xla-core reads, each declared once.

Other packages declare theirs in a module ``settings``. ``tools/environment_table.py`` writes README's table from
all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeVar

__all__ = [
    "ABSENT_TIMEOUT",
    "AOT_READS",
    "AOT_TOPOLOGY",
    "AUTO_SPMD",
    "CACHE_ALLOW_SHARED",
    "CACHE_KEY_FILE",
    "CACHE_MAX_MB",
    "CACHE_PATH",
    "CACHE_PREFETCH",
    "CACHE_READ_ONLY",
    "CHECK_INDICES",
    "COMPILATION_CACHE_SIZE",
    "COMPILE_EFFORT",
    "COMPILE_PROGRESS",
    "COMPILE_THREADS",
    "COORDINATOR_ADDRESS",
    "COORDINATOR_IS_LAUNCHER",
    "COPY_CPU_OPERANDS",
    "CPU_NUM_DEVICES",
    "DOWNCAST_BF16",
    "EAGER_DEBUG_MODE",
    "EFFORTS",
    "FAILURE_TIMEOUT",
    "FLAGS",
    "FLIGHT_DIR",
    "Flag",
    "GET_OPBYOP",
    "LOCAL_PROCESS_COUNT",
    "LOCAL_PROCESS_RANK",
    "LOOP_REPEATS",
    "LTC_USE_BF16",
    "METRICS_PERCENTILES",
    "METRICS_SAMPLES",
    "NEURONCORE_NUM_DEVICES",
    "NEURON_LIBRARY_PATH",
    "NEURON_RT_ROOT_COMM_ID",
    "NEURON_RT_VISIBLE_CORES",
    "OUTLINE_REPEATS",
    "PJRT_DEVICE",
    "PROCESS_COUNT",
    "PROCESS_INDEX",
    "QUIET",
    "REGISTER_INSTALLED_PLUGINS",
    "SELECT_DEFAULT_DEVICE",
    "START_TIMEOUT",
    "STEP_STAGES",
    "SYNC_OPBYOP",
    "SYNC_WAIT",
    "USE_32BIT_LONG",
    "USE_BF16",
    "USE_SPMD",
    "VARYING_LIMITS",
    "VARYING_SHAPES",
    "XLA_FLAGS",
    "XPU_LIBRARY_PATH",
    "parse_auto",
    "parse_bool",
    "parse_count",
    "parse_effort",
    "parse_fractions",
    "parse_limits",
    "parse_positive",
    "values_in",
]

_T = TypeVar("_T", covariant=True)


class Flag(Generic[_T]):
    """One environment variable: its name, type, default and meaning. Read when asked for.

    ``shown`` is what README says of a default that is no plain value, ``see`` a document that says more, relative
    to the repository's root.
    """

    def __init__(
        self,
        name: str,
        parse: Callable[[str], _T],
        default: _T,
        meaning: str,
        *,
        shown: str | None = None,
        see: str | None = None,
    ) -> None:
        self.name: Final = name
        self.default: Final = default
        self.meaning: Final = meaning
        self.shown: Final = shown
        self.see: Final = see
        self._parse = parse
        FLAGS[name] = self

    def text(self, options: Mapping[str, str] | None = None) -> str:
        """What ``options`` (default: the environment) have under its name, without spaces around; else ``""``."""
        return (os.environ if options is None else options).get(self.name, "").strip()

    def get(self, options: Mapping[str, str] | None = None) -> _T:
        """The value from ``options`` (default: the environment), or the default.

        Raises ValueError naming the variable.
        """
        text = (os.environ if options is None else options).get(self.name)
        if text is None or text == "":
            return self.default
        try:
            return self._parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r} in the environment: {error}") from None


FLAGS: Final[dict[str, Flag[object]]] = {}


def values_in(text: str) -> dict[str, str]:
    """The flags in a text such as ``XLA_FLAGS``: their values by name, "" for one without a value."""
    return dict(part.lstrip("-").partition("=")[::2] for part in text.split())


def parse_bool(text: str) -> bool:
    """``1, true, yes, on`` and ``0, false, no, off`` in any case. Raises ValueError for the rest."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected one of 1, true, yes, on, 0, false, no, off")


def parse_auto(text: str) -> bool | None:
    """``auto`` is None, else as ``parse_bool``. Raises ValueError for the rest."""
    return None if text.strip().lower() == "auto" else parse_bool(text)


def parse_count(text: str) -> int:
    """A whole number, 0 included. Raises ValueError for the rest."""
    if not text.strip().isdecimal():
        raise ValueError("expected a whole number")
    return int(text)


def parse_positive(text: str) -> int:
    """A whole number of at least 1. Raises ValueError for the rest."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError("expected a whole number of at least 1")
    return int(text)


def parse_limits(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 2, in ascending order: ``64,128,512``. Raises ValueError for the rest."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 1 for word in words):
        raise ValueError("expected whole numbers of at least 2 with commas between them")
    return tuple(sorted(set(map(int, words))))


def parse_effort(text: str) -> str:
    """``auto``, ``fast``, ``medium`` or ``full`` in any case. Raises ValueError for the rest."""
    lowered = text.strip().lower()
    if lowered not in EFFORTS:
        raise ValueError(f"expected one of {', '.join(EFFORTS)}")
    return lowered


def parse_fractions(text: str) -> tuple[float, ...]:
    """Numbers between colons, in order: ``0.5:0.9``. Raises ValueError for the rest."""
    return tuple(sorted(float(part) for part in text.split(":")))


EFFORTS: Final = ("auto", "fast", "medium", "full")

# -- devices ------------------------------------------------------------------------------------------
PJRT_DEVICE: Final = Flag(
    "PJRT_DEVICE",
    str,
    "",
    "which device plugin runs programs: `CPU`, or the name of another plugin",
    shown="the best plugin that is installed",
)
CPU_NUM_DEVICES: Final = Flag(
    "CPU_NUM_DEVICES",
    parse_positive,
    1,
    "number of devices of the CPU plugin: `xla:0`, `xla:1`, ...",
)
REGISTER_INSTALLED_PLUGINS: Final = Flag(
    "XLA_REGISTER_INSTALLED_PLUGINS",
    parse_bool,
    True,
    "`0` ignores torch_xla's entry points of device plugins",
)
AOT_TOPOLOGY: Final = Flag(
    "XLA_AOT_TOPOLOGY",
    str,
    "",
    "compile for this topology (`v5e:4x4`, `h200:8`) without a chip",
    see="packages/xla-pjrt-tpu/README.md",
)
AOT_READS: Final = Flag(
    "XLA_AOT_READS",
    str,
    "error",
    "what reading a value does when `XLA_AOT_TOPOLOGY` is set: `error`, or `zeros`",
)
USE_SPMD: Final = Flag(
    "XLA_USE_SPMD", parse_bool, False, "`1` shows all devices as one, as `xr.use_spmd()` does"
)
AUTO_SPMD: Final = Flag(
    "XLA_AUTO_SPMD",
    parse_bool,
    False,
    "`1` makes `xr.use_spmd()` mean `xr.use_spmd(auto=True)`: shardings are chosen at the first training step",
)
XLA_FLAGS: Final = Flag(
    "XLA_FLAGS", str, "", "read by XLA itself; part of the persistent cache's key"
)
XPU_LIBRARY_PATH: Final = Flag(
    "XPU_LIBRARY_PATH",
    str,
    "",
    "path of a PJRT library for Intel GPUs, to be used in place of the package's",
)
NEURON_LIBRARY_PATH: Final = Flag(
    "NEURON_LIBRARY_PATH",
    str,
    "",
    "path of a PJRT library for Neuron cores, to be used in place of the package's",
)
NEURON_RT_VISIBLE_CORES: Final = Flag(
    "NEURON_RT_VISIBLE_CORES", str, "", "the Neuron cores of this host: `0-3,8`"
)
NEURON_RT_ROOT_COMM_ID: Final = Flag(
    "NEURON_RT_ROOT_COMM_ID", str, "", "the address at which Neuron's processes meet: `host:port`"
)
NEURONCORE_NUM_DEVICES: Final = Flag(
    "NEURONCORE_NUM_DEVICES",
    str,
    "",
    "number of processes on this host when `NEURON_RT_VISIBLE_CORES` is not set",
)

# -- programs -----------------------------------------------------------------------------------------
CACHE_PATH: Final = Flag(
    "XLA_PERSISTENT_CACHE_PATH", str, "", "folder of the persistent compilation cache"
)
CACHE_READ_ONLY: Final = Flag(
    "XLA_PERSISTENT_CACHE_READ_ONLY",
    parse_bool,
    False,
    "`1` reads programs from that folder but writes none",
)
CACHE_ALLOW_SHARED: Final = Flag(
    "XLA_PERSISTENT_CACHE_ALLOW_SHARED",
    parse_bool,
    False,
    "`1` accepts a cache folder that other users can write to",
)
CACHE_KEY_FILE: Final = Flag(
    "XLA_PERSISTENT_CACHE_KEY_FILE",
    str,
    "",
    "file with a secret key: programs are signed with it, and programs without its signature are never loaded",
)
CACHE_MAX_MB: Final = Flag(
    "XLA_PERSISTENT_CACHE_MAX_MB",
    int,
    0,
    "largest size of the folder in MiB; the least recently used programs are removed; 0 sets no limit",
)
CACHE_PREFETCH: Final = Flag(
    "XLA_CACHE_PREFETCH",
    parse_bool,
    True,
    "`0` turns off loading (and rehearsing) the programs of the script's last run before they are needed",
)
SELECT_DEFAULT_DEVICE: Final = Flag(
    "PJRT_SELECT_DEFAULT_DEVICE",
    parse_bool,
    True,
    "without PJRT_DEVICE, use a TPU if there is one, else the CPU; `0` raises an error instead",
)
COMPILATION_CACHE_SIZE: Final = Flag(
    "XLA_COMPILATION_CACHE_SIZE",
    parse_positive,
    2048,
    "number of compiled programs that a process keeps in memory; the least recently used are dropped beyond it, "
    "or when the process comes close to Linux's limit of memory mappings (`vm.max_map_count`)",
)
COMPILE_PROGRESS: Final = Flag(
    "XLA_COMPILE_PROGRESS",
    parse_bool,
    True,
    "`0` turns off the progress line that a terminal shows while a program is compiled",
)
QUIET: Final = Flag(
    "XLA_QUIET",
    parse_bool,
    False,
    "`1` silences warnings of fallbacks and recompilations, notices and progress lines, but not errors; "
    "read when torch is imported",
)
COMPILE_EFFORT: Final = Flag(
    "XLA_COMPILE_EFFORT",
    parse_effort,
    "auto",
    "on the CPU, `fast` and `medium` shorten compilation, `full` makes code that runs fast; `auto` decides by "
    "what a program computes",
)
COMPILE_THREADS: Final[Flag[int | None]] = Flag(
    "XLA_COMPILE_THREADS",
    parse_count,
    None,
    "number of threads that compile programs in the background; with `0`, `sync()` returns after its "
    "program has been compiled and enqueued",
    shown="the number of processor cores, at most 8; `0` with one core",
    see="docs/compiling.md",
)
OUTLINE_REPEATS: Final = Flag(
    "XLA_OUTLINE_REPEATS",
    parse_auto,
    None,
    "`1` compiles the repeated parts of a step once, as functions that are called; `0` inlines everything",
    shown="the plugin's choice",
)
LOOP_REPEATS: Final = Flag(
    "XLA_LOOP_REPEATS",
    parse_auto,
    None,
    "`1` runs repeats that follow each other as loops; `0` makes no loop of them",
    shown="the plugin's choice",
    see="docs/repeats.md",
)
STEP_STAGES: Final = Flag(
    "XLA_STEP_STAGES",
    parse_auto,
    None,
    "`1` runs a step with repeats as several programs in a row, each compiled once; `0` always makes one program",
    shown="the plugin's choice",
)
VARYING_LIMITS: Final[Flag[tuple[int, ...]]] = Flag(
    "XLA_VARYING_LIMITS",
    parse_limits,
    (),
    "upper bounds of the programs that serve several lengths (`64,128,512`); each longer length has a program of "
    "its own",
    shown="powers of two and 1.5 times them",
    see="docs/shapes.md",
)
VARYING_SHAPES: Final = Flag(
    "XLA_VARYING_SHAPES",
    parse_auto,
    None,
    "steps of 64 or more operations that differ only in their sizes share programs for all lengths up to a bound, "
    "from the fourth length on, the steps of text generation sooner, smaller ones from the 17th; `1` does this for "
    "all steps from the third; `0` never does",
    shown="auto",
    see="docs/shapes.md",
)

# -- steps and tensors --------------------------------------------------------------------------------
SYNC_WAIT: Final = Flag(
    "XLA_SYNC_WAIT", parse_bool, False, "`1` makes every `sync()` wait until the step is done"
)
CHECK_INDICES: Final = Flag(
    "XLA_CHECK_INDICES",
    parse_auto,
    None,
    "indices that are uploaded raise IndexError if they are out of range; `1` checks all indices, `0` none; set it "
    "before the program starts",
    shown="auto",
    see="docs/compatibility.md#indices-out-of-range",
)
COPY_CPU_OPERANDS: Final = Flag(
    "XLA_COPY_CPU_OPERANDS",
    parse_bool,
    False,
    "`1` lets elementwise operators (`xla + cpu`) copy CPU tensors to the device instead of raising an error",
    see="docs/compatibility.md#cpu-tensors-among-the-operands",
)
FLIGHT_DIR: Final = Flag(
    "XLA_FLIGHT_DIR",
    str,
    "",
    "folder for the reports of what each process did last, which are written when a job hangs or fails",
    shown="`xla-flight-UID` in the folder of temporary files",
    see="docs/flight_recorder.md",
)
USE_BF16: Final = Flag(
    "XLA_USE_BF16", parse_bool, False, "`1` keeps float and double values as bfloat16 on the device"
)
LTC_USE_BF16: Final = Flag(
    "LTC_USE_BF16", parse_bool, False, "Lazy Tensor Core's name for `XLA_USE_BF16`"
)
DOWNCAST_BF16: Final = Flag(
    "XLA_DOWNCAST_BF16",
    parse_bool,
    False,
    "`1` keeps float values as bfloat16 and double values as float32 on the device",
)
USE_32BIT_LONG: Final = Flag(
    "XLA_USE_32BIT_LONG",
    parse_bool,
    False,
    "`1` keeps 64-bit integers as 32-bit integers on the device",
)
EAGER_DEBUG_MODE: Final = Flag(
    "XLA_USE_EAGER_DEBUG_MODE",
    parse_bool,
    False,
    "`1` starts in eager mode, in which operators run one by one",
)
GET_OPBYOP: Final = Flag(
    "GET_TENSORS_OPBYOP",
    parse_bool,
    False,
    "`1` runs the operators of a step one by one when a value is read",
)
SYNC_OPBYOP: Final = Flag(
    "SYNC_TENSORS_OPBYOP",
    parse_bool,
    False,
    "`1` runs the operators of a step one by one at `sync()`",
)
METRICS_SAMPLES: Final = Flag(
    "XLA_METRICS_SAMPLES", int, 1024, "number of samples that each metric keeps for its percentiles"
)
METRICS_PERCENTILES: Final[Flag[tuple[float, ...]]] = Flag(
    "XLA_METRICS_PERCENTILES",
    parse_fractions,
    (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99),
    "percentiles that reports show, as fractions: `0.5:0.9`",
)

# -- the job that this process is part of ----------------------------------------------------------------
COORDINATOR_ADDRESS: Final = Flag(
    "XLA_COORDINATOR_ADDRESS",
    str,
    "",
    "`host:port` at which processes meet that you start without a launcher",
)
PROCESS_COUNT: Final = Flag("XLA_PROCESS_COUNT", str, "", "number of processes of such a job")
PROCESS_INDEX: Final = Flag(
    "XLA_PROCESS_INDEX", str, "", "this process's number in such a job, from 0"
)
LOCAL_PROCESS_RANK: Final = Flag(
    "PJRT_LOCAL_PROCESS_RANK", str, "", "this process's number on its host; set by the launcher"
)
LOCAL_PROCESS_COUNT: Final = Flag(
    "PJRT_LOCAL_PROCESS_COUNT",
    str,
    "",
    "number of processes on this host; set by the launcher",
)
COORDINATOR_IS_LAUNCHER: Final = Flag(
    "XLA_COORDINATOR_IS_LAUNCHER",
    str,
    "",
    "`1` means that the launcher runs the coordinator; set by the launcher",
)
START_TIMEOUT: Final = Flag(
    "XLA_DIST_START_TIMEOUT",
    int,
    120,
    "seconds that a process waits for all other processes to start",
)
FAILURE_TIMEOUT: Final = Flag(
    "XLA_DIST_FAILURE_TIMEOUT",
    int,
    6,
    "seconds without a sign of life after which a process counts as dead",
)
ABSENT_TIMEOUT: Final = Flag(
    "XLA_DIST_ABSENT_TIMEOUT",
    int,
    8,
    "seconds of waiting for a process that was not started on this host, or has ended there",
)
