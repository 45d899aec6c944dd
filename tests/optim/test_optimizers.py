"""What holds for all optimizers of the library: `Muon`, `SOAP`, and `Normed` around another one."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from structlin import BTT, LowRank, convert
from structlin.optim import SOAP, Muon, Normed
from tests.models import GPT, perplexed


def normed(model: nn.Module, lr: float = 0.05, **options: Any) -> Normed:
    return Normed(torch.optim.AdamW(model.parameters(), lr=lr), model, **options)


ALL = {"Muon": Muon, "SOAP": SOAP, "Normed": normed}
each_optimizer = pytest.mark.parametrize("make", ALL.values(), ids=ALL)
blockwise = pytest.mark.parametrize("make", [Muon, SOAP])


def converted() -> nn.Module:
    return convert(GPT(depth=1), BTT(), include="ffn")


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@each_optimizer
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_raise_and_change_nothing(make, bad):
    model = GPT(depth=1)
    optimizer = make(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model.ln_f.weight.grad[3] = bad
    before = values(model)
    with pytest.raises(FloatingPointError, match=r"gradients of ln_f\.weight are not finite"):
        optimizer.step()
    assert all(map(torch.equal, values(model), before))
    assert not optimizer.state


@each_optimizer
@pytest.mark.parametrize("zeroed", [False, True], ids=["with gradients", "gradients zeroed"])
def test_a_model_converted_after_the_optimizer_was_made_is_noticed_at_step(make, zeroed):
    model = GPT(depth=1)
    optimizer = make(model)
    if zeroed:
        perplexed(model, 1, optimizer)
        optimizer.zero_grad(set_to_none=False)
    convert(model, LowRank(rank=4), include="ffn")
    before = values(model)
    with pytest.raises(
        RuntimeError, match=r"h\.0\.mlp\.c_fc\.weight, .*convert first, then make the optimizer"
    ):
        optimizer.step() if zeroed else perplexed(model, 1, optimizer)
    assert all(map(torch.equal, values(model), before))


@each_optimizer
def test_zero_and_missing_gradients_move_nothing(make):
    model = converted()
    before, optimizer = values(model), make(model)
    if isinstance(optimizer, Normed):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
    optimizer.step()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(map(torch.equal, values(model), before))


@each_optimizer
def test_training_continues_bit_for_bit_from_a_file_with_its_scheduler(make, tmp_path):
    model = converted()

    def start(lr):
        optimizer = make(model, lr=lr)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)

    def run(optimizer, scheduler):
        losses = []
        for _ in range(4):
            losses += perplexed(model, 1, optimizer)
            scheduler.step()
        return losses, [group["lr"] for group in optimizer.param_groups]

    first = start(0.05)
    losses, rates = run(*first)
    assert losses[-1] < 0.9 * losses[0]
    assert rates[0] == pytest.approx(0.025)
    torch.save([part.state_dict() for part in (model, *first)], tmp_path / "state.pt")
    straight = run(*first)
    again, saved = start(1.0), torch.load(tmp_path / "state.pt", weights_only=True)
    for part, state in zip((model, *again), saved, strict=True):
        part.load_state_dict(state)
    assert run(*again) == straight


@each_optimizer
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copied_or_pickled_optimizer_continues_bit_for_bit(make, copied):
    model = converted()
    optimizer = make(model, lr=0.05, masses={"lm_head": 2.0})
    perplexed(model, 2, optimizer)
    twin, again = copied((model, optimizer))
    assert perplexed(twin, 3, again) == perplexed(model, 3, optimizer)
    assert again.masses == {"lm_head": 2.0}


@each_optimizer
def test_a_closure_gives_the_loss_and_hooks_run_around_the_step(make):
    model, seen = nn.Linear(3, 1), []
    optimizer = make(model)

    def note(*_):
        seen.append(model.weight.detach().clone())

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(note)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure) >= 0
    assert len(seen) == 4
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[3], model.weight)


# ---- what holds for Muon and SOAP ----------------------------------------------------------------


@blockwise
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 2.0}, r"momentum=2\.0 must be at least 0 and below 1"),
        ({"betas": (2.0, 2.0)}, r"betas\[0\]=2\.0 must be at least 0 and below 1"),
        ({"betas": (0.9,)}, r"betas=\(0\.9,\) must be 2 numbers"),
        ({"eps": -1}, "eps=-1 must be finite and not negative"),
        ({"lr": -1.0}, r"lr=-1\.0 must be finite and not negative"),
        ({"weight_decay": "0.1"}, r"weight_decay='0\.1' is text"),
        ({"method": "muon"}, "method='muon' is unknown"),
        ({"adjust_lr_fn": "mup"}, "adjust_lr_fn='mup' is unknown"),
        ({"wieght_decay": 0.1}, r"wieght_decay=0\.1 is no option .* take 'weight_decay'"),
        ({"matrices": "all"}, "matrices='all' is no option that a group of"),
    ],
)
def test_an_option_of_a_group_that_cannot_be_is_refused_when_the_group_is_added(
    make, options, message
):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    groups = [{"params": model[0]}, {"params": model[1], **options}]
    with pytest.raises((ValueError, TypeError), match=message):
        make(groups, model=model)
    optimizer = make(model[0], model=model)
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.add_param_group(groups[1])
    assert len(optimizer.param_groups) == 2  # of the first layer's matrix and bias


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shampoo_beta": 2.0}, r"shampoo_beta=2\.0 must be at least 0 and below 1"),
        ({"shampoo_beta": -1}, "shampoo_beta=-1 must be finite and not negative"),
        ({"precondition_frequency": 0}, "precondition_frequency=0 must be at least 1"),
        ({"precondition_frequency": 2.5}, r"precondition_frequency=2\.5 must be an integer"),
        ({"max_precond_dim": "x"}, "max_precond_dim='x' must be an integer"),
        ({"precondition_freq": 3}, "precondition_freq=3 .* take 'precondition_frequency'"),
    ],
)
def test_soaps_own_options_are_refused_in_its_groups_and_in_a_state(options, message):
    model = nn.Linear(8, 8)
    name = next(iter(options))
    error = TypeError if "must be an integer" in message else ValueError
    with pytest.raises(error, match=message):
        SOAP([{"params": model, **options}], model=model)
    with pytest.raises(ValueError, match=f"{name}=.* is no option that a group of Muon"):
        Muon([{"params": model, **options}], model=model)
    optimizer = SOAP(model)
    state = optimizer.state_dict()
    state["param_groups"][0].update(options)
    if name in optimizer.defaults:
        with pytest.raises(error, match=message):
            optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["precondition_frequency"] == 5


@blockwise
def test_betas_and_eps_are_arguments_and_adamw_has_them(make):
    model = nn.Linear(4, 4)
    twin = copy.deepcopy(model)
    optimizer = make(model, other_lr=0.01, betas=(0.5, 0.6), eps=0.1)
    reference = torch.optim.AdamW([twin.bias], 0.01, betas=(0.5, 0.6), eps=0.1, weight_decay=0)
    for _ in range(3):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(model.bias, twin.bias)
    assert not torch.equal(model.weight, twin.weight)


@blockwise
def test_a_class_of_ones_own_may_add_an_option_and_leaves_the_others_checked(make):
    class Own(make):
        def __init__(self, params, lr=0.02, **options):
            super().__init__(params, lr, **options)

    model = nn.Linear(4, 4)
    assert Own(model, momentum=0.5).param_groups[0]["momentum"] == 0.5
    with pytest.raises(ValueError, match="momentum=2"):
        Own([{"params": model, "momentum": 2}], model=model)


@blockwise
def test_parameters_that_are_frozen_when_the_optimizer_is_made_step_when_they_are_unfrozen(make):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    optimizer, x = make(model), torch.randn(4, 8)
    steps = []
    for _ in range(2):
        before = [p.detach().clone() for p in model[0].parameters()]
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        pairs = zip(model[0].parameters(), before, strict=True)
        steps.append([not torch.equal(p, q) for p, q in pairs])
        model[0].requires_grad_(True)
    assert steps == [[False, False], [True, True]]


@blockwise
def test_layers_without_outputs_and_complex_layers_train_beside_others(make):
    with pytest.warns(UserWarning, match="zero-element"):
        empty = nn.Linear(8, 0)
    model = nn.ModuleList([empty, nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.complex64)])
    twin = copy.deepcopy(model[2])
    optimizer = make(model, other_lr=0.01)
    reference = torch.optim.AdamW(twin.parameters(), 0.01, betas=(0.9, 0.95), weight_decay=0)
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p) + torch.rand_like(p)
        for p, q in zip(model[2].parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    for p, q in zip(model[2].parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@blockwise
def test_a_model_that_changed_its_dtype_is_refused_until_the_state_is_loaded_again(make):
    model = nn.Linear(8, 8)
    optimizer = make(model)

    def train():
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()

    train()
    model.double()
    before = values(model)
    with pytest.raises(RuntimeError, match=r"bias is torch\.float64 and its state torch"):
        train()
    assert all(map(torch.equal, values(model), before))
    optimizer.load_state_dict(optimizer.state_dict())
    train()
    assert not any(map(torch.equal, values(model), before))
