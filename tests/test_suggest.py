"""`suggest`: what it takes of given times, what it leaves alone, what it refuses."""

import copy

import pytest
import torch
from torch import nn

import structlin
from structlin import BTT, LowRank, Monarch, suggest
from structlin import _suggest as module


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Dropout(), nn.GELU(), nn.Linear(256, 64))


@pytest.fixture
def ratios(monkeypatch):
    """Label of a structure -> its seconds over dense's in each of three rounds."""
    found = {}
    describe = module._describe

    def spy(structure, model, batch, samples):
        times = found[structlin._families.label(structure)]
        return describe(structure, model, batch, ([2.0] * len(times), [2 * t for t in times]))

    monkeypatch.setattr(module, "_describe", spy)
    return found


STRUCTURES = [BTT(rank=1), BTT(rank=2), Monarch(blocks=2)]  # more parameters, one after another


@pytest.mark.parametrize(
    ("goal", "times", "wanted"),
    [
        ("seconds", [(0.3, 0.3, 0.3), (0.5, 0.5, 0.5), (0.6, 0.6, 0.6)], BTT(rank=1)),
        ("seconds", [(0.3, 0.4, 0.5), (0.4, 0.41, 0.6), (0.6, 0.6, 0.6)], BTT(rank=2)),
        ("seconds", [(0.9, 0.95, 1.2), (1.1, 1.1, 1.1), (2.0, 2.0, 2.0)], None),
        ("params", [(0.9, 0.95, 1.2), (0.2, 0.2, 0.2), (0.1, 0.1, 0.1)], BTT(rank=1)),
        ("params", [(1.1, 1.2, 1.3), (0.9, 0.9, 0.9), (0.1, 0.1, 0.1)], BTT(rank=2)),
        ("flops", [(1.1, 1.2, 1.3), (1.1, 1.2, 1.3), (0.1, 0.1, 0.1)], Monarch(blocks=2)),
        ("flops", [(1.1, 1.2, 1.3)] * 3, None),
    ],
)
def test_what_is_taken(ratios, goal, times, wanted):
    ratios |= {structlin._families.label(s): t for s, t in zip(STRUCTURES, times, strict=True)}
    found = suggest(mlp(), torch.randn(8, 64), goal, structures=STRUCTURES, seconds=1e-3)
    assert found.structure == wanted
    assert [each.ratio for each in found.candidates] == [1.0, *(sorted(t)[1] for t in times)]
    name = "dense" if wanted is None else structlin._families.label(wanted)
    assert f"Take {name}: " in str(found)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_random_numbers_stay(training):
    model = mlp()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model[3].eval()
    before = copy.deepcopy(model)
    state = torch.get_rng_state()
    suggest(model, torch.zeros(8, 64), training=training, seconds=1e-3)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert model[3].weight.grad is None
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, other)


def test_costs_are_those_of_the_converted_model():
    model, x = mlp(), torch.randn(8, 64)
    found = suggest(model, x, structures=[LowRank(rank=4)], seconds=1e-3, exclude="0")
    dense, low = found.candidates
    assert (dense.params, dense.flops) == (33_088, 2 * 8 * 2 * 64 * 256)
    assert low.params == 33_088 - 64 * 256 + 4 * (64 + 256)
    assert low.flops == 2 * 8 * (64 * 256 + 4 * (64 + 256))
    assert dense.seconds > 0
    assert low.low <= low.ratio <= low.high


def test_a_structure_that_does_not_fit_is_named_with_the_reason():
    found = suggest(
        mlp(), torch.randn(8, 64), structures=[Monarch(blocks=7), BTT(rank=1)], seconds=1e-3
    )
    _, seven, one = found.candidates
    assert "blocks=7 does not divide in_features=64" in seven.refusal
    assert not one.refusal
    assert "Monarch(blocks=7) does not fit: layer" in str(found)


def test_of_the_usual_ones_those_that_do_not_fit_are_left_out():
    narrow = nn.Sequential(nn.Linear(6, 6))
    found = suggest(narrow, torch.randn(3, 6), seconds=1e-3)
    assert not any(each.refusal for each in found.candidates)
    assert "LowRank(rank=1)" in [each.label for each in found.candidates]


def test_a_loss_that_the_model_returns_is_differentiated():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, labels):
            y = self.layer(x)
            assert not y.requires_grad or labels is not None
            return {"loss": (y - labels).square().mean(), "hidden": y.detach()}

    batch = {"x": torch.randn(4, 16), "labels": torch.randn(4, 16)}
    found = suggest(Model(), batch, structures=[LowRank(rank=2)], seconds=1e-3)
    assert len(found.candidates) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goal": "loss"}, "goal='loss' is unknown"),
        ({"structures": []}, r"structures=\[\] must hold at least one"),
        ({"seconds": 0}, "seconds=0 must be positive"),
        ({"seconds": float("nan")}, "seconds=nan must be positive"),
        ({"include": "*attn*"}, "matches no"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        suggest(mlp(), torch.randn(8, 64), **options)


def test_frozen_models_have_no_step_of_training():
    model = mlp().requires_grad_(False)
    with pytest.raises(ValueError, match="pass training=False"):
        suggest(model, torch.randn(8, 64), seconds=1e-3)
    assert suggest(model, torch.randn(8, 64), training=False, seconds=1e-3).candidates


def test_what_is_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match="model="):
        suggest("gpt2", torch.randn(8, 64))
    with pytest.raises(TypeError, match="inclde"):
        suggest(mlp(), torch.randn(8, 64), inclde="*")
    with pytest.raises(TypeError, match="structure"):
        suggest(mlp(), torch.randn(8, 64), structures=["BTT"])
