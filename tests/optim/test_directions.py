"""A block optimizer of one's own, by what CONTRIBUTING says in "Add an optimizer": KL-Shampoo."""

import copy
import math

import pytest
import torch
from torch import nn

from structlin import BTT, convert
from structlin.optim._block import BlockOptimizer
from structlin.optim._stacks import Direction
from tests.models import GPT, perplexed

# ---- the direction -------------------------------------------------------------------------------


def inverse_power(factor, exponent):
    values, vectors = torch.linalg.eigh(factor)  # (blocks, k), (blocks, k, k)
    values = values.clamp_min(1e-10 * values[..., -1:] + 1e-30)
    return (vectors * values.pow(-exponent)[..., None, :]) @ vectors.mT


class KLShampooDirection(Direction):
    """L^(-1/2) U R^(-1/2), where L (x) R is the nearest in Kullback-Leibler divergence to the
    covariance of gradients. Source: Lin et al. 2025 (arXiv:2509.03378)."""

    name = "KL-Shampoo"
    state_names = ("left", "right")

    @classmethod
    def serves(cls, weight, options):
        return max(weight.fan_out, weight.fan_in) <= 256

    def start(self):
        g = self.blocks.gradient()
        m, n = g.shape[-2:]
        return {"left": g @ g.mT / n, "right": g.mT @ g / m}

    def find(self):
        left = inverse_power(self.state["left"], 0.5)
        right = inverse_power(self.state["right"], 0.5)
        d = left @ self.blocks.update() @ right
        m, n = d.shape[-2:]
        return d * math.sqrt(min(m, n)) / torch.linalg.matrix_norm(d, keepdim=True).clamp_min(1e-30)

    def keep(self):
        g = self.blocks.gradient()
        m, n = g.shape[-2:]
        left = g @ inverse_power(self.state["right"], 1.0) @ g.mT / n
        right = g.mT @ inverse_power(self.state["left"], 1.0) @ g / m
        weight = 1 - self.options["factor_beta"]
        self.state["left"].lerp_(left, weight)
        self.state["right"].lerp_(right, weight)


class KLShampoo(BlockOptimizer):
    direction = KLShampooDirection
    fractions = ("momentum", "factor_beta")

    def __init__(self, params, lr=0.02, *, factor_beta: float = 0.9, **shared):
        super().__init__(params, lr, options={"factor_beta": factor_beta}, **shared)


# ---- what is asked of it -------------------------------------------------------------------------


def plainly(gradients, lr, momentum, beta):
    """The sum of the steps of one matrix by itself, in float64, by roots of symmetric matrices."""

    def power(factor, exponent):
        vectors, values, _ = torch.linalg.svd(factor)
        floor = 1e-10 * values.max() + 1e-30
        return vectors @ torch.diag(values.clamp(min=float(floor)) ** -exponent) @ vectors.T

    m, n = gradients[0].shape
    average = torch.zeros(m, n, dtype=torch.float64)
    total = torch.zeros(m, n, dtype=torch.float64)
    left = gradients[0] @ gradients[0].T / n
    right = gradients[0].T @ gradients[0] / m
    for g in gradients:
        average = momentum * average + (1 - momentum) * g
        update = (1 - momentum) * g + momentum * average
        direction = power(left, 0.5) @ update @ power(right, 0.5)
        direction *= math.sqrt(min(m, n)) / direction.square().sum().sqrt()
        total -= lr * math.sqrt(m / n) * direction
        new_left = g @ power(right, 1.0) @ g.T / n
        new_right = g.T @ power(left, 1.0) @ g / m
        left = beta * left + (1 - beta) * new_left
        right = beta * right + (1 - beta) * new_right
    return total


@pytest.mark.parametrize("structure", [None, BTT(rank=2)], ids=["dense", "BTT"])
def test_each_block_makes_the_steps_of_a_plain_loop_over_matrices(structure):
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)).double()
    if structure is not None:
        convert(model, structure)
    before = copy.deepcopy(model.state_dict())
    optimizer = KLShampoo(model, 0.1, momentum=0.8, factor_beta=0.7)
    parameters = dict(model.named_parameters())
    gradients = {name: [] for name in parameters}
    for _ in range(6):
        for name, p in parameters.items():
            p.grad = torch.randn_like(p)
            gradients[name].append(p.grad.reshape(-1, *p.shape[-2:]).clone())
        optimizer.step()
    cores = 1 if structure is None else 2  # which share a layer's mass
    for name, p in parameters.items():
        blocks = zip(*gradients[name], strict=True)  # of all steps
        wanted = torch.stack([plainly(block, 0.1 / cores, 0.8, 0.7) for block in blocks])
        moved = p.detach() - before[name]
        torch.testing.assert_close(moved, wanted.reshape(p.shape), rtol=1e-5, atol=1e-8)


def test_it_trains_and_goes_on_bit_for_bit_from_its_state():
    model = convert(GPT(depth=1), BTT(), include="ffn")
    optimizer = KLShampoo(model, 0.02)
    losses = perplexed(model, 12, optimizer)
    assert losses[-1] < losses[0]
    twin = copy.deepcopy(model)
    resumed = KLShampoo(twin, 0.02)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    perplexed(model, 3, optimizer)
    perplexed(twin, 3, resumed)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    assert "KL-Shampoo" in str(optimizer)


def test_its_own_option_is_checked_in_every_group():
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"factor_beta=1\.5 must be at least 0 and below 1"):
        KLShampoo(model, factor_beta=1.5)
    with pytest.raises(ValueError, match=r"factor_betta=0\.5 is no option that a group of KL"):
        KLShampoo([{"params": model.parameters(), "factor_betta": 0.5}], model=model)


def test_a_state_that_is_not_finite_is_named_before_anything_moves():
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    optimizer = KLShampoo(model)
    model[0].weight.grad = torch.randn(8, 8)
    optimizer.step()
    before = model[0].weight.detach().clone()
    optimizer.state[model[0].weight]["left"].zero_()
    model[0].weight.grad = torch.full((8, 8), 1e30)
    with pytest.raises(FloatingPointError, match=r"direction of 0\.weight has norm nan by KL-Sh"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)
