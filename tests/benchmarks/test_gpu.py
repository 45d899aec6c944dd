"""`benchmarks.gpu` on a CPU, PyTorch's products in place of the kernels, with faults: a fault loses
one row, and the run says so at its end."""

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
from structlin import BTT, Monarch
from structlin._engine.triton import gemm, stages

H100 = timing.Ceilings(rate=798e12, bandwidth=3.0e12, call=2e-6)


@pytest.fixture
def by(monkeypatch):
    """Sets what multiplies."""
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "ROUNDS", (1, 1))
    monkeypatch.setattr(gpu, "WAITS", 1)

    def use(fault):
        def product(a, b, out, bias=None, *, rows="m", tile=None, splits=None):
            stages.plain(a, b, out, bias)
            fault(rows, out, tile)

        monkeypatch.setattr(gemm, "block_gemm", product)

    use(lambda rows, out, tile: None)
    return use


def refuse(rows, out, tile):
    if rows == "k":
        raise gemm.LaunchError("out of resource: shared memory\nand all of the program")


def spoil(rows, out, tile):
    if rows == "k":
        out.mul_(1.5)


def rows_of_a_layer(tmp_path, job=gpu.layer) -> gpu.Rows:
    rows = gpu.Rows(tmp_path / "gpu.jsonl")
    rows.begin("layer")
    job(rows, math.inf, name="BTT r=1", width=16, dtype="float32", tokens=40)
    return rows


def variants_in(rows: gpu.Rows) -> list[str]:
    return [row["variant"] for row in rows.read("layer")]


USERS = ["dense", "layer", "loop", "strided"]


def test_a_layer_has_a_row_for_each_way_and_each_product(by, tmp_path):
    rows = rows_of_a_layer(tmp_path)
    assert variants_in(rows) == [*USERS, "stages", "dense again"]
    assert all(row["error"] < 1e-5 and row["wall"]["median"] > 0 for row in rows.read("layer"))
    products = [row["product"] for row in rows.read("product")]
    assert products == ["y1", "y2", "dw2", "dx2", "dw1", "dx1"]
    assert not rows.read("error")


def test_a_product_that_cannot_be_launched_loses_the_stages_alone(by, tmp_path, capsys):
    by(refuse)
    rows = rows_of_a_layer(tmp_path)
    assert variants_in(rows) == [*USERS, "dense again"]
    assert [row["what"] for row in rows.read("error")] == ["stages"]
    assert "all of the program" not in capsys.readouterr().out


def test_a_wrong_product_is_not_timed_and_the_others_are(by, tmp_path):
    by(spoil)
    rows = rows_of_a_layer(tmp_path)
    assert variants_in(rows) == [*USERS, "dense again"]
    assert [row["what"] for row in rows.read("error")] == ["stages", "dw2", "dw1"]
    assert [row["product"] for row in rows.read("product")] == ["y1", "y2", "dx2", "dx1"]


def test_a_type_whose_products_cannot_be_launched_leaves_the_others_checked(by, tmp_path):
    def refuse_half(rows, out, tile):
        if out.dtype == torch.float16:
            raise gemm.LaunchError("no")

    by(refuse_half)
    rows = gpu.Rows(tmp_path / "gpu.jsonl")
    gpu.check(rows, math.inf, "BTT r=1", 16, tokens=(7,))
    assert [row["dtype"] for row in rows.read("check")] == ["bfloat16", "tf32", "float32"]
    assert [row["what"] for row in rows.read("error")] == ["float16, 7 tokens"]


def test_a_tile_that_is_wrong_is_not_timed_and_one_that_is_refused_is_no_fault(by, tmp_path):
    def fault(rows, out, tile):
        if tile and tile.warps == 8:
            out.mul_(1.5)
        if tile and tile.stages == 2:
            raise gemm.LaunchError("ptxas")

    by(fault)
    rows = gpu.Rows(tmp_path / "gpu.jsonl")
    gpu.tiles(rows, math.inf, "Monarch 4", 64, "float16", 256)
    timed = {(row["product"], *row["tile"][3:]) for row in rows.read("tile")}
    assert ("y1", 4, 1) in timed
    assert not [each for each in timed if 8 in each or 2 in each]
    assert rows.read("refused")
    assert all(gpu.is_fault(row) for row in rows.read("error"))
    assert not [row for row in rows.read("refused") if gpu.is_fault(row)]


