"""torch_xla.experimental.assume_pure: functions that are recorded once, and jax functions with gradients."""

from __future__ import annotations

from xla_core.computations.assume_pure import PureModule as PureModule
from xla_core.computations.assume_pure import assume_pure as assume_pure
from xla_core.computations.assume_pure import assume_pure_torch as assume_pure_torch
from xla_core.computations.jax_autograd import j2t_autograd as j2t_autograd
from xla_core.torch_features.jax_coexistence import maybe_get_jax as maybe_get_jax
from xla_core.torch_features.jax_coexistence import maybe_get_torchax as maybe_get_torchax
from xla_core.torch_features.jax_coexistence import requires_jax as requires_jax
