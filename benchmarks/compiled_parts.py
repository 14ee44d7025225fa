"""What one call of a model under ``torch.compile(backend="openxla")`` costs the host, by part.

``python benchmarks/compiled_parts.py`` calls compiled models without gradients, and gives microseconds of processor
time of the calling thread for one call, the least of several rounds:

- *guards*: Dynamo's guards and wrappers, with a backend that gives what it gave at first;
- *wrappers*: those of AOTAutograd around such a backend, which PyTorch's own ``openxla`` has as well;
- *ours*: what this project adds, with a stand-in for the executable that returns at once;
- *launch*: the runtime's launch of the program, which on the CPU contains the computation if it is small;
- *lazy*: the same model recorded, with its ``sync()``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import torch_xla
from capture import Instant, cpu_microseconds
from compiled import MODELS
from xla_core.extension_api.programs import all_programs

SETTLING: Final = 4
CALLS: Final = 100
"""In one round."""

Call = Callable[[], object]


class Kept:
    """A compiled graph that computes nothing: it gives what the graph gave at its first call."""

    def __init__(self, graph: Callable[..., Any]) -> None:
        self._graph = graph
        self._results: Any = None

    def __call__(self, *arguments: Any) -> Any:
        """The results of the first call."""
        if self._results is None:
            self._results = self._graph(*arguments)
        return self._results


BACKENDS: Final[dict[str, Any]] = {
    "guards": lambda graph, _: Kept(graph),
    "wrappers": aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(Kept(graph))),
    "openxla": "openxla",
}


def compiled(model_name: str, backend: Any) -> Call:
    """A call of the model, which has been compiled."""
    torch._dynamo.reset()
    plain, batches = MODELS[model_name]()
    model = torch.compile(plain.to("xla").eval(), backend=backend)
    inputs, _ = next(batches)

    def call() -> object:
        with torch.no_grad():
            return model(inputs)

    for _ in range(SETTLING):
        call()
        torch_xla.sync(wait=True)
    return call


def recorded(model_name: str) -> Call:
    """A call of the model as it is, and its end."""
    plain, batches = MODELS[model_name]()
    model = plain.to("xla").eval()
    inputs, _ = next(batches)

    def call() -> object:
        with torch.no_grad():
            result = model(inputs)
        torch_xla.sync()
        return result

    for _ in range(SETTLING):
        call()
        torch_xla.sync(wait=True)
    return call


def without_launch(call: Call, rounds: int) -> float:
    """The least time of a call whose program is launched by a stand-in."""
    program = all_programs()[-1]
    executable: Any = program.executable
    given: list[list[Any]] = []

    class Noting:
        """Notes the results of a real run."""

        def deferred(self, arguments: list[Any], results: list[Any], known: bool = False) -> Any:
            given.append(results)
            return executable.deferred(arguments, results, known)

        def __getattr__(self, name: str) -> Any:
            return getattr(executable, name)

    try:
        program.executable = Noting()
        call()
        torch_xla.sync(wait=True)
        program.executable = instant = Instant(executable, list(given[-1]), ())
        times = []
        for _ in range(rounds):
            instant.prepare(CALLS)
            times.append(cpu_microseconds(call, CALLS))
    finally:
        program.executable = executable
    return min(times)


def measure(model_name: str, rounds: int) -> dict[str, float]:
    """The parts of one call, and the sum."""
    least = {}
    for name, backend in BACKENDS.items():
        call = compiled(model_name, backend)
        least[name] = min(cpu_microseconds(call, CALLS) for _ in range(rounds))
        if name == "openxla":
            alone = without_launch(call, rounds)
    lazy = recorded(model_name)
    return {
        "guards": least["guards"],
        "wrappers": least["wrappers"] - least["guards"],
        "ours": alone - least["wrappers"],
        "launch": least["openxla"] - alone,
        "openxla": least["openxla"],
        "lazy": min(cpu_microseconds(lazy, CALLS) for _ in range(rounds)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(argv)
    found = {name: measure(name, options.rounds) for name in options.model or MODELS}
    for name, parts in found.items():
        print(f"{name:16}" + "".join(f"  {part} {us:.0f} us" for part, us in parts.items()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
