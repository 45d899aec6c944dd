"""compress: layer by layer, each against the dense model."""

import copy
import math
import os
import subprocess
import sys
import threading
import warnings
import weakref
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from structlin import (
    BTT,
    BlockDiagonal,
    LowRank,
    Monarch,
    StructuredLinear,
    compress,
    distill,
    plan_compression,
    project,
    to_dense,
)
from structlin._compress import moments
from structlin._compress import project as projecting
from structlin._compress.project import DRAW
from structlin._convert.plan import Plan
from tests.compress.test_replay import Skips
from tests.models import snapshot


def linears(*widths: int, bias: bool = True, between: type[nn.Module] = nn.Identity) -> nn.Module:
    """Linear layers with random biases, and something between them."""
    layers: list[nn.Module] = []
    for first, second in pairwise(widths):
        layer = nn.Linear(first, second, bias=bias)
        if bias:
            nn.init.normal_(layer.bias)
        layers += [layer, between()]
    return nn.Sequential(*layers).double()


def plan_plainly(model: nn.Module, family, batches, **options) -> Plan:
    """Of the family's own size, all outputs alike."""
    return plan_compression(model, family, batches, keep=None, allocation="error", **options)


def correlated(rows: int, features: int) -> Tensor:
    """Rows around a mean that is not zero, with some directions far wider than others."""
    spread = torch.logspace(0, -2, features, dtype=torch.float64)
    return (
        torch.randn(rows, features).double() * spread @ torch.randn(features, features).double() + 1
    )


def by_the_definition(model: nn.Sequential, family, x: Tensor) -> nn.Sequential:
    """The quadratic algorithm: for each layer, dense and compressed model from the start.

    The regression is solved by least squares over the rows, with rows for the ridge.
    """
    new = copy.deepcopy(model)
    for n, layer in enumerate(model):
        if not isinstance(layer, nn.Linear):
            continue
        with torch.no_grad():
            before, now = model[:n](x), new[:n](x)
            w, carried = layer.weight, layer.bias is not None
            mean_x, mean_z = (rows.mean(0) if carried else 0 * rows[0] for rows in (before, now))
            a, b = before - mean_x, now - mean_z
            c = b.mT @ b / len(b)
            ridge = moments.RIDGE * len(c) / len(b) * c.diagonal().mean()
            eye = (len(b) * DRAW * ridge).sqrt() * torch.eye(len(c)).double()
            left, right = torch.cat([b, eye]), torch.cat([a, eye]) @ w.mT
            target = torch.linalg.lstsq(left, right).solution.mT
            cores = project(target, family, covariance=c + ridge * torch.eye(len(c)).double())
            made = StructuredLinear(*w.shape[::-1], family, bias=False, dtype=w.dtype)
            new[n].weight.copy_(made.set_cores_(cores).to_dense())
            if carried:
                new[n].bias.copy_(layer.bias + w @ mean_x - new[n].weight @ mean_z)
    return new


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("family", [LowRank(rank=3), BTT(), Monarch(), BlockDiagonal(blocks=4)])
@pytest.mark.parametrize("batches", [1, 3])
def test_it_is_the_quadratic_algorithm_layer_by_layer(family, bias, batches):
    model = linears(16, 16, 8, 8, bias=bias, between=nn.Tanh)
    x = correlated(60, 16)
    expected = by_the_definition(model, family, x)
    planned = plan_plainly(copy.deepcopy(model), family, x.chunk(batches))
    found = planned.apply()
    for n in (0, 2, 4):
        torch.testing.assert_close(found[n].to_dense(), expected[n].weight, rtol=1e-5, atol=1e-7)
        if bias:
            torch.testing.assert_close(found[n].bias, expected[n].bias, rtol=1e-5, atol=1e-7)
    y, new = (each[:4](x).detach() for each in (model, found))  # before the last Tanh
    y, new = model[4](y).detach(), found[4](new).detach()
    error = (y - new).norm() / (y - y.mean(0) if bias else y).norm()
    assert planned.errors["4"] == pytest.approx(error.item(), rel=1e-5)


