"""The single-device snippets of the PyTorch/XLA documents, word for word, on real handwritten digits.

The page with the API reference repeats those of PyTorch on XLA Devices; its signatures are in
``test_api_document.py``. Lazy Tensor Core's document is in ``test_document_ltc.py``.

Each snippet is the documents' own text. What it leaves to its reader (``MNIST``, ``train_loader``,
``lr``, ``path``...) is defined around it, with scikit-learn's scanned digits in place of MNIST's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.amp import autocast
from xla_core.extension_api import programs
from xla_core.support import counters
from xla_core.testing.internals import keeping_the_cache

# Before a client starts: a machine with a TPU runs these tests on its CPU too.
os.environ["PJRT_DEVICE"] = "CPU"

BATCH = 16
STEPS = 96
TRAINED_ON = STEPS * BATCH  # of 1797 digits


class MNIST(nn.Module):
    """The documents' MNISTNet: log-probabilities (N, 10) of images (N, 1, 28, 28); narrower here."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, kernel_size=3, stride=1, padding=1)
        self.conv2 = nn.Conv2d(8, 16, kernel_size=3, stride=1, padding=1)
        self.fc1 = nn.Linear(7 * 7 * 16, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = x.view(-1, 7 * 7 * 16)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


@pytest.fixture(scope="module")
def digits():
    """Images (1797, 1, 28, 28), normalized as in the documents, and labels.

    The scans are 8x8: doubled to 16x16 and framed.
    """
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    images = F.pad(images.repeat_interleave(2, 2).repeat_interleave(2, 3), (6, 6, 6, 6))
    images = (images - 0.1307) / 0.3081
    return images, torch.from_numpy(data.target).long()


@pytest.fixture
def names(digits):
    """What the snippets expect their reader to have."""
    torch.manual_seed(0)
    images, labels = (part[:TRAINED_ON] for part in digits)
    dataset = torch.utils.data.TensorDataset(images, labels)
    return {
        "torch": torch,
        "nn": nn,
        "optim": optim,
        "MNIST": MNIST,
        "MNISTNet": MNIST,
        "train_loader": torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True),
        "lr": 0.1,
        "learning_rate": 0.1,
        "momentum": 0.5,
    }


def run(snippet, names):
    exec(compile(snippet, "<document>", "exec"), names)  # noqa: S102 - the document's own text
    return names


def numbers(text):
    return [float(n) for n in re.findall(r"-?\d+\.\d+(?:e[+-]\d+)?", text)]


# -- PyTorch on XLA Devices -----------------------------------------------------------------------

CREATE = """
import torch
import torch_xla
import torch_xla.core.xla_model as xm

t = torch.randn(2, 2, device=xm.xla_device())
print(t.device)
print(t)
"""


def test_creating_an_xla_tensor(capsys):
    t = run(CREATE, {})["t"]
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first == "xla:0"
    assert re.fullmatch(r"tensor\(\[\[.*\],\n        \[.*\]\], device='xla:0'\)\n", rest)
    torch.testing.assert_close(numbers(rest), t.flatten().tolist(), rtol=0, atol=6e-5)  # 4 digits


ADD = """
t0 = torch.randn(2, 2, device=xm.xla_device())
t1 = torch.randn(2, 2, device=xm.xla_device())
print(t0 + t1)
"""

MULTIPLY = """
print(t0.mm(t1))
"""


def test_adding_and_multiplying(capsys, names):
    names["xm"] = xm
    run(ADD, names)
    t0, t1 = names["t0"].cpu(), names["t1"].cpu()
    shown = numbers(capsys.readouterr().out)
    torch.testing.assert_close(shown, (t0 + t1).flatten().tolist(), rtol=0, atol=6e-5)
    run(MULTIPLY, names)
    shown = numbers(capsys.readouterr().out)
    torch.testing.assert_close(shown, t0.mm(t1).flatten().tolist(), rtol=0, atol=6e-5)


LINEAR = """
l_in = torch.randn(10, device=xm.xla_device())
linear = torch.nn.Linear(10, 20).to(xm.xla_device())
l_out = linear(l_in)
print(l_out)
"""


def test_modules(capsys, names):
    names["xm"] = xm
    run(LINEAR, names)
    out = capsys.readouterr().out
    assert re.search(r"device='xla:0',\s+grad_fn=<\w+>\)$", out)
    expected = names["linear"].cpu()(names["l_in"].cpu())
    torch.testing.assert_close(names["l_out"].cpu(), expected)


