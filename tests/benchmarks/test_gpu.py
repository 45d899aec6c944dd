"""`benchmarks.gpu` on a CPU, its kernels replaced: a fault loses one row, and the end says so."""

import argparse
import math
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import gpu, gpu_steps
from benchmarks.harness import race, record, timing
from benchmarks.speed import layer
from structlin._engine.triton import pair as pairs

H100 = timing.Ceilings(rate=798e12, bandwidth=3.0e12, call=2e-6)


@pytest.fixture
def by(monkeypatch):
    """Sets what goes wrong in the kernels, whose results are the right ones."""
    for name, value in {"DEVICE": "cpu", "ROUNDS": (1, 1), "WAITS": 1}.items():
        monkeypatch.setattr(gpu, name, value)

    def use(fault):
        def run(layer, name):
            found = [each.to(layer.x.dtype) for each in layer.wanted[name]]
            kernel = layer.kernels[name][:2]
            launch = pairs.launch_of(*kernel, 0, layer.x.dtype, layer.x.device)
            launch(0, (), ())  # launches nothing, and is counted
            fault(name, found[0], launch.tile)
            return found

        monkeypatch.setattr(gpu.Layer, "run", run)

    every = lambda layer: [each for name in NAMES for each in layer.run(name)]  # noqa: E731
    monkeypatch.setattr(gpu.Layer, "forward_backward", every)
    use(lambda name, out, tile: None)
    return use


NAMES, DENSE = ("y", "dx", "dw"), ["nn.Linear", gpu.EQUAL]
USERS = [*DENSE, "StructuredLinear", "torch.bmm", "strided torch.bmm", gpu.BEST]


def rows_of_a_layer(tmp_path, job=gpu.layer) -> gpu.Rows:
    rows = gpu.Rows(tmp_path / "gpu.jsonl")
    job(rows, math.inf, name="BTT r=1", width=16, dtype="tf32", tokens=40)
    return rows


def found_in(rows: gpu.Rows, kind: str, *keys: str) -> list[str]:
    return [", ".join(str(row[key]) for key in keys) for row in rows.read(kind)]


def test_a_layer_has_a_row_for_each_way_and_each_kernel(by, tmp_path):
    rows = rows_of_a_layer(tmp_path)
    assert found_in(rows, "layer", "variant") == [*USERS, "kernels", "nn.Linear again"]
    assert all(row["error"] < 4e-3 and row["wall"]["median"] > 0 for row in rows.read("layer"))
    assert found_in(rows, "layer", "launches") == [*"00000030"]
    kernels = [f"BTT r=1{between}, {name}" for between in ("", ", SiLU") for name in NAMES]
    assert found_in(rows, "kernel", "structure", "kernel") == kernels
    assert not rows.read("error")


@pytest.mark.parametrize("fault", [lambda out: out.mul_(2), lambda out: {}["a driver's error"]])
def test_a_kernel_that_is_refused_or_wrong_is_not_timed_and_the_rest_is(by, tmp_path, fault):
    by(lambda name, out, tile: name == "dw" and fault(out))
    rows = rows_of_a_layer(tmp_path)
    assert found_in(rows, "layer", "variant") == [*USERS, "nn.Linear again"]
    assert found_in(rows, "error", "what") == ["kernels", "BTT r=1, dw", "BTT r=1, SiLU, dw"]
    assert found_in(rows, "kernel", "kernel") == ["y", "dx", "y", "dx"]


def test_a_tile_that_is_wrong_is_not_timed_and_one_that_is_refused_is_no_fault(by, tmp_path):
    def fault(name, out, tile):
        if tile.warps == 8:
            out.mul_(1.5)
        if tile.stages == 2:
            raise RuntimeError("ptxas")

    by(fault)
    rows = gpu.Rows(tmp_path / "gpu.jsonl")
    gpu.tiles(rows, math.inf, "Monarch 4", 64, "float16", 256)
    timed = {(row["kernel"], *row["tile"][6:]) for row in rows.read("tile")}
    assert timed == {(name, 4, 3) for name in NAMES}
    assert {*map(gpu.is_fault, rows.read("refused"))} == {False}
    assert {*map(gpu.is_fault, rows.read("error"))} == {True}


