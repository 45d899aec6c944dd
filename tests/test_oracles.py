"""Each family against its textbook definition, written out by hand: nothing here is shared with the
library.

A contract test cannot know that a valid structure is the wrong one; these do.
"""

from dataclasses import fields
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from structlin import (
    BLAST,
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    Family,
    Kronecker,
    LowRank,
    Monarch,
    Split,
    StructuredLinear,
    family,
)
from structlin import to_dense as dense_of
from structlin._structure.families import factorise


def matrix_and_cores(
    family: Family, in_features: int, out_features: int
) -> tuple[Tensor, list[Tensor]]:
    layer = StructuredLinear(in_features, out_features, family, dtype=torch.float64)
    return layer.to_dense().detach(), [core.detach() for core in layer.cores]


# ---- definitions ---------------------------------------------------------------------------------


def test_dense_is_its_core():
    W, (core,) = matrix_and_cores(Dense(), 5, 3)
    assert_close(W, core[0])


def test_low_rank_is_the_product_of_its_factors():
    W, (v, u) = matrix_and_cores(LowRank(rank=3), 7, 10)
    assert_close(W, u[0] @ v[0])
    assert torch.linalg.matrix_rank(W) == 3


def test_block_diagonal_is_torch_block_diag():
    W, (blocks,) = matrix_and_cores(BlockDiagonal(blocks=3), 12, 6)
    assert_close(W, torch.block_diag(*blocks))


@pytest.mark.parametrize("widths", [(12, 20), (20, 12), (16, 16)])
def test_kronecker_is_the_kronecker_product(widths):
    W, (right, left) = matrix_and_cores(Kronecker(), *widths)
    assert_close(W, torch.kron(left[0], right[0]))


