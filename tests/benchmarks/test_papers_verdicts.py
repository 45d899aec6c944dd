"""benchmarks/papers: intervals, and the verdicts on rows that should give yes, no and undecided."""

import math
import sys
from functools import partial

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from benchmarks.harness import statistics
from benchmarks.harness.tasks import CORPORA, Digits
from benchmarks.papers import (
    cbs_features,
    cbs_ffn,
    cbs_scaling,
    cbs_untuned,
    cbs_vision,
    md_alignment,
    mn_mass_gpt,
    mn_normed,
    mn_tasks,
    verdicts,
    verdicts_norm,
)

NOISE = (-0.01, 0.0, 0.01)  # of the logarithm, by seed
WIDE = (-1.0, 0.0, 1.0)


def test_the_interval_of_three_seeds_is_students():
    found = statistics.student([0.0, 1.0, 2.0])
    reach = 4.302653 / math.sqrt(3)  # the 97.5 % point of Student's t with 2 degrees of freedom
    assert found == pytest.approx({"value": 1.0, "low": 1 - reach, "high": 1 + reach})


def test_one_seed_has_no_interval():
    with pytest.raises(ValueError, match="1 values have no interval; two or more seeds do"):
        statistics.student([1.0])


def found_by(monkeypatch, verdict, **results):
    """The verdicts' second column, of results by the name that they are kept under."""
    module = sys.modules[getattr(verdict, "func", verdict).__module__]
    monkeypatch.setattr(module, "read", lambda name: results[name.removeprefix("papers/")])
    return [line[2] for line in verdict()]


# ---- figure 2a -----------------------------------------------------------------------------------


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
        ((1.1, 0.1, 0.3, NOISE), ["yes", "yes", None]),
        ((3.0, 0.9, 0.9, NOISE), ["**no**", "**no**", None]),
        ((1.1, 0.4, 0.4, WIDE), ["undecided", "undecided", None]),
    ],
)
def test_features_are_consistent_or_vanish_by_their_intervals(monkeypatch, rows, expected):
    result = cbs_features.compare(feature_rows(*rows))
    found = found_by(monkeypatch, verdicts.features, cbs_features=result)
    assert [verdict for verdict, hoped in zip(found, expected, strict=True) if hoped] == [
        hoped for hoped in expected if hoped
    ]


@pytest.mark.parametrize(("share", "holds"), [(0.1, "yes"), (0.9, "**no**")])
def test_the_effect_is_most_pronounced_where_the_share_is_least(monkeypatch, share, holds):
    rows = feature_rows(1.0, share, 0.3, NOISE)
    for row in rows:  # a noise of BTT's and Kronecker's own
        if row["structure"] in ("BTT r=1", "Kronecker") and row["rule"] == "naive":
            row["change"] *= math.exp(NOISE[row["seed"]])
    result = cbs_features.compare(rows)
    assert found_by(monkeypatch, verdicts.features, cbs_features=result)[2] == holds


def test_a_step_changes_the_features_by_more_with_the_rule_than_without():
    changes = {
        rule: cbs_features.train("BTT r=1", 64, rule, 0, steps=3)["change"]
        for rule in cbs_features.RULES
    }
    assert changes["aware"] > 2 * changes["naive"] > 0


def test_lowrank_keeps_its_first_layer_dense():
    names = {
        structure: [name for name, _ in cbs_features.build_mlp(structure, 64).named_parameters()]
        for structure in ("low-rank", "BTT r=1")
    }
    assert "0.weight" in names["low-rank"]
    assert "0.weight" not in names["BTT r=1"]
    assert not any(name.endswith("bias") for found in names.values() for name in found)


# ---- figure 1c -----------------------------------------------------------------------------------


def power_rows(structure, exponent, noise, scale=1.0):
    """Loss scale * FLOPs^-exponent, the exponent times exp(noise of the seed)."""
    return [
        {"task": "digits", "structure": structure, "width": width, "lr": cbs_scaling.LR}
        | {"seed": seed, "flops": 1000 * width}
        | {"loss": scale * width ** (-exponent * math.exp(noise[seed]))}
        for width in (16, 64, 256)
        for seed in range(3)
    ]


