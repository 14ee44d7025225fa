"""The environment variables of TPUs that this package reads or sets, each declared once.

Those that say where a process is in its job are among xla-core's.
"""

from __future__ import annotations

from typing import Final

from xla_core.support.flags import Flag

_LAUNCHED: Final = "set by the launcher or `configure_topology`"

LIBRARY_PATH: Final = Flag("TPU_LIBRARY_PATH", str, "", "another libtpu.so than the package's")
LIBTPU_INIT_ARGS: Final = Flag(
    "LIBTPU_INIT_ARGS",
    str,
    "",
    "libtpu's flags; torch_xla's four defaults are added for those it does not name",
)
MEGACORE: Final = Flag(
    "TPU_MEGACORE",
    str,
    "megacore_dense",
    "v4: `megacore_dense` is one device per chip, `default` one per core",
)
ML_PLATFORM: Final = Flag("TPU_ML_PLATFORM", str, "PyTorch/XLA", "what libtpu is told that runs it")
SKIP_METADATA: Final = Flag(
    "TPU_SKIP_MDS_QUERY", str, "", "anything: GCE's metadata server is not asked"
)
ACCELERATOR_TYPE: Final = Flag(
    "TPU_ACCELERATOR_TYPE", str, "", "the slice, as GKE describes it: `v5litepod-16`"
)
NUM_DEVICES: Final = Flag(
    "TPU_NUM_DEVICES", str, "", "TPU devices of this host, where they are not looked for"
)
VISIBLE_CHIPS: Final = Flag(
    "TPU_VISIBLE_CHIPS", str, "", "the chips of this process", shown=_LAUNCHED
)
PROCESS_BOUNDS: Final = Flag(
    "TPU_PROCESS_BOUNDS", str, "", "the slice's processes along three axes", shown=_LAUNCHED
)
CHIPS_PER_PROCESS_BOUNDS: Final = Flag(
    "TPU_CHIPS_PER_PROCESS_BOUNDS", str, "", "a process's chips along them", shown=_LAUNCHED
)
PROCESS_PORT: Final = Flag(
    "TPU_PROCESS_PORT", str, "", "where the slice's other processes find this one", shown=_LAUNCHED
)
HOST_BOUNDS: Final = Flag("TPU_HOST_BOUNDS", str, "", "GKE's name of `TPU_PROCESS_BOUNDS`")
CHIPS_PER_HOST_BOUNDS: Final = Flag(
    "TPU_CHIPS_PER_HOST_BOUNDS", str, "", "GKE's name of `TPU_CHIPS_PER_PROCESS_BOUNDS`"
)
MAX_INFLIGHT: Final = Flag(
    "PJRT_TPU_MAX_INFLIGHT_COMPUTATIONS",
    str,
    "",
    "programs enqueued at a time",
    shown="libtpu's: 32",
)
XLA_MAX_INFLIGHT: Final = Flag(
    "XLA_TPU_MAX_INFLIGHT_COMPUTATIONS",
    str,
    "",
    "the same, under torch_xla's other name",
    shown="libtpu's: 32",
)
