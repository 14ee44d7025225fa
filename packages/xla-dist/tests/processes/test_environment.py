"""What the environment says of a job: our own variables, and torchrun's."""

from __future__ import annotations

import pytest

from xla_core.contract.job import Job
from xla_core.extension_api.plugins import job_of

OWN = {
    "XLA_COORDINATOR_ADDRESS": "10.0.0.1:9000",
    "XLA_PROCESS_COUNT": "4",
    "XLA_PROCESS_INDEX": "3",
}
LOCAL = {"PJRT_LOCAL_PROCESS_RANK": "1", "PJRT_LOCAL_PROCESS_COUNT": "2"}
TORCHRUN = {
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "5", "WORLD_SIZE": "8",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
}  # fmt: skip


def test_our_own_variables():
    assert job_of("CPU", OWN) == Job(3, 4, "10.0.0.1:9000")
    job = job_of("CPU", {**OWN, **LOCAL})
    assert job == Job(3, 4, "10.0.0.1:9000", 1, 2)
    assert job.host_index == 1
    # they come first
    assert job_of("CPU", {**TORCHRUN, **OWN}) == Job(3, 4, "10.0.0.1:9000")


def test_torchruns_variables():
    job = job_of("CPU", TORCHRUN)
    assert job == Job(5, 8, "", 1, 4)  # the address is agreed through torchrun's store
    assert job.host_index == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2"},  # no address: torch's variables without torchrun
        {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {**OWN, "XLA_PROCESS_COUNT": "1", "XLA_PROCESS_INDEX": "0"},
    ],
)
def test_a_process_alone(options):
    assert job_of("CPU", options) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"XLA_PROCESS_INDEX": ""}, "XLA_PROCESS_INDEX is not"),
        ({"XLA_PROCESS_INDEX": "4"}, "XLA_PROCESS_INDEX='4'.*from 0 to 3"),
        ({"XLA_PROCESS_COUNT": "many"}, "XLA_PROCESS_COUNT='many'.*from 1"),
        ({"XLA_COORDINATOR_ADDRESS": "10.0.0.1"}, "XLA_COORDINATOR_ADDRESS='10.0.0.1'.*host:port"),
    ],
)
def test_mistakes_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        job_of("CPU", {**OWN, **change})
