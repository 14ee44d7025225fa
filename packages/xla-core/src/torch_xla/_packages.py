"""The façade's names whose code lives in packages beside xla-core, imported when first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

MSG_NOT_INSTALLED: Final = (
    "{user} needs the package {distribution}, which is not installed; pip install {distribution}"
)
MSG_NO_ATTRIBUTE: Final = "module {module!r} has no attribute {name!r}"


def package_module(module: str, user: str) -> ModuleType:
    """Import ``module`` (``xla_dist.collectives``) for the name ``user`` that needs it.

    Raises ImportError naming the distribution to install, if its top-level package is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        text = MSG_NOT_INSTALLED.format(user=user, distribution=package.replace("_", "-"))
        raise ImportError(text, name=package) from None


def lazy_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module ``__getattr__`` (PEP 562) for ``module``; ``homes`` maps names to module paths.

    ``{"all_reduce": "xla_dist.collectives"}`` gives ``module.all_reduce`` from there.
    """

    def getter(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(MSG_NO_ATTRIBUTE.format(module=module, name=name))
        return getattr(package_module(home, f"{module}.{name}"), name)

    return getter
