"""benchmarks/papers: what experiments compute from their rows, and the verdicts on rows that should
give yes, no and undecided. CI runs the scripts themselves."""

import math

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from benchmarks.harness import statistics
from benchmarks.harness.tasks import Digits
from benchmarks.papers import (
    bm_metrics,
    cbs_features,
    cbs_norm,
    cbs_scaling,
    cbs_untuned,
    md_width,
    mn_transfer,
)

NOISE = (-0.01, 0.0, 0.01)  # of the logarithm, by seed
WIDE = (-1.0, 0.0, 1.0)


def judged(experiment, result, *where):
    """The verdicts on an experiment's claims, of those figures."""
    claims = [claim for claim in experiment.claims if not where or claim.where in where]
    return [claim.verdict(result)["verdict"] for claim in claims]


# ---- intervals -----------------------------------------------------------------------------------


def test_the_interval_of_three_seeds_is_students():
    found = statistics.student([0.0, 1.0, 2.0])
    reach = 4.302653 / math.sqrt(3)  # the 97.5 % point of Student's t with 2 degrees of freedom
    assert found == pytest.approx({"value": 1.0, "low": 1 - reach, "high": 1 + reach})
    with pytest.raises(ValueError, match="1 values have no interval; two or more seeds do"):
        statistics.student([1.0])


def test_a_bootstrap_spans_the_seeds_and_shrinks_to_nothing_when_they_agree():
    spread = statistics.bootstrap(lambda seeds: sum(seeds) / len(seeds), [0, 1, 2])
    assert spread == pytest.approx({"value": 1, "low": 0, "high": 2})
    same = statistics.bootstrap(lambda seeds: 7.0, [0, 1, 2])
    assert same == {"value": 7.0, "low": 7.0, "high": 7.0}


# ---- power laws ----------------------------------------------------------------------------------


def power_rows(structure, exponent, noise=NOISE, scale=1.0):
    """Loss scale * FLOPs^-exponent, the exponent times exp(noise of the seed)."""
    return [
        {"task": "digits", "structure": structure, "width": width, "lr": cbs_scaling.LR}
        | {"seed": seed, "flops": 1000 * width}
        | {"loss": scale * width ** (-exponent * math.exp(noise[seed]))}
        for width in (16, 64, 256)
        for seed in range(3)
    ]


def test_exponents_and_gaps_are_those_of_the_law():
    first, second = (
        statistics.curve_of(power_rows("BTT r=1", *law, (0, 0, 0)), [0]) for law in [(0.25,)] * 2
    )
    assert statistics.exponent(first) == pytest.approx(0.25)
    assert statistics.gap(first, [(x, y - 1) for x, y in second]) == pytest.approx(1)


def test_curves_without_common_flops_are_refused():
    curves = [[(math.log(x), 0.0) for x in ends] for ends in ((1, 10), (100, 1000))]
    with pytest.raises(ValueError, match="share no FLOPs: one starts at 100, one ends at 10"):
        statistics.gap(*curves)


def test_a_width_counts_at_its_best_rate_and_a_seed_as_often_as_it_is_drawn():
    rows = [
        {"width": 8, "lr": lr, "seed": seed, "flops": 100, "loss": loss}
        for lr, losses in {0.1: (2.0, 8.0), 0.2: (1.0, None)}.items()
        for seed, loss in enumerate(losses)
    ]
    for seeds, loss in (([0, 1], 4), ([0, 0], 2)):
        (point,) = statistics.curve_of(rows, seeds)
        assert point == pytest.approx((math.log(100), math.log(loss)))


# ---- CBS, figure 2a ------------------------------------------------------------------------------


def feature_rows(growth, share, monarch, noise):
    """Changes that grow by a factor from width 64 to 1024 with the rule, and without it are a
    `share` of that, of Monarch and low-rank `monarch`."""
    rows = []
    for structure in cbs_features.STRUCTURES:
        for width, seed in ((w, s) for w in (64, 1024) for s in range(3)):
            aware = growth * math.exp(noise[seed]) if width == 1024 else 1.0
            less = share if structure in ("BTT r=1", "Kronecker") else monarch
            factor = less * math.exp(noise[seed])
            for rule, change in (("aware", aware), ("naive", aware * factor)):
                named = {"structure": structure, "rule": rule, "width": width, "seed": seed}
                rows.append({**named, "change": change})
    return rows


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ((1.1, 0.1, 0.3, NOISE), ["yes", "yes"]),
        ((3.0, 0.9, 0.9, NOISE), ["**no**", "**no**"]),
        ((1.1, 0.4, 0.4, WIDE), ["undecided", "undecided"]),
    ],
)
def test_features_are_consistent_or_vanish_by_their_intervals(rows, expected):
    result = cbs_features.compare(feature_rows(*rows))
    assert judged(cbs_features.EXPERIMENT, result)[:2] == expected


