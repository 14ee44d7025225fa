"""The memory of CPU tensors: which elements a tensor shows, and what it shares with another."""

from __future__ import annotations

import torch


def _positions(t: torch.Tensor) -> torch.Tensor:
    """The element positions in the storage that a CPU tensor shows."""
    end = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return torch.arange(end + 1).as_strided(t.shape, t.stride(), t.storage_offset()).flatten()


def geometry(t: torch.Tensor) -> tuple[object, ...]:
    """Where a CPU tensor lies: equal for tensors that show the same elements in the same order."""
    return t.untyped_storage().data_ptr(), t.shape, t.stride(), t.storage_offset(), t.dtype


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two CPU tensors have one storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements of a CPU tensor are the same memory."""
    return t.numel() > 0 and _positions(t).unique().numel() < t.numel()


def refused_by_torch(t: torch.Tensor) -> bool:
    """Whether PyTorch sees that a CPU tensor overlaps itself: only if a stride is 0."""
    return any(n > 1 and s == 0 for n, s in zip(t.shape, t.stride(), strict=True))


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two CPU tensors have an element in common."""
    if not a.numel() or not b.numel():
        return False
    return same_memory(a, b) and bool(torch.isin(_positions(a), _positions(b)).any())
