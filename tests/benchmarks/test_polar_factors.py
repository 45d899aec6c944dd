"""The papers' polar factors: what each keeps, and the published coefficients."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from benchmarks.papers.polar_factors import (
    COEFFICIENTS,
    METHODS,
    PAPERS,
    dual_efficiency,
    find_polar,
    inverse_root,
    sketch,
)
from structlin import dualize


def factors(matrix):
    u, _, vh = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    return torch.from_numpy(u), torch.from_numpy(vh)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "sketch"])
@pytest.mark.parametrize("shape", [(3, 6, 6), (2, 4, 9), (2, 9, 4)])
def test_every_method_keeps_the_directions_of_the_matrix(method, shape):
    x = torch.randn(shape, dtype=torch.float64)
    u, vh = factors(x)
    found = find_polar(x, method)
    seen = u.mT @ found @ vh.mT
    values = seen.diagonal(dim1=-2, dim2=-1)
    assert (seen - torch.diag_embed(values)).abs().max() < 1e-8
    assert values.max() < 1.2
    assert values.min() > 0.6


@pytest.mark.parametrize("shape", [(2, 8, 20), (2, 20, 8), (2, 7, 7), (2, 1, 5)])
def test_the_sketch_is_the_factor_of_half_of_the_directions_and_exact_up_to_that_rank(shape):
    matrix, half = torch.randn(shape, dtype=torch.float64), (min(shape[1:]) + 1) // 2
    values = torch.linalg.svdvals(sketch(matrix))
    expected = (torch.arange(min(shape[1:])) < half).double().expand_as(values)
    assert_close(values, expected, rtol=0, atol=1e-9)
    u, vh = factors(matrix)
    deficient = u[..., :half] @ vh[..., :half, :]
    assert_close(sketch(3 * deficient), deficient, rtol=0, atol=1e-9)


def test_the_inverse_root_maps_to_zero_what_is_below_the_numerical_rank():
    values = torch.logspace(0, -12, 25, dtype=torch.float64)
    u, v = (torch.linalg.qr(torch.randn(40, 25, dtype=torch.float64)).Q for _ in range(2))
    matrix = 20 * ((u * values) @ v.T).float()
    seen = torch.linalg.svdvals(inverse_root(matrix).double())
    rank = torch.linalg.matrix_rank(matrix)
    assert_close(seen, (torch.arange(40) < rank).double(), rtol=0, atol=1e-3)
    assert torch.equal(inverse_root(torch.zeros(3, 2)), torch.zeros(3, 2))


def test_the_polar_express_is_the_published_one():
    published = (  # Amsel et al. 2025, its listing 1, whose first steps allow for rounding
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    )
    angles = torch.linspace(0, np.pi / 4, 99, dtype=torch.float64)
    values = torch.stack([angles.sin(), angles.cos()], -1)  # of matrices 2 x 2 of Frobenius norm 1
    (a, b, c), x = published[0], values / 1.02
    first = dualize(torch.diag_embed(values), method=PAPERS["polar-express"], ns_steps=1)
    assert_close(first, torch.diag_embed(a * x + b * x**3 + c * x**5), rtol=0, atol=2e-4)
    assert_close(COEFFICIENTS["polar-express"][1:], published[1:], rtol=0, atol=5e-5)


def test_the_efficiency_of_an_update_is_its_share_of_the_steepest_descent():
    gradient = torch.diag_embed(torch.tensor([[3.0, 1.0], [1.0, 1.0]]))
    assert_close(dual_efficiency(gradient, gradient), torch.tensor([10 / (4 * 3), 1.0]))
    opposite = -7 * torch.eye(2).expand(2, 2, 2)
    assert_close(dual_efficiency(gradient, opposite), torch.tensor([-1.0, -1.0]))
    assert dual_efficiency(torch.zeros(2, 2), torch.eye(2)).isnan()
