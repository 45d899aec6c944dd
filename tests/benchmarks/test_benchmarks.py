"""What the benchmarks report is what they claim: the protocol, the gate, layers and models."""

import argparse
import copy
import doctest
import json
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("matplotlib")

from benchmarks.harness import race, record, timing
from benchmarks.harness.statistics import select
from benchmarks.speed import layer, variants
from benchmarks.speed.variants import loop
from structlin import BTT, TT, Dense, Kronecker, LowRank, Monarch, StructuredLinear
from structlin._model.linears import linear_layers

ROOT = Path(__file__).parents[2]
H200 = timing.Ceilings(rate=790e12, bandwidth=4.3e12, call=2e-6)


@pytest.fixture(autouse=True)
def _pages_are_left_alone(monkeypatch):
    """What `keep_pages` says to glibc holds for the rest of the process."""
    monkeypatch.setattr(timing, "keep_pages", lambda: True)


MODULES_WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "benchmarks").rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES_WITH_EXAMPLES)
def test_the_examples_in_the_docstrings_give_what_they_show(name):
    module = pytest.importorskip(name, exc_type=ImportError)
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed


TIMED = ("timing.wall", "timing.interleaved", "race(", "Bench(", "milliseconds(")
TIMED = (*TIMED, "perf_counter()", "process_time()", "monotonic()")


def test_every_program_that_times_a_layer_builds_the_engine_before():
    folders = ROOT / "benchmarks", ROOT / "examples"
    programs = [path for folder in folders for path in folder.rglob("*.py")]
    texts = {path.stem: path.read_text(encoding="utf-8") for path in programs}
    del texts["gpu"]  # which switches the engine off
    timed = {
        name: text
        for name, text in texts.items()
        if "__main__" in text and any(word in text for word in TIMED)
    }
    assert len(timed) > 8
    builds = "structlin.StructuredLinear(8, 8)(torch.zeros(1, 8))  # builds the engine"
    begins = (builds, "BENCH.main()", "EXPERIMENT.main()")  # the latter two do the first
    assert builds in texts["race"]
    assert builds in texts["experiment"]
    assert [n for n, text in timed.items() if not any(word in text for word in begins)] == []


KEPT = sorted(
    path.relative_to(record.RESULTS).with_suffix("").as_posix()
    for path in record.RESULTS.rglob("*.json")
    if '"command":"python -m benchmarks.' in path.read_text(encoding="utf-8")
    and path.stem != "minilm"  # its options had other names then
)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", KEPT)
def test_the_command_of_a_kept_result_is_still_one(monkeypatch, name):
    parse = argparse.ArgumentParser.parse_args

    def stop(*arguments):  # the options are read, and nothing is measured yet
        parse(*arguments)
        raise InterruptedError

    command = shlex.split(record.read(name)["environment"]["command"])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", command[2:])
    with pytest.raises(InterruptedError):
        runpy.run_module(command[2], run_name="__main__")


# ---- the protocol --------------------------------------------------------------------------------


