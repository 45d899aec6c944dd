"""compress: batches of any kind, what is kept, bad arguments."""

import re

import pytest
import torch
from torch import nn

from structlin import (
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    StructuredLinear,
    compress,
    plan_compression,
    summary,
)
from structlin._compress.allocation import Share
from structlin._compress.compress import measure
from structlin._projection import project, relative_error
from structlin._projection.curve import list_sizes, measure_curve
from tests.models import GPT, snapshot

TOKENS = torch.arange(48).reshape(4, 12)


def inputs_of(features: int, rows: int = 200, rank: int = 4) -> torch.Tensor:
    """Inputs that live near a small subspace, not around the origin of any axis."""
    return torch.randn(rows, rank) @ torch.randn(rank, features) + 0.01 * torch.randn(
        rows, features
    )


@pytest.mark.parametrize(
    "batches",
    [
        [TOKENS],
        [(TOKENS,)],
        [{"tokens": TOKENS}],
        (batch for batch in TOKENS.split(2)),
        lambda model: model(TOKENS),
    ],
)
def test_batches_are_of_any_kind_or_a_function(batches):
    planned = plan_compression(GPT(), BTT(), batches, include="*mlp.c_fc", keep=None)
    planned.apply()
    assert all(0 < error < 1 for error in planned.errors.values())


@pytest.mark.parametrize(
    "family",
    [LowRank(rank=4), BTT(rank=2), Monarch(blocks=4), Kronecker(), BlockDiagonal(blocks=4)],
)
def test_with_batches_the_outputs_are_nearer_than_without(family):
    layer, x = nn.Linear(16, 16), inputs_of(16)
    target = layer(x) - layer.bias
    errors = []
    for batches in (None, [x]):
        dense = nn.Sequential(nn.Linear(16, 16))
        dense.load_state_dict({"0.weight": layer.weight, "0.bias": layer.bias})
        planned = plan_compression(dense, family, batches, keep=None)
        new = planned.apply()[0]
        errors.append(((target - x @ new.to_dense().mT).norm() / target.norm()).item())
    assert errors[1] < 0.9 * errors[0]
    assert planned.errors["0"] == pytest.approx(errors[1], rel=1e-2)


def test_a_layer_that_no_batch_reaches_is_projected_by_its_weight_with_a_warning():
    model = nn.Sequential(nn.Linear(16, 16), nn.Identity())
    model[1].idle = nn.Linear(16, 16)
    with pytest.warns(
        UserWarning, match=r"no input that varies reached 1\.idle: projected by weight"
    ):
        compress(model, BTT(), [torch.randn(20, 16)], keep=None)
    assert isinstance(model[1].idle, StructuredLinear)


@pytest.mark.parametrize("count", ["params", "flops"])
def test_all_layers_that_no_size_fits_are_named_with_what_leaves_them_dense(count):
    widths = (64, 128), (128, 10), (10, 6)
    model = nn.Sequential(*(nn.Linear(*each) for each in widths))
    before = snapshot(model)
    named = r"'1' \(Monarch of 128 -> 10\), '2' \(Monarch of 10 -> 6\); exclude=\['1', '2'\]"
    with pytest.raises(ValueError, match=named):
        compress(model, Monarch(blocks=2), [torch.randn(200, 64)], count=count)
    assert snapshot(model) == before
    compress(model, Monarch(blocks=2), [torch.randn(200, 64)], count=count, exclude=["1", "2"])


ROW = torch.arange(64.0).cos()[None]


