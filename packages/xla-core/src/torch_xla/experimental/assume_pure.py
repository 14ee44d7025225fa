"""torch_xla.experimental.assume_pure: functions recorded once, and gradients of functions of jax."""

from __future__ import annotations

from xla_core.computations.assume_pure import PureModule as PureModule
from xla_core.computations.assume_pure import assume_pure as assume_pure
from xla_core.computations.assume_pure import assume_pure_torch as assume_pure_torch
from xla_core.computations.jax_autograd import j2t_autograd as j2t_autograd
