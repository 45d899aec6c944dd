"""benchmarks/papers/md_*, mn_* and bm_*: what they compute from their runs. CI runs the scripts
themselves."""

import math

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

import structlin
from benchmarks.harness import statistics, tasks
from benchmarks.harness.models import NanoGPT
from benchmarks.harness.tasks import CORPORA, Text, text
from benchmarks.papers import (
    bm_metrics,
    bm_norms,
    md_alignment,
    md_coefficients,
    md_watermark,
    md_width,
    mn_context,
    mn_mass,
    mn_mass_gpt,
    mn_tasks,
)
from benchmarks.papers import mn_transfer as mn_transfers


def sweep(method, optima, lrs=range(-8, 3), steepness=0.3):
    """Runs whose log loss is a parabola in log2 lr, with its vertex at the given place for each
    size."""
    return [
        {
            "method": method,
            "size": size,
            "lr": 2.0**p,
            "seed": 0,
            "loss": math.exp(steepness * (p - centre) ** 2) / size,
        }
        for size, centre in optima.items()
        for p in lrs
    ]


def test_the_best_rate_of_a_parabola_is_its_vertex():
    found = statistics.transfer(sweep("Adam", {16: -2.3, 64: -4.3, 256: -6.3}))["Adam"]
    assert found["optima"] == pytest.approx({16: -2.3, 64: -4.3, 256: -6.3})
    assert found["drift"] == pytest.approx(-1)
    assert found["range"] == pytest.approx(4)
    assert found["cost"] == pytest.approx(math.exp(0.3 * (4.3**2 - 0.3**2)))  # at 2^-2 and at 2^-6
    assert found["bracketed"]


def test_a_best_rate_at_the_end_of_the_sweep_is_not_bracketed():
    assert not statistics.transfer(sweep("Adam", {16: -9.0, 64: -4.0}))["Adam"]["bracketed"]


def test_one_seed_that_diverges_makes_a_rate_useless():
    rows = sweep("Adam", {16: -2.0})
    rows.append({"method": "Adam", "size": 16, "lr": 2.0**-2, "seed": 1, "loss": None})
    assert statistics.losses(rows)["Adam", 16][2.0**-2] == math.inf
    found = statistics.transfer(rows)["Adam"]
    assert found["optima"][16] in (-3.0, -1.0)


def test_estimates_of_md_figure_1_are_of_the_seeds_drifts_and_losses():
    flat, falling = {32: -3.0, 512: -3.2}, {32: -2.0, 512: -6.0}
    rows = []
    for seed, moved in enumerate((-0.1, 0.0, 0.1)):
        for method, optima in (("Adam, SP", falling), ("Adam, muP", flat), ("dualized", flat)):
            optima = {size: centre + moved * (size == 512) for size, centre in optima.items()}
            share = 0.5 if method == "dualized" else 1.0
            rows += [
                row | {"seed": seed, "loss": share * row["loss"]} for row in sweep(method, optima)
            ]
    found = md_width.estimates(rows)
    drift = found["drift"]["Adam, SP"]
    assert drift["value"] == pytest.approx(-1)
    assert drift["high"] - drift["value"] == pytest.approx(4.303 * 0.025 / 3**0.5, rel=1e-3)
    assert found["excess"]["dualized"]["value"] == pytest.approx(0.05 - 0.5)
    assert set(found["excess"]) == {"Adam, muP", "dualized"}
    for width in ("32", "512"):
        assert found["dualized / Adam"][width]["value"] == pytest.approx(math.log(0.5), abs=0.05)


def test_a_search_goes_by_factors_of_2_until_the_best_rate_has_both_its_neighbours():
    optima, tried = {8: 2.0, 16: -1.0}, []

    def run(size, lrs):
        tried.append((size, [math.log2(lr) for lr in lrs]))
        powers = [int(math.log2(lr)) for lr in lrs]
        return sweep("Adam", {size: optima[size]}, powers)

    rows = statistics.search(run, [8, 16], start=1.0)
    assert tried[:3] == [(8, [-1, 0, 1]), (8, [2]), (8, [3])]
    assert tried[3:] == [(16, [1, 2, 3]), (16, [0]), (16, [-1]), (16, [-2])]
    assert statistics.transfer(rows)["Adam"]["optima"] == pytest.approx(optima)


