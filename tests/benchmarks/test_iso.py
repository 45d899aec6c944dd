"""Budgets: fits of fronts, mixtures in one product, and what the command runs."""

import pytest
import torch
from torch.testing import assert_close

from benchmarks.harness.statistics import select
from benchmarks.training import iso_flops, iso_report, iso_seconds
from benchmarks.training.mixtures import Mixture, balance_of
from examples.moe import Mixture as MixtureOfModules
from structlin import BTT, LowRank, StructuredLinear

BUDGETS = (2.5e11, 1e12, 5e12, 2e13)


# ---- fits ----------------------------------------------------------------------------------------


def make_table(curves, seeds=(0.999, 1.0, 1.001)):
    """A front for each kind of `curves`, with a loss for each seed."""
    return [
        {
            **{"setup": "Python", "optimizer": "AdamW", "kind": kind, "budget": budget},
            "losses": [factor * curve(budget) for factor in seeds],
        }
        for kind, curve in curves.items()
        for budget in BUDGETS
    ]


def test_a_fit_says_how_much_compute_dense_needs_and_its_interval_holds_the_truth():
    def dense(flops):
        return 1.1 + 0.5 * (flops / 1e12) ** -0.25

    def structured(flops):  # has dense's loss at half of its FLOPs
        return dense(2 * flops)

    rows = iso_report.fit_all(make_table({"dense": dense, "BTT r=4": structured}))
    fits = {row["kind"]: row for row in rows}
    assert fits["dense"]["compute at 1e15"] == pytest.approx(1, rel=1e-3)
    for budget in ("1e12", "2e13", "1e15"):
        assert fits["BTT r=4"][f"compute at {budget}"] == pytest.approx(2, rel=0.02)
        low, high = map(float, fits["BTT r=4"][f"interval at {budget}"].split(" to "))
        assert low <= 2 <= high
        assert low < high
    assert fits["BTT r=4"]["residual"] < 1e-3
    assert fits["BTT r=4"]["loss at 1e18"] == pytest.approx(structured(1e18), abs=0.01)


def test_a_front_of_three_budgets_has_no_fit():
    table = make_table({"dense": lambda flops: 2.0 - flops / 1e14})
    assert iso_report.fit_all([row for row in table if row["budget"] < 2e13]) == []


def test_a_budget_that_dense_has_not_run_is_in_no_fit():
    curves = {
        "dense": lambda flops: 0.9 + (flops / 1e12) ** -0.2,
        "BTT r=4": lambda flops: 0.8 + (flops / 1e12) ** -0.2,
    }
    table = make_table(curves)
    largest = select(table, kind="BTT r=4", budget=2e13)[0]
    more = largest | {"budget": 8e13, "losses": [3.0]}
    assert iso_report.fit_all([*table, more]) == iso_report.fit_all(table)


def test_a_structured_front_is_compared_with_the_better_dense_kind_of_each_budget():
    plain = dict(zip(BUDGETS, (2.0, 1.9, 1.3, 1.2), strict=True))
    normalised = dict(zip(BUDGETS, (1.8, 1.7, 1.5, 1.4), strict=True))
    better = dict(zip(BUDGETS, (1.8, 1.7, 1.3, 1.2), strict=True))
    curves = {
        "dense": plain.get,
        "dense, weight norm": normalised.get,
        "BTT r=4": lambda budget: 1.6,
    }
    rows = iso_report.compare(make_table(curves, seeds=(1, 1)))
    assert len(rows) == len(BUDGETS)
    for row in rows:
        above = 100 * (1.6 / better[row["budget"]] - 1)
        assert row["above"] == pytest.approx([above, above])


def test_a_dense_kind_with_fewer_seeds_is_not_the_reference():
    plain = dict(zip(BUDGETS, (2.0, 1.9, 1.8, 1.7), strict=True))
    curves = {"dense": plain.get, "BTT r=4": lambda budget: 0.9 * plain[budget]}
    of_three_seeds = make_table(curves)
    of_one_seed = make_table({"dense, weight norm": lambda budget: 1.0}, seeds=(1.0,))
    rows = iso_report.compare(of_three_seeds + of_one_seed)
    assert len(rows) == len(BUDGETS)
    for row in rows:
        assert row["above"] == pytest.approx([-10.0] * 3)


