"""What is particular to the CPU plugin, beyond the conformance suite."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import textwrap

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from xla_core.contract import serialized_executable
from xla_core.contract.device_protocol import ArraySpec, Placement, Topology
from xla_core.extension_api.plugins import new_manager, start_client
from xla_core.pjrt import cpu_runtime
from xla_core.testing.jax_state import to_host
from xla_core.testing.programs import make_program, spec
from xla_pjrt_cpu import CpuClient, create_client, fusions
from xla_pjrt_cpu import client as client_module

HERE = Placement((0,))
F32 = np.dtype(np.float32)


@pytest.fixture(scope="module")
def client():
    return create_client(Topology(), {})


def f32(*shape):
    return ArraySpec(shape, F32)


def test_entry_point_starts_this_client():
    started = start_client("cpu", new_manager(), {"CPU_NUM_DEVICES": "3"})
    assert isinstance(started, CpuClient)
    assert started.device_type == "CPU"
    assert [d.id for d in started.local_devices()] == [0, 1, 2]


@pytest.mark.parametrize("value", ["0", "-1", "two", "", "1.5"])
def test_device_count_that_is_no_number(value):
    with pytest.raises(ValueError, match=r"CPU_NUM_DEVICES is .*whole number"):
        create_client(Topology(), {"CPU_NUM_DEVICES": value})


def test_donated_memory_is_reused(client):
    program = make_program(client, lambda s, d: s - d, [f32(1000), f32(1000)], aliases=[(0, 0)])
    executable = client.compile(program)
    assert executable.memory_analysis()["aliased"] == 4000
    state, delta = (client.put(np.ones(1000, F32), HERE) for _ in range(2))
    address = state.unsafe_buffer_pointer()
    for _ in range(10):
        (state,) = executable.execute([state, delta])
        assert state.unsafe_buffer_pointer() == address


def test_a_value_read_earlier_does_not_keep_memory_from_being_donated(client):
    program = make_program(client, lambda s: s + 1, [f32(1000)], aliases=[(0, 0)])
    executable = client.compile(program)
    state = client.put(np.zeros(1000, F32), HERE)
    address = state.unsafe_buffer_pointer()
    read = client.get(state)
    (after,) = executable.execute([state])
    assert after.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(read, np.zeros(1000))
    np.testing.assert_array_equal(client.get(after), np.ones(1000))


def test_compiler_options_reach_the_compiler(client, monkeypatch):
    def norm(a):
        return jnp.tanh(a) * 2 + a

    monkeypatch.setenv("XLA_COMPILE_EFFORT", "full")  # a small program is compiled with less
    fused, plain = (
        client.compile(make_program(client, norm, [f32(64, 64)], options=options))
        for options in ({}, {"xla_disable_hlo_passes": "fusion"})
    )
    # all operations in one kernel, or a kernel each
    assert fused.optimized_hlo().count("fusion(") == 1
    assert plain.optimized_hlo().count("fusion(") > 1
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_no_such_option'"):
        client.compile(make_program(client, norm, [f32(4)], options={"xla_no_such_option": True}))


def test_a_portable_artifact_is_compiled(client):
    """Its module is of another dialect than those that jax lowers to."""
    exported = jax.export.export(jax.jit(lambda a: jnp.tanh(a) * 2), platforms=["cpu"])
    artifact = exported(jax.ShapeDtypeStruct((4,), F32)).mlir_module_serialized
    assert cpu_runtime.parsed(artifact) is None
    program = make_program(client, jnp.negative, [f32(4)])
    executable = client.compile(dataclasses.replace(program, stablehlo=artifact))
    argument = np.arange(4, dtype=F32)
    (result,) = executable.execute([client.put(argument, HERE)])
    np.testing.assert_allclose(client.get(result), np.tanh(argument) * 2, rtol=1e-6)


def test_an_option_that_xla_does_not_know_is_left_out_alone(monkeypatch):
    client = CpuClient()
    chosen = {"xla_no_such_option": 1, "xla_backend_optimization_level": 0, "xla_nor_this": True}
    monkeypatch.setattr(client_module, "options_by_effort", lambda *of: dict(chosen))
    program = make_program(client, lambda a: a * 2, [f32(4)])
    for _ in range(2):
        stored = client.compile(program).serialize()
        assert b'"xla_backend_optimization_level": 0' in stored and b"xla_no" not in stored
    asked_for = dataclasses.replace(program, options={"xla_nor_this": True})
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_nor_this'"):
        client.compile(asked_for)


CONVOLUTION = ((1, 32, 28, 28), (32, 32, 3, 3))


def convolve(image, kernel):
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME")


@pytest.mark.parametrize(
    ("function", "shapes", "largest", "fused"),
    [
        (jnp.matmul, ((256, 256), (256, 256)), 1 << 16, True),
        (jnp.matmul, ((256, 256), (256, 256)), None, True),
        (jnp.matmul, ((64, 64), (64, 64)), 1 << 12, False),
        (convolve, CONVOLUTION, 1 << 16, False),
        (convolve, CONVOLUTION, None, False),
    ],
    ids=["large product", "nobody knows", "small product", "convolution", "convolution, unknown"],
)
def test_what_goes_to_ynnpack(client, monkeypatch, function, shapes, largest, fused):
    program = make_program(client, function, [f32(*shape) for shape in shapes])
    program = dataclasses.replace(program, largest=largest)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert ("ynn" in client.compile(program).optimized_hlo()) is fused
    # whoever sets the option decides: in XLA_FLAGS, which XLA has read by now, or in the program
    monkeypatch.setenv("XLA_FLAGS", f"--{fusions.OPTION}=")
    assert "ynn" in client.compile(program).optimized_hlo()
    monkeypatch.setenv("XLA_FLAGS", "")
    none = dataclasses.replace(program, options={fusions.OPTION: ""})
    assert "ynn" not in client.compile(none).optimized_hlo()


def test_a_jaxlib_without_the_option_still_compiles(client, monkeypatch):
    monkeypatch.setattr(fusions, "OPTION", "xla_cpu_experimental_no_such_option")
    program = make_program(client, jnp.matmul, [f32(64, 64), f32(64, 64)])
    assert "ynn" in client.compile(program).optimized_hlo()
    wrong = make_program(client, jnp.matmul, [f32(4, 4)] * 2, options={"xla_no_such_option": True})
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_no_such_option'"):
        client.compile(wrong)


def test_placement_and_counts_must_agree(client):
    program = make_program(client, lambda a: a, [f32(4)], num_partitions=2)
    with pytest.raises(ValueError, match="1 replicas of 2 partitions need 2 devices"):
        client.compile(program)
    with pytest.raises(ValueError, match=r"no CPU device 5; this job has \[0\]"):
        client.compile(make_program(client, lambda a: a, [f32(4)], placement=Placement((5,))))


def test_stored_executable_moves_to_another_device():
    two = create_client(Topology(), {"CPU_NUM_DEVICES": "2"})
    program = make_program(two, lambda a: a * 3, [f32(4)])
    payload = two.compile(program).serialize()
    there = Placement((1,))
    (found,) = two.deserialize(payload, "moved", there).execute([two.put(np.ones(4, F32), there)])
    assert [device for device, _ in two.shards(found)] == [1]
    np.testing.assert_array_equal(two.get(found), np.full(4, 3))
    with pytest.raises(ValueError, match="compiled for 1 devices, the requested placement has 2"):
        two.deserialize(payload, "moved", Placement((0, 1)))


def test_partitioned_executable_can_be_stored():
    four = create_client(Topology(), {"CPU_NUM_DEVICES": "4"})
    everywhere = Placement((0, 1, 2, 3))
    rows = "{devices=[4,1]<=[4]}"
    x = np.arange(32, dtype=F32).reshape(8, 4)
    program = make_program(
        four, lambda a: (a * 2, a.sum()), [spec(x, rows)], placement=everywhere, num_partitions=4
    )
    loaded = four.deserialize(four.compile(program).serialize(), "again", everywhere)
    doubled, total = loaded.execute([four.put(x, Placement(everywhere.devices, rows))])
    assert loaded.output_shardings() == (rows, None)
    assert [part.shape for _, part in four.shards(doubled)] == [(2, 4)] * 4
    np.testing.assert_array_equal(four.get(doubled), x * 2)
    assert four.get(total) == x.sum()


def test_transposed_mesh_and_replicated_dimension():
    four = create_client(Topology(), {"CPU_NUM_DEVICES": "4"})
    x = np.arange(8, dtype=F32).reshape(2, 4)
    columns = Placement((3, 2, 1, 0), "{devices=[1,2,2]<=[2,2]T(1,0) last_tile_dim_replicate}")
    buffer = four.put(x, columns)
    np.testing.assert_array_equal(four.get(buffer), x)
    parts = {device: four.get(part) for device, part in four.shards(buffer)}
    assert all(part.shape == (2, 2) for part in parts.values())
    # [[0, 1], [2, 3]] transposed: partitions 0 and 2 hold the left columns; p is on device 3 - p
    for partition, columns_of in enumerate((slice(0, 2), slice(2, 4), slice(0, 2), slice(2, 4))):
        np.testing.assert_array_equal(parts[3 - partition], x[:, columns_of])


def test_jax_in_the_same_process_is_not_touched():
    script = textwrap.dedent(
        """
        import numpy as np, jax
        from xla_core.contract.device_protocol import Placement, Topology
        from xla_core.testing.jax_state import backends_started
        from xla_core.testing.programs import run
        from xla_pjrt_cpu import create_client
        client = create_client(Topology(), {"CPU_NUM_DEVICES": "4"})
        (found,) = run(client, lambda a: a + 1, np.ones(3))
        assert found.dtype == np.float64
        assert backends_started() == ()
        assert not jax.config.jax_enable_x64
        assert len(jax.devices()) == 1 and jax.numpy.ones(3).dtype == "float32"
        client.shutdown()
        assert float(jax.numpy.ones(3).sum()) == 3
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr


def test_stored_linear_algebra_runs_in_a_process_that_never_lowered_any(client, tmp_path):
    """LAPACK kernels are loaded by name; lowering registers them, and here nothing is lowered."""
    matrix = np.array([[4.0, 2.0], [2.0, 3.0]])
    program = make_program(client, jnp.linalg.cholesky, [spec(matrix)])
    (tmp_path / "program").write_bytes(client.compile(program).serialize())
    np.save(tmp_path / "wanted.npy", np.linalg.cholesky(matrix))
    script = textwrap.dedent(
        """
        import pathlib, sys
        import numpy as np
        from xla_core.contract.device_protocol import Placement, Topology
        from xla_pjrt_cpu import create_client
        folder = pathlib.Path(sys.argv[1])
        client, here = create_client(Topology(), {}), Placement((0,))
        executable = client.deserialize((folder / "program").read_bytes(), "cholesky", here)
        (found,) = executable.execute([client.put(np.array([[4.0, 2.0], [2.0, 3.0]]), here)])
        np.testing.assert_allclose(client.get(found), np.load(folder / "wanted.npy"), rtol=1e-12)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def clean_environment():
    return {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}


PEER = """
    import sys
    import numpy as np, jax
    from jaxlib import _jax
    from xla_core.contract.device_protocol import ArraySpec, Placement, Topology
    from xla_core.testing.programs import make_program
    from xla_pjrt_cpu import create_client

    rank, address = int(sys.argv[1]), sys.argv[2]
    # the coordinator must outlive the clients
    service = _jax.get_distributed_runtime_service(address, 2) if rank == 0 else None
    runtime = _jax.get_distributed_runtime_client(address, rank, init_timeout=60)
    runtime.connect()
    client = create_client(
        Topology(process_index=rank, process_count=2, coordinator_address=address,
                 distributed_client=runtime), {"CPU_NUM_DEVICES": "2"})
    mine = [d.id for d in client.local_devices()]
    everyone = [d.id for d in client.devices()]
    assert len(everyone) == 4 and len(mine) == 2 and mine == everyone[2 * rank : 2 * rank + 2]
    everywhere = Placement(tuple(everyone))
    mesh = jax.sharding.AbstractMesh((4,), ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.sharding.PartitionSpec()

    def total(a):
        return jax.shard_map(lambda t: jax.lax.psum(t, "all"), mesh=mesh, in_specs=whole,
                             out_specs=whole, check_vma=False)(a)

    value = ArraySpec((3,), np.dtype(np.float32))
    program = make_program(client, total, [value], placement=everywhere, num_partitions=4)
    executable = client.compile(program)
    own = [client.put(np.full(3, 10.0 ** i, np.float32), Placement((i_d,)))
           for i, i_d in zip(range(2 * rank, 2 * rank + 2), mine)]
    (found,) = executable.execute([client.assemble(own, value, everywhere)])
    for _, part in client.shards(found):
        np.testing.assert_array_equal(client.get(part), np.full(3, 1111, np.float32))

    rows = Placement(everywhere.devices, "{devices=[4]<=[4]}")
    tiled = client.put(np.arange(8, dtype=np.float32), rows)
    parts = [client.get(part).tolist() for _, part in client.shards(tiled)]
    assert parts == [[4.0 * rank, 4.0 * rank + 1], [4.0 * rank + 2, 4.0 * rank + 3]], parts
    try:
        client.get(tiled)
    except RuntimeError as error:
        assert "several processes" in str(error)
    else:
        raise AssertionError("half a value was given as the whole")
    runtime.shutdown()
    print("done", rank)
"""


def test_two_processes_form_one_mesh():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    peers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PEER), str(rank), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outcomes = [peer.communicate(timeout=120) for peer in peers]
    assert [peer.returncode for peer in peers] == [0, 0], outcomes
    # gloo writes lines of its own
    assert [out.splitlines()[-1] for out, _ in outcomes] == ["done 0", "done 1"]


def test_shut_down_client_lets_its_memory_go():
    local = create_client(Topology(), {})
    buffer = local.put(np.ones(4, F32), HERE)
    local.shutdown()
    np.testing.assert_array_equal(to_host(buffer), np.ones(4))
    assert jax.config.jax_enable_x64 is False


REHEARSED = {
    "sum": (lambda a: a + a, [f32(4)], True),
    "matrices": (lambda a, b: a @ b, [f32(64, 64), f32(64, 64)], True),
    "random": (lambda a: a * jax.random.normal(jax.random.key(1), (4,)), [f32(4)], True),
    "short loop": (lambda a: jax.lax.fori_loop(0, 7, lambda i, v: v @ v, a), [f32(4, 4)], True),
    "long loop": (lambda a: jax.lax.fori_loop(0, 70, lambda i, v: v @ v, a), [f32(4, 4)], False),
    "open loop": (lambda a: jax.lax.while_loop(lambda v: v[0] > 1, jnp.sqrt, a), [f32(4)], False),
    "library": (jnp.linalg.cholesky, [f32(4, 4)], False),
    "large arguments": (jnp.sum, [f32(2**25)], False),
    "large results": (lambda a: jnp.broadcast_to(a, (2**24, 4)), [f32(4)], False),
    "much to do": (lambda a: a @ a, [f32(1024, 1024)], False),
}


@pytest.mark.parametrize("name", REHEARSED)
def test_what_is_rehearsed(client, name):
    function, inputs, wanted = REHEARSED[name]
    program = make_program(client, function, inputs)
    loaded = client.deserialize(client.compile(program).serialize(), name, HERE)
    assert client.rehearse(loaded) is wanted
    # what is stored again keeps the mark
    assert serialized_executable.report(loaded.serialize()) == {"rehearsable": wanted}


def test_what_was_compiled_or_stored_without_the_mark_is_not_rehearsed(client):
    program = make_program(client, lambda a: a + a, [f32(4)])
    compiled = client.compile(program)
    assert client.rehearse(compiled) is False
    marked = compiled.serialize()
    _, code = serialized_executable.unpack(client.plugin, marked, "p", HERE)
    loaded = client.deserialize(serialized_executable.pack(client.plugin, program, code), "p", HERE)
    assert client.rehearse(loaded) is False
    (found,) = loaded.execute([client.put(np.ones(4, F32), HERE)])
    assert client.get(found).tolist() == [2, 2, 2, 2]


def test_a_program_over_two_devices_is_not_rehearsed():
    client = create_client(Topology(), {"CPU_NUM_DEVICES": "2"})
    both = Placement((0, 1))
    program = make_program(client, lambda a: a + a, [f32(4)], placement=both, num_partitions=2)
    loaded = client.deserialize(client.compile(program).serialize(), "p", both)
    assert client.rehearse(loaded) is False


def test_a_rehearsal_gives_each_donated_argument_memory_of_its_own(client):
    aliases = [(0, 0), (1, 1)]
    program = make_program(client, lambda a, b, c, d: (a + c, b - d), [f32(4)] * 4, aliases=aliases)
    loaded = client.deserialize(client.compile(program).serialize(), "p", HERE)
    a, b, c, d = loaded.arguments(client.allocate)
    assert a is not b and c is d and a is not c
    assert client.rehearse(loaded) is True