@pytest.mark.parametrize(
    ("naive", "monarch", "noise", "expected"),
    [
        (0.05, 0.28, NOISE, ["yes", "yes", "yes"]),
        (0.28, 0.05, NOISE, ["**no**", "**no**", "in part"]),
        (0.15, 0.15, WIDE, ["undecided", "undecided", None]),
    ],
)
def test_naive_structures_saturate_by_their_intervals(monkeypatch, naive, monarch, noise, expected):
    kept = [
        row
        for name, power in {"dense": 0.2, **dict.fromkeys(cbs_untuned.NAMES, 0.3)}.items()
        for row in power_rows(name, power, NOISE)
    ]
    rows = [
        row
        for name, power in (("BTT r=1", naive), ("Kronecker", naive), ("Monarch b=4", monarch))
        for row in power_rows(name, power, noise)
    ]
    monkeypatch.setattr(cbs_untuned, "kept", lambda: kept)
    result = cbs_untuned.analyse(rows)
    found = found_by(monkeypatch, verdicts.untuned, cbs_untuned=result)
    assert all(hoped in (None, verdict) for verdict, hoped in zip(found, expected, strict=True))


# ---- figures 4 and 6 -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exponent", "noise", "holds"), [(0.1, NOISE, True), (0.3, NOISE, False), (0.2, WIDE, None)]
)
def test_a_structure_is_flatter_than_dense_by_its_interval(monkeypatch, exponent, noise, holds):
    rows = power_rows("dense", 0.2, NOISE) + power_rows("Kronecker", exponent, noise)
    monkeypatch.setattr(verdicts, "read", lambda name: {"rows": rows})
    found = verdicts.flatness("digits", "Kronecker")
    assert statistics.below(found) is holds
    assert noise is WIDE or found["value"] == pytest.approx(exponent - 0.2, abs=1e-3)


@pytest.mark.parametrize(
    ("power", "noise", "expected"),
    [(0.4, NOISE, "yes"), (0.1, NOISE, "**no**"), (0.2, WIDE, "undecided")],
)
def test_costlier_structures_are_better_per_width_by_their_intervals(
    monkeypatch, power, noise, expected
):
    rows = [
        row
        for costly, cheap in (verdicts.RANKS, verdicts.BLOCKS)
        for row in power_rows(costly, power, noise) + power_rows(cheap, 0.2, NOISE)
    ]
    monkeypatch.setattr(verdicts, "TASKS", ("digits",))
    found = found_by(monkeypatch, verdicts.per_width, cbs_scaling={"rows": rows})
    assert found == [expected] * 2


# ---- MD, 6.4 and 6.5 -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "power", "noise", "expected"),
    [
        (1.0, 0.0, NOISE, ["yes", "yes"]),
        (0.5, -1.0, NOISE, ["**no**", "in part"]),
        (1.0, 0.0, WIDE, ["in part, else undecided", "undecided"]),
    ],
)
def test_alignment_and_movement_are_judged_by_the_powers_of_the_width(
    monkeypatch, level, power, noise, expected
):
    rows = [
        {"way": way, "width": width, "seed": seed}
        | dict.fromkeys(md_alignment.NUMBERS, level * (width / 64) ** (each + noise[seed]))
        for way, each in zip(md_alignment.WAYS, (power, -0.5, -0.5), strict=True)
        for width in (64, 256)
        for seed in range(3)
    ]
    result = {"estimates": md_alignment.estimates(rows)}
    assert found_by(monkeypatch, verdicts.aligned, md_alignment=result) == expected


def power_models(study, powers, noise, scales):
    """Of each structure 0.2 or its power, with the `noise` where it has one."""
    rows = [
        row
        for name in study.widths
        for row in power_rows(
            name, powers.get(name, 0.2), noise if name in powers else NOISE, scales.get(name, 1.0)
        )
    ]
    return {"rows": rows, **study.analyse(rows)}


@pytest.mark.parametrize("study", cbs_vision.STUDIES, ids=lambda study: study.name)
@pytest.mark.parametrize(
    ("btt", "sharing", "monarch", "scales", "expected"),
    [(0.3, 0.1, 0.19, (1.0, 0.9), "yes"), (0.1, 0.3, 0.25, (3.0, 2.0), "**no**")],
)
def test_models_of_figure_4_scale_by_their_intervals(
    monkeypatch, study, btt, sharing, monarch, scales, expected
):
    shared = [name for name in study.widths if name.startswith(("Kronecker", "TT"))]
    powers = {"BTT r=1": btt, "Monarch b=4": monarch} | dict.fromkeys(shared, sharing)
    scales = dict(zip(("BTT r=1", "Monarch b=4"), scales, strict=True))
    result = power_models(study, powers, NOISE, scales)
    found = found_by(monkeypatch, partial(verdicts.vision, study.name), **{study.name: result})
    assert found == [expected] * 5


