"""torch_xla.experimental.dynamo_set_buffer_donor: ``torch.ops.xla.dynamo_set_buffer_donor_`` needs no import."""

from __future__ import annotations

import warnings as _warnings

_warnings.warn(
    "torch.ops.xla.dynamo_set_buffer_donor_ comes with the device; leave this import out",
    stacklevel=2,
)
