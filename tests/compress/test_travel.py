"""Errors of a block, measured where the prediction of second order does not hold."""

import copy
import math
from itertools import product

import pytest
import torch
from torch import nn

from structlin import LowRank, compress
from structlin._compress import allocation, sensitivity, travel


class Chain(nn.Module):
    """Blocks of one linear layer each, of falling singular values."""

    def __init__(self, scales, between, turned=True):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16, bias=False), between()) for _ in scales
        )
        for block, scale in zip(self.blocks, scales, strict=True):
            turn = torch.linalg.qr(torch.randn(16, 16)).Q if turned else torch.eye(16)
            block[0].weight.data = turn * (scale * torch.arange(1, 17) ** -0.7)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def change(dense, model, x):
    with torch.no_grad():
        y = dense(x)
        return ((model(x) - y).square().sum() / y.square().sum()).item()


@pytest.fixture
def ratios(monkeypatch):
    found = []
    measure = travel._measure_ratios

    def spy(*args):
        found.append(measure(*args))
        return found[-1]

    monkeypatch.setattr(travel, "_measure_ratios", spy)
    return found


def test_of_linear_blocks_the_prediction_holds_and_measuring_ends(ratios, monkeypatch):
    monkeypatch.setattr(sensitivity, "PRIOR_TOKENS", 0)
    torch.manual_seed(0)
    model, x = Chain([1.0] * 5, nn.Identity, turned=False), torch.randn(4000, 16)
    compress(model, LowRank(rank=1), x.split(500), keep=0.5, include="*")
    assert len(ratios) == 2
    assert all(abs(ratio - 1) < travel.NEAR for own in ratios for ratio in own)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_where_tanh_bounds_what_errors_do_the_choice_is_nearer_the_best(seed, ratios, monkeypatch):
    torch.manual_seed(seed)
    dense, x = Chain([30.0, 1.0], nn.Tanh), torch.randn(4000, 16)
    batches = x.split(500)
    found = []
    for ranks in product(range(1, 9), repeat=2):
        if sum(ranks) == 8:
            chosen = {f"blocks.{n}.0": LowRank(rank=rank) for n, rank in enumerate(ranks)}
            model = copy.deepcopy(dense)
            compress(model, LowRank(rank=1), batches, overrides=chosen, keep=None, include="*")
            found.append(change(dense, model, x))
    options = {"keep": 0.5, "include": "*"}
    own = change(dense, compress(copy.deepcopy(dense), LowRank(rank=1), batches, **options), x)
    monkeypatch.setattr(allocation, "correct_curves", lambda model, layers, curves, *_: curves)
    plain = change(dense, compress(copy.deepcopy(dense), LowRank(rank=1), batches, **options), x)
    assert max(ratios[0]) < 0.5
    assert own <= 1.2 * min(found)
    assert own < plain


def test_where_outputs_with_errors_are_not_finite_the_prediction_stands(ratios, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(travel, "_measure_harms", lambda *_: [math.nan, math.inf])
    model, x = Chain([1.0] * 3, nn.Identity), torch.randn(400, 16)
    compress(model, LowRank(rank=1), [x], keep=0.5, include="*")
    assert ratios == [[1.0, 1.0]] * 2
