"""`structlin.search`: the families are points of its space, its measures are those of matrices, its
runs go on, and its fits find the law that made the losses."""

import json
import math
import random
import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from structlin import (
    BTT,
    TT,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    convert,
    family,
    param_groups,
    search,
    to_dense,
)
from structlin.search import Einsum, Search, Trial, measure, sample
from tests.catalogue import CASES, random_cores, structures

HALVES = {"alpha": 0.5, "epsilon": 0.5}
BTT_POINT = Einsum(**HALVES, gamma=0.5, phi=0.5)
KRONECKER_POINT = Einsum(**HALVES, beta=0.5, delta=0.5)


# ---- the families are points of the space --------------------------------------------------------

POINTS = [
    (Einsum(alpha=1, delta=1), Dense(), 40, 24),
    (Einsum(beta=1, epsilon=1), Dense(), 40, 24),
    (Einsum(alpha=1, epsilon=1, rho=0.5), LowRank(rank=8), 64, 64),
    (Einsum(alpha=1, epsilon=1, rho=0.5), LowRank(rank=8), 64, 256),
    (KRONECKER_POINT, Kronecker(), 96, 60),
    (replace(KRONECKER_POINT, rho=0.25), TT(rank=4), 256, 256),
    (BTT_POINT, BTT(rank=1), 96, 60),
    (replace(BTT_POINT, rho=0.25), BTT(rank=4), 256, 1024),
    (BTT_POINT, Monarch(blocks=16), 256, 256),
    (Einsum(alpha=0.75, gamma=0.25, epsilon=0.75, phi=0.25, rho=0.5), Monarch(blocks=4), 256, 256),
]


@pytest.mark.parametrize(("point", "named", "wide", "high"), POINTS)
def test_a_family_is_a_point_with_as_many_parameters_and_flops(point, named, wide, high):
    ours, theirs = point.structure(wide, high), named.structure(wide, high)
    assert (ours.in_features, ours.out_features) == (theirs.in_features, theirs.out_features)
    assert (ours.params, ours.flops) == (theirs.params, theirs.flops)
    assert measure(ours) == measure(theirs)
    repeats = [core.repeat for core in theirs.cores]
    assert [core.repeat for core in ours.cores] == repeats
    assert [core.fan_in for core in ours.cores] == [core.fan_in for core in theirs.cores]


@pytest.mark.parametrize(("point", "named", "wide", "high"), POINTS[:-2])
def test_a_family_is_a_point_with_the_same_matrix(point, named, wide, high):
    ours, theirs = point.structure(wide, high), named.structure(wide, high)
    cores = random_cores(theirs)
    # a core's blocks hold the same numbers: batch, fan-out and fan-in axes are of equal sizes
    moved = []
    for mine, core, stored in zip(ours.cores, theirs.cores, cores, strict=True):
        axes = [axis for axis in core.axes if axis != "r1" or "r" in mine.axes]  # a rank of 1
        sizes = [theirs.sizes[axis] for axis in axes]
        renamed = [RENAMED[type(named)].get(axis, axis) for axis in axes]
        order = [renamed.index(axis) for axis in mine.axes]
        moved.append(stored.reshape(sizes).permute(order).reshape(mine.shape))
    torch.testing.assert_close(to_dense(ours, moved), to_dense(theirs, cores))


RENAMED = {
    Dense: {"i": "a", "o": "d"},
    LowRank: {"i": "a", "o": "e"},
    Kronecker: {"g": "b", "d": "a", "a": "e", "b": "d"},
    TT: {"j1": "b", "j2": "a", "i1": "e", "i2": "d", "r1": "r"},
    BTT: {"j1": "g", "j2": "a", "i1": "e", "i2": "f", "r1": "r"},
}


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr("structlin.search._fits.RESAMPLES", 80)


@pytest.fixture(autouse=True)
def _second_dense_core(request, monkeypatch):
    """The dense point that is the second core names its axes b and e."""
    if request.node.name.startswith("test_a_family_is_a_point_with_the_same_matrix[point1"):
        monkeypatch.setitem(RENAMED, Dense, {"i": "b", "o": "e"})


