"""Compiled CPU programs: running them, what the compiler says of them, and their stored form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from xla_core import _jax_compat as compat
from xla_core import stored
from xla_core.protocol import Program

PLUGIN: Final = "xla-pjrt-cpu"
"""The name that stored executables carry."""


class CpuExecutable:
    """A compiled program on the device of its placement."""

    __slots__ = ("_client", "_handlers", "_loaded", "_program", "_run", "program_name")

    def __init__(
        self,
        client: compat.Client,
        loaded: compat.LoadedExecutable,
        program: Program,
        devices: Sequence[compat.Device],
    ) -> None:
        self.program_name = program.name
        self._client = client
        self._loaded = loaded
        self._program = program
        # bound once: execute() runs for every training step
        self._run = loaded.execute_sharded
        shardings = _result_shardings(loaded, program, devices)
        self._handlers = [
            compat.result_handler(compat.shaped_array(spec.shape, spec.dtype), sharding)
            for spec, sharding in zip(program.outputs, shardings, strict=True)
        ]

    def execute(self, arguments: Sequence[Any]) -> list[Any]:
        """Enqueue one run and return its results; inputs named in the program's aliases are gone.

        Raises RuntimeError for an argument that was donated before or has another shape; what
        fails later is raised by ``get`` or ``wait`` of a result.
        """
        return self._run(arguments).consume_with_handlers(self._handlers)

    def serialize(self) -> bytes:
        """Program description and machine code, for ``deserialize`` on an equal processor."""
        return stored.pack(PLUGIN, self._program, self._client.serialize_executable(self._loaded))

    def memory_analysis(self) -> Mapping[str, int]:
        """Bytes by use: ``arguments, outputs, temporaries, aliased, code``."""
        stats = self._loaded.get_compiled_memory_stats()
        return {
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "aliased": stats.alias_size_in_bytes,
            "code": stats.generated_code_size_in_bytes,
        }

    def cost_analysis(self) -> Mapping[str, float]:
        """XLA's estimates for one run (``flops``, ``bytes accessed``, ``transcendentals``, ...)."""
        analysis = self._loaded.cost_analysis()
        return {name: float(value) for name, value in dict(analysis).items()}

    def optimized_hlo(self) -> str:
        """The module that XLA compiled, after its passes, as HLO text."""
        return "\n\n".join(module.to_string() for module in self._loaded.hlo_modules())

    def input_shardings(self) -> tuple[str | None, ...]:
        """HLO sharding of each input as compiled; None where the whole value is on each device."""
        found = self._loaded.get_parameter_shardings()
        return _sharding_texts(found, len(self._program.inputs))

    def output_shardings(self) -> tuple[str | None, ...]:
        """HLO sharding of each output as compiled; None where the whole value is on each device."""
        found = self._loaded.get_output_shardings()
        return _sharding_texts(found, len(self._program.outputs))


class ShardedCpuExecutable(CpuExecutable):
    """A compiled program over several devices; refuses arguments that are laid out otherwise."""

    __slots__ = ("_expected", "_known")

    def __init__(
        self,
        client: compat.Client,
        loaded: compat.LoadedExecutable,
        program: Program,
        devices: Sequence[compat.Device],
    ) -> None:
        super().__init__(client, loaded, program, devices)
        texts = self.input_shardings()
        self._expected = [compat.sharding_over(devices, compat.hlo_sharding(t)) for t in texts]
        # the sharding object last seen per argument: an identity test replaces the comparison
        self._known: list[Any] = list(self._expected)

    def execute(self, arguments: Sequence[Any]) -> list[Any]:
        """Enqueue one run on every addressable device; see ``CpuExecutable.execute``.

        Raises RuntimeError for an argument whose layout is not ``input_shardings``: the runtime
        itself would read past the end of a smaller shard.
        """
        known = self._known
        for index, argument in enumerate(arguments):
            if argument.sharding is not known[index]:
                self._check(index, argument)
        return super().execute(arguments)

    def _check(self, index: int, argument: Any) -> None:
        expected = self._expected[index]
        found = argument.sharding
        if not expected.is_equivalent_to(found, len(argument.shape)):
            raise RuntimeError(
                f"{self.program_name}: argument {index} of shape {argument.shape} lies as {found}, "
                f"the program expects {expected}; copy() it to that placement"
            )
        self._known[index] = found


def make_executable(
    client: compat.Client,
    loaded: compat.LoadedExecutable,
    program: Program,
    devices: Sequence[compat.Device],
) -> CpuExecutable:
    """The executable class that fits the number of devices."""
    kind = CpuExecutable if len(devices) == 1 else ShardedCpuExecutable
    return kind(client, loaded, program, devices)


def _result_shardings(
    loaded: compat.LoadedExecutable, program: Program, devices: Sequence[compat.Device]
) -> list[Any]:
    if len(devices) == 1:
        return [compat.single_device_sharding(devices[0])] * len(program.outputs)
    replicated = compat.sharding_over(devices, compat.hlo_sharding(None))
    found = loaded.get_output_shardings() if program.num_partitions > 1 else None
    if found is None or program.num_replicas > 1:
        # each replica holds a value of its own: one shard per device, none of them tiled
        return [replicated] * len(program.outputs)
    return [compat.sharding_over(devices, compat.hlo_sharding_of(s)) for s in found]


def _sharding_texts(found: Sequence[Any] | None, count: int) -> tuple[str | None, ...]:
    if found is None:
        return (None,) * count
    shardings = map(compat.hlo_sharding_of, found)
    return tuple(None if s.is_replicated() else repr(s) for s in shardings)
