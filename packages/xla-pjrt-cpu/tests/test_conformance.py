"""The conformance suite on the CPU: one device, four devices, and the synchronous client."""

from __future__ import annotations

from xla_core.contract.device_protocol import Topology
from xla_core.testing.conformance import DeviceConformance
from xla_pjrt_cpu import create_client


class TestFourDevices(DeviceConformance):
    # the core passes the dtypes it compiled for; checking them again would cost time in each step
    checks_dtypes = False

    @classmethod
    def make_client(cls):
        return create_client(Topology(), {"CPU_NUM_DEVICES": "4"})


class TestSynchronous(DeviceConformance):
    # the core passes the dtypes it compiled for; checking them again would cost time in each step
    checks_dtypes = False

    @classmethod
    def make_client(cls):
        return create_client(Topology(), {"CPU_NUM_DEVICES": "2", "PJRT_CPU_ASYNC_CLIENT": "false"})
