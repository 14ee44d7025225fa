"""The lowering rules of every operator family; importing this package registers them all."""

from __future__ import annotations

from xla_core.lowering.rules import activations as activations
from xla_core.lowering.rules import arithmetic as arithmetic
from xla_core.lowering.rules import comparison as comparison
from xla_core.lowering.rules import conv as conv
from xla_core.lowering.rules import elementwise as elementwise
from xla_core.lowering.rules import embedding as embedding
from xla_core.lowering.rules import factories as factories
from xla_core.lowering.rules import foreach as foreach
from xla_core.lowering.rules import indexing as indexing
from xla_core.lowering.rules import losses as losses
from xla_core.lowering.rules import matmul as matmul
from xla_core.lowering.rules import norms as norms
from xla_core.lowering.rules import optimizers as optimizers
from xla_core.lowering.rules import reductions as reductions
from xla_core.lowering.rules import sampling as sampling
from xla_core.lowering.rules import scans as scans
from xla_core.lowering.rules import scatter as scatter
from xla_core.lowering.rules import shaping as shaping
from xla_core.lowering.rules import ternary as ternary
from xla_core.lowering.rules import views as views
