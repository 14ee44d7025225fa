"""torch_xla.experimental.pytreeify: autograd functions of trees of tensors."""

from __future__ import annotations

from xla_core.computations.partitioned import pytreeify as pytreeify