@pytest.mark.parametrize(("share", "holds"), [(0.1, "yes"), (0.9, "**no**")])
def test_the_effect_is_most_pronounced_where_the_share_is_least(share, holds):
    rows = feature_rows(1.0, share, 0.3, NOISE)
    for row in rows:  # a noise of BTT's and Kronecker's own
        if row["structure"] in ("BTT r=1", "Kronecker") and row["rule"] == "naive":
            row["change"] *= math.exp(NOISE[row["seed"]])
    assert judged(cbs_features.EXPERIMENT, cbs_features.compare(rows))[2] == holds


def test_a_step_changes_the_features_by_more_with_the_rule_than_without():
    changes = {
        rule: cbs_features.train("BTT r=1", 64, rule, 0, steps=3)["change"]
        for rule in cbs_features.RULES
    }
    assert changes["aware"] > 2 * changes["naive"] > 0


# ---- CBS, figures 1c, 4 to 6 and 7 ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("naive", "monarch", "noise", "expected"),
    [
        (0.05, 0.28, NOISE, ["yes", "yes", "yes"]),
        (0.28, 0.05, NOISE, ["**no**", "**no**", "in part"]),
        (0.15, 0.15, WIDE, ["undecided", "undecided"]),
    ],
)
def test_naive_structures_saturate_by_their_intervals(monkeypatch, naive, monarch, noise, expected):
    powers = {"dense": 0.2, **dict.fromkeys(cbs_untuned.NAMES, 0.3)}
    kept = [row for name, power in powers.items() for row in power_rows(name, power)]
    monkeypatch.setattr(cbs_untuned, "read_aware", lambda: kept)
    powers = {"BTT r=1": naive, "Kronecker": naive, "Monarch b=4": monarch}
    rows = [row for name, power in powers.items() for row in power_rows(name, power, noise)]
    found = judged(cbs_untuned.EXPERIMENT, cbs_untuned.analyse(rows))
    assert found[: len(expected)] == expected


@pytest.mark.parametrize(
    ("powers", "by", "scales", "noise", "expected"),
    [
        ((0.3, 0.1), 0.001, (0.5, 2.0), NOISE, ["yes", "yes", "yes", "yes"]),
        ((0.1, 0.3), -0.001, (2.0, 0.5), NOISE, ["**no**"] * 4),
        ((0.1, 0.3), 0.001, (2.0, 0.5), NOISE, ["**no**", "in part", "**no**", "**no**"]),
        ((0.2, 0.2), 0.001, (1.0, 1.0), WIDE, ["undecided"] * 4),
    ],
)
def test_structures_scale_by_their_intervals(powers, by, scales, noise, expected):
    """BTT of rank 1 has an exponent larger than the other structures without shared parameters,
    `by` that."""
    rows = power_rows("dense", 0.2) + power_rows("low-rank", 0.15)
    for name in cbs_scaling.WIDTHS:
        n = int(name in cbs_scaling.SHARED)
        if name not in ("dense", "low-rank"):
            scale = scales[n] * (1.001 if name == "BTT r=1" else 1)
            rows += power_rows(name, powers[n] + by * (name == "BTT r=1"), noise, scale)
    rows = [row | {"task": task} for task in cbs_scaling.STEPS for row in rows]
    by_task = {task: statistics.select(rows, task=task) for task in cbs_scaling.STEPS}
    compared = {task: cbs_scaling.compare(mine) for task, mine in by_task.items()}
    result = {"rows": rows, "comparisons": compared}
    assert judged(cbs_scaling.EXPERIMENT, result, "CBS 4") == expected


@pytest.mark.parametrize(
    ("power", "noise", "expected"),
    [(0.4, NOISE, "yes"), (0.1, NOISE, "**no**"), (0.2, WIDE, "undecided")],
)
def test_costlier_structures_are_better_per_width_by_their_intervals(power, noise, expected):
    rows = [row for name in ("BTT r=4", "Monarch b=4") for row in power_rows(name, power, noise)]
    rows += [row for name in ("BTT r=1", "Monarch b=16") for row in power_rows(name, 0.2)]
    assert judged(cbs_scaling.EXPERIMENT, {"rows": rows}, "CBS 6") == [expected] * 2


def norm_rows(plain, normed):
    curves = {"dense": (1, 1, 1), "BTT": plain, "BTT, normalised": normed}
    return [
        {"model": model, "lr": lr, "seed": seed, "loss": 2.0}
        | {"rms": [[step, size] for step, size in enumerate(curve)]}
        for model, curve in curves.items()
        for lr in cbs_norm.LRS.values()
        for seed in (0, 1)
    ]


