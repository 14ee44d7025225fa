"""What a host is: chips on its buses, its slice, its processes; errors where there is none."""

from __future__ import annotations

import io
import os
import shutil
import socket
import time
import urllib.error

import pytest

from torch_xla._internal import tpu
from xla_core.contract.device_protocol import Topology
from xla_core.contract.job import Job
from xla_core.extension_api.plugins import chosen_device, job_of
from xla_pjrt_tpu import chips, create_client, environment, libtpu, processes
from xla_pjrt_tpu.client import create_options
from xla_pjrt_tpu.slice_job import chip_of_torchrun

TPU_ENV = """ACCELERATOR_TYPE: 'v5litepod-16'
CHIPS_PER_HOST_BOUNDS: '2,2,1'
HOST_BOUNDS: '2,2,1'
TOPOLOGY: '4x4'
WORKER_ID: '2'
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TPU_", "CLOUD_TPU", "ACCELERATOR", "XLA_AOT", "LIBTPU", "PJRT_")):
            monkeypatch.delenv(name)


@pytest.fixture
def bus(tmp_path, monkeypatch):
    """A PCI bus and device files of our making; what is built later takes the place of what was before."""
    pci, dev = tmp_path / "pci", tmp_path / "dev"
    dev.mkdir(parents=True)
    find_chips = chips.find_chips

    def build(*devices, nodes=()):
        shutil.rmtree(pci, ignore_errors=True)
        for number, (vendor, device) in enumerate(devices):
            folder = pci / f"0000:00:{number:02x}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(vendor + "\n")
            (folder / "device").write_text(device + "\n")
        for node in nodes:
            (dev / node).parent.mkdir(exist_ok=True)
            (dev / node).touch()
        found = find_chips(pci, dev)
        monkeypatch.setattr(chips, "find_chips", lambda: found)
        return found

    return build


@pytest.fixture
def metadata(monkeypatch):
    """GCE's metadata server with these attributes; returns the names asked for."""
    asked = []

    def serve(**attributes):
        def urlopen(request, timeout):
            name = request.full_url.removeprefix(environment.METADATA_URL)
            assert request.get_header("Metadata-flavor") == "Google"
            assert timeout <= 2
            asked.append(name)
            if name.replace("-", "_") not in attributes:
                raise urllib.error.URLError("not found")
            return io.BytesIO(attributes[name.replace("-", "_")].encode())

        monkeypatch.setattr(environment.urllib.request, "urlopen", urlopen)
        return asked

    return serve


GOOGLE = "0x1ae0"


def test_chips_on_the_bus_are_counted(bus):
    found = bus((GOOGLE, "0x0063"), (GOOGLE, "0x0063"), ("0x8086", "0x1237"), (GOOGLE, "0xffff"),
                nodes=("vfio/0", "vfio/1"))  # fmt: skip
    assert (found.count, found.version, found.pci_devices) == (2, "v5e", 4)
    assert [node.rsplit("/", 2)[1:] for node in found.nodes] == [["vfio", "0"], ["vfio", "1"]]
    assert tpu.num_available_chips() == 2
    assert tpu.num_available_devices() == 2
    assert tpu.version() == 5


def test_cores_of_old_chips_are_devices(bus):
    bus(*[(GOOGLE, "0x0027")] * 4)
    assert (tpu.num_available_chips(), tpu.num_available_devices(), tpu.version()) == (4, 8, 3)


def test_without_a_tpu_counts_are_zero_and_nothing_is_asked(bus, metadata):
    asked = metadata()
    bus()
    assert (tpu.num_available_chips(), tpu.num_available_devices()) == (0, 0)
    assert tpu.task_id() is None
    assert not asked


def test_environment_can_say_how_many_devices(bus, monkeypatch):
    bus()
    monkeypatch.setenv("TPU_NUM_DEVICES", "3")
    assert tpu.num_available_devices() == 3


def test_no_tpu_is_said_at_once_with_what_was_looked_for(bus, metadata):
    asked = metadata()
    bus(("0x8086", "0x1237"))
    started = time.perf_counter()
    with pytest.raises(RuntimeError) as caught:
        create_client(Topology(), {"TPU_WORKER_ID": "0"})
    assert time.perf_counter() - started < 5
    text = str(caught.value)
    for part in ("no TPU", "libtpu:", "0 TPU chips among 1 devices", "/dev/accel", "TPU_WORKER_ID",
                 "XLA_AOT_TOPOLOGY", "PJRT_DEVICE=CPU"):  # fmt: skip
        assert part in text
    assert not asked


