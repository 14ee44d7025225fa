"""Data-parallel training: reduces gradients over the replicas, and copies parameters to all of them."""

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
    """Replace the gradients of the optimizer's parameters by their means over all replicas.

    With ``groups`` (lists of ordinals; default: all replicas), a gradient becomes the sum over its group divided by
    the number of all replicas, as in torch_xla. ``pin_layout`` has no effect.
    """
    gradients = training.gradients(optimizer)
    world = runtime.replica_of(gradients[0].device)[1] if gradients else 1
    if world > 1:
        all_reduce_bucketized_gradients(
            gradients, 1.0 / world, groups, pin_layout, BUCKET_SIZE.get()
        )


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Copy the values of the model's parameters and buffers on ordinal 0 to all replicas; ends the step."""
    tensors = [t.detach() for t in itertools.chain(model.parameters(), model.buffers())]
    collective_broadcast(tensors)
    training.sync()


def set_replication(
    device: torch.device | str, devices: Sequence[torch.device | str]
) -> None:  # fmt: skip
    """Make ``devices`` of this process replicas of each other, and of the devices of the job's other processes.

    Each of several devices needs a thread of its own, and the threads wait for each other in each collective. If
    ``devices`` is empty, or one device without a job, no device has other replicas. In a job of several
    processes ``devices`` must be this process's one device. Runs pending steps first. Raises
    ValueError if ``device`` is not among ``devices``, NotImplementedError for several devices in such a job.
    """
    known = [torch.device(d) for d in devices]
    if known and torch.device(device) not in known:
        raise ValueError(f"set_replication: {device} is not among {[str(d) for d in known]}")
    replicas = replicas_with(known) if known else ()
    for trace in runtime.traces():
        if trace.backend.replicas != replicas:
            trace.flush(trace)  # the step was recorded for the previous replicas
    runtime.set_replicas(replicas)


def xla_replication_devices(
    local_devices: Sequence[torch.device | str] = (),
) -> list[str]:
    """The runtime's names of the devices of all replicas, such as ``CPU:1``.

    Without replicas those of ``local_devices`` (default: all devices of this process).
    """
    devices = [torch.device(d) for d in local_devices] or runtime.devices()
    replicas = runtime.trace_of(devices[0]).backend.replicas
    if not replicas:
        return [runtime.real_name(d) for d in devices]
    return [f"{runtime.device_type()}:{i}" for i in replicas]
