"""Settings of the running process for lowering and compiling programs.

A change applies to programs made after it. ``token`` identifies the settings: the same step with other
settings is another program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Final

import jax
import numpy as np
from jax import lax

from xla_core.support import indivisible
from xla_core.torch_bridge import float32_precision

PRECISIONS: Final = ("default", "high", "highest")

MSG_PRECISION: Final = "Invalid precision: {got}. Must be one of {known}."
MSG_OPTION: Final = (
    "compile option {name!r} has the value {value!r}; an option is a str, int, float or bool"
)

_Options = Mapping[str, str | int | float | bool]


class _Chosen:
    precision: str = "default"
    options: _Options = {}
    token: str = ""
    by_torch: bool = False


def follow_torch(wanted: bool) -> None:
    """Set whether PyTorch's switches for TF32 apply while the user sets no precision here; called by the device."""
    _Chosen.by_torch = wanted


def _choose(precision: str, options: Mapping[str, object]) -> None:
    chosen = "" if precision == "default" else precision
    token = f"{chosen} {sorted(options.items())}" if chosen or options else ""
    names = ("precision", "options", "token")
    indivisible.do(indivisible.storing(_Chosen, names, (precision, options, token)))


def token() -> str:
    """A text that is equal for equal settings; empty for the defaults."""
    return f"{_Chosen.token} tf32 {_tf32()}" if _Chosen.by_torch else _Chosen.token


def _tf32() -> tuple[bool, bool] | None:
    """Whether products and convolutions may use TF32; None if PyTorch's switches do not apply."""
    if not _Chosen.by_torch or _Chosen.precision != "default":
        return None
    return float32_precision.tf32_allowed()


def set_mat_mul_precision(precision: str) -> None:
    """Set the precision of float32 matrix products and convolutions on the device.

    ``'default'`` is the fastest of the hardware (one bfloat16 pass on a TPU), ``'high'`` three
    bfloat16 passes, and ``'highest'`` float32. The CPU always computes in float32. On a GPU, PyTorch's
    switches (``torch.backends.cuda.matmul.allow_tf32``) decide while this is ``'default'``. Raises
    ValueError for anything else.
    """
    if precision not in PRECISIONS:
        raise ValueError(MSG_PRECISION.format(got=precision, known=", ".join(PRECISIONS)))
    _choose(precision, _Chosen.options)


def get_mat_mul_precision() -> str:
    """The precision set by ``set_mat_mul_precision``; initially ``'default'``."""
    return _Chosen.precision


def set_custom_compile_options(options: Mapping[str, object]) -> None:
    """Pass ``options`` (by the compiler's names) to every compilation from now on.

    They replace the options set before; an empty mapping removes them. Raises TypeError for a value that is
    not a str, int, float or bool. The compiler refuses unknown options when it compiles.
    """
    for name, value in options.items():
        if not isinstance(value, (str, int, float, bool)):
            raise TypeError(MSG_OPTION.format(name=name, value=value))
    _choose(_Chosen.precision, dict(options))


def custom_compile_options() -> dict[str, str | int | float | bool]:
    """The options set by ``set_custom_compile_options``."""
    return dict(_Chosen.options)


@contextlib.contextmanager
def compile_options(options: Mapping[str, object]) -> Iterator[None]:
    """Pass ``options``, in addition to those set before, to every compilation inside the block."""
    former = _Chosen.options
    try:
        try:
            set_custom_compile_options({**former, **options})
            yield
        finally:
            _choose(_Chosen.precision, former)
    finally:
        _choose(_Chosen.precision, former)  # again, in case an exception interrupted the line above


@contextlib.contextmanager
def matmul_precision() -> Iterator[None]:
    """Lower matrix products inside the block with the chosen precision, without changing jax's own setting."""
    chosen, allowed = _Chosen.precision, _tf32()
    if allowed is not None and not allowed[0]:
        chosen = "highest"
    with jax.default_matmul_precision(None if chosen == "default" else chosen):
        yield


def convolution_precision() -> lax.Precision | None:
    """The precision of convolutions if it has a separate switch; None if it is that of matrix products."""
    allowed = _tf32()
    if allowed is None:
        return None
    return lax.Precision.DEFAULT if allowed[1] else lax.Precision.HIGHEST


def key_text(formats: Mapping[np.dtype, np.dtype]) -> bytes:
    """The settings and the number formats of the device, as part of a program's cache key."""
    changed = sorted((source.name, kept.name) for source, kept in formats.items())
    return f"\nsettings {token()} formats {changed}".encode()
