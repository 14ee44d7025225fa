"""Ahead-of-time compilation in code: what ``XLA_AOT_TOPOLOGY`` in the environment does, too."""

from __future__ import annotations

from xla_core.contract.device_protocol import capabilities_of
from xla_core.execution import runtime
from xla_core.support import flags


def use_topology(name: str, *, reads: str = "error", device_type: str = "TPU") -> None:
    """Let the ``xla`` devices be those of the topology ``name`` (``v5e:4x4``), without any chip.

    Steps are traced, lowered and compiled as for the chips, tensors exist as shapes only. ``reads``
    says what reading a value does: ``"error"`` refuses it, ``"zeros"`` gives zeros. Call it before
    the first ``xla`` tensor; what the topology may be is the plugin's of ``device_type``. Raises
    RuntimeError when a client runs already.
    """
    runtime.set_options({flags.AOT_TOPOLOGY.name: name, flags.AOT_READS.name: reads})
    runtime.set_device_type(device_type)


def active() -> bool:
    """Whether the running client compiles for a topology and computes nothing."""
    return runtime.started() and capabilities_of(runtime.client()).shapes_only
