"""The environment variables that xla-core reads, each declared once.

Other packages declare theirs in a module ``settings``. ``tools/environment_table.py`` writes README's table from
all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

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
    "CLOUD_TPU_TASK_ID",
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
    "TPU_PROCESS_ADDRESSES",
    "TPU_WORKER_HOSTNAMES",
    "TPU_WORKER_ID",
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
]

_T = TypeVar("_T")


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


FLAGS: Final[dict[str, Flag[Any]]] = {}


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
    "XLA_AOT_READS", str, "error", "what reading a value does there: `error`, or `zeros`"
)
USE_SPMD: Final = Flag(
    "XLA_USE_SPMD", parse_bool, False, "`1` makes all devices one, as `xr.use_spmd()` does"
)
AUTO_SPMD: Final = Flag(
    "XLA_AUTO_SPMD",
    parse_bool,
    False,
    "`1` lets `xr.use_spmd()` be `xr.use_spmd(auto=True)`: the first training step chooses shardings",
)
XLA_FLAGS: Final = Flag(
    "XLA_FLAGS", str, "", "read by XLA itself; part of the persistent cache's key"
)
XPU_LIBRARY_PATH: Final = Flag(
    "XPU_LIBRARY_PATH", str, "", "another PJRT library for Intel GPUs than the package's"
)
NEURON_LIBRARY_PATH: Final = Flag(
    "NEURON_LIBRARY_PATH", str, "", "another PJRT library for Neuron cores than the package's"
)
NEURON_RT_VISIBLE_CORES: Final = Flag(
    "NEURON_RT_VISIBLE_CORES", str, "", "the Neuron cores of this host: `0-3,8`"
)
NEURON_RT_ROOT_COMM_ID: Final = Flag(
    "NEURON_RT_ROOT_COMM_ID", str, "", "where Neuron's processes meet: `host:port`"
)
NEURONCORE_NUM_DEVICES: Final = Flag(
    "NEURONCORE_NUM_DEVICES", str, "", "processes of this host, where no Neuron cores are named"
)

# -- programs -----------------------------------------------------------------------------------------
CACHE_PATH: Final = Flag(
    "XLA_PERSISTENT_CACHE_PATH", str, "", "folder of the persistent compilation cache"
)
CACHE_READ_ONLY: Final = Flag(
    "XLA_PERSISTENT_CACHE_READ_ONLY",
    parse_bool,
    False,
    "`1` finds programs in that folder and writes none",
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
    "file with a key of your own: programs are signed with it, and what is not is never loaded",
)
CACHE_MAX_MB: Final = Flag(
    "XLA_PERSISTENT_CACHE_MAX_MB",
    int,
    0,
    "MiB that the folder may have; programs that were not used for longest are removed; 0 is no bound",
)
CACHE_PREFETCH: Final = Flag(
    "XLA_CACHE_PREFETCH",
    parse_bool,
    True,
    "`0` does not load (and rehearse) the programs of the script's last run ahead of their use",
)
SELECT_DEFAULT_DEVICE: Final = Flag(
    "PJRT_SELECT_DEFAULT_DEVICE",
    parse_bool,
    True,
    "without PJRT_DEVICE take a TPU that is there, else the CPU; 0 raises an error instead",
)
COMPILATION_CACHE_SIZE: Final = Flag(
    "XLA_COMPILATION_CACHE_SIZE",
    parse_positive,
    2048,
    "compiled programs that a process keeps in memory; those used least recently are forgotten, also when "
    "Linux's limit of memory mappings (`vm.max_map_count`) comes near",
)
COMPILE_PROGRESS: Final = Flag(
    "XLA_COMPILE_PROGRESS",
    parse_bool,
    True,
    "`0` leaves out the line that a terminal shows while a program is compiled",
)
QUIET: Final = Flag(
    "XLA_QUIET",
    parse_bool,
    False,
    "`1` leaves out what nobody asked for: warnings of fallbacks and recompilations, notices, progress lines; "
    "errors stay. Read when torch is imported",
)
COMPILE_EFFORT: Final = Flag(
    "XLA_COMPILE_EFFORT",
    parse_effort,
    "auto",
    "on the CPU, `fast` and `medium` make code that is compiled soon, `full` code that runs fast; `auto` goes by "
    "what a program computes",
)
COMPILE_THREADS: Final[Flag[int | None]] = Flag(
    "XLA_COMPILE_THREADS",
    parse_count,
    None,
    "how many programs are compiled at once, beside the thread that records; with `0` `sync()` returns when its "
    "program is compiled and enqueued",
    shown="the processor cores, at most 8; `0` with one core",
    see="docs/compiling.md",
)
OUTLINE_REPEATS: Final = Flag(
    "XLA_OUTLINE_REPEATS",
    parse_auto,
    None,
    "`1` compiles what repeats inside a step once, as functions that are called; `0` inlines everything",
    shown="the plugin's choice",
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
    "the lengths up to which programs for several lengths are made (`64,128,512`); longer ones are compiled for "
    "themselves",
    shown="powers of two and 1.5 times them",
    see="docs/shapes.md",
)
VARYING_SHAPES: Final = Flag(
    "XLA_VARYING_SHAPES",
    parse_auto,
    None,
    "steps of 64 operations and more that differ in their sizes only share programs for all lengths up to a bound, "
    "from the fourth length on; `1` does it for all steps, recurrent nets too, from the third; `0` never",
    shown="auto",
    see="docs/shapes.md",
)

# -- steps and tensors --------------------------------------------------------------------------------
SYNC_WAIT: Final = Flag(
    "XLA_SYNC_WAIT", parse_bool, False, "`1` lets every `sync()` wait until the step is done"
)
CHECK_INDICES: Final = Flag(
    "XLA_CHECK_INDICES",
    parse_bool,
    False,
    "`1` raises IndexError for indices out of range, when the step has run; read at an operator's first use",
    see="docs/compatibility.md#indices-out-of-range",
)
COPY_CPU_OPERANDS: Final = Flag(
    "XLA_COPY_CPU_OPERANDS",
    parse_bool,
    False,
    "`1` lets elementwise operators (`xla + cpu`) copy CPU tensors to the device in place of the error",
    see="docs/compatibility.md#cpu-tensors-among-the-operands",
)
FLIGHT_DIR: Final = Flag(
    "XLA_FLIGHT_DIR",
    str,
    "",
    "reports of what each process did last, written when a job hangs or fails, go to this folder",
    shown="`xla-flight-UID` among the temporary files",
    see="docs/flight_recorder.md",
)
USE_BF16: Final = Flag(
    "XLA_USE_BF16", parse_bool, False, "`1` keeps float and double values as bfloat16 on the device"
)
LTC_USE_BF16: Final = Flag(
    "LTC_USE_BF16", parse_bool, False, "Lazy Tensor Core's name of `XLA_USE_BF16`"
)
DOWNCAST_BF16: Final = Flag(
    "XLA_DOWNCAST_BF16",
    parse_bool,
    False,
    "`1` keeps float values as bfloat16, double values as float32",
)
USE_32BIT_LONG: Final = Flag(
    "XLA_USE_32BIT_LONG",
    parse_bool,
    False,
    "`1` keeps 64-bit integers as 32-bit ones on the device",
)
EAGER_DEBUG_MODE: Final = Flag(
    "XLA_USE_EAGER_DEBUG_MODE",
    parse_bool,
    False,
    "`1` starts in eager mode: operators run one by one",
)
GET_OPBYOP: Final = Flag(
    "GET_TENSORS_OPBYOP",
    parse_bool,
    False,
    "`1` runs each operator on its own where a value is read",
)
SYNC_OPBYOP: Final = Flag(
    "SYNC_TENSORS_OPBYOP",
    parse_bool,
    False,
    "`1` runs each operator of a sync as a program of its own",
)
METRICS_SAMPLES: Final = Flag(
    "XLA_METRICS_SAMPLES", int, 1024, "samples that each metric keeps for its percentiles"
)
METRICS_PERCENTILES: Final[Flag[tuple[float, ...]]] = Flag(
    "XLA_METRICS_PERCENTILES",
    parse_fractions,
    (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99),
    "the percentiles that reports show, as fractions: `0.5:0.9`",
)

# -- the job that this process is part of ----------------------------------------------------------------
COORDINATOR_ADDRESS: Final = Flag(
    "XLA_COORDINATOR_ADDRESS",
    str,
    "",
    "`host:port` where the processes of a job meet that you start yourself",
)
PROCESS_COUNT: Final = Flag("XLA_PROCESS_COUNT", str, "", "the number of its processes")
PROCESS_INDEX: Final = Flag("XLA_PROCESS_INDEX", str, "", "this process's number among them")
LOCAL_PROCESS_RANK: Final = Flag(
    "PJRT_LOCAL_PROCESS_RANK", str, "", "its number on this host; the launcher sets it"
)
LOCAL_PROCESS_COUNT: Final = Flag(
    "PJRT_LOCAL_PROCESS_COUNT",
    str,
    "",
    "the number of processes on this host; the launcher sets it",
)
COORDINATOR_IS_LAUNCHER: Final = Flag(
    "XLA_COORDINATOR_IS_LAUNCHER", str, "", "`1`: the launcher runs the coordinator, and says so"
)
TPU_PROCESS_ADDRESSES: Final = Flag(
    "TPU_PROCESS_ADDRESSES", str, "", "the processes of a TPU slice, `host:port` each"
)
TPU_WORKER_HOSTNAMES: Final = Flag("TPU_WORKER_HOSTNAMES", str, "", "the hosts of a TPU slice")
TPU_WORKER_ID: Final = Flag("TPU_WORKER_ID", str, "", "this host's number in it")
CLOUD_TPU_TASK_ID: Final = Flag("CLOUD_TPU_TASK_ID", str, "", "this process's number in it")
START_TIMEOUT: Final = Flag(
    "XLA_DIST_START_TIMEOUT", int, 120, "seconds that a process waits for all others to start"
)
FAILURE_TIMEOUT: Final = Flag(
    "XLA_DIST_FAILURE_TIMEOUT", int, 6, "seconds without a sign of life that make a process dead"
)
ABSENT_TIMEOUT: Final = Flag(
    "XLA_DIST_ABSENT_TIMEOUT",
    int,
    8,
    "seconds that a process which was never started on this host, or has ended there, is waited for",
)
