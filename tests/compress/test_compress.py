"""convert with init="project": calibration, budget, untie."""

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
    convert,
    plan,
    to_dense,
)
from tests.models import GPT, snapshot

TOKENS = torch.arange(48).reshape(4, 12)


def inputs_of(features: int, rows: int = 200, rank: int = 4) -> torch.Tensor:
    """Inputs that live near a small subspace, not around the origin of any axis."""
    return torch.randn(rows, rank) @ torch.randn(rank, features) + 0.01 * torch.randn(
        rows, features
    )


def test_projection_keeps_the_function_that_the_structure_can_hold():
    model = GPT().double()
    expected = model(TOKENS)
    bias = model.h[0].mlp.c_fc.bias
    planned = plan(model, LowRank(rank=64), init="project", exclude="*c_attn")
    planned.apply()
    torch.testing.assert_close(model(TOKENS), expected)
    assert max(planned.errors.values()) < 1e-6
    assert set(planned.errors) == {
        f"h.{n}.{name}" for n in (0, 1) for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert model.h[0].mlp.c_fc.bias is bias


def test_errors_are_those_of_the_matrices_and_the_plan_prints_them():
    model = nn.Sequential(nn.Linear(16, 16))
    weight = model[0].weight.detach().clone()
    planned = plan(model, BTT(rank=2), init="project", weight_norm=True)
    assert planned.errors == {}
    model = planned.apply()
    expected = (weight - model[0].to_dense()).norm() / weight.norm()
    assert planned.errors["0"] == pytest.approx(expected.item(), rel=1e-4)
    assert f"{planned.errors['0']:.4f}" in str(planned)


def test_projection_draws_no_random_number():
    torch.manual_seed(3)
    expected = torch.randn(2)
    model = nn.Linear(16, 16)
    torch.manual_seed(3)
    convert(model, BTT(rank=2), init="project")
    assert torch.equal(torch.randn(2), expected)


def test_a_conv1d_is_projected_as_the_matrix_it_multiplies_by():
    transformers = pytest.importorskip("transformers")
    layer = transformers.pytorch_utils.Conv1D(8, 8)
    with torch.no_grad():
        layer.weight.copy_(torch.outer(torch.randn(8), torch.randn(8)))
    x = torch.randn(3, 8)
    torch.testing.assert_close(
        convert(layer, LowRank(rank=1), init="project")(x), layer(x), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    "calibration",
    [
        [TOKENS],
        [(TOKENS,)],
        [{"tokens": TOKENS}],
        (batch for batch in TOKENS.split(2)),
        lambda model: model(TOKENS),
    ],
)
def test_calibration_takes_batches_of_any_kind_or_a_function(calibration):
    planned = plan(GPT(), BTT(), include="*mlp.c_fc", calibration=calibration)
    assert planned.init == "project"
    planned.apply()
    assert all(0 < error < 1 for error in planned.errors.values())


@pytest.mark.parametrize(
    "family",
    [LowRank(rank=4), BTT(rank=2), Monarch(blocks=4), Kronecker(), BlockDiagonal(blocks=4)],
)
def test_with_calibration_the_outputs_are_nearer_than_without(family):
    layer, x = nn.Linear(16, 16), inputs_of(16)
    target = layer(x) - layer.bias
    errors = []
    for options in ({"init": "project"}, {"calibration": [x]}):
        dense = nn.Sequential(nn.Linear(16, 16))
        dense.load_state_dict({"0.weight": layer.weight, "0.bias": layer.bias})
        planned = plan(dense, family, **options)
        new = planned.apply()[0]
        errors.append(((target - x @ new.to_dense().mT).norm() / target.norm()).item())
    assert errors[1] < 0.9 * errors[0]
    assert planned.errors["0"] == pytest.approx(errors[1], rel=1e-2)


def test_a_layer_that_calibration_does_not_reach_is_projected_by_its_weight_with_a_warning():
    model = nn.Sequential(nn.Linear(16, 16), nn.Identity())
    model[1].idle = nn.Linear(16, 16)
    with pytest.warns(UserWarning, match=r"no input reached 1\.idle: projected by weight alone"):
        convert(model, BTT(), calibration=[torch.randn(20, 16)])
    assert isinstance(model[1].idle, StructuredLinear)


def fail(model):
    raise RuntimeError("a batch that fails")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"calibration": TOKENS}, TypeError, "calibration=Tensor must be an iterable of batches"),
        ({"calibration": 3}, TypeError, "calibration=int"),
        ({"calibration": []}, ValueError, "calibration has no batch"),
        (
            {"calibration": lambda model: None},
            ValueError,
            "none of the layers to convert saw an input",
        ),
        ({"calibration": fail}, RuntimeError, "a batch that fails"),
        (
            {"calibration": [TOKENS], "init": "mup"},
            ValueError,
            "calibration is given, but init='mup' starts afresh",
        ),
        ({"budget": 0.5, "init": "mup"}, ValueError, "budget is given, but init='mup'"),
        (
            {"init": "project", "zero_init": "*c_proj"},
            ValueError,
            r"zero_init='\*c_proj': with init",
        ),
        ({"budget": 0}, ValueError, "budget=0 must be a fraction"),
        ({"budget": 1.5}, ValueError, "budget=1.5 must be a fraction"),
        ({"budget": 0.01}, ValueError, r"budget=0.01 is .* budget=0\.\d+ or more"),
        (
            {"budget": 0.5, "structure": Kronecker()},
            ValueError,
            "Kronecker has neither rank nor blocks",
        ),
        ({"budget": 0.5, "structure": Dense().structure(256, 256)}, ValueError, "must be a family"),
        (
            {"budget": 0.5, "budget_of": "macs"},
            ValueError,
            "budget_of='macs': it is 'params' or 'flops'",
        ),
        (
            {"budget_of": "flops"},
            ValueError,
            r"budget_of='flops': .* goes with a budget, for example budget=0\.5",
        ),
        (
            {"budget": 0.01, "budget_of": "flops"},
            ValueError,
            "FLOPs a token; the smallest structures",
        ),
        ({"untie": True}, ValueError, "untie=True: no layer that is converted shares its weight"),
    ],
)
def test_bad_arguments_are_refused_and_the_model_stays_as_it_was(arguments, error, message):
    model = GPT()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        convert(model, **arguments)
    assert snapshot(model) == before
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_weights_without_values_are_refused(device):
    model = nn.Linear(16, 16, device=device)
    if device == "cpu":
        nn.init.constant_(model.weight, torch.nan)
    with pytest.raises(ValueError, match="meta device" if device == "meta" else "not finite"):
        convert(model, BTT(), init="project")