def test_plugin_is_chosen_only_where_a_tpu_is(bus):
    bus()
    assert not create_client.is_available({})
    assert chosen_device({}) == "CPU"
    assert create_client.is_available({"XLA_AOT_TOPOLOGY": "v5e:2x2"}) == (
        libtpu.find_library({}) is not None
    )


def test_missing_library_is_named(tmp_path):
    missing = {"TPU_LIBRARY_PATH": str(tmp_path / "libtpu.so"), "XLA_AOT_TOPOLOGY": "v5e:2x2"}
    assert libtpu.find_library(missing) is None
    with pytest.raises(RuntimeError, match=r"libtpu.* not found: TPU_LIBRARY_PATH is .*libtpu\.so"):
        create_client(Topology(), missing)


def test_flags_of_the_user_come_before_the_defaults():
    given = {"LIBTPU_INIT_ARGS": "--xla_tpu_enable_flash_attention=true --xla_tpu_other=1"}
    flags = libtpu.init_args(given).split()
    assert flags[:2] == given["LIBTPU_INIT_ARGS"].split()
    assert len([f for f in flags if "flash_attention" in f]) == 1
    assert len(flags) == 2 + len(libtpu.DEFAULT_FLAGS) - 1


def test_a_longer_flag_of_the_user_does_not_stand_for_a_default():
    given = {"LIBTPU_INIT_ARGS": "--xla_latency_hiding_scheduler_rerun_more=3"}
    assert len(libtpu.init_args(given).split()) == 1 + len(libtpu.DEFAULT_FLAGS)


def test_environment_is_restored(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_ID", "7")
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError), libtpu.environment({"TPU_WORKER_ID": "0", "TPU_X": "1"}):
        assert (os.environ["TPU_WORKER_ID"], os.environ["TPU_X"]) == ("0", "1")
        _ = 1 / 0
    assert dict(os.environ) == before


def test_client_options():
    assert "max_inflight_computations" not in create_options({})
    found = create_options({"XLA_TPU_MAX_INFLIGHT_COMPUTATIONS": "4"})
    assert found["max_inflight_computations"] == 4
    with pytest.raises(ValueError, match="XLA_TPU_MAX_INFLIGHT_COMPUTATIONS is 'x'"):
        create_options({"XLA_TPU_MAX_INFLIGHT_COMPUTATIONS": "x"})


def test_slice_from_the_metadata_server(bus, metadata):
    endpoints = ",".join(f"unknown:unknown:10.0.0.{i}" for i in range(1, 5))
    metadata(tpu_env=TPU_ENV, agent_worker_number="2", worker_network_endpoints=endpoints)
    bus(*[(GOOGLE, "0x0063")] * 4)
    assert tpu.get_tpu_type() == "v5litepod-16"
    assert tpu.worker_id() == 2
    assert tpu.get_worker_ips() == [f"10.0.0.{i}" for i in range(1, 5)]
    assert tpu.discover_master_worker_ip() == "10.0.0.1"
    assert tpu.num_expected_global_devices() == 16


def test_slice_from_gkes_variables(bus, metadata, monkeypatch):
    asked = metadata()
    bus()
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-16")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "host-0, host-1")
    assert (tpu.version(), tpu.worker_id()) == (4, 1)
    assert processes.slice_bounds(tpu.get_tpu_env()) == ((1, 1, 2), (2, 2, 1))
    assert tpu.discover_master_worker_ip() == "host-0"
    assert not asked


