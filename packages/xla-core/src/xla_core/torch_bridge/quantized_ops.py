"""Loads PyTorch's operators ``quantized_decomposed``, which its own quantizer defines where it is imported."""

from __future__ import annotations

import torch.ao.quantization.fx._decomposed as _decomposed

# torch 2.9 to 2.13
quantize_per_channel = _decomposed.quantize_per_channel
