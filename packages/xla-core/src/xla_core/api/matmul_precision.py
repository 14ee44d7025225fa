"""``torch_xla.backends``: how exactly matrix products are computed."""

from __future__ import annotations

import logging
from typing import Final

from xla_core.lowering import compile_settings
from xla_core.lowering.compile_settings import get_mat_mul_precision as get_mat_mul_precision

MSG_SET: Final = (
    "Setting mat mul precision multiple times is not recommended. Programs made before keep the precision that "
    "they were made with: check that results are as exact as you need."
)
_LOG: Final = logging.getLogger("torch_xla.backends")


def set_mat_mul_precision(precision: str) -> None:
    """``compile_settings.set_mat_mul_precision``, and a warning on the logger ``torch_xla.backends``.

    ``'default'``, ``'high'`` or ``'highest'``. Raises ValueError for anything else.
    """
    _LOG.warning(MSG_SET)
    compile_settings.set_mat_mul_precision(precision)