@pytest.mark.parametrize(
    ("batch", "bias", "warning"),
    [
        (
            torch.zeros(30, 64),
            True,
            r"no input that varies reached 0, 2: projected by weight alone",
        ),
        (torch.zeros(30, 64), False, r"no input that varies reached 0, 2"),
        (ROW, True, r"no input that varies reached 0, 2"),
        (ROW.expand(30, 64), True, r"no input that varies reached 0, 2"),
        (ROW, False, r"far fewer tokens .*: 0 \(1 of 64\), 2 \(1 of 128\); give more batches"),
        (ROW * torch.arange(3.0)[:, None], True, r"far fewer tokens .*: 0 \(3 of 64\)"),
    ],
)
@pytest.mark.parametrize("allocation", ["sensitivity", "error"])
def test_of_batches_that_tell_little_it_warns_and_spends_what_is_kept(
    batch, bias, warning, allocation
):
    torch.manual_seed(0)
    widths = (64, 128), (128, 64)
    first, second = (nn.Linear(*each, bias=bias) for each in widths)
    model = nn.Sequential(first, nn.GELU(), second)
    with pytest.warns(UserWarning, match=warning):
        planned = plan_compression(model, LowRank(rank=1), [batch], allocation=allocation)
    assert all(0 < error < 1 for error in planned.errors.values())
    if allocation == "error":  # both layers are alike, and so few tokens tell no difference
        assert [decision.structure.rank for decision in planned.decisions] == [16, 24]
    assert summary(planned.apply()).params > 0.37 * 2 * 64 * 128


def by_weight(model, family, **options):
    """The plan without data: each layer's error counts alike."""
    return plan_compression(model, family, None, allocation="error", **options)


def fail(model):
    raise RuntimeError("a batch that fails")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batches": TOKENS}, TypeError, "batches=Tensor must be an iterable of batches"),
        ({"batches": 3}, TypeError, "batches=3 must be an iterable"),
        ({"batches": []}, ValueError, "batches has no batch"),
        (
            {"batches": lambda model: None},
            ValueError,
            "none of the layers to convert saw an input",
        ),
        ({"batches": fail}, RuntimeError, "a batch that fails"),
        ({"init": "mup"}, TypeError, "init"),
        ({"zero_init": "*c_proj"}, TypeError, "zero_init"),
        ({"keep": 0}, ValueError, "keep=0 must be a fraction"),
        ({"keep": 1.5}, ValueError, "keep=1.5 must be a fraction"),
        ({"keep": True}, ValueError, "keep=True must be a fraction"),
        ({"keep": "half"}, ValueError, "keep='half' must be a fraction"),
        ({"keep": 0.01}, ValueError, r"keep=0.01 is .* keep=0\.\d+ or more"),
        (
            {"keep": 0.5, "structure": Kronecker()},
            ValueError,
            "Kronecker has neither rank nor blocks to choose; take keep=None",
        ),
        (
            {"structure": BTT().activate()},
            ValueError,
            "^compress needs a matrix, and a structure with between='silu' is none",
        ),
        (
            {"structure": BTT().activate(), "keep": None},
            ValueError,
            "^layer 'h.0.attn.c_attn': compress needs a matrix",
        ),
        ({"structure": Dense().structure(256, 256)}, ValueError, "no size to choose; keep=None"),
        (
            {"keep": 0.5, "count": "macs"},
            ValueError,
            "count='macs' is unknown; there are params, flops",
        ),
        (
            {"keep": None, "count": "flops"},
            ValueError,
            "count='flops' goes with a fraction to keep, say keep=0.5",
        ),
        (
            {"keep": 0.01, "count": "flops"},
            ValueError,
            "FLOPs per token; the smallest structures",
        ),
        ({"structure": [BTT(), LowRank(rank=1)]}, TypeError, "must be a family such as"),
        ({"untie": True}, ValueError, "untie=True: no layer that is converted shares its weight"),
    ],
)
def test_bad_arguments_are_refused_and_the_model_stays_as_it_was(arguments, error, message):
    model = GPT()
    before = snapshot(model)
    given = {"structure": BTT(), "batches": [TOKENS], **arguments}
    with pytest.raises(error, match=message):
        compress(model, **given)
    assert snapshot(model) == before
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("family", [LowRank(rank=1), BTT(), Monarch()])
def test_a_share_is_kept_and_a_larger_one_is_never_worse(keep, family):
    def spend(keep: float) -> tuple[float, float]:
        torch.manual_seed(0)
        model = GPT()
        planned = by_weight(model, family, include="ffn", keep=keep)
        used = sum(decision.resolved.params for decision in planned.decisions if decision.resolved)
        return used / (4 * 64 * 256), sum(error**2 for error in planned.errors.values())

    used, error = spend(keep)
    assert used <= keep
    assert error <= spend(max(keep - 0.05, 0.19))[1] + 1e-9


