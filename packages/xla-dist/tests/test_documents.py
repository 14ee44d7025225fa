"""The multi-processing snippets of the PyTorch/XLA documents, word for word, on real digits.

Each snippet is the documents' own text. What it leaves to its reader (``MNIST``, ``train_loader``,
``lr``...) is defined before it, with scikit-learn's scanned digits in place of MNIST's. All processes of
the first two read the same batches, as printed, so their losses are those of one process.
"""

from __future__ import annotations

import re

import dist_jobs
import pytest
from dist_jobs import clean_environment

STEPS = 10

SPAWN = """
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp

def _mp_fn(index):
  device = xm.xla_device()
  mp_device_loader = pl.MpDeviceLoader(train_loader, device)

  model = MNIST().train().to(device)
  loss_fn = nn.NLLLoss()
  optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

  for data, target in mp_device_loader:
    optimizer.zero_grad()
    output = model(data)
    loss = loss_fn(output, target)
    loss.backward()
    xm.optimizer_step(optimizer)

if __name__ == '__main__':
  xmp.spawn(_mp_fn, args=())
"""

PARALLEL_LOADER = """
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp

def _mp_fn(index):
  device = xm.xla_device()
  para_loader = dp.ParallelLoader(train_loader, [device])

  model = MNIST()
  loss_fn = nn.NLLLoss()
  optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

  model.train()
  for data, target in para_loader.per_device_loader(device):
    optimizer.zero_grad()
    output = model(data)
    loss = loss_fn(output, target)
    loss.backward()
    xm.optimizer_step(optimizer)

if __name__ == '__main__':
  xmp.spawn(_mp_fn, args=())
"""

DATA_PARALLEL = """
import torch_xla.core.xla_model as xm
import torch_xla.distributed.data_parallel as dp

devices = xm.get_xla_supported_devices()
model_parallel = dp.DataParallel(MNIST, device_ids=devices)

def train_loop_fn(model, loader, device, context):
  loss_fn = nn.NLLLoss()
  optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

  model.train()
  for _, (data, target) in loader:
    optimizer.zero_grad()
    output = model(data)
    loss = loss_fn(output, target)
    loss.backward()
    xm.optimizer_step(optimizer)

for epoch in range(1, num_epochs + 1):
  model_parallel(train_loop_fn, train_loader)
"""