def test_the_gains_are_means_of_seeds_by_optimizer_and_budget():
    dense = dict(zip(BUDGETS, (2.0, 1.9, 1.8, 1.7), strict=True))
    curves = {"dense": dense.get, "BTT r=4": lambda budget: 1.01 * dense[budget]}
    table = make_table(curves, seeds=(0.9, 1.1))
    header, _, line = iso_report.gains({"table": table}).splitlines()
    assert header.split("|")[2:-1] == [" 2.5e11 ", " 1e12 ", " 5e12 ", " 2e13 "]
    assert line.split("|")[1:-1] == [" AdamW ", *[" +1.0 % "] * 4]


def test_the_seeds_in_which_dense_is_ahead_are_counted_at_the_largest_budget_of_adamw():
    dense = dict(zip(BUDGETS, (2.0, 1.8, 1.6, 1.4), strict=True))
    curves = {"dense": dense.get, "BTT r=4": lambda budget: 0.95 * dense[budget]}
    table = make_table(curves, seeds=(1.0, 1.0, 1.0))
    largest = {"budget": 2e13, "kind": "BTT r=4"}
    for row in select(table, **largest):
        row["losses"] = [1.5, 1.3, 1.5]
    soap = [
        row | {"optimizer": "SOAP", "width": 96, "steps": 100}
        for row in table
        if row["budget"] < 2e13
    ]
    # By SOAP the largest budget is larger, and dense is ahead there in no seed.
    for row in select(soap, budget=5e12):
        soap.append(row | {"budget": 8e13, "losses": [0.9 * loss for loss in row["losses"]]})
    texts = iso_report.numbers({"table": table + soap, "rows": []})
    assert texts["iso.dense_wins"] == "2 of 3"
    assert texts["iso.AdamW_5e12"] == "5.0 % lower"


def test_a_variant_of_an_optimizer_is_compared_with_it_on_the_same_kind_and_seed():
    table = make_table({"dense": lambda flops: 2.0, "BTT r=4": lambda flops: 1.0})
    variant = {"optimizer": "AdamW, beta2 .99", "losses": [0.98, 0.99, 1.0]}
    table += [row | variant for row in select(table, kind="BTT r=4", budget=1e12)]
    _, _, line = iso_report.means({"table": table}).splitlines()
    name, change = line.split("|")[1:-1]
    assert name == " Python, BTT r=4, AdamW, beta2 .99 "
    assert change == " -1.0 (-1.9 to -0.1) "


def test_what_weight_normalisation_does_for_dense_is_said_by_optimizer():
    plain = dict(zip(BUDGETS, (2.0, 1.9, 1.8, 1.7), strict=True))
    curves = {"dense": plain.get, "dense, weight norm": lambda budget: 0.98 * plain[budget]}
    soap = [row | {"optimizer": "SOAP"} for row in make_table({"dense": plain.get})]
    soap += [row | {"kind": "dense, weight norm"} for row in soap if row["budget"] == 1e12]
    texts = iso_report.numbers_of_weight_norm({"table": make_table(curves) + soap})
    assert texts["iso.norm_AdamW_5e12"] == "2.0 % lower"
    assert texts["iso.norm_SOAP_1e12"] == "0.0 % higher"
    assert "iso.norm_SOAP_5e12" not in texts


