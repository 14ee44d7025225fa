"""The parts of the example around its training loop: data files, split, padded evaluation."""

from __future__ import annotations

import gzip
import importlib.util
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_digits.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_digits", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def idx_bytes(values):
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_mnist(folder, pack):
    rng = np.random.default_rng(0)
    arrays = {}
    for name, count in (("train", 12), ("t10k", 5)):
        arrays[f"{name}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 28, 28), np.uint8)
        arrays[f"{name}-labels-idx1-ubyte"] = rng.integers(0, 10, (count,), np.uint8)
    for name, values in arrays.items():
        content = idx_bytes(values)
        if pack:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return arrays


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "gz"])
def test_mnist_files_become_images_and_labels(example, tmp_path, pack):
    arrays = write_mnist(tmp_path, pack)
    train, held_out = example.load_mnist(tmp_path)
    images, labels = train.tensors
    assert images.shape == (12, 1, 28, 28)
    assert images.dtype == torch.float32
    expected = arrays["train-images-idx3-ubyte"].astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(images[:, 0].numpy(), expected)
    np.testing.assert_array_equal(labels.numpy(), arrays["train-labels-idx1-ubyte"])
    assert labels.dtype == torch.int64
    assert len(held_out) == 5


def test_a_file_of_another_kind_is_refused_by_name(example, tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(struct.pack(">HBBI", 0, 0x0D, 1, 1) + b"\0\0\0\0")
    with pytest.raises(ValueError, match="train-images-idx3-ubyte is no IDX file"):
        example.read_idx(path)


def test_a_missing_file_is_named(example, tmp_path):
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte"):
        example.read_idx(tmp_path / "t10k-labels-idx1-ubyte")


def test_the_split_is_the_same_every_time_and_shares_no_digit(example):
    train, held_out = example.load_small_digits(seed=0)
    again, _ = example.load_small_digits(seed=0)
    other, _ = example.load_small_digits(seed=1)
    assert len(train) + len(held_out) == 1797
    assert len(held_out) == 360
    assert torch.equal(train.tensors[0], again.tensors[0])
    assert not torch.equal(train.tensors[0], other.tensors[0])
    # Equal scans exist in the set itself; as many lines must be left as it has different ones.
    both = torch.cat([train.tensors[0], held_out.tensors[0]]).flatten(1)
    everything = torch.from_numpy(example.load_digits().images).float().flatten(1) / 16
    assert torch.equal(both.sort(0).values, everything.sort(0).values)


def test_padding_of_the_last_batch_changes_no_accuracy(example):
    class FirstPixels(torch.nn.Module):
        def forward(self, images):
            return images[:, 0, 0, :10]

    images = torch.rand(7, 1, 28, 28)
    labels = images[:, 0, 0, :10].argmax(1)
    labels[0] = (labels[0] + 1) % 10
    dataset = torch.utils.data.TensorDataset(images, labels)
    step = example.evaluation_step(FirstPixels())
    share = example.accuracy(step, dataset, 4, torch.device("cpu"))
    assert share == pytest.approx(6 / 7)


def test_a_captured_training_is_the_same(example, capsys):
    """The model is switched between training and evaluation, each of which has a captured step of its own."""
    told = []
    for arguments in (["--capture"], []):
        example.main(["--epochs", "3", "--batch-size", "128", *arguments])
        told.append(capsys.readouterr().out)
    lines = [re.findall(r"train loss [0-9.]+, held-out accuracy [0-9.]+%", text) for text in told]
    assert len(lines[0]) == 3
    assert lines[0] == lines[1]


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, the compiler, is not installed: its wheels are for Linux on x86-64",
)
def test_the_whole_script_is_compiled_for_tpus_that_are_not_here(run_file):
    """Every value read is zero; what is compiled is what a TPU would run, with nothing on the CPU."""
    ahead = {"PJRT_DEVICE": "TPU", "XLA_AOT_TOPOLOGY": "v5e:2x2", "XLA_AOT_READS": "zeros"}
    done = run_file(EXAMPLE, "--epochs", "1", **ahead)
    assert done.returncode == 0, done.stderr
    assert "epoch 1/1: train loss 0.0000" in done.stdout
    assert "ran 21 times" in done.stdout  # the step of all batches but the first
    assert "Nothing fell back to the CPU." in done.stdout