def test_processes_of_a_pod_get_a_chip_each(bus, metadata, monkeypatch):
    endpoints = ",".join(f"a:b:10.0.0.{i}" for i in range(1, 5))
    metadata(tpu_env=TPU_ENV, agent_worker_number="2", worker_network_endpoints=endpoints)
    bus(*[(GOOGLE, "0x0063")] * 4)
    assert tpu.num_local_processes() == 4
    found = processes.topology_variables(3, 4)
    assert found["TPU_PROCESS_BOUNDS"] == "4,4,1"
    assert found["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    assert (found["TPU_VISIBLE_CHIPS"], found["CLOUD_TPU_TASK_ID"]) == ("3", "11")
    assert found["TPU_PROCESS_PORT"] == "8479"
    addresses = found["TPU_PROCESS_ADDRESSES"].split(",")
    assert (len(addresses), addresses[0], addresses[-1]) == (16, "10.0.0.1:8476", "10.0.0.4:8479")
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0,1")
    assert tpu.num_local_processes() == 2
    with pytest.raises(ValueError, match="3 processes on a host with 4 chips"):
        processes.topology_variables(0, 3)
    assert processes.topology_variables(0, 1) == {}


ENDPOINTS = ",".join(f"a:b:10.0.0.{i}" for i in range(1, 5))


def test_launch_starts_a_process_for_each_chip(bus, metadata, monkeypatch):
    metadata(tpu_env=TPU_ENV, agent_worker_number="2", worker_network_endpoints=ENDPOINTS)
    bus(*[(GOOGLE, "0x0063")] * 4)
    started = create_client.launch_environments(os.environ)
    assert started == [processes.topology_variables(rank, 4) for rank in range(4)]
    assert [one["TPU_VISIBLE_CHIPS"] for one in started] == list("0123")
    bus((GOOGLE, "0x0063"))
    assert create_client.launch_environments(os.environ) == [{}]
    bus()
    assert create_client.launch_environments(os.environ) == [{}]
    bus(*[(GOOGLE, "0x0076")] * 4)
    with pytest.raises(NotImplementedError, match=r"is two devices.*use_spmd"):
        create_client.launch_environments(os.environ)
    assert create_client.launch_environments({"XLA_AOT_TOPOLOGY": "v7x:2x2x1"}) == [{}]


def test_spawn_of_one_process_uses_one_chip(bus, metadata, monkeypatch):
    metadata(tpu_env=TPU_ENV, agent_worker_number="2", worker_network_endpoints=ENDPOINTS)
    bus(*[(GOOGLE, "0x0063")] * 4)
    for name in ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    create_client.use_one_device()
    assert (os.environ["TPU_VISIBLE_CHIPS"], os.environ["TPU_PROCESS_BOUNDS"]) == ("0", "1,1,1")
    assert job_of("TPU", os.environ) is None


def test_a_process_of_torchrun_has_a_chip_of_its_own(bus, metadata):
    metadata(tpu_env=TPU_ENV, agent_worker_number="2", worker_network_endpoints=ENDPOINTS)
    bus(*[(GOOGLE, "0x0063")] * 4)
    torchrun = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    assert chip_of_torchrun(torchrun) == processes.topology_variables(3, 4)
    assert chip_of_torchrun({**torchrun, "TPU_PROCESS_BOUNDS": "1,1,1"}) == {}
    assert chip_of_torchrun({}) == {}


POD = {"TPU_WORKER_HOSTNAMES": "t1v-0, t1v-1,t1v-2,t1v-3", "TPU_WORKER_ID": "2"}
CHIPS = {
    "TPU_PROCESS_ADDRESSES": "h0:8476,h0:8477,h1:8476,h1:8477",
    "CLOUD_TPU_TASK_ID": "3",
    "TPU_WORKER_ID": "1",
}


def test_variables_of_a_slice_are_a_job():
    assert job_of("TPU", POD) == Job(2, 4, "t1v-0:8482", 0, 1)
    assert job_of("TPU", CHIPS) == Job(3, 4, "h0:8482", 1, 2)
    assert job_of("TPU", {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}) is None
    assert job_of("TPU", {**POD, "XLA_AOT_TOPOLOGY": "v5e:2x2"}) is None
    assert job_of("CPU", POD) is None


@pytest.mark.parametrize("of_slice", [POD, CHIPS])
def test_a_process_with_chips_of_its_own_is_alone(of_slice):
    """As ``xmp.spawn(nprocs=1)`` has it, on a host of a larger slice."""
    own = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_VISIBLE_CHIPS": "0"}
    assert job_of("TPU", {**of_slice, **own}) is None


def test_several_slices_are_one_job():
    of_slices = {"MEGASCALE_COORDINATOR_ADDRESS": "s0-0:8081", "MEGASCALE_NUM_SLICES": "3"}
    second = {**of_slices, "MEGASCALE_SLICE_ID": "1"}
    assert job_of("TPU", {**POD, **second}) == Job(6, 12, "s0-0:8482", 0, 1)
    assert job_of("TPU", {**CHIPS, **second}) == Job(7, 12, "s0-0:8482", 1, 2)
    # slices of one host each
    alone = {**second, "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    assert job_of("TPU", alone) == Job(1, 3, "s0-0:8482", 0, 1)
    with pytest.raises(ValueError, match=r"MEGASCALE_SLICE_ID='3'.*from 0 to 2"):
        job_of("TPU", {**POD, **of_slices, "MEGASCALE_SLICE_ID": "3"})


def test_hosts_without_variables_are_one_job_all_the_same(bus, metadata):
    """A virtual machine of Compute Engine: only its metadata tells of the others."""
    asked = metadata(tpu_env=TPU_ENV, agent_worker_number="2", worker_network_endpoints=ENDPOINTS)
    bus(*[(GOOGLE, "0x0063")] * 4)

    def job(**options):
        return job_of("TPU", options)

    assert job() == Job(2, 4, "10.0.0.1:8482")
    slices = "MEGASCALE_COORDINATOR_ADDRESS: '10.1.0.1'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
    metadata(tpu_env=TPU_ENV + slices, agent_worker_number="2", worker_network_endpoints="a,b,c,d")
    assert job() == Job(6, 8, "10.1.0.1:8482")
    del asked[:]
    assert job(TPU_WORKER_HOSTNAMES="a,b", TPU_WORKER_ID="1") == Job(1, 2, "a:8482")
    torchrun = {"MASTER_ADDR": "m", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}
    assert job(**torchrun) == Job(0, 2, "")
    assert job(XLA_AOT_TOPOLOGY="v5e:2x2") is None
    bus()
    assert job() is None
    assert not asked


@pytest.mark.parametrize(
    ("answer", "alone"),
    [
        (urllib.error.URLError(socket.gaierror("Name or service not known")), True),
        (urllib.error.HTTPError("", 404, "Not Found", None, None), True),
        (urllib.error.URLError(TimeoutError("timed out")), False),
    ],
)
def test_a_host_is_alone_only_if_it_knows_that(bus, monkeypatch, answer, alone):
    """If the server is busy there may be other hosts, which would wait for this one."""
    bus(*[(GOOGLE, "0x0063")] * 4)

    def urlopen(_request, timeout):
        raise answer

    monkeypatch.setattr(environment.urllib.request, "urlopen", urlopen)
    if alone:
        assert job_of("TPU", {}) is None
    else:
        with pytest.raises(RuntimeError, match=r"metadata server has no tpu-env .*timed out"):
            job_of("TPU", {})


def test_environment_decides_before_configure_topology(metadata, monkeypatch):
    metadata(tpu_env=TPU_ENV, agent_worker_number="0", worker_network_endpoints="a:b:10.0.0.1")
    monkeypatch.setenv("TPU_PROCESS_PORT", "9000")
    for name in processes.topology_variables(1, 4):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored after the test
        if name != "TPU_PROCESS_PORT":
            monkeypatch.delenv(name)
    tpu.configure_topology(1, 4)
    assert os.environ["TPU_PROCESS_PORT"] == "9000"
    assert tpu.task_id() == 1
    assert tpu.process_bounds_size() == 16


def test_one_chip_alone(monkeypatch):
    for name in ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    tpu.configure_one_chip_topology()
    assert os.environ["TPU_VISIBLE_CHIPS"] == "0"
    assert tpu.process_bounds_size(default=9) == 1


def test_unknown_slice_says_what_would_tell(metadata):
    metadata()
    with pytest.raises(RuntimeError, match=r"TPU_ACCELERATOR_TYPE.*metadata server has no tpu-env"):
        tpu.get_tpu_type()


def test_metadata_is_not_asked_where_that_is_forbidden(metadata, monkeypatch):
    asked = metadata(tpu_env=TPU_ENV)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    with pytest.raises(RuntimeError, match="TPU_SKIP_MDS_QUERY is set"):
        tpu.get_tpu_env()
    assert not asked


def test_malformed_bounds_are_named():
    bad = {"TPU_PROCESS_BOUNDS": "2,2", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}
    with pytest.raises(ValueError, match="TPU_PROCESS_BOUNDS is '2,2'; write three numbers"):
        processes.slice_bounds(bad)
