"""Saves values of ``xla`` tensors (``xm.save``, ``xser.save``, ``xser.load``), and loads any checkpoint to ``xla``.

``xm.save`` and ``xser.save`` write a checkpoint in PyTorch's own format, with CPU tensors, which ``torch.load``
reads. Tensors are fetched from the device one at a time, while the file is being written.

In ``torch.load(path, map_location="xla")``, PyTorch reads storages into host memory, asks for each to be moved to
its location, and then makes tensors that show parts of storages. A storage for ``xla`` stays in host memory and
reports the device; its values are uploaded when the first tensor is made of it. Tensors that share a storage in the
file share one on the device, as on other devices.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import shutil
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch.storage import TypedStorage

from xla_core.dispatch.transfers import read
from xla_core.dispatch.views import become
from xla_core.recording import tensor_trees
from xla_core.recording.storage import Storage, View
from xla_core.recording.xla_tensor import XLATensor, set_handler
from xla_core.support import atomic_file
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands, TorchObject, Tree
from xla_core.torch_bridge.torch_private import release_free_memory

MSG_NO_PART: Final = (
    "{path} was saved in torch_xla's former form, in two places: the file and the folder {folder}, "
    "which lacks {name}; copy the folder beside the file"
)

MSG_FORMER_FORMAT: Final = (
    "{location}: files in the format of PyTorch before 1.6 are loaded to the CPU only, "
    'torch.load(..., map_location="cpu"); move the tensors after that: .to({location!r})'
)
MSG_STORAGE: Final = (
    "set_ of a tensor on {device} needs a tensor there, got a storage on {found}; "
    "upload it first, as a tensor: .to({device!r})"
)

# The dtypes that PyTorch has a storage class for. Tensors of other dtypes are copied to the CPU at once.
_STORED: Final = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    }
)  # fmt: skip


_LARGE: Final = 1 << 20
"""Bytes of a tensor for which free memory is returned to the system first."""


class DeferredStorage(torch.UntypedStorage):
    """The bytes of an ``xla`` tensor, which ``torch.save`` asks for (``cpu()``) when it writes them."""

    _tensor: XLATensor

    def __new__(cls, tensor: XLATensor) -> DeferredStorage:
        """A storage without memory in the place of the value of ``tensor``."""
        storage = super().__new__(cls, 0)
        storage._tensor = tensor
        return storage

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the value is."""
        return self._tensor.device

    def nbytes(self) -> int:
        """The size of the value in its PyTorch dtype."""
        return self._tensor.numel() * self._tensor.element_size()

    def data_ptr(self) -> int:
        """0: there is no memory here."""
        return 0

    def cpu(self) -> torch.UntypedStorage:
        """The value, fetched now."""
        if self.nbytes() >= _LARGE:
            # the memory of the tensor before this one
            release_free_memory()
        return read(self._tensor).contiguous().untyped_storage()


def _location(storage: object) -> str | None:
    return "cpu" if isinstance(storage, DeferredStorage) else None


def _nowhere(_storage: object, _location: str) -> None:
    """Never called: the storages that this registration saves are tagged as the CPU's."""


# torch.save asks the registered functions, in order of priority, for the location to write for a storage.
torch.serialization.register_package(5, _location, _nowhere)


class _Pickler(pickle.Pickler):
    """Writes ``xla`` tensors as CPU tensors whose bytes are fetched later.

    Tensors that show the same storage through the same views are written once, and share memory when loaded.
    """

    def __init__(self, *args: TorchObject, **kwargs: TorchObject) -> None:
        super().__init__(*args, **kwargs)
        self._known: dict[tuple[Storage, View | None], TypedStorage] = {}

    def reducer_override(self, obj: object) -> tuple[Callable[..., object], tuple[object, ...]]:
        if not isinstance(obj, XLATensor):
            return NotImplemented
        if getattr(obj, "_is_param", False):
            parts: tuple[object, ...] = (obj.data, obj.requires_grad, OrderedDict())
            return torch._utils._rebuild_parameter, parts
        if obj.dtype not in _STORED:
            return read(obj).__reduce_ex__(2)
        key = (obj._s, obj._v)
        storage = self._known.get(key)
        if storage is None:
            storage = self._known[key] = TypedStorage(
                wrap_storage=DeferredStorage(obj.detach()), dtype=obj.dtype, _internal=True
            )
        shape = tuple(obj.shape)
        strides = torch.empty(shape, device="meta").stride()
        requires_grad = obj.requires_grad and obj.is_leaf
        parts = (storage, 0, shape, strides, requires_grad, OrderedDict())
        return torch._utils._rebuild_tensor_v2, parts


