"""The conformance suite on GPUs to compile for: compilation is real, values are not; no GPU is needed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from xla_core.contract.device_protocol import ArraySpec, Topology
from xla_core.testing.conformance import TopologyConformance
from xla_core.testing.programs import make_program
from xla_pjrt_cuda import create_client, installation
from xla_pjrt_cuda.topology import KINDS

pytestmark = pytest.mark.skipif(
    installation.find_plugin() is None,
    reason="jax's CUDA plugin is not installed: pip install jax-cuda13-plugin (needs no GPU)",
)
FLOAT = np.dtype(np.float32)


def client_of(topology: str, reads: str = "error"):
    return create_client(Topology(), {"XLA_AOT_TOPOLOGY": topology, "XLA_AOT_READS": reads})


class TestTopology(TopologyConformance):
    topology = "h200:4"
    memory_bytes = KINDS["h200"].memory_bytes
    client_of = staticmethod(client_of)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_compiles(name):
    client = client_of(f"{name}:2")
    (device, _) = client.devices()
    capability = ".".join(map(str, KINDS[name].capability))
    assert (device.kind, device.platform) == (KINDS[name].name, "cuda")
    assert device.attributes["compute_capability"] == capability
    program = make_program(client, lambda a: a @ a, [ArraySpec((64, 64), FLOAT)])
    assert "dot" in client.compile(program).optimized_hlo()


def test_kernels_that_jax_brings_are_there():
    """Linear algebra calls kernels by name, which a compiler without a GPU must know, too."""
    import jax.numpy as jnp

    client = client_of("h100:1")
    program = make_program(client, jnp.linalg.cholesky, [ArraySpec((8, 8), FLOAT)])
    assert "cusolver_potrf" in client.compile(program).optimized_hlo()


def test_an_option_that_the_compiler_does_not_know():
    client = client_of("h100:1")
    program = make_program(client, lambda a: a + 1, [ArraySpec((8,), FLOAT)])
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_gpu_nonsense'"):
        client.compile(dataclasses.replace(program, options={"xla_gpu_nonsense": 1}))


def test_fingerprint_tells_topologies_apart():
    prints = [dict(client_of(t).fingerprint()) for t in ("h100:1", "h100:2", "h200:1", "h100")]
    assert prints[0] == prints[3]
    assert len({str(p) for p in prints}) == 3
