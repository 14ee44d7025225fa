"""Small programs for tests of device plugins: a Python function becomes a ``Program``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from xla_core.contract.device_protocol import ArraySpec, DeviceClient, Placement, Program
from xla_core.extension_api import lowering


def spec(array: np.ndarray, sharding: str | None = None) -> ArraySpec:
    """The spec of a host array."""
    return ArraySpec(array.shape, array.dtype, sharding)


def make_program(
    client: DeviceClient,
    function: Callable[..., object],
    inputs: Sequence[ArraySpec],
    *,
    aliases: Sequence[tuple[int, int]] = (),
    placement: Placement | None = None,
    num_replicas: int = 1,
    num_partitions: int = 1,
    options: Mapping[str, str | int | float | bool] | None = None,
    name: str = "program",
) -> Program:
    """Lower a function of jax arrays for ``client``'s platform (default: on its first device)."""
    with jax.enable_x64(True):
        structs = [jax.ShapeDtypeStruct(i.shape, i.dtype) for i in inputs]
        results = jax.tree.leaves(jax.eval_shape(function, *structs))
    local = client.local_devices()
    stablehlo = lowering.lower_function(
        function,
        inputs,
        aliases,
        local[0].platform,
        name,
        num_replicas=num_replicas,
        num_partitions=num_partitions,
        input_shardings=[i.sharding for i in inputs],
    )
    return Program(
        name=name,
        stablehlo=stablehlo,
        inputs=tuple(inputs),
        outputs=tuple(ArraySpec(r.shape, np.dtype(r.dtype)) for r in results),
        aliases=tuple(aliases),
        placement=placement or Placement((local[0].id,)),
        num_replicas=num_replicas,
        num_partitions=num_partitions,
        options=options or {},
    )


def run(
    client: DeviceClient, function: Callable[..., object], *arrays: np.ndarray
) -> list[np.ndarray]:
    """Compile and run a function on the first device and read its results."""
    program = make_program(client, function, [spec(a) for a in arrays])
    executable = client.compile(program)
    results = executable.execute([client.put(a, program.placement) for a in arrays])
    return [client.get(r) for r in results]
