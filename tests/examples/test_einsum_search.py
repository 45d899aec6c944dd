"""examples/einsum_search.py: the families are points of its space, and the exponents are those of
matrices."""

import math

import einsum_search
import pytest
import torch
from einsum_search import Einsum, sample

from structlin import BTT, TT, Dense, Kronecker, LowRank, Monarch, StructuredLinear

HALVES = {"alpha": 0.5, "epsilon": 0.5}
POINTS = [
    (Einsum(alpha=1, delta=1), Dense(), 40, 24),
    (Einsum(beta=1, epsilon=1), Dense(), 40, 24),
    (Einsum(alpha=1, epsilon=1, rho=0.5), LowRank(rank=8), 64, 256),
    (Einsum(**HALVES, beta=0.5, delta=0.5), Kronecker(), 96, 60),
    (Einsum(**HALVES, beta=0.5, delta=0.5, rho=0.25), TT(rank=4), 256, 256),
    (Einsum(**HALVES, gamma=0.5, phi=0.5), BTT(rank=1), 96, 60),
    (Einsum(**HALVES, gamma=0.5, phi=0.5, rho=0.25), BTT(rank=4), 256, 1024),
    (Einsum(alpha=0.75, gamma=0.25, epsilon=0.75, phi=0.25, rho=0.5), Monarch(blocks=4), 256, 256),
]


@pytest.mark.parametrize(("point", "named", "wide", "high"), POINTS)
def test_a_family_is_a_point_with_cores_of_the_same_sizes(point, named, wide, high):
    ours, theirs = point.structure(wide, high), named.structure(wide, high)
    assert (ours.in_features, ours.out_features) == (theirs.in_features, theirs.out_features)
    assert (ours.params, ours.flops) == (theirs.params, theirs.flops)
    for attribute in ("repeat", "fan_in"):
        assert [getattr(core, attribute) for core in ours.cores] == [
            getattr(core, attribute) for core in theirs.cores
        ]


def test_a_point_is_the_einsum_that_its_docstring_shows():
    point = Einsum(alpha=0.3, beta=0.3, gamma=0.4, delta=0.4, epsilon=0.3, phi=0.3, rho=0.2)
    layer = StructuredLinear(64, 60, point, bias=False, dtype=torch.float64)
    a, b = (
        core.reshape([layer.structure.sizes[axis] for axis in made.axes])
        for core, made in zip(layer.cores, layer.structure.cores, strict=True)
    )
    first, second = ("".join(core.axes) for core in layer.structure.cores)
    matrix = torch.einsum(f"{first},{second}->fedgba", a, b).reshape(60, 64)
    torch.testing.assert_close(layer.to_dense(), matrix)


@pytest.mark.parametrize("point", sample(64, 12, seed=5), ids=lambda point: point.label)
def test_the_exponents_are_what_a_wide_matrix_has(point):
    width = 2**20
    structure = point.structure(width, width)
    multiplications = structure.flops / 2
    assert math.log(multiplications / structure.params, width) == pytest.approx(
        point.omega, abs=0.1
    )
    assert math.log(multiplications / width, width) == pytest.approx(point.nu, abs=0.1)


@pytest.mark.parametrize("point", sample(64, 12, seed=5), ids=lambda point: point.label)
def test_the_rank_is_that_of_random_cores(point):
    layer = StructuredLinear(64, 64, point, bias=False, dtype=torch.float64)
    for core in layer.cores:
        torch.nn.init.normal_(core)
    rank = int(torch.linalg.matrix_rank(layer.to_dense()))
    assert math.log(rank, 64) == pytest.approx(point.psi, abs=0.2)


def test_what_is_drawn_costs_less_than_dense_and_differs():
    points = sample(64, 20)
    assert len(set(points)) == 20
    assert all(point.structure(64, 64).flops < 2 * 64**2 for point in points)
    assert points == sample(64, 20)


@pytest.mark.parametrize(
    ("exponents", "message"),
    [
        ({"alpha": 1}, "delta=0.0 is 0: the exponents of y must sum to 1"),
        ({"alpha": 1.5, "delta": 1}, "alpha=1.5 must be a number from 0 to 1"),
        ({"alpha": 1, "delta": 1, "rho": 0.5}, "rho=0.5 is over the useful bound .* = 0"),
    ],
)
def test_exponents_out_of_range_are_named(exponents, message):
    with pytest.raises(ValueError, match=message):
        Einsum(**exponents)


def test_a_width_without_factors_is_refused():
    with pytest.raises(ValueError, match=r"width 13 has no factors within a factor of 2"):
        Einsum(alpha=0.34, beta=0.33, gamma=0.33, delta=1).structure(13, 16)


def test_the_program_trains_what_it_draws(capsys):
    einsum_search.main(["--smoke"])
    shown = capsys.readouterr().out
    assert "Dense()" in shown
    assert shown.count("alpha") + shown.count("beta") >= 2
