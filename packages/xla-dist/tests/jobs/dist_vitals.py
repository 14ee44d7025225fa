"""What the processes of tests run that never arrive somewhere, or only seem so."""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import util
from pathlib import Path

import dist_jobs
import torch
import torch.distributed as dist

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.experimental.distributed_checkpoint import CheckpointManager
from xla_dist.job_health import failure_reports, flight_recorder, local_processes
from xla_dist.processes import session

PLACE = "never reached by all"


def locks_up(index, how, where):
    """The second process waits for itself, for ever."""
    dist_jobs.reduced(4)
    if index == 1:
        LOCKS[how]()
    if where != "the end":
        dist_jobs.waits(index, where)


def _acquired_twice():
    lock = threading.Lock()
    with lock:
        lock.acquire()


def _crossed_locks():
    one, two = threading.Lock(), threading.Lock()
    met = threading.Barrier(2)

    def take(first, second):
        with first:
            met.wait()
            second.acquire()

    threading.Thread(target=take, args=(one, two), daemon=True).start()
    take(two, one)


def _joins_a_worker_that_waits_for_work():
    worker = threading.Thread(target=queue.Queue().get, daemon=True)
    worker.start()
    worker.join()


LOCKS = {
    "one lock": _acquired_twice,
    "two locks": _crossed_locks,
    "a worker": _joins_a_worker_that_waits_for_work,
}


def _sleeps(seconds):
    time.sleep(seconds)


def _computes(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def _waits_for_a_process(seconds):
    subprocess.run([sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"], check=True)


def _waits_for_input(seconds):
    end, other = os.pipe()
    threading.Timer(seconds, os.write, (other, b"x")).start()
    os.read(end, 1)


def _waits_for_a_sleeper(seconds):
    found = threading.Event()
    threading.Thread(target=lambda: (time.sleep(seconds), found.set())).start()
    found.wait()


def _has_an_alarm(seconds):
    lock, former = threading.Lock(), signal.signal(signal.SIGALRM, lambda *_: lock.release())
    lock.acquire()
    signal.setitimer(signal.ITIMER_REAL, seconds)
    lock.acquire()
    signal.signal(signal.SIGALRM, former)


def _keeps_the_interpreter(seconds):
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


SLOW = {
    "sleeps": _sleeps,
    "computes": _computes,
    "a process": _waits_for_a_process,
    "input": _waits_for_input,
    "a sleeper": _waits_for_a_sleeper,
    "an alarm": _has_an_alarm,
    "the interpreter": _keeps_the_interpreter,
}


def is_slow_in_many_ways(index, seconds):
    """What the first process logs while the second comes late to one rendezvous after the other."""
    log = dist_jobs.logged()
    for name, slow in SLOW.items():
        if index == 1:
            slow(seconds)
        xm.rendezvous(name)
    return log.getvalue()


def ends_on_another_host(index, how):
    """As ``is_stopped``, where no process can look at another one."""
    local_processes._system = lambda: f"host {index}"
    dist_jobs.reduced(4)
    if index == 1:
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}[how])
    dist_jobs.waits(index, "rendezvous")


def fails_while_one_is_busy(index):
    """The third process raises while the second does not answer; the first waits for both."""
    dist_jobs.reduced(4)
    if index == 1:
        _keeps_the_interpreter(30)
    if index == 2:
        time.sleep(1)  # so that all who look after the others have begun to wait for the second
        raise ValueError("the third process gives up")
    dist_jobs.waits(index, "rendezvous")


def goes_around(index):
    """Each waits for the next one."""
    xm.rendezvous(f"of {index}", replicas=sorted([index, (index + 1) % 3]))


def waits_for_a_key(index):
    """Of torch.distributed's store, which nobody sets."""
    dist.init_process_group("xla", init_method="xla://")
    if index == 0:
        dist.distributed_c10d._get_default_store().get("of nobody")


def is_stopped(index, where):
    """The second process is frozen, as by a debugger."""
    dist_jobs.reduced(4)
    if index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist_jobs.waits(index, where)


def trains(index, steps, seconds=0.0):
    """Steps with a collective each, which XLA_DIST_FAULT ends or not."""
    w = torch.ones(4, device="xla")
    for _ in range(steps):
        w = w + xm.all_reduce("sum", w) * 0.1
        torch_xla.sync()
        w.cpu()
        time.sleep(seconds)


def trains_behind(index, steps):
    """As ``trains``; the second process ends no step before the first waits for it in the next one."""
    w = torch.ones(4, device="xla")
    for _ in range(steps):
        w = w + xm.all_reduce("sum", w) * 0.1
        w.cpu()
        if index == 1:
            _until_ahead(0)
        torch_xla.sync()


def _until_ahead(other):
    """Until a process has launched a collective that this one has not."""
    order_check = failure_reports.watchdog().order_check
    while other not in order_check.seen() or order_check.seen()[other] <= order_check.length(other):
        time.sleep(0.01)
        order_check.compare()


def trains_and_saves(index, folder, steps):
    """As ``trains``, with a checkpoint after each step."""
    dist.init_process_group("gloo", init_method="xla://")
    saver = CheckpointManager(f"{folder}/run", 1, max_to_keep=2)
    w = torch.ones(4, device="xla")
    for step in range(steps):
        w = w + xm.all_reduce("sum", w) * 0.1
        torch_xla.sync()
        saver.save(step, {"w": w})


def averages_on_the_host(index, steps):
    """A collective of the script's own on the CPU in each step, the last of which the second never calls."""
    dist.init_process_group("gloo", init_method="xla://")
    for step in range(steps):
        dist_jobs.reduced(4)
        if (index, step) == (1, 3):
            time.sleep(3600)  # the test ends it
        dist.all_reduce(torch.ones(5 + step))


def trains_and_asks(index):
    """As ``trains``; the first process asks for a report on the way."""
    trains(index, 14)
    if index == 0:
        os.kill(os.getpid(), flight_recorder.SIGNAL)
    trains(index, 8)


def launches(_index, *args):
    """A launcher that is the coordinator of its job."""
    torch_xla.launch(trains, args, start_method="forkserver")


def launches_apart(_index, *args):
    """A launcher whose job's coordinator is a process of its own."""
    torch_xla.launch(trains, args, start_method="fork")


def trains_a_model(index):
    """The bits of parameters after three steps on each process's own data."""
    torch.manual_seed(0)
    xm.set_rng_state(index)
    model = torch.nn.Sequential(
        torch.nn.Linear(33, 65), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(65, 3)
    ).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(16, 33, generator=torch.Generator().manual_seed(index)).to("xla")
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
    return [p.detach().cpu().numpy().tobytes().hex() for p in model.parameters()]


def ends_while_it_asks(index, folder):
    """Returns while the thread that asks who is alive waits for an answer; notes the threads at exit."""
    xm.rendezvous("begin")
    _asks()
    util.Finalize(None, _note_threads, (f"{folder}/{index}",), exitpriority=10)


def fails_while_it_asks(index, folder):
    """The first process raises meanwhile, the second one waits for it."""
    atexit.register(_note_threads, f"{folder}/{index}")  # first, so that it is called last
    dist_jobs.reduced(4)
    if index == 0:
        _asks()
        raise ValueError("it fails")
    dist_jobs.waits(index, "rendezvous")


def _asks():
    asking = threading.Event()

    def ask(everyone):
        asking.set()
        time.sleep(1.8)
        return everyone

    session.current().watchdog.heartbeats._ask = ask
    asking.wait()


def _note_threads(path):
    Path(path).write_text(" ".join(thread.name for thread in threading.enumerate()))