def test_monarch_is_btts_point_up_to_the_order_of_its_outputs():
    ours, theirs = BTT_POINT.structure(256, 256), Monarch(blocks=16).structure(256, 256)
    cores = random_cores(theirs)  # (k, q l, p), (l, s, k q), with q = 1
    theirs_matrix = to_dense(theirs, cores).reshape(16, 16, 256)  # (s, l, in)
    torch.testing.assert_close(
        to_dense(ours, cores).reshape(16, 16, 256), theirs_matrix.mT.mT.transpose(0, 1)
    )


def test_a_point_is_the_einsum_that_its_docstring_shows():
    point = Einsum(alpha=0.3, beta=0.3, gamma=0.4, delta=0.4, epsilon=0.3, phi=0.3, rho=0.2)
    structure = point.structure(64, 60)
    sizes = structure.sizes
    assert all(sizes[axis] > 1 for axis in "abgdefr")
    first, second = random_cores(structure)
    a = first.reshape([sizes[axis] for axis in structure.cores[0].axes])
    b = second.reshape([sizes[axis] for axis in structure.cores[1].axes])
    names = ["".join(core.axes) for core in structure.cores]
    matrix = torch.einsum(f"{names[0]},{names[1]}->fedgba", a, b).reshape(60, 64)
    torch.testing.assert_close(to_dense(structure, [first, second]), matrix)


# ---- sizes ---------------------------------------------------------------------------------------


@given(st.integers(2, 3000), st.integers(2, 3000), st.integers(0, 10_000))
def test_sizes_are_near_their_powers_and_pad_little(wide, high, seed):
    point = search._space._draw_point(random.Random(seed))
    try:
        structure = point.structure(wide, high)
    except ValueError as error:
        assert "has no factors within a factor of 2" in str(error)  # noqa: PT017
        return
    sizes = structure.sizes
    for width, padded, axes in (
        (wide, structure.in_features, {"a": "alpha", "b": "beta", "g": "gamma"}),
        (high, structure.out_features, {"d": "delta", "e": "epsilon", "f": "phi"}),
    ):
        assert width <= padded <= math.ceil(1.15 * width)
        for axis, name in axes.items():
            power = padded ** getattr(point, name)
            assert power / 2.01 <= sizes.get(axis, 1) <= 2.01 * power
            assert (axis in sizes) == (getattr(point, name) > 0)


def test_a_width_without_factors_is_named_with_the_next_one_that_has_some():
    thirds = Einsum(alpha=0.34, beta=0.33, gamma=0.33, delta=1)
    with pytest.raises(ValueError, match=r"in_features=13 has no factors .* 16 has"):
        thirds.structure(13, 16)
    assert thirds.structure(16, 16).sizes["d"] == 16


@pytest.mark.parametrize(
    ("exponents", "message"),
    [
        ({"alpha": 1}, "delta=0.0 is 0: the exponents of y must sum to 1"),
        ({"alpha": 1.5, "delta": 1}, "alpha=1.5 must be a number from 0 to 1"),
        ({"alpha": True, "delta": 1}, "alpha=True must be a number"),
        ({"alpha": "1", "delta": 1}, "alpha='1' must be a number"),
        ({"alpha": math.nan, "delta": 1}, "alpha=nan must be a number"),
        ({"alpha": 1, "delta": 1, "rho": 0.5}, "rho=0.5 is over the useful bound .* = 0"),
    ],
)
def test_exponents_out_of_range_are_named(exponents, message):
    with pytest.raises(ValueError, match=message):
        Einsum(**exponents)


def test_a_point_survives_plain_data():
    point = Einsum(**HALVES, gamma=0.5, phi=0.5, rho=0.2)
    assert family(**json.loads(json.dumps(point.to_dict()))) == point


# ---- measures ------------------------------------------------------------------------------------


def assert_rank_is_measured(structure):
    width = min(structure.in_features, structure.out_features)
    if width > 1:  # of a side of one feature nothing is measured
        rank = int(torch.linalg.matrix_rank(to_dense(structure, random_cores(structure))))
        assert measure(structure).psi == pytest.approx(math.log(rank, width), abs=6e-5), structure


