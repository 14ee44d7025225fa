"""The environment variables that xla-core reads, each declared once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")


class Flag(Generic[T]):
    """One environment variable: its name, type, default and meaning. Read when asked for."""

    def __init__(self, name: str, parse: Callable[[str], T], default: T, meaning: str) -> None:
        self.name: Final = name
        self.default: Final = default
        self.meaning: Final = meaning
        self._parse = parse
        FLAGS[name] = self

    def get(self, environment: Mapping[str, str] | None = None) -> T:
        """The value from the environment, or the default. Raises ValueError naming the variable."""
        text = (os.environ if environment is None else environment).get(self.name)
        if text is None or text == "":
            return self.default
        try:
            return self._parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r} in the environment: {error}") from None


FLAGS: Final[dict[str, Flag[Any]]] = {}


def parse_bool(text: str) -> bool:
    """``1, true, yes, on`` and ``0, false, no, off`` in any case. Raises ValueError for the rest."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected one of 1, true, yes, on, 0, false, no, off")


def parse_auto(text: str) -> bool | None:
    """``auto`` is None, else as ``parse_bool``. Raises ValueError for the rest."""
    return None if text.strip().lower() == "auto" else parse_bool(text)


def parse_positive(text: str) -> int:
    """A whole number of at least 1. Raises ValueError for the rest."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError("expected a whole number of at least 1")
    return int(text)


def parse_effort(text: str) -> str:
    """``auto``, ``fast``, ``medium`` or ``full`` in any case. Raises ValueError for the rest."""
    lowered = text.strip().lower()
    if lowered not in EFFORTS:
        raise ValueError(f"expected one of {', '.join(EFFORTS)}")
    return lowered


EFFORTS: Final = ("auto", "fast", "medium", "full")

CHECK_INDICES: Final = Flag(
    "XLA_CHECK_INDICES",
    parse_bool,
    False,
    "raise IndexError for indices out of range, when the step has run; read at an operator's first use",
)
OUTLINE_REPEATS: Final = Flag(
    "XLA_OUTLINE_REPEATS",
    parse_auto,
    None,
    "compile what repeats in a step once, as functions; auto leaves it to the device",
)
STEP_STAGES: Final = Flag(
    "XLA_STEP_STAGES",
    parse_auto,
    None,
    "run a step with repeats as several programs in a row; auto leaves it to device and step",
)
COMPILE_EFFORT: Final = Flag(
    "XLA_COMPILE_EFFORT",
    parse_effort,
    "auto",
    "code that is made soon (fast, medium) or runs fast (full), on the CPU; auto goes by the program",
)
CACHE_PREFETCH: Final = Flag(
    "XLA_CACHE_PREFETCH",
    parse_bool,
    True,
    "load and rehearse what the script's last run used of the persistent cache ahead of its use",
)
REGISTER_INSTALLED_PLUGINS: Final = Flag(
    "XLA_REGISTER_INSTALLED_PLUGINS",
    parse_bool,
    True,
    "find device plugins by torch_xla's entry points, too",
)
SELECT_DEFAULT_DEVICE: Final = Flag(
    "PJRT_SELECT_DEFAULT_DEVICE",
    parse_bool,
    True,
    "without PJRT_DEVICE take a TPU that is there, else the CPU; 0 raises an error instead",
)
COMPILATION_CACHE_SIZE: Final = Flag(
    "XLA_COMPILATION_CACHE_SIZE",
    parse_positive,
    2048,
    "compiled programs that a process keeps in memory; those used least recently are forgotten",
)
SYNC_WAIT: Final = Flag(
    "XLA_SYNC_WAIT", parse_bool, False, "sync() returns when the step has finished"
)
COPY_CPU_OPERANDS: Final = Flag(
    "XLA_COPY_CPU_OPERANDS",
    parse_bool,
    False,
    "elementwise operators take CPU tensors besides xla ones, and copy them to the device",
)
USE_BF16: Final = Flag(
    "XLA_USE_BF16", parse_bool, False, "keep float and double values as bfloat16 on the device"
)
LTC_USE_BF16: Final = Flag(
    "LTC_USE_BF16", parse_bool, False, "Lazy Tensor Core's name of XLA_USE_BF16"
)
DOWNCAST_BF16: Final = Flag(
    "XLA_DOWNCAST_BF16", parse_bool, False, "keep float values as bfloat16, double as float32"
)
USE_32BIT_LONG: Final = Flag(
    "XLA_USE_32BIT_LONG", parse_bool, False, "keep 64-bit integers as 32-bit ones on the device"
)
EAGER_DEBUG_MODE: Final = Flag(
    "XLA_USE_EAGER_DEBUG_MODE", parse_bool, False, "start in eager mode: operators run one by one"
)
GET_OPBYOP: Final = Flag(
    "GET_TENSORS_OPBYOP", parse_bool, False, "reading a value runs each operator on its own"
)
SYNC_OPBYOP: Final = Flag(
    "SYNC_TENSORS_OPBYOP", parse_bool, False, "a sync runs each operator as a program of its own"
)