LAUNCH = r"""
# mnist_xla_distributed.py

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torchvision import datasets, transforms

# PyTorch/XLA specific imports

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl # For MpDeviceLoader
import torch_xla.runtime as xr # For runtime utilities like world_size

# Re-define MNISTNet here for completeness (same as before)

class MNISTNet(nn.Module):
    def __init__(self):
        super(MNISTNet, self).__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3, stride=1, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, stride=1, padding=1)
        self.fc1 = nn.Linear(7*7*64, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = x.view(-1, 7*7*64)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)

# This function will be executed by each XLA process

def _mp_mnist_fn(index, args):
    # `index` is the global ordinal of the current process (0 to N-1)
    # `args` are the arguments passed from torch_xla.launch

    torch.manual_seed(args.seed) # Ensure consistent model initialization if needed

    # 1. Acquire the XLA device for THIS process.
    device = xm.xla_device()

    # 2. Create the model and move it to the process-specific XLA device
    model = MNISTNet().to(device)

    # 3. Create the optimizer
    optimizer = optim.SGD(model.parameters(), lr=args.learning_rate, momentum=args.momentum)

    loss_fn = nn.NLLLoss()

    # 4. Wrap the PyTorch DataLoader with MpDeviceLoader
    #    This handles distributing data shards to each device.
    #    The underlying train_dataset is shared, MpDeviceLoader handles per-device dispatch.
    mp_train_loader = pl.MpDeviceLoader(args.train_loader, device)

    print(f"Process {index} (Global Ordinal {xr.global_ordinal()}): Starting training on {xm.xla_device_hw(device)}...")

    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch_idx, (data, target) in enumerate(mp_train_loader):
            # Data and target are already on the correct 'device' from MpDeviceLoader
            optimizer.zero_grad()
            output = model(data)
            loss = loss_fn(output, target)
            loss.backward()

            # 5. Use xm.optimizer_step to handle gradient reduction and optimizer update
            #    This also includes the necessary synchronization (like torch_xla.sync()).
            xm.optimizer_step(optimizer)

            if batch_idx % args.log_interval == 0:
                # Print only on the master ordinal to avoid spamming logs
                if xm.is_master_ordinal(local=False): # global_master=False for per-host master
                    print(f'Process {index} - Train Epoch: {epoch} '
                          f'[{batch_idx * len(data) * xr.world_size()}/{len(args.train_loader.dataset)} '
                          f'({100. * batch_idx / len(args.train_loader):.0f}%)]\tLoss: {loss.item():.6f}')

        # It's good practice to wait for all processes at epoch boundaries if doing validation
        # xm.rendezvous('epoch_end') # Example, might not be strictly needed here

    if xm.is_master_ordinal(local=False):
        print(f"Process {index}: Training finished!")
        # Optionally save the model (master_only is True by default in xm.save)
        # xm.save(model.state_dict(), "mnist_xla_distributed.pt")

# Define training configurations
class Args:
    epochs = 2
    learning_rate = 0.01
    momentum = 0.5
    batch_size = 64 # This will be the per-device batch size
    seed = 42
    log_interval = 50 # Log every 50 batches

if __name__ == '__main__':

    args = Args()

    # Create the shared DataLoader (not wrapped by MpDeviceLoader here yet)
    train_dataset = datasets.MNIST(
        './data', train=True, download=True,
        transform=transforms.Compose([
            transforms.ToTensor(),
            transforms.Normalize((0.1307,), (0.3081,))
        ]))

    # Note: No DistributedSampler needed here if using MpDeviceLoader,
    # as MpDeviceLoader handles distributing distinct shards.
    args.train_loader = torch.utils.data.DataLoader(
        train_dataset,
        batch_size=args.batch_size,
        shuffle=True, # Shuffle should be True for training
        num_workers=1 # Can be > 0
    )

    # 6. Start distributed training on all available XLA devices with torch_xla.launch
    # Ensure PJRT_DEVICE is set in your environment (e.g., export PJRT_DEVICE=TPU)
    print("Launching distributed MNIST training...")
    torch_xla.launch(_mp_mnist_fn, args=(args,))
"""  # noqa: E501 - as printed

BEFORE = f"""
import sys, types
import torch, torch_xla
import torch_xla.distributed.data_parallel as dp
import torch_xla.runtime as xr
from torch import nn, optim
from torch.nn import functional as F
from sklearn.datasets import load_digits

lr, momentum, num_epochs = 0.1, 0.5, 2
_digits = load_digits()
_dataset = torch.utils.data.TensorDataset(
    torch.from_numpy(_digits.images).float()[:{STEPS * 32}, None] / 16,
    torch.from_numpy(_digits.target).long()[:{STEPS * 32}],
)
# with a generator of its own: the reading thread must not take random numbers from the network
train_loader = torch.utils.data.DataLoader(_dataset, batch_size=32, generator=torch.Generator())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc = nn.Linear(288, 10)

    def forward(self, x):
        return F.log_softmax(self.fc(F.relu(self.conv(x)).flatten(1)), dim=1)


def MNIST():
    torch.manual_seed(0)
    return Net()


class _Shown(nn.NLLLoss):
    def forward(self, output, target):
        loss = super().forward(output, target)
        facts = f"LOSS {{torch_xla.device()}} {{xr.global_ordinal()}} {{loss.item()}}\\n"
        sys.stdout.write(facts)  # in one piece: threads and processes write in between
        sys.stdout.flush()
        return loss


nn = types.SimpleNamespace(**{{**vars(nn), "NLLLoss": _Shown}})
"""
# As printed, the snippet forgets to move the model to the device.
ON_DEVICE = """
_make = MNIST
def MNIST():
    return _make().to("xla")
"""
TORCHVISION = '''
"""The names that the document's example imports, on scikit-learn's digits, drawn as large as MNIST's."""
import sys
import types

import torch
from sklearn.datasets import load_digits


class _Digits(torch.utils.data.Dataset):
    def __init__(self, root, train, download, transform):
        assert (root, train, download) == ("./data", True, True)
        data = load_digits()
        self.images, self.labels, self.transform = data.images, data.target, transform

    def __len__(self):
        return 384

    def __getitem__(self, i):
        return self.transform(self.images[i]), int(self.labels[i])


class _Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


def _to_tensor(image):
    image = torch.from_numpy(image).float()[None] / 16
    return torch.nn.functional.pad(image.repeat_interleave(2, 1).repeat_interleave(2, 2), (6,) * 4)


class _Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean[0], std[0]

    def __call__(self, image):
        return (image - self.mean) / self.std


def _ToTensor():
    return _to_tensor


datasets = types.SimpleNamespace(MNIST=_Digits)
transforms = types.SimpleNamespace(Compose=_Compose, ToTensor=_ToTensor, Normalize=_Normalize)
'''


