"""allocate: the cheap search against solving every candidate, and the best of all choices."""

from itertools import product
from math import sqrt

import pytest
import torch
from torch import Tensor

from structlin import BTT, TT, LowRank, Monarch, Split, Structure, project, relative_error
from structlin._projection import budget
from structlin._projection.budget import allocate

SHAPES = (24, 24), (48, 24), (24, 48)


def decaying(rows: int, columns: int, power: float, generator: torch.Generator) -> Tensor:
    """A random matrix whose singular values fall as 1 / k^power."""
    k = min(rows, columns)
    left, right = (
        torch.linalg.qr(torch.randn(n, k, generator=generator)).Q for n in (rows, columns)
    )
    return (left / torch.arange(1, k + 1) ** power) @ right.mT


def problem(seed: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and covariances of spectra between flat and steep."""
    generator = torch.Generator().manual_seed(seed)
    powers = 2 * torch.rand(2, len(SHAPES), generator=generator)
    weights = [
        decaying(*shape, p.item(), generator) for shape, p in zip(SHAPES, powers[0], strict=True)
    ]
    roots = [
        decaying(n, n, p.item(), generator).double()
        for (_, n), p in zip(SHAPES, powers[1], strict=True)
    ]
    return weights, [root @ root.mT for root in roots]


def total(choices: list[budget.Choice]) -> float:
    return sqrt(sum(choice.error**2 for choice in choices))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("family", "factor"),
    [
        (BTT(), 1.1),
        (Monarch(), 1.1),
        (Split(parts=2, of=BTT()), 1.1),
        (LowRank(rank=1), 1),
        (TT(rank=1), 1.25),
    ],
    ids=str,
)
def test_the_error_is_near_that_of_solving_every_candidate(family, factor, seed, monkeypatch):
    weights, covariances = problem(seed)
    cheap = allocate(weights, [family] * 3, 0.5, covariances)
    monkeypatch.setattr(
        budget, "project", lambda w, s, covariance, sweeps=1: project(w, s, covariance=covariance)
    )
    assert total(cheap) <= factor * (1 + 1e-9) * total(
        allocate(weights, [family] * 3, 0.5, covariances)
    )


@pytest.mark.parametrize("seed", range(2))
def test_the_error_is_within_a_tenth_of_that_of_the_best_of_all_choices(seed):
    weights, covariances = problem(seed)
    found = allocate(weights, [BTT()] * 3, 0.5, covariances)
    limit, each = sum(weight.numel() for weight in weights) / 2, []
    for weight, c in zip(weights, covariances, strict=True):
        # 4 is the largest that 24 outputs can have
        families = [BTT(rank=rank) for rank in (1, 2, 3, 4)]
        structures = [family.structure(*reversed(weight.shape)) for family in families]
        errors = [
            relative_error(weight, s, project(weight, s, covariance=c), covariance=c)
            for s in structures
        ]
        each.append(
            [(structure.params, error) for structure, error in zip(structures, errors, strict=True)]
        )
    sums = [
        tuple(sum(row) for row in zip(*((cost, e**2) for cost, e in choice), strict=True))
        for choice in product(*each)
    ]
    best = min(error for cost, error in sums if cost <= limit)
    assert sqrt(best) <= total(found) * (1 + 1e-9) <= 1.1 * sqrt(best)


def test_the_errors_returned_are_those_of_the_full_solver_and_the_search_runs_it_once_a_layer(
    monkeypatch,
):
    weights, covariances = problem(0)
    solved = []

    def counted(weight: Tensor, structure: Structure, **options: object) -> list[Tensor]:
        if options.get("sweeps") != 1:
            solved.append(structure)
        return project(weight, structure, **options)

    monkeypatch.setattr(budget, "project", counted)
    choices = allocate(weights, [BTT()] * 3, 0.6, covariances)
    assert solved == [choice.size.structure for choice in choices]
    for weight, covariance, choice in zip(weights, covariances, choices, strict=True):
        cores = project(weight, choice.size.structure, covariance=covariance)
        assert all(torch.equal(a, b) for a, b in zip(choice.cores, cores, strict=True))
        assert choice.error == relative_error(
            weight, choice.size.structure, cores, covariance=covariance
        )


def test_a_size_that_is_no_better_is_passed_over(monkeypatch):
    errors = {1: 0.5, 2: 0.6, 3: 0.5, 4: 0.1, 6: 0.05}
    monkeypatch.setattr(
        budget, "project", lambda weight, structure, **options: structure.sizes["r"]
    )
    monkeypatch.setattr(
        budget, "relative_error", lambda weight, structure, rank, **options: errors.get(rank, 0.05)
    )
    (choice,) = allocate([torch.ones(16, 16)], [LowRank(rank=1)], 0.6, [None])  # rank 4 takes half
    assert choice.size.family == LowRank(rank=4)


def test_a_size_that_takes_the_whole_budget_is_within_it():
    (choice,) = allocate([torch.eye(16)], [LowRank(rank=1)], 0.5, [None])
    assert choice.size.family == LowRank(rank=4)  # 4 * (16 + 16) is half of 16 * 16