def transfer_rows(moved, gain=1.0):
    """Of the GPT: plain optima that move by -4 over either axis, normed ones by `moved`; normed
    losses are `gain` of the plain ones, and those on the test set twice as large."""
    rows = []
    for axis, seed in ((axis, seed) for axis in ("width", "blocks") for seed in range(3)):
        for method in mn_tasks.METHODS:
            last, factor = (moved, gain) if "normed" in method else (-4.0, 1.0)
            found = sweep(method, {16: -2.0, 64: -2.0 + last + 0.1 * seed})
            named = {"network": "GPT", "axis": axis, "seed": seed}
            rows += [
                row | named | {"loss": factor * row["loss"], "test": 2 * factor * row["loss"]}
                for row in found
            ]
    return rows


def test_estimates_of_mn_figure_1_are_of_each_seeds_moves_and_losses():
    rows = transfer_rows(moved=-0.5, gain=0.9)
    found = mn_tasks.transfers(rows, "network", "axis")["GPT, width"]
    assert found["normed SGD"]["estimates"]["moved"]["value"] == pytest.approx(-0.4)
    assert found["SGD"]["estimates"]["moved"]["value"] == pytest.approx(-3.9)
    compared = mn_transfers.comparisons(rows)
    for axis in ("width", "blocks"):
        assert compared["transfer"]["GPT"]["Adam"][axis]["value"] == pytest.approx(3.9 - 0.4)
    assert len(compared["losses"]) == 2 * 2 * 2 * 2  # optimizers, axes, sizes, sets
    for row in compared["losses"]:
        assert row["value"] == pytest.approx(math.log(0.9), abs=0.05)
        assert row["pair"][0] == ("GPT", f"normed {row['pair'][1][1]}")


def test_nanogpt_starts_as_its_repository_has_it_and_its_head_is_its_embedding():
    torch.manual_seed(0)
    net = NanoGPT(90, context=16, width=64, blocks=8)
    stds = {name: weight.std().item() for name, weight in net.named_parameters() if weight.ndim > 1}
    for name, std in stds.items():
        expected = 0.02 / math.sqrt(2 * 8) if name.endswith("_proj.weight") else 0.02
        assert std == pytest.approx(expected, rel=0.1)
    assert sum(name.endswith("_proj.weight") for name in stds) == 2 * 8
    tokens = torch.randint(90, (2, 16))
    logits = net(tokens)
    others = torch.randint(90, (32,))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), others).item()
    assert loss == pytest.approx(math.log(90), abs=0.1)
    changed = tokens.clone()
    changed[:, 9:] = 0  # no token sees those after it
    torch.testing.assert_close(net(changed)[:, :9], logits[:, :9])
    with torch.no_grad():
        net.wte.weight.zero_()
    assert not net(tokens).any()


def mass_rows(optima):
    """Losses that are least at a mass and a rate, (log2, log2), by size and text."""
    return [
        {"size": size, "corpus": corpus, "mass": mass, "lr": lr, "seed": seed}
        | {"loss": math.exp(0.1 * (math.log2(mass) - m) ** 2 + 0.1 * (math.log2(lr) - r) ** 2)}
        for (size, corpus), (m, r) in optima.items()
        for mass in mn_mass_gpt.MASSES
        for lr in mn_mass_gpt.LRS
        for seed in range(3)
    ]