def test_nothing_changes_until_the_plan_is_applied_and_the_bias_stays_the_same_parameter():
    model, x = linears(16, 16, 16), correlated(50, 16)
    model.train()
    before, biases = snapshot(model), [model[0].bias, model[2].bias]
    random = torch.get_rng_state()
    planned = plan_plainly(model, LowRank(rank=2), [x])
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(m.training and not m._forward_pre_hooks for m in model.modules())
    assert all("forward" not in vars(module) for module in model.modules())
    assert all(0 < error < 1 for error in planned.errors.values())
    old = [bias.detach().clone() for bias in biases]
    planned.apply()
    for layer, bias, values in zip(model[::2], biases, old, strict=True):
        assert layer.bias is bias
        assert not torch.equal(bias, values)


def test_a_bias_that_two_layers_share_stays_as_it_is():
    model, x = linears(16, 16, 16), correlated(50, 16)
    model[2].bias = model[0].bias
    before = model[0].bias.detach().clone()
    plan_plainly(model, LowRank(rank=2), [x]).apply()
    assert model[0].bias is model[2].bias
    assert torch.equal(model[0].bias, before)


class QKV(nn.Module):
    """Three layers with one input, and one whose input was changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        y = self.q(x) + self.k(x) + self.v(x)
        return y + self.o(x.mul_(0.5))


@pytest.mark.parametrize(("bias", "measured"), [(True, 2), (False, 4)])
def test_layers_with_the_same_input_share_its_covariance(bias, measured, monkeypatch):
    made, real = [], projecting.Moments

    def count(*args, **options):
        made.append(args)
        return real(*args, **options)

    monkeypatch.setattr(projecting, "Moments", count)
    model = QKV()
    model.k = nn.Linear(16, 16, bias=bias)  # without a bias it needs another
    plan_plainly(model, LowRank(rank=2), [torch.randn(50, 16)] * 2)
    assert len(made) == measured


def test_rounding_that_outweighs_the_ridge_only_makes_the_ridge_larger(monkeypatch):
    monkeypatch.setattr(moments, "RIDGE", 1e-15)
    model = linears(16, 16, 16, between=nn.Tanh).float()
    x = 1e3 * torch.randn(5000, 1) @ torch.randn(1, 16)
    planned = plan_plainly(model, LowRank(rank=2), [x])
    assert max(planned.errors.values()) < 1


@pytest.mark.parametrize("batches", [1, 5])
@pytest.mark.parametrize("family", [LowRank(rank=3), BTT(), BlockDiagonal(blocks=4)])
def test_fewer_tokens_than_features_keep_what_they_do_not_tell_near_the_weight(family, batches):
    model, x = linears(64, 64, 64, between=nn.Tanh), correlated(10, 64)
    expected = plan_plainly(copy.deepcopy(model), family, None)
    planned = plan_plainly(model, family, x.chunk(batches))
    weights = [model[n].weight.detach().clone() for n in (0, 2)]
    new = planned.apply()
    assert max(planned.errors.values()) < max(expected.errors.values())
    for n, weight in zip((0, 2), weights, strict=True):
        assert (new[n].to_dense() - weight).norm() < 1.5 * weight.norm()


# ---- what is called, and how often -------------------------------------------------------------


def test_layers_in_either_order_are_projected_for_all_their_inputs_in_the_dense_model():
    class Either(nn.ModuleDict):
        def forward(self, x: Tensor, way: str) -> Tensor:
            for name in way:
                x = self[name](x)
            return x

    torch.manual_seed(0)
    model = Either({name: nn.Linear(16, 16) for name in "abc"}).double()
    x = correlated(60, 16)
    batches = [(x[:10], "abc"), (x[10:], "bac")]
    with pytest.warns(UserWarning, match=r"orders that contradict each other.*: a, b$"):
        planned = plan_plainly(model, LowRank(rank=4), batches)
    assert {name: each.tokens for name, each in planned.projections.items()} == dict.fromkeys(
        "abc", 60
    )


def test_a_layer_that_is_called_twice_is_named_and_the_others_are_done_in_order():
    shared = nn.Linear(16, 16)
    model = nn.Sequential(nn.Linear(16, 16), shared, nn.Tanh(), shared, nn.Linear(16, 16)).double()
    x = correlated(60, 16)
    with pytest.warns(UserWarning, match=r"calls these layers more than once.*: 1$") as caught:
        planned = plan_plainly(model, LowRank(rank=4), x.split(30))
    assert len(caught) == 1
    dense = copy.deepcopy(model)
    new = planned.apply()
    assert new[1] is new[3]
    with torch.no_grad():
        z, y = new[:4](x), dense(x)
        error = (y - new[4](z)).norm() / (y - y.mean(0)).norm()
    assert planned.errors["4"] == pytest.approx(error.item(), rel=1e-5)
    torch.testing.assert_close(new(x).mean(0), y.mean(0))


class Routed(nn.Module):
    """Two experts in turn; the router sees what the first layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        chosen, y = h[:, :3].argmax(-1), torch.zeros_like(h)
        for n in chosen.unique().tolist():
            y[chosen == n] = self.experts[n](h[chosen == n])
        return self.last(h + y)


