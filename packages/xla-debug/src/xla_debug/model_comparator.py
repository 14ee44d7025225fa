"""``torch_xla.debug.model_comparator``: saves values in two runs of a script, and compares them.

``save`` writes a tensor to ``SAVE_DIR/[step-STEP/]NAME.N``, where N counts the saves of one name in a step.
``compare`` reads two such folders. File names and reports are those of torch_xla 2.9.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np
import torch

from xla_core.extension_api import runtime
from xla_debug import settings

RTOL: Final = 1e-5
ATOL: Final = 1e-8
MAX_DIFFS: Final = 25
_STEP: Final = "step-"


@dataclasses.dataclass
class _Saving:
    folder: str | os.PathLike[str] | None = None
    step: int | None = None
    counts: Counter[str] = dataclasses.field(default_factory=Counter)


_saving = _Saving()


def configure(save_dir: str | os.PathLike[str] | None) -> None:
    """Let ``save`` write to ``save_dir`` from now on; with None, to the folder in ``MODELCMP_SAVEDIR``, if set."""
    global _saving
    _saving = _Saving(save_dir)


def save(name: str | None, tensor: torch.Tensor, step: int | None = None) -> torch.Tensor:
    """Save the value of ``tensor`` under ``name``, and return the tensor. Without a folder, save nothing.

    With ``name`` None, the name is the caller's line (``train.py.l12``). ``step`` is the number of the step, or
    None (default). In a job, all processes must call this, and the first one writes.
    """
    folder = _saving.folder or settings.MODELCMP_SAVEDIR.get()
    if not folder:
        return tensor
    value = tensor.detach().cpu()
    if name is None:
        caller = sys._getframe(1)
        name = f"{Path(caller.f_code.co_filename).name}.l{caller.f_lineno}"
    if step is not None and step != _saving.step:
        _saving.step = step
        _saving.counts.clear()
    if runtime.is_master_ordinal(local=False):
        path = Path(folder) if step is None else Path(folder) / f"{_STEP}{step}"
        path.mkdir(parents=True, exist_ok=True)
        torch.save(value, path / f"{name}.{_saving.counts[name]}")
    _saving.counts[name] += 1
    return tensor


def compare(
    save_dir1: str | os.PathLike[str],
    save_dir2: str | os.PathLike[str],
    rtol: float = RTOL,
    atol: float = ATOL,
    max_diffs: int = MAX_DIFFS,
) -> str:
    """The differences between two folders of saved tensors, as text; empty if there are none.

    It names tensors that are in only one folder, and compares the others by ``tensor_file_compare`` with the same
    ``rtol``, ``atol`` and ``max_diffs``. Raises NotADirectoryError if a folder does not exist.
    """
    first, second = _saved(Path(save_dir1)), _saved(Path(save_dir2))
    report = [f"Mismatch: {name} not in {save_dir2}\n" for name in first if name not in second]
    for name in first:
        if name in second:
            report.append(tensor_file_compare(first[name], second[name], rtol, atol, max_diffs))
    report += [f"Mismatch: {name} not in {save_dir1}\n" for name in second if name not in first]
    return "".join(report)


def tensor_file_compare(
    path1: str | os.PathLike[str],
    path2: str | os.PathLike[str],
    rtol: float = RTOL,
    atol: float = ATOL,
    max_diffs: int = MAX_DIFFS,
) -> str:
    """The differences between two saved tensors, below a line with their name; empty if there are none.

    ``rtol``, ``atol`` and ``max_diffs`` are those of ``compare_tensors``.
    """
    first, second = torch.load(path1), torch.load(path2)
    differences = compare_tensors(first, second, rtol, atol, max_diffs)
    if not differences:
        return ""
    path = Path(path1)
    name, _, number = path.name.rpartition(".")
    step = path.parent.name
    at = f" at step={step.removeprefix(_STEP)}" if step.startswith(_STEP) else ""
    lines = [f'Changes in saved tensor "{name}" with id={number}{at}', *differences.splitlines()]
    return "\n  ".join(lines) + "\n"


def compare_tensors(
    tensor1: torch.Tensor,
    tensor2: torch.Tensor,
    rtol: float = RTOL,
    atol: float = ATOL,
    max_diffs: int = MAX_DIFFS,
) -> str:
    """The elements in which two CPU tensors differ, largest difference first; empty if there are none.

    Two elements differ if they are further apart than ``atol`` (default: 1e-8) and than ``rtol`` (default: 1e-5)
    times the larger magnitude, or if only one of them is NaN. At most ``max_diffs`` (default: 25) are listed.
    """
    if tensor1.shape != tensor2.shape:
        return f"Tensors have different shape: {list(tensor1.shape)} vs. {list(tensor2.shape)}\n"
    a, b = _wide(tensor1), _wide(tensor2)
    with np.errstate(invalid="ignore"):
        error = np.abs(a - b)
    error[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0  # infinities, too
    allowed = np.maximum(rtol * np.maximum(np.abs(a), np.abs(b)), atol)
    places = np.flatnonzero((error > allowed) | ~np.isfinite(error))
    order = np.argsort(-np.nan_to_num(error[places], nan=np.inf), kind="stable")
    largest = places[order][:max_diffs]
    lines = []
    for place in largest:
        at = [int(i) for i in np.unravel_index(place, tuple(tensor1.shape))]
        lines.append(
            f"{at}: {tensor1[tuple(at)].item()} vs. {tensor2[tuple(at)].item()}\t"
            f"error={float(error[place])}\n"
        )
    if len(places) > max_diffs:
        lines.append(f"... aborting after {max_diffs} differences\n")
    return "".join(lines)


def _wide(tensor: torch.Tensor) -> np.ndarray:
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    return tensor.detach().to(wide).numpy().reshape(-1)


def _saved(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder of saved tensors")
    files = sorted(p for p in folder.rglob("*.*") if p.is_file() and p.suffix[1:].isdigit())
    return {path.relative_to(folder).as_posix(): path for path in files}