def test_masses_and_rates_move_and_cost_what_the_rows_say():
    optima = {("small", name): (0.0, 0.0) for name in CORPORA}
    optima |= {("small", "C++"): (2.0, 0.0), ("larger", "documentation"): (2.0, -1.0)}
    found = mn_mass_gpt.estimates(mass_rows(optima))
    assert found["best"] == {"small": [1.0, 1.0], "larger": [4.0, 0.5]}
    assert found["moved"]["mass"]["value"] == pytest.approx(2)
    assert found["moved"]["lr"]["value"] == pytest.approx(-1)
    assert found["cost"]["value"] == pytest.approx(0.1 * 2**2 + 0.1 * 1**2)
    assert found["masses"]["C++"]["1.0"]["value"] == pytest.approx(0.1 * 2**2)
    assert found["masses"]["Python"]["1.0"]["value"] == pytest.approx(0)


def test_texts_differ_and_a_gpt_has_as_many_tokens_as_its_text_has_characters():
    seen = {corpus: text(corpus) for corpus in CORPORA}
    for corpus, (ids, count) in seen.items():
        assert len(ids) > 4e5
        assert ids.max() == count - 1
        net = mn_tasks.build("GPT", width=8, blocks=1, corpus=corpus)
        assert net(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, count)
    assert len({tuple(ids[:1000].tolist()) for ids, _ in seen.values()}) == len(seen)


def test_a_gpt_is_tested_on_the_last_tenth_of_its_text(monkeypatch):
    monkeypatch.setattr(tasks, "text", lambda corpus: (torch.arange(1000), 1000))
    for part, low, high in (("train", 0, 900), ("test", 900, 1000)):
        x, y = mn_tasks.task("GPT", 0, part).batch(50)
        assert low <= x.min()
        assert y.max() < high


def test_the_letter_has_contrast_0_where_it_is_cut_and_1_where_nothing_is():
    mask = md_watermark.letter(64)
    assert mask.shape == (64, 64)
    assert 0.1 < mask.float().mean() < 0.4
    weight = torch.ones(64, 64)
    assert md_watermark.contrast(weight, mask) == 1
    weight[mask] = 0
    assert md_watermark.contrast(weight, mask) == 0


def test_the_largest_rate_is_chosen_whose_accuracy_is_near_the_best():
    rows = [{"lr": lr, "accuracy": accuracy} for lr, accuracy in ((1, 0.99), (2, 0.97), (4, 0.95))]
    assert md_watermark.largest_stable(rows)["lr"] == 2


def test_estimates_of_the_watermark_are_of_each_seeds_largest_stable_rate():
    rows = [
        {"method": method, "seed": seed, "lr": lr, "accuracy": accuracy, "contrast": contrast}
        for method, gain in (("plain", 0.0), ("dualized", 0.1))
        for seed in range(3)
        for lr, accuracy, contrast in ((0.5, 0.8 + gain, 0.2 + gain), (1.0, 0.3, 0.9))
    ]
    found = md_watermark.estimates(rows)
    assert found["lrs"] == {"plain": [0.5] * 3, "dualized": [0.5] * 3}
    assert found["contrast"]["dualized"] == pytest.approx({"value": 0.3, "low": 0.3, "high": 0.3})
    assert found["accuracy"]["value"] == pytest.approx(0.1)


def test_a_plain_step_has_the_spectral_norm_of_its_rate_over_the_layers():
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(6, 4)), torch.nn.Parameter(torch.zeros(3, 6))]
    descent = md_watermark.NormalisedDescent(weights, lr=0.6)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    for _ in range(40):  # power iteration goes on from step to step
        before = [weight.detach().clone() for weight in weights]
        descent.step()
    for weight, old in zip(weights, before, strict=True):
        norm = torch.linalg.matrix_norm(weight.detach() - old, 2).item()
        assert norm == pytest.approx(0.6 / 3, rel=1e-3)


def test_an_isometry_is_aligned_with_everything_and_a_matrix_of_rank_1_with_one_direction():
    x = torch.randn(50, 8)
    turn = torch.linalg.qr(torch.randn(8, 8)).Q
    assert md_alignment.alignment(3 * turn, x) == pytest.approx(1, rel=1e-5)
    one = torch.outer(torch.randn(8), torch.eye(8)[0])
    expected = x[:, 0].norm() / x.norm()
    assert md_alignment.alignment(one, x) == pytest.approx(expected.item(), rel=1e-5)
    assert md_alignment.alignment(one, torch.eye(8)[:1]) == pytest.approx(1, rel=1e-5)


