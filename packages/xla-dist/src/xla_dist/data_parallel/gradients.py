"""Data parallel training: gradients reduced over the replicas, parameters made equal on all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from xla_core.extension_api import runtime, training
from xla_dist.collectives.buckets import all_reduce_bucketized_gradients
from xla_dist.collectives.model_collectives import Groups, collective_broadcast
from xla_dist.processes.thread_replicas import replicas_with
from xla_dist.settings import BUCKET_SIZE


def reduce_gradients(
    optimizer: torch.optim.Optimizer, groups: Groups = None, pin_layout: bool = True
) -> None:
    """Replace the gradients of an optimizer's parameters by their mean over all replicas.

    With ``groups`` the sum over the group, divided by the number of all replicas, as torch_xla does.
    """
    gradients = training.gradients(optimizer)
    world = runtime.replica_of(gradients[0].device)[1] if gradients else 1
    if world > 1:
        all_reduce_bucketized_gradients(
            gradients, 1.0 / world, groups, pin_layout, BUCKET_SIZE.get()
        )


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Give the model's parameters and buffers the values of ordinal 0 on every replica; ends the step."""
    tensors = [t.detach() for t in itertools.chain(model.parameters(), model.buffers())]
    collective_broadcast(tensors)
    training.sync()


def set_replication(
    device: torch.device | str, devices: Sequence[torch.device | str]
) -> None:  # fmt: skip
    """Make ``devices`` of this process replicas of each other, and of those of the job's other processes.

    None of them, or one in a process that is alone: each is on its own. Several are each driven by a
    thread of its own, which waits for the others in every collective. In a job of several processes
    ``devices`` is this process's one device. Raises ValueError when ``device`` is not among them,
    NotImplementedError for several devices in such a job.
    """
    known = [torch.device(d) for d in devices]
    if known and torch.device(device) not in known:
        raise ValueError(f"set_replication: {device} is not among {[str(d) for d in known]}")
    replicas = replicas_with(known) if known else ()
    for trace in runtime.traces():
        if trace.backend.replicas != replicas:
            trace.flush(trace)  # among the replicas that it was recorded for
    runtime.set_replicas(replicas)


def xla_replication_devices(
    local_devices: Sequence[torch.device | str] = (),
) -> list[str]:
    """The runtime's names of all replicas' devices; of ``local_devices`` while there are none."""
    devices = [torch.device(d) for d in local_devices] or runtime.devices()
    replicas = runtime.trace_of(devices[0]).backend.replicas
    if not replicas:
        return [runtime.real_name(d) for d in devices]
    return [f"{runtime.device_type()}:{i}" for i in replicas]