def test_models_whose_seeds_disagree_leave_the_best_structure_undecided(monkeypatch):
    result = power_models(cbs_vision.STUDIES[1], {"BTT r=1": 0.2}, WIDE, {})
    judged = found_by(monkeypatch, partial(verdicts.vision, "cbs_vit"), cbs_vit=result)
    assert judged[:2] == ["undecided"] * 2


# ---- figures 3 and 9 -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gain", "noise", "expected"),
    [(0.8, NOISE, "yes"), (1.2, NOISE, "**no**"), (1.0, WIDE, "undecided")],
)
def test_the_rule_helps_beside_dense_attention_by_its_intervals(monkeypatch, gain, noise, expected):
    rows = [
        {"method": rule, "size": 256, "lr": lr, "seed": seed}
        | dict.fromkeys(
            cbs_ffn.PARTS, lr * (gain * math.exp(noise[seed]) if rule == "aware" else 1)
        )
        for rule in ("aware", "naive")
        for lr in (1.0, 2.0)
        for seed in range(3)
    ]
    result = {"setting": {"width": 256, "steps": 400}, **cbs_ffn.compare(rows)}
    assert found_by(monkeypatch, verdicts.some_layers, cbs_ffn=result) == [expected]


@pytest.mark.parametrize(
    ("total", "body", "reach", "expected"),
    [
        (-0.05, 0.0, 0.005, ["yes", "yes", "yes"]),
        (-0.05, -0.05, 0.005, ["yes", "**no**", "**no**"]),
        (0.05, 0.05, 0.005, ["**no**", "**no**", "**no**"]),
        (-0.05, 0.0, 0.1, ["undecided"] * 3),
    ],
)
def test_gpts_gain_by_the_head_by_their_intervals(monkeypatch, total, body, reach, expected):
    def around(value):
        return {"value": value, "low": value - reach, "high": value + reach}

    ratios = {"all FLOPs": around(total), "without the head's FLOPs": around(body)}
    ratios["all FLOPs, one rate"] = around(total)
    ratios["beyond half of the gain"] = around(body - total / 2)
    setting = {"rank": 4, "heads": 2, "steps": 300}
    result = {"setting": setting, "log_ratios": ratios}
    assert found_by(monkeypatch, verdicts.heads, cbs_gpt=result) == expected


# ---- MN, D.5 -------------------------------------------------------------------------------------


def normed_and_plain(gain, noise):
    """Losses that are least at the second rate; a normed optimizer has `gain` of the plain one's,
    times exp(noise of the seed)."""
    return [
        {"width": 64, "method": method, "lr": lr, "seed": seed}
        | dict.fromkeys(
            mn_tasks.SETS,
            (1 + abs(n - 1)) * (gain * math.exp(noise[seed]) if "normed" in method else 1.0),
        )
        for method in mn_normed.LRS
        for n, lr in enumerate((0.1, 0.2, 0.4))
        for seed in range(3)
    ]


@pytest.mark.parametrize(
    ("gain", "noise", "expected"),
    [
        (0.8, NOISE, ["yes", "yes"]),
        (1.0, NOISE, ["yes", "undecided"]),  # it matches, and does not outperform
        (1.2, NOISE, ["**no**", "**no**"]),
        (1.0, WIDE, ["undecided", "undecided"]),
    ],
)
def test_normed_training_ends_lower_by_its_interval(monkeypatch, gain, noise, expected):
    result = {"comparisons": mn_normed.compare(normed_and_plain(gain, noise))}
    assert found_by(monkeypatch, verdicts_norm.tuned_normed, mn_normed=result) == expected


def test_a_rate_that_diverges_for_a_seed_is_not_the_best_and_an_end_is_said_to_be_one():
    rows = normed_and_plain(1.0, NOISE)
    for row in rows:
        if (row["method"], row["lr"], row["seed"]) == ("Adam", 0.2, 1):
            row["train"] = None
    rows = [row for row in rows if row["method"] == "Adam"]
    assert statistics.tuned(rows, "train")["at end"]
    assert not statistics.tuned(rows, "test")["at end"]


