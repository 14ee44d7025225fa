"""Finds the place in the user's program at which an operation is recorded, from Python's stack.

This runs once for each entry that is new in a trace's tree, never in a step that repeats an earlier one. Operations
of the backward pass run in a thread of autograd without Python frames of the user. They get the place of the
forward operation whose gradient they compute, which is found by autograd's sequence numbers.
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
from typing import Final
from weakref import ref

from torch import nn

from xla_core.extension_api import autograd
from xla_core.extension_api.source_location import Frame, SourceLocation
from xla_core.support import caches
from xla_core.support.own_packages import IMPORT_NAMES

KEPT_FRAMES: Final = 4
# The most forward operations whose places are kept for the backward pass.
MAX_SEQUENCES: Final = 65_536

# The kinds of files. Frames of _OWN and _PYTHON are never the place of an operation.
_USER, _MODULE, _OPTIMIZER, _TORCH, _OWN, _PYTHON = range(6)
# The most places that are kept: a program that generates code while it runs has no end of them.
_MAX_DESCRIBED: Final = 65_536
# The methods that convert a tensor to text.
_TEXTS: Final = ("__repr__", "__format__")


def _folder(package: str) -> str | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        return None
    path = Path(spec.origin)
    return str(path.parent) + os.sep if path.name == "__init__.py" else str(path)


@functools.cache
def _folders() -> tuple[tuple[str, int], ...]:
    """Prefixes of file names and their kinds; the first one that fits counts, so that parts precede the whole."""
    own = [(_folder(name), _OWN) for name in IMPORT_NAMES]
    stdlib = sysconfig.get_path("stdlib") + os.sep
    torch = [
        (_folder("torch.nn.modules.module"), _MODULE),
        (_folder("torch.optim"), _OPTIMIZER),
        (_folder("torch"), _TORCH),
    ]
    folders = [*own, *torch, (stdlib, _PYTHON), ("<frozen ", _PYTHON)]
    return tuple((path, kind) for path, kind in folders if path is not None)


class _Kinds(dict[str, int]):
    """The kind of each file. A dict, because it is looked up for every frame of a stack."""

    def __missing__(self, filename: str) -> int:
        if len(self) >= _MAX_DESCRIBED:
            self.clear()
        kind = self[filename] = _kind_of(filename)
        return kind


_kinds: Final = _Kinds()


def _kind_of(filename: str) -> int:
    if "site-packages" in filename or "dist-packages" in filename:
        # packages may be installed in a folder inside the standard library's
        return next((k for p, k in _folders() if k != _PYTHON and filename.startswith(p)), _USER)
    return next((kind for path, kind in _folders() if filename.startswith(path)), _USER)


def is_user_file(filename: str) -> bool:
    """Whether a file belongs neither to PyTorch nor to this project nor to Python's standard library."""
    return _kinds[filename] == _USER


def is_own_file(filename: str) -> bool:
    """Whether a file belongs to this project."""
    return _kinds[filename] == _OWN


def frames(start: FrameType | None) -> Iterator[FrameType]:
    """The frames of a stack, from ``start`` outwards."""
    while start is not None:
        yield start
        start = start.f_back


# The key is the code's id and the position in it. The code itself is stored too, since ids are reused.
_described: caches.Bounded[tuple[int, int], tuple[CodeType, Frame]] = caches.Bounded(
    "places in code", _MAX_DESCRIBED
)


def described(frame: FrameType) -> Frame:
    """Function, file and current line of a frame: always the same object for the same place."""
    code = frame.f_code
    key = (id(code), frame.f_lasti)
    entry = _described.get(key)
    if entry is not None and entry[0] is code:
        return entry[1]
    place = Frame(code.co_name, code.co_filename, frame.f_lineno)
    return _described.keep(key, (code, place))[1]


def user_frames(start: FrameType | None, limit: int = KEPT_FRAMES) -> tuple[Frame, ...]:
    """The ``limit`` innermost frames of the user's code in the stack from ``start``, innermost first."""
    of_user: list[Frame] = []
    for frame in frames(start):
        if is_user_file(frame.f_code.co_filename):
            of_user.append(described(frame))
            if len(of_user) == limit:
                break
    return tuple(of_user)


def is_printing(start: FrameType | None) -> bool:
    """Whether the user's line of the stack from ``start`` has called the conversion of a tensor to text."""
    for frame in frames(start):
        if is_user_file(frame.f_code.co_filename):
            return False
        if frame.f_code.co_name in _TEXTS and is_own_file(frame.f_code.co_filename):
            return True
    return False


