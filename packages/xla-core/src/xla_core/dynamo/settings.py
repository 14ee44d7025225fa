"""The settings that scripts assign to: this module is ``torch_xla._dynamo.config``."""

from __future__ import annotations

skip_input_data_check: bool = False
"""True: a compiled function refuses tensors that are still to be computed, instead of computing them first."""