def test_growth_and_loss_are_compared_with_btt_seed_by_seed():
    rows = norm_rows((1, 4, 8), (1, 2, 2))
    for row in rows:
        if row["model"] == "BTT, normalised":
            row["loss"] = 1.0
    found = cbs_norm.estimates(rows)["usual"]
    assert set(found) == {"BTT, normalised"}
    values = {key: math.exp(each["value"]) for key, each in found["BTT, normalised"].items()}
    assert values == pytest.approx({"growth": 2, "growth / BTT's": 1 / 4, "loss / BTT's": 1 / 2})
    rows[-1]["loss"] = None
    assert cbs_norm.estimates(rows)["large"] == {}


@pytest.mark.parametrize(("growth", "expected"), [(0.7, "yes"), (0.1, "in part")])
def test_an_alternative_that_stops_the_growth_does_not_only_reduce_it(growth, expected):
    exact = {name: {"value": math.log(growth), "low": math.log(growth), "high": math.log(growth)}
             for name in (cbs_norm.GROWTH,)}  # fmt: skip
    exact[cbs_norm.LOSS] = {"value": 0.1, "low": 0.1, "high": 0.1}
    result = {"estimates": {"usual": dict.fromkeys(cbs_norm.ALTERNATIVES, exact)}}
    claim = cbs_norm.CLAIMS[-1]
    assert claim.verdict(result)["verdict"] == expected


def test_a_model_that_diverged_has_no_loss_in_the_table():
    rows = norm_rows((1, 6, 9), (1, 2, 2))
    next(row for row in rows if row["model"] == "BTT")["loss"] = None
    table = cbs_norm.tabulate(rows)
    assert [row["model"] for row in table if row["loss"] is None] == ["BTT"]
    grown = statistics.one(table, lr="usual", model="BTT, normalised")
    assert (grown["start"], grown["half"], grown["end"]) == (1, 2, 2)


# ---- best rates over sizes -----------------------------------------------------------------------


def sweep(method, optima, lrs=range(-8, 3), steepness=0.3):
    """Runs whose log loss is a parabola in log2 lr, with its vertex at the given place for each
    size."""
    return [
        {"method": method, "size": size, "lr": 2.0**p, "seed": 0}
        | {"loss": math.exp(steepness * (p - centre) ** 2) / size}
        for size, centre in optima.items()
        for p in lrs
    ]


def test_the_best_rate_of_a_parabola_is_its_vertex():
    found = statistics.transfer(sweep("Adam", {16: -2.3, 64: -4.3, 256: -6.3}))["Adam"]
    assert found["optima"] == pytest.approx({16: -2.3, 64: -4.3, 256: -6.3})
    assert found["drift"] == pytest.approx(-1)
    assert found["cost"] == pytest.approx(math.exp(0.3 * (4.3**2 - 0.3**2)))  # at 2^-2 and at 2^-6


def test_one_seed_that_diverges_makes_a_rate_useless():
    rows = sweep("Adam", {16: -2.0})
    rows.append({"method": "Adam", "size": 16, "lr": 2.0**-2, "seed": 1, "loss": None})
    assert statistics.losses(rows)["Adam", 16][2.0**-2] == math.inf
    assert statistics.transfer(rows)["Adam"]["optima"][16] in (-3.0, -1.0)


def test_estimates_of_md_figure_1_are_of_the_seeds_drifts_and_losses():
    flat, falling = {32: -3.0, 512: -3.2}, {32: -2.0, 512: -6.0}
    rows = []
    for seed, moved in enumerate((-0.1, 0.0, 0.1)):
        for method, optima in (("Adam, SP", falling), ("Adam, muP", flat), ("dualized", flat)):
            optima = {size: centre + moved * (size == 512) for size, centre in optima.items()}
            share = 0.5 if method == "dualized" else 1.0
            found = sweep(method, optima)
            rows += [row | {"seed": seed, "loss": share * row["loss"]} for row in found]
    found = md_width.estimates(rows)
    drift = found["drift"]["Adam, SP"]
    assert drift["value"] == pytest.approx(-1)
    assert drift["high"] - drift["value"] == pytest.approx(4.303 * 0.025 / 3**0.5, rel=1e-3)
    assert found["excess"]["dualized"]["value"] == pytest.approx(0.05 - 0.5)
    for width in ("32", "512"):
        share = found["dualized / Adam"][width]["value"]
        assert share == pytest.approx(math.log(0.5), abs=0.05)
    result = {"estimates": found, "setting": {"steps": 1}}
    assert judged(md_width.EXPERIMENT, result) == ["yes"] * 4