@given(structures(64))
def test_the_measured_rank_is_the_rank_of_random_cores(structure):
    assert_rank_is_measured(structure)


def test_the_measured_rank_is_the_rank_of_every_family_and_of_sampled_points():
    small = [each.structure(i, o) for each, i, o in CASES if i * o <= 10_000]
    for structure in [*small, *(point.structure(60, 48) for point in sample(60, 48, 40))]:
        assert_rank_is_measured(structure)


def test_the_exponents_are_what_is_measured_of_a_wide_matrix():
    width = 2**24
    for point in sample(64, 64, 40, seed=5):
        found = measure(point.structure(width, width))
        for name in ("omega", "psi", "nu"):
            assert abs(getattr(found, name) - getattr(point, name)) < 0.1, (point, name)


def test_a_matrix_of_one_row_has_no_exponents():
    with pytest.raises(ValueError, match="needs 2 features or more"):
        measure(Dense().structure(8, 1))


# ---- drawing -------------------------------------------------------------------------------------


def test_points_without_factors_of_the_widths_are_passed_over():
    point = Einsum(alpha=0.3, beta=0.3, gamma=0.4, delta=0.3, epsilon=0.3, phi=0.4)
    with pytest.raises(ValueError, match="in_features=13 has no factors"):
        point.structure(13, 13)
    points = sample(13, 13, 12)  # of those drawn before the twelfth, some are such points
    assert len(points) == 12
    for point in points:
        point.structure(13, 13)


def test_a_sample_is_what_was_asked_for_and_the_same_for_the_same_seed():
    points = sample(128, 256, 30, seed=3, omega=(0, 0.2), psi=(0.5, 1), nu=(0.3, 0.9))
    assert points == sample(128, 256, 30, seed=3, omega=(0, 0.2), psi=(0.5, 1), nu=(0.3, 0.9))
    assert points != sample(128, 256, 30, seed=4, omega=(0, 0.2), psi=(0.5, 1), nu=(0.3, 0.9))
    found = [point.structure(128, 256) for point in points]
    assert len(set(found)) == 30
    for point, structure in zip(points, found, strict=True):
        assert 0 <= point.omega <= 0.2
        assert 0.5 <= point.psi <= 1
        assert 0.3 <= point.nu <= 0.9
        assert structure.flops < 2 * 128 * 256


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"omega": (0, 0), "psi": (1, 1), "nu": (0, 0.4)}, "has 0 structures for 64 -> 64"),
        ({"nu": (0.5, 0.4)}, r"nu=\(0.5, 0.4\) must be \(low, high\)"),
    ],
)
def test_a_space_without_structures_is_named(ranges, message):
    with pytest.raises(ValueError, match=message):
        sample(64, 64, 5, **ranges)


def test_a_width_that_no_structure_fits_is_named():
    with pytest.raises(ValueError, match=r"n=1: .* has 0 structures for 1 -> 64"):
        sample(1, 64, 1, nu=(0.1, 1))
    with pytest.raises(ValueError, match="in_features='64' must be an integer"):
        sample("64", 64, 1)
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        sample(64, 64, 0)


# ---- running -------------------------------------------------------------------------------------


def build(width):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                         nn.Linear(width, 1))  # fmt: skip


