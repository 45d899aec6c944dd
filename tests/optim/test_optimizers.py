"""What holds for both optimizers of the library: `Muon`, and `Normed` around another one."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from structlin import BTT, LowRank, convert
from structlin.optim import Muon, Normed
from tests.models import GPT, perplexed


def normed(model: nn.Module, lr: float = 0.05, **options: Any) -> Normed:
    return Normed(torch.optim.AdamW(model.parameters(), lr=lr), model, **options)


BOTH = {"Muon": Muon, "Normed": normed}
both = pytest.mark.parametrize("make", BOTH.values(), ids=BOTH)


def converted() -> nn.Module:
    return convert(GPT(depth=1), BTT(), include="ffn")


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@both
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


@both
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


@both
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


@both
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


@both
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copied_or_pickled_optimizer_continues_bit_for_bit(make, copied):
    model = converted()
    optimizer = make(model, lr=0.05, masses={"lm_head": 2.0})
    perplexed(model, 2, optimizer)
    twin, again = copied((model, optimizer))
    assert perplexed(twin, 3, again) == perplexed(model, 3, optimizer)
    assert again.masses == {"lm_head": 2.0}


@both
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
