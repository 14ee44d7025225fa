"""The façade's names that are imported when first used: submodules, and what packages beside xla-core have."""

from __future__ import annotations

import dis
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, ModuleType
from typing import Any, Final

MSG_NOT_INSTALLED: Final = (
    "{user} needs the package {distribution}, which is not installed; pip install {distribution}"
)
MSG_NO_ATTRIBUTE: Final = "module {module!r} has no attribute {name!r}"

# The bytecode instructions of ``from module import name`` and of ``module.name``.
_WRITTEN: Final = {
    dis.opmap[name] for name in ("IMPORT_FROM", "LOAD_ATTR", "LOAD_METHOD") if name in dis.opmap
}

JAX_HELPERS: Final = dict.fromkeys(
    ("jax_env_context", "jax_import_guard", "maybe_get_jax", "maybe_get_torchax", "requires_jax"),
    "xla_core.torch_features.jax_coexistence",
)
"""What several of torch_xla's modules have for code that uses jax itself."""


class MissingPackageError(ImportError):
    """A package beside xla-core is needed and not installed; the message names it."""


def package_module(module: str, user: str) -> ModuleType:
    """Import ``module`` (``xla_dist.collectives.model_collectives``) for the name ``user`` that needs it.

    Raises ImportError naming the distribution to install, if its top-level package is missing.
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
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` (PEP 562) for ``module``, whose submodules are attributes, too.

    ``homes`` maps names to the modules that have them: ``{"sqrt": "math"}`` gives ``module.sqrt`` from
    there. ``aliases`` maps names to modules that the names stand for. ``dir()`` leaves out names whose
    package is not installed. Written out, ``module.sqrt`` and ``from module import sqrt`` raise ImportError
    then; ``hasattr``, ``getattr`` and what looks modules through with them get an AttributeError with the
    same words.
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
    """Whether a frame's code looks an attribute up itself, instead of calling what does."""
    return frame.f_code.co_code[frame.f_lasti] in _WRITTEN


def _is_installed(home: str) -> bool:
    return importlib.util.find_spec(home.partition(".")[0]) is not None


def _is_submodule(module: str, name: str) -> bool:
    # what looks for a dunder name (__wrapped__, __path__) finds none that is a file
    if name.startswith("__") or not hasattr(sys.modules.get(module), "__path__"):
        return False
    return importlib.util.find_spec(f"{module}.{name}") is not None


def _submodules(module: str) -> Iterable[str]:
    path = getattr(sys.modules[module], "__path__", None)
    return () if path is None else (submodule.name for submodule in pkgutil.iter_modules(path))
