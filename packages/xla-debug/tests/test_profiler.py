"""Profiles: files that TensorBoard and Perfetto open, with the user's scopes on device events."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
import warnings

import pytest
import torch
from jax.profiler import ProfileData
from torch import nn

import torch_xla
import torch_xla.debug.profiler as xp
from xla_core.extension_api import runtime
from xla_core.extension_api.steps import operations_of
from xla_core.support.protobuf_wire import read_message
from xla_core.testing.jax_state import backends_started
from xla_debug import perfetto, profiler, remote_profile


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 128)
        self.fc2 = nn.Linear(128, 8)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def events_of(path):
    """Names and statistics of the events in a profile."""
    data = ProfileData.from_file(str(path))
    with warnings.catch_warnings():
        # jaxlib 0.12 on Python 3.12 warns that its type lacks __module__, and aborts if that raises
        warnings.simplefilter("ignore", DeprecationWarning)
        events = [e for plane in data.planes for line in plane.lines for e in line.events]
        return [(event.name, dict(event.stats)) for event in events]


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    model = Net().to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(256, 64).to("xla")
    xp.start_trace(str(folder))
    with pytest.raises(RuntimeError, match="already"):
        xp.start_trace(str(folder))
    for step in range(3):
        with xp.StepTrace("train", step_num=step):
            with xp.Trace("loss_part"):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    loss.item()
    xp.stop_trace()
    with pytest.raises(RuntimeError, match="start_trace"):
        xp.stop_trace()
    (found,) = (folder / "plugins" / "profile").iterdir()
    return found


def test_no_backend_of_jax_was_started(profile):
    assert backends_started() == ()


def test_the_xplane_file_has_steps_and_programs(profile):
    (path,) = profile.glob("*.xplane.pb")
    events = events_of(path)
    assert sorted(stats["step_num"] for name, stats in events if name == "train") == [0, 1, 2]
    assert sum(name == "loss_part" for name, _ in events) == 3
    assert {stats["hlo_module"] for _, stats in events if "hlo_op" in stats}
    # the HLO in the profile, from which XProf takes names, has the scopes
    content = path.read_bytes()
    assert b"train/loss_part/Net/fc1/aten.linear.default" in content
    assert b"backward/train/loss_part/Net/fc2" in content


def test_perfetto_shows_the_scopes_of_device_events(profile):
    (path,) = profile.glob("*.trace.json.gz")
    with gzip.open(path, "rt") as file:
        content = json.load(file)
    assert "metadata" not in content
    device = [e for e in content["traceEvents"] if "hlo_op" in (e.get("args") or {})]
    scoped = [e["args"]["scope"] for e in device if "scope" in e["args"]]
    assert len(scoped) >= 0.8 * len(device) > 0
    assert any(s.startswith("train/loss_part/Net/fc1/aten.linear") for s in scoped)
    assert any(s.startswith("backward/train/loss_part/Net") for s in scoped)


def test_rows_are_added_once(tmp_path, monkeypatch):
    """To the files of the profile that was just written, not to those of one written a moment before."""
    labelled, contents = [], iter(["a", "ab", "abc"])

    def export(session, folder):
        path = tmp_path / "plugins" / "profile" / session / "host.trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(next(contents))

    monkeypatch.setattr(profiler.profiler, "profiler_export", export)
    monkeypatch.setattr(perfetto, "add_scopes", lambda path: labelled.append(path.parent.name))
    for session in ("first", "second", "second"):
        profiler._export(session, tmp_path)
    assert labelled == ["first", "second", "second"]


def test_perfetto_has_rows_of_modules_and_operators(profile):
    (path,) = profile.glob("*.trace.json.gz")
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    rows = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("ph") == "M"
        and e["name"] == "thread_name"
        and e["args"]["name"].endswith("operators")
    }
    assert rows
    slices = [e for e in events if (e.get("pid"), e.get("tid")) in rows and e["ph"] == "X"]
    names = {e["name"] for e in slices}
    assert {"train", "loss_part", "Net", "fc1", "fc2", "backward", "aten.linear.default"} <= names
    # a module's slice holds the slices of what runs in it, and instructions of one row do not overlap
    for row in rows:
        own = sorted((e["ts"], -e["dur"]) for e in slices if (e["pid"], e["tid"]) == row)
        ends = []
        for begin, length in own:
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or begin - length <= ends[-1] + 1e-6
            ends.append(begin - length)
    operators = {e["args"]["operator"] for e in events if "operator" in (e.get("args") or {})}
    assert "aten.linear.default" in operators


def test_levels_of_a_scope():
    assert perfetto.levels("train/Net/layers.0/fc1/aten.mm.default/dot_general") == (
        "train", "Net", "layers.0", "fc1", "aten.mm.default",
    )  # fmt: skip
    assert perfetto.levels("Net/reduce_sum") == ("Net",)


def test_a_step_trace_ends_the_step():
    x = torch.ones(3).to("xla")
    with xp.StepTrace("step"):
        y = x + 1
        assert runtime.trace_of(None).cur.depth > 0
    assert runtime.trace_of(None).cur.depth == 0
    with pytest.raises(ZeroDivisionError), xp.StepTrace("fails"):
        y = x + 2
        raise ZeroDivisionError
    assert runtime.trace_of(None).cur.depth > 0
    torch_xla.sync()
    assert y.tolist() == [3, 3, 3]


def test_trace_me_decorates_and_encloses():
    # a shape of its own: a step that another test has recorded would have that test's scopes
    x = torch.ones(3, 7, 1, 5).to("xla")

    @xp.trace_me("decorated")
    def compute():
        return x.tan()

    first = compute()
    with xp.trace_me("block"):
        second = x.atan()
    scopes = [e.where.scope for e in operations_of(runtime.trace_of(None).cur.path())]
    assert scopes == ["decorated", "block"]
    assert first.shape == second.shape
    torch_xla.sync()


def test_instructions_and_their_scopes():
    hlo = '  ROOT %dot.3 = f32[4]{0} dot(%a, %b), metadata={op_name="step_1/Net/fc/aten.mm/dot_general"}\n'
    assert perfetto.instruction_scopes(hlo) == {"dot.3": "Net/fc/aten.mm/dot_general"}


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_a_server_of_this_process_is_recorded(tmp_path):
    port = free_port()
    server = xp.start_server(port)
    try:
        assert server is not None
        assert xp.start_server(port) is server
        thread = xp.trace_detached(f"localhost:{port}", str(tmp_path), duration_ms=200)
        x = torch.ones(8).to("xla")
        while thread.is_alive():
            x = x * 1.5
            torch_xla.sync()
        thread.join()
        assert len(list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))) == 1
    finally:
        del server
        xp.stop_server()


SERVED = """
import sys, time
import torch, torch_xla
import torch_xla.debug.profiler as xp

