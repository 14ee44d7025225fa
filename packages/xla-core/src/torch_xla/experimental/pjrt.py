"""torch_xla.experimental.pjrt: the names that older scripts import from here; others are in torch_xla.runtime."""

from __future__ import annotations

from torch_xla.runtime import addressable_device_count as addressable_device_count
from torch_xla.runtime import device_type as device_type
from torch_xla.runtime import global_device_count as global_device_count
from torch_xla.runtime import global_ordinal as global_ordinal
from torch_xla.runtime import local_device_count as local_device_count
from torch_xla.runtime import local_ordinal as local_ordinal
from torch_xla.runtime import process_count as process_count
from torch_xla.runtime import process_index as process_index
from torch_xla.runtime import set_device_type as set_device_type
from torch_xla.runtime import using_pjrt as using_pjrt
from torch_xla.runtime import world_size as world_size
