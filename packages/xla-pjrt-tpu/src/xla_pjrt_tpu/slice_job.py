"""This process's place in the job of a TPU slice, or of several, as its virtual machine or GKE describes it.

The rules are those of jax's clusters (``jax/_src/clusters/cloud_tpu_cluster.py``, jax 0.10.2): the hosts of a
slice in their order, the slices one after the other, and the first host of all is where they meet.
"""

from __future__ import annotations

import socket
import urllib.error
from collections.abc import Mapping
from typing import Final

import xla_pjrt_tpu.chips as chips
import xla_pjrt_tpu.environment as environment
import xla_pjrt_tpu.processes as processes
import xla_pjrt_tpu.settings as settings
from xla_core.contract.job import Job, parse_number
from xla_core.support import flags

PORT: Final = 8482
"""Where process 0 listens: jax's choice. libtpu's processes listen at 8476 and after it, one for each chip."""

_ALONE: Final = "1,1,1"
_OF_SLICES: Final = (settings.COORDINATOR, settings.SLICE_COUNT, settings.SLICE)
_NAMES: Final = (settings.PROCESS_ADDRESSES, settings.WORKER_HOSTNAMES)


def job(options: Mapping[str, str]) -> Job | None:
    """The job of the slice that this host is in, or None if this process is alone.

    ``options`` is the environment. Where that names no hosts, GCE's metadata server is asked. Raises RuntimeError
    if it does not answer (this could be one host of several, which must not train apart), and ValueError for
    malformed variables.
    """
    if flags.AOT_TOPOLOGY.text(options):
        return None
    if not any(flag.text(options) for flag in _NAMES) and chips.find_chips().count:
        options = {**_from_metadata(), **options}
    return _described(options)


def _described(options: Mapping[str, str]) -> Job | None:
    members = _listed(settings.PROCESS_ADDRESSES.text(options))
    if len(members) < 2:
        members = _listed(settings.WORKER_HOSTNAMES.text(options))
    alone = settings.PROCESS_BOUNDS.text(options).replace(" ", "") == _ALONE
    if alone:  # by itself, whatever else there is in the slice
        members = members[:1]
    slices = parse_number(options, settings.SLICE_COUNT.name, 1, 1)
    count = len(members) * slices
    if count < 2:
        return None
    own = settings.TASK_ID if settings.TASK_ID.text(options) else settings.WORKER_ID
    index = 0 if alone else parse_number(options, own.name, 0, 0, len(members))
    before = parse_number(options, settings.SLICE.name, 0, 0, slices) * len(members)
    first = settings.COORDINATOR.text(options) or members[0]
    same_host = [i for i, member in enumerate(members) if _host(member) == _host(members[index])]
    address = f"{first.partition(':')[0]}:{PORT}"
    return Job(before + index, count, address, same_host.index(index), len(same_host))


def _listed(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _host(address: str) -> str:
    return address.rpartition(":")[0] or address


def _from_metadata() -> dict[str, str]:
    """The variables that GKE would set, from GCE's metadata server.

    Empty on a machine that has no such server, or is no TPU's virtual machine.
    """
    try:
        known = environment.parse_tpu_env(environment.metadata("tpu-env"))
    except RuntimeError as error:
        if _is_elsewhere(error.__cause__):
            return {}
        raise
    return {
        settings.WORKER_HOSTNAMES.name: ",".join(environment.worker_ips()),
        settings.WORKER_ID.name: str(environment.worker_id()),
        **{flag.name: known[flag.name] for flag in _OF_SLICES if known.get(flag.name)},
    }


def _is_elsewhere(error: BaseException | None) -> bool:
    """Whether the metadata server was not asked, does not exist, or knows no TPU here."""
    nowhere = isinstance(getattr(error, "reason", None), socket.gaierror)
    return error is None or nowhere or isinstance(error, urllib.error.HTTPError)


def chip_of_torchrun(options: Mapping[str, str]) -> dict[str, str]:
    """The variables that give this process its chip, if torchrun has started it and nothing else gives it one.

    Raises RuntimeError if the slice is unknown, ValueError if there is not one process for each chip.
    """
    count, rank = options.get("LOCAL_WORLD_SIZE", ""), options.get("LOCAL_RANK", "")
    if settings.PROCESS_BOUNDS.text(options) or not (count.isdecimal() and rank.isdecimal()):
        return {}
    return processes.topology_variables(int(rank), int(count))