def test_images_that_are_tested_on_are_not_trained_on():
    train, test = (Digits(0, part) for part in mn_tasks.SETS)
    whole = Digits(0)
    assert len(train.labels) + len(test.labels) == len(whole.labels)
    chosen = {tuple(image.tolist()) for image in train.moved[4]}
    assert not chosen & {tuple(image.tolist()) for image in test.moved[4]}


def test_plain_optimizers_have_the_papers_rates():
    net = mn_tasks.build("ResMLP", width=16, blocks=1)
    rates = {
        method: [group["lr"] for group in mn_tasks.optimizer(net, method, 1.0).param_groups]
        for method in ("Adam", "SGD")
    }
    scales = [math.sqrt(m / n) for m, n in (tuple(w.shape) for w in net.parameters())]
    assert sorted(rates["Adam"]) == pytest.approx(sorted(scales))
    assert sorted(rates["SGD"]) == pytest.approx(sorted(scale**2 for scale in scales))


# ---- MN, figures 1, 3, 4, 5 and 7 ----------------------------------------------------------------


def estimate(value, noise):
    return statistics.student([value + each for each in noise])


def transfers_and_losses(moved, more, ratio, noise):
    """A result of `mn_transfer` with the same number everywhere."""
    row = {"optima": {"16": 0.0, "64": 0.0}, "estimates": {"moved": estimate(moved, noise)}}
    names = [*verdicts_norm.NETWORKS, "nanoGPT"]
    axes = ("width", "blocks")
    of_axes = {axis: estimate(more, noise) for axis in axes}
    return {
        "setting": {"steps": 50},
        "transfer": {
            f"{name}, {axis}": dict.fromkeys(mn_tasks.METHODS, row)
            for name in names
            for axis in axes
        },
        "comparisons": {
            "transfer": {name: dict.fromkeys(("Adam", "SGD"), of_axes) for name in names},
            "losses": [
                {"pair": [["GPT", f"normed {name}"], ["GPT", name]], "set": part}
                | estimate(math.log(ratio), noise)
                for name in ("Adam", "SGD")
                for part in mn_tasks.SETS
            ],
        },
    }


CASES = [  # moved, more, ratio, noise, expected
    (0.5, 1.0, 0.8, NOISE, "yes"),
    (-2.0, -1.0, 1.2, NOISE, "**no**"),
    (0.9, 0.1, 1.0, WIDE, "undecided"),
]


@pytest.mark.parametrize(("moved", "more", "ratio", "noise", "expected"), CASES)
def test_transfer_is_successful_and_better_by_its_intervals(
    monkeypatch, moved, more, ratio, noise, expected
):
    result = transfers_and_losses(moved, more, ratio, noise)
    monkeypatch.setattr(verdicts_norm, "read", lambda name: result)
    assert verdicts_norm.transferred("GPT", "MN 1")[2] == expected
    assert verdicts_norm.across_width()[2] == expected
    assert [line[2] for line in verdicts_norm.losses_over_sizes()] == [expected] * 2
    nano = result | {"comparisons": result["comparisons"] | {"transfer": {}}}
    nano["comparisons"]["transfer"] = result["comparisons"]["transfer"]["GPT"]["Adam"]
    monkeypatch.setattr(verdicts_norm, "read", lambda name: nano)
    assert [line[2] for line in verdicts_norm.against_nanogpt()] == [expected] * 2


@pytest.mark.parametrize(
    ("moved", "cost", "noise", "expected"),
    [
        (0.5, 0.005, (-0.001, 0, 0.001), ["yes", "yes"]),
        (3.0, 0.2, NOISE, ["**no**", "**no**"]),
        (0.5, 0.01, WIDE, ["undecided", "undecided"]),
    ],
)
def test_masses_and_rates_transfer_by_their_intervals(monkeypatch, moved, cost, noise, expected):
    costs = {str(mass): estimate(cost, noise) for mass in mn_mass_gpt.MASSES}
    result = {
        "moved": {"mass": estimate(moved, noise), "lr": estimate(moved, noise)},
        "cost": estimate(cost, noise),
        "masses": dict.fromkeys(CORPORA, costs),
    }
    found = found_by(monkeypatch, verdicts_norm.masses_of_gpts, mn_mass_gpt={"estimates": result})
    assert found == expected