# torch.save takes its pickler from a module
_pickle_module: Final = types.ModuleType(f"{__name__}.pickling")
_pickle_module.__dict__.update(
    Pickler=_Pickler, Unpickler=pickle.Unpickler, dump=pickle.dump, dumps=pickle.dumps
)


def save(data: object, file_or_path: object) -> None:
    """Save ``data``, any structure that ``torch.save`` takes, with ``xla`` tensors as CPU tensors.

    A path is written under a temporary name and then renamed, so that an interrupted save leaves the former file.
    Host memory grows by about one tensor. Different views of one storage are saved as separate tensors.
    """
    if not isinstance(file_or_path, (str, os.PathLike)):
        torch.save(data, file_or_path, pickle_module=_pickle_module)
        return
    with atomic_file.replacing(Path(file_or_path)) as temporary:
        torch.save(data, temporary, pickle_module=_pickle_module)


class TensorReference:
    """Stands for a tensor in a file of torch_xla 2.9's ``xser.save``; it is file number ``tid`` of a folder."""

    def __init__(self, tid: int) -> None:
        self.tid = tid


# Such files refer to the class by this module.
TensorReference.__module__ = "torch_xla.utils.serialization"


def load(path: str | os.PathLike[str], weights_only: bool = True) -> Tree:
    """Load a file of ``save``, or of torch_xla 2.9's ``xser.save``, with CPU tensors.

    With ``weights_only`` (default: True) it refuses files that contain other objects than tensors and plain
    containers, as ``torch.load`` does; without, loading runs code from the file. Raises FileNotFoundError if a file
    of torch_xla 2.9 lacks a tensor in its folder.
    """
    with torch.serialization.safe_globals([TensorReference]):
        data = torch.load(path, map_location="cpu", weights_only=weights_only)
    return tensor_trees.map_selected(
        data, lambda item: isinstance(item, TensorReference), _reader(path)
    )


def _reader(path: str | os.PathLike[str]) -> Callable[[TensorReference], torch.Tensor]:
    folder = Path(tensors_folder(path))

    @functools.cache
    def part(tid: int) -> torch.Tensor:
        file = Path(tensor_file(folder, tid))
        if not file.exists():
            raise FileNotFoundError(
                MSG_NO_PART.format(path=os.fspath(path), folder=folder, name=file.name)
            )
        tensor: torch.Tensor = torch.load(file, map_location="cpu", weights_only=True)
        return tensor

    return lambda reference: part(reference.tid)


def tensors_folder(path: str | os.PathLike[str]) -> str:
    """The folder with the tensors of a file of torch_xla 2.9's ``xser.save``."""
    return f"{os.fspath(path)}.tensors"


def tensor_file(path: str | os.PathLike[str], tid: int) -> str:
    """The file of tensor number ``tid`` in the folder ``path``."""
    return str(Path(path) / f"tensor_{tid}.pt")


