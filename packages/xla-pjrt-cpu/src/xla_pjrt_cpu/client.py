"""``CpuClient``: the device contract on jaxlib's CPU runtime."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import xla_pjrt_cpu.settings as settings
from xla_core.contract import serialized_executable
from xla_core.contract.device_protocol import (
    Buffer,
    Executable,
    Outlining,
    Placement,
    Program,
    Topology,
)
from xla_core.pjrt import cpu_runtime
from xla_core.pjrt.client import PjrtClient
from xla_core.support import flags
from xla_pjrt_cpu.effort import effort_rule, options_by_effort
from xla_pjrt_cpu.fusions import RULE, options_for
from xla_pjrt_cpu.rehearsal import CpuExecutable, stored_as_rehearsable

_CPUINFO: Final = Path("/proc/cpuinfo")


def create_client(topology: Topology, options: Mapping[str, str]) -> CpuClient:
    """Create a CPU client; the plugin's entry point.

    Reads from ``options`` (usually the process's environment) ``CPU_NUM_DEVICES``, the number of devices of this
    process (default: 1), and ``PJRT_CPU_ASYNC_CLIENT``, whether runs are enqueued (default: true). Raises
    ValueError for a number of devices below 1.
    """
    return CpuClient(
        topology,
        num_devices=topology.local_device_count or _device_count(options),
        asynchronous=settings.ASYNC_CLIENT.get(options),
    )


def launch_environments(options: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables that a launcher sets in each process of this host, so that each has one device."""
    return [{flags.CPU_NUM_DEVICES.name: "1"}] * _device_count(options)


def _device_count(options: Mapping[str, str]) -> int:
    text = options.get(flags.CPU_NUM_DEVICES.name, "1")
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"CPU_NUM_DEVICES is {text!r}; set it to a whole number of at least 1")
    return int(text)


# launchers expect it as an attribute of the entry point
create_client.launch_environments = launch_environments  # type: ignore[attr-defined]


class CpuClient(PjrtClient):
    """XLA on this machine's processors, which ``num_devices`` devices share (default: 1).

    ``topology`` is this process's place in its job (default: no job). Without ``asynchronous`` (default: True) a
    run returns when it has ended.
    """

    device_type = "CPU"
    plugin = "xla-pjrt-cpu"
    version = "0.1.0"
    platform = "cpu"
    checks_arguments = False
    executable_type = CpuExecutable
    missing_device = ": CPU_NUM_DEVICES sets the number of each process's devices"
    # XLA clones a function for each of its calls before it optimizes the program. With this option (jaxlib
    # 0.10.2) it clones afterwards, which halves the compile time of a 48-layer GPT. Stages save another two
    # thirds of it. A launch costs 30 to 60 microseconds, which would slow down shorter steps, and the 33rd
    # pending launch waits for the first. XLA chooses the layouts around a convolution, but not across the
    # border of a function: with five of its blocks as calls of one function, ResNet-50's step takes 1.5
    # times as long, and compiles no faster.
    outlining = Outlining(
        wanted=True,
        min_staged=3000,
        most_stages=32,
        never_inside=("aten.convolution.default", "aten.convolution_backward.default"),
        options={cpu_runtime.EXTRA_OPTIONS: "xla_cpu_flatten_after_fusion"},
    )

    def __init__(
        self, topology: Topology | None = None, *, num_devices: int = 1, asynchronous: bool = True
    ) -> None:
        topology = topology or Topology()
        client = cpu_runtime.make_cpu_client(
            asynchronous=asynchronous,
            num_devices=num_devices,
            process_index=topology.process_index,
            process_count=topology.process_count,
            distributed_client=topology.distributed_client,
        )
        super().__init__(client, process_index=topology.process_index)

    def _kind(self, device: cpu_runtime.Device) -> str:
        del device
        return platform.machine() or "cpu"

    def compile(self, program: Program) -> Executable:
        """Compile for the program's placement; see ``PjrtClient.compile``.

        The program's own options override those that this plugin chooses.
        """
        of_user = flags.values_in(flags.XLA_FLAGS.get())
        # jaxlib would make a context of its own to parse the bytecode in, which takes 1.4 ms
        module = cpu_runtime.parsed(program.stablehlo)
        chosen = {
            **options_for(program, of_user),
            **options_by_effort(program, module, of_user),
        }
        free = {name: value for name, value in chosen.items() if name not in program.options}

        def compile_with(known: cpu_runtime.Options) -> Executable:
            options = {**known, **program.options}
            chosen_program = dataclasses.replace(program, options=options)
            return self.compile_module(
                chosen_program, program.stablehlo if module is None else module
            )

        return cpu_runtime.with_known_options(compile_with, free)

    def deserialize(self, payload: bytes, program_name: str, placement: Placement) -> Executable:
        """Load a serialized executable; see ``PjrtClient.deserialize``."""
        executable = super().deserialize(payload, program_name, placement)
        if isinstance(executable, CpuExecutable):
            executable.rehearsable = stored_as_rehearsable(serialized_executable.report(payload))
        return executable

    def rehearse(self, executable: Executable) -> bool:
        """Run a loaded program on zeros and wait for it, so that the first real run has nothing to set up.

        Returns whether it ran: only programs that were stored as rehearsable run.
        """
        if not (isinstance(executable, CpuExecutable) and executable.rehearsable):
            return False
        self.wait(executable.execute(executable.arguments(self.allocate)))
        return True

    def _prepare(self, code: bytes) -> None:
        if b"lapack_" in code:
            cpu_runtime.prepare_cpu_kernels()

    def copy(self, buffer: Buffer, placement: Placement) -> Buffer:
        """A new buffer on ``placement`` with the same value, even if ``placement`` is the buffer's own."""
        # a read on the CPU costs nothing: host and device share their memory
        return self.put(self.get(buffer), placement)

    def fingerprint(self) -> Mapping[str, str]:
        """The facts that compiled code depends on: versions, processor, XLA flags, this plugin's rules, devices."""
        return {
            **super().fingerprint(),
            "processor": _processor(),
            "xla_flags": flags.XLA_FLAGS.get(),
            "fusions": RULE,
            "effort": effort_rule(),
        }

    def _memory_limit(self) -> int | None:
        return _physical_memory()


@functools.cache
def _processor() -> str:
    """The architecture, and a hash of the model and its instruction sets, for which XLA compiles."""
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    facts = dict.fromkeys(
        line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))
    )
    return f"{platform.machine()} {hashlib.sha256(os.linesep.join(facts).encode()).hexdigest()}"


@functools.cache
def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
