"""Names of GPUs to compile for: ``h100:1``, ``h200:8``, ``h100:2x8`` (two hosts of eight)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Final

MSG_BAD_TOPOLOGY: Final = (
    "XLA_AOT_TOPOLOGY={text!r} names no GPUs: {reason}. Write a kind and how many of them ({kinds}; h200:8), "
    "or hosts and GPUs of each (h100:2x8)"
)
_FORM: Final = re.compile(r"(?P<kind>[a-z]\w*)(:((?P<hosts>\d+)x)?(?P<count>\d+))?")


@dataclasses.dataclass(frozen=True, slots=True)
class GpuKind:
    """The figures of a GPU, from NVIDIA's data sheets and the CUDA programming guide.

    ``processors`` are its multiprocessors, with ``lanes`` float32 units each. ``bandwidth`` is in bytes per second.
    ``optin`` is the largest shared memory in bytes that one block may request.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    lanes: int
    clock_ghz: float
    memory_bytes: int
    bandwidth: int
    l2_bytes: int
    shared_per_processor: int
    optin: int


KINDS: Final[Mapping[str, GpuKind]] = {
    "a100": GpuKind(
        "NVIDIA A100-SXM4-80GB",
        (8, 0), 108, 64, 1.41, 81920 << 20, 2_039_000_000_000, 40 << 20, 164 << 10, 163 << 10,
    ),
    "h100": GpuKind(
        "NVIDIA H100 80GB HBM3",
        (9, 0), 132, 128, 1.98, 81559 << 20, 3_352_320_000_000, 50 << 20, 228 << 10, 227 << 10,
    ),
    "h200": GpuKind(
        "NVIDIA H200",
        (9, 0), 132, 128, 1.98, 143771 << 20, 4_800_000_000_000, 50 << 20, 228 << 10, 227 << 10,
    ),
    "b200": GpuKind(
        "NVIDIA B200",
        (10, 0), 148, 128, 1.965, 183359 << 20, 8_000_000_000_000, 126 << 20, 228 << 10, 227 << 10,
    ),
}  # fmt: skip

# XLA's description of a GPU (xla/stream_executor/device_description.proto, jaxlib 0.10.2), as text
_TARGET: Final = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {kind.shared_per_processor}
  threads_per_core_limit: 2048
  core_count: {kind.processors}
  fpus_per_core: {kind.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {kind.bandwidth}
  l2_cache_size: {kind.l2_bytes}
  clock_rate_ghz: {kind.clock_ghz}
  device_memory_size: {kind.memory_bytes}
  shared_memory_per_block_optin: {kind.optin}
  cuda_compute_capability {{ major: {kind.capability[0]} minor: {kind.capability[1]} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{kind.name}"
"""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuTopology:
    """GPUs to compile for: ``hosts`` with ``count`` of one kind each."""

    key: str
    hosts: int
    count: int

    @property
    def kind(self) -> GpuKind:
        """The kind of these GPUs."""
        return KINDS[self.key]

    @property
    def name(self) -> str:
        """The name by which ``XLA_AOT_TOPOLOGY`` selects them."""
        return (
            f"{self.key}:{self.hosts}x{self.count}"
            if self.hosts > 1
            else f"{self.key}:{self.count}"
        )

    def library_options(self) -> dict[str, str]:
        """Options for the library.

        The GPU's description, and the numbers of partitions, hosts and GPUs per host.
        """
        return {
            "target_config": _TARGET.format(kind=self.kind),
            "topology": f"1x{self.hosts}x{self.count}",
        }


def parse_topology(text: str) -> GpuTopology:
    """The GPUs that ``text`` names. Raises ValueError, which shows the accepted forms."""
    kinds = ", ".join(KINDS)
    match = _FORM.fullmatch(text.strip().lower())
    if match is None:
        reason = "that is no kind and number"
    elif match["kind"] not in KINDS:
        reason = f"{match['kind']!r} is not among the known kinds"
    else:
        topology = GpuTopology(match["kind"], int(match["hosts"] or 1), int(match["count"] or 1))
        if topology.hosts > 0 < topology.count:
            return topology
        reason = "a number is 0"
    raise ValueError(MSG_BAD_TOPOLOGY.format(text=text, reason=reason, kinds=kinds))
