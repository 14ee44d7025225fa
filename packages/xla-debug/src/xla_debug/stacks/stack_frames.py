"""Finds the place in the user's program where an operation is recorded, from Python's stack.

Runs once per entry that is new to a trace's tree, never in a step that repeats a former one. An
operation of the backward pass runs in a thread of autograd's that has no Python frames of the
user; it gets the place of the forward operation whose gradient it computes, which autograd's
sequence numbers tell.
"""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final
from weakref import ref

from xla_core.extension_api import autograd
from xla_core.extension_api.source_location import Frame, SourceLocation
from xla_core.support import caches
from xla_core.support.own_packages import IMPORT_NAMES

KEPT_FRAMES: Final = 4
# More forward operations than this in one step, and the oldest are forgotten.
MAX_SEQUENCES: Final = 65_536

# Parts of PyTorch that matter here come before PyTorch itself; from _OWN on, files say nothing.
_USER, _MODULE, _OPTIMIZER, _TORCH, _OWN, _PYTHON = range(6)
# More places than this are forgotten: a program that makes its code as it runs has endlessly many.
_MAX_DESCRIBED: Final = 65_536
# Methods of a tensor that make its text.
_TEXTS: Final = ("__repr__", "__format__")


def _folder(package: str) -> str | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        return None
    path = Path(spec.origin)
    return str(path.parent) + os.sep if path.name == "__init__.py" else str(path)


@functools.cache
def _folders() -> tuple[tuple[str, int], ...]:
    owned = [(_folder(name), _OWN) for name in IMPORT_NAMES]
    stdlib = sysconfig.get_path("stdlib") + os.sep
    parts = [
        (_folder("torch.nn.modules.module"), _MODULE),
        (_folder("torch.optim"), _OPTIMIZER),
        (_folder("torch"), _TORCH),
    ]
    folders = [*owned, *parts, (stdlib, _PYTHON), ("<frozen ", _PYTHON)]
    return tuple((path, kind) for path, kind in folders if path is not None)


class _Kinds(dict[str, int]):
    """What each file is; looked up for every frame of a stack, so a plain look-up it is."""

    def __missing__(self, filename: str) -> int:
        if len(self) >= _MAX_DESCRIBED:
            self.clear()
        kind = self[filename] = _kind_of(filename)
        return kind


_kinds: Final = _Kinds()


def _kind_of(filename: str) -> int:
    if "site-packages" in filename or "dist-packages" in filename:
        # an installed package may lie below the standard library's folder
        return next((k for p, k in _folders() if k != _PYTHON and filename.startswith(p)), _USER)
    return next((kind for path, kind in _folders() if filename.startswith(path)), _USER)


def is_user_file(filename: str) -> bool:
    """Whether a file belongs neither to PyTorch, to this project nor to Python itself."""
    return _kinds[filename] == _USER


def is_own_file(filename: str) -> bool:
    """Whether a file belongs to this project."""
    return _kinds[filename] == _OWN


def frames(start: FrameType | None) -> Iterator[FrameType]:
    """A stack from ``start`` outwards."""
    while start is not None:
        yield start
        start = start.f_back


# by the code's id and the position in it: the code itself, since ids are used again, and the place
_described: caches.Bounded[tuple[int, int], tuple[CodeType, Frame]] = caches.Bounded(
    "places in code", _MAX_DESCRIBED
)


def described(frame: FrameType) -> Frame:
    """Function, file and current line of a frame: one object per place."""
    code = frame.f_code
    key = (id(code), frame.f_lasti)
    known = _described.get(key)
    if known is not None and known[0] is code:
        return known[1]
    place = Frame(code.co_name, code.co_filename, frame.f_lineno)
    return _described.keep(key, (code, place))[1]


def user_frames(start: FrameType | None, limit: int = KEPT_FRAMES) -> tuple[Frame, ...]:
    """The innermost frames of the user's own code, innermost first."""
    kept: list[Frame] = []
    for frame in frames(start):
        if is_user_file(frame.f_code.co_filename):
            kept.append(described(frame))
            if len(kept) == limit:
                break
    return tuple(kept)


def is_printing(start: FrameType | None) -> bool:
    """Whether a stack, from ``start`` to the user's line, is making the text of a tensor."""
    for frame in frames(start):
        if is_user_file(frame.f_code.co_filename):
            return False
        if frame.f_code.co_name in _TEXTS and is_own_file(frame.f_code.co_filename):
            return True
    return False


def source(frame: Frame) -> str:
    """The text of a line without indentation, empty where its file cannot be read."""
    return linecache.getline(frame.filename, frame.line).strip()


class _Scopes(threading.local):
    """Names pushed by the user (``xp.Trace``), outermost first, per thread."""

    def __init__(self) -> None:
        self.names: list[str] = []


