"""The models that are more than a line of ``nn.Sequential``; runs on torch 2.9 and later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm beside a shortcut (He et al. 2015, figure 2)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, channels_in, H, W) to (N, channels, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class BottleneckBlock(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al. 2015, figure 5); four times wider."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != 4 * channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, 4 * channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(4 * channels),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, channels_in, H, W) to (N, 4 * channels, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet for 32x32 images; ``width`` is the channels of the first stage (64 originally).

    ``blocks`` per stage: (2, 2, 2, 2) is ResNet-18, (3, 4, 6, 3) with ``bottleneck`` ResNet-50.
    """

    def __init__(
        self,
        width: int,
        classes: int,
        blocks: Sequence[int] = (2, 2, 2, 2),
        *,
        bottleneck: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        kind, wider = (BottleneckBlock, 4) if bottleneck else (ResidualBlock, 1)
        made: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                made.append(kind(channels, width * 2**stage, stride))
                channels = width * 2**stage * wider
        self.blocks = nn.Sequential(*made)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (N, classes) of images (N, 3, 32, 32)."""
        x = self.blocks(F.relu(self.norm(self.conv(images))))
        return self.head(x.mean(dim=(2, 3)))


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which each token sees itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, width) to the same shape."""
        batch, length, width = x.shape
        parts = self.queries_keys_values(x).split(width, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    """Attention and a four times wider MLP, each behind its layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions (Radford et al. 2019), without dropout."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (N, T, vocabulary) of int64 tokens (N, T)."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


class LSTMClassifier(nn.Module):
    """An LSTM cell run over the sequence by a Python loop, then a linear layer."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.cell = nn.LSTMCell(features, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        """Logits (N, classes) of sequences (N, T, features)."""
        h = sequence.new_zeros(sequence.size(0), self.hidden)
        c = torch.zeros_like(h)
        for t in range(sequence.size(1)):
            h, c = self.cell(sequence[:, t], (h, c))
        return self.head(h)