def rewrite_data(path: str | os.PathLike[str], data: object, save_tensors: bool) -> object:
    """A copy of ``data`` with a ``TensorReference`` in place of each ``xla`` tensor, numbered in order.

    With ``save_tensors`` the folder ``path`` is replaced by one with a file for each tensor. ``torch.save`` of the
    result to the file beside it then makes a checkpoint in torch_xla 2.9's form, which ``load`` reads.
    """
    folder = Path(path)
    if save_tensors:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    numbers = itertools.count()

    def reference(tensor: XLATensor) -> TensorReference:
        stand_in = TensorReference(next(numbers))
        if save_tensors:
            torch.save(tensor.detach().cpu(), tensor_file(folder, stand_in.tid))
        return stand_in

    return tensor_trees.map_tensors(data, reference)


# -- loading ---------------------------------------------------------------------------------------


_REBUILD: Final = torch._utils._rebuild_tensor_v2.__code__
# Frames of torch's and of ours between that function and the handler of ``set_``.
_MOST_FRAMES: Final = 12


class _Uploaded(torch.UntypedStorage):
    """A storage in host memory, whose values are uploaded to ``target`` when a tensor is made of it."""

    target: torch.device
    whole: XLATensor | None
    """A tensor with all values, once the first tensor has been made."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of tensors that are made of the storage."""
        return self.target


def restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """Return ``storage`` as one that is uploaded to ``location``, an ``xla`` device, when it is used.

    Raises RuntimeError for files in the format of PyTorch before 1.6, in which the values of storages come last.
    """
    if getattr(storage, "_torch_load_uninitialized", False):  # torch 2.11 to 2.15
        raise RuntimeError(MSG_FORMER_FORMAT.format(location=location))
    storage.__class__ = _Uploaded
    assert isinstance(storage, _Uploaded)
    storage.target, storage.whole = torch.device(location), None
    return storage


def _set_storage(args: Operands, _kwargs: NamedOperands | None) -> Operand:
    """``set_(storage, offset, size, stride)``: show a part of a storage that is being loaded."""
    target, storage, offset, size, *rest = args
    if not isinstance(storage, _Uploaded):
        text = MSG_STORAGE.format(device=str(target.device), found=str(storage.device))
        raise RuntimeError(text)
    # PyTorch leaves out the strides () of a number
    size, stride = tuple(size), tuple(rest[0]) if rest else ()
    conjugated, negated = _take_lazy_bits()
    if storage.whole is None:
        storage.whole = _upload(storage, torch.empty(0, dtype=target.dtype), offset, size, stride)
    whole = storage.whole
    if (offset, size, stride) != (0, tuple(whole.shape), whole.stride()):
        whole = whole.as_strided(size, stride, offset)
    if conjugated:
        whole = whole.conj()
    if negated:
        whole = torch._neg_view(whole)
    return become(target, whole)


set_handler(torch.ops.aten.set_.source_Storage_storage_offset, _set_storage)


def _take_lazy_bits() -> tuple[bool, bool]:
    """Whether the tensor that ``torch.load`` rebuilds now is conjugated, and whether it is negated.

    PyTorch saves the memory of ``x.conj()`` as that of ``x``, with a note, and sets a bit in the C++ part of the
    loaded tensor. A tensor on ``xla`` has no such bit, so the notes are removed, and the caller makes the view.
    """
    # torch 2.11 to 2.15: the notes are the argument ``metadata`` of the function that rebuilds a tensor
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code is _REBUILD:
            notes = frame.f_locals.get("metadata") or {}
            return bool(notes.pop("conj", False)), bool(notes.pop("neg", False))
        frame = frame.f_back
    return False, False


def _upload(
    storage: _Uploaded,
    host: torch.Tensor,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> XLATensor:
    """Upload all values of ``storage``, in the shape of the tensor that is made of it if that shows all, else flat.

    A tensor that shows all is then not a view, which would be one more operation in each step that reads it.
    ``host`` is an empty CPU tensor.
    """
    host.set_(storage, offset, size, stride)
    flat = (storage.nbytes() // host.dtype.itemsize,)
    if not host.is_contiguous() or (host.numel(),) != flat:
        host.set_(storage, 0, flat, (1,))
    uploaded = host.to(storage.target)
    assert isinstance(uploaded, XLATensor)
    return uploaded
