"""How one parameter is cut into equal parts, one per replica of a sharding group."""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a parameter of shape ``size`` is cut into ``world`` parts, of which this replica has number ``rank``.

    Its elements, or its rows if ``by_rows``, are padded with zeros to a multiple of ``world`` times ``multiple``.
    """

    size: torch.Size
    world: int
    rank: int
    multiple: int
    by_rows: bool

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of shape ``size``, flattened unless ``by_rows``, padded so that dimension 0 splits evenly."""
        if not self.by_rows:
            tensor = tensor.reshape(-1)
        missing = -tensor.size(0) % (self.world * self.multiple)
        if not missing:
            return tensor
        return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing])

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This replica's part of a tensor of shape ``size``, as a copy."""
        return self.padded(tensor).chunk(self.world)[self.rank].clone()

    def full(self, padded: torch.Tensor) -> torch.Tensor:
        """The tensor of shape ``size`` that was padded to ``padded``, as a view."""
        if self.by_rows:
            return padded[: self.size[0]]
        return padded[: self.size.numel()].view(self.size)

    @property
    def rows_of(self) -> tuple[torch.Size, int]:
        """The shape of the whole parameter as it is cut, and the index of the first row of this replica's part."""
        whole = self.size if self.by_rows else torch.Size([self.size.numel()])
        count = -(-whole[0] // (self.world * self.multiple)) * self.multiple
        return whole, self.rank * count
