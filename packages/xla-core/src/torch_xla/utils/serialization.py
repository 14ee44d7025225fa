"""torch_xla.utils.serialization (xser): saving and loading models one tensor at a time."""

from __future__ import annotations

from xla_core.api.xla_model import save_streaming as save
from xla_core.torch_features.saving import TensorReference as TensorReference
from xla_core.torch_features.saving import load as load
from xla_core.torch_features.saving import rewrite_data as _rewrite_data
from xla_core.torch_features.saving import tensor_file as _get_tensor_file
from xla_core.torch_features.saving import tensors_folder as _get_tensors_folder

__all__ = [
    "TensorReference",
    "_get_tensor_file",
    "_get_tensors_folder",
    "_rewrite_data",
    "load",
    "save",
]
