"""The conformance suite of device plugins: subclass ``DeviceConformance`` in a test module.

    class TestAcme(DeviceConformance):
        @classmethod
        def make_client(cls):
            return create_client(Topology(), os.environ)

The attributes say what a device cannot do by its nature; a test that needs it is skipped with that
reason. With one device the tests that need several are skipped too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from xla_core.contract.device_protocol import (
    INTERFACE_VERSION,
    OLDEST_INTERFACE_VERSION,
    ArraySpec,
    Buffer,
    DeviceClient,
    Executable,
    Placement,
    Program,
    capabilities_of,
)
from xla_core.extension_api.operators import Operand
from xla_core.testing.conformance_devices import SeveralDevices, f32, first, pair, sample
from xla_core.testing.programs import make_program, run

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
SHAPES = ((), (1,), (0,), (7,), (3, 4), (2, 0, 3), (2, 3, 5))
TOO_LARGE = (1 << 28, 1 << 20)
"""More elements than any memory holds, few enough for 64-bit sizes."""


class DeviceConformance(SeveralDevices):
    """What every device plugin must do. Override ``make_client`` and what does not apply."""

    compiles: bool = True
    """False: programs are not looked into; there is no compiler."""
    checks_dtypes: bool = True
    """False: the runtime compares the sizes of arguments only."""
    serializes: bool = True
    """False: ``serialize`` raises NotImplementedError, which is then checked."""
    counts_memory: bool = True
    """False: ``memory_info`` gives zeros."""
    several_clients: bool = True
    """False: the hardware allows one client per process; the shutdown test would take it away."""

    @classmethod
    def make_client(cls) -> DeviceClient:
        """A new client of the plugin under test."""
        raise NotImplementedError(f"{cls.__name__} must define make_client()")

    @pytest.fixture(scope="class")
    @classmethod
    def client(cls) -> Iterator[DeviceClient]:
        """One client for all tests of the class."""
        client = cls.make_client()
        yield client
        client.shutdown()

    # --- devices ---

    def test_client_fulfils_the_protocol(self, client: DeviceClient) -> None:
        """The client has every method, this interface version and an upper-case type."""
        assert isinstance(client, DeviceClient)
        assert OLDEST_INTERFACE_VERSION <= client.interface_version <= INTERFACE_VERSION
        assert client.device_type == client.device_type.upper() != ""

    def test_devices_have_unique_ids_and_local_ones_are_counted(self, client: DeviceClient) -> None:
        """Ids are unique over the job; local indices count from 0."""
        everyone, local = client.devices(), client.local_devices()
        ids = [d.id for d in everyone]
        assert len(set(ids)) == len(ids) >= len(local) >= 1
        assert [d.local_index for d in local] == list(range(len(local)))
        assert {d.id for d in local} == {d.id for d in everyone if d.local_index >= 0}
        assert all(d.platform and d.kind for d in everyone)

    def test_fingerprint_is_text_and_the_same_each_time(self, client: DeviceClient) -> None:
        """Cache keys made of the fingerprint are found again."""
        fingerprint = dict(client.fingerprint())
        assert fingerprint and all(
            isinstance(k, str) and isinstance(v, str) for k, v in fingerprint.items()
        )
        assert fingerprint == dict(client.fingerprint())

    # --- transfers ---

    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_round_trip(self, client: DeviceClient, dtype: str, shape: tuple[int, ...]) -> None:
        """A value comes back bit for bit, of each dtype and rank, empty ones too."""
        self.need(holds_values=self.holds_values)
        array = sample(shape, dtype)
        array = array.astype(client.numpy_dtype(array.dtype))
        buffer = client.put(array, first(client))
        assert isinstance(buffer, Buffer)
        got = client.get(buffer)
        assert (got.shape, got.dtype) == (array.shape, array.dtype)
        assert got.tobytes() == array.tobytes()

    @pytest.mark.parametrize(
        "make",
        [
            lambda a: a.T,
            lambda a: a[::-1, ::2],
            lambda a: np.broadcast_to(a[0], a.shape),
            np.asfortranarray,
        ],
        ids=["transposed", "reversed", "broadcast", "fortran"],
    )
    def test_round_trip_of_strided_arrays(
        self, client: DeviceClient, make: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        """Host arrays need not be contiguous."""
        self.need(holds_values=self.holds_values)
        array = make(sample((4, 6), "float32"))
        np.testing.assert_array_equal(client.get(client.put(array, first(client))), array)

    def test_special_floats_keep_their_bits(self, client: DeviceClient) -> None:
        """NaN, infinities, negative zero and denormals are transferred as they are."""
        self.need(holds_values=self.holds_values)
        array = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38], np.float32)
        assert client.get(client.put(array, first(client))).tobytes() == array.tobytes()

    @pytest.mark.parametrize("count", [4, 1 << 20])
    def test_host_array_may_change_after_put(self, client: DeviceClient, count: int) -> None:
        """``put`` has read the array when it returns, small or large."""
        self.need(holds_values=self.holds_values)
        array = np.ones(count, np.float32)
        buffer = client.put(array, first(client))
        array[:] = 7
        np.testing.assert_array_equal(client.get(buffer), np.ones(count, np.float32))

    def test_read_array_belongs_to_the_caller(self, client: DeviceClient) -> None:
        """Writing into what ``get`` returned does not reach the device."""
        self.need(holds_values=self.holds_values)
        buffer = client.put(np.ones(5, np.float32), first(client))
        got = client.get(buffer)
        got[:] = 7
        np.testing.assert_array_equal(client.get(buffer), np.ones(5, np.float32))

    def test_copy_outlives_its_source(self, client: DeviceClient) -> None:
        """A copy on the same device is a buffer of its own."""
        self.need(holds_values=self.holds_values)
        source = client.put(sample((9,), "int32"), first(client))
        copied = client.copy(source, first(client))
        del source
        np.testing.assert_array_equal(client.get(copied), sample((9,), "int32"))

    def test_allocate_gives_zeros(self, client: DeviceClient) -> None:
        """``allocate`` gives zeros of the asked shape and dtype."""
        got = client.get(client.allocate(ArraySpec((3, 2), np.dtype("int32")), first(client)))
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, np.zeros((3, 2)))

    def test_unknown_device_is_refused(self, client: DeviceClient) -> None:
        """ValueError names a device id that is not there."""
        missing = Placement((max(d.id for d in client.devices()) + 1,))
        with pytest.raises(ValueError, match=str(missing.devices[0])):
            client.put(np.zeros(1, np.float32), missing)

    # --- programs ---

    def test_results_have_the_promised_shapes_and_dtypes(self, client: DeviceClient) -> None:
        """Results are as the program says, scalars and empty ones too."""
        x = sample((3, 4), "float32")
        results = run(client, lambda a: (a.T, a > 1, a.sum(), a[:0]), x)
        kinds = [(f.shape, f.dtype.name) for f in results]
        wanted = [((4, 3), "float32"), ((3, 4), "bool"), ((), "float32"), ((0, 4), "float32")]
        assert kinds == wanted
        if self.computes:
            for value, expected in zip(results, (x.T, x > 1, x.sum(), x[:0]), strict=True):
                np.testing.assert_array_equal(value, expected)

    @pytest.mark.parametrize("dtype", [d for d in DTYPES if not d.startswith(("float8", "bool"))])
    def test_arithmetic_in_each_dtype(self, client: DeviceClient, dtype: str) -> None:
        """An addition is exact in each number format."""
        self.need(computes=self.computes)
        x = sample((8,), dtype)
        x = x.astype(client.numpy_dtype(x.dtype))
        (result,) = run(client, lambda a: a + a, x)
        # small whole numbers: exact in every format
        assert result.tobytes() == (x + x).tobytes()

    def test_unused_inputs_stay_and_outputs_may_repeat(self, client: DeviceClient) -> None:
        """Argument and result counts are those of the program."""
        x, y = sample((3,), "float32"), sample((2, 2), "int32")
        results = run(client, lambda a, b: (a, a, a), x, y)
        assert len(results) == 3
        if self.computes:
            for value in results:
                np.testing.assert_array_equal(value, x)

    def test_program_without_outputs_and_without_inputs(self, client: DeviceClient) -> None:
        """Neither list needs an entry."""
        assert run(client, lambda a: (), sample((3,), "float32")) == []
        (result,) = run(client, lambda: jnp.arange(3, dtype=jnp.int32))
        np.testing.assert_array_equal(result, [0, 1, 2] if self.computes else [0, 0, 0])

    def test_one_buffer_may_be_several_arguments(self, client: DeviceClient) -> None:
        """A buffer may be passed twice if it is not donated."""
        program = make_program(client, lambda a, b: a * b, [f32(4), f32(4)])
        buffer = client.put(sample((4,), "float32"), program.placement)
        (result,) = client.compile(program).execute([buffer, buffer])
        if self.computes:
            np.testing.assert_array_equal(client.get(result), sample((4,), "float32") ** 2)

    def test_nan_and_infinity_follow_ieee(self, client: DeviceClient) -> None:
        """No fast-math: NaN is not equal to itself, zeros have signs."""
        self.need(computes=self.computes)
        x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0], np.float32)
        results = run(
            client,
            lambda a: (a == a, a - a, a * 0, jnp.maximum(a, 0), jnp.isnan(a), 1 / a, a / a),
            x,
        )
        with np.errstate(all="ignore"):
            wanted = (x == x, x - x, x * 0, np.maximum(x, 0), np.isnan(x), 1 / x, x / x)
        for value, expected in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(value, expected)
        assert np.signbit(results[5][4]) and np.isneginf(results[5][4])

    @pytest.mark.parametrize("shapes", [[], [(4,)], [(4,), (4,), (4,)], [(4,), (5,)]], ids=str)
    def test_wrong_arguments_are_refused(
        self, client: DeviceClient, shapes: list[tuple[int, ...]]
    ) -> None:
        """A wrong number or shape of arguments is a RuntimeError, never a crash."""
        program = make_program(client, lambda a, b: a + b, [f32(4), f32(4)])
        executable = client.compile(program)
        arguments = [client.put(sample(s, "float32"), program.placement) for s in shapes]
        with pytest.raises(RuntimeError):
            client.wait(executable.execute(arguments))

    def test_argument_of_another_dtype_is_refused(self, client: DeviceClient) -> None:
        """A dtype that the program does not take is a RuntimeError, not reinterpreted bits."""
        self.need(checks_dtypes=self.checks_dtypes)
        executable = client.compile(make_program(client, lambda a: a + 1, [f32(4)]))
        other = client.put(sample((4,), "int32"), first(client))
        with pytest.raises(RuntimeError):
            client.wait(executable.execute([other]))

    def test_compiler_options_are_checked(self, client: DeviceClient) -> None:
        """An option that the compiler does not know is an error that names it."""
        self.need(compiles=self.compiles)
        program = make_program(
            client, lambda a: a + 1, [f32(4)], options={"xla_no_such_option": True}
        )
        with pytest.raises(RuntimeError, match="xla_no_such_option"):
            client.compile(program)

    def test_what_is_no_program_is_refused(self, client: DeviceClient) -> None:
        """Bytes that are no program are a RuntimeError."""
        self.need(compiles=self.compiles)
        program = Program("junk", b"ML\xefR junk", (), (), (), first(client))
        with pytest.raises(RuntimeError):
            client.compile(program)

    def test_analysis(self, client: DeviceClient) -> None:
        """Memory figures cover arguments and results; the other reports have their types."""
        executable = client.compile(make_program(client, lambda a: a @ a, [f32(16, 16)]))
        assert isinstance(executable, Executable)
        memory = executable.memory_analysis()
        assert set(memory) == {"arguments", "outputs", "temporaries", "aliased", "code"}
        assert memory["arguments"] >= 1024 and memory["outputs"] >= 1024
        assert all(isinstance(v, float) for v in executable.cost_analysis().values())
        assert isinstance(executable.optimized_hlo(), str)
        assert executable.input_shardings() == executable.output_shardings() == (None,)

    # --- donation ---

    def test_donated_argument_is_gone_and_others_stay(self, client: DeviceClient) -> None:
        """A donated buffer cannot be read or passed again; others are intact."""
        program = make_program(
            client, lambda a, b: (b, a + b), [f32(64), f32(64)], aliases=[(0, 1)]
        )
        executable = client.compile(program)
        ones = np.ones(64, np.float32)
        a, b = (client.put(ones, program.placement) for _ in range(2))
        read_before = client.get(a)
        _, total = executable.execute([a, b])
        if self.computes:
            np.testing.assert_array_equal(client.get(total), ones + 1)
        if self.holds_values:
            np.testing.assert_array_equal(client.get(b), ones)
            np.testing.assert_array_equal(read_before, ones)
        with pytest.raises(RuntimeError):
            client.get(a)
        with pytest.raises(RuntimeError):
            client.wait(executable.execute([a, b]))

    def test_step_that_donates_its_state_can_be_repeated(self, client: DeviceClient) -> None:
        """A training loop's state can be donated at every step."""
        program = make_program(client, lambda s, d: s + d, [f32(256), f32(256)], aliases=[(0, 0)])
        executable = client.compile(program)
        state, delta = (client.put(np.ones(256, np.float32), program.placement) for _ in range(2))
        for _ in range(100):
            (state,) = executable.execute([state, delta])
        if self.computes:
            np.testing.assert_array_equal(client.get(state), np.full(256, 101, np.float32))

    # --- asynchronous execution ---

    def test_result_becomes_ready(self, client: DeviceClient) -> None:
        """``is_ready`` is True after ``wait``."""
        program = make_program(client, lambda a: a @ a, [f32(128, 128)])
        (result,) = client.compile(program).execute(
            [client.put(sample((128, 128), "float32"), program.placement)]
        )
        assert result.is_ready() in (True, False)
        client.wait([result])
        assert result.is_ready() is True

    def test_failure_is_an_exception(self, client: DeviceClient) -> None:
        """Running out of memory is a RuntimeError, and the device works on."""
        self.need(computes=self.computes)

        def fill(a: Operand) -> Operand:
            return jnp.broadcast_to(a, TOO_LARGE) + 1

        # a device may notice when it compiles, when it allocates, or when the value is read
        with pytest.raises(RuntimeError):
            program = make_program(client, fill, [f32()])
            executable = client.compile(program)
            client.wait(executable.execute([client.put(sample((), "float32"), program.placement)]))
        # ... and goes on working
        x = sample((3,), "float32")
        np.testing.assert_array_equal(run(client, lambda a: a + 1, x)[0], x + 1)

    # --- stored executables ---

    def test_serialization_round_trip(self, client: DeviceClient) -> None:
        """A stored executable gives the same results and donates the same inputs, rehearsed or not."""
        program = make_program(client, lambda a, b: (a + b, a), [f32(4), f32(4)], aliases=[(0, 0)])
        executable = client.compile(program)
        if not self.serializes:
            with pytest.raises(NotImplementedError):
                executable.serialize()
            return
        loaded = client.deserialize(executable.serialize(), "loaded", program.placement)
        assert loaded.program_name == "loaded"
        rehearse = capabilities_of(client).rehearse
        if rehearse is not None:
            rehearse(loaded)
        x = sample((4,), "float32")
        a, b = (client.put(x, program.placement) for _ in range(2))
        results = [client.get(r) for r in loaded.execute([a, b])]
        assert [f.shape for f in results] == [(4,), (4,)]
        if self.computes:
            np.testing.assert_array_equal(results[0], x + x)
            np.testing.assert_array_equal(results[1], x)
        with pytest.raises(RuntimeError):
            client.get(a)

    @pytest.mark.parametrize("payload", [b"", b"junk" * 40, b"\0" * 500], ids=["0", "junk", "nul"])
    def test_foreign_bytes_are_refused(self, client: DeviceClient, payload: bytes) -> None:
        """ValueError for bytes that ``serialize`` did not write."""
        self.need(serializes=self.serializes)
        with pytest.raises(ValueError):
            client.deserialize(payload, "foreign", first(client))

    def test_stored_executable_keeps_what_the_compiler_said(self, client: DeviceClient) -> None:
        """Memory figures and shardings of a stored executable are those of the compiled one."""
        self.need(serializes=self.serializes)
        program = make_program(client, lambda a, b: (a @ b, a), [f32(8, 8), f32(8, 8)])
        executable = client.compile(program)
        loaded = client.deserialize(executable.serialize(), "loaded", program.placement)
        # what the figures of code are differs between runtimes once it is loaded
        uses = ("arguments", "outputs", "aliased")
        analysis, wanted = loaded.memory_analysis(), executable.memory_analysis()
        assert {u: analysis[u] for u in uses} == {u: wanted[u] for u in uses}
        assert loaded.input_shardings() == executable.input_shardings()
        assert loaded.output_shardings() == executable.output_shardings()

    def test_stored_executable_of_another_size_is_refused(self, client: DeviceClient) -> None:
        """A program for one device does not load on two: ValueError."""
        self.need(devices=2, client=client, serializes=self.serializes)
        payload = client.compile(make_program(client, lambda a: a + 1, [f32(4)])).serialize()
        with pytest.raises(ValueError, match="compiled for 1 devices"):
            client.deserialize(payload, "moved", pair(client))

    # --- threads ---

    def test_threads_do_not_disturb_each_other(self, client: DeviceClient) -> None:
        """One executable may run in several threads at a time."""
        program = make_program(client, lambda a: a * 2 + 1, [f32(32)])
        executable = client.compile(program)
        barrier = threading.Barrier(4)

        def work(number: int) -> list[bool]:
            barrier.wait()
            x = np.full(32, number, np.float32)
            outcomes = []
            for _ in range(50):
                (result,) = executable.execute([client.put(x, program.placement)])
                outcomes.append(
                    bool((client.get(result) == (2 * x + 1 if self.computes else 0)).all())
                )
            return outcomes

        with ThreadPoolExecutor(4) as pool:
            assert [all(r) for r in pool.map(work, range(4))] == [True] * 4

    def test_threads_may_compile(self, client: DeviceClient) -> None:
        """Programs may be lowered and compiled in several threads at a time."""

        def work(number: int) -> float:
            x = np.ones(3, np.float32)
            return float(run(client, lambda a: a + number, x)[0].sum())

        with ThreadPoolExecutor(4) as pool:
            sums = list(pool.map(work, range(4)))
        assert sums == ([3.0, 6.0, 9.0, 12.0] if self.computes else [0.0] * 4)

    # --- memory ---

    def test_memory_info_follows_live_buffers(self, client: DeviceClient) -> None:
        """Bytes in use rise with a buffer and fall when it goes; the peak stays."""
        before = client.memory_info(0)
        assert before.bytes_limit is None or before.bytes_limit > before.bytes_used >= 0
        self.need(counts_memory=self.counts_memory)
        size = 8 << 20
        buffer = client.put(np.ones(size, np.uint8), first(client))
        client.wait([buffer])
        during = client.memory_info(0)
        assert during.bytes_used - before.bytes_used >= size
        assert during.peak_bytes_used >= during.bytes_used
        del buffer
        after = client.memory_info(0)
        assert after.bytes_used < during.bytes_used
        assert after.peak_bytes_used >= during.bytes_used

    def test_memory_comes_back_after_a_program(self, client: DeviceClient) -> None:
        """Results without references give their memory back."""
        self.need(counts_memory=self.counts_memory)
        program = make_program(client, lambda a: (a + 1, a * 2), [f32(1 << 18)])
        executable = client.compile(program)
        argument = client.put(np.ones(1 << 18, np.float32), program.placement)
        client.wait(executable.execute([argument]))
        before = client.memory_info(0).bytes_used
        for _ in range(10):
            client.wait(executable.execute([argument]))
        # one pair of results may still be on its way out
        assert client.memory_info(0).bytes_used <= before + (1 << 21)

    # --- the end ---

    def test_shutdown_leaves_other_clients_alone(self, client: DeviceClient) -> None:
        """Shutting one client down does not disturb another."""
        self.need(several_clients=self.several_clients)
        other = type(self).make_client()
        x = sample((3,), "float32")
        run(other, lambda a: a + 1, x)
        other.shutdown()
        result = run(client, lambda a: a + 1, x)[0]
        np.testing.assert_array_equal(result, x + 1 if self.computes else x * 0)


class TopologyConformance(DeviceConformance):
    """What a plugin must do that compiles for ``topology`` without a device of it. Override what has no value."""

    computes = False
    holds_values = False
    topology: str
    memory_bytes: int
    """Of one device."""

    @classmethod
    def client_of(cls, topology: str, reads: str) -> DeviceClient:
        """The plugin's client for a topology; ``reads`` is ``XLA_AOT_READS``."""
        raise NotImplementedError(f"{cls.__name__} must define client_of()")

    @classmethod
    def make_client(cls) -> DeviceClient:
        return cls.client_of(cls.topology, "zeros")

    def test_memory_info_follows_live_buffers(self, client: DeviceClient) -> None:
        super().test_memory_info_follows_live_buffers(client)
        assert client.memory_info(0).bytes_limit == self.memory_bytes