LINEAR_ON_CPU = """
l_in = torch.randn(10, device=xm.xla_device())
linear = torch.nn.Linear(10, 20)
l_out = linear(l_in)
print(l_out)
# Input tensor is not an XLA tensor: torch.FloatTensor
"""


def test_a_module_on_the_cpu_is_refused(names):
    names["xm"] = xm
    with pytest.raises(
        RuntimeError, match=r"Input tensor is not an XLA tensor: torch\.FloatTensor"
    ):
        run(LINEAR_ON_CPU, names)
    assert "l_out" not in names


TRAIN = """
import torch_xla.core.xla_model as xm

device = xm.xla_device()
model = MNIST().train().to(device)
loss_fn = nn.NLLLoss()
optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

for data, target in train_loader:
  optimizer.zero_grad()
  data = data.to(device)
  target = target.to(device)
  output = model(data)
  loss = loss_fn(output, target)
  loss.backward()

  optimizer.step()
  xm.mark_step()
"""

# -- Performance guideline: the same with a barrier in optimizer_step ---------------------------------

TRAIN_WITH_BARRIER = """
import torch_xla.core.xla_model as xm

device = xm.xla_device()
model = MNIST()
loss_fn = nn.NLLLoss()
optimizer = optim.SGD(model.parameters(), lr=lr, momentum=momentum)

model.train()
for data, target in train_loader:
  optimizer.zero_grad()
  data = data.to(device)
  target = target.to(device)
  output = model(data)
  loss = loss_fn(output, target)
  loss.backward()
  xm.optimizer_step(optimizer, barrier=True)
"""

# -- Migrating: the recap, without the line that has "..." for arguments ------------------------------

TRAIN_WITH_SYNC = """
device = xm.xla_device()
model = MNISTNet().to(device)
optimizer = optim.SGD(model.parameters(), lr=learning_rate)
loss_fn = nn.NLLLoss()

for data, target in train_loader:
    optimizer.zero_grad()
    data, target = data.to(device), target.to(device)
    output = model(data)
    loss = loss_fn(output, target)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
"""


@pytest.mark.parametrize("snippet", [TRAIN, TRAIN_WITH_SYNC], ids=["mark_step", "sync"])
def test_training_loops_learn_the_digits(snippet, names, digits):
    names |= {"torch_xla": torch_xla, "xm": xm}
    before = programs.fallback_counts(), counters.all_counters().get("MarkStep", 0)
    run(snippet, names)
    assert programs.fallback_counts() == before[0]
    assert counters.all_counters()["MarkStep"] == before[1] + STEPS
    images, labels = (part[TRAINED_ON:] for part in digits)
    with torch.no_grad():
        found = names["model"].eval()(images.to("xla")).argmax(1).cpu()
    # one pass over a few digits gives the CPU two thirds; guessing gives a tenth
    assert (found == labels).float().mean() > 0.5


def test_the_loop_that_leaves_the_model_on_the_cpu_is_refused(names):
    """As printed it forgets ``.to(device)``: the error is the documented one, never a silent copy."""
    with pytest.raises(
        RuntimeError, match=r"Input tensor is not an XLA tensor: torch\.FloatTensor"
    ):
        run(TRAIN_WITH_BARRIER, names)


def test_the_loop_with_a_barrier(names):
    names["MNIST"] = lambda: MNIST().to("xla")
    before = counters.all_counters().get("MarkStep", 0)
    run(TRAIN_WITH_BARRIER, names)
    assert counters.all_counters()["MarkStep"] == before + STEPS
    assert names["loss"].item() < 1.8  # ln(10) = 2.303 at the start


SAVE_AND_LOAD = """
import torch
import torch_xla
import torch_xla.core.xla_model as xm

device = xm.xla_device()

t0 = torch.randn(2, 2, device=device)
t1 = torch.randn(2, 2, device=device)

tensors = (t0.cpu(), t1.cpu())

torch.save(tensors, 'tensors.pt')

tensors = torch.load('tensors.pt')

t0 = tensors[0].to(device)
t1 = tensors[1].to(device)
"""

XM_SAVE = """
import torch
import torch_xla
import torch_xla.core.xla_model as xm

xm.save(model.state_dict(), path)
"""


def test_saving_and_loading_through_the_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run(SAVE_AND_LOAD, {})
    assert Path("tensors.pt").exists()
    assert names["t0"].device.type == names["t1"].device.type == "xla"
    assert torch.equal(names["t0"].cpu(), torch.load("tensors.pt")[0])
    assert not torch.equal(names["t0"], names["t1"])