def test_powers_of_alignment_and_movement_are_slopes_for_each_seed():
    rows = [
        {"way": "Adam", "width": width, "seed": seed, "alignment": 0.5, "movement": seed / width}
        for width in (4, 16)
        for seed in (1, 2, 3)
    ]
    found = md_alignment.estimates(rows)["Adam"]
    assert found["alignment"]["power"] == pytest.approx({"value": 0, "low": 0, "high": 0})
    assert found["movement"]["power"] == pytest.approx({"value": -1, "low": -1, "high": -1})
    assert found["movement"]["widths"]["4"]["value"] == pytest.approx(2 / 4)


def test_a_dualized_step_with_large_batches_is_an_isometry_in_training():
    row = md_alignment.train("dualized", 16, 0, steps=3)
    assert row["alignment"] == pytest.approx(1, abs=2e-2)
    assert 0 < row["movement"] < 1


def test_stable_rank_is_squared_frobenius_over_squared_spectral_norm():
    assert md_watermark.stable_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))) == pytest.approx(
        6 / 4
    )


@pytest.mark.parametrize(
    ("method", "a", "b", "c"), [("cubic", 1.5, -0.5, 0), ("jordan", 3.4445, -4.7750, 2.0315)]
)
def test_maps_of_singular_values_are_the_polynomial_applied_to_numbers(method, a, b, c):
    values = [1e-3, 0.02, 0.3, 0.7]
    expected = []
    for s in values:
        for _ in range(5):
            s = a * s + b * s**3 + c * s**5
        expected.append(s)
    found = md_coefficients.mapped(method, torch.tensor(values), steps=5)
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-7
    )


def test_the_cubic_needs_as_many_steps_as_the_scalar_iteration():
    s, steps = 1e-2, 0
    while abs(s - 1) >= 1e-2:
        s, steps = 1.5 * s - 0.5 * s**3, steps + 1
    assert md_coefficients.steps_to_converge("cubic") == steps


@pytest.mark.parametrize("network", mn_tasks.NETWORKS)
def test_the_first_step_of_a_normed_optimizer_has_modular_norm_lr(network):
    torch.manual_seed(0)
    net = mn_tasks.build(network, width=16, blocks=2)
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    descent = mn_tasks.optimizer(net, "normed SGD", 0.25)
    task = mn_tasks.task(network, 0, "train")
    x, y = task.batch(4)
    task.loss(net(x), y).backward()
    descent.step()
    with torch.no_grad():
        norm = net.norm({name: weight - before[name] for name, weight in net.named_parameters()})
    assert 0.25 / 1.1 < norm < 0.25 * (1 + 1e-4)  # spectral norms are bounded from above


@pytest.mark.parametrize("context", [mn_tasks.CONTEXT, 7])
def test_targets_of_the_gpt_are_the_characters_after_its_inputs(context):
    x, y = Text(0, context=context).batch(3)
    assert x.shape == y.shape == (3, context)
    assert torch.equal(x[:, 1:], y[:, :-1])
    net = mn_tasks.build("GPT", width=8, blocks=1, context=context)
    assert net(x).shape == (3, context, text()[1])


def test_the_optimum_over_contexts_and_the_cost_of_keeping_a_rate_are_estimated_by_seed():
    rows = []
    for seed, moved in enumerate((0.4, 0.6)):
        found = sweep(mn_context.METHOD, {8: -2.0, 32: -2.2, 128: -2.0 + moved})
        rows += [row | {"seed": seed} for row in found]
    found = statistics.moves(rows)
    assert found["moved"]["value"] == pytest.approx(0.5)
    # seed 0 keeps its own best rate of 2^-2, for seed 1 that is 2^-1
    cost = 0.3 * (0.6**2 - 0.4**2)
    assert found["cost"]["value"] == pytest.approx((0 + cost) / 2)


