import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from structlin import BTT, LowRank, StructuredLinear, convert, plan, summary
from structlin._convert import summary as report
from structlin.optim import declare_weights
from tests.models import GPT


def test_a_summary_adds_up_to_the_model():
    model = convert(GPT(width=64, depth=3), BTT(rank=2), include="ffn")
    result = summary(model)
    assert result.params + result.other_params == sum(p.numel() for p in model.parameters())
    layers = [layer for block in model.h for layer in (block.mlp.c_fc, block.mlp.c_proj)]
    cores = sum(core.numel() for layer in layers for core in layer.cores)
    dense = 3 * (64 * 192 + 64 * 64) + 64 * 50
    assert result.params == cores + dense
    assert result.flops == 2 * (cores + dense)  # nothing is shared in BTT


def test_equal_layers_share_a_row():
    rows = {row.name: row for row in summary(convert(GPT(depth=3), BTT(), include="ffn")).rows}
    inside = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert set(rows) == {"lm_head", *(f"h.*.{name}" for name in inside)}
    assert rows["h.*.mlp.c_fc"].layers == 3
    assert rows["h.*.mlp.c_fc"].structure == "BTT(rank=1)"
    assert rows["lm_head"].structure == "dense"


def test_layers_of_one_name_and_other_ranks_are_told_apart_by_their_numbers():
    model = GPT(depth=8)
    ranks = {f"h.{n}.mlp.c_fc": LowRank(rank=3 if n in (0, 4, 5, 6) else 2) for n in range(7)}
    planned = plan(model, LowRank(rank=2), include=[*ranks], overrides=ranks)
    shown = re.findall(r"(?m)^(\S*c_fc) +(\d) .*(rank=\d|not included)", str(planned))
    expected = [("h.{0,4-6}.mlp.c_fc", "4", "rank=3"), ("h.{1-3}.mlp.c_fc", "3", "rank=2")]
    assert shown == [*expected, ("h.7.mlp.c_fc", "1", "not included")]
    rows = [row for row in summary(planned.apply()).rows if "c_fc" in row.name]
    assert [row.name for row in rows] == [name for name, *_ in shown]
    assert rows[0].names == tuple(f"h.{n}.mlp.c_fc" for n in (0, 4, 5, 6))
    assert {"h.*.attn.c_attn", "h.*.mlp.c_proj"} < {row.name for row in summary(model).rows}


def test_numbers_in_which_layers_do_not_differ_stay_a_star():
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(8, width) for _ in range(3)])

    model = nn.ModuleList([Block(16 if n == 1 else 8) for n in range(4)])
    names = [row.name for row in summary(model).rows]
    assert names == ["{0,2,3}.experts.*", "1.experts.*"]


def test_a_plan_shows_equal_layers_in_one_row_with_their_sums_and_the_range_of_errors():
    model = GPT(width=64, depth=3)
    planned = plan(model, LowRank(rank=4), include="*c_fc", init="project")
    row = next(line for line in str(planned).splitlines() if "c_fc" in line)
    params = 3 * 4 * (64 + 256)
    errors = sorted(planned.errors.values())
    assert re.match(r"h\.\*\.mlp\.c_fc +3 +ffn +64 -> 256 +LowRank\(rank=4\)", row)
    assert f" {params:,} " in row
    assert f" {2 * params:,} " in row
    assert row.endswith(f"{errors[0]:.4f} to {errors[-1]:.4f}")


def test_the_table_shows_padding_waste():
    text = str(summary(convert(nn.Sequential(nn.Linear(64, 101)), BTT())))
    assert "+0.0% in, +3.0% out" in text  # 101 -> 104 = 8 x 13


def test_the_table_is_a_text_in_a_notebook_too(monkeypatch):
    found = summary(nn.Linear(4, 4))
    before = str(found)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(found) == before


def test_a_matrix_that_two_layers_share_counts_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    result = summary(model)
    assert result.other_params == 16  # the biases
    assert result.flops == 2 * 2 * 64


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="model=ReLU has no linear layer"):
        summary(nn.ReLU())


# ---- the process ---------------------------------------------------------------------------------


ALONE = """
import subprocess, sys
import torch  # whose build for CUDA starts processes
def refuse(*arguments, **options):
    raise AssertionError(f"a process is started: {arguments}")
subprocess.Popen.__init__ = refuse
from structlin import BTT, StructuredLinear, summary
before = set(torch.ops.loaded_libraries)
layers = [StructuredLinear(64, 64, BTT()), StructuredLinear(64, 64, device="meta")]
print(summary(torch.nn.Sequential(*layers, torch.nn.Linear(64, 64))))
assert set(torch.ops.loaded_libraries) == before, "an engine was loaded"
"""


