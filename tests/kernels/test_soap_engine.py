"""The compiled step of SOAP: its numbers against the same written down in float64, block by block,
and when it is taken."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from structlin import BTT, convert
from structlin._engine.cpu import library, soap
from structlin.optim import SOAP

pytestmark = pytest.mark.skipif(not library.load(), reason="there is no engine here")
SHAPES = [(1, 1), (1, 40), (33, 1), (5, 7), (16, 64), (64, 16), (31, 50), (128, 17), (20, 256)]
WEIGHT, BETA = 0.19, 0.95


def orthogonal(blocks, size):
    return torch.linalg.qr(torch.randn(blocks, size, size).double()).Q.float().contiguous()


def stack(m, n, blocks=4):
    """G, B, V, Q_L and Q_R."""
    normal = [torch.randn(blocks, m, n) for _ in range(3)]
    return [*normal[:2], normal[2].square(), orthogonal(blocks, m), orthogonal(blocks, n)]


def find(tensors, length=0.3, longest=1e9):
    return soap.Found(*soap.find(*tensors, WEIGHT, BETA, length, longest))


def find_plainly(g, b, v, left, right, length=0.3, longest=1e9):
    """The directions and the next V, in float64."""
    g, b, v = (x.double() for x in (g, b, v))
    blocks, m, n = g.shape
    left = torch.eye(m).expand(blocks, m, m).double() if left is None else left.double()
    right = torch.eye(n).expand(blocks, n, n).double() if right is None else right.double()
    u = (1 - WEIGHT) * b + WEIGHT * g
    v = BETA * v + (1 - BETA) * (left.mT @ g @ right) ** 2
    rotated = left.mT @ u @ right
    directions = []
    for block in range(blocks):
        root = length * v[block].sqrt()
        least = max(1e-4 * root.max(), 2.0**-40 * rotated[block].abs().max(), 2.0**-126)
        d = left[block] @ (rotated[block] / root.clamp(min=least)) @ right[block].T
        directions.append(d * min(1, longest / d.norm().clamp(min=1e-300)))
    return torch.stack(directions), v


@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize("shape", SHAPES)
def test_directions_and_squares_are_those_of_the_formula_in_float64(shape, sides):
    tensors = stack(*shape)
    if sides == "left":
        tensors[4] = None
    if sides == "right":
        tensors[3] = None
    for longest in (1e9, 2.0):
        found = find(tensors, longest=longest)
        directions, squares = find_plainly(*tensors, longest=longest)
        assert found.fits
        assert_close(found.squares.double(), squares, rtol=2e-4, atol=1e-6)
        norms = directions.norm(dim=(-2, -1), keepdim=True)
        assert_close(
            found.directions / norms, directions / norms, rtol=0, atol=3e-3, check_dtype=False
        )
        if longest == 2.0:
            assert (found.directions.norm(dim=(-2, -1)) <= 2.0 * (1 + 1e-5)).all()


@pytest.mark.parametrize("value", [0.0, 2.0**-70, 2.0**60, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["gradient", "average", "squares"])
def test_what_float32_cannot_square_does_not_fit(place, value):
    number = ["gradient", "average", "squares"].index(place)
    tensors = stack(12, 20)
    tensors[number][2] = value * value if place == "squares" else value
    small = abs(value) < 1
    found = find(tensors)
    if not math.isfinite(value):  # which the directions show too
        assert found.directions[2].isnan().all()
    if not (place == "squares" and not math.isfinite(value)):
        assert found.fits == (small and place != "gradient")


@pytest.mark.parametrize("beta", [0.0, 0.95])
@pytest.mark.parametrize("shape", SHAPES)
def test_factors_are_averages_and_bases_a_step_of_orthogonal_iteration(shape, beta):
    m, n = shape
    g, new_squares, squares, left_basis, right_basis = stack(m, n)
    new_squares.abs_()
    left = torch.randn(4, m, 3 * m)
    left = left @ left.mT
    right = torch.randn(4, n, 3 * n)
    right = right @ right.mT
    before = [x.clone().double() for x in (left, left_basis, right, right_basis)]
    soap.keep(g, new_squares, squares, left, left_basis, right, right_basis, beta, False)
    assert torch.equal(squares, new_squares)
    wide = g.double()
    wanted_left = beta * before[0] + (1 - beta) / n * wide @ wide.mT
    wanted_right = beta * before[2] + (1 - beta) / m * wide.mT @ wide
    assert_close(left.double(), wanted_left, rtol=2e-6, atol=1e-5)
    assert_close(right.double(), wanted_right, rtol=2e-6, atol=1e-5)
    assert torch.equal(left_basis.double(), before[1])

    once = left.clone(), right.clone()
    soap.keep(g, new_squares, squares, left, left_basis, right, right_basis, beta, True)
    assert not beta or not torch.equal(left, once[0]) or m * n == 1
    orders = []
    for factor, old, new in ((left, before[1], left_basis), (right, before[3], right_basis)):
        factor, new = factor.double(), new.double()
        size = factor.shape[-1]
        identity = torch.eye(size).double().expand(4, size, size)
        assert_close(new.mT @ new, identity, rtol=0, atol=4e-6)
        product = factor @ old
        order = (old * product).sum(-2).argsort(-1, descending=True)
        orders.append(order)
        if beta:  # of full rank
            columns = torch.take_along_dim(product, order[:, None], -1)
            triangle = new.mT @ columns
            scale = columns.norm(dim=(-2, -1), keepdim=True)
            assert (triangle.tril(-1) / scale).abs().max() < 2e-6
    if beta:
        wanted = new_squares[torch.arange(4)[:, None], orders[0]]
        wanted = torch.take_along_dim(wanted, orders[1][:, None], -1)
        assert torch.equal(squares, wanted)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("size", [1, 16, 23, 64])
def test_bases_of_factors_of_any_size_and_rank_are_orthonormal(size, rank, scale):
    thin = torch.randn(3, size, rank)
    factor = scale * (thin @ thin.mT)
    basis = orthogonal(3, size)
    g, squares = torch.zeros(3, size, 8), torch.zeros(3, size, 8)
    for _ in range(3):
        soap.keep(g, squares, squares.clone(), factor, basis, None, None, 1.0, True)
        identity = torch.eye(size).double().expand(3, size, size)
        assert_close(basis.double().mT @ basis.double(), identity, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_has_the_same_bits_on_any_number_of_threads_and_in_any_company(shape, set_threads):
    m, n = shape

    tensors = stack(m, n, blocks=37)
    g = tensors[0]
    factors = [g @ g.mT, g.mT @ g]

    def step(count):
        g, b, v, left_basis, right_basis = (x[:count].clone() for x in tensors)
        left, right = (factor[:count].clone() for factor in factors)
        found = find([g, b, v, left_basis, right_basis])
        soap.keep(g, found.squares, v, left, left_basis, right, right_basis, BETA, True)
        return [found.directions, v, left, right, left_basis, right_basis]

    expected = step(37)
    alone = step(1)
    set_threads(3)
    for wanted, lonely, other in zip(expected, alone, step(37), strict=True):
        assert torch.equal(wanted, other)
        assert torch.equal(wanted[:1], lonely)


def train(model, steps=7):
    optimizer = SOAP(model, 0.05, precondition_frequency=2)
    torch.manual_seed(1)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("scale", [1.0, 1e-25])
def test_the_engine_and_torch_make_the_same_steps(monkeypatch, scale):
    twins = []
    for served in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleDict({"attn": convert(nn.Sequential(nn.Linear(64, 48)), BTT(rank=2))})
        if not served:
            monkeypatch.setattr(soap, "takes", lambda tensors: False)
        train(model)
        twins.append(model)
    for own, other in zip(*(twin.parameters() for twin in twins), strict=True):
        assert_close(own, other, rtol=1e-3, atol=1e-4)


def test_small_float32_blocks_on_a_cpu_take_it_and_others_do_not():
    x = torch.randn(2, 8, 8)
    assert soap.takes([x, x])
    assert not soap.takes([x.double(), x.double()])
    assert not soap.takes([x, x.bfloat16()])
    assert not soap.takes([x.to("meta"), x])
    assert not soap.takes([torch.randn(1, 8, soap.LARGEST_SIDE + 1)])
    assert not soap.takes([torch.randn(0, 8, 8)])
    assert not soap.takes([x, x.mT])


def test_flops_are_those_of_the_rotations():
    tensors = stack(8, 12, blocks=3)
    with FlopCounterMode(display=False) as counter:
        find(tensors)
    assert counter.get_total_flops() == 3 * 3 * 2 * 8 * 12 * (8 + 12)


@pytest.mark.parametrize("number", range(5))
def test_the_operators_refuse_what_does_not_fit(number):
    tensors = stack(8, 12)
    tensors[number] = tensors[number][:, :-1].contiguous()
    with pytest.raises(RuntimeError, match="structlin: SOAP takes"):
        find(tensors)
