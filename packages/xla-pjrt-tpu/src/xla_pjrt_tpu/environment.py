"""Describes this host's TPU slice, from GKE's environment variables or GCE's metadata server.

Cloud TPU defines their forms (https://cloud.google.com/tpu/docs/troubleshooting/trouble-env-vars); libtpu reads
the same variables.
"""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Final

import xla_pjrt_tpu.settings as settings

METADATA_URL: Final = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_TIMEOUT_SECONDS: Final = 2.0
_LINE: Final = re.compile(r"(?P<name>\w+):\s*'?(?P<value>[^']*?)'?\s*")

ACCELERATOR_TYPE: Final = "ACCELERATOR_TYPE"
PROCESS_BOUNDS: Final = settings.PROCESS_BOUNDS.name
CHIPS_PER_PROCESS: Final = settings.CHIPS_PER_PROCESS_BOUNDS.name

# Names in the metadata's tpu-env, and the environment variables for the same values.
_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    ACCELERATOR_TYPE: (settings.ACCELERATOR_TYPE.name, ACCELERATOR_TYPE),
    PROCESS_BOUNDS: (PROCESS_BOUNDS, settings.HOST_BOUNDS.name),
    CHIPS_PER_PROCESS: (CHIPS_PER_PROCESS, settings.CHIPS_PER_HOST_BOUNDS.name),
    "WORKER_ID": (settings.WORKER_ID.name, settings.TASK_ID.name),
}

MSG_NO_METADATA: Final = (
    "this host's TPU slice is unknown: {variables} are not set, and GCE's metadata server has no "
    "{name} ({error}). On GKE or outside Google Cloud set these variables"
)


def metadata(name: str) -> str:
    """The attribute ``name`` of this virtual machine, from GCE's metadata server.

    Raises RuntimeError if there is no answer within two seconds, if the server has no such attribute, or if
    ``TPU_SKIP_MDS_QUERY`` is set.
    """
    variables = ", ".join(sorted({first for first, *_ in _VARIABLES.values()}))
    if settings.SKIP_METADATA.text():
        error: object = "not asked: TPU_SKIP_MDS_QUERY is set"
        raise RuntimeError(MSG_NO_METADATA.format(variables=variables, name=name, error=error))
    request = urllib.request.Request(METADATA_URL + name, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            return str(answer.read().decode())
    except (OSError, urllib.error.URLError) as error:
        raise RuntimeError(
            MSG_NO_METADATA.format(variables=variables, name=name, error=error)
        ) from error


def parse_tpu_env(text: str) -> dict[str, str]:
    """The entries of the attribute ``tpu-env``, whose lines are ``NAME: 'value'``."""
    matches = (_LINE.fullmatch(line) for line in text.splitlines())
    entries = {m["name"]: m["value"] for m in matches if m is not None}
    for old, new in (("HOST_BOUNDS", PROCESS_BOUNDS), ("CHIPS_PER_HOST_BOUNDS", CHIPS_PER_PROCESS)):
        if old in entries:
            entries.setdefault(new, entries[old])
    return entries


def from_variables(options: Mapping[str, str] | None = None) -> dict[str, str]:
    """The description of the slice in the environment variables, under the names of ``tpu-env``.

    ``options`` is the environment (default: that of this process).
    """
    options = os.environ if options is None else options
    entries = {}
    for name, variables in _VARIABLES.items():
        value = next((options[v] for v in variables if options.get(v, "").strip()), None)
        if value is not None:
            entries[name] = value.strip()
    return entries


def get_tpu_env() -> dict[str, str]:
    """The description of the slice, under the names of ``tpu-env``.

    From the environment if that has the accelerator type; else from the metadata, with the environment's entries in
    front. Raises RuntimeError without either.
    """
    entries = from_variables()
    if ACCELERATOR_TYPE in entries:
        return entries
    return parse_tpu_env(metadata("tpu-env")) | entries


def get_tpu_type() -> str:
    """The accelerator type, such as ``v5litepod-16``. Raises RuntimeError when it is unknown."""
    return get_tpu_env()[ACCELERATOR_TYPE]


def worker_id() -> int:
    """The number of this host in its slice. Raises RuntimeError when it is unknown."""
    number = from_variables().get("WORKER_ID")
    return int(number if number is not None else metadata("agent-worker-number"))


def worker_ips() -> list[str]:
    """The addresses of the slice's hosts, in the order of their numbers.

    Raises RuntimeError if they are unknown.
    """
    hostnames = settings.WORKER_HOSTNAMES.text()
    if hostnames:
        return [host.strip() for host in hostnames.split(",")]
    # "name:number:address" for each host, or its name alone
    return [entry.split(":")[-1] for entry in metadata("worker-network-endpoints").split(",")]
