"""What device plugins on a PJRT runtime share: clients, executables, topologies without chips.

A plugin subclasses ``PjrtClient`` (devices that run) or makes a ``TopologyClient`` (devices that are
only compiled for); ``library`` loads a vendor's PJRT C API library by path.
"""

from __future__ import annotations