def test_torch_compile_is_compared_with_dense(by, tmp_path, monkeypatch):
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **how: plain(run, backend="eager", **how))
    rows = rows_of_a_layer(tmp_path, gpu.compiled)
    compiled = [f"{way}, compiled" for way in ("StructuredLinear", gpu.BEST, "torch.bmm")]
    ways = [*DENSE, "strided torch.bmm", *compiled, "nn.Linear again"]
    assert found_in(rows, "layer", "variant") == ways


def test_tiny_layers_of_every_structure_are_checked(by, tmp_path):
    rows = gpu.Rows(tmp_path / "gpu.jsonl")
    gpu.small(rows, math.inf)
    assert all(row["passed"] for row in rows.read("check"))
    assert len(found_in(rows, "check", "structure")) == 2 * 9


@pytest.fixture
def run(monkeypatch, tmp_path):
    """`measure` of these jobs on a GPU that works until the context is `lost`."""
    state = SimpleNamespace(lost=False, again=[])

    def synchronize():
        if state.lost:
            raise RuntimeError("an illegal memory access was encountered")

    def execute(program, command):
        state.again = command
        raise SystemExit("a new process")

    def measure(*todo, start=0):
        monkeypatch.setattr(gpu, "jobs", lambda *_, **__: todo)
        options = {"out": tmp_path, "budget": 99, "widths": [16], "structures": [], "smoke": True}
        gpu.measure(argparse.Namespace(start=start, **options), gpu.time.perf_counter())

    monkeypatch.setattr(gpu, "ceilings", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(gpu.os, "execv", execute)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3"))
    measure.state = state
    return measure


def test_the_last_line_counts_the_faults_and_the_exit_code_says_whether_there_are_any(run, capsys):
    def fail(rows, until):
        print("// all of the PTX")
        raise ValueError("a fault")

    good = ("good", lambda rows, until: rows.add("check", passed=True))
    run(good)
    assert capsys.readouterr().out.endswith("0 FAULTS\n")
    with pytest.raises(SystemExit) as left:
        run(("bad", fail), good, ("wrong", lambda rows, until: rows.add("check", passed=False)))
    out = capsys.readouterr().out
    assert left.value.code == 1
    counts = "0 self-test, 2 check, 0 layer, 0 refused rows; 0 jobs left by the budget"
    assert out.endswith(f"summary: {counts}; 2 FAULTS\n")
    assert "PTX" not in out


def test_a_lost_gpu_begins_the_same_job_again_without_what_failed(run, by, monkeypatch):
    monkeypatch.setattr(gpu, "DEVICE", "cuda")
    state, done, before = run.state, [], ("before", lambda *_: None)

    def fatal(*_):
        state.lost = True
        raise RuntimeError("launch failed")

    def job(rows, until):
        for what in ("first", "fatal", "last"):
            rows.attempt(what, lambda what=what: fatal() if what == "fatal" else done.append(what))

    with pytest.raises(SystemExit, match="a new process"):
        run(before, ("job", job))
    assert state.again[state.again.index("--start") + 1] == "1"
    assert "--smoke" in state.again
    state.lost = False
    with pytest.raises(SystemExit):  # the faults of the first process
        run(before, ("job", job), start=1)
    assert done == ["first", "first", "last"]
    with pytest.raises(SystemExit, match="a new process"):  # lost by a job, not by a part of it
        run(("job", fatal), before)
    assert state.again[state.again.index("--start") + 1] == "1"


def test_the_bound_of_a_kernel_has_what_is_computed_again():
    layers = [gpu.Layer(s, 2048, torch.bfloat16) for s in gpu.ways_of("BTT r=1", 4096).values()]
    plain, gated = layers
    forward = H100.bound(plain.structure, 2048, 2, backward=False, fused=True)
    assert plain.bound("y", H100) == plain.bound("dx", H100) == pytest.approx(forward)
    slow = replace(H100, rate=1e12)
    bounds = plain.bound("y", slow), plain.bound("dw", slow), gated.bound("dx", slow)
    assert bounds == pytest.approx([each * bounds[0] for each in (1, 2, 1.5)])


def test_the_gpu_sleeps_after_its_caches_are_cold_and_before_the_time_begins(monkeypatch):
    seen = []

    def event(enable_timing):
        waits = {"synchronize": lambda: None, "elapsed_time": lambda end: 2.0}
        return SimpleNamespace(record=lambda: seen.append("event"), **waits)

    buffer = SimpleNamespace(zero_=lambda: seen.append("fill"))
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("sleep"))
    monkeypatch.setattr(timing.torch, "empty", lambda *_, **__: buffer)
    assert timing.seconds(lambda: seen.append("work"), "cuda") == 2e-3
    assert seen == ["fill", "sleep", "event", "work", "event"]


