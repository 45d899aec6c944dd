"""The way back: densify for a model, from_dense_ for a layer."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from structlin import (
    BTT,
    TT,
    Kronecker,
    LowRank,
    Monarch,
    StructuredLinear,
    convert,
    densify,
    to_dense,
)
from structlin._engine import product
from tests.models import GPT, snapshot

TOKENS = torch.arange(24).reshape(2, 12)


def test_to_dense_gives_back_keys_shapes_and_function():
    model = GPT()
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    expected = convert(model, BTT(rank=2), weight_norm=True)(TOKENS)
    assert densify(model) is model
    assert {key: value.shape for key, value in model.state_dict().items()} == shapes
    assert not any(isinstance(module, StructuredLinear) for module in model.modules())
    torch.testing.assert_close(model(TOKENS), expected, atol=1e-5, rtol=1e-4)


def test_to_dense_keeps_dtype_grad_training_mode_and_the_bias_itself():
    model = convert(
        nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16, bias=False)).to(torch.bfloat16), BTT()
    )
    for parameter in model[0].cores:
        parameter.requires_grad_(False)
    model[1].eval()
    bias = model[0].bias
    densify(model)
    assert (
        model[0].weight.requires_grad,
        model[0].bias.requires_grad,
        model[1].weight.requires_grad,
    ) == (0, 1, 1)
    assert model[0].bias is bias
    assert model[1].bias is None
    assert (model[0].training, model[1].training) == (True, False)
    assert model[0].weight.dtype == torch.bfloat16


def test_a_shared_layer_is_still_shared_when_it_is_structured_and_dense_again():
    layer = nn.Linear(16, 16)
    model = convert(nn.ModuleList([layer, nn.Sequential(layer)]), BTT(), include="1.*")
    assert isinstance(model[0], StructuredLinear)
    densify(model)
    assert type(model[0]) is nn.Linear
    assert model[0] is model[1][0]


def test_a_model_that_is_one_layer_comes_back_as_one_linear_layer():
    layer = StructuredLinear(12, 20, Monarch(blocks=2))
    assert type(densify(layer)) is nn.Linear


def test_conv1d_comes_back_as_conv1d():
    transformers = pytest.importorskip("transformers")
    layer = transformers.pytorch_utils.Conv1D(6, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.outer(torch.randn(4), torch.randn(6)))
    model = densify(convert(nn.Sequential(layer), LowRank(rank=1), init="project"))
    assert type(model[0]) is type(layer)
    torch.testing.assert_close(model[0].weight, layer.weight)
    assert model[0].bias is layer.bias


def test_a_weight_normalisation_of_torch_that_was_removed_is_no_obstacle():
    model = nn.Sequential(StructuredLinear(16, 16), nn.Linear(16, 16))
    for owner, name in ((model[0].cores, "0"), (model[1], "weight")):
        parametrizations.weight_norm(owner, name)
        parametrize.remove_parametrizations(owner, name)
    convert(model, BTT(), include="1")
    expected = model(torch.eye(16))
    torch.testing.assert_close(densify(model)(torch.eye(16)), expected)


def test_a_model_without_structured_layers_has_no_way_back():
    with pytest.raises(ValueError, match="model=Linear has no structured layer"):
        densify(nn.Linear(3, 3))


@pytest.mark.parametrize("family", [BTT(rank=3), LowRank(rank=4), Kronecker(), Monarch(blocks=2)])
@pytest.mark.parametrize("weight_norm", [False, True])
def test_from_dense_finds_a_matrix_that_the_structure_can_hold(family, weight_norm):
    structure = family.structure(12, 20)
    target = 5 * to_dense(
        structure, [torch.randn(core.shape, dtype=torch.float64) for core in structure.cores]
    )
    layer = StructuredLinear(12, 20, family, weight_norm=weight_norm, dtype=torch.float64)
    bias = torch.randn(20, dtype=torch.float64)
    assert layer.from_dense_(target, bias) is layer
    torch.testing.assert_close(layer.to_dense(), target, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(layer.bias.detach(), bias)


def test_from_dense_without_a_bias_leaves_the_layers_own():
    layer = StructuredLinear(12, 20, BTT())
    nn.init.ones_(layer.bias)
    layer.from_dense_(torch.randn(20, 12))
    assert (layer.bias == 1).all()


@pytest.mark.parametrize(
    ("layer", "weight", "bias", "message"),
    [
        ({}, torch.zeros(12, 20), None, r"weight has shape \(12, 20\); it must be .* \(20, 12\)"),
        (
            {},
            torch.zeros(20, 12),
            torch.zeros(12),
            r"bias has shape \(12,\) on cpu; it must be \(out_features,\) = \(20,\)",
        ),
        ({"bias": False}, torch.zeros(20, 12), torch.zeros(20), "the layer has none"),
        ({}, torch.full((20, 12), torch.nan), None, "not finite"),
        ({}, torch.zeros(20, 12), torch.full((20,), torch.nan), "bias has 20 values that are not"),
        ({}, torch.zeros(20, 12, device="meta"), None, "meta"),
        ({"device": "meta"}, torch.zeros(20, 12), None, "the layer is on the meta device"),
    ],
)
def test_from_dense_refuses_what_does_not_fit(layer, weight, bias, message):
    layer = StructuredLinear(12, 20, BTT(), **layer)
    before = copy.deepcopy(layer)
    with pytest.raises(ValueError, match=message):
        layer.from_dense_(weight, bias)
    if not layer.cores[0].is_meta:
        assert all(
            torch.equal(a, b) for a, b in zip(layer.parameters(), before.parameters(), strict=True)
        )


def test_a_layer_with_an_activation_between_its_cores_is_no_matrix():
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), BTT(), exclude="1")
    model = convert(model, BTT().activate(), include="1")
    layer, before = model[1], snapshot(model)
    for refused in (
        lambda: densify(model),
        lambda: densify(nn.Sequential(layer)),
        layer.to_dense,
        lambda: layer.weight + 1,
        lambda: layer.from_dense_(torch.zeros(16, 16)),
        lambda: to_dense(layer.structure, list(layer.cores)),
    ):
        with pytest.raises(ValueError, match="needs a matrix, and a structure with between='silu'"):
            refused()
    assert snapshot(model) == before
    assert not product.forms_matrix(TT(rank=16).activate().structure(1024, 1024), 4096)
    x = torch.randn(3, 16)
    plain = nn.functional.linear(x, layer.weight)
    torch.testing.assert_close(plain, layer(x) - layer.bias)
