"""Small helpers that scripts import from ``torch_xla.utils.utils``: fake data, timing, containers."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import BuiltinFunctionType, FunctionType, ModuleType, TracebackType
from typing import Final, TextIO, TypedDict, TypeVar, Unpack

import torch

from xla_core.contract.foreign_values import Attribute, ForeignObject
from xla_core.recording.tensor_trees import DataWrapper as DataWrapper
from xla_core.torch_bridge.operands import Tree

_T = TypeVar("_T")

# Objects whose attributes hold no data of the user's.
_OPAQUE: Final = (type, FunctionType, BuiltinFunctionType, ModuleType, torch.Tensor)
_FALSE: Final = frozenset({"", "0", "false", "no", "off"})


class SampleGenerator:
    """An iterator that returns ``data`` ``sample_count`` times: a loader that does no work.

    Its length is ``sample_count``, and each ``iter()`` starts again from the first item.
    """

    def __init__(self, data: object, sample_count: int) -> None:
        self._data = data
        self._sample_count = sample_count
        self._given = 0

    def __iter__(self) -> SampleGenerator:
        return SampleGenerator(self._data, self._sample_count)

    def __len__(self) -> int:
        return self._sample_count

    def __next__(self) -> Tree:
        if self._given >= self._sample_count:
            raise StopIteration
        self._given += 1
        return self._data


class FnDataGenerator:
    """An iterator of ``count`` pairs ``(batch, func(batch))`` (default: 1), where a batch is (batch_size, ...).

    ``gen_tensor(batch_size, *dims)`` makes each batch; ``dims`` defaults to ``[1]``.
    """

    def __init__(
        self,
        func: Callable[[torch.Tensor], object],
        batch_size: int,
        gen_tensor: Callable[..., torch.Tensor],
        dims: Sequence[int] | None = None,
        count: int = 1,
    ) -> None:
        self._func = func
        self._shape = (batch_size, *(dims or [1]))
        self._gen_tensor = gen_tensor
        self._count = count
        self._given = 0

    def __iter__(self) -> FnDataGenerator:
        dims = self._shape[1:]
        return FnDataGenerator(self._func, self._shape[0], self._gen_tensor, dims, self._count)

    def __len__(self) -> int:
        return self._count

    def __next__(self) -> tuple[torch.Tensor, Tree]:
        if self._given >= self._count:
            raise StopIteration
        self._given += 1
        batch = self._gen_tensor(*self._shape)
        return batch, self._func(batch)


class LazyProperty:
    """A class attribute that is computed by ``gen_fn(instance)`` at its first read, once per instance."""

    def __init__(self, gen_fn: Callable[[ForeignObject], object]) -> None:
        self._gen_fn = gen_fn

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Attribute:
        if instance is None:
            return self
        value = self._gen_fn(instance)
        vars(instance)[self._name] = value  # Python finds it before this descriptor from now on
        return value


class TmpFolder(contextlib.AbstractContextManager[str]):
    """A ``with`` block with a temporary folder, which is removed at its end.

    The block gets the folder's path, which is also the attribute ``name``.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.name = self._folder.name

    def __enter__(self) -> str:
        return self.name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._folder.cleanup()


def as_list(t: object) -> list[Tree] | tuple[Tree, ...]:
    """``t`` if it is a list or a tuple, else ``[t]``."""
    return t if isinstance(t, (list, tuple)) else [t]


def getenv_as(name: str, type: Callable[[str], object], defval: object = None) -> Tree:
    """The environment variable ``name`` converted by ``type``, or ``defval`` if it is not set.

    For ``bool``, an empty text, 0, false, no and off are False, and anything else is True.
    """
    text = os.environ.get(name)
    if text is None:
        return defval
    return text.strip().lower() not in _FALSE if type is bool else type(text)


def check_env_flag(name: str, default: str = "") -> bool:
    """Whether the environment variable ``name`` is on, yes, y, true or 1; ``default`` is used if it is not set."""
    return os.environ.get(name, default).upper() in ("ON", "1", "YES", "TRUE", "Y")


class _PrintOptions(TypedDict, total=False):
    sep: str | None
    end: str | None
    flush: bool


def eprint(*args: object, file: TextIO | None = None, **kwargs: Unpack[_PrintOptions]) -> None:
    """``print`` to ``file`` (default: stderr)."""
    print(*args, file=file or sys.stderr, **kwargs)


def for_each_instance(
    value: object, select_fn: Callable[[object], bool], fn: Callable[[object], object]
) -> None:
    """Call ``fn(item)`` for each item inside ``value`` for which ``select_fn(item)`` is true, once per object.

    The search visits dicts (keys, too), lists, tuples, sets and the attributes of objects.
    """

    def visit(item: object) -> object:
        fn(item)
        return item

    _rewritten(value, select_fn, visit, {})