def test_one_measurement_serves_every_share():
    model, batches, options = GPT(), [TOKENS], {"include": "*mlp*", "progress": False}
    measured = measure(
        model, BTT(), batches, Share(0.4), None, False, include="*mlp*",
        exclude=(), overrides=None, split=None, untie=False,
    )  # fmt: skip
    for keep, refine in ((0.8, 0), (0.4, 2), (0.6, 0)):
        planned = measured.plan(Share(keep), refine, progress=False)
        alone = plan_compression(model, BTT(), batches, keep=keep, refine=refine, **options)
        assert planned.errors == alone.errors
        assert planned.blocks == alone.blocks
        assert str(planned) == str(alone)


def test_a_share_of_flops_is_kept_where_parameters_are_shared_and_the_plan_shows_the_choice():
    dense = 4 * 64 * 256  # parameters; a dense layer has twice as many FLOPs per token
    used = {}
    for of in ("params", "flops"):
        torch.manual_seed(0)
        planned = by_weight(GPT(), TT(rank=1), include="ffn", keep=0.5, count=of)
        chosen = [decision.resolved for decision in planned.decisions if decision.resolved]
        used[of] = (
            sum(new.params for new in chosen) / dense,
            sum(new.flops for new in chosen) / (2 * dense),
        )
        for decision in planned.decisions:
            if decision.structure is not None:
                assert re.search(
                    rf"{decision.layer.name} .*TT\(rank=\d+.*{decision.resolved.flops:,}",
                    str(planned),
                )
    assert used["params"][0] <= 0.5 < used["params"][1]
    assert used["flops"][1] <= 0.5
    assert used["flops"][0] < used["params"][0]


def test_a_share_of_flops_is_that_of_parameters_where_nothing_is_shared():
    found = []
    for of in ("params", "flops"):
        torch.manual_seed(0)
        planned = by_weight(GPT(), BTT(), include="ffn", keep=0.5, count=of)
        found.append([decision.structure for decision in planned.decisions])
    assert found[0] == found[1]


def test_the_smallest_share_that_the_error_names_works():
    with pytest.raises(ValueError, match="or more") as refused:
        by_weight(GPT(), BTT(), keep=0.001, count="flops")
    least = float(re.search(r"keep=(0\.\d+) or more", str(refused.value))[1])
    by_weight(GPT(), BTT(), keep=least, count="flops")


def test_more_is_kept_of_the_layers_that_need_it():
    easy, hard = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    with torch.no_grad():
        easy.weight.copy_(torch.outer(torch.randn(32), torch.randn(32)))
    model = nn.Sequential(easy, hard)
    planned = by_weight(model, LowRank(rank=1), keep=0.5)
    assert [decision.structure for decision in planned.decisions] == [
        LowRank(rank=1),
        LowRank(rank=15),
    ]
    assert "LowRank(rank=15)" in str(planned)
    planned.apply()
    assert model[1].structure.params == 15 * 64


