"""Compiled programs on a PJRT runtime: running them, what the compiler says of them, their stored form."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from xla_core.contract import serialized_executable
from xla_core.contract.device_protocol import Buffer, Program
from xla_core.contract.foreign_values import JsonValue
from xla_core.jax_bridge import jaxlib_runtime, pjrt_c_api
from xla_core.jax_bridge.traced_values import JaxObject
from xla_core.pjrt import tpu_memory

__all__ = [
    "CheckedExecutable",
    "PjrtExecutable",
    "ShardedPjrtExecutable",
    "cost_figures",
    "hlo_text",
    "memory_figures",
    "sharding_texts",
    "with_cycles",
]

_DISASSEMBLE: Final = operator.methodcaller("disassemble_into_single_device_arrays")
_FIRST: Final = operator.itemgetter(0)
_CYCLES: Final = re.compile(r'"estimated_cycles":"(\d+)"')


class PjrtExecutable:
    """A compiled program on the device of its placement; ``plugin`` marks its stored form.

    ``program`` is what was compiled.
    """

    __slots__ = (
        "_client", "_consume", "_handlers", "_loaded", "_memory", "_plugin", "_run", "program",
        "program_name",
    )  # fmt: skip

    def __init__(
        self,
        client: jaxlib_runtime.Client,
        loaded: jaxlib_runtime.LoadedExecutable,
        program: Program,
        devices: Sequence[jaxlib_runtime.Device],
        plugin: str,
    ) -> None:
        self.program_name = program.name
        self._client = client
        self._loaded = loaded
        self._plugin = plugin
        self._memory: dict[str, int] | None = None
        self.program = program
        # bound once: execute() runs for every training step
        self._run = loaded.execute_sharded
        shardings = _result_shardings(loaded, program, devices)
        self._handlers = [
            jaxlib_runtime.result_handler(
                jaxlib_runtime.shaped_array(spec.shape, spec.dtype), sharding
            )
            for spec, sharding in zip(program.outputs, shardings, strict=True)
        ]
        self._consume = operator.methodcaller("consume_with_handlers", self._handlers)

    def execute(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Enqueue one run and return its results; inputs in the program's aliases cannot be used afterwards.

        Raises RuntimeError for an argument that was donated before or has another shape; what
        fails later is raised by ``get`` or ``wait`` of a result.
        """
        return self._run(arguments).consume_with_handlers(self._handlers)

    def deferred(
        self, arguments: Sequence[Buffer], results: list[Buffer], checked: bool = False
    ) -> Iterator[None]:
        """What ``execute`` does, done when the iterator is exhausted, without a function of Python's."""
        return map(results.extend, map(self._consume, map(self._run, (arguments,))))

    def serialize(self) -> bytes:
        """Program description and machine code, for ``deserialize`` of an equal client.

        Raises NotImplementedError where the runtime cannot write its code down.
        """
        code = self._stored_code()
        return serialized_executable.pack(self._plugin, self.program, code, self.stored_report())

    def _stored_code(self) -> bytes:
        try:
            return self._client.serialize_executable(self._loaded)
        except RuntimeError as error:
            if pjrt_c_api.is_unimplemented(error):
                raise NotImplementedError(f"{self._plugin}: {error}") from error
            raise

    def stored_report(self) -> Mapping[str, JsonValue] | None:
        """What is stored beside the program; a plugin's own."""
        return None

    def memory_analysis(self) -> Mapping[str, int]:
        """Bytes by use: ``arguments, outputs, temporaries, aliased, code``."""
        if self._client.platform != "tpu":
            return memory_figures(self._loaded)
        if self._memory is None:
            self._memory = memory_figures(self._loaded, self._stored_code)
        return dict(self._memory)

    def cost_analysis(self) -> Mapping[str, float]:
        """XLA's estimates for one run (``flops``, ``bytes accessed``, ``transcendentals``, ...)."""
        cost = cost_figures(self._loaded)
        return with_cycles(cost, self.optimized_hlo()) if self._client.platform == "tpu" else cost

    def optimized_hlo(self) -> str:
        """The module that XLA compiled, after its passes, as HLO text."""
        return hlo_text(self._loaded)

    def input_shardings(self) -> tuple[str | None, ...]:
        """HLO sharding of each input as compiled; None where the whole value is on each device."""
        shardings = self._loaded.get_parameter_shardings()
        return sharding_texts(shardings, len(self.program.inputs))

    def output_shardings(self) -> tuple[str | None, ...]:
        """HLO sharding of each output as compiled; None where the whole value is on each device."""
        shardings = self._loaded.get_output_shardings()
        return sharding_texts(shardings, len(self.program.outputs))


