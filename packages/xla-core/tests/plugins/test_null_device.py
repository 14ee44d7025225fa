"""The NULL device: the conformance suite as far as it applies, and its counters."""

from __future__ import annotations

import numpy as np
import pytest

from xla_core.contract.device_protocol import ArraySpec, Placement, Program, Topology
from xla_core.plugins.null_device import create_client
from xla_core.testing.conformance import DeviceConformance

HERE = Placement((0,))
F32 = np.dtype(np.float32)


class TestNull(DeviceConformance):
    computes = False
    compiles = False
    partitions = False
    counts_memory = False

    @classmethod
    def make_client(cls):
        return create_client(Topology(), {"NULL_NUM_DEVICES": "2"})


def program(aliases=()):
    one = ArraySpec((2, 3), F32)
    return Program("p", b"", (one,), (ArraySpec((3,), np.dtype("int64")), one), aliases, HERE)


def test_counts_compilations_and_runs():
    client = create_client(Topology(), {})
    executable = client.compile(program())
    argument = client.put(np.ones((2, 3), F32), HERE)
    for _ in range(3):
        results = executable.execute([argument])
    assert [r.shape for r in results] == [(3,), (2, 3)]
    assert [r.dtype.name for r in results] == ["int64", "float32"]
    assert (client.compile_count, client.execute_count, executable.execute_count) == (1, 3, 3)
    client.deserialize(executable.serialize(), "again", HERE).execute([argument])
    assert (client.compile_count, client.deserialize_count, client.execute_count) == (1, 1, 4)


def test_needs_no_compiler_to_start_and_knows_other_processes():
    client = create_client(Topology(process_index=1, process_count=2), {"NULL_NUM_DEVICES": "2"})
    assert [d.id for d in client.devices()] == [0, 1, 2, 3]
    assert [(d.id, d.local_index) for d in client.local_devices()] == [(2, 0), (3, 1)]


def test_wrong_dtype_and_donated_argument_name_program_and_argument():
    client = create_client(Topology(), {})
    executable = client.compile(program(aliases=((0, 1),)))
    with pytest.raises(RuntimeError, match=r"p: argument 0 is float64\(2, 3\)"):
        executable.execute([client.put(np.ones((2, 3)), HERE)])
    argument = client.put(np.ones((2, 3), F32), HERE)
    executable.execute([argument])
    with pytest.raises(RuntimeError, match="p: argument 0: this buffer was donated"):
        executable.execute([argument])


def test_stored_program_of_another_plugin_or_device_count_is_refused():
    client = create_client(Topology(), {"NULL_NUM_DEVICES": "2"})
    payload = client.compile(program()).serialize()
    with pytest.raises(ValueError, match="compiled for 1 devices"):
        client.deserialize(payload, "p", Placement((0, 1)))
    with pytest.raises(ValueError, match="no executable that xla-core null device stored"):
        client.deserialize(payload.replace(b"null device", b"full device"), "p", HERE)
    with pytest.raises(ValueError, match="damaged"):
        client.deserialize(payload.replace(b'"outputs"', b'"outgoes"'), "p", HERE)