def test_torch_compile_is_compared_with_dense(by, tmp_path, monkeypatch):
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **how: plain(run, backend="eager", **how))
    rows = rows_of_a_layer(tmp_path, gpu.compiled)
    compiled = ["layer, compiled", "loop, compiled"]
    assert variants_in(rows) == ["dense", "strided", *compiled, "dense again"]


# ---- the whole run -------------------------------------------------------------------------------


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
        options = {"out": tmp_path, "budget": 99, "widths": [16], "structures": ["BTT r=1"]}
        options |= {"start": start, "smoke": True}
        gpu.measure(argparse.Namespace(**options), gpu.time.perf_counter())

    monkeypatch.setattr(gpu, "ceilings", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(gpu.os, "execv", execute)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3"))
    measure.state, measure.path = state, tmp_path / "gpu.jsonl"
    return measure


def fail(rows, until):
    print("// all of the PTX")
    raise ValueError("a fault")


def test_the_last_line_counts_the_faults_and_the_exit_code_says_whether_there_are_any(run, capsys):
    good = ("good", lambda rows, until: rows.add("check", passed=True))
    run(good)
    assert capsys.readouterr().out.splitlines()[-1].endswith("0 FAULTS")
    with pytest.raises(SystemExit) as left:
        run(("bad", fail), good, ("wrong", lambda rows, until: rows.add("check", passed=False)))
    out = capsys.readouterr().out
    assert left.value.code == 1
    counts = "0 self-test, 2 check, 0 layer, 0 refused rows; 0 jobs left by the budget"
    assert out.splitlines()[-1] == f"summary: {counts}; 2 FAULTS"
    assert "PTX" not in out


def test_a_lost_gpu_begins_the_same_job_again_without_what_failed(run, by, monkeypatch):
    monkeypatch.setattr(gpu, "DEVICE", "cuda")
    state, done = run.state, []

    def job(rows, until):
        for what in ("first", "fatal", "last"):
            rows.attempt(what, lambda what=what: fatal() if what == "fatal" else done.append(what))

    def fatal():
        state.lost = True
        raise RuntimeError("launch failed")

    with pytest.raises(SystemExit, match="a new process"):
        run(("before", lambda *_: None), ("job", job))
    assert state.again[state.again.index("--start") + 1] == "1"
    assert "--smoke" in state.again
    state.lost = False
    with pytest.raises(SystemExit):  # the faults of the first process
        run(("before", lambda *_: None), ("job", job), start=1)
    assert done == ["first", "first", "last"]


def test_a_job_that_loses_the_gpu_by_itself_is_not_begun_again(run, monkeypatch):
    def job(rows, until):
        run.state.lost = True
        raise RuntimeError("no more")

    with pytest.raises(SystemExit, match="a new process"):
        run(("job", job), ("next", lambda *_: None))
    assert run.state.again[run.state.again.index("--start") + 1] == "1"


# ---- bounds and times ----------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "copies"), [(BTT(), 0), (Monarch(blocks=16), 2)])
def test_the_bound_of_the_stages_has_the_copies_that_they_make(family, copies):
    structure, tokens = family.structure(4096, 4096), 16384
    products = H100.bound(structure, tokens, 2, backward=True)
    found = gpu.least_seconds(H100, structure, tokens, 2)
    read_and_written = 2 * tokens * 4096 * 2
    assert found - products == pytest.approx(copies * read_and_written / 3.0e12)


def test_the_gpu_sleeps_after_its_caches_are_cold_and_before_the_time_begins(monkeypatch):
    seen = []

    class Event:
        def __init__(self, enable_timing):
            self.synchronize = lambda: None

        def record(self):
            seen.append("event")

        def elapsed_time(self, end):
            return 2.0

    buffer = SimpleNamespace(zero_=lambda: seen.append("fill"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("sleep"))
    monkeypatch.setattr(timing.torch, "empty", lambda *_, **__: buffer)
    assert timing.seconds(lambda: seen.append("work"), "cuda") == 2e-3
    assert seen == ["fill", "sleep", "event", "work", "event"]


# ---- what is kept, and shown ---------------------------------------------------------------------


def test_a_result_of_a_gpu_has_a_name_of_its_own(monkeypatch):
    names = []
    monkeypatch.setattr(race, "result_path", lambda options, name: names.append(name))
    for device in ("cpu", "cuda"):
        replace(layer.BENCH, jobs=lambda device, smoke: []).main(["--device", device])
    assert names == ["layer", "layer_gpu"]


def test_the_page_shows_what_ran_on_a_gpu_with_its_card_and_nothing_before(
    by, tmp_path, monkeypatch
):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert gpu.show_results() == gpu.NO_GPU
    monkeypatch.setattr(gpu, "CEILINGS", {"float32": H100})
    rows = rows_of_a_layer(tmp_path)
    rows.add("environment", machine="a CPU, an H100")
    lines = (tmp_path / "gpu.jsonl").read_text().replace('"float32"', '"bfloat16"')
    (tmp_path / "gpu.jsonl").write_text(lines)
    page = gpu.show_results()
    assert page.startswith("a CPU, an H100: ")
    assert "| BTT r=1, 16 |" in page
    assert "untested" not in page


def test_the_table_of_goals_says_which_speed_a_goal_is_and_whether_it_is_reached(
    by, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu, "GOALS", [("BTT r=1", 16), ("BTT r=1", 4096)])
    rows = gpu.Rows(tmp_path / "gpu.jsonl")
    row = {"structure": "BTT r=1", "width": 16, "dtype": "bfloat16", "seconds": {"median": 1e-3}}
    for variant, speed, share in (("dense", 1, 0.2), ("layer", 2, 0.4), ("graph", 4, 0.8)):
        rows.add("layer", variant=variant, speed=speed, share=share, **row)
    columns = {column.header: list(column.cells) for column in gpu.goals_table(rows).columns}
    assert columns["70% is"] == ["3.50x", ""]
    assert columns["nn.Linear"] == ["1000 us", "not measured"]
    assert columns["StructuredLinear"] == ["2.00x (40%)", "not measured"]
    assert columns[""] == ["reached", "NOT reached"]


# ---- benchmarks/gpu_run.sh -----------------------------------------------------------------------

PYTHON = """#!/bin/bash
[[ $2 == benchmarks.gpu_steps && $3 == gate ]] && exec {python} "$@"
echo "$@" >> {log}
[[ $2 == benchmarks.gpu && $3 == --smoke ]] || exit 0
mkdir "$5"
echo '{{"kind": "self-test", "dtype": "bfloat16", "faults": {faults}}}' > "$5/gpu.jsonl"
echo '{{"kind": "layer", "variant": "layer"}}' >> "$5/gpu.jsonl"
exit 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("faults", ["[]", '["a product is wrong"]'], ids=["right", "wrong"])
def test_the_first_part_stops_at_its_gate_only_where_the_kernels_are_wrong(tmp_path, faults):
    python, log, out = tmp_path / "python", tmp_path / "log", tmp_path / "out"
    python.write_text(PYTHON.format(python=sys.executable, log=log, faults=faults))
    python.chmod(0o755)
    where = {"OUT": str(out), "PYTHON": str(python)}
    found = subprocess.run(
        ["bash", "benchmarks/gpu_run.sh", "a"],
        cwd=record.RESULTS.parents[1],
        env=os.environ | where,
        capture_output=True,
        text=True,
        check=False,
    )
    ran = log.read_text()
    assert "benchmarks.gpu --smoke" in ran
    assert ("benchmarks.speed.layer --device cuda" in ran) == (faults == "[]")
    if faults == "[]":
        assert found.stdout.endswith("== failed: smoke\n")
        assert {"gpu.log", "layer.log", "tiles.json"} <= {each.name for each in out.iterdir()}
    else:
        assert found.returncode == gpu_steps.STOP
        assert "a product is wrong" in found.stdout
