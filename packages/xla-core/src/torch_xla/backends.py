"""torch_xla.backends: the precision of matrix products."""

from __future__ import annotations

from xla_core.api.matmul_precision import get_mat_mul_precision as get_mat_mul_precision
from xla_core.api.matmul_precision import set_mat_mul_precision as set_mat_mul_precision