def test_the_greedy_choice_is_the_best_of_all_choices_for_low_rank():
    weights = [
        torch.randn(8, 8) @ torch.diag(torch.tensor(2.0) ** -torch.arange(8)) ** n for n in range(3)
    ]
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in weights))
    with torch.no_grad():
        for layer, weight in zip(model, weights, strict=True):
            layer.weight.copy_(weight)
    planned = by_weight(model, LowRank(rank=1), keep=0.5)  # 96 parameters: 6 ranks
    found = sum(error**2 for error in planned.errors.values())
    tails = [
        [(s[r:].square().sum() / s.square().sum()).item() for r in range(9)]
        for s in map(torch.linalg.svdvals, weights)
    ]
    grid = [
        (a, b, c)
        for a in (1, 2, 3, 4)
        for b in (1, 2, 3, 4)
        for c in (1, 2, 3, 4)
        if a + b + c <= 6
    ]
    best = min(sum(tail[rank] for tail, rank in zip(tails, ranks, strict=True)) for ranks in grid)
    assert found == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize(
    ("family", "most"), [(BTT(), 1.6), (Monarch(blocks=4), 1.6), (BTT(cores=3), 2.0)]
)
def test_a_curve_knows_what_alternating_least_squares_leaves(family, most):
    torch.manual_seed(0)
    weight, covariance = torch.randn(64, 64), (torch.randn(300, 64) @ torch.randn(64, 64)).T.cov()
    output = torch.linspace(0.1, 2.0, 64)
    curve = measure_curve(weight, list_sizes(family, 64, 64, "params"), covariance, output)
    metric = {"covariance": covariance, "output": output}
    sizes, errors = curve.sizes[:-1], curve.errors[:-1]
    for size, error in zip(sizes, errors, strict=True):
        if size.cost > curve.sizes[-1].cost / 16:
            cores = project(weight, size.structure, **metric)
            left = relative_error(weight, size.structure, cores, **metric) ** 2
            assert 1 / most < error / (curve.whole * left) < most


def test_layers_with_an_override_keep_it_and_are_not_counted():
    planned = by_weight(
        GPT(), BTT(), include="ffn", keep=0.5, overrides={"h.0.mlp.c_fc": LowRank(rank=3)}
    )
    chosen = {
        decision.layer.name: decision.structure
        for decision in planned.decisions
        if decision.structure
    }
    assert chosen.pop("h.0.mlp.c_fc") == LowRank(rank=3)
    used = sum(
        decision.resolved.params for decision in planned.decisions if decision.layer.name in chosen
    )
    assert used <= 0.5 * 3 * 64 * 256


def test_split_goes_with_keep_and_the_plan_says_so():
    planned = by_weight(GPT(), BTT(), include="attention", keep=0.5, split={"*c_attn": 3})
    assert "3 x BTT(rank=" in str(planned)
    model = planned.apply()
    assert model.h[0].attn.c_attn.label.startswith("3 x BTT(rank=")
    model(TOKENS)


@pytest.mark.parametrize("allocation", ["sensitivity", "error"])
def test_a_share_that_no_sizes_reach_is_named_before_the_model_runs(allocation):
    def run(model):
        raise AssertionError("the model need not run")

    with pytest.raises(ValueError, match=r"keep=0\.001.* or more"):
        plan_compression(GPT(), BTT(), run, keep=0.001, allocation=allocation)


@pytest.mark.parametrize("keep", [0.5, 0.3])
def test_of_a_model_without_values_each_layer_keeps_the_largest_size_of_the_same_share(keep):
    model, options = GPT().to("meta"), {"keep": keep, "allocation": "error"}
    planned = plan_compression(model, LowRank(rank=1), None, **options)
    for decision in planned.decisions:
        if decision.resolved is not None:
            widths = decision.layer.in_features, decision.layer.out_features
            sizes = list_sizes(LowRank(rank=1), *widths, "params")
            limit = keep * widths[0] * widths[1]
            fit = [size.structure for size in sizes if size.cost <= limit]
            assert decision.resolved == fit[-1]
    assert not planned.errors
    assert "LowRank(rank=" in str(planned)
    with pytest.raises(ValueError, match=r"layer 'h\.0\..*' was on the meta device"):
        planned.apply()
    with pytest.raises(ValueError, match="is on the meta device and has no values to keep"):
        plan_compression(model, LowRank(rank=1), [torch.arange(3)], **options)


def test_an_even_share_that_the_smallest_size_of_a_layer_exceeds_is_refused():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(8, 8)).to("meta")
    with pytest.raises(ValueError, match=r"the same for all layers: .* needs 0\.25\d* or more"):
        plan_compression(model, LowRank(rank=1), None, keep=0.1, allocation="error", include="*")