def test_tt_of_two_cores_is_the_entrywise_product_of_matrices():
    r, (j1, j2), (i1, i2) = 3, (3, 4), (4, 5)
    W, (last, first) = matrix_and_cores(TT(rank=r), 12, 20)
    G1, G2 = first.reshape(i1, j1, r), last.reshape(r, i2, j2)
    expected = torch.empty(20, 12, dtype=torch.float64)
    for i in range(20):
        for j in range(12):
            expected[i, j] = G1[i // i2, j // j2] @ G2[:, i % i2, j % j2]
    assert_close(W, expected)


@pytest.mark.parametrize("rank", [2, (3, 2)])
def test_tt_of_three_cores_is_the_index_formula(rank):
    # j = 2 3 4 -> i = 3 4 5
    W, (last, middle, first) = matrix_and_cores(TT(rank=rank, cores=3), 24, 60)
    r, s = (rank, rank) if isinstance(rank, int) else rank
    G1, G2, G3 = first.reshape(3, 2, r), middle.reshape(r, 4, 3, s), last.reshape(s, 5, 4)
    assert_close(W, torch.einsum("axr,rbys,scz->abcxyz", G1, G2, G3).reshape(60, 24))


def test_tt_of_four_cores_is_the_index_formula():
    # j = 2 2 3 3 -> i = 2 2 2 2
    W, (g4, g3, g2, g1) = matrix_and_cores(TT(rank=2, cores=4), 36, 16)
    G1, G2 = g1.reshape(2, 2, 2), g2.reshape(2, 2, 2, 2)
    G3, G4 = g3.reshape(2, 2, 3, 2), g4.reshape(2, 2, 3)
    assert_close(W, torch.einsum("axr,rbys,sczt,tdw->abcdxyzw", G1, G2, G3, G4).reshape(16, 36))


@pytest.mark.parametrize(
    ("in_features", "out_features", "g", "d", "a", "b", "rank"),
    [(12, 20, 3, 4, 5, 4, 2), (30, 12, 5, 6, 4, 3, 3), (16, 16, 4, 4, 4, 4, 1)],
)
def test_btt_is_a_grid_of_contiguous_blocks_of_low_rank(
    in_features, out_features, g, d, a, b, rank
):
    W, (right, left) = matrix_and_cores(BTT(rank=rank), in_features, out_features)
    R, L = right.reshape(g, rank, b, d), left.reshape(b, a, g, rank)
    for row in range(b):
        for column in range(g):
            block = W[row * a : (row + 1) * a, column * d : (column + 1) * d]
            assert_close(block, L[row, :, column] @ R[column, :, row])
            assert torch.linalg.matrix_rank(block) == rank


@pytest.mark.parametrize("rank", [2, (3, 2)])
def test_btt_of_three_cores_is_equation_6(rank):
    # j = 2 3 4 -> i3 i2 i1 = 3 4 5
    W, (last, middle, first) = matrix_and_cores(BTT(rank=rank, cores=3), 24, 60)
    r, s = (rank, rank) if isinstance(rank, int) else rank
    G3 = last.reshape(2, 3, s, 3, 4)  # j1 j2 r2 i3 j3
    G2 = middle.reshape(3, 2, r, 4, 3, s)  # i3 j1 r1 i2 j2 r2
    G1 = first.reshape(3, 4, 5, 2, r)  # i3 i2 i1 j1 r1
    assert_close(W, torch.einsum("cbaxr,cxrbys,xyscz->cbaxyz", G1, G2, G3).reshape(60, 24))


@pytest.mark.parametrize(
    ("in_features", "out_features", "blocks"),
    [(16, 16, 2), (24, 16, 2), (16, 32, 4), (16, 16, 8), (12, 30, 6), (8, 24, 8), (12, 6, 6)],
)
def test_monarch_is_two_block_diagonals_with_the_regrouping_of_fly(
    in_features, out_features, blocks
):
    k = l = blocks
    p, s, q = in_features // k, out_features // l, min(in_features, out_features) // blocks
    r = k * q // l
    W, (w1, w2) = matrix_and_cores(Monarch(blocks=blocks), in_features, out_features)
    w1, w2 = w1.reshape(k, q, p), w2.reshape(l, s, r)
    expected = torch.zeros(out_features, in_features, dtype=torch.float64)
    for K in range(k):
        for Q in range(q):
            R, L = divmod(K * q + Q, l)
            for S in range(s):
                for P in range(p):
                    expected[S * l + L, K * p + P] += w2[L, S, R] * w1[K, Q, P]
    assert_close(W, expected)


# ---- how the families contain each other ---------------------------------------------------------


@pytest.mark.parametrize("root", [2, 3, 4])
def test_btt_of_rank_1_is_monarch_with_sqrt_d_blocks_up_to_the_order_of_the_outputs(root):
    d = root * root
    W, cores = matrix_and_cores(BTT(rank=1), d, d)
    monarch = dense_of(Monarch(blocks=root).structure(d, d), cores)
    assert_close(W.reshape(root, root, d).transpose(0, 1).reshape(d, d), monarch)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_sharing_the_blocks_of_btt_gives_tt(rank):
    W, (last, first) = matrix_and_cores(TT(rank=rank), 20, 36)  # j = 4 5, i = 6 6
    shared = [last.expand(4, -1, -1), first.expand(6, -1, -1)]
    btt = dense_of(BTT(rank=rank).structure(20, 36), shared)
    assert_close(btt.reshape(6, 6, 20).transpose(0, 1).reshape(36, 20), W)


@pytest.mark.parametrize("widths", [(12, 20), (97, 101)])
def test_tt_of_rank_1_is_kronecker(widths):
    W, cores = matrix_and_cores(TT(rank=1), *widths)
    kronecker = dense_of(Kronecker().structure(*widths), cores)
    assert_close(W, kronecker[: widths[1], : widths[0]])


def test_one_block_and_one_core_are_dense():
    for one in (BlockDiagonal(blocks=1), TT(rank=(), cores=1)):
        W, (core,) = matrix_and_cores(one, 6, 4)
        assert_close(W, core[0])


# ---- the bounds on the ranks ---------------------------------------------------------------------


def halves(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(left, right) with left @ right = matrix, as wide as min(m, n)."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u * s.unsqueeze(-2), vh


def low_rank_cores(matrix: Tensor) -> list[Tensor]:
    u, v = halves(matrix)
    return [v[None], u[None]]


def tt_cores(matrix: Tensor) -> list[Tensor]:  # (4 5) x (3 4)
    G1, G2 = halves(matrix.reshape(4, 5, 3, 4).transpose(1, 2).reshape(12, 20))
    return [G2.reshape(1, 12 * 5, 4), G1.reshape(4, 3, 12).reshape(1, 4, 36)]


def btt_cores(matrix: Tensor) -> list[Tensor]:  # 4 x 3 blocks of 5 x 4
    L, R = halves(matrix.reshape(4, 5, 3, 4).transpose(1, 2))  # (4, 3, 5, 4), (4, 3, 4, 4)
    return [R.permute(1, 2, 0, 3).reshape(3, 16, 4), L.transpose(1, 2).reshape(4, 5, 12)]


@pytest.mark.parametrize(
    ("name", "bound", "cores"),
    [("LowRank", 12, low_rank_cores), ("TT", 12, tt_cores), ("BTT", 4, btt_cores)],
)
def test_at_its_bound_a_rank_represents_every_matrix_and_above_it_is_refused(name, bound, cores):
    W = torch.randn(20, 12, dtype=torch.float64)
    assert_close(dense_of(family(name, rank=bound).structure(12, 20), cores(W)), W)
    with pytest.raises(ValueError, match=rf"rank={bound + 1} is over the useful bound .*{bound}"):
        family(name, rank=bound + 1).structure(12, 20)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        # TT, 24 = 2 3 4 -> 60 = 3 4 5: min(3*2, 20*12) and min(12*6, 5*4)
        (TT(rank=7, cores=3), "rank=7 is over the useful bound .* = 6: pass rank=6"),
        (TT(rank=(7, 20), cores=3), r"rank\[0\]=7 is over the useful bound of bond 1 = 6"),
        (TT(rank=(6, 21), cores=3), r"rank\[1\]=21 is over the useful bound of bond 2 = 20"),
        # BTT, i3 i2 i1 = 3 4 5: min(5, 3*4) and min(5*4, 4)
        (BTT(rank=5, cores=3), "rank=5 is over the useful bound .* = 4: pass rank=4"),
        (BTT(rank=(6, 4), cores=3), r"rank\[0\]=6 is over the useful bound of bond 1 = 5"),
        (BTT(rank=(5, 5), cores=3), r"rank\[1\]=5 is over the useful bound of bond 2 = 4"),
    ],
)
def test_every_bond_has_its_own_bound(family, message):
    with pytest.raises(ValueError, match=message):
        family.structure(24, 60)


