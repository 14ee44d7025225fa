"""The part of the conformance suite that needs several devices, and what its parts share."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import ml_dtypes
import numpy as np
import pytest

from xla_core.contract.device_protocol import ArraySpec, DeviceClient, Placement
from xla_core.testing.programs import make_program, spec


def sample(shape: tuple[int, ...], dtype: str | np.dtype) -> np.ndarray:
    """Values that differ from each other where the dtype allows, exact in each of ``DTYPES``."""
    wanted = np.dtype(getattr(ml_dtypes, str(dtype), dtype))
    count = int(np.prod(shape, dtype=np.int64))
    values = (np.arange(count) % 8).reshape(shape)
    if wanted.kind == "c":
        return (values - 3 + 2j * values).astype(wanted)
    return values.astype(wanted)


def f32(*shape: int) -> ArraySpec:
    """A float32 spec."""
    return ArraySpec(shape, np.dtype(np.float32))


def first(client: DeviceClient) -> Placement:
    """The client's first device."""
    return Placement((client.local_devices()[0].id,))


def pair(client: DeviceClient, sharding: str | None = None) -> Placement:
    """The client's first two devices."""
    ids: Sequence[int] = [d.id for d in client.local_devices()[:2]]
    return Placement(tuple(ids), sharding)


class SeveralDevices:
    """What a plugin must do that shows more than one device; a part of ``DeviceConformance``."""

    computes: bool = True
    """False: results of programs have no meaningful values."""
    holds_values: bool = True
    """False: buffers are shapes only (ahead-of-time compilation); reading one gives zeros."""
    partitions: bool = True
    """False: no program or value is spread over several devices."""

    def need(self, *, devices: int = 1, client: DeviceClient | None = None, **facts: bool) -> None:
        """Skip the running test where the device lacks what it needs."""
        for name, value in facts.items():
            if not value:
                pytest.skip(f"the device says {name} = False")
        if client is not None and len(client.local_devices()) < devices:
            pytest.skip(f"needs {devices} devices, there are {len(client.local_devices())}")

    def test_second_device_computes_where_its_arguments_are(self, client: DeviceClient) -> None:
        """A program placed on another device runs and leaves results there."""
        self.need(devices=2, client=client)
        second = Placement((client.local_devices()[1].id,))
        program = make_program(client, lambda a: a + 1, [f32(4)], placement=second)
        moved = client.copy(client.put(sample((4,), "float32"), first(client)), second)
        (result,) = client.compile(program).execute([moved])
        assert [device for device, _ in client.shards(result)] == list(second.devices)
        assert client.placement_of(result) == second
        if self.computes:
            np.testing.assert_array_equal(client.get(result), sample((4,), "float32") + 1)

    def test_tiled_value_has_a_shard_on_each_device(self, client: DeviceClient) -> None:
        """A value is split as its HLO sharding says, and put together again."""
        self.need(holds_values=self.holds_values)
        self.need(devices=2, client=client, partitions=self.partitions)
        x = sample((4, 3), "float32")
        tiled = pair(client, "{devices=[2,1]<=[2]}")
        buffer = client.put(x, tiled)
        np.testing.assert_array_equal(client.get(buffer), x)
        assert client.placement_of(buffer) == tiled
        parts = client.shards(buffer)
        assert [device for device, _ in parts] == list(tiled.devices)
        np.testing.assert_array_equal(client.get(parts[1][1]), x[2:])
        again = client.assemble([part for _, part in parts], spec(x), tiled)
        np.testing.assert_array_equal(client.get(again), x)
        with pytest.raises(ValueError):
            client.assemble([parts[0][1]], spec(x), tiled)

    def test_value_that_does_not_divide_is_padded(self, client: DeviceClient) -> None:
        """Parts are of one shape, whatever the size of the value, and the value comes back as it was."""
        self.need(holds_values=self.holds_values)
        self.need(devices=2, client=client, partitions=self.partitions)
        tiled = pair(client, "{devices=[2,1]<=[2]}")
        for rows in (3, 1):
            x = sample((rows, 3), "float32")
            buffer = client.put(x, tiled)
            np.testing.assert_array_equal(client.get(buffer), x)
            parts = [part for _, part in client.shards(buffer)]
            first, second = map(client.get, parts)
            assert first.shape == second.shape == (-(-rows // 2), 3)
            np.testing.assert_array_equal(np.concatenate([first, second])[:rows], x)
            np.testing.assert_array_equal(client.get(client.assemble(parts, spec(x), tiled)), x)

    def test_partitioned_program(self, client: DeviceClient) -> None:
        """One program over two devices; arguments of another layout are refused."""
        self.need(devices=2, client=client, partitions=self.partitions, computes=self.computes)
        sharding = "{devices=[2,1]<=[2]}"
        x, w = sample((4, 4), "float32"), sample((4, 4), "float32").T.copy()
        program = make_program(
            client,
            lambda a, b: (a + 1, a @ b, (a @ b).sum()),
            [spec(x, sharding), spec(w)],
            aliases=[(0, 0)],
            placement=pair(client),
            num_partitions=2,
        )
        executable = client.compile(program)
        assert executable.input_shardings() == (sharding, None)
        whole, tiled = client.put(x, pair(client)), client.put(x, pair(client, sharding))
        weight = client.put(w, pair(client))
        with pytest.raises(RuntimeError):  # another layout than the program was compiled for
            client.wait(executable.execute([whole, weight]))
        results = [client.get(r) for r in executable.execute([tiled, weight])]
        for value, expected in zip(results, (x + 1, x @ w, (x @ w).sum()), strict=True):
            np.testing.assert_array_equal(value, expected)
        with pytest.raises(RuntimeError):
            client.get(tiled)

    def test_replicas_compute_on_values_of_their_own(self, client: DeviceClient) -> None:
        """An all-reduce adds values that differ from device to device."""
        self.need(devices=2, client=client, partitions=self.partitions, computes=self.computes)
        both = pair(client)
        # jax 0.12.0: axes are explicit unless one says otherwise
        mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        whole = jax.sharding.PartitionSpec()

        def total(a: jax.Array) -> jax.Array:
            def on_each(part: object) -> object:
                return jax.lax.psum(part, "data")

            return jax.shard_map(
                on_each, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
            )(a)

        program = make_program(client, total, [f32(3)], placement=both, num_partitions=2)
        parts = [
            client.put(np.full(3, 10.0**i, np.float32), Placement((device,)))
            for i, device in enumerate(both.devices)
        ]
        value = client.assemble(parts, f32(3), both)
        (result,) = client.compile(program).execute([value])
        for _, part in client.shards(result):
            np.testing.assert_array_equal(client.get(part), np.full(3, 11, np.float32))