def test_xm_save(tmp_path):
    names = {"model": MNIST().to("xla"), "path": tmp_path / "model.pt"}
    run(XM_SAVE, names)
    state = torch.load(names["path"])
    assert {t.device.type for t in state.values()} == {"cpu"}
    twin = MNIST()
    twin.load_state_dict(state)
    assert torch.equal(twin.fc1.weight, names["model"].fc1.weight.cpu())


XSER_SAVE = """
import torch_xla.utils.serialization as xser

xser.save(model.state_dict(), path)
"""

XSER_LOAD = """
import torch_xla.utils.serialization as xser

state_dict = xser.load(path)
model.load_state_dict(state_dict)
"""


def check_streamed(save, load, tmp_path):
    names = {"model": MNIST().to("xla"), "path": tmp_path / "model.pt"}
    run(save, names)
    expected = names["model"].fc1.weight.tolist()
    names["model"] = MNIST().to("xla")
    assert names["model"].fc1.weight.tolist() != expected
    run(load, names)
    assert names["model"].fc1.weight.device.type == "xla"
    assert names["model"].fc1.weight.tolist() == expected


def test_streaming_to_a_file_and_back(tmp_path):
    check_streamed(XSER_SAVE, XSER_LOAD, tmp_path)


INITIALIZE_CACHE = """
import torch_xla.runtime as xr
xr.initialize_cache('YOUR_CACHE_PATH', readonly=False)
"""


def test_compilation_caching(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with keeping_the_cache():
        run(INITIALIZE_CACHE, {})
        (torch.arange(7.0, device="xla") * 11 + 13).tolist()
    assert list(Path("YOUR_CACHE_PATH").iterdir())


# -- Migrating ------------------------------------------------------------------------------------

DEVICE = """
import torch_xla.core.xla_model as xm

# Acquire the XLA device (e.g., a TPU core)
device = xm.xla_device()

# Move your model and data to the XLA device
model.to(device)
data = data.to(device)
"""

LAZY = """
# ...
loss.backward()
optimizer.step() # Operations are added to a graph, not executed yet

# Explicitly tell XLA to compile and run the graph for this step
torch_xla.sync()

# To print a tensor's value, ensure the graph producing it has executed.
# Often, printing is done less frequently or via asynchronous callbacks.
# If printing immediately after sync, the value will be available:
print(loss.item())
# For better performance, consider printing/logging less frequently or moving
# the tensor to CPU first if needed outside the main loop:
print(loss.cpu().item()) # This will also trigger a sync if not done already
"""


def test_device_handling_and_lazy_execution(names, capsys):
    names |= {"torch_xla": torch_xla, "model": MNIST(), "data": torch.zeros(2, 1, 28, 28)}
    run(DEVICE, names)
    assert names["data"].device.type == names["model"].fc1.weight.device.type == "xla"
    names["optimizer"] = optim.SGD(names["model"].parameters(), lr=0.1)
    names["loss"] = names["model"](names["data"]).square().mean()
    run(LAZY, names)
    first, second = numbers(capsys.readouterr().out)
    assert first == second == names["loss"].item()


AMP = """
from torch_xla.amp import syncfree
import torch_xla.core.xla_model as xm

# Creates model and optimizer in default precision
model = Net().to('xla')
# Pytorch/XLA provides sync-free optimizers for improved performance
optimizer = syncfree.SGD(model.parameters(), ...)

for input, target in data:
    optimizer.zero_grad()

    # Enables autocasting for the forward pass
    with autocast(torch_xla.device()):
        output = model(input)
        loss = loss_fn(output, target)

    # Exits the context manager before backward()
    loss.backward()
    xm.optimizer_step.(optimizer)
"""


def test_mixed_precision(names, digits):
    with pytest.raises(SyntaxError):
        compile(AMP, "<document>", "exec")
    # as printed it is no Python: a stray dot, and "..." for the arguments that the reader has to give
    snippet = AMP.replace("optimizer_step.(", "optimizer_step(")
    snippet = snippet.replace("parameters(), ...)", "parameters(), lr=0.02, momentum=0.9)")
    images, labels = digits
    batches = [
        (images[i : i + 32].to("xla"), labels[i : i + 32].to("xla")) for i in range(0, 960, 32)
    ]
    names |= {"torch_xla": torch_xla, "autocast": autocast, "Net": MNIST}
    names |= {"data": batches, "loss_fn": nn.NLLLoss()}
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, _i, o: seen.append((type(m), o.dtype))
    )
    try:
        run(snippet, names)
    finally:
        handle.remove()
    assert (nn.Linear, torch.bfloat16) in seen and (nn.NLLLoss, torch.float32) in seen
    assert {p.dtype for p in names["model"].parameters()} == {torch.float32}
    assert names["loss"].item() < 2.25  # ln(10) = 2.303 at the start


