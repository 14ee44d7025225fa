"""Training as the users of accelerate and of transformers' Trainer write it; what each process found.

The scripts are the same for any number of processes, and so are the batches of a step, which the
processes share: their losses, weights and metrics are those of one process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import accelerate
import numpy as np
import torch
import transformers
from accelerate.commands import accelerate_cli
from accelerate.utils import DataLoaderConfiguration, broadcast, broadcast_object_list, set_seed
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.experimental.capture import capture
from xla_core.support import counters
from xla_dist.processes import launching

BATCH = 8


def examples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1))


def accelerated(index, folder):
    """Everything of an Accelerator: what it trained to, and what it gave again after ``load_state``."""
    shared = DataLoaderConfiguration(split_batches=True)
    run = accelerate.Accelerator(gradient_accumulation_steps=2, dataloader_config=shared)
    assert (run.process_index, run.num_processes) == (index, xr.world_size())
    set_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    training = DataLoader(examples(32, 1), batch_size=BATCH)
    model, optimizer, training, schedule = run.prepare(model, optimizer, training, schedule)
    everything = (run, model, optimizer, training, schedule)
    found = {"losses": epoch(*everything)}
    run.save_state(folder)
    found["losses"] += epoch(*everything)
    found["metrics"] = metrics(run, model)
    weights = run.unwrap_model(model).state_dict()
    found["weights"] = torch.cat([w.cpu().flatten() for w in weights.values()]).tolist()
    run.load_state(folder)
    found["losses again"] = epoch(*everything)
    utilities(run, index)
    before = counters.all_counters().get("CapturedStepReplayed", 0)
    assert whole_steps(run, captured=True) == whole_steps(run, captured=False)
    # of 12, without the warm-up and the two that are recorded
    assert counters.all_counters()["CapturedStepReplayed"] - before == 9
    run.end_training()
    return found


def whole_steps(run, captured):
    """Losses and learning rates of three epochs whose steps, with the schedule's, are one function each."""
    set_seed(4)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Dropout(0.25), torch.nn.Linear(8, 3)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    training = DataLoader(examples(32, 1), batch_size=BATCH)
    model, optimizer, training, schedule = run.prepare(model, optimizer, training, schedule)

    def step(inputs, labels):
        loss = functional.cross_entropy(model(inputs), labels)
        run.backward(loss)
        run.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    step = capture(step) if captured else step
    found = []
    for _ in range(3):
        found += [step(*batch).item() for batch in training]
        found.append(schedule.get_last_lr()[0])
    return found


