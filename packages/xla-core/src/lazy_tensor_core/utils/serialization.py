"""lazy_tensor_core.utils.serialization (xser): saving and loading models one tensor at a time."""

from __future__ import annotations

from xla_core.api.xla_model import save_streaming as save
from xla_core.torch_features.saving import load as load