def test_free_masses_are_1_for_each_layer():
    net = mn_tasks.build("ResMLP", width=8, blocks=3, blocks_mass=mn_mass.LAYERS * 3)
    masses = [term.mass for term in net.terms()]
    assert masses == pytest.approx([1.0] * len(masses))


def test_best_mass_is_that_of_the_least_loss_over_the_rates():
    rows = [
        {"size": 2, "mass": mass, "lr": lr, "seed": 0, "loss": loss}
        for mass, losses in {0.5: (3.0, 2.0), 1.0: (1.0, 9.0), 2.0: (4.0, 2.0)}.items()
        for lr, loss in zip((0.1, 0.2), losses, strict=True)
    ]
    found = mn_mass.best_masses(rows)[2]
    assert found["curve"] == pytest.approx({0.5: 2.0, 1.0: 1.0, 2.0: 2.0})
    assert found["optimum"] == pytest.approx(0)
    assert found["within 25 %"] == [1.0]


def test_a_spectral_start_is_of_dependency_1_and_powers_are_slopes():
    found = bm_metrics.fresh("dense", "spectral", 64)
    assert found["dependency"] == pytest.approx(1, abs=0.1)
    assert found["dependency"] == pytest.approx(found["largest core"], rel=1e-3)
    rows = [
        {
            "structure": structure,
            "optimizer": name,
            "width": width,
            **{n: [width**0.5] for n in bm_metrics.NUMBERS},
        }
        for structure in bm_metrics.TRAINED
        for name in bm_metrics.OPTIMIZERS
        for width in (4, 16)
    ]
    assert bm_metrics.exponents(rows)["dense"]["Muon"]["update"] == pytest.approx(0.5)


def ffn_that_multiplies_by(matrix):
    """relu(x) and relu(-x), then `matrix` times their difference: an FFN that is linear."""
    width = 8
    model = bm_norms.FFN(width, structlin.Dense())
    eye = torch.eye(width)
    with torch.no_grad():
        model.up.from_dense_(torch.cat([eye, -eye, torch.zeros(2 * width, width)]))
        model.down.from_dense_(matrix @ torch.cat([eye, -eye, torch.zeros(width, 2 * width)], 1))
    return model


def test_the_worst_gain_of_an_ffn_is_that_of_its_matrix_and_below_its_bound():
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    model = ffn_that_multiplies_by(3 * torch.eye(8))
    assert bm_norms.worst_gain(model, x) == pytest.approx(3, rel=1e-5)
    model = ffn_that_multiplies_by(torch.diag(torch.tensor([1.0, 2, 1, 1, 1, 1, 1, 5])))
    assert bm_norms.worst_gain(model, x) == pytest.approx(5, rel=1e-3)
    # their norms are sqrt 2 and 5 sqrt 2, since each feature comes twice
    assert bm_norms.dependency(model.up) == pytest.approx((2 * 8 / 32) ** 0.5)
    assert bm_norms.dependency(model.down) == pytest.approx(5 * (2 * 32 / 8) ** 0.5)
    found = bm_norms.measure(model, torch.randn(20, 64))
    assert found["share"] == pytest.approx(5 / 10, rel=1e-2)


def test_powers_of_the_middle_are_slopes_for_each_seed():
    rows = [
        {"structure": structure, "state": state, "width": width, "seed": seed}
        | {"middle": seed * width**0.5, "share": 0.1 * seed}
        for structure in bm_norms.TRAINED
        for state in bm_norms.STATES
        for width in (4, 16)
        for seed in (1, 2)
    ]
    for row in bm_norms.estimates(rows):
        assert row["power"] == pytest.approx({"value": 0.5, "low": 0.5, "high": 0.5})
        assert row["middle"] == [2, 8]
        assert row["largest share"] == pytest.approx(0.2)
