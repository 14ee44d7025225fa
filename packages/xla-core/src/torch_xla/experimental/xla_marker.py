"""torch_xla.experimental.xla_marker: marks where composites begin and end."""

from __future__ import annotations

from xla_core.torch_features.composites import BoundaryMetadata as BoundaryMetadata
from xla_core.torch_features.composites import (
    BoundaryMetadataSerializer as BoundaryMetadataSerializer,
)
from xla_core.torch_features.composites import (
    deserialize_composite_attr as deserialize_composite_attr,
)
from xla_core.torch_features.composites import mark_tensor as mark_tensor
from xla_core.torch_features.composites import serialize_composite_attr as serialize_composite_attr

# one operator for every device
mark_tensor_meta = mark_tensor_xla = mark_tensor
