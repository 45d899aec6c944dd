"""Projection against textbook bounds computed with numpy, in float64, and against what no
approximation may do."""

from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from structlin import (
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    Split,
    Structure,
    project,
    to_dense,
)
from structlin._projection import alternating
from structlin._projection.alternating import alternate
from structlin._projection.solve import relative_error
from tests.catalogue import CASES, IDS, SMALL, SMALL_IDS, einsum_matrix, random_cores, structures

every_small_case = pytest.mark.parametrize("case", SMALL, ids=SMALL_IDS)
# Every family, and structures that no family gives: shared blocks of two cores, BLAST, three cores
# on one axis.
SOME = [
    Dense().structure(7, 5),
    LowRank(rank=3).structure(12, 15),
    BlockDiagonal(blocks=3).structure(12, 15),
    Kronecker().structure(20, 12),
    TT(rank=2).structure(12, 20),
    TT(rank=2, cores=3).structure(24, 18),
    Monarch(blocks=4).structure(16, 16),
    BTT(rank=2).structure(20, 12),
    BTT(rank=2, cores=3).structure(24, 18),
    Structure("b i -> b o", "o i", b=3, i=4, o=5),
    Structure("b i -> b o", "r i", "b o r", b=3, i=4, o=4, r=2),
    Structure("b i -> b o", "b r i", "o r", b=3, i=4, o=4, r=2),
    Structure("j q -> i p", "j r q", "r i j", "i p r", j=2, q=4, i=2, p=5, r=3),
    Structure("a -> b c d", "a b", "c b", "a d", a=12, b=2, c=3, d=3),
]
some = pytest.mark.parametrize("structure", SOME, ids=str)