def test_a_result_of_a_gpu_has_a_name_of_its_own(monkeypatch):
    names = []
    monkeypatch.setattr(race, "result_path", lambda options, name: names.append(name))
    for device in ("cpu", "cuda"):
        replace(layer.BENCH, jobs=lambda device, smoke: []).main(["--device", device])
    assert names == ["layer", "layer_gpu"]


def test_the_page_shows_what_ran_on_a_gpu_and_whether_it_reaches_a_goal(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert gpu.show_results() == gpu.NO_GPU
    monkeypatch.setattr(gpu, "GOALS", [("BTT r=1", 16), ("BTT r=1", 4096)])
    rows = gpu.Rows(tmp_path / "gpu.jsonl")
    rows.add("environment", machine="a CPU, an H100")
    row = {"structure": "BTT r=1", "width": 16, "dtype": "bfloat16", "seconds": {"median": 1e-3}}
    shares = {"nn.Linear": 0.2, "StructuredLinear": 0.4, "kernels, CUDA graph": 0.8}
    for way, share in shares.items():
        rows.add("layer", variant=way, speed=5 * share, share=share, **row)
    about, *_, reached, not_measured, _ = gpu.show_results().split("\n")
    assert about.startswith("a CPU, an H100: ")
    way = "| BTT r=1, 16 | 1000 us | 2.00x (40%) | 4.00x (80%) | 70% is 3.50x, reached |"
    assert (reached, not_measured) == (way, "| BTT r=1, 4096 | not measured | - | - | - |")
    assert "70% is 3.50x, NOT reached |" in gpu.markdown(rows.read("layer")[:2])


PYTHON = """#!/bin/bash
[[ $2 == benchmarks.gpu_steps && $3 == gate ]] && exec {python} "$@"
echo "$@" >> {log}
[[ $2 == benchmarks.gpu && $3 == --smoke ]] || exit 0
mkdir "$5"
echo '{{"kind": "self-test", "dtype": "bfloat16", "faults": {faults}}}' > "$5/gpu.jsonl"
echo '{{"kind": "layer", "variant": "StructuredLinear"}}' >> "$5/gpu.jsonl"
exit 1
"""


@pytest.mark.parametrize("faults", ["[]", '["a product is wrong"]'], ids=["right", "wrong"])
def test_the_first_part_stops_at_its_gate_only_where_the_kernels_are_wrong(tmp_path, faults):
    python, log, out = tmp_path / "python", tmp_path / "log", tmp_path / "out"
    python.write_text(PYTHON.format(python=sys.executable, log=log, faults=faults))
    python.chmod(0o755)
    where = {"OUT": str(out), "PYTHON": str(python)}
    options = {"cwd": record.RESULTS.parents[1], "env": os.environ | where, "text": True}
    command = ["bash", "benchmarks/gpu_run.sh", "a"]
    found = subprocess.run(command, capture_output=True, check=False, **options)
    ran = log.read_text()
    assert "benchmarks.gpu --smoke" in ran
    assert ("benchmarks.speed.layer --device cuda" in ran) == (faults == "[]")
    if faults == "[]":
        assert found.stdout.endswith("== failed: smoke\n")
        assert {"gpu.log", "layer.log", "tiles.json"} <= {each.name for each in out.iterdir()}
    else:
        assert found.returncode == gpu_steps.STOP
        assert "a product is wrong" in found.stdout