def test_every_bond_may_be_at_its_bound():
    assert TT(rank=(6, 20), cores=3).structure(24, 60).sizes.items() >= {"r1": 6, "r2": 20}.items()
    assert BTT(rank=(5, 4), cores=3).structure(24, 60).sizes.items() >= {"r1": 5, "r2": 4}.items()


# ---- hyperparameters -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LowRank", "TT", "BTT"])
@pytest.mark.parametrize("rank", [0, -1, True, 2.0, "2", None])
def test_a_rank_that_is_no_integer_of_at_least_1_is_refused(name, rank):
    error, what = TypeError, "an integer of at least 1"
    if type(rank) is int:
        error, what = ValueError, "at least 1"
    with pytest.raises(error, match=f"rank={rank!r} must be {what}"):
        family(name, rank=rank)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("TT", {"rank": (2, 2)}, r"rank=\(2, 2\) has 2 entries; cores=2 have 1 bonds"),
        ("BTT", {"rank": (2,), "cores": 3}, r"rank=\(2,\) has 1 entries; cores=3 have 2 bonds"),
        ("BTT", {"rank": (2, 0), "cores": 3}, r"rank\[1\]=0 must be at least 1"),
        ("BTT", {"cores": 1}, "cores=1 must be at least 2"),
        ("TT", {"rank": 1, "cores": 0}, "cores=0 must be at least 1"),
        ("Monarch", {"blocks": 0}, "blocks=0 must be at least 1"),
        ("BlockDiagonal", {"blocks": -4}, "blocks=-4 must be at least 1"),
        (
            "btt",
            {"ranks": 2},
            r"BTT has no option 'ranks' \(got ranks=2\); it has \['rank', 'cores'\]",
        ),
        ("Dense", {"rank": 2}, "Dense has no option 'rank'"),
        ("monarch + lowrank", {}, r"'monarch \+ lowrank' is no family; .* cannot be a sum"),
        (
            "butterfly",
            {},
            "structure='butterfly' is no family; there are Dense, LowRank, .*, Monarch, BTT",
        ),
    ],
)
def test_an_impossible_hyperparameter_is_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=message):
        family(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("TT", {"rank": 1, "cores": 2.0}, "cores=2.0 must be an integer of at least 1"),
        ("BTT", {"cores": "2"}, "cores='2' must be an integer of at least 2"),
        ("BlockDiagonal", {"blocks": 1.5}, "blocks=1.5 must be an integer of at least 1"),
        ("Split", {"split": 3, "of": "BTT"}, "of='BTT' must be a family such as"),
        (3, {}, "structure=3 is no family; there are Dense"),
    ],
)
def test_a_hyperparameter_of_another_type_is_a_type_error(name, options, message):
    with pytest.raises(TypeError, match=message):
        family(name, **options)


