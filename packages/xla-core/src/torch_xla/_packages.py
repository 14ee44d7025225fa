"""Lazy imports of the façade: submodules, and names that other packages than xla-core define."""

from __future__ import annotations

import dis
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, ModuleType
from typing import Final

from xla_core.contract.foreign_values import Attribute

MSG_NOT_INSTALLED: Final = (
    "{user} needs the package {distribution}, which is not installed; pip install {distribution}"
)
MSG_NO_ATTRIBUTE: Final = "module {module!r} has no attribute {name!r}"

# The bytecode instructions of ``from module import name`` and of ``module.name``.
_LOOK_UPS: Final = {
    dis.opmap[name] for name in ("IMPORT_FROM", "LOAD_ATTR", "LOAD_METHOD") if name in dis.opmap
}

JAX_HELPERS: Final = dict.fromkeys(
    ("jax_env_context", "jax_import_guard", "maybe_get_jax", "maybe_get_torchax", "requires_jax"),
    "xla_core.torch_features.jax_coexistence",
)
"""Names that several of torch_xla's modules offer to code that uses jax itself, with their home."""


class MissingPackageError(ImportError):
    """A package is needed that is not installed; the message names it."""


def package_module(module: str, user: str) -> ModuleType:
    """Import ``module`` (``xla_dist.collectives.model_collectives``), which the name ``user`` needs.

    Raises MissingPackageError, an ImportError that names the distribution to install, if its top-level package is
    missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        text = MSG_NOT_INSTALLED.format(user=user, distribution=package.replace("_", "-"))
        raise MissingPackageError(text, name=package) from None


def lazy_names(
    module: str, homes: Mapping[str, str] | None = None, aliases: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Attribute], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` (PEP 562) for ``module``, which also import its submodules.

    ``homes`` maps names to the modules that define them: with ``{"sqrt": "math"}``, ``module.sqrt`` is
    ``math.sqrt``.
    ``aliases`` maps names to the modules that they stand for. If the package of a name is not installed, ``dir()``
    leaves the name out, and the expressions ``module.sqrt`` and ``from module import sqrt`` raise ImportError;
    ``getattr`` and ``hasattr`` meet an AttributeError with the same message, so that code which inspects modules
    goes on.
    """
    homes, aliases = homes or {}, aliases or {}

    def getter(name: str) -> object:
        try:
            if name in homes:
                return getattr(package_module(homes[name], f"{module}.{name}"), name)
            if name in aliases:
                return package_module(aliases[name], f"{module}.{name}")
            if _is_submodule(module, name):
                return importlib.import_module(f"{module}.{name}")
        except MissingPackageError as error:
            if _is_written_out(sys._getframe(1)):
                raise
            raise AttributeError(str(error)) from error
        raise AttributeError(MSG_NO_ATTRIBUTE.format(module=module, name=name))

    def names() -> list[str]:
        elsewhere = {**homes, **aliases}
        installed = {name for name, home in elsewhere.items() if _is_installed(home)}
        return sorted({*vars(sys.modules[module]), *installed, *_submodules(module)})

    return getter, names


def _is_written_out(frame: FrameType) -> bool:
    """Whether the frame's code looks the attribute up itself, rather than by ``getattr`` or ``hasattr``."""
    return frame.f_code.co_code[frame.f_lasti] in _LOOK_UPS


def _is_installed(home: str) -> bool:
    return importlib.util.find_spec(home.partition(".")[0]) is not None


def _is_submodule(module: str, name: str) -> bool:
    # look-ups of dunder names (__wrapped__, __path__) should not search the file system
    if name.startswith("__") or not hasattr(sys.modules.get(module), "__path__"):
        return False
    return importlib.util.find_spec(f"{module}.{name}") is not None


def _submodules(module: str) -> Iterable[str]:
    path = getattr(sys.modules[module], "__path__", None)
    return () if path is None else (submodule.name for submodule in pkgutil.iter_modules(path))
