"""torch_xla._internal.utils: parses names of devices."""

from __future__ import annotations

from xla_core.api.device_info import parse_device_name as parse_xla_device
