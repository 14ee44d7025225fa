"""The environment variables of GPUs that this package reads, each declared once.

Those of the memory allocator have jax's names, so that one setting holds for both.
"""

from __future__ import annotations

from typing import Final

from xla_core.support.flags import Flag, parse_bool

VISIBLE_DEVICES: Final = Flag(
    "CUDA_VISIBLE_DEVICES",
    str,
    "",
    "the GPUs of this process (`0,2`), read by NVIDIA's driver",
    shown="all of the host",
)
ALLOCATOR: Final = Flag(
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    str,
    "default",
    "allocator of GPU memory: `default`, `bfc`, `cuda_async`, `platform` (no pool) or `vmm`",
)
PREALLOCATE: Final = Flag(
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    parse_bool,
    True,
    "`0` allocates GPU memory as it is needed, which leaves room for CUDA PyTorch in the same process",
)
MEM_FRACTION: Final = Flag(
    "XLA_CLIENT_MEM_FRACTION",
    str,
    "",
    "fraction of a GPU's memory that the allocator may use: `0.4`",
    shown="XLA's: `0.75`",
)
OLD_MEM_FRACTION: Final = Flag(
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    str,
    "",
    "the former name of `XLA_CLIENT_MEM_FRACTION`",
)
COLLECTIVE_MEMORY: Final = Flag(
    "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB",
    str,
    "",
    "MiB of GPU memory reserved for collectives",
)
