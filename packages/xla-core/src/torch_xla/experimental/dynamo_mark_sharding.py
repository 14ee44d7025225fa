"""torch_xla.experimental.dynamo_mark_sharding: ``torch.ops.xla.dynamo_mark_sharding`` needs no import."""

from __future__ import annotations

import warnings as _warnings

from torch_xla._packages import package_module as _package_module

_package_module("xla_spmd.lowering.dynamo", __name__)

_warnings.warn(
    "torch.ops.xla.dynamo_mark_sharding comes with the device; leave this import out",
    stacklevel=2,
)
