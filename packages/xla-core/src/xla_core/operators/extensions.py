"""The installed extensions: packages that take part in cold decisions through the hooks."""

from __future__ import annotations

import threading

import pluggy

from xla_core.contract import events
from xla_core.operators import lowering_registry
from xla_core.plugins import discovery


class _Loaded:
    manager: pluggy.PluginManager | None = None


_lock = threading.RLock()


def extensions() -> pluggy.PluginManager:
    """The plugin manager with the installed extensions, whose operators are registered by then."""
    with _lock:
        if _Loaded.manager is None:
            manager = discovery.load_extensions()
            manager.hook.xla_core_register_operators(registry=lowering_registry)
            manager.hook.xla_core_subscribe(events=events)
            _Loaded.manager = manager
        return _Loaded.manager
