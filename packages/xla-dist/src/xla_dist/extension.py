"""This package's implementations of xla-core's hooks: the entry point ``dist`` of ``xla_core.extensions``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch

from xla_core.contract.device_protocol import Executable
from xla_core.contract.hookspecs import hookimpl
from xla_core.extension_api import training
from xla_core.extension_api.backends import Backend
from xla_core.extension_api.steps import Operation, Trace
from xla_dist.collectives import model_collectives, replicated_program
from xla_dist.data_parallel import gradients
from xla_dist.job_health import thread_states
from xla_dist.operators import collective_ops
from xla_dist.processes import child_process
from xla_dist.settings import FAULT


@hookimpl
def xla_core_register_operators() -> None:
    """Register the collectives' lowering rules, and the function that reduces gradients."""
    collective_ops.register()
    if torch.distributed.is_available():
        importlib.import_module("xla_dist.collectives.functional").register()
    training.set_gradient_reducer(gradients.reduce_gradients)


@hookimpl
def xla_core_topology() -> None:
    """Note that the runtime now starts threads; returns None, which leaves the topology to others."""
    thread_states.runtime_starts()


@hookimpl
def xla_core_client_started() -> None:
    """Start to report failures of this process and of the job's others, now that the client runs."""
    thread_states.runtime_started()
    child_process.attend()
    if FAULT.get():
        importlib.import_module("xla_dist.testing.faults").of_environment()


@hookimpl
def xla_core_kept_in_step(trace: Trace) -> torch.Tensor | None:
    """The order of the step's latest collective, after which the step's next one must run."""
    return model_collectives.order_of(trace)


@hookimpl
def xla_core_replicated_executable(
    executable: Executable, name: str, collectives: Sequence[Operation], backend: Backend
) -> replicated_program.ReplicaExecutable:
    """Run programs over all replicas on this replica's buffers."""
    return replicated_program.replicated_executable(executable, name, collectives, backend)