@pytest.mark.parametrize(
    ("family", "widths", "message"),
    [
        (BlockDiagonal(blocks=5), (12, 20), "5 does not divide in_features=12; .* does is 4$"),
        (BlockDiagonal(blocks=3), (12, 20), "out_features=20; the nearest that do are 2 and 4$"),
        (BlockDiagonal(blocks=13), (12, 20), "13 does not divide in_features=12; .* does is 4$"),
        (Monarch(blocks=5), (16, 20), "5 does not divide in_features=16; .* that does is 4$"),
        (Monarch(blocks=8), (16, 20), "8 does not divide out_features=20; .* that does is 4$"),
        (Monarch(blocks=4), (24, 24), "4 does not regroup a middle of 24 = 4 x 6: .* are 2 and 12"),
    ],
)
def test_blocks_that_do_not_fit_are_refused_with_the_nearest_that_do(family, widths, message):
    with pytest.raises(ValueError, match=message):
        family.structure(*widths)


@pytest.mark.parametrize("kind", [LowRank, BlockDiagonal, TT, Monarch, BTT, Split, BLAST])
def test_the_main_size_alone_goes_by_position(kind):
    main, *others = [each.name for each in fields(kind)]
    rest = {name: LowRank(rank=1) if name == "of" else 2 for name in others}
    assert kind(2, **rest) == kind(**{main: 2}, **rest)
    with pytest.raises(TypeError, match="positional"):
        kind(2, 3)


def test_the_name_of_a_family_ignores_case():
    assert family("bTt", rank=2) == BTT(rank=2)
    assert family("tt", rank=[3, 2], cores=3) == TT(rank=(3, 2), cores=3)


def test_what_is_neither_a_family_nor_a_structure_is_refused():
    with pytest.raises(TypeError, match="structure='btt' must be a family"):
        StructuredLinear(4, 4, "btt")
    with pytest.raises(
        ValueError, match="init='kaiming' is unknown; there are mup, spectral, orthogonal"
    ):
        StructuredLinear(4, 4, init="kaiming")


# ---- widths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "factors"),
    [
        (20, (4, 5)),
        (30, (5, 6)),
        (5, (2, 3)),  # 1 x 5 is too uneven, 11 x 41 is not
        (451, (11, 41)),
        (33, (3, 11)),
        (39, (5, 8)),  # for 3 x 13
        (768, (24, 32)),
        (1024, (32, 32)),
        (4304, (56, 80)),
        (21841, (144, 152)),
        (50257, (192, 264)),
        (1024, (8, 8, 16)),
        (24, (2, 3, 4)),
        (36, (2, 2, 3, 3)),
        (101, (101,)),
        (1, (1, 1)),
    ],
)
def test_a_width_factorises_into(width, factors):
    assert factorise(width, len(factors)) == factors


@given(st.integers(1, 200_000), st.integers(1, 4))
def test_factors_are_even_and_hold_the_width_with_little_padding(width, count):
    factors = factorise(width, count)
    assert len(factors) == count
    assert list(factors) == sorted(factors)
    assert max(factors) <= 4 * min(factors)
    assert prod(factors) >= width
    if prod(factors) > width:
        assert max(factors) <= 2 * min(factors)
        if width >= 32**count:
            assert all(factor % 8 == 0 for factor in factors)
            assert prod(factors) < width + 8**count * 32
        else:
            assert prod(factors) <= 1.5 * width + 1
