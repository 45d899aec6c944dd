"""What the scripts for CBS compute from their rows: fits, comparisons, claims; and the tasks that
they train on."""

import math

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from benchmarks.harness import models, statistics, tasks, training
from benchmarks.harness.models import ViT
from benchmarks.papers import (
    cbs,
    cbs_ffn,
    cbs_gpt,
    cbs_norm,
    cbs_projection,
    cbs_scaling,
    cbs_tuning,
    cbs_vision,
)
from structlin import BTT, StructuredLinear


def power_law(structure, exponent, scale=1.0, seeds=(0, 1, 2), task="teacher", noise=0.0):
    """Rows with loss = scale * FLOPs^-exponent, times exp(noise * (seed - 1))."""
    return [
        {
            "task": task,
            "structure": structure,
            "width": width,
            "lr": 0.1,
            "seed": seed,
            "flops": 1000 * width,
        }
        | {"loss": scale * (1000 * width) ** -exponent * math.exp(noise * (seed - 1))}
        for width in (16, 64, 256)
        for seed in seeds
    ]


# ---- fits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exponent", [0.1, 0.5, -0.2])
def test_the_exponent_of_a_power_law_is_recovered(exponent):
    curve = statistics.curve_of(power_law("dense", exponent, scale=3.0), [0, 1, 2])
    assert statistics.exponent(curve) == pytest.approx(exponent)


def test_the_gap_is_the_log_ratio_where_both_curves_have_values():
    dense = [(math.log(x), -0.25 * math.log(x)) for x in (10.0, 100.0, 1000.0)]
    ours = [(math.log(x), -0.25 * math.log(x) + math.log(0.8)) for x in (50.0, 5000.0)]
    assert statistics.gap(ours, dense) == pytest.approx(math.log(0.8))
    assert statistics.gap(dense, ours) == pytest.approx(-math.log(0.8))


def test_curves_without_common_flops_are_refused():
    with pytest.raises(ValueError, match="share no FLOPs: one starts at 100, one ends at 10"):
        statistics.gap(
            [(math.log(1), 0.0), (math.log(10), 0.0)], [(math.log(100), 0.0), (math.log(1000), 0.0)]
        )


def test_a_width_counts_at_its_best_rate_and_a_seed_as_often_as_it_is_drawn():
    rows = [
        {"width": 8, "lr": lr, "seed": seed, "flops": 100, "loss": loss}
        for lr, losses in {0.1: (2.0, 8.0), 0.2: (1.0, None)}.items()
        for seed, loss in enumerate(losses)
    ]
    assert statistics.curve_of(rows, [0, 1]) == [
        (pytest.approx(math.log(100)), pytest.approx(math.log(4)))
    ]
    assert statistics.curve_of(rows, [0, 0]) == [
        (pytest.approx(math.log(100)), pytest.approx(math.log(2)))
    ]


def test_the_interval_spans_the_seeds_and_shrinks_to_nothing_when_they_agree():
    spread = statistics.bootstrap(lambda seeds: sum(seeds) / len(seeds), [0, 1, 2])
    assert spread["value"] == 1
    assert spread["low"] == pytest.approx(0)
    assert spread["high"] == pytest.approx(2)
    assert statistics.bootstrap(lambda seeds: 7.0, [0, 1, 2]) == {
        "value": 7.0,
        "low": 7.0,
        "high": 7.0,
    }


# ---- tables from fixed rows ----------------------------------------------------------------------


def test_structures_are_compared_with_dense_and_in_pairs(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 40)
    scales = {"BTT r=1": 0.9, "dense": 1.3, "Kronecker": 1.5}
    rows = [
        row
        for name, scale in scales.items()
        for row in power_law(name, 0.25 if name == "BTT r=1" else 0.2, scale, noise=0.1)
    ]
    found = cbs_scaling.compare(rows)
    assert found["exponents"]["BTT r=1"]["value"] == pytest.approx(0.25)
    assert found["against_dense"]["Kronecker"]["value"] == pytest.approx(math.log(1.5 / 1.3))
    assert [row["pair"] for row in found["log_ratios"]] == [
        ("BTT r=1", "dense"),
        ("BTT r=1", "Kronecker"),
    ]  # of structures that were run
    assert all(row["high"] < 0 for row in found["log_ratios"])
    assert found["exponent_differences"][0]["low"] > 0


