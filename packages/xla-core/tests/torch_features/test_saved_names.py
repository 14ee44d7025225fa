"""Files of any name: they are written, and the archive inside is named as torch.save names it."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

import lazy_tensor_core.core.lazy_model as ltm
import torch_xla.core.xla_model as xm
import torch_xla.utils.serialization as xser

NAMES = ["checkpoint", "model.pt", "step.10.pt", "a b.bin", "x.", "[1].pt", "folder.d/checkpoint"]
SAVES = {"xm": xm.save, "xser": xser.save, "ltm": ltm.save}


def root(file):
    """The folder that everything in an archive lies in."""
    with zipfile.ZipFile(file) as archive:
        (found,) = {name.partition("/")[0] for name in archive.namelist()}
    return found


@pytest.mark.parametrize("kind", [str, Path])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("save", SAVES)
def test_the_archive_is_named_as_torch_names_it(save, name, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("cpu", "xla"):
        Path(folder, name).parent.mkdir(parents=True)
    host = {"a": torch.arange(6.0).reshape(2, 3).t()}
    torch.save(host, kind(Path("cpu", name)))
    path = kind(Path("xla", name))
    for _ in range(2):  # the second takes the place of the first
        SAVES[save]({"a": host["a"].to("xla")}, path)
    assert root(path) == root(Path("cpu", name))
    assert torch.equal(torch.load(path)["a"], host["a"])
    assert [file.name for file in Path(path).parent.iterdir()] == [Path(name).name]


def test_hidden_files_and_file_objects(tmp_path):
    """torch.save refuses a name that is nothing but a suffix; here there is no need to."""
    state = {"a": torch.ones(2, device="xla")}
    xm.save(state, tmp_path / ".checkpoint")
    assert torch.load(tmp_path / ".checkpoint")["a"].tolist() == [1, 1]
    buffer, expected = io.BytesIO(), io.BytesIO()
    xm.save(state, buffer)
    torch.save(state, expected)
    assert root(buffer) == root(expected)
    with (tmp_path / "opened").open("wb") as file:
        xm.save(state, file)
    assert torch.load(tmp_path / "opened")["a"].tolist() == [1, 1]


def test_a_save_that_fails_leaves_the_former_file_and_nothing_else(tmp_path):
    path = tmp_path / "checkpoint"
    xm.save({"a": 1}, path)
    with pytest.raises(Exception, match=r"pickle|local object"):
        xm.save({"a": (lambda: 0)}, path)
    assert torch.load(path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]