def gaussian(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlated(n: int, rank: int | None = None) -> Tensor:
    """A covariance in a random basis whose eigenvalues fall as 1 / k, `rank` of them not zero."""
    basis = torch.linalg.qr(gaussian(n, n, seed=4)).Q
    eigenvalues = 1 / torch.arange(1, n + 1, dtype=torch.float64)
    eigenvalues[n if rank is None else rank :] = 0
    return (basis * eigenvalues) @ basis.T


METRICS = ["diagonal", "matrix", "singular"]


def output_metric(n: int, kind: str | None) -> Tensor | None:
    """Weights of outputs: "diagonal" alone, as a "matrix", or of half the rank ("singular")."""
    if kind == "diagonal":
        return gaussian(n, seed=5).square()
    return correlated(n, n // 2 if kind == "singular" else None) if kind in METRICS else None


def squared_error(
    w: Tensor,
    structure: Structure,
    cores: list[Tensor],
    c: Tensor | None = None,
    g: Tensor | None = None,
) -> float:
    error = (w - einsum_matrix(structure, cores)[: w.shape[0], : w.shape[1]]).numpy()
    error = root_of(g, w.shape[0]) @ error
    return float(np.trace(error @ (np.eye(w.shape[1]) if c is None else c.numpy()) @ error.T))


def root_of(metric: Tensor | None, n: int) -> np.ndarray:
    """The symmetric root of a matrix or of a diagonal; None: of the identity."""
    if metric is None:
        return np.eye(n)
    eigenvalues, vectors = np.linalg.eigh((metric.diag() if metric.ndim == 1 else metric).numpy())
    return (vectors * np.sqrt(eigenvalues.clip(0))) @ vectors.T


def tail(matrix: Tensor | np.ndarray, rank: int) -> float:
    """Squares of the singular values that a matrix of this rank cannot have: Eckart & Young."""
    return float((np.linalg.svd(np.asarray(matrix), compute_uv=False)[rank:] ** 2).sum())


# ---- one textbook oracle for each closed form ----------------------------------------------------


def test_dense_and_the_blocks_of_block_diagonal_are_copied():
    w = gaussian(15, 12)
    (dense,) = project(w, Dense())
    assert_close(dense[0], w)
    (blocks,) = project(w, BlockDiagonal(blocks=3))
    for b in range(3):
        assert_close(blocks[b], w[5 * b : 5 * b + 5, 4 * b : 4 * b + 4])


def test_with_a_covariance_block_diagonal_is_the_regression_on_the_inputs_of_each_block():
    w, c = gaussian(15, 12), correlated(12)
    (blocks,) = project(w, BlockDiagonal(blocks=3), covariance=c)
    for b in range(3):
        columns = slice(4 * b, 4 * b + 4)
        expected = (w @ c)[5 * b : 5 * b + 5, columns].numpy() @ np.linalg.inv(
            c[columns, columns].numpy()
        )
        assert_close(blocks[b], torch.from_numpy(expected))


@pytest.mark.parametrize(("family", "rank"), [(Kronecker(), 1), (TT(rank=3), 3)], ids=str)
def test_kronecker_and_tt_are_the_best_matrices_of_their_rank_of_van_loans_rearrangement(
    family, rank
):
    w = gaussian(12, 20)  # factors 3 x 4 of the outputs and 4 x 5 of the inputs
    blocks = [w[4 * a : 4 * a + 4, 5 * g : 5 * g + 5] for a in range(3) for g in range(4)]
    rearranged = np.array([block.numpy().ravel() for block in blocks])
    cores = project(w, family)
    if rank == 1:
        assert_close(einsum_matrix(family.structure(20, 12), cores), torch.kron(*cores[::-1])[0])
    assert squared_error(w, family.structure(20, 12), cores) == pytest.approx(
        tail(rearranged, rank), rel=1e-9
    )


@pytest.mark.parametrize(("rows", "columns"), [(12, 20), (101, 97)])
def test_btt_reaches_the_eckart_young_bound_in_every_block_also_when_it_is_padded(rows, columns):
    w, family = gaussian(rows, columns), BTT(rank=2)
    structure = family.structure(columns, rows)
    height, width = structure.sizes["i1"], structure.sizes["j2"]
    blocks = [
        w[i : i + height, j : j + width]
        for i in range(0, rows, height)
        for j in range(0, columns, width)
    ]
    bound = sum(tail(block, 2) for block in blocks)
    assert squared_error(w, structure, project(w, family)) == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize(("rows", "columns", "blocks"), [(24, 16, 2), (24, 24, 2), (16, 48, 4)])
def test_monarch_reaches_the_eckart_young_bound_in_every_block(rows, columns, blocks):
    w, family = gaussian(rows, columns), Monarch(blocks=blocks)
    rank = min(w.shape) // blocks // blocks  # q / l of the paper
    width = w.shape[1] // blocks
    bound = sum(
        tail(w[l::blocks, k * width : (k + 1) * width], rank)
        for l in range(blocks)
        for k in range(blocks)
    )
    structure = family.structure(columns, rows)
    assert squared_error(w, structure, project(w, family)) == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize("sweeps", [0, 100])
def test_tt_of_three_cores_is_within_the_quasi_optimality_bound_of_the_tt_svd(sweeps):
    w, family = gaussian(24, 60), TT(rank=3, cores=3)
    structure = family.structure(60, 24)
    i, j = ([structure.sizes[f"{axis}{t}"] for t in (1, 2, 3)] for axis in "ij")
    tensor = w.numpy().reshape(*i, *j).transpose(0, 3, 1, 4, 2, 5)  # i1 j1 i2 j2 i3 j3
    unfoldings = [tensor.reshape(i[0] * j[0], -1), tensor.reshape(-1, i[2] * j[2])]
    bounds = [tail(unfolding, 3) for unfolding in unfoldings]
    error = squared_error(w, structure, project(w, family, sweeps=sweeps))
    assert max(bounds) <= error <= sum(bounds)  # sum <= (cores - 1) * (least error)


@pytest.mark.parametrize(("rows", "columns", "rank"), [(24, 60, 2), (8, 216, 1)])
def test_three_core_btt_starts_from_its_recursive_cut_and_ends_below(rows, columns, rank):
    w, family = gaussian(rows, columns), BTT(rank=rank, cores=3)
    structure = family.structure(columns, rows)
    s, v = (
        structure.sizes,
        w.numpy().reshape([structure.sizes[a] for a in ("i3", "i2", "i1", "j1", "j2", "j3")]),
    )
    bound = 0.0
    for i3 in range(s["i3"]):
        for j1 in range(s["j1"]):
            left = np.zeros((s["i2"], s["i1"], s["j2"], rank))
            for j2 in range(s["j2"]):
                u, values, _ = np.linalg.svd(
                    v[i3, :, :, j1, j2].reshape(-1, s["j3"]), full_matrices=False
                )
                bound += (values[rank:] ** 2).sum()
                left[:, :, j2] = (u * values)[:, :rank].reshape(s["i2"], s["i1"], rank)
            bound += sum(tail(left[i2].reshape(s["i1"], -1), rank) for i2 in range(s["i2"]))
    assert squared_error(w, structure, project(w, family)) < bound
    assert squared_error(w, structure, project(w, family, sweeps=0)) == pytest.approx(
        bound, rel=1e-9
    )


def test_a_structure_of_ones_own_gets_the_closed_form_of_its_shape():
    w = gaussian(12, 20)
    own = Structure("p q -> u v", "p k u q", "u p v k", p=4, q=5, u=3, v=4, k=2)
    assert_close(
        to_dense(own, project(w, own)),
        to_dense(BTT(rank=2).structure(20, 12), project(w, BTT(rank=2))),
    )


# ---- representable targets -----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_representable_target_is_recovered(case):
    family, in_features, out_features = case
    structure = family.structure(in_features, out_features)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        w = to_dense(structure, random_cores(structure))[:out_features, :in_features].to(dtype)
        assert relative_error(w, family, project(w, family)) < tolerance


@every_small_case
@pytest.mark.parametrize("given", ["all inputs", "few inputs", "diagonal", "matrix"])
def test_a_representable_target_is_recovered_with_any_metric(case, given):
    family, in_features, out_features = case
    structure = family.structure(in_features, out_features)
    w = einsum_matrix(structure, random_cores(structure))[:out_features, :in_features]
    c, g, tolerance = None, output_metric(out_features, given), 1e-2
    if g is None:
        c, tolerance = correlated(in_features, 5 if given == "few inputs" else None), 1e-6
    cores = project(w, family, covariance=c, output=g)
    assert relative_error(w, family, cores, covariance=c) < tolerance


@given(structure=structures(64))
def test_a_representable_target_is_recovered_for_every_structure(structure):
    w = einsum_matrix(structure, random_cores(structure))
    assert relative_error(w, structure, project(w, structure)) < 1e-10


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_a_target_of_lower_rank_or_zero_gives_finite_cores_that_can_still_learn(constant):
    w = torch.full((12, 20), constant, dtype=torch.float64)
    for family in (LowRank(rank=3), BTT(rank=2), TT(rank=2), TT(rank=2, cores=3)):
        structure = family.structure(20, 12)
        cores = [core.requires_grad_() for core in project(w, family)]
        assert relative_error(w, family, cores) < 1e-10
        (to_dense(structure, cores) - gaussian(12, 20)).square().sum().backward()
        assert any(core.grad.norm() > 1e-3 for core in cores)


def test_a_rank_that_the_matrix_cannot_have_is_no_harm():
    structure, w = Structure("i -> o", "r i", "o r", i=4, o=5, r=9), gaussian(5, 4)
    first, last = project(w, structure)
    assert relative_error(w, structure, [first, last]) < 1e-12
    assert (first[0].norm(dim=1) > 0.1).all()  # so that all of `last` has a gradient


def test_structures_that_are_no_chain_are_recovered_from_random_starts(monkeypatch):
    structure = Structure("j q -> i p", "j r q", "r i j", "i p r", j=4, q=8, i=4, p=8, r=3)  # BLAST
    w = einsum_matrix(structure, random_cores(structure))
    assert relative_error(w, structure, project(w, structure)) < 1e-10
    monkeypatch.setattr(alternating, "RESTARTS", 0)
    assert relative_error(w, structure, project(w, structure)) > 1e-3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_what_is_too_large_for_float64_is_exact_in_float32_and_float64_weights_are_never_rounded(
    dtype, tolerance, monkeypatch
):
    monkeypatch.setattr(alternating, "MAX_FLOAT64_SIZE", 0)
    for family in (BTT(rank=2), TT(rank=2, cores=3), Kronecker()):
        structure, c = family.structure(24, 60), correlated(24).to(dtype)
        w = to_dense(structure, random_cores(structure)).to(dtype)
        assert relative_error(w, family, project(w, family, covariance=c), covariance=c) < tolerance


# ---- optimality ----------------------------------------------------------------------------------


@some
@pytest.mark.parametrize("kind", ["plain", "inputs", *METRICS])
def test_no_perturbation_of_the_cores_is_better_and_no_projection_that_knows_less(structure, kind):
    w = gaussian(structure.out_features, structure.in_features)
    c = None if kind == "plain" else correlated(structure.in_features)
    g = output_metric(structure.out_features, kind)
    cores = project(w, structure, covariance=c, output=g)
    least = squared_error(w, structure, cores, c, g)
    slack = 1e-9 if g is None else 1e-2
    for known in (None, c):
        other = squared_error(w, structure, project(w, structure, covariance=known), c, g)
        assert least <= (1 + slack) * other + 1e-9
    for seed in range(20):
        noise = [gaussian(*core.shape, seed=10 + seed) * core.std(correction=0) for core in cores]
        for size in (0.5, 0.1, 0.05):
            moved = [core + size * direction for core, direction in zip(cores, noise, strict=True)]
            assert least <= squared_error(w, structure, moved, c, g)


@every_small_case
def test_on_white_inputs_the_projection_is_the_plain_one(case):
    family, in_features, out_features = case
    w, structure = gaussian(out_features, in_features), family.structure(in_features, out_features)
    white, plain = (
        squared_error(w, structure, project(w, family, covariance=c))
        for c in (3 * torch.eye(in_features), None)
    )
    assert white == pytest.approx(plain, rel=1e-2 if len(structure.cores) > 2 else 1e-5, abs=1e-9)


def test_two_cores_on_correlated_inputs_are_no_worse_than_block_by_block_descent():
    w, c, family = gaussian(12, 20), correlated(20), BTT(rank=1)
    structure = family.structure(20, 12)
    height, width = structure.sizes["i1"], structure.sizes["j2"]
    b, cov = np.zeros((12, 20)), c.numpy()
    for _ in range(200):  # the exact optimum of one block after the other
        for j in range(0, 20, width):
            columns = slice(j, j + width)
            root = np.linalg.cholesky(cov[columns, columns])
            b[:, columns] = 0
            goal = np.linalg.solve(root, ((w.numpy() - b) @ cov[:, columns]).T).T
            for i in range(0, 12, height):
                u, values, vt = np.linalg.svd(goal[i : i + height], full_matrices=False)
                b[i : i + height, columns] = np.linalg.solve(
                    root.T, (values[0] * np.outer(u[:, 0], vt[0])).T
                ).T
    reference = np.trace((w.numpy() - b) @ cov @ (w.numpy() - b).T)
    assert squared_error(w, structure, project(w, family, covariance=c), c) < 1.05 * reference


@pytest.mark.parametrize(
    ("family", "rows", "columns"),
    [
        (BTT(rank=2), 12, 20),
        (BTT(rank=2), 29, 31),  # padded
        (Monarch(blocks=4), 16, 16),
        (Split(split=2, of=BTT()), 24, 20),
    ],
    ids=str,
)
def test_block_by_block_ends_as_low_as_core_by_core(family, rows, columns, monkeypatch):
    w, c = gaussian(rows, columns), correlated(columns)
    structure = family.structure(columns, rows)
    assert alternating._is_blockwise(structure)
    found = squared_error(w, structure, project(w, family, covariance=c), c)
    monkeypatch.setattr(alternating, "_is_blockwise", lambda structure: False)
    assert found <= 1.02 * squared_error(w, structure, project(w, family, covariance=c), c)


@pytest.mark.parametrize(
    ("width", "dtype"), [(362, torch.float64), (363, torch.float32)], ids=["2**17", "more"]
)
def test_matrices_up_to_a_size_are_solved_in_float64(width, dtype, monkeypatch):
    solved, structure = [], LowRank(rank=1).structure(width, width)

    def note(structure, cores, x, y, limit, root):
        solved.append((x.dtype, y.dtype))
        return iter([(cores, 0.0)])

    monkeypatch.setattr(alternating, "alternate", note)
    start = [torch.ones(core.shape, dtype=torch.float64) for core in structure.cores]
    weight = torch.eye(width, dtype=torch.float64)
    alternating.search(structure, [start], weight, None, torch.float32, 1)
    assert solved == [(dtype, dtype)]


@pytest.mark.parametrize(("rows", "sweeps"), [(36, False), (37, True)])
def test_only_what_the_closed_form_does_not_solve_is_swept(rows, sweeps, monkeypatch):
    swept = []

    def note(structure, starts, *arguments):
        swept.append(structure)
        return starts[0]

    monkeypatch.setattr("structlin._projection.solve.search", note)
    structure = Kronecker().structure(16, rows)
    assert (structure.out_features > rows) == sweeps  # 37 rows are padded, which leaves some free
    project(gaussian(rows, 16), structure)
    assert swept == [structure] * sweeps


def test_products_with_the_zeros_of_triangular_inputs_are_left_out():
    structure, w, x = BTT().structure(16, 16), gaussian(16, 16), gaussian(16, 16)
    start = [torch.ones(core.shape, dtype=torch.float64) for core in structure.cores]

    def count(inputs):
        with FlopCounterMode(display=False) as counter:
            steps = alternate(structure, start, inputs, inputs @ w.T, 1)
            assert len(list(steps)) == 2
        return counter.get_total_flops()

    assert count(x.triu()) < count(x)


@pytest.mark.parametrize(
    "family", [LowRank(rank=3), Kronecker(), TT(rank=2, cores=3), BTT(rank=2, cores=3)], ids=str
)
def test_on_white_inputs_one_step_solves_the_least_squares_problem_of_a_core(family, monkeypatch):
    monkeypatch.setattr(alternating, "MAX_STEPS", 1)
    structure = family.structure(24, 18)
    w, first, *rest = gaussian(18, 24), *random_cores(structure)
    unit = torch.eye(first.numel(), dtype=torch.float64).reshape(-1, *first.shape)
    design = torch.stack(
        [einsum_matrix(structure, [core, *rest]).flatten() for core in unit], dim=1
    ).numpy()
    _, residual = alternating._least_squares(
        structure, [first, *rest], torch.eye(24, dtype=torch.float64), w.T, None
    )
    expected = (
        w.flatten().numpy() - design @ np.linalg.lstsq(design, w.flatten().numpy(), rcond=None)[0]
    )
    assert residual.norm().item() == pytest.approx(np.linalg.norm(expected), rel=1e-6)


def test_alternating_least_squares_stops_where_rounding_is_all_that_is_left():
    for family in (BTT(rank=2), TT(rank=2, cores=3), Kronecker()):
        structure = family.structure(24, 18)
        cores = random_cores(structure, torch.float32)
        x, y = torch.eye(24), to_dense(structure, cores).T
        found = [core + 1e-4 * torch.randn_like(core) for core in cores]
        for _ in range(10):
            course = list(alternate(structure, found, x, y))
            errors = [error for _, error in course]
            assert errors == sorted(errors, reverse=True)
            assert errors[-1] < 1e-6
            found = course[-1][0]


def test_cores_that_the_matrix_does_not_determine_stay_small():
    structure = Structure(
        "a b c -> a b d f", "a b c d", "a b c e f", "a b d e f", a=1, b=3, c=1, d=1, e=2, f=1
    )  # e is summed, but needless
    w, x = gaussian(3, 3), torch.linalg.cholesky(correlated(3)).T
    for seed in range(5):
        start = [gaussian(*core.shape, seed=seed) for core in structure.cores]
        *_, (cores, _) = alternate(structure, start, x, x @ w.T)
        assert max(core.abs().max() for core in cores) < 100


@some
@pytest.mark.parametrize("seed", [0, 1])
def test_alternating_least_squares_never_increases_the_error(structure, seed):
    w = gaussian(structure.out_features, structure.in_features)
    x = torch.linalg.cholesky(correlated(structure.in_features)).T
    start = [gaussian(*core.shape, seed=seed) for core in structure.cores]
    course = list(alternate(structure, start, x, x @ w.T))
    errors = [error for _, error in course]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) > 1
    for cores, error in course:
        expected = torch.linalg.matrix_norm(
            x @ (w - einsum_matrix(structure, cores)).T
        ) / torch.linalg.matrix_norm(x @ w.T)
        assert error == pytest.approx(expected.item(), rel=1e-6, abs=1e-9)


def test_no_sweep_gives_the_closed_form_and_a_negative_number_of_them_is_refused():
    w, c, family = gaussian(12, 20), correlated(20), BTT()
    errors = [
        relative_error(w, family, project(w, family, covariance=c, sweeps=n), covariance=c)
        for n in (0, 1, 9)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1.01 * errors[1] > errors[2]
    with pytest.raises(ValueError, match="sweeps=-1 must be at least 0"):
        project(w, family, sweeps=-1)


# ---- two sides: what errors of the outputs weigh -------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "kind"), [(None, None), (12, None), (6, None), *((12, kind) for kind in METRICS)]
)  # of the covariance; 6: a singular one
@pytest.mark.parametrize("rows", [15, 12])
def test_low_rank_is_the_optimum_of_a_kronecker_factored_quadratic_loss(rows, rank, kind):
    """Eckart & Young: of ||G^1/2 (W - B) C^1/2||^2 remain the singular values of G^1/2 W C^1/2."""
    w, family = gaussian(rows, 27 - rows), LowRank(rank=4)
    c, g = rank and correlated(27 - rows, rank), output_metric(rows, kind)
    cores = project(w, family, covariance=c, output=g)
    least = tail(root_of(g, rows) @ w.numpy() @ root_of(c, 27 - rows), 4)
    structure = family.structure(27 - rows, rows)
    assert squared_error(w, structure, cores, c, g) == pytest.approx(least, rel=1e-6, abs=1e-9)
    assert max(core.abs().max() for core in cores) < (1e4 if kind else 100)


@pytest.mark.parametrize("kind", ["diagonal", "matrix"])
def test_block_diagonal_is_the_least_squares_solution_of_that_loss(kind):
    w, c, g = gaussian(15, 12), correlated(12), output_metric(15, kind)
    (blocks,) = project(w, BlockDiagonal(blocks=3), covariance=c, output=g)
    # vec(E)^T (G kron C) vec(E) over the entries that the blocks have
    mask = np.kron(np.eye(3), np.ones((5, 4))).ravel().astype(bool)
    root = np.kron(root_of(g, 15), root_of(c, 12))
    best, *_ = np.linalg.lstsq(root[:, mask], root @ w.numpy().ravel(), rcond=None)
    expected = np.zeros(15 * 12)
    expected[mask] = best
    least = np.square(root @ (w.numpy().ravel() - expected)).sum()
    found = squared_error(w, BlockDiagonal(blocks=3).structure(12, 15), [blocks], c, g)
    assert found == pytest.approx(least, rel=1e-2)


@some
def test_a_diagonal_is_the_matrix_that_it_stands_for_and_the_identity_changes_nothing(structure):
    w, g = (
        gaussian(structure.out_features, structure.in_features),
        output_metric(structure.out_features, "diagonal"),
    )
    as_vector, as_matrix = (
        squared_error(w, structure, project(w, structure, output=given), g=g)
        for given in (g, torch.diag(g))
    )
    assert as_vector == pytest.approx(as_matrix, rel=1e-2, abs=1e-9)
    ones = torch.full((structure.out_features,), 3.0)
    plain, weighed = (
        squared_error(w, structure, project(w, structure, output=given)) for given in (None, ones)
    )
    assert weighed == pytest.approx(plain, rel=2e-2, abs=1e-9)


@pytest.mark.parametrize("family", [LowRank(rank=3), BTT(rank=2), TT(rank=2)], ids=str)
@pytest.mark.parametrize("kind", ["diagonal", "matrix"])
def test_padded_outputs_have_no_weight(family, kind):
    w, g = gaussian(13, 17), output_metric(13, kind)
    structure = family.structure(17, 13)
    cores = project(w, family, covariance=correlated(17), output=g)
    one_sided = project(w, family, covariance=correlated(17))
    two, one = (
        squared_error(w, structure, found, correlated(17), g) for found in (cores, one_sided)
    )
    assert two <= 1.01 * one
    assert relative_error(w, family, cores, covariance=correlated(17), output=g) < 1


@pytest.mark.parametrize("weights", [torch.zeros(12), torch.eye(12)[0], torch.zeros(12, 12)])
@pytest.mark.parametrize("family", [LowRank(rank=3), BTT(rank=2), Kronecker()], ids=str)
def test_outputs_of_no_weight_leave_finite_cores(family, weights):
    w = gaussian(12, 20)
    cores = project(w, family, output=weights)
    assert all(core.isfinite().all() for core in cores)
    assert relative_error(w, family, cores) < 10


# ---- padding -------------------------------------------------------------------------------------


def test_padding_is_free():
    shared = Structure("b i -> b o", "o i", b=4, i=6, o=3)
    w = torch.kron(torch.eye(4, dtype=torch.float64), gaussian(3, 6))[:10, :21]
    assert relative_error(w, shared, project(w, shared)) < 1e-10

    structure = Structure("g d -> a b", "b d", "a g", a=5, b=3, g=4, d=6)
    w = torch.kron(gaussian(5, 4), gaussian(3, 6, seed=5))[:13, :21]
    zeros = torch.zeros(15, 24, dtype=torch.float64)
    zeros[:13, :21] = w
    assert relative_error(w, structure, project(w, structure)) < 1e-10
    assert relative_error(zeros, structure, project(zeros, structure)) > 0.01


# ---- numbers, scale, determinism -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "family", [BTT(rank=2), Kronecker(), LowRank(rank=3), BTT(rank=2, cores=3)], ids=str
)
def test_cores_have_the_dtype_of_the_weight_and_are_computed_in_float32_or_better(family, dtype):
    w = gaussian(24, 60).to(dtype)
    cores = project(w, family, covariance=correlated(60).float(), output=torch.ones(24))
    assert {core.dtype for core in cores} == {dtype}
    exact = project(w.double(), family, covariance=correlated(60).float(), output=torch.ones(24))
    error, least = (
        relative_error(w.double(), family, c, covariance=correlated(60)) for c in (cores, exact)
    )
    assert error == pytest.approx(least, rel=20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_of_weight_and_covariance_changes_nothing_else(scale, monkeypatch):
    monkeypatch.setattr(alternating, "MAX_FLOAT64_SIZE", 0)
    w, c, family = gaussian(12, 20).float(), correlated(20).float(), BTT(rank=2)
    plain, scaled = (
        project(w, family, covariance=c),
        project(scale * w, family, covariance=scale * c),
    )
    plain_error, error = (
        relative_error(k * w, family, cores, covariance=c)
        for k, cores in ((1, plain), (scale, scaled))
    )
    assert error == pytest.approx(plain_error, rel=1e-3)


def test_a_covariance_that_is_symmetric_up_to_rounding_is_as_good():
    w, c, family = gaussian(12, 20), correlated(20), BTT(rank=2)
    skew = 1e-5 * gaussian(20, 20).triu(1)
    structure = family.structure(20, 12)
    rounded, exact = (
        to_dense(structure, project(w, family, covariance=k)) for k in (c + skew - skew.T, c)
    )
    assert_close(rounded, exact)


@some
def test_cores_are_balanced(structure):
    cores = project(gaussian(structure.out_features, structure.in_features), structure)
    norms = [core.norm().item() for core in cores]
    assert max(norms) < 1.01 * min(norms)


def test_projection_is_deterministic_and_leaves_its_arguments_and_the_global_generator_alone():
    structure = SOME[-1]
    w, c = gaussian(18, 12).requires_grad_(), correlated(12)
    before, copies = torch.get_rng_state(), (w.detach().clone(), c.clone())
    first = project(w, structure, covariance=c)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    for one, two in zip(first, project(w, structure, covariance=c), strict=True):
        assert torch.equal(one, two)
        assert not one.requires_grad
    assert torch.equal(w, copies[0])
    assert torch.equal(c, copies[1])


def test_the_number_of_threads_is_what_it_was(set_threads):
    set_threads(2)
    project(gaussian(12, 20), BTT(rank=2))
    assert torch.get_num_threads() == 2


def test_relative_error_is_that_of_the_matrix_or_of_the_outputs():
    w, family, x = gaussian(12, 20), BTT(), gaussian(20, 50)
    cores = project(w, family)
    b = to_dense(family.structure(20, 12), cores)
    assert relative_error(w, family, cores) == pytest.approx(((w - b).norm() / w.norm()).item())
    outputs = ((w - b) @ x).norm() / (w @ x).norm()
    assert relative_error(w, family, cores, covariance=x @ x.T / 50) == pytest.approx(
        outputs.item()
    )
    for g in (output_metric(12, "diagonal"), output_metric(12, "matrix")):
        root = torch.from_numpy(root_of(g, 12))
        expected = (root @ (w - b) @ x).norm() / (root @ w @ x).norm()
        found = relative_error(w, family, cores, covariance=x @ x.T / 50, output=g)
        assert found == pytest.approx(expected.item())
    assert relative_error(0 * w, family, project(0 * w, family)) == 0
    assert relative_error(0 * w, family, cores) == float("inf")
    assert sqrt(squared_error(w, family.structure(20, 12), cores)) == pytest.approx(
        (w - b).norm().item()
    )


# ---- errors --------------------------------------------------------------------------------------

ONES = torch.ones(6, 6)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"weight": torch.ones(6)}, ValueError, r"weight has shape \(6,\); it must be a matrix"),
        ({"weight": torch.ones(2, 6, 6)}, ValueError, r"weight has shape \(2, 6, 6\)"),
        ({"weight": torch.ones(6, 0)}, ValueError, r"weight has shape \(6, 0\)"),
        ({"weight": ONES.char()}, TypeError, r"dtype torch\.int8; it must be real floating"),
        ({"weight": ONES.cfloat()}, TypeError, r"torch\.complex64"),
        ({"weight": ONES.to("meta")}, ValueError, "it has no values"),
        ({"weight": ONES * torch.nan}, ValueError, "36 values that are not finite"),
        ({"structure": BTT(rank=9)}, ValueError, "rank=9 is over the useful bound"),
        (
            {"structure": Dense().structure(6, 4)},
            ValueError,
            "out_features=6 is larger than the structure's 4",
        ),
        ({"structure": "btt"}, TypeError, "structure='btt' must be a family"),
        (
            {"covariance": torch.eye(5)},
            ValueError,
            r"covariance has shape \(5, 5\).*\(6, 6\)",
        ),
        ({"covariance": ONES.int()}, TypeError, r"covariance has dtype torch\.int32"),
        ({"covariance": ONES.to("meta")}, ValueError, "covariance is on the meta device"),
        ({"covariance": ONES / 0}, ValueError, "covariance has 36 values that are not finite"),
        (
            {"covariance": torch.eye(6) + ONES.triu(1)},
            ValueError,
            "covariance differs from its transpose by 1; it must be symmetric",
        ),
        ({"covariance": -torch.eye(6)}, ValueError, "covariance has .* positive semi-definite"),
        (
            {"output": torch.eye(5)},
            ValueError,
            r"output has shape \(5, 5\).*\(6, 6\) or \(out_features,\) = \(6,\)",
        ),
        ({"output": torch.ones(5)}, ValueError, r"output has shape \(5,\)"),
        ({"output": torch.ones(6).int()}, TypeError, r"output has dtype torch\.int32"),
        ({"output": torch.ones(6) / 0}, ValueError, "output has 6 values that are not finite"),
        ({"output": -torch.ones(6)}, ValueError, "output has -1; a diagonal has none below 0"),
        ({"output": -torch.eye(6)}, ValueError, "output has .* positive semi-definite"),
    ],
)
def test_every_wrong_argument_is_named_with_what_would_work(given, error, message):
    with pytest.raises(error, match=message):
        project(**{"weight": ONES, "structure": BTT(), **given})
