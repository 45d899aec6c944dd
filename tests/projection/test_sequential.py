"""convert with calibration: layer by layer, each against the dense model."""

import copy
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
    plan,
    project,
)
from structlin._projection.sequential import choose_ridge


def linears(*widths: int, bias: bool = True, between: type[nn.Module] = nn.Identity) -> nn.Module:
    """Linear layers with random biases, and something between them."""
    layers: list[nn.Module] = []
    for first, second in pairwise(widths):
        layer = nn.Linear(first, second, bias=bias)
        if bias:
            nn.init.normal_(layer.bias)
        layers += [layer, between()]
    return nn.Sequential(*layers).double()


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
            ridge = choose_ridge(len(b), len(c)) * c.diagonal().mean()
            eye = (len(b) * ridge).sqrt() * torch.eye(len(c)).double()
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
    planned = plan(copy.deepcopy(model), family, calibration=x.chunk(batches))
    found = planned.apply()
    for n in (0, 2, 4):
        torch.testing.assert_close(found[n].to_dense(), expected[n].weight, rtol=1e-5, atol=1e-7)
        if bias:
            torch.testing.assert_close(found[n].bias, expected[n].bias, rtol=1e-5, atol=1e-7)
    y, new = (each[:4](x).detach() for each in (model, found))  # before the last Tanh
    y, new = model[4](y).detach(), found[4](new).detach()
    error = (y - new).norm() / (y - y.mean(0) if bias else y).norm()
    assert planned.errors["4"] == pytest.approx(error.item(), rel=1e-5)