class _CheckingExecutable(PjrtExecutable):
    """Looks at the arguments of each run: ``_check`` raises RuntimeError for what the program does not take."""

    __slots__ = ()

    def execute(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Enqueue one run; see ``PjrtExecutable.execute``."""
        self._check(arguments)
        return super().execute(arguments)

    def deferred(
        self, arguments: Sequence[Buffer], results: list[Buffer], checked: bool = False
    ) -> Iterator[None]:
        """``execute`` as an iterator; raises what it raises for the arguments at once."""
        if not checked:
            self._check(arguments)
        return super().deferred(arguments, results)

    def _check(self, arguments: Sequence[Buffer]) -> None:
        raise NotImplementedError


class CheckedExecutable(_CheckingExecutable):
    """Refuses arguments of another shape, dtype or device itself, for runtimes that do not.

    A PJRT C API library is handed the buffers as they are.
    """

    __slots__ = ("_inputs",)

    def __init__(
        self,
        client: jaxlib_runtime.Client,
        loaded: jaxlib_runtime.LoadedExecutable,
        program: Program,
        devices: Sequence[jaxlib_runtime.Device],
        plugin: str,
    ) -> None:
        super().__init__(client, loaded, program, devices, plugin)
        self._inputs = [(tuple(s.shape), np.dtype(s.dtype)) for s in program.inputs]

    def _check(self, arguments: Sequence[jaxlib_runtime.Array]) -> None:
        if len(arguments) != len(self._inputs):
            raise RuntimeError(
                f"{self.program_name} takes {len(self._inputs)} arguments, got {len(arguments)}"
            )
        for index, (argument, wanted) in enumerate(zip(arguments, self._inputs, strict=True)):
            if (argument.shape, argument.dtype) != wanted:
                raise RuntimeError(
                    f"{self.program_name}: argument {index} is {argument.dtype}{argument.shape}, "
                    f"the program takes {wanted[1]}{wanted[0]}"
                )


class ShardedPjrtExecutable(_CheckingExecutable):
    """A compiled program over several devices, which runs on all of them that are addressable.

    It refuses an argument whose layout is not that of ``input_shardings``: the runtime itself would read past
    the end of a smaller shard.
    """

    __slots__ = ("_expected", "_known")

    def __init__(
        self,
        client: jaxlib_runtime.Client,
        loaded: jaxlib_runtime.LoadedExecutable,
        program: Program,
        devices: Sequence[jaxlib_runtime.Device],
        plugin: str,
    ) -> None:
        super().__init__(client, loaded, program, devices, plugin)
        texts = self.input_shardings()
        self._expected = [
            jaxlib_runtime.sharding_over(devices, jaxlib_runtime.hlo_sharding(t)) for t in texts
        ]
        # the sharding object last seen per argument: an identity test replaces the comparison
        self._known: list[object] = list(self._expected)

    def execute_own(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """``execute`` for a process that runs one replica: one-device buffers in and out.

        No logical buffer is made of each, which costs about 5 microseconds per argument and result.
        """
        results = self._run(arguments).disassemble_into_single_device_arrays()
        return [shards[0] for shards in results]

    def deferred_own(self, arguments: Sequence[Buffer], results: list[Buffer]) -> Iterator[None]:
        """``execute_own`` as an iterator, as ``deferred`` is that of ``execute``."""
        parts = map(_DISASSEMBLE, map(self._run, (arguments,)))
        return map(results.extend, map(map, (_FIRST,), parts))

    def _check(self, arguments: Sequence[jaxlib_runtime.Array]) -> None:
        known = self._known
        for index, argument in enumerate(arguments):
            if argument.sharding is not known[index]:
                self._check_layout(index, argument)

    def _check_layout(self, index: int, argument: jaxlib_runtime.Array) -> None:
        expected = self._expected[index]
        sharding = argument.sharding
        if not expected.is_equivalent_to(sharding, len(argument.shape)):
            raise RuntimeError(
                f"{self.program_name}: argument {index} of shape {argument.shape} lies as {sharding}, "
                f"the program expects {expected}; copy() it to that placement"
            )
        self._known[index] = sharding


# --- what a compiler says of a program, loaded on devices or not -----------------------------------


def memory_figures(
    compiled: jaxlib_runtime.LoadedExecutable | pjrt_c_api.CompiledProgram,
    stored: Callable[[], bytes] | None = None,
) -> dict[str, int]:
    """Bytes by use: ``arguments, outputs, temporaries, aliased, code``, of one device's program.

    ``stored`` gives the compiled program in its stored form, for TPUs: see ``tpu_memory``.
    """
    stats = compiled.get_compiled_memory_stats()
    temporaries = stats.temp_size_in_bytes
    if stored is not None:
        with contextlib.suppress(NotImplementedError):
            temporaries = tpu_memory.without_gaps(temporaries, stored())
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": temporaries,
        "aliased": stats.alias_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }


def cost_figures(
    compiled: jaxlib_runtime.LoadedExecutable | pjrt_c_api.CompiledProgram,
) -> dict[str, float]:
    """The compiler's estimates for one run; empty where it offers none."""
    try:
        analysis = compiled.cost_analysis()
    except RuntimeError as error:
        if pjrt_c_api.is_unimplemented(error):
            return {}
        raise
    return {name: float(value) for name, value in dict(analysis).items()}


def with_cycles(cost: Mapping[str, float], hlo: str) -> dict[str, float]:
    """``cost`` with the ``estimated cycles`` that TPUs' compiler notes at each operation, added up.

    The body of a loop counts once, and what runs beside something else as if it did not.
    """
    cycles = [int(count) for count in _CYCLES.findall(hlo)]
    return {**cost, "estimated cycles": float(sum(cycles))} if cycles else dict(cost)


def hlo_text(compiled: jaxlib_runtime.LoadedExecutable | pjrt_c_api.CompiledProgram) -> str:
    """The compiled module as HLO text."""
    return "\n\n".join(module.to_string() for module in compiled.hlo_modules())


def sharding_texts(shardings: Sequence[object] | None, count: int) -> tuple[str | None, ...]:
    """HLO's texts of ``shardings``, one for each of ``count`` values; None for a value that is not split."""
    if shardings is None:
        return (None,) * count
    as_hlo = map(jaxlib_runtime.hlo_sharding_of, shardings)
    return tuple(None if s.is_replicated() else repr(s) for s in as_hlo)


def _result_shardings(
    loaded: jaxlib_runtime.LoadedExecutable,
    program: Program,
    devices: Sequence[jaxlib_runtime.Device],
) -> list[JaxObject]:
    if len(devices) == 1:
        return [jaxlib_runtime.single_device_sharding(devices[0])] * len(program.outputs)
    replicated = jaxlib_runtime.sharding_over(devices, jaxlib_runtime.hlo_sharding(None))
    shardings = loaded.get_output_shardings() if program.num_partitions > 1 else None
    if shardings is None or program.num_replicas > 1:
        # each replica holds a value of its own: one shard per device, none of them tiled
        return [replicated] * len(program.outputs)
    return [
        jaxlib_runtime.sharding_over(devices, jaxlib_runtime.hlo_sharding_of(s)) for s in shardings
    ]
