"""Steps of many lengths: programs and time with ``XLA_VARYING_SHAPES=1`` and without.

``python benchmarks/varying_lengths.py`` trains a small GPT and a BERT classifier on batches of random lengths from
8 to 512, and lets a small Llama (all of Hugging Face, from configurations) write 128 tokens, greedily and by beam
search. Each workload runs in new processes: with varying shapes, without, and on PyTorch's CPU. The table has the
programs that were compiled, those after the first three lengths, the processor time of the whole loop, and whether
losses or tokens are those of the CPU. ``--steps`` and ``--tokens`` make it shorter. The exit status is 1 if
something differs from the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from child import private_stdout

WORKLOADS: Final = ("gpt", "bert", "greedy", "beam")
VARIANTS: Final[dict[str, dict[str, str]]] = {
    "varying": {"XLA_VARYING_SHAPES": "1"},
    "exact": {"XLA_VARYING_SHAPES": "0"},
    "cpu": {},
}
WORDS: Final = 128
SHORTEST, LONGEST, BATCH = 8, 512, 4
SIZES: Final[dict[str, Any]] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def gpt() -> torch.nn.Module:
    """A GPT-2 of two layers."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LONGEST, n_embd=64, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> torch.nn.Module:
    """A BERT classifier of two layers."""
    config = transformers.BertConfig(
        **SIZES, intermediate_size=128, max_position_embeddings=LONGEST,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 3
    return transformers.BertForSequenceClassification(config)


def llama() -> torch.nn.Module:
    """A Llama of two layers."""
    config = transformers.LlamaConfig(
        **SIZES, intermediate_size=128, num_key_value_heads=2, max_position_embeddings=LONGEST,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def batches(kind: str, steps: int) -> list[dict[str, torch.Tensor]]:
    """Batches of random lengths; those of BERT are padded to their longest sequence."""
    draw = random.Random(0)
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        length = draw.randint(SHORTEST, LONGEST)
        words = torch.randint(0, WORDS, (BATCH, length))
        if kind == "gpt":
            found.append({"input_ids": words, "labels": words})
        else:
            ends = torch.randint(SHORTEST, length + 1, (BATCH, 1))
            ends[0] = length
            mask = (torch.arange(length)[None] < ends).long()
            found.append({"input_ids": words, "attention_mask": mask, "labels": words[:, 0] % 3})
    return found


def train(kind: str, device: str, steps: int) -> dict[str, Any]:
    """Losses of a training loop, and how many programs there were after each step."""
    torch.manual_seed(0)
    model = (gpt() if kind == "gpt" else bert()).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, programs = [], []
    for batch in batches(kind, steps):
        optimizer.zero_grad()
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        synced(device)
        losses.append(loss.detach())
        programs.append(compiled(device))
    return {"result": [loss.item() for loss in losses], "programs": programs}


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


def measure(workload: str, variant: str, count: int) -> dict[str, Any]:
    """The figures of this process, which has run nothing before."""
    device = "cpu" if variant == "cpu" else "xla"
    synced(device)
    began, cpu = time.perf_counter(), time.process_time()
    run = train if workload in {"gpt", "bert"} else generate
    found = run(workload, device, count)
    found["seconds"], found["cpu"] = time.perf_counter() - began, time.process_time() - cpu
    if variant == "varying":
        from xla_core.varying import families

        found["kept out"] = families.kept_out()
    return found


def child(workload: str, variant: str, count: int) -> dict[str, Any]:
    """The figures of a new process."""
    found = subprocess.run(
        [sys.executable, __file__, "--child", workload, variant, "--count", str(count)],
        env={**os.environ, **VARIANTS[variant]},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise RuntimeError(f"{workload} {variant}: {found.stderr[-3000:]}")
    result: dict[str, object] = json.loads(found.stdout.splitlines()[-1])
    return result


def same(found: Any, wanted: Any) -> bool:
    """Whether losses are near each other, or tokens equal."""
    if isinstance(found[0], float):
        return all(
            abs(a - b) <= 2e-3 * max(1.0, abs(b)) for a, b in zip(found, wanted, strict=True)
        )
    return bool(found == wanted)


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--variant", action="append", choices=("varying", "exact"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        answer = private_stdout()
        workload, variant = args.child
        answer(measure(workload, variant, args.count))
        return 0
    results: dict[str, object] = {}
    differ = False
    print("| workload | | programs | after three lengths | seconds | processor | as the CPU |")
    print("|---|---|---|---|---|---|---|")
    for workload in args.workload or WORKLOADS:
        count = args.steps if workload in {"gpt", "bert"} else args.tokens
        wanted = child(workload, "cpu", count)
        for variant in args.variant or ("varying", "exact"):
            found = child(workload, variant, count)
            equal = same(found["result"], wanted["result"])
            differ |= not equal
            programs = found["programs"]
            later = programs[-1] - programs[2] if len(programs) > 3 else programs[-1] - programs[0]
            results[f"{workload} {variant}"] = {**found, "result": None, "equal": equal}
            print(
                f"| {workload} | {variant} | {programs[-1]} | {later} | {found['seconds']:.1f} "
                f"| {found['cpu']:.1f} | {'yes' if equal else 'NO'} |", flush=True,
            )  # fmt: skip
            for reason in found.get("kept out", ()):
                print(f"kept out: {reason}", file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
