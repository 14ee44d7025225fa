"""Eigenvalues of matrices without symmetry, where the platform has an algorithm for them: on CPUs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from xla_core.lowering.rules.common import where as select
from xla_core.lowering.rules.compaction import number
from xla_core.operators.lowering_registry import aten, inspected_rule


def _eig_meta(self: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if self.dtype.itemsize < 4 or not (self.is_floating_point() or self.is_complex()):
        raise NotImplementedError(f"eig of {self.dtype}")  # the CPU says it in its own words
    return (*torch.ops.aten.linalg_eig(self), number(self))


@inspected_rule(aten.linalg_eig.default, meta=_eig_meta, platforms=("cpu",))
def eig(self: Array) -> tuple[Array, Array, Array]:
    """Eigenvalues and eigenvectors; the number is -1 for a matrix that is not finite."""
    finite = select(jnp.all(jnp.isfinite(self)), jnp.zeros((), np.int64), -1)
    if not self.size:
        kind = jnp.result_type(self.dtype, np.complex64)
        return jnp.zeros(self.shape[:-1], kind), jnp.zeros(self.shape, kind), finite
    values, vectors = lax.linalg.eig(self, compute_left_eigenvectors=False)
    return values, vectors, finite