def tuning_rows(naive_loss):
    """BTT is best at 2 for the naive rule and at 1 for the aware one; dense at 1."""
    losses = {("dense", "aware"): {1: 0.5, 2: 0.6}, ("BTT r=1", "aware"): {1: 0.4, 2: 0.7}}
    losses |= {
        ("BTT r=1", "naive"): {1: 0.8, 2: naive_loss},
        ("BTT r=1", "aware, others x4"): {1: 0.3, 2: None},
    }
    return [
        {"structure": structure, "width": width, "rule": rule, "lr": lr, "seed": 0, "loss": loss}
        for (structure, rule), by_lr in losses.items()
        for width in (64, 256)
        for lr, loss in by_lr.items()
    ]


@pytest.mark.parametrize(("naive_loss", "ratio"), [(0.6, 1.5), (0.4, 1.0), (0.2, 0.5)])
def test_tuning_compares_each_rule_at_its_best_rate(naive_loss, ratio):
    found = cbs_tuning.advantages(cbs_tuning.tabulate(tuning_rows(naive_loss)))
    assert [row["tuned"] for row in found if row["rule"] == "aware"] == [pytest.approx(ratio)] * 2
    assert [row["dense's"] for row in found if row["rule"] == "aware"] == [pytest.approx(2.0)] * 2
    assert [row["tuned"] for row in found if row["rule"] != "aware"] == [
        pytest.approx(naive_loss / 0.3)
    ] * 2


