"""torch_xla.experimental.xla_dynamic_reshape_ops: ``expand`` and ``view`` with a size taken from another tensor."""

from __future__ import annotations

from xla_core.export.dynamic_sizes import dynamic_expand as dynamic_expand
from xla_core.export.dynamic_sizes import dynamic_view as dynamic_view

# one function for all devices, since shapes are known when it is called
dynamic_expand_meta = dynamic_expand_xla = dynamic_expand
dynamic_view_meta = dynamic_view_xla = dynamic_view
