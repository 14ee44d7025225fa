"""Lazy Tensor Core's names on top of xla_core. Importing it attaches the lazy device to PyTorch.

Its device is ``xla``, and prints as ``xla:0``. PyTorch's list of device types is fixed when it is built, and
has no ``ltc``: the name is available only after renaming PyTorch's one spare backend
(``torch.utils.rename_privateuse1_backend``) for the whole process, which a library must not do behind
its user's back. ``lazy``, which is in the list, belongs to PyTorch's own TorchScript backend.
"""

from __future__ import annotations

# First: torch loads xla_core.attach.autoload by entry point, which must not be half imported then.
import torch

from xla_core.attach import autoload

autoload.ensure()

from lazy_tensor_core import core as core  # noqa: E402 - the device must be attached before
from lazy_tensor_core import debug as debug  # noqa: E402
from lazy_tensor_core import utils as utils  # noqa: E402
from torch_xla._packages import lazy_names  # noqa: E402

__getattr__, __dir__ = lazy_names(__name__)
