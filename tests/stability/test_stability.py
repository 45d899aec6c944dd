"""The coordinate check: exact values, seeds, bad input."""

import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import structlin
from structlin import BTT, convert
from structlin.optim import Muon
from structlin.stability import coordinate_check

# ---- coordinate_check ----------------------------------------------------------------------------


class Powers(nn.Module):
    """A linear network whose outputs are width^p, and whose weights a step of SGD at lr 1 moves by
    width^q."""

    def __init__(self, width, p, q):
        super().__init__()
        self.layer = nn.Linear(1, width, bias=False)
        nn.init.constant_(self.layer.weight, width**p)
        self.moved = width**q


def moved(model, batch):
    return model.moved * model.layer(batch).sum()


def check_powers(p, q, widths, steps):
    return coordinate_check(
        lambda width: Powers(width, p, q),
        widths,
        [torch.ones(1, 1)],
        loss=moved,
        optimizer=lambda model, width: torch.optim.SGD(model.parameters(), lr=1.0),
        steps=steps,
        seeds=[0],
    )


def test_slopes_are_exact_on_a_network_of_known_powers():
    check = check_powers(0.25, -0.5, [4, 16, 64], steps=2)
    sizes = {(row.width, row.step): row for row in check.rows}
    assert sizes[16, 0].output == pytest.approx(2)
    assert sizes[16, 0].change == 0
    assert sizes[16, 1].output == pytest.approx(2 - 0.25)
    assert sizes[16, 2].change == pytest.approx(0.5)  # two steps of 16^-0.5
    slopes = {(slope.quantity, slope.step): slope.slope for slope in check.slopes}
    assert slopes["output", 0] == pytest.approx(0.25, abs=1e-5)
    assert slopes["change", 1] == pytest.approx(-0.5, abs=1e-5)
    assert slopes["change", 2] == pytest.approx(-0.5, abs=1e-5)
    assert {(slope.layer, slope.quantity) for slope in check.not_flat} == {
        ("layer", "output"),
        ("layer", "change"),
    }


def mlp(width):
    model = nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )
    nn.init.zeros_(model[4].weight)
    nn.init.zeros_(model[4].bias)
    return model


def digit_like():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 16, generator=generator)
    return x, (x[:, :4] + x[:, 4:8]).argmax(dim=1)


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("structure", [None, BTT(), BTT().activate()], ids=str)
def test_one_rate_for_all_widths_is_found_and_the_rule_of_param_groups_is_flat(structure):
    def build(width):
        return (
            mlp(width) if structure is None else convert(mlp(width), structure, exclude=["0", "4"])
        )

    def naive(model, width):
        return torch.optim.Adam(model.parameters(), lr=1e-2)

    def aware(model, width):
        return torch.optim.Adam(structlin.param_groups(model, lr=1e-2, base={width: 64}))

    options = {"loss": cross_entropy, "seeds": [0, 1]}
    wrong = coordinate_check(build, [64, 256, 1024], [digit_like()], optimizer=naive, **options)
    right = coordinate_check(build, [64, 256, 1024], [digit_like()], optimizer=aware, **options)
    grown = {slope.layer: slope.slope for slope in wrong.not_flat if slope.quantity == "change"}
    assert {"2", "4"} <= set(grown)
    assert grown["4"] > 0.5
    assert "0" not in grown
    assert right.not_flat == []
    assert str(right).endswith("all layers are flat (slopes within 0.2)")
    assert str(wrong).splitlines()[-1].startswith("not flat: ")
    assert str(wrong).count("NOT FLAT") == len(wrong.not_flat)
    sizes = {(row.layer, row.width, row.step): row for row in wrong.rows}
    for slope, line in zip(wrong.steepest, str(wrong.table()).splitlines()[2:], strict=True):
        printed = [float(cell) for cell in line.split()[2:5]]
        named = [sizes[slope.layer, width, slope.step] for width in wrong.widths]
        own = [getattr(row, slope.quantity) for row in named]
        assert printed == pytest.approx(own, rel=2e-3)


