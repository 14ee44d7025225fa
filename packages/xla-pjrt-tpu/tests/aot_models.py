"""Models, and one training step of each traced for a TPU; the tests compile its program for others."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from xla_core.extension_api.programs import all_programs, program_figures


class DigitNet(nn.Module):
    """The network of examples/train_digits.py for images of 8x8."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, images):
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = self.dropout(F.max_pool2d(x, 2).flatten(1))
        return self.out(F.relu(self.hidden(x)))


class Residual(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18():
    """ResNet-18 (He et al. 2015) with the stem for images of 32x32; 11 M parameters."""
    layers = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    channels = 64
    for stage in range(4):
        for number in range(2):
            stride = 2 if stage and not number else 1
            layers.append(Residual(channels, 64 * 2**stage, stride))
            channels = 64 * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        n, t, d = x.shape
        parts = self.qkv(self.norm1(x)).split(d, dim=2)
        q, k, v = (p.view(n, t, self.heads, d // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, vocabulary, width, layers, heads, length):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


def mlp():
    """Two layers of 2048 and 8192 units: small enough to compile fast, and little but weights."""
    return nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048))


def with_state(optimizer):
    """Give an optimizer the state that its first step makes, so that the step is a later one."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[parameter]
        if isinstance(optimizer, torch.optim.Adam):
            state["step"] = torch.tensor(1.0)
            state["exp_avg"], state["exp_avg_sq"] = shape(*parameter.shape), shape(*parameter.shape)
        elif optimizer.defaults["momentum"]:
            state["momentum_buffer"] = shape(*parameter.shape)
    return optimizer


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1))


def step(model, optimizer, inputs, targets, loss_of=cross_entropy):
    """One training step as compiled for the topology in use; its figures by the report."""
    model.to_empty(device="xla")
    optimizer = with_state(optimizer(model.parameters()))
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    made = all_programs()[-1]
    assert made.inputs == made.program.inputs
    state = [t for s in optimizer.state.values() for t in s.values() if t.device.type == "xla"]
    kept = [*model.parameters(), *model.buffers(), *state]
    return (
        made,
        program_figures()[-1],
        sum(t.numel() * t.element_size() for t in kept),
    )


def shape(*sizes, dtype=torch.float32):
    return torch.empty(sizes, dtype=dtype, device="meta").to("xla")


def training_step(name):
    """The program of one model's training step, its figures, and the bytes of all that it updates.

    Models, data and optimizers' states are shapes only; ``digits`` is examples/train_digits.py's step.
    """
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    if name == "digits":
        model, optimizer = on_meta(DigitNet), functools.partial(torch.optim.Adam, lr=1e-3)
        return step(model, optimizer, shape(64, 1, 8, 8), shape(64, dtype=torch.int64))
    if name == "resnet18":
        image, label = shape(1, 3, 32, 32), shape(1, dtype=torch.int64)
        return step(on_meta(resnet18), sgd, image, label)
    if name == "gpt":
        tokens, targets = (shape(8, 64, dtype=torch.int64) for _ in range(2))
        return step(on_meta(GPT, 512, 128, 4, 4, 64), sgd, tokens, targets)
    assert name == "mlp"
    momentum = functools.partial(sgd, momentum=0.9)
    return step(on_meta(mlp), momentum, shape(512, 2048), shape(512, 2048), F.mse_loss)


def on_meta(make, *arguments):
    with torch.device("meta"):
        return make(*arguments)
