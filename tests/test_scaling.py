"""Initialisation and learning rates, by number. The statistics of drawn cores are in
`test_families.py`."""

from math import sqrt

import pytest
import torch

from structlin import (
    BTT,
    TT,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    Structure,
    StructuredLinear,
)
from structlin.scaling import expected_norm, init_std, lr_mult
from tests.catalogue import CASES, silu_rms

WIDE, TALL = (Structure("i -> o", "o i", i=i, o=o).cores[0] for i, o in ((256, 64), (64, 256)))


@pytest.mark.parametrize(
    ("init", "wide", "tall"),
    [
        ("mup", 8 / 256, 8 / 64),
        ("spectral", 0.5 / (16 + 8), 2 / (16 + 8)),
        ("orthogonal", 8 / 256, 8 / 64),
    ],
)
def test_the_standard_deviation_of_a_core_is_that_of_its_rule(init, wide, tall):
    assert (init_std(WIDE, init), init_std(TALL, init)) == (
        pytest.approx(wide),
        pytest.approx(tall),
    )


def test_bottleneck_variance_changes_a_core_that_narrows_the_whole_activation_and_no_other():
    v, u = LowRank(rank=16).structure(256, 64).cores
    assert init_std(v) == pytest.approx(4 / 256)
    assert init_std(v, bottleneck_variance=True) == pytest.approx(1 / 16)
    assert init_std(u, bottleneck_variance=True) == init_std(u)
    for family in (BTT(rank=1), Monarch(blocks=4), Kronecker(), TT(rank=1)):
        for core in family.structure(256, 64).cores:
            assert init_std(core, bottleneck_variance=True) == init_std(core)


@pytest.mark.parametrize("init", ["mup", "spectral"])
def test_a_low_rank_layer_that_starts_at_zero_keeps_the_variance_through_its_bottleneck(init):
    v, u = StructuredLinear(4096, 64, LowRank(rank=16), zero_init=True, init=init).cores
    assert v.std().item() == pytest.approx(1 / 64, rel=0.02)
    assert u.abs().max() == 0


@pytest.mark.parametrize("width", [64, 1024, 4096])
def test_the_output_of_a_fresh_low_rank_layer_is_of_order_1_at_every_width(width):
    layer = StructuredLinear(width, width, LowRank(rank=round(width**0.5)), bias=False)
    y = layer(torch.randn(256, width, generator=torch.Generator().manual_seed(1)))
    assert y.square().mean().sqrt().item() == pytest.approx(1, rel=0.25)


def test_a_layer_of_one_core_that_narrows_has_no_bottleneck():
    (core,) = StructuredLinear(4096, 64, Dense()).cores
    assert core.std().item() == pytest.approx(8 / 4096, rel=0.02)
    assert StructuredLinear(4096, 64, LowRank(rank=16), init="spectral").stds[0] < 1 / 64


@pytest.mark.parametrize("init", ["mup", "spectral", "orthogonal"])
def test_weight_norm_leaves_a_layer_that_starts_at_zero_as_it_was_drawn(init):
    layer = StructuredLinear(
        4096, 64, LowRank(rank=16), weight_norm=True, zero_init=True, init=init
    )
    assert layer.effective_cores()[0].std().item() == pytest.approx(
        layer.cores[0].std().item(), rel=0.02
    )


d, r = 1024, 4


@pytest.mark.parametrize(
    ("family", "adam", "sgd"),
    [
        (Dense(), (1,), (1,)),
        (LowRank(rank=r), (1 / 2, d / (2 * r)), (r / d, d / r)),
        (Kronecker(), (sqrt(d) / 2, sqrt(d) / 2), (1, 1)),
        (TT(rank=r), (sqrt(d) / 2, sqrt(d) / (2 * r)), (r, 1 / r)),
        (BTT(rank=r), (sqrt(d) / 2, sqrt(d) / (2 * r)), (r, 1 / r)),
        (
            BTT(rank=1, cores=3),
            (64 / 3, 128 / 3, 128 / 3),
            (1 / 2, 1, 2),
        ),  # j = 8 8 16, i = 16 8 8
        (Monarch(blocks=4), (2, 2), (1, 1)),
        (Monarch(blocks=32), (16, 16), (1, 1)),
    ],
    ids=lambda value: getattr(value, "label", None),
)
def test_learning_rates_of_a_square_layer_are_those_of_table_2(family, adam, sgd):
    cores = family.structure(d, d).cores
    for optimizer in ("adam", "adamw", "sign"):
        assert [
            lr_mult(core, d, len(cores), optimizer=optimizer) for core in cores
        ] == pytest.approx(list(adam))
    assert [
        lr_mult(core, d, len(cores), optimizer="sgd", out_features=d) for core in cores
    ] == pytest.approx(list(sgd))
    assert [lr_mult(core, d, len(cores)) for core in cores] == pytest.approx(list(adam)), (
        "Adam is the default"
    )


def test_learning_rates_of_a_layer_that_is_not_square_are_relative_to_a_dense_one():
    v, u = LowRank(rank=8).structure(256, 1024).cores
    assert [lr_mult(core, 256, 2) for core in (v, u)] == [1 / 2, 16]
    assert [lr_mult(core, 256, 2, optimizer="sgd", out_features=1024) for core in (v, u)] == [
        1 / 128,
        32,
    ]
    (dense,) = Dense().structure(256, 1024).cores
    assert lr_mult(dense, 256, 1, optimizer="sgd", out_features=1024) == 1


