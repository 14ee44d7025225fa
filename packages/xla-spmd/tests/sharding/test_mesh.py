"""Meshes: shapes, names, text, hybrids, and what is refused."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

import torch_xla.distributed.spmd as xs
from xla_core.contract.device_protocol import DeviceDescription
from xla_spmd.sharding import job_devices


def test_shape_names_and_logical_mesh(mesh):
    assert mesh.shape() == OrderedDict([("data", 4), ("model", 2)])
    assert mesh.size() == 8
    assert mesh.get_axis_name_idx("model") == 1
    assert mesh.get_axis_name_idx("nope") is None
    np.testing.assert_array_equal(mesh.get_logical_mesh(), np.arange(8).reshape(4, 2))
    assert xs.Mesh(range(8), (2, 4)).shape() == OrderedDict([(0, 2), (1, 4)])


def test_text_is_torch_xlas_and_is_read_back():
    mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
    text = "{'device_ids': [0, 1, 2, 3], 'mesh_shape': (2, 2), 'axis_names': ('data', 'model')}"
    assert str(mesh) == text
    assert xs.Mesh.from_str(text) == mesh
    assert str(xs.Mesh.from_str(text)) == text
    assert hash(xs.Mesh.from_str(text)) == hash(mesh)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{'device_ids': 3}", "import os"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="is not a mesh"):
        xs.Mesh.from_str(text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ([0, 1, 2, 3], (3, 2)),
            r"Number of device IDs \(4\) must match mesh size \(6\).*\(2, 2\)",
        ),
        (([], (4,)), r"Number of device IDs \(0\) must match mesh size \(4\)"),
        (([0, 1, 1, 3], (4,)), "device 1 occurs twice"),
        (([0, 1, 2, 9], (4,)), "Device IDs must be less than mesh size"),
        (([0, 1], (2,), ("a", "b")), "Number of axis names"),
        (([0, 1], (2, 1), ("a", "a")), "rename one of the two 'a'"),
    ],
)
def test_meshes_that_cannot_be(arguments, text):
    with pytest.raises(AssertionError, match=text):
        xs.Mesh(*arguments)


def test_one_dimension_and_the_global_mesh():
    mesh = xs.get_1d_mesh("fsdp")
    assert mesh.shape() == OrderedDict([("fsdp", 8)])
    assert xs.get_1d_mesh().axis_names is None
    before = xs.get_global_mesh()
    xs.set_global_mesh(mesh)
    assert xs.get_global_mesh() is mesh
    xs.set_global_mesh(before)


def test_hybrid_mesh_keeps_groups_together():
    mesh = xs.HybridMesh(
        ici_mesh_shape=(1, 4, 1), dcn_mesh_shape=(2, 1, 1), axis_names=("data", "fsdp", "tensor")
    )
    assert mesh.shape() == OrderedDict([("data", 2), ("fsdp", 4), ("tensor", 1)])
    np.testing.assert_array_equal(
        mesh.get_logical_mesh(), [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]
    )
    crossing = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(1, 2))
    np.testing.assert_array_equal(crossing.get_logical_mesh(), [[0, 1, 4, 5], [2, 3, 6, 7]])
    assert xs.HybridMesh(ici_mesh_shape=(4, 2)).mesh_shape == (4, 2)


def test_hybrid_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="needs 4 devices; this job has 8"):
        xs.HybridMesh(ici_mesh_shape=(2,), dcn_mesh_shape=(2,))
    with pytest.raises(ValueError, match="one number per mesh axis"):
        xs.HybridMesh(ici_mesh_shape=(2, 4), dcn_mesh_shape=(2,))


def chips(sizes):
    """Devices of a torus, numbered along its last axis first."""
    return [
        DeviceDescription(i, -1, 0, "tpu", "TPU", {"coords": place, "core_on_chip": 0})
        for i, place in enumerate(np.ndindex(sizes))
    ]


def test_mesh_axes_run_along_axes_of_the_torus():
    torus = chips((2, 4, 2))
    grid = job_devices.torus_grid(torus, range(16), (2, 8))
    where = {d.id: d.attributes["coords"] for d in torus}
    # one mesh axis is one axis of the torus: its neighbours differ in that coordinate only
    fixed = {axis for row in grid.T for axis in range(3) if len({where[i][axis] for i in row}) > 1}
    assert len(fixed) == 1
    assert sorted(grid.flat) == list(range(16))


def test_without_a_fitting_torus_devices_fill_the_mesh_in_order():
    np.testing.assert_array_equal(
        job_devices.torus_grid(chips((3, 3, 1)), range(9), (9, 1)).ravel(), range(9)
    )
    plain = [DeviceDescription(i, i, 0, "cpu", "cpu") for i in range(6)]
    np.testing.assert_array_equal(
        job_devices.torus_grid(plain, range(6), (2, 3)), np.arange(6).reshape(2, 3)
    )


def test_jax_mesh_needs_as_many_jax_devices(run_python):
    found = run_python("""
        import jax, numpy as np
        import torch_xla.distributed.spmd as xs
        jax.config.update("jax_num_cpu_devices", 4)
        mesh = xs.Mesh(np.arange(4)[::-1], (2, 2), ("data", "model"))
        found = mesh.get_jax_mesh()
        print(found.axis_names, [d.id for d in found.devices.flat])
        try:
            xs.Mesh(np.arange(8), (8,)).get_jax_mesh()
        except RuntimeError as error:
            print(error)
    """)
    assert "('data', 'model') [3, 2, 1, 0]" in found
    assert "needs 8 jax devices" in found and "jax_num_cpu_devices" in found


def test_values_that_one_device_holds_padded_go_to_the_mesh_cut(run_python):
    # docs/shapes.md: they were made before there was a mesh
    run_python(
        """
        import torch, torch_xla
        import torch_xla.runtime as xr

        for length in (5, 9, 7):
            rows = torch.arange(4.0 * length).reshape(length, 4).sin()
            x = rows.to("xla").exp()
            torch_xla.sync()
        assert x._s.buffer.array.shape == (8, 4)
        xr.use_spmd()
        y = x * 2
        torch_xla.sync()
        torch.testing.assert_close(y.cpu(), rows.exp() * 2)
        """,
        XLA_VARYING_SHAPES="1",
    )