@pytest.mark.parametrize("options", [{"keep": None}, {}, {"refine": 2}])
@pytest.mark.parametrize("times", [1, 2])
def test_an_expert_that_is_called_without_tokens_is_projected_by_weight_alone(options, times):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x):
            for _ in range(times):
                chosen = x[:, 0] < torch.inf
                x = x.clone()
                x[chosen] = self.experts[0](x[chosen])
                x[~chosen] = self.experts[1](x[~chosen])
            return x

    torch.manual_seed(0)
    model, batches = Model(), [torch.randn(20, 8) for _ in range(2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned = plan_compression(model, LowRank(rank=2), batches, **options)
    weight_alone = [warning for warning in caught if "by weight alone" in str(warning.message)]
    if planned.decisions[1].structure is not None:  # within what is kept it may stay dense
        assert "no input that varies reached experts.1: projected" in str(weight_alone[0].message)
        structure = planned.decisions[1].resolved
        cores = planned.projections["experts.1"].cores
        expected = project(model.experts[1].weight, structure)
        torch.testing.assert_close(to_dense(structure, cores), to_dense(structure, expected))
    assert math.isfinite(sum(planned.errors.values()))


def test_experts_that_get_other_tokens_in_the_compressed_model_are_fitted_to_those():
    model, x = Routed().double(), torch.randn(90, 16, dtype=torch.float64)
    dense = copy.deepcopy(model)
    planned = plan_plainly(model, LowRank(rank=4), x.split(30))
    new = planned.apply()
    with torch.no_grad():
        other = (dense.first(x)[:, :3].argmax(-1) != new.first(x)[:, :3].argmax(-1)).sum()
        assert other > 5  # the test would tell nothing otherwise
        h = new.first(x)
        for n, expert in enumerate(new.experts):
            z = h[h[:, :3].argmax(-1) == n]
            if len(z) > 1:
                y, made = dense.experts[n](z), expert(z)
                torch.testing.assert_close(made.mean(0), y.mean(0))
                error = (y - made).norm() / (y - y.mean(0)).norm()
                assert planned.errors[f"experts.{n}"] == pytest.approx(error.item(), rel=1e-4)


@pytest.mark.parametrize("ways", [["ac", "abc"], ["ac", "abc", "a", "abc"] * 4], ids=len)
def test_batches_that_skip_a_layer_wait_for_the_others(ways):
    model = Skips({name: nn.Linear(16, 16) for name in "abc"}).double()
    batches = [(correlated(60, 16), way) for way in ways]
    dense = copy.deepcopy(model)
    planned = plan_plainly(model, LowRank(rank=4), batches)
    new = planned.apply()
    with torch.no_grad():
        y, made = (
            torch.cat([each(x, way) for x, way in batches if "c" in way]) for each in (dense, new)
        )
    error = (y - made).norm() / (y - y.mean(0)).norm()
    assert planned.errors["c"] == pytest.approx(error.item(), rel=1e-5)
    torch.testing.assert_close(made.mean(0), y.mean(0))


class Noisy(nn.Module):
    """It drops in eval mode too, as `F.dropout(x)` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).relu())
        return x


@pytest.mark.parametrize("options", [{}, {"memory": 0.0}, {"allocation": "error"}])
def test_a_model_that_draws_random_numbers_draws_the_same_ones_densely_and_compressed(options):
    torch.manual_seed(0)
    model, batches = Noisy(), [torch.randn(500, 16) for _ in range(3)]
    weights = [layer.weight.detach().clone() for layer in model.layers]
    random_numbers = torch.get_rng_state()
    whole = LowRank(rank=16)  # which holds every matrix
    plan_compression(model, whole, batches, keep=None, **options).apply()
    assert torch.equal(torch.get_rng_state(), random_numbers)
    for layer, weight in zip(model.layers, weights, strict=True):
        torch.testing.assert_close(layer.to_dense(), weight, rtol=0.0, atol=1e-3)


# ---- bad input ---------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Token ids to features; `scale` can make them infinite."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.wte, self.first, self.last = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.scale * self.first(self.wte(ids)))


@pytest.mark.parametrize("keep", [None, 0.5])
@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (Tagger(), [], "batches has no batch"),
        (Tagger(), iter([]), "batches has no batch"),
        (Tagger(float("inf")), [torch.arange(9)], "inputs of layer 'last' are not finite"),
        (
            Tagger(),
            [torch.arange(9), torch.arange(25)],
            "the id 20 is outside of the embedding 'wte', which has 20 rows: .*another tokenizer",
        ),
        (Tagger(), [torch.tensor([3, -1])], "the id -1 is outside of the embedding 'wte'"),
        (Tagger().to("meta"), [torch.arange(9)], "'first' is on the meta device"),
    ],
)
def test_bad_input_is_one_error_and_leaves_nothing_behind(model, batches, message, keep):
    before = [(name, id(p)) for name, p in model.named_parameters()]
    threads = threading.enumerate()
    with pytest.raises(ValueError, match=message):
        compress(model, LowRank(rank=2), batches, keep=keep)
    assert [(name, id(p)) for name, p in model.named_parameters()] == before
    assert all(m.training and not m._forward_pre_hooks for m in model.modules())
    assert all("forward" not in vars(m) for m in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()
    assert threading.enumerate() == threads


COMPILED = {}  # global: no replica has a copy of what is here


@pytest.mark.slow
def test_an_embedding_in_a_function_that_torch_has_compiled_whole_is_not_checked():
    class CallsCompiledCode(Tagger):
        def forward(self, ids: Tensor) -> Tensor:
            return self.last(self.first(COMPILED["look up"](ids, self.wte.weight)))

    graphs = []

    def compile_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(nn.functional.embedding, backend=compile_graph, fullgraph=True)
    model, batches = CallsCompiledCode(), [torch.arange(9)]
    errors = []
    for look_up in (nn.functional.embedding, compiled):
        COMPILED["look up"] = look_up
        errors.append(plan_plainly(model, LowRank(rank=2), batches).errors)
    assert errors[0] == errors[1]
    assert len(graphs) > 0


@pytest.mark.parametrize("allocation", ["sensitivity", "error"])
def test_a_bias_that_is_not_finite_is_named(allocation):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].bias.data[3] = torch.nan
    with pytest.raises(ValueError, match=r"^the bias of layer '1' is not finite"):
        compress(model, LowRank(rank=2), [torch.randn(40, 16)], allocation=allocation)
    assert not model[0].weight.isnan().any()


class Classifier(nn.Sequential):
    """It forms its loss, as models of transformers do where they get labels."""

    def forward(self, x, labels):
        logits = super().forward(x)
        loss = nn.functional.cross_entropy(logits.mT, labels)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(5, "the label 5 is outside of the loss, which has 5 classes"), (-3, "the label -3 is")],
)
@pytest.mark.parametrize("place", [0, 1])  # the first pass runs the first batch, not the second
def test_a_label_out_of_range_is_named_before_anything_is_changed(wrong, message, place):
    torch.manual_seed(0)
    model = Classifier(nn.Linear(6, 8), nn.Linear(8, 5))
    batches = [{"x": torch.randn(2, 9, 6), "labels": torch.randint(5, (2, 9))} for _ in range(16)]
    batches[0]["labels"][0] = -100  # does not count
    before = snapshot(model)
    compress(copy.deepcopy(model), LowRank(rank=2), batches, keep=None, include="*")
    batches[place]["labels"][1, 3] = wrong
    with pytest.raises(ValueError, match=f"batches: {message}"):
        compress(model, LowRank(rank=2), batches, keep=None, include="*")
    with pytest.raises(ValueError, match=f"batches: {message}"):
        distill(model, copy.deepcopy(model), batches, steps=16)
    assert snapshot(model) == before


def test_a_wrong_label_is_named_whatever_its_argument_is_called():
    torch.manual_seed(0)
    model = Classifier(nn.Linear(6, 8), nn.Linear(8, 5))
    batches = [(torch.randn(2, 9, 6), torch.randint(5, (2, 9))) for _ in range(16)]
    batches[1][1][1, 3] = 5  # the first pass does not run this batch
    with pytest.raises(ValueError, match="batches: the label 5 is outside of the loss"):
        compress(model, LowRank(rank=2), batches, keep=None, include="*")


def test_a_bar_says_which_layer_is_being_done_if_it_is_asked_for(capsys):
    model, x = linears(16, 16, 16), correlated(20, 16)
    plan_plainly(model, LowRank(rank=2), [x])
    assert capsys.readouterr() == ("", "")
    plan_plainly(model, LowRank(rank=2), [x], progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "project: 2" in err
    assert "2/2" in err


def test_a_model_in_half_precision_is_calibrated_in_float32():
    model, x = linears(16, 16, 16, between=nn.Tanh), correlated(200, 16)
    expected = plan_plainly(copy.deepcopy(model), LowRank(rank=4), [x])
    found = plan_plainly(model.bfloat16(), LowRank(rank=4), [x.bfloat16()])
    assert found.errors == pytest.approx(expected.errors, rel=0.05)
    cores = [core for each in found.projections.values() for core in each.cores]
    assert {core.dtype for core in cores} == {torch.bfloat16}


def test_activations_of_one_place_alone_are_held():
    made, most = [], []

    class Remembered(nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            made.append(weakref.ref(y := super().forward(x)))
            most.append(sum(each() is not None for each in made))
            return y

    model, batches = linears(*[8] * 13, between=Remembered), correlated(40, 8).split(10)
    plan_plainly(model, LowRank(rank=2), batches)
    # whole to find the order; then both runs of a batch end with the layer before the last
    assert len(made) == 12 * 4 + 11 * 4 * 2
    assert max(most) <= 2 * len(batches) + 2


SEEN: list[torch.dtype] = []  # global: a list that a hook holds is one run's alone


def test_autocast_holds_in_all_runs_and_not_in_the_sums():
    model, x = linears(16, 16, 16, between=nn.Tanh).float(), correlated(60, 16).float()
    expected = plan_plainly(copy.deepcopy(model), LowRank(rank=16), [x])
    SEEN.clear()
    model[1].register_forward_hook(lambda module, args, output: SEEN.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = plan_plainly(model, LowRank(rank=16), [x])
    assert list(SEEN) == [torch.bfloat16] * 3
    for name in ("0", "2"):
        assert expected.errors[name] < 1e-3
        assert found.errors[name] < 2e-2


def test_a_plan_says_where_tokens_are_fewer_than_features():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    planned = plan_plainly(model, LowRank(rank=2), [torch.randn(9, 8)])
    lines = [line for line in str(planned).splitlines() if " -> " in line and "LowRank" in line]
    assert [line.endswith(" of 9 tokens: few") for line in lines] == [False, True]


MEMORY = """
import resource, sys, torch, structlin
from torch import nn

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

batches = [torch.randn(512, 128) for _ in range(4)]
for blocks in (2, 4, 16):
    pairs = [(nn.Linear(128, 1024), nn.Linear(1024, 128)) for _ in range(blocks)]
    model = nn.Sequential(*(nn.Sequential(up, nn.ReLU(), down) for up, down in pairs))
    structlin.compress(model, structlin.LowRank(rank=8), batches, refine=2, keep=None)
    print(blocks, peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="how memory is counted is the system's")
def test_the_memory_of_a_deeper_model_grows_by_its_weights_alone():
    """12 blocks more have 12 MiB of weights; their covariances would be 97 MiB, their activations
    120 MiB. What is freed is given back at once, so that the peak says what was held."""
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", MEMORY]
    done = subprocess.run(run, env=os.environ | own, capture_output=True, text=True, check=True)
    _, few, many = (float(line.split()[1]) for line in done.stdout.splitlines())
    assert many - few < 40