def norm_rows(plain, normed):
    curves = {"dense": (1, 1, 1), "BTT": plain, "BTT, normalised": normed}
    return [
        {
            "model": model,
            "lr": lr,
            "seed": seed,
            "loss": 2.0,
            "rms": [[step, size] for step, size in enumerate(curve)],
        }
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


def test_a_model_that_diverged_has_no_loss_in_the_table():
    rows = norm_rows((1, 6, 9), (1, 2, 2))
    next(row for row in rows if row["model"] == "BTT")["loss"] = None
    table = cbs_norm.tabulate(rows)
    assert [row["model"] for row in table if row["loss"] is None] == ["BTT"]
    grown = statistics.one(table, lr="usual", model="BTT, normalised")
    assert (grown["start"], grown["half"], grown["end"]) == (1, 2, 2)


def gpt_rows(structure, head, gain=1.0):
    """Loss (FLOPs of the body)^-0.1 times `gain`; the head has `head` times the FLOPs of the
    body."""
    rows = [
        {
            "structure": structure,
            "width": body,
            "lr": cbs_gpt.LR,
            "eps": eps,
            "seed": seed,
            "loss": gain * body**-0.1,
        }
        | {"flops": body + head * body, "head_flops": head * body, "body_flops": body}
        for body in (100, 1000, 10000)
        for seed in (0, 1)
        for eps in (cbs_gpt.EPS, cbs_gpt.USUAL_EPS)
    ]
    return [row for row in rows if row["eps"] == cbs_gpt.EPS or row["width"] == 100]


@pytest.mark.parametrize(
    ("head", "gain"),
    [(0.0, 1.0), (1.0, 0.8), (1.0, 1.1)],  # a cheap head, a better model, a worse one
)
def test_gpt_tells_a_cheaper_head_from_a_better_model(head, gain):
    found = cbs_gpt.compare(gpt_rows("dense", 1.0) + gpt_rows("BTT", head, gain))
    assert found["all FLOPs"]["value"] == pytest.approx(
        math.log(gain) - 0.1 * math.log(2 / (1 + head))
    )
    assert found["without the head's FLOPs"]["value"] == pytest.approx(math.log(gain))
    assert found["all FLOPs, one rate"] == found["all FLOPs"]
    assert found["beyond half of the gain"]["value"] == pytest.approx(
        math.log(gain) - found["all FLOPs"]["value"] / 2
    )
    assert found["same width, usual eps"]["value"] == pytest.approx(math.log(gain))


@pytest.mark.parametrize(
    ("structure", "width", "features"),
    [("BTT", 256, 64), ("BTT", 576, 64), ("dense", 128, 128)],
)
def test_the_heads_of_btt_are_as_many_at_every_width(structure, width, features):
    task = tasks.Words(0, batch=2, context=8, depth=1, vocabulary=32)
    attention = cbs_gpt.build(task, structure, width).blocks[0].attn
    assert attention.c_proj.in_features == features
    assert isinstance(attention.c_proj, StructuredLinear) == (structure != "dense")


# ---- figure 4 ------------------------------------------------------------------------------------


MLPS, VITS = cbs_vision.STUDIES


def study_rows(study, exponents):
    return [
        row
        for structure in study.widths
        for row in power_law(structure, exponents.get(structure, 0.2), noise=0.1)
    ]


def test_models_of_figure_4_are_compared_pair_by_pair():
    rows = study_rows(VITS, {"BTT r=1": 0.3, "Kronecker": 0.1})
    found = VITS.analyse(rows)
    assert found["exponents"]["BTT r=1"]["value"] == pytest.approx(0.3)
    pairs = {tuple(row["pair"]): row for row in found["pairs"]}
    assert len(pairs) == 10
    assert pairs["BTT r=1", "dense"]["steeper"]["value"] == pytest.approx(0.1)
    assert pairs["Kronecker", "dense"]["steeper"]["value"] == pytest.approx(-0.1)
    middle = math.log(1000 * 64)  # of the FLOPs, in logarithms
    assert pairs["Kronecker", "dense"]["loss"]["value"] == pytest.approx(0.1 * middle)


@pytest.mark.filterwarnings("ignore:these layers grow")  # TT r=8 does, at its smallest width
@pytest.mark.parametrize(
    ("study", "structure", "layers", "zero"),
    [(MLPS, name, 2, ("c_proj",)) for name in MLPS.widths]
    + [(VITS, name, 6, ("c_proj", "query")) for name in VITS.widths],
)
def test_all_layers_of_the_blocks_are_structured_and_the_last_cores_start_at_zero(
    study, structure, layers, zero
):
    model = study.build(64, structure)
    found = {n: m for n, m in model.named_modules() if isinstance(m, StructuredLinear)}
    assert len(found) == layers * ViT.depth
    assert all(name.startswith("blocks.") for name in found)
    starts = {name for name, layer in found.items() if not layer.cores[-1].any()}
    assert starts == {name for name in found if name.endswith(zero)}


def test_only_the_ffns_of_a_vit_are_structured():
    layers = {
        name
        for name, module in cbs_ffn.build(64).named_modules()
        if isinstance(module, StructuredLinear)
    }
    assert layers == {f"blocks.{n}.part.{name}" for n in (1, 3, 5) for name in ("c_fc", "c_proj")}


def ffn_rows(aware, noise=(-0.01, 0.0, 0.01)):
    """The naive rule is best at 2 and has loss and error 1, the others at 1 and have `aware`."""
    return [
        {"method": rule, "size": 64, "lr": lr, "seed": seed}
        | dict.fromkeys(cbs_ffn.PARTS, (1.0 if rule == "naive" else aware * math.exp(noise[seed])))
        for rule in cbs_ffn.STARTS
        for lr in ([2.0] if rule == "naive" else [1.0])
        for seed in range(3)
    ] + [
        {"method": "naive", "size": 64, "lr": 1.0, "seed": seed, "loss": 3.0, "error": None}
        for seed in range(3)
    ]


def test_each_rule_is_compared_at_its_best_rate():
    found = cbs_ffn.compare(ffn_rows(0.5))
    assert found["tuned"]["loss"]["naive"]["lr"] == 2.0
    assert found["tuned"]["error"]["naive"]["logs"] == {0: 0.0, 1: 0.0, 2: 0.0}
    for ratio in found["aware / naive"].values():
        assert ratio["value"] == pytest.approx(math.log(0.5))
        assert ratio["low"] < ratio["value"] < ratio["high"]


@pytest.mark.parametrize(("rule", "factor"), [("aware", 8), ("naive", 1)])
def test_the_rules_rates(rule, factor):
    """At width 64 the second layer of an FFN has cores that read 16 features of 256: the rule gives
    them 8 times dense's rate."""
    optimizer = cbs_ffn.make_optimizer(cbs_ffn.build(64), rule, 1.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert max(rates) / min(rates) == pytest.approx(factor)


def test_the_bounds_are_those_of_the_paper():
    assert cbs_projection.bounds("BTT", (8, 8), (6, 6)) == [6]
    assert cbs_projection.bounds("TT", (8, 8), (6, 6)) == [48]
    assert cbs_projection.bounds("low-rank", (64,), (36,)) == [36]
    assert cbs_projection.bounds("BTT, 3 cores", (3, 3, 3), (4, 4, 4)) == [4, 3]
    assert cbs_projection.bounds("TT, 3 cores", (2, 2, 2), (3, 3, 3)) == [6, 6]


def test_a_layer_is_exact_at_the_papers_bound_and_not_before():
    rows = [
        {"structure": "BTT", "in": 64, "out": 36, "rank": rank, "seed": seed}
        | cbs_projection.measure("BTT", rank, seed, **{"in": 64, "out": 36})
        for rank in range(1, 7)
        for seed in (0, 1)
    ]
    table = cbs_projection.summarise(rows)
    assert table[0]["falls"]
    assert table[0]["bonds"] == [6]
    inclusions = {"A is in B": 0.0, "A is in no B": 0.5, "A is in C": 0.1}
    found = cbs_projection.holds({"table": table, "containments": inclusions})
    assert found == [True, True, True, False]
    early = cbs_projection.summarise([row for row in rows if row["rank"] < 6])
    assert cbs_projection.holds({"table": early, "containments": {}}) == [False]


# ---- tasks and models ----------------------------------------------------------------------------


def test_a_teacher_gives_new_samples_of_unit_variance_from_its_seed_alone():
    teacher, again = tasks.Teacher(3), tasks.Teacher(3)
    x, y = teacher.batch(4096)
    assert x.shape == (4096, 16)
    torch.testing.assert_close(y.var(0), torch.ones(4), atol=0.15, rtol=0)
    torch.testing.assert_close(y, again.batch(4096)[1])
    assert not torch.equal(teacher.batch(8)[0], x[:8])
    assert not torch.allclose(tasks.Teacher(4).batch(4096)[1], y)


def test_a_digit_is_moved_by_at_most_a_pixel_and_keeps_its_label(monkeypatch):
    monkeypatch.setattr(tasks.Digits, "noise", 0.0)
    task = tasks.Digits(0)
    images, labels = tasks.digits()
    x, y = task.batch(16)
    for moved, label in zip(x.unflatten(1, (8, 8)), y, strict=True):
        same = images[labels == label].unflatten(1, (8, 8))
        inner = [same[:, 1 + i : 7 + i, 1 + j : 7 + j] for i in (-1, 0, 1) for j in (-1, 0, 1)]
        assert any((part == moved[1:7, 1:7]).all(-1).all(-1).any() for part in inner)


def test_only_the_square_matrices_of_the_mlp_are_structured():
    model = models.structured_mlp(16, 64, 4, BTT(rank=1))
    assert [
        name for name, module in model.named_modules() if isinstance(module, StructuredLinear)
    ] == ["2", "4"]
    assert not model[6].weight.any()
    flops = 2 * (16 * 64 + 2 * 2 * 64 * 8 + 64 * 4)
    assert training.forward_flops(model, torch.zeros(1, 16)) == flops


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_training_beats_the_mean(optimizer):
    lr = {"adam": 2.0**-6, "sgd": 0.5}[optimizer]
    row = cbs.train_mlp("teacher", "dense", 64, lr, 0, 40, optimizer=optimizer)
    assert row["loss"] < 0.7
    assert row["flops"] == 2 * (16 * 64 + 2 * 64 * 64 + 64 * 4)


def test_a_run_that_diverges_has_no_loss():
    assert cbs.train_mlp("teacher", "dense", 64, 1e6, 0, 8, optimizer="sgd")["loss"] is None


def test_words_are_the_most_frequent_pieces_of_the_text():
    task = tasks.Words(0, batch=2, context=8, depth=1, vocabulary=32)
    inputs, targets = task.batch(0)
    assert inputs.shape == targets.shape == (2, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    counts = tasks.word_ids(32).bincount(minlength=32)
    assert len(counts) == 32
    assert (counts[:30] >= counts[1:31]).all()
    assert task.model(32)(inputs).shape == (2, 8, 32)
