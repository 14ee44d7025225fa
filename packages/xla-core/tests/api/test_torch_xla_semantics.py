"""What functions of torch_xla give and raise, where scripts rely on it."""

from __future__ import annotations

import io
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torch_xla
import torch_xla.backends
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
import torch_xla.utils.utils as xu


class Pair(xu.DataWrapper):
    """Two tensors that are converted as one."""

    def __init__(self, tensors):
        self.tensors = tensors

    def get_tensors(self):
        return self.tensors

    def from_tensors(self, tensors):
        return Pair(tensors)


@pytest.mark.parametrize(
    ("data", "kinds"),
    [
        (torch.ones(2), ["xla"]),
        ((torch.ones(2), torch.ones(1)), ["xla", "xla"]),
        ([torch.ones(2), torch.ones(1)], ["xla", "xla"]),
    ],
)
def test_tensors_that_are_sent_come_back_as_a_list(data, kinds):
    sent = xm.send_cpu_data_to_device(data, "xla")
    assert type(sent) is list and [t.device.type for t in sent] == kinds


def test_a_wrapper_that_is_sent_is_made_of_its_tensors():
    sent = xm.send_cpu_data_to_device({"pair": Pair([torch.ones(2), torch.zeros(1)])}, "xla")
    assert isinstance(sent["pair"], Pair)
    assert [t.device.type for t in sent["pair"].tensors] == ["xla", "xla"]


class Holder:
    def __init__(self):
        self.number = 7
        self.itself = self


def test_keys_and_attributes_are_visited():
    found = []
    xu.for_each_instance({1: Holder(), "w": [5]}, lambda v: isinstance(v, (int, str)), found.append)
    assert found == [1, 7, "w", 5]


def test_keys_and_attributes_are_rewritten():
    holder = Holder()
    made = xu.for_each_instance_rewrite(
        {1: holder, "w": (5,)}, lambda v: isinstance(v, int), lambda v: v + 1
    )
    assert made == {2: holder, "w": (6,)} and holder.number == 8 and holder.itself is holder


def test_an_object_that_occurs_twice_is_visited_and_replaced_once():
    tied, visited = torch.zeros(2), []
    data = {"embedding": tied, "head": [tied]}
    xu.for_each_instance(data, torch.is_tensor, visited.append)
    assert len(visited) == 1
    changed = xu.for_each_instance_rewrite(data, torch.is_tensor, torch.clone)
    assert changed["embedding"] is changed["head"][0] is not tied


def test_setting_the_precision_warns_each_time(caplog):
    with caplog.at_level(logging.WARNING, logger="torch_xla.backends"):
        for _ in range(2):
            torch_xla.backends.set_mat_mul_precision("default")
    said = [r.getMessage() for r in caplog.records if r.name == "torch_xla.backends"]
    assert len(said) == 2
    assert said[0].startswith("Setting mat mul precision multiple times is not recommended. ")


def test_a_precision_that_is_unknown():
    with pytest.raises(ValueError) as caught:
        torch_xla.backends.set_mat_mul_precision("bad")
    assert str(caught.value) == "Invalid precision: bad. Must be one of default, high, highest."


MIXED = {
    "add": (lambda x, c: x + c, [3.0, 4.0]),
    "reflected": (lambda x, c: c + x, [3.0, 4.0]),
    "where": (lambda x, c: torch.where(c > 2, x, c), [2.0, 1.0]),
    "in place": (lambda x, c: x.clone().mul_(c), [2.0, 3.0]),
}


@pytest.mark.parametrize("case", MIXED)
def test_cpu_operands_are_copied_where_the_user_wants_it(case, monkeypatch):
    run, expected = MIXED[case]
    x, c = torch.ones(2, device="xla"), torch.tensor([2.0, 3.0])
    with pytest.raises(RuntimeError, match="Input tensor is not an XLA tensor"):
        run(x, c)
    monkeypatch.setenv("XLA_COPY_CPU_OPERANDS", "1")
    found = run(x, c)
    assert found.device.type == "xla" and found.tolist() == expected
    with pytest.raises(RuntimeError, match="Input tensor is not an XLA tensor"):
        torch.ones(2, 2, device="xla") @ torch.ones(2, 2)


def test_a_step_on_a_placeholder_costs_no_other_values():
    other = torch.ones(2, device="xla") + 1
    lost = xb.create_placeholder_tensor((2,), torch.float32) + 1
    with pytest.raises(RuntimeError, match="placeholder"):
        torch_xla.sync()
    torch_xla.sync()
    assert other.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="placeholder"):
        lost.cpu()


@pytest.mark.parametrize("module", ["xla_quantized_matmul", "quantized"])
def test_torchs_quantized_operators_come_with_the_import(run_python, module):
    run_python(
        f"""
        import torch, torch_xla.experimental.{module}
        ints = torch.ops.quantized_decomposed.quantize_per_channel(
            torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, -128, 127, torch.int8
        )
        assert ints.dtype == torch.int8
        """
    )


@pytest.mark.parametrize("reduce", [torch.max, torch.min])
def test_extremes_over_no_elements_raise_at_the_call(reduce):
    with pytest.raises(IndexError, match="to have non-zero size"):
        reduce(torch.zeros(3, 0, device="xla"), 1)
    assert reduce(torch.zeros(0, 3, device="xla"), 1).values.shape == (0,)


def test_autocast_gives_float32_where_torch_xla_does():
    x = torch.ones(3, dtype=torch.bfloat16, device="xla")
    with torch.autocast("xla", dtype=torch.bfloat16):
        assert torch.softmax(x, 0).dtype == (x**2).dtype == torch.float32


def test_a_compiled_function_gives_cpu_tensors():
    found = torch.compile(lambda t: t.cpu(), backend="openxla")(torch.ones(2, device="xla"))
    assert found.device.type == "cpu" and found.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.random_(10, 5),
        lambda t: t.to(torch.int8).random_(0, 1000),
        lambda t: t.uniform_(5, 1),
    ],
)
def test_impossible_ranges_of_random_numbers_raise(call):
    with pytest.raises(RuntimeError):
        call(torch.zeros(2, device="xla"))


def test_special_files_are_written_not_replaced(tmp_path):
    pipe = tmp_path / "pipe.pt"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        xm.save({"a": torch.ones(2, device="xla")}, pipe)
        found = torch.load(io.BytesIO(read.result(timeout=30)))
    assert found["a"].tolist() == [1.0, 1.0] and pipe.is_fifo()


def test_memory_of_the_device_is_neither_shared_nor_pinned(fallbacks):
    x = torch.ones(2, device="xla")
    assert x.is_shared() is False and x.is_pinned() is False
    refused = [
        (x.share_memory_, "no memory"),
        (torch.nn.Linear(2, 2).to("xla").share_memory, "no memory"),
        (x.pin_memory, "cannot pin 'torch.xla.FloatTensor' only dense CPU tensors can be pinned"),
    ]
    for call, text in refused:
        with pytest.raises(RuntimeError, match=text):
            call()
    assert not fallbacks()


def test_hardware_of_a_device_that_is_not_there():
    assert xm.xla_device_hw("xla:0") == xm.xla_device_hw("cpu") == "CPU"
    with pytest.raises(RuntimeError, match="no device xla:9"):
        xm.xla_device_hw("xla:9")
