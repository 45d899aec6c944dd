"""Ctrl-C, at any moment and again: the model is as it was, and nothing waits for ever."""

import contextlib
import inspect
import json
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

from structlin import (
    LowRank,
    StructuredLinear,
    compress,
    convert,
    densify,
    load,
    plan_compression,
    quantize,
    save,
)
from structlin import plan as plan_conversion
from structlin._convert.plan import Plan
from structlin._model.linears import replace_layers
from structlin._model.transaction import complete

# Real signals from a thread, one alone or two or three in quick succession, at many moments of one
# compression. Whatever comes, the model is as it was. After one alone no thread is left.
# Nor are gradients off where they were on.
CHILD = """
import copy, json, os, signal, threading, time, warnings

import torch
from torch import nn

from structlin import LowRank, plan_compression

# a shell starts what it runs in the background with Ctrl-C ignored, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
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
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield "Ctrl-C has another handler"


def find_threads():
    return {thread for thread in threading.enumerate() if thread not in (main, sender)}


def send(moments):
    time.sleep(0.01)  # until `sender.start` has returned
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
    moments = [first, first + gap, first + 2 * gap][: 1 + n % 3]
    sender = threading.Thread(target=send, args=(moments,))
    before = find_threads()
    error = None
    try:
        try:
            try:
                try:
                    sender.start()
                    run()
                    settle()
                except BaseException as error_of_run:
                    error = type(error_of_run)
                    settle()
            except BaseException:
                settle()
        except BaseException:
            settle()
    except BaseException:
        settle()
    interrupted += error is not None
    if len(moments) == 1 and not torch.is_grad_enabled():
        found.append("gradients are off")
    torch.set_grad_enabled(True)
    torch.backends.mha.set_fastpath_enabled(True)
    found += list_faults()
    if len(moments) == 1:
        found += [f"{thread.name} is alive" for thread in find_threads() - before]
        found += [repr(error)] * (error not in (None, KeyboardInterrupt))
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


@pytest.mark.parametrize("mode", [True, False])
def test_ctrl_c_as_torch_enters_a_mode_of_gradients_leaves_no_other_mode(mode, monkeypatch):
    class Interrupted(torch.set_grad_enabled):
        calls = 0

        def __init__(self, mode: bool) -> None:
            super().__init__(mode)
            Interrupted.calls += 1
            if Interrupted.calls == 1:
                raise KeyboardInterrupt

    model, x = build(), X.clone()
    with torch.set_grad_enabled(mode):
        monkeypatch.setattr(torch, "set_grad_enabled", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            plan_compression(model, LowRank(rank=2), [x])
        assert torch.is_grad_enabled() == mode
    assert Interrupted.calls >= 2


# ---- a line of ours at a time --------------------------------------------------------------------


class CtrlC:
    """Within it a KeyboardInterrupt comes before one of the lines of these functions' files."""

    def __init__(self, line: int) -> None:
        self.lines_left, self.came = line, False
        self.files = {inspect.getfile(each) for each in (replace_layers, complete, Plan, load)}

    def trace(self, frame, event, argument):
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line" and not self.came:
            self.came = self.lines_left == 0
            self.lines_left -= 1
            if self.came:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self) -> "CtrlC":
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8))


X = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
CHANGES = {
    "plan_compression": lambda: plan_compression(build(), LowRank(rank=2), [X], keep=None).apply,
    "refined": lambda: (
        plan_compression(build(), LowRank(rank=2), [X], keep=None, refine=30, progress=False).apply
    ),
    "convert": lambda: plan_conversion(build(), LowRank(rank=2), init="project").apply,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_applied_whole_or_not_at_all_before_whatever_line_ctrl_c_comes(change):
    dense, whole, line = build()(X), CHANGES[change]()()(X), 0
    applied, ctrl_c, apply = 0, CtrlC(0), CHANGES[change]()
    assert not torch.equal(dense, whole)
    while line == 0 or ctrl_c.came:
        ctrl_c = CtrlC(line)
        with contextlib.suppress(KeyboardInterrupt), ctrl_c:
            apply()
        model = apply.__self__.model
        kinds = {type(layer) for layer in model if not isinstance(layer, nn.Tanh | nn.LayerNorm)}
        assert kinds in ({nn.Linear}, {StructuredLinear}), line
        assert torch.equal(model(X), dense if kinds == {nn.Linear} else whole), line
        if kinds == {StructuredLinear}:  # otherwise the same plan is applied again
            applied += 1
            apply = CHANGES[change]()
        line += 3  # every third line
    assert 1 <= applied < 20 < line


def test_a_model_is_loaded_whole_or_not_at_all_before_whatever_line_ctrl_c_comes(tmp_path):
    save(convert(build(), LowRank(rank=2), init="spectral", include="0"), tmp_path)
    before, whole, line = build()(X), load(build(), tmp_path)(X), 0
    seen, ctrl_c = set(), CtrlC(0)
    while line == 0 or ctrl_c.came:
        model, ctrl_c = build(), CtrlC(line)
        nn.init.ones_(model[2].weight)
        before = model(X)
        with contextlib.suppress(KeyboardInterrupt), ctrl_c:
            load(model, tmp_path)
        dense = type(model[0]) is nn.Linear
        assert torch.equal(model(X), before if dense else whole), line
        seen.add(dense)
        line += 3
    assert len(seen) == 2


def test_steps_are_all_taken_however_often_ctrl_c_comes_and_it_is_raised_at_the_end():
    taken = []

    def step(name):
        taken.append(name)
        if taken.count(name) < 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        complete([lambda: step("second"), lambda: step("first")])
    assert taken == ["first"] * 3 + ["second"] * 3


@pytest.mark.parametrize(
    ("interrupted", "error"), [(False, "second fails"), (True, "Ctrl-C at first")]
)
def test_steps_are_all_taken_though_some_fail_and_the_first_error_is_raised(interrupted, error):
    taken = []

    def step(name):
        taken.append(name)
        if interrupted and taken == ["third", "second", "first"]:
            raise KeyboardInterrupt("Ctrl-C at first")
        if name != "third":
            raise OSError(f"{name} fails")

    steps = [partial(step, name) for name in ("first", "second", "third")]
    with pytest.raises((OSError, KeyboardInterrupt), match=error):
        complete(steps)
    assert taken == ["third", "second", "first"] + ["first"] * interrupted
    assert steps == []


class Fussy(nn.Module):
    """It refuses the second layer that somebody sets."""

    def __init__(self, kind=nn.Linear) -> None:
        super().__init__()
        self.a, self.b, self.set = kind(8, 8), kind(8, 8), []

    def __setattr__(self, name, value):
        if isinstance(value, nn.Module) and "set" in vars(self):
            self.set.append(name)
            if len(self.set) == 2:
                raise RuntimeError("no second layer")
        super().__setattr__(name, value)

    def forward(self, x):
        return self.b(self.a(x))


def structured(*widths) -> StructuredLinear:
    return StructuredLinear(*widths, LowRank(rank=2))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (nn.Linear, lambda model, path: convert(model, LowRank(rank=2))),
        (nn.Linear, lambda model, path: compress(model, LowRank(rank=2), [X], keep=None)),
        (nn.Linear, load),
        (structured, lambda model, path: densify(model)),
        (structured, lambda model, path: quantize(model)),
    ],
    ids=["convert", "compress", "load", "densify", "quantize"],
)
def test_a_model_that_refuses_a_layer_midway_is_as_it_was(kind, change, tmp_path):
    whole = Fussy(structured)
    save(whole, tmp_path)
    model = Fussy(kind)
    layers, y = (model.a, model.b), model(X)
    with pytest.raises(RuntimeError, match="no second layer"):
        change(model, tmp_path)
    assert (model.a, model.b) == layers
    assert torch.equal(model(X), y)


def test_no_function_of_ours_touches_the_handler_of_ctrl_c():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    class Model(nn.Linear):
        def forward(self, x):
            seen.append(signal.getsignal(signal.SIGINT))
            return super().forward(x)

    model = nn.Sequential(Model(8, 8), nn.Linear(8, 8))
    compress(model, LowRank(rank=2), [X], keep=None)
    assert len(seen) > 2
    assert set(seen) == {before}
