"""Lazy Tensor Core's names on top of xla_core. Importing it attaches the lazy device to PyTorch.

The device is ``xla``, and prints as ``xla:0``. PyTorch's list of device types is fixed when PyTorch is built and
has no ``ltc``. That name would need PyTorch's one spare backend to be renamed for the whole process
(``torch.utils.rename_privateuse1_backend``), which a library must not do on its own. ``lazy``, which is in the
list, belongs to PyTorch's TorchScript backend.
"""

from __future__ import annotations

# torch comes first: it loads xla_core.attach.autoload by entry point, which must not be half imported at that time.
import torch

from xla_core.attach import autoload

autoload.ensure()

from lazy_tensor_core import core as core  # noqa: E402 - the device must be attached before
from lazy_tensor_core import debug as debug  # noqa: E402
from lazy_tensor_core import utils as utils  # noqa: E402
from torch_xla._packages import lazy_names  # noqa: E402

__getattr__, __dir__ = lazy_names(__name__)