_scopes = _Scopes()
# by the parent's id, as long as it lives: a reference that forgets it, its submodules' names by their ids
_children: dict[int, tuple[ref[Any], dict[int, str]]] = {}
_interned: caches.Bounded[
    tuple[object, ...], tuple[tuple[Frame, ...], dict[str, SourceLocation]]
] = caches.Bounded("stacks", _MAX_DESCRIBED)
_forward: caches.Bounded[int, SourceLocation] = caches.Bounded("forward operations", MAX_SEQUENCES)
_backward: caches.Bounded[tuple[SourceLocation, Frame | None], SourceLocation] = caches.Bounded(
    "backward operations", _MAX_DESCRIBED
)
_backward_calls: dict[int, tuple[Frame, ...]] = {}


def push_scope(name: str) -> None:
    """Put ``name`` around the operations that this thread records from now on."""
    _scopes.names.append(name)


def pop_scope() -> None:
    """Undo the last ``push_scope`` of this thread."""
    _scopes.names.pop()


def locate() -> SourceLocation | None:
    """The place that records an operation right now; None outside of any user's code."""
    start = sys._getframe(2)
    node = autograd.backward_sequence()
    if node is not None:
        return _of_backward(node, start)
    users, inner, modules, optimizer = _walk(start)
    if not users and inner is None:
        return None
    where = _intern(users, inner, _scope_of(modules), optimizer, False)
    # the node of this operation was made just before it was dispatched; the first to ask has it
    sequence = autograd.next_sequence() - 1
    if sequence not in _forward:
        _forward.keep(sequence, where)
    return where


def _walk(start: FrameType | None) -> tuple[list[Frame], Frame | None, list[object], bool]:
    users: list[Frame] = []
    inner: Frame | None = None
    modules: list[object] = []
    optimizer = False
    kinds = _kinds
    frame = start
    while frame is not None:
        code = frame.f_code
        kind = kinds[code.co_filename]
        if kind < _OWN:
            if inner is None:
                inner = described(frame)
            if kind == _USER:
                if len(users) < KEPT_FRAMES:
                    users.append(described(frame))
            elif kind == _MODULE:
                # of all frames of a module's call the one with the fewest variables: up to Python 3.12
                # f_locals copies them
                if code.co_name == "_wrapped_call_impl":
                    modules.append(frame.f_locals.get("self"))
            elif kind == _OPTIMIZER:
                optimizer = True
        frame = frame.f_back
    modules.reverse()
    return users, inner, modules, optimizer


def _intern(
    users: list[Frame] | tuple[Frame, ...],
    inner: Frame | None,
    scope: str,
    optimizer: bool,
    backward: bool,
) -> SourceLocation:
    frames = tuple(users)
    key = (frames, inner, optimizer, backward)
    known = _interned.get(key)
    if known is None:
        known = _interned.keep(key, (frames, {}))
    frames, by_scope = known  # equal layers differ in their scope alone, and share the rest
    where = by_scope.get(scope)
    if where is None:
        where = by_scope[scope] = SourceLocation(frames, inner, scope, optimizer, backward)
    return where


def _scope_of(modules: list[object]) -> str:
    """``Net/encoder/layers.0/fc1``: the outermost module's class, then names inside each other."""
    names = list(_scopes.names)
    parent = None
    for module in modules:
        if module is None:
            continue
        name = _names_in(parent).get(id(module)) if parent is not None else None
        names.append(name or type(module).__name__)
        parent = module
    return "/".join(names)


def _names_in(parent: Any) -> dict[int, str]:
    key = id(parent)
    known = _children.get(key)
    if known is None:
        names = {id(m): name for name, m in parent.named_modules() if name}
        forget = _children.pop  # bound: when Python ends, the module's names go before the callback
        known = _children[key] = (ref(parent, lambda _: forget(key, None)), names)
    return known[1]


def _of_backward(sequence: int, start: FrameType) -> SourceLocation:
    forward = _forward.get(sequence)
    frame: FrameType | None = start
    while frame is not None and _kinds[frame.f_code.co_filename] == _OWN:
        frame = frame.f_back
    inner = None if frame is None else described(frame)
    if forward is None:
        return _intern(backward_call(), inner, "backward", False, True)
    where = _backward.get((forward, inner))
    if where is None:
        scope = f"backward/{forward.scope}" if forward.scope else "backward"
        where = _intern(forward.frames, inner, scope, False, True)
        _backward.keep((forward, inner), where)
    return where


def backward_call() -> tuple[Frame, ...]:
    """The user's frames around the ``backward()`` that is running, in whatever thread it waits."""
    task = autograd.current_backward()
    callers = _backward_calls.get(task)
    if callers is None:
        # no variable holds these frames: this function's own is among them, and with it in a cycle
        # the values of everything that called it would live until Python's collector comes
        callers = next(filter(None, map(_awaits_backward, sys._current_frames().values())), ())
        _backward_calls.clear()
        _backward_calls[task] = callers
    return callers


def _awaits_backward(top: FrameType) -> tuple[Frame, ...]:
    """The user's frames of a thread that called ``backward()``; empty for any other."""
    called = any(f.f_code.co_name == "_engine_run_backward" for f in frames(top))
    return user_frames(top) if called else ()