def test_a_summary_starts_no_process_and_loads_no_engine(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "STRUCTLIN_CXXFLAGS": "-O0"}
    command = [sys.executable, "-c", ALONE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "linear layers" in done.stdout
    assert " ms" not in done.stdout
    assert not [*tmp_path.iterdir()]


# ---- time ----------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A structured layer takes 1 second, a dense one a second for each of its 101 tokens."""
    now = [0.0]
    monkeypatch.setattr(report, "perf_counter", lambda: now[0])
    for kind, seconds in ((StructuredLinear, lambda x: 1), (nn.Linear, len)):

        def forward(self, x, real=kind.forward, seconds=seconds):
            now[0] += seconds(x)
            return real(self, x)

        monkeypatch.setattr(kind, "forward", forward)


def test_each_distinct_layer_is_timed_beside_the_dense_one(clock):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5))
    result = summary(convert(model, BTT(), include=["0", "1", "2"]), tokens=101)
    assert [(row.seconds, row.dense_seconds) for row in result.rows] == [(3, 303), (101, 101)]
    assert (result.seconds, result.dense_seconds) == (104, 404)
    assert "303000.00" in str(result)
    assert "dense ms" in str(result)


def test_calls_take_turns_and_neither_the_first_round_nor_slow_ones_decide(monkeypatch):
    now, calls = [0.0], []

    def call(name):
        calls.append(name)
        now[0] += 1000.0 if calls.count("a") <= 5 else 1.0  # the first round, and four of nine

    monkeypatch.setattr(report, "perf_counter", lambda: now[0])
    found = report._time_in_turn([lambda: call("a"), lambda: call("b")], torch.device("cpu"))
    assert found == [1.0, 1.0]
    assert calls == ["a", "b"] * 10


def test_timing_leaves_gradients_random_numbers_and_the_model_as_they_were():
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), BTT(), weight_norm=True)
    model[0].cores[0].grad = torch.ones_like(model[0].cores[0])
    model[1].cores[0].requires_grad_(False)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with torch.no_grad():
        result = summary(model, tokens=3)
    assert torch.equal(torch.rand(1), expected)
    assert result.seconds > 0
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["0.cores.0"]
    assert model[0].cores[0].grad.eq(1).all()


@pytest.mark.parametrize("measure", [0, -1, 2.5, True])
def test_what_cannot_be_timed_is_refused(measure):
    with pytest.raises(ValueError if measure in (0, -1) else TypeError, match=f"tokens={measure}"):
        summary(nn.Linear(4, 4), tokens=measure)
    with pytest.raises(ValueError, match=r"tokens=4: layer '0' has no values \(meta\)"):
        summary(nn.Sequential(nn.Linear(4, 4, device="meta")), tokens=4)


class Experts(nn.Module):
    """Three experts in one parameter, as many mixtures keep them."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.zeros(3, 8, 16))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Experts(), Experts()])
        self.mix = nn.Linear(16, 16, bias=False)


def test_experts_have_a_row_with_their_matrices_and_who_steps_them():
    model = Mixture()
    (row,) = summary(model).loose
    assert (row.name, row.matrices, row.size) == ("blocks.*.stack", 0, "(3, 8, 16)")
    assert row.stepped_by.startswith("AdamW")
    assert "AdamW steps it, until declare_weights" in str(plan(model, BTT()))

    class Declared(Experts):
        pass

    declare_weights(Declared, stack="e m n")
    model.blocks = nn.ModuleList([Declared(), Declared()])
    result = summary(model)
    (row,) = result.loose
    assert (row.matrices, row.size, row.params) == (6, "16 -> 8", 2 * 3 * 8 * 16)
    for text in (str(result), str(plan(model, BTT()))):
        (line,) = [line for line in text.splitlines() if "blocks.*.stack" in line]
        assert line.split()[1] == "6"
        assert "Muon and SOAP step each matrix" in line
    assert str(result).splitlines()[-1].split() == ["other", "parameters", "0"]
    assert result.other_params == row.params


def test_a_plan_equals_itself_alone():
    model = nn.Sequential(nn.Linear(16, 16))
    first = plan(model, BTT(), init="project")
    second = plan(model, BTT(), init="project")
    assert first == first
    assert first != second
    assert len({first, second}) == 2