def epoch(run, model, optimizer, training, schedule):
    """One pass over the training data; losses and norms of the gradients."""
    losses = []
    for inputs, labels in training:
        with run.accumulate(model):
            loss = functional.cross_entropy(model(inputs), labels, reduction="sum") / BATCH
            run.backward(loss * run.num_processes)  # accelerate takes the mean over the processes
            if run.sync_gradients:
                norm = run.clip_grad_norm_(model.parameters(), 0.5)
                losses.append(norm.item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(run.reduce(loss.detach(), "sum").item())
    return [*losses, schedule.get_last_lr()[0]]


def metrics(run, model):
    """Labels and predictions of 21 samples, of which no batch size of several processes is a part."""
    evaluation = run.prepare(DataLoader(examples(21, 2), batch_size=BATCH))
    found = []
    model.eval()
    for inputs, labels in evaluation:
        with torch.no_grad():
            both = run.gather_for_metrics((model(inputs).argmax(1), labels))
        found += torch.stack(both, 1).tolist()
    model.train()
    assert len(found) == 21
    return found


def flattened(parts):
    return [item for part in parts for item in part]


def utilities(run, me):
    """What else the processes tell each other with."""
    world, ordinals = run.num_processes, list(range(run.num_processes))
    mine = torch.full((2,), float(me), device=run.device)
    assert run.gather(mine).tolist() == [float(o) for o in ordinals for _ in range(2)]
    assert run.reduce(mine, "sum").tolist() == [float(sum(ordinals))] * 2
    assert run.reduce(mine, "mean").tolist() == [sum(ordinals) / world] * 2
    assert broadcast(mine, from_process=world - 1).tolist() == [world - 1.0] * 2
    objects = [{"of": me}, me]
    broadcast_object_list(objects, from_process=world - 1)
    assert objects == [{"of": world - 1}, world - 1]
    assert run.pad_across_processes(mine[: 1 + me % 2]).shape == (min(world, 2),)
    with run.split_between_processes(list(range(10))) as part:
        assert xm.mesh_reduce("parts", part, flattened) == list(range(10))
    with run.main_process_first():
        pass
    run.wait_for_everyone()
    if me == world - 1:
        run.set_trigger()
    assert run.check_trigger()
    assert xm.all_reduce("sum", mine[:1]).item() == sum(ordinals)


class Texts(torch.utils.data.Dataset):
    """Sentences of tokens at random, each to be predicted from those before it."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 16, (count, 6), generator=generator).sort(1).values

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def trained(index, folder):
    """transformers' Trainer: trained, evaluated, and resumed from the middle."""
    transformers.logging.set_verbosity_error()
    first = trainer(folder)
    first.train()
    found = {
        key: [log[key] for log in first.state.log_history if key in log]
        for key in ("loss", "grad_norm")
    }
    # of 21 samples, of which no batch size of several processes is a part
    found["accuracy"] = [first.evaluate()["eval_accuracy"]]
    found["weights"] = weights_of(first.model)
    again = trainer(folder)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    found["weights again"] = weights_of(again.model)
    assert first.args.world_size == xr.world_size()
    assert first.args.process_index == index
    return found


def weights_of(model):
    return torch.cat([w.detach().cpu().flatten() for w in model.parameters()])[::5].tolist()


def trainer(folder):
    """A Trainer of a tiny GPT-2 with weights at random."""
    transformers.set_seed(5)
    shape = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=BATCH // xr.world_size(), max_steps=3,
        per_device_eval_batch_size=BATCH // xr.world_size(), learning_rate=0.01, logging_steps=1,
        save_steps=2, report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    return transformers.Trainer(
        transformers.GPT2LMHeadModel(shape), arguments, train_dataset=Texts(32, 1),
        eval_dataset=Texts(21, 2), compute_metrics=accuracy,
    )  # fmt: skip


def accuracy(prediction):
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(np.mean(right))}


def both(index, folder):
    """An Accelerator's run and a Trainer's, in one launch."""
    return {**accelerated(index, f"{folder}/state"), "trainer": trained(index, f"{folder}/trainer")}


CONFIGURATION = """
compute_environment: LOCAL_MACHINE
distributed_type: XLA
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: false
tpu_use_cluster: false
"""
SCRIPT = """
import json, sys
import dist_accelerate, torch_xla.runtime as xr

def main():
    index, world, folder = xr.global_ordinal(), xr.world_size(), sys.argv[1]
    with open(f"{folder}/process {index} of {world}", "w") as file:
        json.dump(dist_accelerate.both(index, f"{folder}/{world}"), file)
"""


def launches(_index, folder):
    """Jobs of 1, 2 and 4 processes, by ``accelerate launch``.

    The processes are forked, as those of accelerate's notebook_launcher: importing transformers takes
    seconds.
    """
    Path(folder, "tpu.yaml").write_text(CONFIGURATION)
    Path(folder, "training.py").write_text(SCRIPT)
    command = ["accelerate", "launch", "--config_file", f"{folder}/tpu.yaml"]
    launching.spawn.__defaults__ = tuple(
        "fork" if default == "spawn" else default for default in launching.spawn.__defaults__
    )
    for count in (1, 2, 4):
        sys.argv = [*command, f"{folder}/training.py", folder]
        os.environ["CPU_NUM_DEVICES"] = str(count)
        accelerate_cli.main()
