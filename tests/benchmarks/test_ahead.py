"""Tiles that are tried and kept, and the compiler for sm_90, which needs no GPU."""

import json
import math
import subprocess
import sys
from functools import partial

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import ahead, gpu, gpu_steps
from benchmarks.harness.record import RESULTS
from structlin import BTT, Monarch
from structlin._engine.triton import pair as pairs
from tests.interpreter import interpret

RULE, FAST, ONCE = (32, 8, 8, 2, 16, 16, 4, 3), (64, 8, 8, 2, 16, 16, 4, 3), (16, *[8] * 7)


def tile_rows(seconds: dict[str, dict[tuple[int, ...], float]], entry: str = ""):
    """Rows of the job `tiles`, for kernels of one entry."""
    shared = {"structure": "", "width": 64, "dtype": "", "entry": entry, "own": list(RULE)}
    every = [(name, *each) for name, times in seconds.items() for each in times.items()]
    return [shared | {"kernel": k, "tile": list(tile), "seconds": took} for k, tile, took in every]


def test_the_faster_tiles_of_a_gpu_are_kept_and_read_under_its_name(monkeypatch, tmp_path):
    card, kernel = pairs.Card("new", 2**17, 100), gpu.kernels_of(BTT().structure(64, 64))["y"]
    tile_on = lambda name: pairs.tile_for(*kernel[:3], name, 2**17)  # noqa: E731
    monkeypatch.setattr(pairs, "TUNED", {"old": {}})
    monkeypatch.setattr(pairs, "card_of", lambda device: card)
    rows, entry, rule = gpu.Rows(tmp_path / "rows"), pairs.name_of(*kernel[:3]), tile_on("new")
    seconds = {"y": {RULE: 2.0, FAST: 1.9, ONCE: 1.0}, "dx": {RULE: 2.0, FAST: 1.9}}
    for row in tile_rows(seconds, entry):
        rows.add("tile", **row)
    for name, products in (("one", 2), ("two", 0)):
        rows.add("pays", entry=name, kernels=1, products=products)
    gpu.tuned(rows, math.inf, tmp_path / "tiles.json")
    written = json.loads((tmp_path / "tiles.json").read_text())
    assert written == {"old": {}, "new": {entry: list(FAST), "one": True, "two": False}}
    with gpu.tuned_as({entry: list(RULE)}):
        assert tile_on("new") == RULE
    assert (tile_on("new"), tile_on("old")) == (FAST, rule)
    gpu.forget_tiles()
    for few in ({RULE: 2.0, FAST: 1.99}, {RULE: 2.0, FAST: 3.0}, {RULE: 2.0}):  # gain nothing
        assert gpu.faster_tiles(tile_rows({"y": few})) == {}


@pytest.mark.parametrize("family", [BTT(), BTT(rank=4).activate(), Monarch(blocks=16)], ids=str)
def test_the_tiles_that_are_tried_are_the_one_in_use_and_others_that_fit(family):
    for kernel in gpu.kernels_of(family.structure(1024, 1024)).values():
        first, *others = gpu.candidates(kernel)
        times = [pairs.time_of(kernel[0], tile, *kernel[1:3], 227 * 1024) for tile in others]
        assert (first, times, math.inf in times) == (kernel.tile, sorted(times), False)
        assert len({first, *others}) == gpu.TRIED <= 2 * len({tile[:6] for tile in others})


@pytest.fixture
def target():
    """Triton compiles for sm_90, on no GPU."""
    driver = pytest.importorskip("triton").runtime.driver
    before = driver._active
    ahead.set_target(90)
    yield
    driver._active = before


def test_the_tiles_of_both_hopper_cards_are_collected(target, monkeypatch):
    seen, cards = [], [card.name for card in ahead.GPUS[90]]
    jobs = lambda: seen.append(gpu.card().name) or []  # noqa: E731
    ahead.collect(90, jobs)
    assert len(seen) == 1  # they have no tiles of their own
    monkeypatch.setitem(pairs.TUNED, cards[0], {"product 2 1 1 1 1 1": list(FAST)})
    ahead.collect(90, jobs)
    assert seen[1:] == cards == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]


