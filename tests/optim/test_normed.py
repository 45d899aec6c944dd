"""`Normed`: what a step measures in the norm of each parameter, with singular values as the
oracle."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import structlin
from structlin import BTT, StructuredLinear, convert
from structlin.duality import spectral_bound
from structlin.optim import Muon, Normed
from tests.models import GPT
from tests.optim.test_muon import moved, norms

BASES = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.0),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.0, fused=True),
}


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("module", "norm"),
    [
        (nn.Linear(6, 10, bias=False), lambda w: norms(w)),
        (nn.Conv2d(4, 8, 3, bias=False), lambda w: 9 * norms(w.flatten(2).movedim(-1, 0)).max()),
        (nn.Embedding(10, 16), lambda w: w.square().mean(-1).sqrt().max().item()),
        (nn.LayerNorm(8, bias=False), lambda w: w.square().mean().sqrt().item()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_step_of_any_base_has_norm_lr(base, module, norm):
    module = copy.deepcopy(module)
    optimizer = Normed(BASES[base](module.parameters()), module)
    for _ in range(3):
        assert norm(moved(module, optimizer)["weight"]) == pytest.approx(0.1, rel=0.05)


def test_the_largest_block_of_a_core_moves_by_its_share_and_the_others_keep_their_proportion():
    layer = StructuredLinear(64, 128, BTT(rank=2), bias=False)
    steps = moved(
        layer, Normed(torch.optim.SGD(layer.parameters(), lr=0.1), layer, masses={"": (0.25, 0.75)})
    )
    for name, share in (("cores.0", 0.25), ("cores.1", 0.75)):
        assert 0.95 * 0.1 * share <= norms(steps[name]).max() <= 0.1 * share * (1 + 1e-5)
        gradient = dict(layer.named_parameters())[name].grad
        factor = (steps[name] * gradient).sum() / gradient.square().sum()
        torch.testing.assert_close(steps[name], factor * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_weight_decay_is_decoupled_and_outside_of_the_normalisation(base):
    module = nn.Linear(6, 6, bias=False)
    before = module.weight.detach().clone()
    optimizer = Normed(base(module.parameters(), lr=0.1, weight_decay=0.5), module)
    module.weight.grad = torch.zeros_like(module.weight)
    optimizer.step()
    torch.testing.assert_close(module.weight.detach(), 0.95 * before)
    before = module.weight.detach().clone()
    module.weight.grad = torch.randn_like(module.weight)
    optimizer.step()
    assert norms(0.95 * before - module.weight.detach()) == pytest.approx(0.1, rel=0.05)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.base.param_groups] == [(0.1, 0.5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_bound_is_never_below_the_spectral_norm_and_never_far_above(dtype, scale):
    gaussian = torch.randn(20, 24, 40, dtype=torch.float64)
    flat = torch.linalg.qr(torch.randn(20, 40, 24, dtype=torch.float64)).Q.mT
    low_rank = torch.randn(20, 24, 2, dtype=torch.float64) @ torch.randn(
        20, 2, 40, dtype=torch.float64
    )
    for matrices, most in (
        (gaussian, 1.05),
        (flat, 24 ** (1 / 32)),
        (low_rank, 2 ** (1 / 32)),
        (gaussian.mT, 1.05),
    ):
        cast = (scale * matrices).to(dtype)
        ratio = (
            spectral_bound(cast).double().numpy()
            / np.linalg.svd(cast.double().numpy(), compute_uv=False)[:, 0]
        )
        assert ratio.min() >= 1 - 1e-6
        assert ratio.max() <= most * (1 + (0.01 if dtype == torch.bfloat16 else 1e-6))
    assert torch.equal(spectral_bound(torch.zeros(3, 4, 5)), torch.zeros(3))
    assert spectral_bound(torch.empty(0, 4, 5)).shape == (0,)
    assert spectral_bound(torch.eye(4, 5)) >= 1  # one matrix, without a batch


def test_the_groups_of_the_base_keep_their_rates():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    base = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}], lr=0.2)
    optimizer = Normed(base, model)
    optimizer.add_param_group({"params": model[1].parameters()})
    before = [layer.weight.detach().clone() for layer in model]
    model(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
    for layer, old, rate in zip(model, before, (0.1, 0.2), strict=True):
        step = (1 - rate * 0.01) * old - layer.weight.detach()
        assert norms(step) == pytest.approx(rate, rel=0.05)


def test_a_base_that_fails_leaves_the_parameters_and_the_rates_as_they_were():
    model = nn.Linear(4, 4)
    optimizer = Normed(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = model.weight.detach().clone()

    def fail(*_):
        raise RuntimeError("the base failed")

    optimizer.base.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the base failed"):
        moved(model, optimizer)
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_rates_of_the_structure_are_refused_since_the_norm_replaces_them():
    model = convert(nn.Sequential(nn.Linear(64, 64)), BTT())
    groups = structlin.param_groups(model, 0.1, weight_decay=0.5)
    with pytest.raises(
        ValueError, match="lr_mult=4 for the updates of Adam or SGD; the norm replaces it"
    ):
        Normed(torch.optim.AdamW(groups), model)
    optimizer = Normed(torch.optim.AdamW([model[0].bias], lr=0.1), model)
    with pytest.raises(ValueError, match="lr_mult=4"):
        optimizer.add_param_group(groups[0])
    assert len(optimizer.param_groups) == 1
    Normed(torch.optim.AdamW(structlin.param_groups(model, 0.1, structure_aware=False)), model)


def test_hooks_of_the_state_dict_are_called_with_this_optimizer():
    model, called = nn.Linear(3, 3), []
    optimizer = Normed(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    other = Normed(torch.optim.AdamW(model.parameters(), lr=0.7), model).state_dict()
    optimizer.register_state_dict_pre_hook(lambda own: called.append(own))
    optimizer.register_state_dict_post_hook(lambda own, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda own, state: other)
    optimizer.register_load_state_dict_pre_hook(lambda own, state: None)  # leaves it as it is
    optimizer.register_load_state_dict_post_hook(lambda own: called.append(own))
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    assert called == [optimizer, optimizer]
    assert optimizer.param_groups[0]["lr"] == 0.7


def test_the_direction_is_the_bases_own():
    model = GPT(depth=1)
    twin = copy.deepcopy(model)
    ours = Normed(torch.optim.Adam(model.parameters(), lr=1.0), model)
    theirs = torch.optim.Adam(twin.parameters(), lr=1e-3)
    for _ in range(3):
        steps = []
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for module, optimizer in ((model, ours), (twin, theirs)):
            before = [p.detach().clone() for p in module.parameters()]
            optimizer.step()
            pairs = zip(module.parameters(), before, strict=True)
            steps.append([(p.detach() - old).flatten().double() for p, old in pairs])
        for step, other in zip(*steps, strict=True):
            assert torch.cosine_similarity(step, other, dim=0) > 0.9999


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda m: Normed(torch.optim.LBFGS(m.parameters()), m),
            TypeError,
            "optimizer=LBFGS must make one step",
        ),
        (lambda m: Normed(m, m), TypeError, "optimizer=Linear is a module: "),
        (lambda m: Normed(m, lr=0.1), TypeError, "optimizer=Linear is a module: "),
        (lambda m: Normed(Normed(sgd(m), m), m), TypeError, "makes steps of norm lr by itself"),
        (lambda m: Normed(Muon(m), m), TypeError, "makes steps of norm lr by itself"),
        (
            lambda m: Normed(sgd(m), nn.Linear(4, 4)),
            ValueError,
            r"of shape \(4, 4\) belongs to no module of Linear",
        ),
        (
            lambda m: Normed(sgd(m), m).add_param_group({"params": nn.Parameter(torch.ones(2))}),
            ValueError,
            r"of shape \(2,\) belongs to no module of Linear",
        ),
    ],
)
def test_what_can_not_be_normalised_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make(nn.Linear(4, 4))
