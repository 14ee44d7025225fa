"""Work that is new each time: every call has a shape that was not there before, so a program is made.

``python new_work.py SYSTEM`` is what ``new_programs.py`` starts. It answers on stdout, one JSON object per
line, what it reads on stdin: ``KIND FIRST COUNT`` asks for ``COUNT`` calls numbered from ``FIRST``. Runs on
torch 2.9 and later; ``jax`` needs ``new_work_jax.py`` and no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from child import private_stdout

Call = Callable[[int], float]
"""One call, by its number; it waits for its result, which it returns as one number."""

ROWS: Final = 16
WIDTH, HEADS, VOCABULARY = 32, 4, 64


def torch_kinds(device: Any, sync: Callable[[], None]) -> Mapping[str, Call]:
    """The calls on a device of PyTorch's."""
    import torch
    from torch.nn import functional as F

    from models import GPT, ResNet

    torch.manual_seed(0)

    def numbers(*shape: int) -> Any:
        count = torch.Size(shape).numel()
        return torch.linspace(-1.0, 1.0, count).reshape(shape).to(device)

    operators: list[Callable[[Any], Any]] = [
        lambda x: x + x, lambda x: x.exp(), lambda x: x.sum(0), lambda x: x @ x.t(),
        lambda x: x.softmax(-1), lambda x: torch.where(x > 0, x, -x), lambda x: torch.cat([x, x]),
        lambda x: x.t().contiguous(), lambda x: F.layer_norm(x, x.shape[1:]), lambda x: x[1:, ::2] * 2,
    ]  # fmt: skip

    def operator(number: int) -> float:
        x = numbers(ROWS, 8 + number)
        return float(operators[number % len(operators)](x).cpu().double().sum())

    def chain(number: int) -> float:
        return (torch.ones(3 + number, 5 + number, device=device) * 2 + 1.5).sum().item()

    def linear(number: int) -> float:
        weight, bias = numbers(8, 4 + number).requires_grad_(), numbers(8).requires_grad_()
        loss = F.linear(numbers(ROWS, 4 + number), weight, bias).square().mean()
        loss.backward()
        sync()
        return (weight.grad.cpu().sum() + bias.grad.cpu().sum()).item()

    gpt = GPT(vocabulary=VOCABULARY, width=WIDTH, layers=2, heads=HEADS, length=512).to(device)
    resnet = ResNet(8, 10).to(device).eval()
    sync()

    def transformer(number: int) -> float:
        gpt.zero_grad()
        tokens = (torch.arange(4 + number) % VOCABULARY)[None].to(device)
        loss = F.cross_entropy(gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        sync()
        return loss.item()

    def resnet18(number: int) -> float:
        with torch.no_grad():
            return resnet(numbers(1 + number, 3, 16, 16)).sum().item()

    cache: list[tuple[Any, Any]] = []

    def generation(number: int) -> float:
        """One more token: attention of a new query to all keys and values so far."""
        if not cache:
            cache.extend(
                (numbers(1, HEADS, number, 8), numbers(1, HEADS, number, 8)) for _ in (0, 1)
            )
        with torch.no_grad():
            place = torch.full((1, 1), number, device=device)
            x = gpt.tokens(place % VOCABULARY) + gpt.positions(place)
            for layer, block in enumerate(gpt.blocks):
                inner = block.attention
                parts = inner.queries_keys_values(block.norm1(x)).split(WIDTH, dim=2)
                query, key, value = (p.view(1, 1, HEADS, -1).transpose(1, 2) for p in parts)
                keys, values = (torch.cat(p, 2) for p in zip(cache[layer], (key, value)))  # noqa: B905
                cache[layer] = (keys, values)
                y = F.scaled_dot_product_attention(query, keys, values)
                x = x + inner.out(y.transpose(1, 2).reshape(1, 1, WIDTH))
                x = x + block.mlp(block.norm2(x))
            return gpt.head(gpt.norm(x)).sum().item()

    return {
        "operator": operator, "chain": chain, "linear": linear, "transformer": transformer,
        "resnet18": resnet18, "generation": generation,
    }  # fmt: skip


def kinds_of(system: str) -> tuple[Mapping[str, Call], Callable[[], int]]:
    """The calls of a system, and what counts its programs."""
    if system == "jax":
        import new_work_jax

        return new_work_jax.kinds(ROWS, WIDTH, HEADS, VOCABULARY), new_work_jax.programs
    if system == "cpu":
        return torch_kinds("cpu", lambda: None), lambda: 0
    import torch_xla
    import torch_xla.debug.metrics as met

    kinds = torch_kinds(torch_xla.device(), torch_xla.sync)
    return kinds, lambda: int(met.counter_value("UncachedCompile") or 0)


def main() -> None:
    """Answer until stdin ends."""
    answer = private_stdout()
    kinds, programs = kinds_of(sys.argv[1])
    answer({"kinds": list(kinds)})
    for line in sys.stdin:
        kind, first, count = line.split()
        call, before = kinds[kind], programs()
        cpu, wall, values = time.process_time(), time.perf_counter(), []
        for number in range(int(first), int(first) + int(count)):
            values.append(call(number))
        answer({
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.perf_counter() - wall,
            "programs": programs() - before,
            "values": values,
        })  # fmt: skip


if __name__ == "__main__":
    main()