def source(frame: Frame) -> str:
    """The text of a frame's line without indentation; empty if the file cannot be read."""
    return linecache.getline(frame.filename, frame.line).strip()


class _Scopes(threading.local):
    """The scopes that the user has opened (``xp.Trace``), outermost first, of each thread."""

    def __init__(self) -> None:
        self.names: list[str] = []


_scopes = _Scopes()
# For each module, by its id: a weak reference that removes the entry, and the names of its submodules by their ids.
_children: dict[int, tuple[ref[nn.Module], dict[int, str]]] = {}
_interned: caches.Bounded[
    tuple[object, ...], tuple[tuple[Frame, ...], dict[str, SourceLocation]]
] = caches.Bounded("stacks", _MAX_DESCRIBED)
_forward: caches.Bounded[int, SourceLocation] = caches.Bounded("forward operations", MAX_SEQUENCES)
_backward: caches.Bounded[tuple[SourceLocation, Frame | None], SourceLocation] = caches.Bounded(
    "backward operations", _MAX_DESCRIBED
)
_backward_calls: dict[int, tuple[Frame, ...]] = {}


def push_scope(name: str) -> None:
    """Open the scope ``name`` for the operations that this thread records from now on."""
    _scopes.names.append(name)


def pop_scope() -> None:
    """Close the scope that this thread opened last."""
    _scopes.names.pop()


def locate() -> SourceLocation | None:
    """The place of the operation that is being recorded; None if no code of the user's has called it."""
    start = sys._getframe(2)
    node = autograd.backward_sequence()
    if node is not None:
        return _of_backward(node, start)
    users, inner, modules, optimizer = _walk(start)
    if not users and inner is None:
        return None
    where = _intern(users, inner, _scope_of(modules), optimizer, False)
    # Autograd created the node of this operation just before dispatching it. An operator may be dispatched as
    # several ones: the place of the first one is kept.
    sequence = autograd.next_sequence() - 1
    if sequence not in _forward:
        _forward.keep(sequence, where)
    return where


def _walk(start: FrameType | None) -> tuple[list[Frame], Frame | None, list[object], bool]:
    """What a stack contains: the user's frames, the innermost frame outside this project, modules, an optimizer."""
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
                # the frame of a module's call with the fewest variables: f_locals copies them up to Python 3.12
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
    """The location with these attributes: always the same object for the same attributes."""
    frames = tuple(users)
    key = (frames, inner, optimizer, backward)
    entry = _interned.get(key)
    if entry is None:
        entry = _interned.keep(key, (frames, {}))
    frames, by_scope = entry  # equal layers differ only in their scope, and share the frames
    where = by_scope.get(scope)
    if where is None:
        where = by_scope[scope] = SourceLocation(frames, inner, scope, optimizer, backward)
    return where


def _scope_of(modules: list[object]) -> str:
    """The scope of nested calls of modules: ``Net/encoder/layers.0/fc1``.

    It begins with the scopes that the user has opened. The outermost module is named by its class, and each other
    one by its name inside the module around it.
    """
    names = list(_scopes.names)
    parent = None
    for module in modules:
        if module is None:
            continue
        name = _names_in(parent).get(id(module)) if parent is not None else None
        names.append(name or type(module).__name__)
        parent = module
    return "/".join(names)


def _names_in(parent: nn.Module) -> dict[int, str]:
    """The names of a module's submodules by their ids."""
    key = id(parent)
    entry = _children.get(key)
    if entry is None:
        names = {id(m): name for name, m in parent.named_modules() if name}
        # bound now, because at Python's end globals may be gone when the callback runs
        remove = _children.pop
        entry = _children[key] = (ref(parent, lambda _: remove(key, None)), names)
    return entry[1]


def _of_backward(sequence: int, start: FrameType) -> SourceLocation:
    """The place of an operation of the backward pass, whose forward operation has this sequence number."""
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
    """The user's frames that called the running ``backward()``, in whichever thread waits for it."""
    task = autograd.current_backward()
    callers = _backward_calls.get(task)
    if callers is None:
        # Do not store these frames in a variable: this function's own frame is among them, and the reference cycle
        # would keep all values of its callers alive until Python's garbage collector runs.
        callers = next(filter(None, map(_awaits_backward, sys._current_frames().values())), ())
        _backward_calls.clear()
        _backward_calls[task] = callers
    return callers


def _awaits_backward(top: FrameType) -> tuple[Frame, ...]:
    """The user's frames of a thread that waits for ``backward()``; empty for any other thread."""
    called = any(f.f_code.co_name == "_engine_run_backward" for f in frames(top))
    return user_frames(top) if called else ()