def test_the_coordinate_check_takes_the_duality_based_optimizer_and_plots():
    check = coordinate_check(
        mlp,
        [32, 128],
        [digit_like()],
        loss=cross_entropy,
        optimizer=lambda model, width: Muon(model, lr=0.1),
        steps=1,
    )
    assert check.widths == [32, 128]
    lines = [line for axis in check.plot().axes for line in axis.lines]
    assert all(list(line.get_xdata()) == [32, 128] for line in lines)
    assert len(lines) == 2 * len({row.layer for row in check.rows})


def test_the_same_seeds_give_the_same_check_and_the_users_random_numbers_go_on():
    def check():
        return coordinate_check(
            lambda width: nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1)),
            [4, 8],
            [torch.ones(3, 4)],
            loss=lambda model, x: model(x).sum(),
            optimizer=lambda model, width: torch.optim.SGD(model[2].parameters(), lr=0.1),
        )

    state = torch.get_rng_state()
    first = check()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert check() == first
    assert any(row.change > 0 for row in first.rows if row.layer == "2")
    # the same dropout each time
    assert all(row.change == 0 for row in first.rows if row.layer == "1")


def test_an_activation_that_is_not_finite_is_not_flat():
    check = check_powers(0.0, 50.0, [4, 1024], steps=1)
    assert [slope.layer for slope in check.not_flat] == ["layer", "layer"]
    assert all(math.isnan(slope.slope) for slope in check.not_flat)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"widths": [64]}, ValueError, r"widths=\[64\]: a slope needs two"),
        ({"widths": [64, -1]}, ValueError, r"widths\[1\]=-1 must be at least 1"),
        ({"batches": []}, ValueError, "batches=0"),
        ({"steps": 0}, ValueError, "steps=0"),
        ({"tolerance": 0}, ValueError, "tolerance=0 must be positive"),
        ({"widths": [2.5, 4]}, TypeError, r"widths\[0\]=2.5 must be an integer"),
        ({"build": lambda width: width}, TypeError, r"build\(2\) returned int, not a torch.nn.Mod"),
        ({"optimizer": lambda *_: None}, TypeError, r"optimizer\(model, 2\) returned NoneType"),
        ({"loss": lambda model, x: model(x)}, TypeError, r"returned Tensor of shape \(3, 2\)"),
        (
            {"optimizer": lambda *_: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)},
            ValueError,
            r"optimizer\(model, 2\): no output of the model changed in 3 steps",
        ),
        (
            {"build": lambda width: nn.Sequential(*[nn.Linear(2, 2) for _ in range(width)])},
            ValueError,
            "the model of width 4 has '2', that of 2 has none",
        ),
        (
            {"build": cache(lambda width: nn.Linear(2, 4))},
            ValueError,
            r"build\(2\) returned a model that it had returned before",
        ),
    ],
)
def test_a_bad_coordinate_check_is_named(changed, error, message):
    options = {
        "build": lambda width: nn.Linear(2, width),
        "widths": [2, 4],
        "batches": [torch.ones(3, 2)],
        "loss": lambda model, batch: model(batch).sum(),
        "optimizer": lambda model, width: torch.optim.SGD(model.parameters(), lr=0.1),
    }
    with pytest.raises(error, match=message):
        coordinate_check(**options | changed)


class Routed(nn.Module):
    """Tokens go to the layer if the gate says so."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(2, 1, bias=False)
        self.expert = nn.Linear(2, width)
        nn.init.ones_(self.gate.weight)

    def forward(self, x):
        scores = self.gate(x)
        rows = (scores[:, 0] > 0).nonzero()[:, 0]
        y = torch.ones(len(x), self.expert.out_features) * scores
        return y.index_add(0, rows, self.expert(x[rows])) if len(rows) else y


@pytest.mark.parametrize(("lr", "now"), [(0.4, r"\[\(2, 2\)\]"), (9.0, r"\[\]")])
def test_an_expert_that_gets_other_tokens_by_training_is_named(lr, now):
    with pytest.raises(ValueError, match=rf"layer 'expert' .* \[\(3, 2\)\] .* {now} now"):
        coordinate_check(
            Routed,
            [2, 4],
            [torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 1.0]])],
            loss=lambda model, batch: model(batch).mean(),
            optimizer=lambda model, width: torch.optim.SGD(model.gate.parameters(), lr=lr),
        )
