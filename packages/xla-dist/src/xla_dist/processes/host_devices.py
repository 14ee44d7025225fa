"""The devices of this host that a launcher hands out, as the device plugin's factory has them."""

from __future__ import annotations

from collections.abc import Mapping

from xla_core.extension_api import plugins, runtime


def environments(options: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment variables that each process of this host needs in addition, one mapping per process.

    ``launch_environments`` of the device plugin's factory computes them from ``options``, the environment. A
    factory without that function gets one process.
    """
    factory = plugins.load_factory(runtime.device_type())
    ask = getattr(factory, "launch_environments", None)
    if ask is None:
        return [{}]
    return [dict(variables) for variables in ask(options)]


def use_one() -> None:
    """Let this process use one device, for one process in place of one for each device.

    torch_xla gives it the host's first TPU chip; other devices stay as the environment has them. Does nothing
    if the process uses its devices already.
    """
    use = getattr(plugins.load_factory(runtime.device_type()), "use_one_device", None)
    if use is not None and not runtime.started():
        use()