class Clock:
    """Makes `time.perf_counter` go on by one second for each sample."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def __call__(self, work):
        self.now += 1
        work()
        return self.now


def test_variants_take_turns_and_the_first_and_the_last_keep_their_places(monkeypatch):
    seen = []
    works = {name: lambda name=name: seen.append(name) for name in "abcdefz"}
    times = timing.interleaved(works, Clock(monkeypatch), rounds=(6, 6), until=inf, end=inf)
    rounds = [seen[n : n + 7] for n in range(0, 42, 7)]
    assert all(sorted(r) == sorted(works) and r[0] == "a" and r[-1] == "z" for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1
    assert all(len(samples) == 6 for samples in times.values())


@pytest.mark.parametrize(
    ("until", "end", "rounds"),
    [(0, inf, 3), (0, 0, 1), (15, inf, 4), (inf, inf, 9), (0, 8, 3), (0, 7, 2)],
)
def test_rounds_stop_when_time_is_up(monkeypatch, until, end, rounds):
    works = {name: lambda: None for name in "abcd"}
    times = timing.interleaved(works, Clock(monkeypatch), rounds=(3, 9), until=until, end=end)
    assert [len(samples) for samples in times.values()] == [rounds] * 4


def test_a_short_call_is_repeated_for_the_seconds_of_a_sample(monkeypatch):
    calls = []
    works = {name: partial(calls.append, name) for name in "ab"}
    monkeypatch.setattr(timing, "wall", lambda work, device: work() or 0.25)
    options = {"last": "a again", "least": 0.8, "clock": lambda work, device: work() or 8.0}
    times = race.race(works, race.Heat(rounds=(1, 1)), **options)
    assert times.seconds == {"a": [2.0], "b": [2.0], "a again": [2.0]}
    assert calls == [*"aba", *"aaaabbbbaaaa"]


def test_peak_is_the_most_that_is_held_at_one_time():
    def work():
        for _ in range(3):
            a = torch.empty(1000)
            b = a + 1
            del a, b

    work()
    assert 8000 <= timing.peak_bytes(work, "cpu") < 9000


def test_saved_bytes_are_distinct_storages_without_parameters():
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    assert timing.saved_bytes(lambda: F.linear(x, weight), [weight]) == x.nbytes
    assert (
        timing.saved_bytes(lambda: F.linear(F.linear(x, weight).exp(), weight), [weight])
        == 2 * x.nbytes
    )
    assert timing.saved_bytes(lambda: (x[:2] * x[2:4]).sum(), []) == x.nbytes


@pytest.mark.parametrize(
    "family", [LowRank(rank=4), BTT(rank=2), BTT(rank=2, cores=3), Monarch(blocks=4), TT(rank=3)]
)
def test_what_a_layer_keeps_is_its_input_and_the_middle(family):
    structure = family.structure(64, 64)
    cores = [torch.randn(core.shape, requires_grad=True) for core in structure.cores]
    x = torch.randn(5, 64, requires_grad=True)
    kept = timing.saved_bytes(lambda: loop(structure, cores, x), cores)
    middle = sum(core.batch * core.repeat * core.fan_out for core in structure.cores[:-1])
    assert kept == 4 * 5 * (64 + middle)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("keep", [True, False])
def test_freed_memory_is_written_again_without_page_faults_if_pages_are_kept(keep):
    program = f"""
import ctypes, resource, torch
from benchmarks.harness import timing

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, or there would be few faults anyway
if {keep}:
    assert timing.keep_pages()
for n in range(30):
    if n == 20:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(2**24).zero_()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults * resource.getpagesize() / 2**26)
"""
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tensors = float(found.stdout)  # whose pages were fresh, of ten
    assert tensors < 1 if keep else tensors > 9


# ---- the gate ------------------------------------------------------------------------------------


def variant(run, family, backward=True, d_in=16, d_out=16, tokens=400):
    structure = family.structure(d_in, d_out)
    cores = [torch.randn(core.shape, requires_grad=True) for core in structure.cores]
    x, dy = torch.randn(tokens, d_in, requires_grad=backward), torch.randn(tokens, d_out)
    return race.Variant("one", "auto", structure, lambda x: run(structure, cores, x), cores, x, dy)


def test_the_oracle_is_the_kronecker_product():
    structure = Kronecker().structure(6, 20)
    right, left = (torch.randn(core.shape, dtype=torch.float64) for core in structure.cores)
    x = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(
        timing.oracle(structure, [right, left], x), x @ torch.kron(left[0], right[0]).T
    )


class Wrong(torch.autograd.Function):
    """The reference, but the first core's gradient misses the last token."""

    @staticmethod
    def forward(ctx, structure, x, *cores):
        ctx.structure = structure
        ctx.save_for_backward(x, *cores)
        return loop(structure, cores, x)

    @staticmethod
    def backward(ctx, dy):
        x, *cores = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            y = loop(ctx.structure, cores, x)
            right = torch.autograd.grad(y, [x, *cores], dy, retain_graph=True)
            wrong = torch.autograd.grad(y[:-1], cores[:1], dy[:-1])
        return None, right[0], *wrong, *right[2:]


