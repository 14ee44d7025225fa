"""``torch_xla.backends``: the precision of matrix products."""

from __future__ import annotations

import logging
from typing import Final

from xla_core.lowering import compile_settings
from xla_core.lowering.compile_settings import get_mat_mul_precision as get_mat_mul_precision

MSG_SET: Final = (
    "Setting mat mul precision multiple times is not recommended. Existing programs keep their precision: "
    "check that results are as exact as you need."
)
_LOG: Final = logging.getLogger("torch_xla.backends")


def set_mat_mul_precision(precision: str) -> None:
    """Set the precision of matrix products, and log a warning on the logger ``torch_xla.backends``.

    ``precision`` is ``'default'``, ``'high'`` or ``'highest'``. Raises ValueError for anything else.
    """
    _LOG.warning(MSG_SET)
    compile_settings.set_mat_mul_precision(precision)
