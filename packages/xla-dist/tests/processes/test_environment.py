"""What the environment says of a job: our own variables, torchrun's, a TPU pod's."""

from __future__ import annotations

import pytest

from xla_core.extension_api.jobs import Job, job_from_environment

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
POD = {"TPU_WORKER_HOSTNAMES": "t1v-0, t1v-1,t1v-2,t1v-3", "TPU_WORKER_ID": "2"}
CHIPS = {
    "TPU_PROCESS_ADDRESSES": "h0:8476,h0:8477,h1:8476,h1:8477",
    "CLOUD_TPU_TASK_ID": "3",
    "TPU_WORKER_ID": "1",
}


def test_our_own_variables():
    assert job_from_environment(OWN) == Job(3, 4, "10.0.0.1:9000")
    job = job_from_environment({**OWN, **LOCAL})
    assert job == Job(3, 4, "10.0.0.1:9000", 1, 2)
    assert job.host_index == 1
    # they come first
    assert job_from_environment({**TORCHRUN, **OWN}) == Job(3, 4, "10.0.0.1:9000")


def test_torchruns_variables():
    job = job_from_environment(TORCHRUN)
    assert job == Job(5, 8, "", 1, 4)  # the address is agreed through torchrun's store
    assert job.host_index == 1


def test_a_tpu_pods_variables():
    assert job_from_environment(POD, "TPU") == Job(2, 4, "t1v-0:8476", 0, 1)
    assert job_from_environment(CHIPS, "TPU") == Job(3, 4, "h0:8476", 1, 2)
    assert job_from_environment(POD, "CPU") is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2"},  # no address: torch's variables without torchrun
        {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {**OWN, "XLA_PROCESS_COUNT": "1", "XLA_PROCESS_INDEX": "0"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
    ],
)
def test_a_process_alone(options):
    assert job_from_environment(options, "TPU") is None


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
        job_from_environment({**OWN, **change})
