"""What each layer keeps: curves against singular values, the choice against all choices."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from structlin import (
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    LowRank,
    Monarch,
    Split,
    compress,
    plan_compression,
)
from structlin._compress.allocation import allocate, share_evenly
from structlin._families import Family
from structlin._projection.curve import Curve, list_sizes, measure_curve

FAMILIES = (
    LowRank(rank=1),
    BTT(),
    Monarch(),
    BlockDiagonal(blocks=2),
    TT(rank=1),
    Split(split=2, of=BTT()),
)


def decaying(rows: int, columns: int, power: float) -> Tensor:
    """A random matrix whose singular values fall as 1 / k^power."""
    k = min(rows, columns)
    left, right = (torch.linalg.qr(torch.randn(n, k).double()).Q for n in (rows, columns))
    return (left / torch.arange(1, k + 1) ** power) @ right.mT


def draw_curves(family: Family) -> list[Curve]:
    """Of weights and covariances of spectra between flat and steep."""
    torch.manual_seed(0)
    roots = [decaying(n, n, power) for n, power in ((24, 0.1), (24, 1.5), (48, 0.7))]
    weights = [decaying(m, n, p) for m, n, p in ((24, 24, 0.2), (48, 24, 1.0), (24, 48, 1.8))]
    pairs = zip(weights, roots, strict=True)
    return [
        measure_curve(weight, list_sizes(family, *weight.shape[::-1], "params"), root @ root.mT)
        for weight, root in pairs
    ]


def sum_up(curves: list[Curve], sizes: list, harms: list[float]) -> float:
    found = zip(curves, sizes, harms, strict=True)
    return sum(harm * curve.errors[curve.sizes.index(size)] for curve, size, harm in found)


@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_the_errors_of_low_rank_are_the_singular_values_that_are_left_out(shape, weighed):
    torch.manual_seed(0)
    weight, root = torch.randn(shape).double(), torch.randn(shape[1], shape[1]).double()
    covariance = root @ root.mT / 100 if weighed else None
    values = torch.linalg.svdvals(weight @ root / 10 if weighed else weight).square()
    sizes = list_sizes(LowRank(rank=1), *shape[::-1], "params")
    curve = measure_curve(weight, sizes, covariance)
    assert curve.whole == pytest.approx(values.sum().item(), rel=1e-4)
    ranks = [size.family.rank for size in curve.sizes[:-1]]
    assert ranks == [1, 2, 3, 4, 5, 6, 7]  # 8 costs more than dense
    expected = [values[rank:].sum().item() for rank in ranks]
    assert curve.errors == pytest.approx([*expected, 0.0], rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_sizes_rise_in_cost_and_only_dense_costs_as_much_as_dense(family):
    for widths in ((24, 48), (48, 48), (384, 96)):
        for of in ("params", "flops"):
            sizes = list_sizes(family, *widths, of)
            costs = [size.cost for size in sizes]
            assert costs == sorted(set(costs))
            assert sizes[-1].family == Dense()
            assert costs[-1] == widths[0] * widths[1] * (1 if of == "params" else 2)
            assert not any(size.stays_dense for size in sizes[:-1])


@pytest.mark.parametrize(
    ("width", "aligned"),
    [(384, [*range(8, 192, 8)]), (2048, [*range(8, 513, 8), *range(576, 1024, 64)])],
)
def test_ranks_are_multiples_of_eight_where_there_is_room_and_of_64_where_there_is_much(
    width, aligned
):
    sizes = list_sizes(LowRank(rank=1), width, width, "params")[:-1]
    assert [size.family.rank for size in sizes] == [*range(1, 8), *aligned]


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_errors_fall_with_the_size_and_end_at_nothing(family):
    for curve in draw_curves(family):
        assert curve.errors[-1] == 0
        assert curve.errors[0] <= curve.whole * (1 + 1e-6)
        assert curve.errors[-2] < curve.errors[0] or len(curve.sizes) == 2


@pytest.mark.parametrize("family", [BTT(), LowRank(rank=1), Monarch()], ids=str)
def test_to_keep_more_is_never_worse_and_no_share_is_exceeded(family):
    curves = draw_curves(family)
    total = sum(curve.sizes[-1].cost for curve in curves)
    for harms in ([1.0, 1.0, 1.0], [1.0, 30.0, 0.1]):
        last, smaller = float("inf"), [0, 0, 0]
        for percent in range(35, 101):
            sizes = allocate(curves, percent / 100, harms)
            costs = [size.cost for size in sizes]
            assert sum(costs) <= percent / 100 * total
            assert all(now >= before for now, before in zip(costs, smaller, strict=True))
            smaller = costs
            error = sum_up(curves, sizes, harms)
            assert error <= last * (1 + 1e-12)
            last = error
        assert last == 0
        assert all(size.stays_dense for size in sizes)


@pytest.mark.parametrize("keep", [0.3, 0.5, 0.7])
def test_the_choice_is_near_the_best_of_all(keep):
    curves, harms = draw_curves(BTT()), [1.0, 3.0, 0.5]
    limit = keep * sum(curve.sizes[-1].cost for curve in curves)
    every = product(*(curve.sizes for curve in curves))
    fits = [sizes for sizes in every if sum(size.cost for size in sizes) <= limit]
    best = min(sum_up(curves, list(sizes), harms) for sizes in fits)
    found = sum_up(curves, allocate(curves, keep, harms), harms)
    assert best * (1 - 1e-9) <= found <= 1.25 * best


def test_a_layer_that_does_no_harm_stays_at_its_smallest_size():
    curves = draw_curves(LowRank(rank=1))
    smallest = curves[1].sizes[0]
    assert allocate(curves, 0.5, [1.0, 0.0, 1.0])[1] == smallest
    assert allocate(curves, 0.5, [1.0, 100.0, 1.0])[1] != smallest


def test_a_size_that_is_no_better_is_passed_over():
    sizes = list_sizes(LowRank(rank=1), 16, 16, "params")
    errors = [0.5, 0.6, 0.5, 0.1, 0.1, 0.1, 0.1, 0.0]
    (size,) = allocate([Curve(sizes, errors, 1.0)], 0.7, [1.0])
    assert size.family == LowRank(rank=4)


def test_uniform_is_the_largest_size_of_each_layer_within_its_share():
    widths = (64, 64), (64, 256), (256, 64)
    found = share_evenly([list_sizes(LowRank(rank=1), *each, "params") for each in widths], 0.5)
    assert [size.family.rank for size in found] == [16, 24, 24]  # 25.6 is half of 64 x 256
    with pytest.raises(ValueError, match=r"keep=0.01, the same for all layers: .* 0.0313 or more"):
        share_evenly([list_sizes(LowRank(rank=1), 64, 64, "params")], 0.01)


# ---- in a model ----------------------------------------------------------------------------------


def train_small_model() -> tuple[nn.Module, Tensor]:
    """It has learned a function of 16 numbers; and inputs of which a few directions are wide."""
    torch.manual_seed(0)
    x = torch.randn(256, 16) * torch.logspace(0, -1, 16)
    goal = torch.tanh(x @ torch.randn(16, 8)) @ torch.randn(8, 8)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    )
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        (model(x) - goal).square().mean().backward()
        optimizer.step()
    return model, x


@pytest.mark.parametrize("by", ["sensitivity", "error"])
def test_a_trained_model_keeps_more_of_itself_with_larger_sizes(by):
    errors = []
    for keep in (0.3, 0.6, 0.9, 1.0):
        dense, x = train_small_model()
        model, _ = train_small_model()
        compress(model, LowRank(rank=1), [x], keep=keep, allocation=by, include="*")
        errors.append((model(x) - dense(x)).norm().item() / dense(x).norm().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-3
    assert errors[-1] == 0  # all layers stay dense


def test_a_layer_that_stays_dense_is_the_models_own_and_the_plan_says_so():
    model, x = train_small_model()
    planned = plan_compression(model, LowRank(rank=1), [x], include="*", keep=0.9)
    stay = [d for d in planned.decisions if d.structure is None]
    assert stay
    assert all(decision.reason == "dense: within what is kept" for decision in stay)
    assert "dense: within what is kept" in str(planned)
    layers = {d.layer.name: d.layer.module for d in stay}
    planned.apply()
    assert all(model.get_submodule(name) is module for name, module in layers.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allocation": "loss"}, "allocation='loss' is unknown; there are sensitivity, error"),
        ({}, "allocation='sensitivity' needs batches"),
    ],
)
def test_wrong_ways_to_share_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan_compression(nn.Sequential(nn.Linear(16, 16)), LowRank(rank=1), None, **options)
