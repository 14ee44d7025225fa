"""Ordinals and counts, meetings outside of programs, several hosts, threads as replicas."""

from __future__ import annotations

import json
import socket

import dist_jobs
import dist_topology
import pytest
import torch
from dist_jobs import clean_environment

import torch_xla.distributed.xla_multiprocessing as xmp
from xla_core.extension_api import runtime


def expected_counts(index, world, local):
    """What process ``index`` knows, of ``world`` processes, ``local`` on each host."""
    here = index % local
    return {
        "device": "xla:0", "devices": ["xla:0"],
        "global_ordinal": index, "local_ordinal": here, "local": here,
        "world_size": world, "process_index": index, "process_count": world,
        "host_index": index // local, "local_process_count": local,
        "global_device_count": world, "local_device_count": local,
        "addressable_device_count": 1, "global_runtime_device_count": world,
        "addressable_runtime_device_count": 1, "master": [here == 0, index == 0],
        "ip": "127.0.0.1", "attributes": world, "sum": world,
        "replicas": world,
    }  # fmt: skip


@pytest.mark.parametrize("world", [1, 3])
def test_ordinals_and_counts(launch, world):
    found = json.loads(json.dumps(launch(world, dist_topology.counts).join()))
    assert found == [expected_counts(i, world, world) for i in range(world)]


def test_two_hosts_with_two_processes_each(start_program, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    job = {"XLA_COORDINATOR_ADDRESS": address, "XLA_PROCESS_COUNT": "2"}
    paths = [tmp_path / f"host {i}.json" for i in range(2)]
    programs = [
        start_program(
            clean_environment(2, **job, XLA_PROCESS_INDEX=str(i)),
            dist_topology.as_host,
            str(path),
        )
        for i, path in enumerate(paths)
    ]
    for program in programs:
        status, text, _ = program.join()
        assert status == 0, text
    found = [counts for path in paths for counts in json.loads(path.read_text()).values()]
    assert found == [expected_counts(i, 4, 2) for i in range(4)]


def test_processes_of_another_launcher_are_initialized(start_hosts, start_program):
    two = start_hosts(2, [0, 1], dist_topology.is_initialized, 2, CPU_NUM_DEVICES="2")
    for status, text, _ in [program.join() for program in two]:
        assert status == 0, text
    alone = start_program(clean_environment(2), dist_topology.is_initialized, 2)
    status, text, _ = alone.join()
    assert status == 1
    assert "the environment names no job that these 2 processes" in text


def test_meetings(launch):
    assert launch(4, dist_topology.meetings).join() == ["only once\n", "", "", ""]


def test_parameters_and_gradients(launch):
    assert launch(2, dist_topology.parameters).join() == [True] * 2


def test_processes_stay_replicas_of_each_other(launch, start_hosts):
    launch(2, dist_topology.set_replications).join()
    two = start_hosts(2, [0, 1], dist_topology.two_devices_of_one_of_several, CPU_NUM_DEVICES="2")
    for status, text, _ in [program.join() for program in two]:
        assert status == 0, text


def test_wrong_arguments_are_named(launch):
    assert launch(2, dist_topology.mistakes).join() == [True] * 2


@pytest.mark.parametrize(
    "check", [dist_topology.threads, dist_topology.threads_fail, dist_topology.data_parallel]
)
def test_threads_as_replicas(start_program, check):
    status, text, _ = start_program(clean_environment(4), check).join()
    assert status == 0, text


def test_the_number_of_processes_is_that_of_the_devices(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    with pytest.raises(ValueError, match=r"Unsupported nprocs \(3\)"):
        xmp.spawn(dist_jobs.nothing, nprocs=3)
    called = []
    assert xmp.spawn(lambda index, x: called.append((index, x)), args=(5,), nprocs=1) is None
    assert called == [(0, 5)]  # directly, in this process


def test_replicas_are_not_for_spmd_mode(monkeypatch):
    monkeypatch.setattr(runtime, "is_spmd", lambda: True)
    with pytest.raises(NotImplementedError, match="one program over all devices"):
        xmp.spawn(dist_jobs.nothing)


def test_one_model_and_one_process_at_a_time(launch, tmp_path):
    path = tmp_path / "turns"
    model = torch.nn.Linear(2, 1)
    executor = xmp.MpSerialExecutor()
    found = launch(3, dist_topology.wrappers, xmp.MpModelWrapper(model), executor, str(path)).join()
    assert found == [[model.weight.tolist()] * 3] * 3
    turns = path.read_text().split()
    assert [turns[i] * 20 for i in (0, 20, 40)] == ["".join(turns[i : i + 20]) for i in (0, 20, 40)]


def test_what_does_not_pickle_leaves_nothing_behind(launch):
    with pytest.raises(Exception, match=r"pickle|local object"):
        launch(2, dist_jobs.nothing, lambda: None)  # an open socket would be an unraisable warning
    assert launch(1, dist_jobs.nothing).join() == [(0, 1, 1.0)]
