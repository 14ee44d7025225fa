"""The snippets of Lazy Tensor Core's document, word for word, on real handwritten digits.

The device prints as ``xla:0``: why it cannot be called ``ltc`` is in ``lazy_tensor_core``'s docstring.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn, optim

import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm
from xla_core.extension_api import programs
from xla_core.support import counters

# Before a client starts: a machine with a TPU runs these tests on its CPU too.
os.environ["PJRT_DEVICE"] = "CPU"

STEPS = 60
BATCH = 16


class MNIST(nn.Module):
    """A small network on images (N, 1, 8, 8): log-probabilities (N, 10)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=3, padding=1)
        self.fc = nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        return nn.functional.log_softmax(self.fc(x.flatten(1)), dim=1)


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    return images, torch.from_numpy(data.target).long()


def run(snippet, names):
    exec(compile(snippet, "<document>", "exec"), names)  # noqa: S102 - the document's own text
    return names


def numbers(text):
    return [float(n) for n in re.findall(r"-?\d+\.\d+(?:e[+-]\d+)?", text)]


CREATE = """
import torch
import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm

t = torch.randn(2, 2, device=ltm.lazy_device())
print(t.device)
print(t)
"""


def test_creating_a_lazy_tensor(capsys):
    t = run(CREATE, {})["t"]
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first == "xla:0"
    assert rest.endswith("device='xla:0')\n")
    torch.testing.assert_close(numbers(rest), t.flatten().tolist(), rtol=0, atol=6e-5)  # 4 digits


ADD = """
t0 = torch.randn(2, 2, device=ltm.lazy_device())
t1 = torch.randn(2, 2, device=ltm.lazy_device())
print(t0 + t1)
"""

MULTIPLY = """
print(t0.mm(t1))
"""

LINEAR = """
l_in = torch.randn(10, device=ltm.lazy_device())
linear = torch.nn.Linear(10, 20).to(ltm.lazy_device())
l_out = linear(l_in)
print(l_out)
"""


def test_adding_multiplying_and_modules(capsys):
    names = run(ADD, {"torch": torch, "ltm": ltm})
    t0, t1 = names["t0"].cpu(), names["t1"].cpu()
    shown = numbers(capsys.readouterr().out)
    torch.testing.assert_close(shown, (t0 + t1).flatten().tolist(), rtol=0, atol=6e-5)
    run(MULTIPLY, names)
    shown = numbers(capsys.readouterr().out)
    torch.testing.assert_close(shown, t0.mm(t1).flatten().tolist(), rtol=0, atol=6e-5)
    run(LINEAR, names)
    expected = names["linear"].cpu()(names["l_in"].cpu())
    torch.testing.assert_close(names["l_out"].cpu(), expected)


LINEAR_ON_CPU = """
l_in = torch.randn(10, device=ltm.lazy_device())
linear = torch.nn.Linear(10, 20)
l_out = linear(l_in)
print(l_out)
# Input tensor is not a lazy tensor: torch.FloatTensor
"""


def test_a_module_on_the_cpu_is_refused():
    names = {"torch": torch, "ltm": ltm}
    with pytest.raises(RuntimeError, match=r"is not an? .* tensor: torch\.FloatTensor"):
        run(LINEAR_ON_CPU, names)
    assert "l_out" not in names


TRAIN = """
import lazy_tensor_core.core.lazy_model as ltm

device = ltm.lazy_device()
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
  ltm.mark_step()
"""


def test_the_training_loop_learns_the_digits(digits):
    torch.manual_seed(0)
    images, labels = digits
    dataset = torch.utils.data.TensorDataset(images[: STEPS * BATCH], labels[: STEPS * BATCH])
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH, shuffle=True)
    names = {"torch": torch, "nn": nn, "optim": optim, "MNIST": MNIST, "train_loader": loader}
    names |= {"lr": 0.1, "momentum": 0.5}
    before = programs.fallback_counts(), counters.all_counters().get("MarkStep", 0)
    run(TRAIN, names)
    assert programs.fallback_counts() == before[0]
    assert counters.all_counters()["MarkStep"] == before[1] + STEPS
    with torch.no_grad():
        found = names["model"](images[STEPS * BATCH :].to("xla")).argmax(1).cpu()
    # one pass over 960 digits; guessing gives a tenth
    assert (found == labels[STEPS * BATCH :]).float().mean() > 0.5


SAVE_AND_LOAD = """
import torch
import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm

device = ltm.lazy_device()

t0 = torch.randn(2, 2, device=device)
t1 = torch.randn(2, 2, device=device)

tensors = (t0.cpu(), t1.cpu())

torch.save(tensors, 'tensors.pt')

tensors = torch.load('tensors.pt')

t0 = tensors[0].to(device)
t1 = tensors[1].to(device)
"""

LTM_SAVE = """
import torch
import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm

ltm.save(model.state_dict(), path)
"""

XSER_SAVE = """
import lazy_tensor_core.utils.serialization as xser

xser.save(model.state_dict(), path)
"""

XSER_LOAD = """
import lazy_tensor_core.utils.serialization as xser

state_dict = xser.load(path)
model.load_state_dict(state_dict)
"""


def test_saving_and_loading_through_the_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run(SAVE_AND_LOAD, {})
    assert names["t0"].device.type == names["t1"].device.type == "xla"
    assert torch.equal(names["t0"].cpu(), torch.load("tensors.pt")[0])


def test_saving_models(tmp_path):
    names = {"model": MNIST().to("xla"), "path": tmp_path / "model.pt"}
    run(LTM_SAVE, names)
    state = torch.load(names["path"])
    assert {t.device.type for t in state.values()} == {"cpu"}
    names["path"] = tmp_path / "streamed.pt"
    run(XSER_SAVE, names)
    names["model"] = MNIST().to("xla")
    run(XSER_LOAD, names)
    assert torch.equal(names["model"].fc.weight.cpu(), state["fc.weight"])


def test_the_device_is_not_renamed_behind_the_users_back():
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    assert "ltc" in lazy_tensor_core.__doc__ and "xla:0" in lazy_tensor_core.__doc__
    assert str(ltm.lazy_device()) == "xla:0" and ltm.get_lazy_supported_devices() == ["xla:0"]
    assert ltm.lazy_real_devices() == ["CPU:0"]
    with pytest.raises(RuntimeError, match="there is no TPU device"):
        ltm.lazy_device(devkind="TPU")


BFLOAT16 = """
import torch
import lazy_tensor_core.core.lazy_model as ltm

x = torch.full((2,), 1.001, device=ltm.lazy_device())
y = torch.full((2,), 1.001, dtype=torch.float64, device=ltm.lazy_device())
z = torch.ones(2, dtype=torch.bfloat16, device=ltm.lazy_device())
print(x.dtype, y.dtype, z.dtype, x.cpu()[0].item(), y.cpu()[0].item())
"""


def test_bfloat16_behind_the_users_dtype(run_file, tmp_path):
    script = tmp_path / "script.py"
    Path(script).write_text(BFLOAT16)
    done = run_file(script, LTC_USE_BF16="1")
    assert done.stdout.split() == [
        "torch.float32", "torch.float64", "torch.bfloat16", "1.0", "1.0",
    ], done.stderr  # fmt: skip
