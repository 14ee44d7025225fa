"""What the client of GPUs is created with, and which topologies there are."""

from __future__ import annotations

import os

import pytest
from jaxlib import xla_client

from xla_pjrt_cuda.client import create_options
from xla_pjrt_cuda.topology import KINDS, parse_topology


def test_settings_of_the_allocator_are_those_of_jax(monkeypatch):
    """The same variables give the same options as jax makes of them."""
    chosen = {
        "XLA_PYTHON_CLIENT_ALLOCATOR": "BFC",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4",
        "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB": "64",
    }
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    ours = create_options(os.environ)
    theirs = xla_client.generate_pjrt_gpu_plugin_options()
    assert ours == {name: theirs[name] for name in ours}
    assert ours["memory_fraction"] == 0.4 and ours["preallocate"] is False


def test_default_options_take_what_the_runtime_takes():
    found = create_options({})
    assert found == {"platform_name": "cuda", "allocator": "default", "preallocate": True}


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "pool"}, "'pool'; set it to one of default, bfc"),
        ({"XLA_CLIENT_MEM_FRACTION": "40"}, "MEM_FRACTION is '40'; set it to a part"),
        ({"XLA_CLIENT_MEM_FRACTION": "half"}, "MEM_FRACTION is 'half'"),
        ({"XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB": "1G"}, "'1G'; set it to a whole number"),
        (
            {"XLA_CLIENT_MEM_FRACTION": "0.4", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"},
            "are both set; unset XLA_PYTHON_CLIENT_MEM_FRACTION",
        ),
    ],
)
def test_a_setting_that_is_none_is_named(chosen, said):
    with pytest.raises(ValueError, match=said):
        create_options(chosen)


def test_names_of_topologies():
    one, host, hosts = map(parse_topology, ("H200", "h100:8", "a100:2x8"))
    assert (one.name, one.library_options()["topology"]) == ("h200:1", "1x1x1")
    assert (host.name, host.library_options()["topology"]) == ("h100:8", "1x1x8")
    assert (hosts.name, hosts.library_options()["topology"]) == ("a100:2x8", "1x2x8")
    assert "major: 8 minor: 0" in hosts.library_options()["target_config"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("h300:1", "'h300' is not among"), ("h100:0", "a number is 0"), ("h100:2x2x2", "no kind and")],
)
def test_a_topology_that_is_none(text, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        parse_topology(text)
    assert all(kind in str(caught.value) for kind in KINDS)