# ---- mixtures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [BTT(rank=2), LowRank(rank=3), BTT(rank=1).activate()], ids=str)
@pytest.mark.parametrize("tokens", [1, 37])
def test_a_mixture_in_one_product_is_the_mixture_of_modules(family, tokens):
    torch.manual_seed(0)
    sizes = {"experts": 5, "top_k": 2}
    ours = Mixture(24, 40, family, **sizes, weight_norm=False)
    theirs = MixtureOfModules(24, 40, family, **sizes)
    theirs.router.load_state_dict(ours.router.state_dict())
    with torch.no_grad():
        for number, core in enumerate(ours.experts.cores):
            for expert, part in zip(theirs.experts, core.chunk(5), strict=True):
                expert.cores[number].copy_(part)
    x = torch.randn(tokens, 24, requires_grad=True)
    y, wanted = ours(x), theirs(x)
    assert_close(y, wanted)
    assert_close(ours.balance, theirs.balance)
    weights = torch.randn_like(y)
    (of_ours,) = torch.autograd.grad((y * weights).sum(), x, retain_graph=True)
    (of_theirs,) = torch.autograd.grad((wanted * weights).sum(), x)
    assert_close(of_ours, of_theirs)
    assert balance_of(torch.nn.Sequential(ours, torch.nn.ReLU())) == ours.balance