def test_what_is_collected_for_a_gpu_comes_back_from_its_file(target, monkeypatch, tmp_path):
    todo = [("check", partial(gpu.check, name="BTT r=1", width=16))]
    monkeypatch.setattr(gpu, "jobs", lambda widths, names: todo)
    assert gpu_steps.collect(tmp_path, [16], ["BTT r=1"]) > 4
    launches, keys = ahead.Launches(), set()
    for name, arguments, options in json.loads((tmp_path / gpu_steps.FILE).read_text()):
        _, one, other = launches.binders[name](*map(gpu_steps.live, arguments), **options)
        keys.add((name, tuple(one), str(other)))
    assert keys == {*ahead.collect(90, lambda: todo)}


def test_what_computes_launches_what_is_collected_and_no_more(target, monkeypatch):
    """Bfloat16 is wrong in the interpreter, and float16 stands for it."""
    interpreted = interpret(monkeypatch)
    changes = {"ROUNDS": (1, 1), "TOKENS": 48, "FAR_TOKENS": 350, "DTYPE": "float16"}
    for name, value in (changes | {"GOALS": [("BTT r=1", 16)]}).items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(ahead, "AUTOCAST", torch.float16)
    monkeypatch.setattr(pairs, "pays", lambda program, *_: bool(pairs.pair_of(program)))
    jobs = partial(gpu.jobs, [16], ["BTT r=1", "Monarch 4", "TT r=4"])
    steps = ahead.steps_of_examples(["train_mlp_lm"], [["--smoke"]])
    collected, launches = ahead.collect(90, jobs, steps), ahead.Launches(interpreted)
    with ahead.as_on_a_gpu(launches, ahead.GPUS[90][0]):
        ahead.run_jobs(launches, jobs(), steps)
    assert {source.split()[0] for source, *_ in collected.values()} > {"check", "train_mlp_lm"}
    assert launches.found.keys() == collected.keys()


@pytest.mark.parametrize("program", ["ahead", "gpu"])
def test_a_smoke_run_without_a_gpu_compiles_for_sm_90_and_finds_the_kernels_right(program):
    """In a process of its own, as Triton's driver or its kernels are replaced."""
    pytest.importorskip("triton")
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{program}", "--smoke"]
    last = subprocess.check_output(command, cwd=RESULTS.parents[1], text=True).splitlines()[-1]
    if program == "gpu":
        assert last.endswith("0 jobs left by the budget; 0 FAULTS")
    else:
        assert (row := json.loads(last))["spilling"] == row["too_large"] == []
        assert row["with_tensor_cores"] == row["kernels"] - row["on_cores"] > 40
        assert row["on_cores"] > 3


@pytest.mark.parametrize("arch", ahead.GPUS)
def test_of_all_kernels_that_were_compiled_ahead_none_spills_or_is_too_large(arch):
    kept = json.loads((RESULTS / "ahead.json").read_text())
    (row,) = (row for row in kept["rows"] if row["arch"] == f"sm_{arch}")
    assert row["spilling"] == row["too_large"] == []
    assert sum(row["of"].values()) == row["kernels"]
    assert {"self_test", "small", "check", "layer", "tiles", "far", *ahead.EXAMPLES} == {*row["of"]}


def test_the_prediction_has_the_bounds_of_dense_and_of_two_kernels():
    """Microseconds on an H100, of a computation by hand."""
    expected = {("BTT r=1", 4096): (2067, 538), ("Monarch 16", 1024): (129, 179)}
    for layer, times in expected.items():
        plain, activated = ahead.predict(*layer)
        assert (plain["dense"], plain["two_kernels"]) == pytest.approx(times, abs=1)
        assert plain["bound"] < plain["fused"] < activated["fused"]
        assert plain["plain"] < activated["plain"]