def forgets_a_row(structure, cores, x):
    y = torch.empty(len(x), structure.out_features)
    y[:-1] = loop(structure, cores, x)[:-1]
    return y


def test_the_gate_passes_what_is_right_and_stops_what_is_wrong():
    for family, backward in product((BTT(rank=2), Monarch(blocks=4), Dense()), (True, False)):
        assert variant(loop, family, backward).error() < 1e-6
        assert variant(forgets_a_row, family, backward).error() == inf
    off = variant(lambda s, cores, x: Wrong.apply(s, x, *cores), BTT()).error()
    assert 1e-3 < off < inf


def test_memory_is_poisoned_for_the_gate_alone():
    with timing.poisoned():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_layer_that_is_wrong_is_not_timed(monkeypatch):
    zero = SimpleNamespace(
        apply=lambda structure, *cores_x: 0 * loop(structure, cores_x[:2], cores_x[2])
    )
    monkeypatch.setattr(variants, "StridedProducts", zero)
    with pytest.raises(ArithmeticError, match=r"BTT r=1, strided, .*: relative error 1"):
        layer.BENCH.main(["--smoke"])


@pytest.mark.parametrize(
    ("family", "d_in", "d_out"),
    [
        (BTT(rank=2), 12, 20),
        (BTT(rank=1), 16, 16),
        (Monarch(blocks=2), 16, 24),
        (Monarch(blocks=8), 16, 32),
    ],
)
def test_the_strided_peer_is_the_structure_with_its_gradients(family, d_in, d_out):
    structure = family.structure(d_in, d_out)
    first, last = (
        torch.randn(core.shape, dtype=torch.float64, requires_grad=True) for core in structure.cores
    )
    x = torch.randn(3, d_in, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(
        variants.StridedProducts.apply(structure, first, last, x),
        timing.oracle(structure, [first, last], x),
    )
    assert torch.autograd.gradcheck(
        lambda *args: variants.StridedProducts.apply(structure, *args), (first, last, x)
    )


# ---- benchmarks.speed.layer ----------------------------------------------------------------------


def test_layer_prints_a_table_and_a_json_line_per_row_and_keeps_both(tmp_path, capsys):
    rows = layer.BENCH.main(["--smoke", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    kept = json.loads((tmp_path / "layer.json").read_text())
    assert kept["rows"] == lines == json.loads(json.dumps(rows))
    assert kept["ceilings"]["float32"]["rate"] > 1e9
    for name in variants.families(64):
        measured = {row["implementation"] for row in rows if row["structure"] == name}
        assert measured >= {"auto", "loop", "merged"}
        assert name in printed
    for name, option in product(variants.OPTIONS_OF, variants.OPTIONS):
        assert f"{name} + {option}" in printed
    assert "dense + bias" in printed
    assert "…" not in printed  # the table is not cut
    assert all(row["error"] < variants.TOLERANCE[row["dtype"]] for row in rows)
    for row in rows:
        if row["structure"] == "BTT r=4" and row["backward"]:  # here of as many FLOPs as dense
            assert row["x_dense"] == row["x_equal_flops"]
    (found,) = select(rows, structure="TT r=4", implementation="auto", dtype="float32")
    speed = found["x_dense"]["median"]
    assert f"| TT r=4 | {speed:.2f}x ({speed:.0%}) |" in layer.markdown(kept, "float32")
    brief = {(row["structure"], row["implementation"]) for row in rows if row["brief"]}
    wanted = {(name, "auto") for name in variants.families(64)}
    assert brief == wanted | {("dense", "nn.Linear"), ("dense, last", "nn.Linear")}
    assert layer.few_tokens(kept) in printed


def test_the_table_of_few_tokens_has_the_lowest_speed_of_all_widths():
    row = {"backward": False, "implementation": "auto", "dtype": "float32"}
    speeds = {
        ("BTT r=1", 1024, 1): 3.0,
        ("BTT r=1", 512, 1): 2.5,
        ("BTT r=1", 1024, 16): 5.25,
        ("Monarch 4", 512, 1): 0.75,
        ("Monarch 4", 512, 16): 1.0,
    }
    rows = [
        row | {"structure": name, "d_in": d, "d_out": d, "tokens": n, "x_dense": {"median": speed}}
        for (name, d, n), speed in speeds.items()
    ]
    rows += [rows[0] | different for different in ({"backward": True}, {"d_out": 1}, {"tokens": 9})]
    head, _, btt, monarch = layer.few_tokens({"rows": rows}).splitlines()
    assert head.startswith("|  | float32, 1 | float32, 4 | float32, 16 | bfloat16, 1 |")
    assert btt.startswith("| BTT r=1 | 2.50x | - | 5.25x | - |")
    assert monarch.startswith("| Monarch 4 | 0.75x | - | 1.00x | - |")


def test_layer_stops_at_its_budget_and_says_what_it_left_out(tmp_path, capsys):
    assert layer.BENCH.main(["--smoke", "--budget", "0", "--out", str(tmp_path)]) == []
    assert capsys.readouterr().out.count("# left out: ") == 3
    assert not list(tmp_path.iterdir())


def test_a_smoke_run_keeps_nothing_by_itself(monkeypatch):
    monkeypatch.setattr(race, "save_json", None)
    assert layer.BENCH.main(["--smoke"])


SQUARE = variants.Job(64, 64, 300, "float32", True)


def test_options_are_compared_with_their_twins(monkeypatch):
    monkeypatch.setattr(variants, "families", lambda width: {"BTT r=1": BTT()})
    monkeypatch.setattr(
        timing, "interleaved", lambda works, *_, **__: {v: [n + 1.0] for n, v in enumerate(works)}
    )
    rows = layer.measure(SQUARE, race.Heat(ceilings=H200))
    took = {
        (row["structure"], row["implementation"]): row["ms"]["median"]
        for row in rows
        if "x_dense" in row
    }
    dense, biased = (
        (took["dense", "nn.Linear"] + took["dense, last", "nn.Linear"]) / 2,
        took["dense", "nn.Linear + bias"],
    )
    options = [row for row in rows if "over_plain" in row]
    assert [row["implementation"] for row in options] == [
        "nn.Linear + bias", "auto + bias", "auto + weight norm"
    ]  # fmt: skip
    for row in options:
        of_row = took[row["structure"], row["implementation"]]
        plain = dense if row["structure"] == "dense" else took["BTT r=1", "auto"]
        twin = biased if "bias" in row["implementation"] else dense
        assert row["over_plain"]["median"] == pytest.approx(of_row / plain)
        assert row["x_dense"]["median"] == pytest.approx(twin / of_row)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_the_compiled_einsum_passes_the_gate(monkeypatch):
    monkeypatch.setattr(variants, "COMPILED_AT", (64,))
    monkeypatch.setattr(variants, "families", lambda width: {"BTT r=2": BTT(rank=2)})
    (found,) = [v for v in variants.variants(SQUARE, "cpu") if v.implementation == "compiled"]
    assert found.error() < 1e-5


def test_what_does_not_compile_or_fit_is_left_out_and_said(monkeypatch, capsys):
    def fails(*args, **options):
        raise RuntimeError("no compiler\nfor you")

    monkeypatch.setattr(variants, "COMPILED_AT", (64,))
    monkeypatch.setattr(
        variants,
        "families",
        lambda width: {"Kronecker": Kronecker(), "Monarch 7": Monarch(blocks=7)},
    )
    monkeypatch.setattr(torch, "compile", lambda run, **options: fails)
    found = variants.variants(SQUARE, "cpu")
    assert {v.implementation for v in found if v.name == "Kronecker"} == {
        "auto",
        "loop",
        "merged",
    }
    assert "Monarch 7" not in {v.name for v in found}
    said = capsys.readouterr().out
    assert "# left out: Monarch 7 in 64 -> 64" in said
    assert "# left out: Kronecker, compiled: RuntimeError: no compiler\n" in said
    variants.variants(SQUARE, "cpu", deadline=0)
    assert "# left out: Kronecker, compiled: no time\n" in capsys.readouterr().out


# ---- benchmarks.speed.model ----------------------------------------------------------------------


@pytest.fixture
def model():
    pytest.importorskip("transformers")
    from benchmarks.speed import model

    return model


@pytest.fixture
def gpt(model):
    return model.Shape("GPT-2, tiny", 128, 2, 1, 8, 96, "cpu")


def test_model_measures_every_task_and_keeps_the_rows(model, tmp_path, capsys):
    bench = replace(model.BENCH, jobs=lambda *where: model.jobs(*where)[:5])  # not compiled
    rows = bench.main(["--smoke", "--out", str(tmp_path)])
    kept = json.loads((tmp_path / "model.json").read_text())
    assert kept["rows"] == rows
    assert {row["task"] for row in rows} == {"training", "prefill", "decode", "images"}
    params = {row["variant"]: row["params"] for row in select(rows, task="training", context=8)}
    assert params["dense"] > params["BTT r=1, mlp"] > params["none"]
    assert params["BTT r=1, all and head"] < params["BTT r=1, mlp"]
    (mlp,) = select(rows, variant="BTT r=1, mlp", task="training", context=8)
    assert f"| BTT r=1, mlp | {mlp['x_dense']['median']:.2f}x |" in model.markdown(kept)
    assert "none" in capsys.readouterr().out


def test_btt_with_its_head_is_compared_with_dense_that_has_the_same_loss_and_is_shown(model):
    speeds = {"dense": (1.0, 10.0), model.CHUNKED: (2.0, 15.0), model.WITH_HEAD: (6.0, 60.0)}
    rows = [
        {"model": "GPT-2 small", "task": "training", "compiled": compiled, "variant": name}
        | {"x_dense": {"median": ratio}, "tokens_per_s": {"median": tokens}}
        for compiled in (False, True)
        for name, (ratio, tokens) in speeds.items()
    ]
    assert model.beside_chunks({"rows": rows}) == [3.0, 4.0] * 2
    assert f"| {model.CHUNKED} | 2.00x |" in model.markdown({"rows": rows})


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_model_s_step_has_its_loss_with_a_head_of_its_own_too(model, gpt, in_chunks):
    dense = gpt.build()
    for change in (model.fuse_gelu, model.with_head):
        made = change(copy.deepcopy(dense))
        logits = made(**gpt.inputs).logits.flatten(0, -2)
        expected = F.cross_entropy(logits, gpt.labels)
        torch.testing.assert_close(model.training(made, gpt, in_chunks)(), expected)
    assert isinstance(made.lm_head, StructuredLinear)
    assert sum(isinstance(m, torch.nn.Linear) for m in made.modules()) == 0
    torch.testing.assert_close(
        model.fuse_gelu(copy.deepcopy(dense))(**gpt.inputs).logits, dense(**gpt.inputs).logits
    )


def test_a_model_without_its_linear_layers_keeps_the_rest(model, gpt):
    whole, rest = gpt.build(), model.without_linear(gpt.build())
    absent = [m for m in rest.modules() if isinstance(m, model.Absent)]
    assert len(absent) == len(linear_layers(whole)) - 1  # all but the head
    y = rest(**gpt.inputs).logits
    assert y.shape == whole(**gpt.inputs).logits.shape
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in rest.parameters())


def test_decoding_gives_the_logits_of_the_longer_text(model, gpt):
    network = gpt.build().eval()
    step, text = model.decode(network, gpt), gpt.inputs["input_ids"]
    longer = torch.cat([text, text[:, -1:]], 1)
    wanted = network(input_ids=longer).logits[:, -1:]
    for _ in range(2):  # the cache is the same again after a step
        torch.testing.assert_close(step(), wanted, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_with_other_logits_is_not_timed(model, gpt, monkeypatch):
    network = gpt.build()
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda block: block.register_forward_hook(lambda *found: 2 * found[2]),
    )
    with pytest.raises(ArithmeticError, match="the logits differ"):
        model.compile_blocks(network, gpt)
