"""A branch that fades: what it computes, when it is gone, and what its steps cost."""

import doctest

import pytest
import torch
from torch import nn
from torch.testing import assert_close

pytest.importorskip("matplotlib")

from benchmarks.training import self_guided
from structlin import BTT, StructuredLinear, convert


def make_layer(at_random=False):
    torch.manual_seed(0)
    layer = StructuredLinear(16, 16, BTT(rank=2), bias=True)
    return self_guided.SelfGuided(layer, at_random)


def test_it_starts_as_the_structured_layer_and_ends_as_it():
    layer, x = make_layer(), torch.randn(5, 16)
    with torch.no_grad():
        layer.layer.bias.zero_()
    plain = layer.layer(x)
    assert_close(layer(x), plain)
    with torch.no_grad():
        layer.guide.weight.add_(1)
    layer.alpha = 0.25
    assert_close(layer(x), 0.25 * x @ layer.guide.weight.T + 0.75 * plain)
    assert_close(layer.eval()(x), plain, rtol=0, atol=0)
    layer.train().alpha = 0.0
    assert_close(layer(x), plain, rtol=0, atol=0)


def test_at_random_it_is_computed_as_often_as_alpha_says():
    layer, x = make_layer(at_random=True), torch.randn(1, 16)
    with torch.no_grad():
        layer.guide.weight.add_(1)
    layer.alpha = 0.3
    self_guided.random.seed(0)
    calls = sum(not layer(x).equal(layer.layer(x)) for _ in range(2000))
    assert 0.25 < calls / 2000 < 0.35


def test_every_structured_layer_gets_a_branch():
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), BTT())
    layers = self_guided.guide(model, False)
    assert layers == [model[0], model[2]]


def test_the_plain_layers_train_for_as_many_flops_as_the_branch_at_random_costs():
    name, steps = "BTT r=1", 10_000
    longer = self_guided.count_steps(name, steps, self_guided.SIZES)
    task = self_guided.make_task(0, self_guided.SIZES)
    own, dense = (
        self_guided.compare.forward_flops(task, 128, family)
        for family in (self_guided.STRUCTURES[name], None)
    )
    alphas = [self_guided.alpha_at(step, steps) for step in range(steps)]
    layers = 2 * (128 * 384 + 128 * 128 + 2 * 128 * 512) * 2  # two blocks
    assert own < dense
    assert own * longer == pytest.approx(own * steps + sum(alphas) * layers, rel=1e-3)


def test_the_examples_of_docstrings_give_what_they_show():
    assert doctest.testmod(self_guided).attempted
    assert not doctest.testmod(self_guided).failed