def for_each_instance_rewrite(
    value: object, select_fn: Callable[[object], bool], fn: Callable[[object], object]
) -> Tree:
    """``value`` with ``fn(item)`` in place of each item inside for which ``select_fn(item)`` is true.

    ``fn`` is called once per object, so that an object that occurs twice has one replacement. A container in which
    something changes is copied; other objects are changed in place.
    """
    return _rewritten(value, select_fn, fn, {})


def _rewritten(
    value: object,
    select: Callable[[object], bool],
    change: Callable[[object], object],
    known: dict[int, tuple[object, object]],
) -> object:
    """Return ``value`` with the selected items inside it changed.

    ``known`` maps the id of each visited object to the object and its replacement. So an object is changed once
    however often it is met, and objects may refer to each other.
    """
    if id(value) in known:
        return known[id(value)][1]
    if select(value):
        known[id(value)] = value, change(value)
        return known[id(value)][1]
    known[id(value)] = value, value

    def inner(item: object) -> Tree:
        return _rewritten(item, select, change, known)

    rewritten = value
    if isinstance(value, dict):
        items = [(k, v, inner(k), inner(v)) for k, v in value.items()]
        if any(k is not old or v is not had for old, had, k, v in items):
            rewritten = copy.copy(value)
            rewritten.clear()
            rewritten.update((k, v) for _, _, k, v in items)
    elif isinstance(value, (list, tuple, set, frozenset)):
        members = [inner(item) for item in value]
        if any(new is not old for new, old in zip(members, value, strict=True)):
            kind = type(value)
            rewritten = kind(*members) if hasattr(value, "_fields") else kind(members)
    elif isinstance(value, DataWrapper):
        rewritten = value.from_tensors([inner(t) for t in value.get_tensors()])
    elif hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
        for name, attribute in list(vars(value).items()):
            changed = inner(attribute)
            if changed is not attribute:
                setattr(value, name, changed)
    known[id(value)] = value, rewritten
    return rewritten


class TimedScope:
    """A ``with`` block that calls ``printfn`` with ``msg`` and its milliseconds when it ends without an error.

    With ``printfn=None`` nothing is printed. ``seconds`` is the block's duration.
    """

    def __init__(self, msg: str = "", printfn: Callable[[str], object] | None = eprint) -> None:
        self._msg = msg
        self._printfn = printfn
        self.seconds = 0.0

    def __enter__(self) -> TimedScope:
        self._started = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seconds = time.perf_counter() - self._started
        if error is None and self._printfn is not None:
            self._printfn(f"{self._msg}{self.seconds * 1e3:.3f}ms")


def timed(
    fn: Callable[[], _T], msg: str = "", printfn: Callable[[str], object] | None = eprint
) -> _T:
    """Return ``fn()``, and call ``printfn`` with ``msg`` and the milliseconds that it took."""
    with TimedScope(msg, printfn):
        return fn()


def null_print(*args: object, **kwargs: object) -> None:
    """Print nothing: a ``printfn`` for silence."""
    del args, kwargs


def get_print_fn(debug: bool | None = None) -> Callable[..., None]:
    """``eprint`` if ``debug`` is true (default: the environment variable ``DEBUG``), else ``null_print``."""
    wanted = check_env_flag("DEBUG") if debug is None else debug
    return eprint if wanted else null_print


class Cleaner:
    """Calls ``func()`` when it is deleted."""

    def __init__(self, func: Callable[[], object]) -> None:
        self.func = func

    def __del__(self) -> None:
        self.func()


def shape(inputs: object) -> list[int]:
    """The lengths of nested lists or tuples, outermost first; the first element of each level is measured."""
    sizes = []
    while isinstance(inputs, (list, tuple)):
        sizes.append(len(inputs))
        if not inputs:
            break
        inputs = inputs[0]
    return sizes


def flatten_nested_tuple(inputs: object) -> tuple[object, ...]:
    """The items of nested tuples and lists, in order, as one tuple."""
    if not isinstance(inputs, (list, tuple)):
        return (inputs,)
    return tuple(item for part in inputs for item in flatten_nested_tuple(part))


def list_copy_append(ilist: Sequence[_T], item: _T) -> list[_T]:
    """A new list: the items of ``ilist``, then ``item``."""
    return [*ilist, item]


def get_free_tcp_ports(n: int = 1) -> list[int]:
    """``n`` different TCP ports that are free at the moment of the call."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("", 0))
        return [s.getsockname()[1] for s in sockets]


def parallel_work(num_workers: int, fn: Callable[..., _T], *args: Iterable[object]) -> list[_T]:
    """The list of ``map(fn, *args)``, in order, computed by ``num_workers`` threads."""
    with ThreadPoolExecutor(max_workers=num_workers) as pool:
        return list(pool.map(fn, *args))
