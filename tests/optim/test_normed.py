"""`Normed`: what a step measures in the norm of each parameter, with numpy's singular values as the
oracle."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import structlin
from structlin import BTT, StructuredLinear, convert
from structlin.duality import spectral_bound
from structlin.optim import Muon, Normed
from tests.models import GPT

BASES = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.0),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.0, fused=True),
}


def norms(update: torch.Tensor) -> np.ndarray:
    """RMS->RMS operator norm of each `(fan_out, fan_in)` matrix."""
    m, n = update.shape[-2:]
    return (n / m) ** 0.5 * np.linalg.svd(update.double().numpy(), compute_uv=False)[..., 0]


def moved(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What one step with random gradients subtracts, by parameter name."""
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return {name: before[name] - p.detach() for name, p in module.named_parameters()}


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


@pytest.mark.parametrize("norm", ["bound", "power"])
def test_each_vector_and_each_slice_is_normalised_by_itself_if_asked_for(norm):
    model = nn.ModuleDict({
        "embedding": nn.Embedding(4, 16),
        "conv": nn.Conv2d(4, 8, 3, groups=2, bias=False),
        "linear": nn.Linear(6, 10, bias=False),
        "norm": nn.LayerNorm(4, bias=False),
        "btt": StructuredLinear(16, 16, BTT(), bias=False),
    })  # fmt: skip
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Normed(base, model, norm=norm, per_vector=True)
    for _ in range(6):  # power iterations converge
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        torch.manual_seed(0)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        model["embedding"].weight.grad *= torch.tensor([[1.0], [0.01], [0.0], [5.0]])
        model["conv"].weight.grad[:, :, 1, 1] *= 0.01
        model["btt"].cores[0].grad[0] *= 0.01
        optimizer.step()
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    rms = moved["embedding.weight"].square().mean(-1).sqrt()
    assert rms.tolist() == pytest.approx([0.1, 0.1, 0, 0.1], rel=0.01)
    slices = moved["conv.weight"].unflatten(0, (2, 4)).flatten(3).movedim(-1, 1)
    assert 9 * norms(slices) == pytest.approx(0.1, rel=0.05)
    assert norms(moved["linear.weight"]) == pytest.approx(0.1, rel=0.05)
    assert moved["norm.weight"].square().mean().sqrt() == pytest.approx(0.1)
    blocks = norms(moved["btt.cores.0"])
    assert blocks.max() == pytest.approx(0.05, rel=0.05)
    assert blocks[0] < 0.01


def test_each_survives_a_copy_and_is_no_matter_of_sharded_vectors(monkeypatch):
    model = nn.Embedding(4, 8)
    optimizer = Normed(torch.optim.SGD(model.parameters(), lr=0.1), model, per_vector=True)
    assert pickle.loads(pickle.dumps(optimizer)).per_vector
    monkeypatch.setattr("structlin.optim._normed.is_sharded", lambda p: True)
    Normed(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match="per_vector=True: the vectors of an embedding"):
        Normed(torch.optim.SGD(model.parameters(), lr=0.1), model, per_vector=True)


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


def test_the_direction_is_the_bases_own():
    model = GPT(depth=1)
    twin = copy.deepcopy(model)
    ours = Normed(torch.optim.Adam(model.parameters(), lr=1.0), model)
    theirs = torch.optim.Adam(twin.parameters(), lr=1e-3)
    for _ in range(3):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        before = [[p.detach().clone() for p in module.parameters()] for module in (model, twin)]
        ours.step()
        theirs.step()
        for p, old, q, older in zip(
            model.parameters(), before[0], twin.parameters(), before[1], strict=True
        ):
            similar = torch.cosine_similarity(
                (p - old).flatten().double(), (q - older).flatten().double(), dim=0
            )
            assert similar > 0.9999


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


def test_power_iterations_start_where_the_last_ended_and_converge():
    module = nn.Linear(24, 16, bias=False)
    optimizer = Normed(torch.optim.SGD(module.parameters(), lr=0.1), module, norm="power")
    gradient = torch.randn(16, 24)
    lengths = []
    for _ in range(60):
        before = module.weight.detach().clone()
        module.weight.grad = gradient
        optimizer.step()
        lengths.append(norms(before - module.weight.detach()).item())
    assert lengths[0] > 0.101  # two iterations from a random vector see too little
    assert lengths[-1] == pytest.approx(0.1, rel=1e-3)
    assert optimizer.state_dict()["state"][0]["singular_vector"].shape == (1, 24, 1)