def transfer_rows(moved, gain=1.0):
    """Of the networks: plain optima that move by -4 over either axis, normed ones by `moved`;
    normed losses are `gain` of the plain ones, and those on the test set twice as large."""
    rows = []
    for axis, seed in ((axis, seed) for axis in ("width", "blocks") for seed in range(3)):
        for method in mn_transfer.METHODS:
            last, factor = (moved, gain) if "normed" in method else (-4.0, 1.0)
            found = sweep(method, {16: -2.0, 64: -2.0 + last + 0.1 * seed}, range(-10, 3))
            named = {"axis": axis, "seed": seed}
            rows += [
                row | named | {"loss": factor * row["loss"], "test": 2 * factor * row["loss"]}
                for row in found
            ]
    return [row | {"network": name} for name in mn_transfer.SIZES for row in rows]


@pytest.mark.parametrize(
    ("moved", "gain", "expected"),
    [(-0.5, 0.8, ["yes"] * 6), (-6.0, 1.3, ["**no**"] * 6)],
)
def test_normed_training_is_judged_by_each_seeds_moves_and_losses(moved, gain, expected):
    rows = transfer_rows(moved, gain)
    result = {
        "setting": {"steps": 50},
        "transfer": mn_transfer.transfers(rows, "network", "axis"),
        "comparisons": mn_transfer.comparisons(rows),
    }
    found = result["transfer"]["GPT, width"]["normed SGD"]["estimates"]["moved"]
    assert found["value"] == pytest.approx(moved + 0.1)
    assert len(result["comparisons"]["losses"]) == 3 * 2 * 2 * 2 * 2
    assert judged(mn_transfer.EXPERIMENT, result) == expected


# ---- networks and their steps --------------------------------------------------------------------


def test_images_that_are_tested_on_are_not_trained_on():
    train, test, whole = Digits(0, "train"), Digits(0, "test"), Digits(0)
    assert len(train.labels) + len(test.labels) == len(whole.labels)
    chosen = {tuple(image.tolist()) for image in train.moved[4]}
    assert not chosen & {tuple(image.tolist()) for image in test.moved[4]}


def test_plain_optimizers_have_the_papers_rates():
    net = mn_transfer.build("ResMLP", width=16, blocks=1)
    rates = {
        method: [group["lr"] for group in mn_transfer.optimizer(net, method, 1.0).param_groups]
        for method in ("Adam", "SGD")
    }
    scales = [math.sqrt(m / n) for m, n in (tuple(w.shape) for w in net.parameters())]
    assert sorted(rates["Adam"]) == pytest.approx(sorted(scales))
    assert sorted(rates["SGD"]) == pytest.approx(sorted(scale**2 for scale in scales))


@pytest.mark.parametrize("network", mn_transfer.SIZES)
def test_the_first_step_of_a_normed_optimizer_has_modular_norm_lr(network):
    torch.manual_seed(0)
    net = mn_transfer.build(network, width=16, blocks=2)
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    descent, task = (
        mn_transfer.optimizer(net, "normed SGD", 0.25),
        mn_transfer.task(network, 0, "train"),
    )
    x, y = task.batch(4)
    task.loss(net(x), y).backward()
    descent.step()
    with torch.no_grad():
        norm = net.norm({name: weight - before[name] for name, weight in net.named_parameters()})
    assert 0.25 / 1.1 < norm < 0.25 * (1 + 1e-4)  # spectral norms are bounded from above


def test_a_spectral_start_is_of_dependency_1_and_powers_are_slopes():
    found = bm_metrics.fresh("dense", "spectral", 64)
    assert found["dependency"] == pytest.approx(1, abs=0.1)
    assert found["dependency"] == pytest.approx(found["largest core"], rel=1e-3)
    rows = [
        {"structure": structure, "optimizer": name, "width": width}
        | {number: [width**0.5] for number in bm_metrics.NUMBERS}
        for structure in bm_metrics.TRAINED
        for name in bm_metrics.OPTIMIZERS
        for width in (4, 16)
    ]
    exponents = bm_metrics.exponents(rows)
    assert exponents["dense"]["Muon"]["update"] == pytest.approx(0.5)
    # small and the same at every width is of order 1; what grows with the width is not
    for growth, verdict in ((0.0, "yes"), (0.5, "in part")):
        fresh = [
            {"structure": name, "init": "spectral", "width": width}
            | {"dependency": 0.3 * width ** (growth * (name == "TT"))}
            for name in ("dense", "TT")
            for width in (4, 16)
        ]
        result = {"fresh": fresh, "exponents": exponents}
        assert judged(bm_metrics.EXPERIMENT, result) == [f"{verdict} (one run)", "**no** (one run)"]
