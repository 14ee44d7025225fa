"""``torch.inference_mode()``: views and writes of normal and inference tensors, as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from xla_core.testing import against_cpu

OPERATIONS = {
    "slice": lambda x: x[1:],
    "select": lambda x: x[0],
    "view": lambda x: x.view(-1),
    "t": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x[:1].squeeze(0),
    "expand": lambda x: x.unsqueeze(0).expand(2, 3, 4),
    "split": lambda x: x.split(1)[1],
    "chunk": lambda x: x.chunk(2)[0],
    "unbind": lambda x: x.unbind()[2],
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 1)),
    "reshape": lambda x: x.reshape(4, 3),
    "flatten": lambda x: x.flatten(),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": lambda x: torch.ops.aten.alias(x),
    "view of view": lambda x: x[1:].t()[0],
    "real": lambda x: torch.view_as_real(torch.view_as_complex(x.view(3, 2, 2))),
    "to itself": lambda x: x.to(torch.float32),
    "contiguous": lambda x: x.contiguous(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "add_": lambda x: x.add_(1),
    "add_ to view": lambda x: x[0].add_(1),
    "setitem": lambda x: x.__setitem__((slice(None), 1), 5.0) or x,
    "fill_": lambda x: x.fill_(3),
    "copy_": lambda x: x.copy_(torch.ones(3, 4)),
    "out": lambda x: torch.add(x, 1, out=x),
    "foreach": lambda x: (torch._foreach_add_([x], 1), x)[1],
    "set_": lambda x: x.set_(torch.ones(2, device=x.device)),
    "clone": lambda x: x.clone(),
    "index": lambda x: x[torch.tensor([2, 0])],
    "matmul": lambda x: x @ x.t(),
}
PLACES = ["made outside", "made inside", "from a gradient"]


def attempt(operation, made, inside, device):
    """What the operation returns and does to its operand, or its error."""
    with torch.inference_mode(made == "made inside"):
        x = torch.arange(12.0, device=device).reshape(3, 4) + 0
        if made == "from a gradient":
            x = (x.requires_grad_() * 1).add(0)
    try:
        with torch.inference_mode(inside):
            result = operation(x)
    except RuntimeError as error:
        return "error", str(error).splitlines()[0]
    with torch.no_grad():
        facts = [result.is_inference(), x.is_inference(), result is x]
        if not x.is_inference():
            facts.append(x._version)
        return facts, result.detach().tolist(), x.detach().tolist()


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("made", PLACES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_does_what_it_does_on_the_cpu(name, made, inside):
    expected = attempt(OPERATIONS[name], made, inside, "cpu")
    assert attempt(OPERATIONS[name], made, inside, "xla") == expected


class Encoder(nn.Module):
    """BERT in small: embeddings with a buffer of positions, attention by heads, a pooler, a mask."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.register_buffer("positions", torch.arange(6).expand(1, -1))
        self.qkv = nn.Linear(8, 24)
        self.norm, self.out, self.pooler = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids, mask):
        x = self.norm(self.words(ids) + self.places(self.positions[:, : ids.shape[1]]))
        q, k, v = (part.view(*ids.shape, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(mixed.transpose(1, 2).reshape(*ids.shape, 8))
        return torch.tanh(self.pooler(x[:, 0]))


def test_an_encoder_like_bert():
    torch.manual_seed(0)
    model = Encoder().eval()
    ids, mask = (
        torch.tensor([[1, 5, 7, 2], [3, 9, 0, 0]]),
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    )
    with torch.inference_mode():
        expected = model(ids, mask)
    model.to("xla")
    with torch.inference_mode():
        got = model(ids.to("xla"), mask.to("xla"))
        assert got.is_inference()
    torch.testing.assert_close(got.cpu(), expected)
    # the parameters are what they were: they learn after an evaluation
    model(ids.to("xla"), mask.to("xla")).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_view_made_inside_is_no_part_of_a_later_graph():
    for device in ("cpu", "xla"):
        x = torch.ones(3, device=device, requires_grad=True) * 2
        with torch.inference_mode():
            view = x[1:]
        with pytest.raises(RuntimeError, match="inference mode"):
            view.add_(1)
        x.sum().backward()


def test_one_hot_asks_the_cpu_for_nothing():
    with torch.inference_mode(), against_cpu.fallbacks() as ran_on_cpu:
        found = torch.nn.functional.one_hot(torch.tensor([1, 0], device="xla"), 3)
        assert found.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert not ran_on_cpu
