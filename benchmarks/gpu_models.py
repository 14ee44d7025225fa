"""The models that GPUs are measured with: GPT-2 medium, BERT-base and ResNet-50, and tiny ones of the same code.

Their sizes are those of the papers. Weights, optimizer state and activations are bfloat16 throughout, so that every
system computes the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F

from models import GPT, BottleneckBlock

CLASSES: Final = 1000


@dataclasses.dataclass(frozen=True)
class Size:
    """A workload: ``family`` is gpt, bert or resnet; ``length`` counts tokens, or pixels of an edge."""

    family: str
    batch: int
    length: int
    width: int
    layers: int
    heads: int
    vocabulary: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def items(self) -> int:
        """What one step takes: tokens, or images."""
        return self.batch if self.family == "resnet" else self.batch * self.length


SIZES: Final[Mapping[str, Size]] = {
    "gpt": Size("gpt", 8, 1024, 1024, 24, 16, 50304),
    "bert": Size("bert", 32, 512, 768, 12, 12, 30522),
    "resnet": Size("resnet", 128, 224, 64, 0, 0, 0),
}
TINY: Final[Mapping[str, Size]] = {
    "gpt": Size("gpt", 2, 8, 16, 2, 2, 32, torch.float32),
    "bert": Size("bert", 2, 8, 16, 2, 2, 32, torch.float32),
    "resnet": Size("resnet", 8, 64, 4, 0, 0, 0, torch.float32),
}


class EncoderLayer(nn.Module):
    """Attention and a four times wider MLP, each with its layer norm behind (Devlin et al. 2018)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, width) to the same shape; each token sees all."""
        parts = self.queries_keys_values(x).chunk(3, dim=2)
        query, key, value = (p.unflatten(2, (self.heads, -1)).transpose(1, 2) for p in parts)
        seen = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(seen))
        return self.norm2(x + self.narrow(F.gelu(self.wide(x))))


class Bert(nn.Module):
    """An encoder with learned positions that says every token (masked language modelling), without dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.norm = nn.LayerNorm(size.width)
        self.blocks = nn.Sequential(
            *(EncoderLayer(size.width, size.heads) for _ in range(size.layers))
        )
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (N, T, vocabulary) of int64 tokens (N, T)."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.norm(self.tokens(tokens) + self.positions(positions))
        return self.head(self.blocks(x))


class ResNet50(nn.Module):
    """ResNet-50 (He et al. 2015) for images of any size; ``width`` is 64 there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        made: list[nn.Module] = []
        channels = width
        for stage, count in enumerate((3, 4, 6, 3)):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                made.append(BottleneckBlock(channels, width * 2**stage, stride))
                channels = 4 * width * 2**stage
        self.blocks = nn.Sequential(*made)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (N, 1000) of images (N, 3, H, W)."""
        x = F.max_pool2d(F.relu(self.norm(self.conv(images))), 3, stride=2, padding=1)
        return self.head(self.blocks(x).mean(dim=(2, 3)))


def model_of(size: Size) -> nn.Module:
    """The model on the CPU, from seed 0, in the workload's dtype."""
    torch.manual_seed(0)
    if size.family == "resnet":
        made: nn.Module = ResNet50(size.width)
    elif size.family == "bert":
        made = Bert(size)
    else:
        made = GPT(size.vocabulary, size.width, size.layers, size.heads, size.length)
    return made.to(size.dtype).train()


def batch_of(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels on the CPU, from seed 1."""
    source = torch.Generator().manual_seed(1)
    if size.family == "resnet":
        images = torch.randn(size.batch, 3, size.length, size.length, generator=source)
        return images.to(size.dtype), torch.randint(CLASSES, (size.batch,), generator=source)
    shape = (size.batch, size.length)
    tokens = torch.randint(size.vocabulary, shape, generator=source)
    return tokens, tokens.roll(-1, 1) if size.family == "gpt" else tokens


def loss_of(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in float32."""
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())
