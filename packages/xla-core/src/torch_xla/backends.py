"""torch_xla.backends: how exactly matrix products are computed."""

from __future__ import annotations

from xla_core.api.matmul_precision import get_mat_mul_precision as get_mat_mul_precision
from xla_core.api.matmul_precision import set_mat_mul_precision as set_mat_mul_precision
