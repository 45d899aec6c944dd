"""The candidates that change what happens between the factors of a layer."""

import pytest
import torch
from torch import nn

from benchmarks.training import factors
from structlin import BTT, LowRank, convert, param_groups


def make(structure):
    torch.manual_seed(0)
    blocks = [nn.ModuleDict({"fc": nn.Linear(24, 24, bias=False)}) for _ in range(2)]
    return convert(nn.ModuleList(blocks), structure, weight_norm=True)


@pytest.mark.parametrize("structure", [BTT(rank=2), LowRank(rank=4), LowRank(rank=4).activate()])
def test_two_halves_are_the_layer_and_the_second_block_adds_the_first_ones_latent(structure):
    model = make(structure)
    x, z = torch.randn(2, 5, 24)
    alone = [block["fc"](h) for block, h in zip(model, (x, z), strict=True)]
    first, second = [block["fc"] for block in factors.cross(model)]
    torch.testing.assert_close(first(x), alone[0])
    assert not torch.allclose(second(z), alone[1])
    second.before = ()
    torch.testing.assert_close(second(z), alone[1])


def test_latents_of_linear_layers_add():
    model = make(LowRank(rank=4))
    first, second = [block["fc"] for block in factors.cross(model)]
    x, z = torch.randn(2, 5, 24)
    first(x)
    a, b = second.effective_cores()
    wanted = (z @ a[0].T + x @ first.effective_cores()[0][0].T) @ b[0].T / 2**0.5
    torch.testing.assert_close(second(z), wanted)


def test_a_layer_that_pads_is_not_crossed():
    model = convert(nn.Sequential(nn.Linear(254, 254)), BTT(rank=1))
    with pytest.raises(ValueError, match=r"layer '0' pads its features"):
        factors.cross(model)


def test_refactorised_cores_have_the_same_matrix_and_no_moments():
    model = make(BTT(rank=2))
    adam = torch.optim.AdamW(param_groups(model, 1e-3), 1e-3)
    factors.refactorise(model, adam, every=2)
    layer = model[0]["fc"]
    for step in range(2):
        layer(torch.randn(5, 24)).square().sum().backward()
        with torch.no_grad():
            for core in layer.cores:
                core.grad.mul_(10)
        before = [core.clone() for core in layer.cores]
        adam.step()
        assert all((each in adam.state) == (step == 0) for each in (*layer.cores, layer.gains))
    assert not torch.allclose(before[0], layer.cores[0], atol=1e-2)


def test_a_refactorised_layer_computes_what_it_did():
    model = make(BTT(rank=2))
    layer, x = model[0]["fc"], torch.randn(5, 24)
    wanted = layer(x)
    adam = torch.optim.SGD(model.parameters(), 0.0)
    factors.refactorise(model, adam, every=1)
    layer(x).sum().backward()
    adam.step()
    torch.testing.assert_close(layer(x), wanted, atol=1e-5, rtol=1e-4)
