"""The lowering rules, one file per operator family; importing this package registers them all.

A new family is a new file here: nothing else lists them.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
