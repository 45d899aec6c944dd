"""The mixtures' benchmark compares at equal FLOPs, and trains on the balance too."""

import pytest
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

pytest.importorskip("matplotlib")

from benchmarks.harness import training
from benchmarks.training import moe
from structlin import StructuredLinear
from structlin.moe import Mixture, load_balancing_loss

SMALL = {"width": 32, "depth": 1, "context": 16, "batch": 2, "heads": 1}


@pytest.fixture
def task():
    return moe.make_task(0, SMALL)


def test_each_kind_has_the_largest_width_of_no_more_flops_than_dense(task):
    budget = moe.count_flops(task, "dense", 32)
    for name in ("BTT r=1", "BTT-MoE, 2 of 8"):
        width = moe.find_width(name, *SMALL.items())
        assert moe.count_flops(task, name, width) <= budget
        assert all(
            moe.count_flops(task, name, wider) > budget for wider in range(width + 32, 257, 32)
        )


def test_all_linear_layers_but_the_head_are_mixtures(task):
    model = moe.build(task, "BTT-MoE, 2 of 8", 32)
    assert sum(isinstance(module, Mixture) for module in model.modules()) == 4
    assert type(model.lm_head) is nn.Linear
    assert not any(type(module) is StructuredLinear for module in model.modules())
    ends = [model.blocks[0].attn.c_proj, model.blocks[0].mlp.c_proj]
    assert all(end.cores[-1].abs().max() == 0 for end in ends)


def test_a_kind_is_compared_by_its_runs_at_its_best_rate(task):
    losses = {("dense", 0.1, 0): 3.0, ("dense", 0.2, 0): 2.0, ("dense", 0.2, 1): 4.0}
    rows = [
        {"kind": kind, "lr": lr, "seed": seed, "loss": loss, "largest_share": None}
        for (kind, lr, seed), loss in losses.items()
    ]
    (found,) = moe.compare_kinds(rows, SMALL, {1: {"dense": {"median": 1.0}}})
    assert (found["lr"], found["losses"]) == (0.2, [2.0, 4.0])
    assert dict(found["tried"]) == pytest.approx({0.1: 3.0, 0.2: 2.0})


def test_the_loss_has_the_balance_of_mixtures_and_of_nothing_else(task):
    inputs, targets = task.batch(0)
    for name, kind in moe.KINDS.items():
        model = moe.build(task, name, 32).train()
        loss = moe.loss_of(model, inputs, targets)
        plain = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        assert_close(loss, plain + 0.01 * load_balancing_loss(model) if kind.experts else plain)


def test_the_largest_share_is_that_of_the_assignments(task):
    model = moe.build(task, "BTT-MoE, 2 of 8", 32)
    assert 1 / 8 <= moe.measure_share(model, task) <= 1 / 2
    assert moe.measure_share(moe.build(task, "dense", 32), task) is None


@pytest.mark.parametrize("kind", ["dense", "BTT r=1", "BTT-MoE, 2 of 8"])
def test_the_head_starts_as_the_recipe_says(kind, task):
    head = moe.build(task, kind, 32).lm_head
    assert 0.018 < head.weight.std().item() < 0.022


def test_the_rate_rises_for_a_hundred_steps_and_for_a_fifth_of_few():
    assert [training.warm_up(step, 2000) for step in (49, 99)] == [0.5, 1.0]
    assert [training.warm_up(step, 100) for step in (9, 19)] == [0.5, 1.0]
