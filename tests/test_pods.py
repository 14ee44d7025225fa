"""``examples/pods/train.py``: trains on real text over a mesh, continues after SIGTERM, compiles ahead of time."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path

import pytest
import yaml

from xla_core.support import flags
from xla_pjrt_tpu import slice_job

PODS = Path(__file__).resolve().parents[1] / "examples" / "pods"
SMALL = ("--length", "64", "--sequences", "8", "--loop", "--attention", "plain")
COUNTS = """
import json, os, runpy, signal, sys
sys.path.insert(0, sys.argv[1])
write = sys.stdout.write
def write_and_end(text):
    count = write(text)
    if text.startswith(os.environ["END_AFTER"]):
        os.kill(os.getpid(), signal.SIGTERM)
    return count
if "END_AFTER" in os.environ:
    sys.stdout.write = write_and_end
sys.argv = sys.argv[2:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    import torch_xla.debug.metrics as met
    names = ("UncachedCompile", "PersistentCacheHit")
    print(json.dumps({name: met.counter_value(name) or 0 for name in names}))
"""


def environment(variables):
    """That of a process with eight CPU devices, unless ``variables`` say otherwise."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "PJRT_", "TPU_"))}
    # what it learns does not depend on how well its programs are compiled
    given = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "XLA_COMPILE_EFFORT": "fast"}
    return kept | given | variables


@pytest.fixture
def start(program_servers, tmp_path):
    """Start the script in a process of its own: a future of what it returned and printed."""
    with ThreadPoolExecutor() as waiting:

        def run(*arguments, **variables):
            argv = [str(PODS), str(PODS / "train.py"), *arguments]
            return waiting.submit(
                next(program_servers).run, f"import sys\nsys.argv[1:] = {argv}\n{COUNTS}",
                cwd=str(tmp_path), environment=environment(variables), timeout=300,
            )  # fmt: skip

        yield run


@pytest.fixture
def train(start):
    """Run the script to its end: what ``reported`` says of it."""

    def run(*arguments, status=0, begins="", **variables):
        return reported(start(*arguments, **variables).result(), status, begins)

    return run


def reported(done, status=0, begins=""):
    """The losses that it printed by step, and its counts of programs; what it printed matches ``begins``."""
    out = done.stdout
    assert done.returncode == status, done.stderr[-3000:]
    assert re.match(begins, out), out
    counts = json.loads(out.splitlines()[-1])
    return {int(n): loss for n, loss in re.findall(r"step (\d+): loss (\S+)", out)}, counts


@pytest.mark.long
def test_it_learns_on_one_host_as_on_two_and_continues_when_it_was_asked_to_end(
    start, train, tmp_path
):
    """One test, as all compare with the first run: two processes with four devices each stand for two hosts."""
    cache = {"XLA_PERSISTENT_CACHE_PATH": str(tmp_path / "programs")}
    arguments = ("--mesh", "fsdp=8", "--steps", "20", *SMALL)
    trained, _ = train(*arguments, **cache)
    assert list(trained) == [10, 20]
    assert float(trained[20]) < float(trained[10]) < 6.93  # the logarithm of 1024 tokens

    on_hosts, second = two_hosts(start, *arguments)
    assert list(on_hosts) == list(trained) and not second  # only the first host prints
    for step, loss in on_hosts.items():  # sums over devices are taken in another order
        assert float(loss) == pytest.approx(float(trained[step]), abs=0.002)

    saved = ("--checkpoints", str(tmp_path / "run"))
    losses, _ = train(*arguments, *saved, **cache, END_AFTER="step 10:", status=143)
    assert losses == {10: trained[10]}
    losses, _ = train(*arguments, *saved, **cache, begins=r"begins at step 1[1-9]\n")
    assert losses == {20: trained[20]}  # bit-equal, as far as is printed


def two_hosts(start, *arguments):
    """The losses that each of two processes with four devices prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    given = {"XLA_COORDINATOR_ADDRESS": address, "XLA_PROCESS_COUNT": "2", "CPU_NUM_DEVICES": "4"}
    hosts = [start(*arguments, **given, XLA_PROCESS_INDEX=str(index)) for index in range(2)]
    return [reported(host.result())[0] for host in hosts]


def test_the_recipes_start_what_there_is(monkeypatch):
    """The image's commands and variables exist; the pods are as many as the slice has hosts."""
    monkeypatch.syspath_prepend(str(PODS))
    import train

    text = (PODS / "Dockerfile").read_text().replace("\\\n", "")
    set_there = dict(re.findall(r"\b((?:XLA|PJRT)_\w+)=(\S+)", text))
    assert set_there.keys() <= flags.FLAGS.keys() and len(set_there) == 3
    (step,) = re.findall(r'STEP="(--.*?)"', text)
    planned, run = re.findall(r"train\.py( .*?)(?:$|\"\])", text, re.MULTILINE)
    planned = train.parse_arguments(planned.partition(" -- ")[2].replace("$STEP", step).split())
    started = train.parse_arguments(run.replace("$STEP", step).split())
    assert planned.checkpoints is None and started.checkpoints == "$CHECKPOINTS"
    same = ("size", "mesh", "length", "sequences", "loop", "attention")
    assert [getattr(planned, name) for name in same] == [getattr(started, name) for name in same]

    (job,) = yaml.safe_load((PODS / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    hosts = job["template"]["spec"]
    pod = hosts["template"]["spec"]
    (container,) = pod["containers"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = hosts["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    assert math.prod(map(int, topology.split("x"))) == chips == 16
    assert planned.mesh == f"fsdp={chips}" and f"TOPOLOGY=v5e:{topology}" in text
    assert {port["containerPort"] for port in container["ports"]} >= {slice_job.PORT}
    assert [variable["name"] for variable in container["env"]] == ["CHECKPOINTS"]


@pytest.mark.long
def test_a_host_finds_all_programs_of_a_run_that_only_compiled(train, tmp_path):
    """The real compiler for four chips, twice: the second process stands for a host."""
    if util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: its wheels are for Linux on x86-64")
    ahead = {
        "PJRT_DEVICE": "TPU",
        "XLA_AOT_TOPOLOGY": "v5e:2x2",
        "XLA_AOT_READS": "zeros",
        "XLA_PERSISTENT_CACHE_PATH": str(tmp_path / "programs"),
    }
    arguments = (
        "--mesh",
        "fsdp=4",
        "--steps",
        "3",
        "--length",
        "256",
        "--loop",
        "--sequences",
        "4",
    )
    _, compiled = train(*arguments, **ahead)
    # parameters, the first step, in which the optimizer creates its state, and the others
    assert compiled == {"UncachedCompile": 3, "PersistentCacheHit": 0}
    _, found = train(*arguments, **ahead, XLA_PERSISTENT_CACHE_READ_ONLY="1")
    assert found == {"UncachedCompile": 0, "PersistentCacheHit": 3}
