"""Steps of many lengths: programs and time where they share programs, and where they do not.

``python benchmarks/varying_lengths.py`` trains a small GPT and a BERT classifier on batches of random lengths from
8 to 512, and lets a small Llama (of Hugging Face, from a configuration) write 128 tokens, greedily and by beam
search. Each variant runs in a new process: as it is if nothing is set (``default``), with ``XLA_VARYING_SHAPES=1``
(``asked``), with a program for each length (``exact``), with lengths padded to buckets by hand (``buckets``), and,
where ``TORCH_XLA_PYTHON`` names an interpreter that has it, on the official torch_xla. ``--steps`` and ``--tokens``
make it shorter; variants that compile a program for each length take ``--slow-steps`` batches only, or as many as
they can in ``--slow-minutes``, and the others are given after so many, too. The table has the programs that were
compiled, those after the first three lengths, wall and processor time of the loop, and whether losses or tokens are
those of PyTorch's CPU.

``--bound`` measures instead what a program for all lengths costs at its longest, beside the program for that length
alone: two processes, which take turns. ``--fixed`` measures so what the feature costs where nothing varies: steps
of one length, as it is by default beside ``XLA_VARYING_SHAPES=0``.

The exit status is 1 if something differs from the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from child import private_stdout
from models import GPT

WORKLOADS: Final = ("gpt", "bert", "greedy", "beam")
TRAINED: Final = ("gpt", "bert")
VARIANTS: Final[dict[str, dict[str, str]]] = {
    "default": {"XLA_VARYING_SHAPES": "auto"},
    "asked": {"XLA_VARYING_SHAPES": "1"},
    "exact": {"XLA_VARYING_SHAPES": "0"},
    "buckets": {"XLA_VARYING_SHAPES": "0"},
    "torch_xla": {"PJRT_DEVICE": "CPU"},
    "cpu": {},
}
SHARING: Final = ("default", "asked")
"""Variants in which lengths share programs."""
SLOW: Final = ("exact", "torch_xla")
"""Variants that compile a program for each length."""
WORDS: Final = 128
SHORTEST, LONGEST, BATCH = 8, 512, 2
WIDTH, HEADS, LAYERS = 32, 2, 2
BUCKETS: Final = (64, 96, 128, 192, 256, 384, 512)
IGNORED: Final = -100


class Bert(nn.Module):
    """A transformer that sees both ways, and classifies by its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits (N, 3) of tokens (N, T), of which those count where ``mask`` is 1."""
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        return self.head(self.blocks(x, src_key_padding_mask=mask == 0)[:, 0])


def model_of(kind: str) -> nn.Module:
    """A model of two layers."""
    return GPT(WORDS, WIDTH, LAYERS, HEADS, LONGEST) if kind == "gpt" else Bert()


def loss_of(kind: str, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch: of the next tokens, or of a class."""
    if kind == "gpt":
        scores = model(batch["words"][:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"][:, 1:].flatten())
    return F.cross_entropy(model(batch["words"], batch["mask"]), batch["labels"])


def llama() -> Any:
    """A Llama of two layers."""
    import transformers  # which the environment of torch_xla has not

    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=128, num_key_value_heads=2, max_position_embeddings=LONGEST,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def batch_of(kind: str, length: int) -> dict[str, torch.Tensor]:
    """A batch of one length; that of BERT is padded to its longest sequence."""
    words = torch.randint(0, WORDS, (BATCH, length))
    if kind == "gpt":
        return {"words": words, "labels": words}
    ends = torch.randint(SHORTEST, length + 1, (BATCH, 1))
    ends[0] = length
    mask = (torch.arange(length)[None] < ends).long()
    return {"words": words, "mask": mask, "labels": words[:, 0] % 3}


def batches(kind: str, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of random lengths."""
    draw = random.Random(0)
    torch.manual_seed(1)
    for _ in range(steps):
        yield batch_of(kind, draw.randint(SHORTEST, LONGEST))


def in_bucket(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch padded to the next bucket: tokens and masks by zeros, labels by what losses leave out."""
    length = batch["words"].shape[1]
    missing = min(bucket for bucket in BUCKETS if bucket >= length) - length
    return {
        name: F.pad(value, (0, missing), value=IGNORED if name == "labels" else 0)
        if value.dim() == 2
        else value
        for name, value in batch.items()
    }


def trainer(kind: str, device: str) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    """A function that takes one step of training with a batch, and gives its loss."""
    torch.manual_seed(0)
    model = model_of(kind).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(kind, model, {name: value.to(device) for name, value in batch.items()})
        loss.backward()
        optimizer.step()
        synced(device)
        return loss.detach()

    return step


def train(kind: str, device: str, steps: int, buckets: bool, most: float) -> dict[str, Any]:
    """Losses of a training loop of ``most`` seconds, and how many programs there were after each step."""
    step = trainer(kind, device)
    losses, programs, times = [], [], []
    began, cpu = time.perf_counter(), time.process_time()
    for batch in batches(kind, steps):
        losses.append(step(in_bucket(batch) if buckets else batch))
        programs.append(compiled(device))
        times.append((time.perf_counter() - began, time.process_time() - cpu))
        if times[-1][0] > most:
            break
    return {"result": [loss.item() for loss in losses], "programs": programs, "times": times}


def take_turns(kind: str, variant: str, length: int, answer: Any) -> None:
    """Answer each line of stdin, a number of steps, with the processor and wall seconds that they took.

    With the variant ``asked`` two shorter lengths come first, so that the program is one for a bound.
    """
    step = trainer(kind, "xla")
    torch.manual_seed(1)
    before = (length // 3, length // 2) if variant == "asked" else ()
    for one in (*before, length, length):
        step(batch_of(kind, one))
    batch = batch_of(kind, length)
    step(batch).item()
    answer({"programs": compiled("xla")})
    for line in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            loss = step(batch)
        loss.item()
        answer({"cpu": time.process_time() - cpu, "seconds": time.perf_counter() - began})


def generate(kind: str, device: str, tokens: int) -> dict[str, Any]:
    """Tokens that a Llama writes, and how many programs there were before and after."""
    torch.manual_seed(0)
    model = llama().to(device)
    prompt = torch.randint(2, WORDS, (2, 9), generator=torch.Generator().manual_seed(2)).to(device)
    synced(device)
    before = compiled(device)
    beams = {"num_beams": 3} if kind == "beam" else {}
    with torch.no_grad():
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            do_sample=False,
            **beams,
        )
    return {"result": written.cpu().tolist(), "programs": [before, compiled(device)]}


def synced(device: str) -> None:
    """End a step."""
    if device == "xla":
        import torch_xla

        torch_xla.sync()


def compiled(device: str) -> int:
    """How many programs this process has compiled."""
    if device != "xla":
        return 0
    import torch_xla.debug.metrics as met

    return int(met.counter_value("UncachedCompile") or 0)


def measure(workload: str, variant: str, count: int, most: float) -> dict[str, Any]:
    """The figures of this process, which has run nothing before; training ends after ``most`` seconds."""
    device = "cpu" if variant == "cpu" else "xla"
    synced(device)
    began, cpu = time.perf_counter(), time.process_time()
    if workload in TRAINED:
        figures = train(workload, device, count, variant == "buckets", most)
    else:
        figures = generate(workload, device, count)
    figures["seconds"], figures["cpu"] = time.perf_counter() - began, time.process_time() - cpu
    if variant in SHARING:
        from xla_core.extension_api.programs import kept_from_varying

        figures["kept out"] = kept_from_varying()
    return figures


def command(kind: str, workload: str, variant: str, count: int) -> dict[str, Any]:
    """How a process of a variant is started."""
    official = variant == "torch_xla"
    python = os.environ["TORCH_XLA_PYTHON"] if official else sys.executable
    # what this interpreter imports is not what the other one has to
    kept = {k: v for k, v in os.environ.items() if not (official and k == "PYTHONPATH")}
    return {
        "args": [python, __file__, f"--{kind}", workload, variant, "--count", str(count)],
        "env": {**kept, **VARIANTS[variant]},
        "text": True,
    }


def child(workload: str, variant: str, count: int, most: float = math.inf) -> dict[str, Any]:
    """The figures of a new process, which trains for ``most`` seconds at most (default: however long it takes)."""
    started = command("child", workload, variant, count)
    started["args"] += ["--most-seconds", str(most)]
    process = subprocess.run(**started, capture_output=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{workload} {variant}: {process.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def same(results: Any, wanted: Any) -> bool:
    """Whether losses are near each other, or tokens equal."""
    if isinstance(results[0], float):
        return all(
            abs(a - b) <= 2e-3 * max(1.0, abs(b)) for a, b in zip(results, wanted, strict=False)
        )
    return bool(results == wanted)


def compare(workloads: list[str], variants: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run and print all variants of all workloads."""
    results: dict[str, Any] = {}
    print(
        "| workload | batches, tokens | | programs | after three lengths | seconds | processor | as the CPU |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for workload in workloads:
        count = args.steps if workload in TRAINED else args.tokens
        wanted = child(workload, "cpu", count)
        stops: list[int] = []  # after how many batches slow variants did
        for variant in sorted(variants, key=lambda one: one not in SLOW):
            if variant in ("buckets", "torch_xla") and workload not in TRAINED:
                continue
            slow = variant in SLOW and workload in TRAINED
            taken = min(count, args.slow_steps) if slow else count
            most = 60 * args.slow_minutes if slow else math.inf
            figures = child(workload, variant, taken, most)
            equal = same(figures["result"], wanted["result"])
            programs, times = figures["programs"], figures.pop("times", [])
            taken = len(times) or taken
            stops += [taken] if slow else []
            ends = [(stop, *times[stop - 1]) for stop in sorted(set(stops)) if stop < taken]
            ends.append((taken, figures["seconds"], figures["cpu"]))
            figures["after"] = []
            for end, seconds, cpu in ends:
                count_then = programs[end - 1] if workload in TRAINED else programs[-1]
                later = count_then - (programs[2] if len(programs) > 3 else programs[0])
                figures["after"].append([end, count_then, later, seconds, cpu])
                print(
                    f"| {workload} | {end} | {variant} | {count_then} | {later} | {seconds:.1f} "
                    f"| {cpu:.1f} | {'yes' if equal else 'NO'} |", flush=True,
                )  # fmt: skip
            figures["programs"] = programs[:: max(1, len(programs) // 20)]
            results[f"{workload} {variant}"] = {**figures, "result": None, "equal": equal}
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
            for reason in figures.get("kept out", ()):
                print(f"kept out: {reason}", file=sys.stderr, flush=True)
        print(
            f"| {workload} | {count} | cpu | | | {wanted['seconds']:.1f} | {wanted['cpu']:.1f} | |"
        )
    return results


def in_turns(workloads: list[str], variant: str, rounds: int) -> dict[str, Any]:
    """Print what a step takes with ``variant``, as part of what it takes with a program for its length alone.

    With ``asked`` that is a step of a bound's full length.
    """
    results: dict[str, Any] = {}
    print("| workload | length | processor | wall |")
    print("|---|---|---|---|")
    for workload in workloads:
        for length, steps in ((96, 20), (LONGEST, 4)):
            pair = {
                one: subprocess.Popen(
                    **command("turns", workload, one, length),
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )
                for one in (variant, "exact")
            }  # fmt: skip
            for process in pair.values():
                json.loads(_answer(process, ""))
            ratios = []
            for number in range(rounds):
                # each begins every other time
                turns = list(pair)[:: 1 if number % 2 else -1]
                took = {one: json.loads(_answer(pair[one], f"{steps}\n")) for one in turns}
                exact = took["exact"]
                ratios.append({name: took[variant][name] / exact[name] for name in exact})
            for process in pair.values():
                process.communicate()
            middle = {name: statistics.median(r[name] for r in ratios) for name in ratios[0]}
            results[f"{workload} {length}"] = middle
            print(
                f"| {workload} | {length} | {middle['cpu']:.3f} | {middle['seconds']:.3f} |",
                flush=True,
            )
    return results


def _answer(process: subprocess.Popen[str], question: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(question)
    process.stdin.flush()
    return process.stdout.readline()


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--variant", action="append", choices=[v for v in VARIANTS if v != "cpu"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--slow-steps", type=int, default=60)
    parser.add_argument("--slow-minutes", type=float, default=math.inf)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--bound", action="store_true", help="paired step times at the bound")
    parser.add_argument("--fixed", action="store_true", help="paired step times of one length")
    parser.add_argument("--rounds", type=int, default=15, help="of --bound and --fixed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--turns", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--most-seconds", type=float, default=math.inf, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child or args.turns:
        answer = private_stdout()
        workload, variant = args.child or args.turns
        if args.child:
            answer(measure(workload, variant, args.count, args.most_seconds))
        else:
            take_turns(workload, variant, args.count, answer)
        return 0
    if args.bound or args.fixed:
        variant = "asked" if args.bound else "default"
        results = in_turns(args.workload or list(TRAINED), variant, args.rounds)
    else:
        usual = [v for v in VARIANTS if v != "cpu"]
        if "TORCH_XLA_PYTHON" not in os.environ:
            usual.remove("torch_xla")
        results = compare(args.workload or list(WORKLOADS), args.variant or usual, args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return int(not all(figures.get("equal", True) for figures in results.values()))


if __name__ == "__main__":
    sys.exit(main())