SAVING = """
# Saving
xm.save(model.state_dict(), "model_xla.pt", master_only=True) # master_only recommended
"""

SAVING_MORE = """
if xm.is_master_ordinal():
   cpu_state_dict = {k: v.cpu() for k, v in model.state_dict().items()}
   torch.save(cpu_state_dict, "model_cpu.pt")

# Loading
model.load_state_dict(torch.load("model_cpu.pt"))
model.to(device) # Then move to XLA device
"""


def test_saving_and_loading_models(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names |= {"xm": xm, "device": xm.xla_device(), "model": MNIST().to("xla")}
    before = names["model"].fc1.weight.tolist()
    run(SAVING, names)
    # The document has a sentence in the middle of the snippet that is no Python; it is left out.
    run(SAVING_MORE, names)
    assert names["model"].fc1.weight.device.type == "xla"
    assert names["model"].fc1.weight.tolist() == before
    assert torch.load("model_xla.pt").keys() == torch.load("model_cpu.pt").keys()


GPU_DEVICE = """
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
model.to(device)
data = data.to(device)
"""


def test_the_code_to_migrate_from_runs_too(names):
    names |= {"model": MNIST(), "data": torch.zeros(2, 1, 28, 28)}
    run(GPU_DEVICE, names)
    assert names["data"].device == names["model"].fc1.weight.device == names["device"]


# -- Performance guideline ------------------------------------------------------------------------

CREATE_4X2 = """
import torch
import torch_xla
import torch_xla.core.xla_model as xm

x = torch.randn(4, 2, device=xm.xla_device())
print(x.device)
print(x)
"""


def test_the_performance_guidelines_tensor(capsys):
    run(CREATE_4X2, {})
    out = capsys.readouterr().out
    assert out.startswith("xla:0\ntensor([[")
    assert len(numbers(out)) == 8


CLIP = """
    else:
      device = parameters[0].device
      total_norm = torch.zeros([], device=device if parameters else None)
      for p in parameters:
        param_norm = p.grad.data.norm(norm_type) ** norm_type
        total_norm.add_(param_norm)
      total_norm = (total_norm ** (1. / norm_type))
    clip_coef = torch.tensor(max_norm, device=device) / (total_norm + 1e-6)
    for p in parameters:
      p.grad.data.mul_(torch.where(clip_coef < 1, clip_coef, torch.tensor(1., device=device)))
"""


@pytest.mark.parametrize("norm_type", [1, 2, 3])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_without_item(norm_type, max_norm):
    head = "def clip(parameters, max_norm, norm_type):\n    if not parameters:\n      return\n"
    clip = run(head + CLIP, {"torch": torch})["clip"]
    gradients = [torch.linspace(-1, 1, 6), torch.full((2, 2), 0.7)]
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    on_device = [nn.Parameter(torch.zeros_like(g).to("xla")) for g in gradients]
    for p, x, g in zip(parameters, on_device, gradients, strict=True):
        p.grad, x.grad = g.clone(), g.to("xla")
    torch_xla.sync()
    runs = sum(p.runs for p in programs.program_runs())
    clip(on_device, max_norm, norm_type)
    assert sum(p.runs for p in programs.program_runs()) == runs  # no item(): nothing ran
    torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    for p, x in zip(parameters, on_device, strict=True):
        torch.testing.assert_close(x.grad.cpu(), p.grad)


METRICS = "print(torch_xla._XLAC._xla_metrics_report())"


@pytest.mark.filterwarnings("ignore:aten..linalg_ldl_factor_ex has no XLA lowering")
def test_the_metrics_report(capsys):
    torch.linalg.ldl_factor(torch.eye(33, device="xla"))
    torch_xla.sync()
    run(METRICS, {"torch_xla": torch_xla})
    out = capsys.readouterr().out
    assert re.search(r"^Counter: aten::linalg_ldl_factor_ex\n  Value: \d+$", out, re.M)
    compile_time = re.search(
        r"^Metric: CompileTime\n  TotalSamples: \d+\n  Accumulator: .*us\n.*?  Percentiles: 1%=.*; 99%=.*us$",
        out,
        re.M | re.S,
    )
    assert compile_time
