"""torch_xla._internal.tpu's further names: shapes of slices, and TPUs as a plugin of torch_xla's kind."""

from __future__ import annotations

import os

import pytest

from torch_xla._internal import tpu
from torch_xla.experimental.plugins import DevicePlugin


@pytest.fixture(autouse=True)
def a_slice_of_two_hosts(monkeypatch):
    for name in [n for n in os.environ if n.startswith("TPU_") or n == "CLOUD_TPU_TASK_ID"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    return monkeypatch


def test_shapes():
    shape = tpu.MeshShape.from_string("2,2,1")
    assert (shape.size, shape.x, shape.to_string()) == (4, 2, "2,2,1")
    assert shape * tpu.MeshShape(1, 2, 3) == (2, 4, 3)
    with pytest.raises(ValueError, match="three numbers"):
        tpu.MeshShape.from_string("2,2")


def test_the_slice():
    assert tpu.build_tpu_env_from_vars()["ACCELERATOR_TYPE"] == "v5litepod-16"
    assert (tpu.num_tpu_workers(), tpu.num_expected_global_devices()) == (4, 16)


def test_the_plugin(monkeypatch, tmp_path):
    plugin = tpu.TpuPlugin()
    assert isinstance(plugin, DevicePlugin)
    assert plugin.requires_xla_coordinator()
    assert plugin.host_index() == 1
    assert plugin.physical_chip_count() == tpu.num_available_chips()
    library = tmp_path / "libtpu.so"
    library.touch()
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    assert plugin.library_path() == str(library)
