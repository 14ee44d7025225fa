"""torch_xla.core.xla_env_vars (xenv): names of environment variables, as constants."""

from __future__ import annotations

from typing import Final

CPU_NUM_DEVICES = "CPU_NUM_DEVICES"
PJRT_CPU_ASYNC_CLIENT = "PJRT_CPU_ASYNC_CLIENT"
PJRT_DEVICE = "PJRT_DEVICE"
PJRT_LOCAL_PROCESS_COUNT = "PJRT_LOCAL_PROCESS_COUNT"
PJRT_LOCAL_PROCESS_RANK = "PJRT_LOCAL_PROCESS_RANK"
PJRT_TPU_MAX_INFLIGHT_COMPUTATIONS = "PJRT_TPU_MAX_INFLIGHT_COMPUTATIONS"
TPU_ACCELERATOR_TYPE = "TPU_ACCELERATOR_TYPE"
TPU_LIBRARY_PATH = "TPU_LIBRARY_PATH"
TPU_NUM_DEVICES = "TPU_NUM_DEVICES"
TPU_PROCESS_ADDRESSES = "TPU_PROCESS_ADDRESSES"
TPU_PROCESS_BOUNDS = "TPU_PROCESS_BOUNDS"
TPU_PROCESS_PORT = "TPU_PROCESS_PORT"
TPU_VISIBLE_CHIPS = "TPU_VISIBLE_CHIPS"
XLA_USE_SPMD = "XLA_USE_SPMD"

# Further names of torch_xla's, for scripts that pass them to os.environ; nothing here reads these constants.
_TEXT: Final = (
    "ACCELERATOR_TYPE CLOUD_TPU_TASK_ID LOCAL_RANK LOCAL_WORLD_SIZE PJRT_DIST_SERVICE_ADDR "
    "PJRT_DYNAMIC_PLUGINS PJRT_SELECT_DEFAULT_DEVICE RANK TPUVM_MODE TPU_CHIPS_PER_HOST_BOUNDS "
    "TPU_CHIPS_PER_PROCESS_BOUNDS TPU_HOST_BOUNDS TPU_MESH_CTLER_ADDR=TPU_MESH_CONTROLLER_ADDRESS "
    "TPU_MESH_CTLER_PORT=TPU_MESH_CONTROLLER_PORT TPU_SKIP_MDS_QUERY TPU_WORKER_HOSTNAMES "
    "TPU_WORKER_ID WORKER_ID WORLD_SIZE"
)
_PAIRS: Final = [item.partition("=") for item in _TEXT.split()]
_NOT_READ: Final = {name: value or name for name, _, value in _PAIRS}


def __getattr__(name: str) -> str:
    try:
        return _NOT_READ[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_NOT_READ})