def test_a_mixture_costs_its_active_experts_and_has_the_rates_of_one_expert():
    sizes = iso_flops.EXPERIMENT.sizes
    kind = "BTT r=2, 2 of 8 experts"
    flops, params = iso_flops.flops_of_a_step("Python", kind, 64, sizes)
    flops_of_one, params_of_one = iso_flops.flops_of_a_step("Python", "BTT r=2", 64, sizes)
    assert flops_of_one < flops < 2.1 * flops_of_one
    assert params > 4 * params_of_one
    model = iso_flops.build("Python", kind, 64, 0, sizes, "cpu")
    one = iso_flops.build("Python", "BTT r=2", 64, 0, sizes, "cpu")
    rates = {"lr": 1.0, "other_lr": 1.0}
    multiples = {}
    for name, built in (("mixture", model), ("one", one)):
        optimizer = iso_flops.make_optimizer("Python", "AdamW", built, rates, sizes)
        names = {parameter: path for path, parameter in built.named_parameters()}
        multiples[name] = {
            names[parameter]: group["lr_mult"]
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
    for path, multiple in multiples["one"].items():
        if ".cores." in path:
            path = path.replace(".cores.", ".experts.cores.")
            assert multiples["mixture"][path] == pytest.approx(multiple)


# ---- what is run ---------------------------------------------------------------------------------


def test_a_search_begins_at_its_own_best_then_at_its_optimizers_then_at_the_smaller_budget():
    cell = {"setup": "Python", "optimizer": "AdamW", "kind": "dense", "budget": 4e12}
    rates = {"lr": 0.25, "other_lr": 0.25, "seed": 0}
    smaller = cell | rates | {"budget": 2.5e11, "width": 64, "loss": 2.0}
    assert iso_flops.start_of([smaller], cell)["width"] == 128  # 64 * 16 ** (1 / 4)
    own = cell | rates | {"width": 96, "loss": 1.5}
    worse = own | {"width": 32, "loss": 1.6}
    assert iso_flops.start_of([smaller, worse, own], cell)["width"] == 96
    variant = cell | {"optimizer": "AdamW, beta2 .99"}
    assert iso_flops.start_of([smaller, own], variant) == variant | {
        **{"width": 96, "lr": 0.25, "other_lr": 0.25}
    }


def test_the_large_budgets_are_for_both_dense_kinds_and_the_best_structured_ones():
    cell = {"setup": "Python", "optimizer": "AdamW", "kind": "BTT r=2", "budget": 1e12}
    assert iso_flops.is_planned(cell)
    assert not iso_flops.is_planned(cell | {"budget": 2e13})
    assert iso_flops.is_planned(cell | {"budget": 2e13, "kind": "dense, weight norm"})
    assert iso_flops.is_planned(cell | {"budget": 8e13, "kind": "dense, weight norm"})
    assert not iso_flops.is_planned(cell | {"budget": 8e13, "kind": "BTT r=4 in MLPs"})
    assert iso_flops.is_planned(cell | {"kind": "BTT r=4, no SiLU"})
    assert not iso_flops.is_planned(cell | {"kind": "BTT r=4, no SiLU", "budget": 5e12})
    assert iso_flops.is_planned(cell | {"budget": 8e13, "kind": "dense"})
    assert not iso_flops.is_planned(cell | {"budget": 8e13, "kind": "dense", "optimizer": "Muon"})
    assert not iso_flops.is_planned(cell | {"optimizer": "SOAP, then the polar factor"})


def test_dense_with_weight_normalisation_has_the_products_of_dense_and_a_gain_for_each_layer():
    sizes = iso_flops.EXPERIMENT.sizes
    flops, params = iso_flops.flops_of_a_step("Python", "dense, weight norm", 64, sizes)
    flops_of_dense, params_of_dense = iso_flops.flops_of_a_step("Python", "dense", 64, sizes)
    assert flops == flops_of_dense
    assert 0 < params - params_of_dense < 0.01 * params_of_dense
    model = iso_flops.build("Python", "dense, weight norm", 64, 0, sizes, "cpu")
    layers = [layer for layer in model.blocks.modules() if isinstance(layer, StructuredLinear)]
    assert len(layers) == 8  # four in each of two blocks
    for layer in layers:
        assert layer.label == "Dense()"
        assert layer.gains is not None


def test_a_model_with_structure_in_its_mlps_alone_has_the_attention_of_the_dense_model():
    sizes = iso_flops.EXPERIMENT.sizes
    ours = iso_flops.build("Python", "BTT r=4 in MLPs", 64, 0, sizes, "cpu").blocks[0]
    dense = iso_flops.build("Python", "dense", 64, 0, sizes, "cpu").blocks[0]
    for name, weight in dense.attn.state_dict().items():
        assert torch.equal(ours.attn.state_dict()[name], weight)
    for layer, widths in ((ours.mlp.c_fc, (64, 256)), (ours.mlp.c_proj, (256, 64))):
        assert layer.label == "BTT(rank=4), silu"
        assert (layer.in_features, layer.out_features) == widths
        assert layer.gains is not None


def test_the_controls_lack_one_thing_each():
    sizes = iso_flops.EXPERIMENT.sizes
    labels = {}
    for kind in ("BTT r=4", *iso_report.CONTROLS):
        layer = iso_flops.build("Python", kind, 64, 0, sizes, "cpu").blocks[0].mlp.c_fc
        labels[kind] = (layer.label, layer.gains is not None)
    assert labels == {
        "BTT r=4": ("BTT(rank=4), silu", True),
        "BTT r=4, no SiLU": ("BTT(rank=4)", True),
        "BTT r=4, no weight norm": ("BTT(rank=4), silu", False),
    }


def test_equal_seconds_use_as_many_seeds_as_denses_front_has_there():
    place = {"setup": "Python", "optimizer": "AdamW"}

    def row(kind, budget, seconds, *losses):
        return place | {"kind": kind, "budget": budget, "seconds": seconds, "losses": losses}

    dense = [
        row("dense", 1e12, 10.0, 2.0, 2.2),
        row("dense", 4e12, 40.0, 1.0, 1.1),
        row("dense", 1.6e13, 160.0, 0.5),
    ]
    sooner = row("BTT r=4", 1e12, 20.0, 2**0.5, 2.2 / 2**0.5)
    later = row("BTT r=4", 4e12, 80.0, 0.9, 0.9)
    last = row("BTT r=4", 1.6e13, 320.0, 0.4)
    found = iso_seconds.compare([*dense, sooner, later, last])
    assert found[0]["above"] == pytest.approx([0, 0])
    assert found[1]["above"] == pytest.approx([100 * (0.9 / 0.5**0.5 - 1)])
    assert "above" not in found[2]
    assert [each["seconds over dense"] for each in found] == [2, 2, 2]


def test_seconds_are_over_those_of_the_better_dense_kind_of_the_budget():
    place = {"setup": "Python", "optimizer": "AdamW", "budget": 1e12}
    plain = place | {"kind": "dense", "seconds": 10.0, "losses": [2.0]}
    normalised = place | {"kind": "dense, weight norm", "seconds": 40.0, "losses": [1.0]}
    ours = place | {"kind": "BTT r=4", "seconds": 20.0, "losses": [1.2]}
    (row,) = iso_seconds.compare([plain, normalised, ours])
    assert row["seconds over dense"] == 20.0 / 40.0
