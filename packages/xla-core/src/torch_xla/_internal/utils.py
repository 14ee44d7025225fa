"""torch_xla._internal.utils: names of devices, read."""

from __future__ import annotations

from xla_core.api.device_info import parse_device_name as parse_xla_device
