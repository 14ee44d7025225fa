"""torch_xla's names on top of xla_core. Importing it attaches the ``xla`` device to PyTorch.

Differences from torch_xla 2.9: the import changes no environment variable and no configuration of logging, torch or
jax, and the device client starts when a device is first used.
"""

from __future__ import annotations

# torch comes first: it loads xla_core.attach.autoload by entry point, which must not be half imported at that time.
import torch

from xla_core.attach import autoload

autoload.ensure()

from torch_xla import _XLAC as _XLAC  # noqa: E402 - the device must be attached before
from torch_xla import backends as backends  # noqa: E402
from torch_xla import core as core  # noqa: E402
from torch_xla import debug as debug  # noqa: E402
from torch_xla import distributed as distributed  # noqa: E402
from torch_xla import experimental as experimental  # noqa: E402
from torch_xla import runtime as runtime  # noqa: E402
from torch_xla import utils as utils  # noqa: E402
from torch_xla._packages import lazy_names  # noqa: E402
from torch_xla.torch_xla import compile as compile  # noqa: E402
from torch_xla.torch_xla import device as device  # noqa: E402
from torch_xla.torch_xla import device_count as device_count  # noqa: E402
from torch_xla.torch_xla import devices as devices  # noqa: E402
from torch_xla.torch_xla import manual_seed as manual_seed  # noqa: E402
from torch_xla.torch_xla import real_devices as real_devices  # noqa: E402
from torch_xla.torch_xla import set_custom_compile_options as set_custom_compile_options  # noqa: E402
from torch_xla.torch_xla import step as step  # noqa: E402
from torch_xla.torch_xla import sync as sync  # noqa: E402
from torch_xla.version import __version__ as __version__  # noqa: E402

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "launch": "xla_dist.processes.launching",
        "save_as_stablehlo": "xla_core.export.module",
        "save_torch_model_as_stablehlo": "xla_core.export.module",
    },
    aliases={
        "xenv": "torch_xla.core.xla_env_vars",
        "xm": "torch_xla.core.xla_model",
        "xmp": "torch_xla.distributed.xla_multiprocessing",
        "xr": "torch_xla.runtime",
        "xu": "torch_xla.utils.utils",
    },
)