@pytest.fixture
def run_document(start_program, run_script, tmp_path):
    """Run a snippet as a program; its output. The processes are forked, or spawned as the user's are."""

    def run(script, processes, start_method):
        if start_method == "spawn":
            done = run_script(script, processes)
            status, text = done.returncode, done.stdout + done.stderr
        else:
            path = tmp_path / "script.py"
            path.write_text(script)
            environment = clean_environment(processes)
            program = start_program(environment, dist_jobs.runs_script, str(path))
            status, text, _ = program.join()
        assert status == 0, text
        return text

    return run


def losses_of(text):
    """The printed losses, by replica."""
    found = {}
    for device, ordinal, loss in re.findall(r"LOSS (\S+) (\d+) (\d+\.\d+)", text):
        found.setdefault((int(ordinal), device), []).append(float(loss))
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize(
    ("snippet", "processes", "start_method"),
    [
        (SPAWN, 2, "spawn"),
        (SPAWN, 4, "fork"),
        (ON_DEVICE + PARALLEL_LOADER, 2, "fork"),
        (ON_DEVICE + PARALLEL_LOADER, 4, "fork"),
    ],
    ids=["spawn-2", "spawn-4", "ParallelLoader-2", "ParallelLoader-4"],
)
def test_processes(run_document, snippet, processes, start_method):
    found = losses_of(run_document(BEFORE + snippet, processes, start_method))
    assert len(found) == processes
    assert found[0][-1] < 0.9 * found[0][0]
    # every process reads the same batches: the mean of equal gradients is one process's gradient
    alone = _alone()
    for losses in found:
        assert losses == pytest.approx(alone, rel=1e-4)


def _alone():
    """The same training by PyTorch on its own CPU."""
    names = {}
    exec(compile(BEFORE, "<before>", "exec"), names)  # noqa: S102 - the text above
    torch, model = names["torch"], names["MNIST"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for data, target in names["train_loader"]:
        optimizer.zero_grad()
        loss = torch.nn.functional.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("devices", [2, 4])
def test_threads(run_document, devices):
    found = losses_of(run_document(BEFORE + DATA_PARALLEL, devices, "fork"))
    assert len(found) == devices
    for losses in found:
        assert len(losses) == 2 * (STEPS // devices)  # epochs; an incomplete round is dropped
        assert losses[-1] < losses[0]
    assert len({tuple(losses) for losses in found}) == devices  # each device has its own batches


@pytest.mark.parametrize("processes", [2, 4])
def test_launch(run_document, tmp_path, processes):
    (tmp_path / "torchvision.py").write_text(TORCHVISION)
    text = run_document(LAUNCH, processes, "fork")
    assert text.count("Launching distributed MNIST training...\n") == 1
    for i in range(processes):
        assert f"Process {i} (Global Ordinal {i}): Starting training on CPU...\n" in text
    shown = re.findall(
        r"^Process 0 - Train Epoch: (\d) \[0/384 \(0%\)\]\tLoss: (\d\.\d{6})$", text, re.M
    )
    assert [epoch for epoch, _ in shown] == ["1", "2"]
    first, second = (float(loss) for _, loss in shown)
    assert second < first < 2.5  # ln(10) = 2.303 at the start
    assert text.count("Process 0: Training finished!\n") == 1
