"""The environment variables of TPUs that this package reads or sets, each declared once."""

from __future__ import annotations

from typing import Final

from xla_core.support.flags import Flag

_LAUNCHED: Final = "set by the launcher or `configure_topology`"

LIBRARY_PATH: Final = Flag(
    "TPU_LIBRARY_PATH", str, "", "path of a libtpu.so, to be used in place of the package's"
)
LIBTPU_INIT_ARGS: Final = Flag(
    "LIBTPU_INIT_ARGS",
    str,
    "",
    "libtpu's flags; torch_xla's four defaults are added unless they are named here",
)
MEGACORE: Final = Flag(
    "TPU_MEGACORE",
    str,
    "megacore_dense",
    "on TPU v4, `megacore_dense` makes each chip one device, `default` each core",
)
ML_PLATFORM: Final = Flag(
    "TPU_ML_PLATFORM", str, "PyTorch/XLA", "name of the framework, as reported to libtpu"
)
SKIP_METADATA: Final = Flag(
    "TPU_SKIP_MDS_QUERY", str, "", "any value: GCE's metadata server is not asked"
)
ACCELERATOR_TYPE: Final = Flag(
    "TPU_ACCELERATOR_TYPE", str, "", "type of the slice, as GKE names it: `v5litepod-16`"
)
NUM_DEVICES: Final = Flag(
    "TPU_NUM_DEVICES", str, "", "number of TPU devices of this host, in place of counting them"
)
VISIBLE_CHIPS: Final = Flag(
    "TPU_VISIBLE_CHIPS", str, "", "chips that this process uses", shown=_LAUNCHED
)
PROCESS_BOUNDS: Final = Flag(
    "TPU_PROCESS_BOUNDS",
    str,
    "",
    "numbers of the slice's processes along three axes; `1,1,1` is a process by itself",
    shown=_LAUNCHED,
)
CHIPS_PER_PROCESS_BOUNDS: Final = Flag(
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    str,
    "",
    "numbers of a process's chips along these axes",
    shown=_LAUNCHED,
)
PROCESS_PORT: Final = Flag(
    "TPU_PROCESS_PORT",
    str,
    "",
    "port at which the slice's other processes reach this one",
    shown=_LAUNCHED,
)
HOST_BOUNDS: Final = Flag("TPU_HOST_BOUNDS", str, "", "GKE's name for `TPU_PROCESS_BOUNDS`")
CHIPS_PER_HOST_BOUNDS: Final = Flag(
    "TPU_CHIPS_PER_HOST_BOUNDS", str, "", "GKE's name for `TPU_CHIPS_PER_PROCESS_BOUNDS`"
)
MAX_INFLIGHT: Final = Flag(
    "PJRT_TPU_MAX_INFLIGHT_COMPUTATIONS",
    str,
    "",
    "number of programs that may be enqueued at a time",
    shown="libtpu's: 32",
)
XLA_MAX_INFLIGHT: Final = Flag(
    "XLA_TPU_MAX_INFLIGHT_COMPUTATIONS",
    str,
    "",
    "the same, under torch_xla's other name",
    shown="libtpu's: 32",
)
PROCESS_ADDRESSES: Final = Flag(
    "TPU_PROCESS_ADDRESSES", str, "", "addresses of the processes of a TPU slice, `host:port` each"
)
WORKER_HOSTNAMES: Final = Flag("TPU_WORKER_HOSTNAMES", str, "", "host names of a TPU slice")
WORKER_ID: Final = Flag("TPU_WORKER_ID", str, "", "this host's number in the TPU slice")
TASK_ID: Final = Flag("CLOUD_TPU_TASK_ID", str, "", "this process's number in the TPU slice")
COORDINATOR: Final = Flag(
    "MEGASCALE_COORDINATOR_ADDRESS", str, "", "first host of the first of several TPU slices"
)
SLICE_COUNT: Final = Flag("MEGASCALE_NUM_SLICES", str, "", "number of TPU slices of a job")
SLICE: Final = Flag("MEGASCALE_SLICE_ID", str, "", "this host's slice among them, from 0")
