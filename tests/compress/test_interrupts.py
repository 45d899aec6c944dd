"""Ctrl-C, at any moment and again: the model is as it was, and nothing waits for ever."""

import json
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from structlin import LowRank, plan_compression
from structlin._convert import plan
from structlin._model.interrupts import hold_interrupts, let_interrupts_in

# Real signals from a thread, two or three in quick succession, at many moments of one compression.
CHILD = """
import copy, json, os, signal, threading, time, warnings

import torch
from torch import nn

from structlin import LowRank, plan_compression

warnings.simplefilter("ignore")
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x):
        self.kept = x
        return self.norm(self.kept + self.down(self.up(x).relu()))


model, batches = nn.Sequential(*(Block() for _ in range(3))), list(torch.randn(60, 16).split(20))
main, found, interrupted = threading.main_thread(), [], 0


def run():
    plan_compression(model, LowRank(rank=1), batches, keep=0.5, refine=2)


def list_faults():
    for name, module in model.named_modules():
        own = vars(module)
        yield from (f"{name}.{each}" for each in own if each == "forward")
        yield from (f"{name}.{each}" for each in own if each.endswith("_hooks") and own[each])
        if not module.training or isinstance(module, Block) and type(module.up) is not nn.Linear:
            yield f"{name} is not as it was"
    other = copy.deepcopy(model).requires_grad_(False)
    for parameter in other.parameters():
        parameter.zero_()
    if other(batches[0]).any():
        yield "the copy runs layers of another model"
    others = [t.name for t in threading.enumerate() if t not in (main, sender)]
    yield from (f"{name} is alive" for name in others)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield "Ctrl-C has another handler"
    if not (torch.is_grad_enabled() and torch.backends.mha.get_fastpath_enabled()):
        yield "torch is not as it was"


def send(moments):
    start = time.perf_counter()
    for moment in moments:
        time.sleep(max(0, start + moment - time.perf_counter()))
        os.kill(os.getpid(), signal.SIGINT)


def settle():
    sender.join()
    time.sleep(0.05)


run()
whole = -time.perf_counter()
run()
whole += time.perf_counter()
for n in range(ATTEMPTS):
    first, gap = 0.02 + whole * n / ATTEMPTS, (1e-4, 1e-3, 5e-3, 2e-2)[n % 4]
    moments = [first, first + gap, first + 2 * gap][: 2 + n % 2]
    sender = threading.Thread(target=send, args=(moments,))
    try:
        try:
            try:
                try:
                    sender.start()
                    run()
                    settle()
                except KeyboardInterrupt:
                    interrupted += 1
                    settle()
            except KeyboardInterrupt:
                settle()
        except KeyboardInterrupt:
            settle()
    except KeyboardInterrupt:
        settle()
    found += list_faults()
print(json.dumps({"found": found, "interrupted": interrupted}))
os._exit(0)  # also where threads wait for ever
"""


@pytest.mark.slow
def test_ctrl_c_at_any_moment_and_again_at_once_leaves_the_model_as_it_was():
    child = [sys.executable, "-c", CHILD.replace("ATTEMPTS", "24")]
    done = subprocess.run(child, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["interrupted"] >= 12
    assert said["found"] == []


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_until_all_is_undone_except_where_it_is_let_in():
    done = []

    def work(inside):
        with hold_interrupts():
            try:
                interrupt() if inside == "held" else done.append("started")
                with hold_interrupts():
                    done.append("held")
                with let_interrupts_in():
                    done.append("let in")
                    interrupt()
            finally:
                interrupt()
                done.append("undone")

    for inside, expected in [("held", ["held"]), ("", ["started", "held", "let in"])]:
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            work(inside)
        assert done == [*expected, "undone"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_callers_own_that_does_not_raise_stops_nothing(monkeypatch):
    came = []
    before = signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        own = signal.getsignal(signal.SIGINT)
        with hold_interrupts():
            for _ in range(2):
                with let_interrupts_in():
                    interrupt()
            assert len(came) == 2
            interrupt()
            assert len(came) == 2
        assert len(came) == 3
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_holds_nothing():
    handlers = []

    def run():
        with hold_interrupts(), let_interrupts_in():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_a_plan_is_applied_whole_or_not_at_all(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    planned, swap = (
        plan_compression(model, LowRank(rank=2), [torch.randn(9, 8)], keep=None),
        plan.swap,
    )

    def swap_slowly(model, new):
        interrupt()
        return swap(model, new)

    monkeypatch.setattr(plan, "swap", swap_slowly)
    with pytest.raises(KeyboardInterrupt):
        planned.apply()
    assert not any(isinstance(layer, nn.Linear) for layer in model)
