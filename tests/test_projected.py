"""convert with init="project": each layer takes the nearest matrix of its structure."""

import pytest
import torch
from torch import nn

from structlin import (
    BTT,
    BlockDiagonal,
    Kronecker,
    LowRank,
    Monarch,
    Split,
    convert,
    plan,
    to_dense,
)
from tests.models import GPT

TOKENS = torch.arange(48).reshape(4, 12)


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


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_weights_without_values_are_refused(device):
    model = nn.Linear(16, 16, device=device)
    if device == "cpu":
        nn.init.constant_(model.weight, torch.nan)
    with pytest.raises(ValueError, match="meta device" if device == "meta" else "not finite"):
        convert(model, BTT(), init="project")


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
    layer = convert(fused, Split(split=3, of=family), init="project")
    each = [convert(part, family, init="project") for part in parts]
    assert layer.structure.params == sum(part.structure.params for part in each)
    torch.testing.assert_close(
        layer(x), torch.cat([part(x) for part in each], dim=-1), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (5, "split=5 does not divide out_features=192"),
        (0, "split=0 must be at least 1"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        convert(GPT(), BTT(), overrides={"*c_attn": Split(split=parts, of=BTT())})