server = xp.start_server(int(sys.argv[1]))
x = torch.ones(16, 16).to("xla")
told = False
while True:
    with xp.StepTrace("served"):
        y = (x @ x).tanh()
    if not told:  # compiled by now
        told = True
        print("up", flush=True)
    time.sleep(0.01)
"""


def test_another_process_is_recorded(tmp_path):
    pytest.importorskip("grpc", reason="asking another process needs grpcio (the extra remote)")
    port = free_port()
    command = [sys.executable, "-c", SERVED, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "up\n"
            xp.trace(f"localhost:{port}", str(tmp_path), duration_ms=500)
        finally:
            child.kill()
    (path,) = tmp_path.glob("plugins/profile/*/localhost.xplane.pb")
    assert [name for name, _ in events_of(path)].count("served") >= 3
    with pytest.raises(RuntimeError, match=r"gave no profile in 1 attempts.*start_server"):
        xp.trace(
            f"localhost:{port}", str(tmp_path), duration_ms=10, num_tracing_attempts=1, timeout_s=2
        )


def test_bad_addresses():
    with pytest.raises(ValueError, match="host:port"):
        xp.trace("nowhere", "/nowhere")


def test_another_process_without_grpc(monkeypatch):
    real = remote_profile.importlib.import_module

    def missing(name):
        if name == "grpc":
            raise ModuleNotFoundError(name=name)
        return real(name)

    monkeypatch.setattr(remote_profile.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"xla-debug\[remote\]"):
        xp.trace(f"localhost:{free_port()}", "/nowhere")


def test_messages_are_read_back():
    request = remote_profile._request(300, 2, "now")
    fields = read_message(request)
    assert fields[1] == 300 and fields[6] == b"now" and fields[3] == b"xspace"
    assert read_message(fields[4]) == {5: 1, 2: 2, 7: 1, 9: 300}
    with pytest.raises(ValueError, match="unknown kind"):
        read_message(b"\x0b")
    for truncated in (b"\x0d", b"\x0d\x01\x02", b"\x12\x05ab", b"\x08\x80", b"\x80"):
        with pytest.raises(ValueError, match="ends inside a field"):
            read_message(truncated)