def test_the_groups_of_the_base_keep_their_rates_and_hooks_and_closures_work():
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []
    base = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}], lr=0.2)
    optimizer = Normed(base, model)
    optimizer.add_param_group({"params": model[1].parameters()})
    optimizer.register_step_post_hook(
        lambda opt, args, kwargs: seen.append(model[0].weight.detach().clone())
    )

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    before = [layer.weight.detach().clone() for layer in model]
    assert optimizer.step(closure).item() > 0
    for layer, old, rate in zip(model, before, (0.1, 0.2), strict=True):
        step = (1 - rate * 0.01) * old - layer.weight.detach()
        assert norms(step) == pytest.approx(rate, rel=0.05)
    assert torch.equal(seen[0], model[0].weight)


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
    plain = structlin.param_groups(model, 0.1, weight_decay=0.5, structure_aware=False)
    before = [core.detach().clone() for core in model[0].cores]
    moved(model, Normed(torch.optim.AdamW(plain), model))
    for core, old in zip(model[0].cores, before, strict=True):
        assert norms(0.95 * old - core.detach()).max() == pytest.approx(0.05, rel=0.05)


def test_hooks_of_the_state_dict_are_called_with_this_optimizer():
    model, called = nn.Linear(3, 3), []
    optimizer = Normed(torch.optim.AdamW(model.parameters()), model)
    optimizer.register_state_dict_pre_hook(lambda own: called.append(own))
    optimizer.register_state_dict_post_hook(lambda own, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda own, state: {n: v for n, v in state.items() if n != "note"}
    )
    optimizer.register_load_state_dict_post_hook(lambda own: called.append(own))
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    assert called == [optimizer, optimizer]


def test_a_hook_may_replace_the_state_that_is_loaded():
    model = nn.Linear(3, 3)
    optimizer = Normed(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    other = Normed(torch.optim.AdamW(model.parameters(), lr=0.7), model).state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda own, state: other)
    optimizer.register_load_state_dict_pre_hook(lambda own, state: None)  # leaves it as it is
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.7


def test_what_can_not_be_normalised_is_refused_by_name():
    model = nn.Linear(4, 4)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="base=LBFGS must be"):
        Normed(torch.optim.LBFGS(model.parameters()), model)
    with pytest.raises(TypeError, match="base=Linear must be"):
        Normed(model, model)
    for normed in (Normed(base, model), Muon(model)):
        with pytest.raises(TypeError, match="makes steps of norm lr by itself"):
            Normed(normed, model)
    with pytest.raises(ValueError, match="per_vector='yes' is a text"):
        Normed(torch.optim.SGD(nn.Linear(2, 2).parameters()), nn.Linear(2, 2), per_vector="yes")
    with pytest.raises(ValueError, match="norm='svd' is unknown; there are bound, power"):
        Normed(base, model, norm="svd")
    with pytest.raises(ValueError, match="nonfinite='warn'"):
        Normed(base, model, nonfinite="warn")
    with pytest.raises(ValueError, match=r"of shape \(4, 4\) belongs to no module of Linear"):
        Normed(base, nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"of shape \(2, 2\) belongs to no module of Linear"):
        Normed(base, model).add_param_group({"params": nn.Parameter(torch.ones(2, 2))})


def test_one_learning_rate_serves_all_widths():
    """Sweep over powers of two: the best rate of AdamW falls with the width, that of Normed
    stays."""
    found = {}
    for name in ("adamw", "normed"):
        for width in (16, 256):
            losses = {}
            for power in range(-12, 0):
                torch.manual_seed(0)
                model = nn.Sequential(
                    nn.Linear(8, width),
                    nn.ReLU(),
                    nn.Linear(width, width),
                    nn.ReLU(),
                    nn.Linear(width, 1),
                )
                optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**power, weight_decay=0)
                optimizer = Normed(optimizer, model) if name == "normed" else optimizer
                x = torch.randn(64, 8)
                y = torch.sin(x.sum(1, keepdim=True))
                for _ in range(25):
                    loss = (model(x) - y).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                losses[power] = loss.item()
            found[name, width] = min(losses, key=losses.__getitem__)
    assert abs(found["normed", 256] - found["normed", 16]) <= 1
    assert found["adamw", 16] - found["adamw", 256] >= 2