def train(model, groups, seed):
    optimizer = torch.optim.Adam(groups)
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(seed))
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) - x.prod(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    return loss


OPTIONS = {"lr": 1e-2, "include": "2", "progress": False}
BOTH = {"dense": Dense(), "BTT": BTT_POINT}


def test_a_run_trains_the_converted_model_at_the_derived_rates():
    seen = []

    def record(model, groups, seed):
        rates = {n: g["lr"] for g in groups for n in g["param_names"]}
        seen.append((type(model[2]).__name__, rates, torch.initial_seed(), seed))
        return 1.0

    search.run(build, record, {"BTT": BTT_POINT}, [64], base=16, seeds=[7], **OPTIONS)
    kind, rates, *seeds = seen[0]
    expected = param_groups(convert(build(64), BTT_POINT, include="2"), 1e-2, base=build(16))
    assert kind == "StructuredLinear"
    assert rates == {n: g["lr"] for g in expected for n in g["param_names"]}
    assert rates["2.cores.0"] == pytest.approx(1e-2 * (64 / 8) / 2 * 16 / 64)
    assert seeds == [7, 7]


def test_a_run_counts_what_a_model_costs_and_measures_its_layers():
    found = search.run(build, train, BOTH, [16, 64], seeds=[0, 1], **OPTIONS)
    assert len(found.rows) == 8
    row = next(r for r in found.rows if (r.structure, r.width) == ("BTT", 64))
    structure = BTT_POINT.structure(64, 64)
    assert row.flops == 2 * 3 * 64 + structure.flops + 2 * 64
    assert row.params == 4 * 64 + structure.params + 64 + 65
    assert (row.omega, row.psi, row.nu) == (0, 1, measure(structure).nu)
    assert row.seconds > 0
    assert family(**row.family) == BTT_POINT
    assert "frontier: loss = a FLOPs^-b + c" in str(found)


def test_a_layer_of_one_feature_is_trained_and_not_measured():
    (row,) = search.run(build, train, [Dense()], [16], **{**OPTIONS, "include": ["2", "4"]}).rows
    assert (row.omega, row.psi, row.nu) == (0, 1, 1)


def test_a_structure_of_several_ranks_is_known_again(tmp_path):
    named = {"BTT": BTT(rank=(1,))}  # a tuple, which a file has as a list
    path = tmp_path / "search.json"
    first, second = (search.run(build, train, named, [16], path=path, **OPTIONS) for _ in range(2))
    assert first == second


def test_runs_are_kept_and_not_made_again(tmp_path):
    path, calls = tmp_path / "kept" / "search.json", []

    def stops(model, groups, seed):
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(seed)
        return 1.0 + len(calls)

    grid = {"structures": BOTH, "widths": [16, 64], "seeds": [0, 1], "path": path, **OPTIONS}
    with pytest.raises(KeyboardInterrupt):
        search.run(build, stops, **grid)
    kept = json.loads(path.read_text())
    assert len(kept["rows"]) == 5
    assert [*tmp_path.rglob("*.part")] == []
    with pytest.raises(KeyboardInterrupt):  # the sixth, and no other before it
        search.run(build, stops, **grid)
    assert len(calls) == 5
    calls.clear()
    found = search.run(build, stops, **grid)
    assert calls == [1, 1, 1]
    assert {row.loss for row in found.rows} == {2.0, 3.0, 4.0, 5.0, 6.0}
    assert len(json.loads(path.read_text())["rows"]) == 8
    few = search.run(build, stops, **{**grid, "widths": [16], "seeds": [0]})
    assert len(few.rows) == 2
    assert len(json.loads(path.read_text())["rows"]) == 8


def test_another_setting_or_structure_of_the_name_is_refused(tmp_path):
    path = tmp_path / "search.json"
    search.run(build, train, BOTH, [16], path=path, setting={"steps": 3}, **OPTIONS)
    before = path.read_text()
    with pytest.raises(ValueError, match="steps is 3 there and 4 here"):
        search.run(build, train, BOTH, [16], path=path, setting={"steps": 4}, **OPTIONS)
    with pytest.raises(ValueError, match=r"lr is 0\.01 there and 0.1 here"):
        search.run(build, train, BOTH, [16], path=path, **{**OPTIONS, "lr": 0.1})
    other = {"BTT": replace(BTT_POINT, rho=0.25)}
    with pytest.raises(ValueError, match="has another structure of the name 'BTT'"):
        search.run(build, train, other, [16], path=path, setting={"steps": 3}, **OPTIONS)
    kept = {"path": path, "setting": {"steps": 3}, **OPTIONS}
    batch = torch.randn(5, 3)
    for changes, message in (
        ({"weight_norm": True}, "weight_norm is None there and True here"),
        ({"include": ["2", "4"]}, "include is '2' there and .'2', '4'. here"),
        ({"overrides": {"4": LowRank(rank=1)}}, "overrides is None there and .*LowRank"),
        ({"example": batch}, r"example is None there and 'torch.float32 \(5, 3\)' here"),
        ({"setting": {"steps": 3, "lr": 0.01}}, "lr is compared already; take another name"),
    ):
        with pytest.raises(ValueError, match=message):
            search.run(build, train, BOTH, [16], **{**kept, **changes})
    assert path.read_text() == before
    path.write_text("{}")
    with pytest.raises(ValueError, match="is not the file of a search"):
        search.run(build, train, BOTH, [16], path=path, **OPTIONS)


@pytest.mark.parametrize(
    "change",
    [{"loss": -1.0}, {"loss": "x"}, {"loss": math.nan}, {"flops": 0}, {"width": True}, {"psi": ""}],
)
def test_a_file_with_numbers_that_no_run_has_is_refused(change, tmp_path):
    path, kept = tmp_path / "search.json", {"structures": BOTH, "widths": [16], **OPTIONS}
    search.run(build, train, path=path, **kept)
    content = json.loads(path.read_text())
    content["rows"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"is not the file of a search.*{next(iter(change))}="):
        search.run(build, train, path=path, **kept)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is not the file of a search"):
        search.run(build, train, path=path, **kept)


def test_a_run_that_diverges_is_recorded_and_the_search_goes_on(tmp_path):
    def diverges(model, groups, seed):
        if model[2].structure.params > 1000 and seed == 0:
            raise FloatingPointError
        return math.nan if seed == 1 else torch.tensor(0.5)

    named = {"BTT": BTT_POINT, "more": replace(BTT_POINT, rho=0.25)}
    path = tmp_path / "search.json"
    found = search.run(build, diverges, named, [16, 64], seeds=[0, 1], path=path, **OPTIONS)
    losses = {(r.structure, r.width, r.seed): r.loss for r in found.rows}
    expected = {key: None if key[2] else 0.5 for key in losses}
    expected["BTT", 64, 0] = expected["more", 64, 0] = None
    assert losses == expected
    assert json.loads(path.read_text())["rows"][-1]["loss"] is None
    with pytest.raises(ValueError, match="none of 8 runs has a finite loss"):
        found.standings()


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (None, TypeError, r"train\(model, groups, 0\) returned NoneType, not a number"),
        (torch.ones(2), TypeError, r"returned Tensor of shape \(2,\), not a number"),
        (-1.0, ValueError, "returned -1.0: losses are compared in logarithms"),
    ],
)
def test_what_train_may_not_return_is_named(returned, error, message):
    with pytest.raises(error, match=message):
        search.run(build, lambda model, groups, seed: returned, BOTH, [16], **OPTIONS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"widths": []}, ValueError, "there must be at least one of each"),
        ({"widths": [16, -1]}, ValueError, r"widths\[1\]=-1 must be at least 1"),
        ({"widths": [16.5]}, ValueError, r"widths\[0\]=16.5 must be an integer"),
        ({"structures": {}}, ValueError, "there must be at least one of each"),
        ({"seeds": []}, ValueError, "there must be at least one of each"),
        ({"structures": [Dense(), Dense()]}, ValueError, r"Dense\(\) is there twice"),
        ({"structures": [BTT().structure(16, 16)]}, TypeError, "must be a family"),
        ({"structures": [LowRank(rank=32)]}, ValueError, "LowRank.*width 16: .*rank=32"),
        ({"include": "9"}, ValueError, "9"),
        ({"lr": -1.0}, ValueError, "lr=-1.0 must be finite and not negative"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_trained(changes, error, message):
    def fails(model, groups, seed):
        raise AssertionError

    arguments = {"structures": BOTH, "widths": [16, 64], **OPTIONS, **changes}
    with pytest.raises(error, match=message):
        search.run(build, fails, **arguments)


def test_models_that_are_made_without_values_do_not_warn_of_it():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search.run(build, train, [BTT_POINT], [16], **OPTIONS)
    assert not any("meta" in str(warning.message) for warning in caught)


def test_a_model_that_the_meta_device_cannot_make_is_made_for_real():
    def build_by_value(width):
        model = build(width)
        assert model[0].weight.abs().max().item() > 0  # which has no values there
        return model

    (row,) = search.run(build_by_value, train, [BTT_POINT], [16], **OPTIONS).rows
    assert row.loss > 0
    with pytest.raises(ValueError, match=r"LowRank.*width 16: .*rank=32"):
        search.run(build_by_value, train, [LowRank(rank=32)], [16], **OPTIONS)


# ---- what is read from the runs ------------------------------------------------------------------

MEASURES = {
    "best": (0.0, 1.0, 0.6), "rank": (0.0, 0.5, 0.5), "shared": (0.5, 1.0, 0.5),
    "both": (0.5, 0.5, 0.7), "dense": (0.0, 1.0, 1.0), "most": (0.3, 0.8, 0.4),
    "other": (0.2, 1.0, 0.9),
}  # fmt: skip
WIDTHS, SEEDS = (16, 64, 256, 1024), (0, 1, 2)


def trial(name, width, seed, **changes):
    """loss = flops^-0.4 * exp(0.6 omega - 0.8 (psi - 1)), with a factor for each seed."""
    omega, psi, nu = MEASURES[name]
    flops = round(width ** (1 + nu))
    loss = 30 * flops**-0.4 * math.exp(0.6 * omega - 0.8 * (psi - 1) + 0.02 * (seed - 1))
    costs = {"params": 1, "flops": flops, "seconds": flops / 1e6}
    made = Trial(name, width, seed, loss, **costs, omega=omega, psi=psi, nu=nu, family={})
    return replace(made, **changes)


def synthetic():
    return Search(tuple(trial(*key) for key in product(MEASURES, WIDTHS, SEEDS)))


def of_equal_costs():
    """All structures cost the same at a width, so that no bad one is the only one of its cost."""
    rows = []
    for row in synthetic().rows:
        flops = round(row.width**1.5)
        rows.append(replace(row, flops=flops, loss=row.loss * (flops / row.flops) ** -0.4))
    return Search(tuple(rows))


def holds(estimate, value):
    return estimate.value == pytest.approx(value, rel=1e-3) and (
        estimate.low - 1e-9 <= value <= estimate.high + 1e-9
    )


@pytest.mark.parametrize("cost", ["flops", "seconds"])
def test_effects_are_those_that_made_the_losses(cost):
    effects = synthetic().effects(cost)
    expected = {"omega": 0.3, "psi": -0.4, "nu": 0.0}
    assert {name: math.log(found.value) for name, found in effects.items()} == pytest.approx(
        expected, abs=1e-6
    )
    assert all(found.low <= found.value <= found.high for found in effects.values())


def test_the_frontier_is_the_law_of_the_best_structures():
    frontier = of_equal_costs().frontier()
    assert {name for name, *_ in frontier.points} <= {"best", "dense"}
    assert frontier.b.value == pytest.approx(0.4, rel=1e-3)
    assert frontier.c.value == pytest.approx(0, abs=1e-6)
    assert holds(frontier.a, 30)
    assert frontier.loss(1e4) == pytest.approx(30 * 1e4**-0.4, rel=1e-3)
    assert frontier.b.low < frontier.b.high


def test_a_floor_is_found():
    rows = [
        replace(row, loss=0.02 + row.loss) for row in synthetic().rows if row.structure == "best"
    ]
    frontier = Search(tuple(rows)).frontier()
    assert frontier.c.value == pytest.approx(0.02, rel=0.02)
    assert frontier.b.value == pytest.approx(0.4, rel=0.02)


def test_standings_compare_at_equal_cost():
    found = synthetic()
    standings = found.standings()
    assert {standings[0].structure, standings[1].structure} == {"best", "dense"}
    assert standings[-1].structure == "both"
    ratios = {each.structure: each.ratio.value for each in standings}
    assert ratios["both"] / ratios["shared"] == pytest.approx(math.exp(0.4), rel=0.02)
    assert found.best() == standings[0].structure
    shown = str(found.table()).splitlines()
    assert "loss at equal flops" in shown[0]
    assert len(shown) == 2 + len(MEASURES)


def test_a_structure_that_diverges_is_counted_and_comes_last():
    lost = {("best", width, seed) for width in WIDTHS for seed in SEEDS} | {("dense", 1024, 1)}
    rows = [
        replace(row, loss=None) if (row.structure, row.width, row.seed) in lost else row
        for row in synthetic().rows
    ]
    standings = Search(tuple(rows)).standings()
    assert (standings[-1].structure, standings[-1].diverged) == ("best", 12)
    assert math.isinf(standings[-1].ratio.value)
    assert next(each for each in standings if each.structure == "dense").diverged == 1
    assert "12 runs diverged" in str(Search(tuple(rows)).table())


def test_a_measure_that_all_share_has_no_effect():
    rows = [row for row in synthetic().rows if row.omega == 0]
    assert [*Search(tuple(rows)).effects()] == ["psi", "nu"]


def test_costs_are_flops_or_seconds_and_two_are_needed():
    with pytest.raises(ValueError, match="cost='money' is unknown; there are flops, seconds"):
        synthetic().standings("money")
    with pytest.raises(ValueError, match="two different costs"):
        Search((trial("best", 16, 0),)).frontier()


def test_an_interval_leaves_out_draws_of_one_cost():
    rows = [trial(name, 16, seed) for name in ("best", "dense") for seed in (0, 1)]
    frontier = Search(tuple(rows)).frontier()
    b = frontier.b
    assert [b.low, b.value, b.high] == pytest.approx([0.4, 0.4, 0.4], rel=1e-3)


def test_one_seed_gives_no_interval_and_says_so():
    found = Search(tuple(trial(name, width, 0) for name, width in product(MEASURES, WIDTHS)))
    frontier, effects, shown = found.frontier(), found.effects().values(), str(found)
    ratios = [standing.ratio for standing in found.standings()]
    for each in (frontier.a, frontier.b, frontier.c, *effects, *ratios):
        assert not math.isnan(each.value)
        assert math.isnan(each.low)
        assert math.isnan(each.high)
    assert "one seed gives no intervals" in shown
    assert " to " not in shown
    assert "one seed" not in str(synthetic())


def test_an_effect_of_structures_that_are_nearly_alike_is_finite():
    rows = [
        replace(trial("best", width, seed), structure=name, omega=omega, loss=loss)
        for name, omega, loss in (("one", 0.0, 1.0), ("other", 1e-4, 2.0), ("third", 2e-4, 4.0))
        for width, seed in product(WIDTHS, SEEDS)
    ]
    found = Search(tuple(rows)).effects()["omega"]
    assert math.isfinite(found.value)
    assert found.value > 1e100


def test_the_plot_has_a_line_for_each_structure_and_the_frontier(tmp_path):
    pytest.importorskip("matplotlib")
    found = of_equal_costs()
    lines = found.plot(tmp_path / "search.png").axes[0].lines
    assert len(lines) == len(MEASURES) + 1
    assert lines[-1].get_label().startswith("frontier: 30 x^-0.40")
    assert lines[0].get_ydata().tolist() == pytest.approx(
        [row.loss for row in found.rows if (row.structure, row.seed) == ("best", 1)]
    )
    assert (tmp_path / "search.png").stat().st_size > 1000


def test_where_the_cheapest_run_has_the_lowest_loss_the_rest_is_shown_without_a_frontier():
    pytest.importorskip("matplotlib")
    rows = [replace(row, loss=float(row.flops), seconds=row.loss) for row in synthetic().rows]
    found = Search(tuple(rows))
    with pytest.raises(ValueError, match="two different costs"):
        found.frontier()
    assert "no frontier: one run has the fewest FLOPs and the lowest loss" in str(found)
    assert len(found.plot().axes[0].lines) == len(MEASURES)
    assert len(found.plot(cost="seconds").axes[0].lines) == len(MEASURES) + 1