def test_unknown_rules_are_refused_by_name():
    with pytest.raises(
        ValueError, match="init='xavier' is unknown; there are mup, spectral, orthogonal"
    ):
        init_std(WIDE, "xavier")
    with pytest.raises(
        ValueError, match="optimizer='lion' is unknown; there are adam, adamw, sign, sgd"
    ):
        lr_mult(WIDE, 256, 1, optimizer="lion")
    core = BTT(rank=2).structure(64, 64).cores[0]
    for widths in ({"in_features": -1, "cores": 2}, {"in_features": 64, "cores": 0}):
        with pytest.raises(ValueError, match=r"(in_features=-1|cores=0) .*must be at least 1"):
            lr_mult(core, **widths)
    with pytest.raises(ValueError, match="out_features=0 must be at least 1"):
        lr_mult(core, 64, 2, optimizer="sgd", out_features=0)
    with pytest.raises(ValueError, match="out_features=None: the SGD rule needs"):
        lr_mult(WIDE, 256, 1, optimizer="sgd")


# ---- the scale of the layer that is replaced -----------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_expected_norm_is_that_of_the_drawn_matrices(case):
    family, columns, rows = case
    layer = StructuredLinear(columns, rows, family, bias=False, dtype=torch.float64)
    if layer.structure.params > 10**5 or any(layer.padding):
        return
    torch.manual_seed(0)
    squares = []
    for _ in range(100):
        layer.reset_parameters()
        squares.append(layer.to_dense().square().sum())
    drawn = torch.stack(squares)
    expected = expected_norm(layer.structure.cores, layer.stds, columns) ** 2
    error = 6 * drawn.std() / sqrt(len(drawn))  # of the mean of so many draws
    assert abs(drawn.mean() - expected) < error


@pytest.mark.parametrize("weight_norm", [False, True])
@pytest.mark.parametrize("widths", [(256, 256), (256, 1024), (1024, 256), (100, 257)], ids=str)
@pytest.mark.parametrize(
    "family", [BTT(rank=1), BTT(rank=4), TT(rank=4), LowRank(rank=16), Kronecker()], ids=str
)
def test_a_layer_meets_the_norm_that_it_is_given_and_keeps_it(family, widths, weight_norm):
    torch.manual_seed(0)
    layer = StructuredLinear(*widths, family, bias=False, weight_norm=weight_norm)
    norm = 0.02 * sqrt(widths[0] * widths[1])
    layer.match_norm_(norm)
    squares = []
    for _ in range(40):
        squares.append(layer.to_dense().square().sum().item())
        layer.reset_parameters()
    assert sqrt(sum(squares) / len(squares)) == pytest.approx(norm, rel=0.06)


def test_the_norm_is_met_by_the_last_core_alone():
    layer = StructuredLinear(256, 256, BTT(rank=1), bias=False)
    torch.manual_seed(0)
    layer.match_norm_(1.0)
    torch.manual_seed(0)
    usual = StructuredLinear(256, 256, BTT(rank=1), bias=False)
    assert layer.cores[0].equal(usual.cores[0])
    assert layer.init_scale == pytest.approx(1 / 16)
    torch.testing.assert_close(layer.cores[1], usual.cores[1] / 16)


def test_a_norm_of_zero_zeroes_the_last_core_alone():
    layer = StructuredLinear(64, 64, BTT(rank=1)).match_norm_(0.0)
    assert layer.cores[0].count_nonzero() == layer.cores[0].numel()
    assert layer.cores[1].count_nonzero() == 0
    layer.match_norm_(1.0)
    assert layer.cores[1].count_nonzero() == layer.cores[1].numel()


@pytest.mark.parametrize("init", ["mup", "spectral", "orthogonal"])
@pytest.mark.parametrize("widths", [(1024, 256), (256, 1024)], ids=str)
@pytest.mark.parametrize(
    "family", [BTT(rank=1), BTT(rank=2, cores=3), LowRank(rank=64), TT(rank=4)], ids=str
)
def test_what_an_activation_reads_and_makes_has_unit_rms_at_the_start(family, widths, init):
    torch.manual_seed(0)
    active = family.activate()
    layer = StructuredLinear(*widths, active, bias=False, init=init, dtype=torch.float64)
    linear = StructuredLinear(*widths, family, init=init)
    assert layer.stds[-1] == linear.stds[-1]
    h = torch.randn(400, widths[0], dtype=torch.float64)
    for step, core in zip(layer.structure.program.steps[:-1], layer.cores, strict=False):
        h = h.reshape(step.move.sizes).permute(step.move.order) if step.move.order else h
        h = h.reshape(step.batch, -1, step.fan_in) @ core.mT
        assert h.square().mean().sqrt().item() == pytest.approx(1, rel=0.15)
        h = torch.nn.functional.silu(h) / silu_rms()
        assert h.square().mean().sqrt().item() == pytest.approx(1, rel=0.15)
    y = layer.match_norm_(sqrt(widths[1]))(torch.randn(400, widths[0], dtype=torch.float64))
    assert y.square().mean().sqrt().item() == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("norm", [-1.0, float("inf"), float("nan")])
def test_a_norm_out_of_range_is_refused_before_anything_changes(norm):
    layer = StructuredLinear(64, 64, BTT(rank=1))
    before = [core.clone() for core in layer.cores]
    with pytest.raises(ValueError, match=r"norm=.* must be finite and not negative"):
        layer.match_norm_(norm)
    assert all(map(torch.equal, layer.cores, before))