@pytest.mark.parametrize("budget", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("family", [LowRank(rank=1), BTT(), Monarch()])
def test_a_budget_is_kept_and_more_of_it_is_never_worse(budget, family):
    def spend(budget: float) -> tuple[float, float]:
        torch.manual_seed(0)
        model = GPT()
        planned = plan(model, family, include="ffn", budget=budget)
        used = sum(decision.resolved.params for decision in planned.decisions if decision.resolved)
        return used / (4 * 64 * 256), sum(error**2 for error in planned.errors.values())

    used, error = spend(budget)
    assert used <= budget
    assert error <= spend(max(budget - 0.05, 0.19))[1] + 1e-9


def test_a_budget_of_flops_is_kept_where_parameters_are_shared_and_the_plan_shows_the_choice():
    dense = 4 * 64 * 256  # parameters; a dense layer has twice as many FLOPs a token
    used = {}
    for of in ("params", "flops"):
        torch.manual_seed(0)
        planned = plan(GPT(), TT(rank=1), include="ffn", budget=0.5, budget_of=of)
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


def test_a_budget_of_flops_is_that_of_parameters_where_nothing_is_shared():
    found = []
    for of in ("params", "flops"):
        torch.manual_seed(0)
        planned = plan(GPT(), BTT(), include="ffn", budget=0.5, budget_of=of)
        found.append([decision.structure for decision in planned.decisions])
    assert found[0] == found[1]


def test_the_smallest_budget_that_the_error_names_works():
    with pytest.raises(ValueError, match="or more") as refused:
        plan(GPT(), BTT(), budget=0.001, budget_of="flops")
    least = float(re.search(r"budget=(0\.\d+) or more", str(refused.value))[1])
    plan(GPT(), BTT(), budget=least, budget_of="flops")


def test_the_budget_goes_to_the_layers_that_need_it():
    easy, hard = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    with torch.no_grad():
        easy.weight.copy_(torch.outer(torch.randn(32), torch.randn(32)))
    model = nn.Sequential(easy, hard)
    planned = plan(model, LowRank(rank=1), budget=0.5)
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
    planned = plan(model, LowRank(rank=1), budget=0.5)  # 96 parameters: 6 ranks
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


def test_layers_with_an_override_keep_it_and_are_not_counted():
    planned = plan(
        GPT(), BTT(), include="ffn", budget=0.5, overrides={"h.0.mlp.c_fc": LowRank(rank=3)}
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


def test_a_tied_head_is_converted_with_untie_and_the_embedding_keeps_its_weight():
    model = GPT(tied=True)
    weight = model.wte.weight
    convert(model, LowRank(rank=8), include="head", init="project", untie=True)
    assert model.wte.weight is weight
    structure = model.lm_head.structure
    assert to_dense(structure, list(model.lm_head.cores)).shape == weight.shape


@pytest.mark.parametrize(
    "family",
    [BTT(rank=2), LowRank(rank=8), Monarch(blocks=4), Kronecker(), BlockDiagonal(blocks=4)],
)
def test_a_fused_qkv_is_projected_as_three_layers_would_be(family):
    fused = nn.Linear(16, 48)
    parts = [nn.Linear(16, 16) for _ in range(3)]
    for part, weight, bias in zip(parts, fused.weight.chunk(3), fused.bias.chunk(3), strict=True):
        part.weight, part.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    x = torch.randn(5, 16)
    layer = convert(fused, family, init="project", split={"*": 3})
    each = [convert(part, family, init="project") for part in parts]
    assert layer.structure.params == sum(part.structure.params for part in each)
    torch.testing.assert_close(
        layer(x), torch.cat([part(x) for part in each], dim=-1), atol=1e-4, rtol=1e-4
    )


def test_split_goes_with_a_budget_and_the_plan_says_so():
    planned = plan(GPT(), BTT(), include="attention", budget=0.5, split={"*c_attn": 3})
    assert "3 x BTT(rank=" in str(planned)
    model = planned.apply()
    assert model.h[0].attn.c_attn.label.startswith("3 x BTT(rank=")
    model(TOKENS)


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        ({"*c_attn": 5}, ValueError, "split=5 does not divide out_features=192"),
        ({"*c_attn": 0}, ValueError, "split=0 must be at least 1"),
        ({"*qkv": 3}, ValueError, r"split: '\*qkv' matches no linear layer"),
        ({"lm_head": 2}, ValueError, "split: 'lm_head' converts nothing"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split, error, message):
    with pytest.raises(error, match=message):
        convert(GPT(), BTT(), split=split)
