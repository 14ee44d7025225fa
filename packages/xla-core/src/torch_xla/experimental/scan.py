"""torch_xla.experimental.scan: applies a function along the leading dimension of tensors, as one loop."""

from __future__ import annotations

from torch_xla._packages import lazy_names
from xla_core.builder.items import dynamic_slice as dynamic_slice
from xla_core.builder.items import dynamic_update_slice as dynamic_update_slice
from xla_core.computations.partitioned import pytreeify as pytreeify
from xla_core.computations.partitioned import split as split
from xla_core.computations.partitioned import tree_flatten_none as tree_flatten_none
from xla_core.computations.partitioned import (
    value_and_grad_partitioned as value_and_grad_partitioned,
)
from xla_core.computations.scan import scan as scan

__getattr__, __dir__ = lazy_names(__name__, {"shard_as": "xla_spmd.tensors.shard_as"})
