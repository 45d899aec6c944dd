"""benchmarks.training.time_to_loss: how the factors follow from the rows, the search for rates,
what is kept of an unfinished result; and the data and models that it trains."""

import doctest
import math
from itertools import product

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from benchmarks.harness import models, tasks
from benchmarks.training import time_to_loss
from structlin import BTT, convert


def power_law(structure, scale, exponent, widths=(16, 64, 256), seeds=(0, 1, 2), noise=0.0):
    """Rows with loss = scale * FLOPs^-exponent * exp(noise * (seed - 1)), FLOPs = width^2."""
    return [
        {
            "structure": structure,
            "width": width,
            "seed": seed,
            "loss": scale * width ** (-2 * exponent) * math.exp(noise * (seed - 1)),
        }
        for width, seed in product(widths, seeds)
    ]


def flops(*structures, widths=(16, 64, 256)):
    return {structure: {width: float(width**2) for width in widths} for structure in structures}


# ---- factors -------------------------------------------------------------------------------------


def test_the_examples_in_the_docstrings_give_what_they_show():
    results = doctest.testmod(time_to_loss)
    assert results.attempted == 3
    assert not results.failed


def test_half_the_loss_everywhere_is_a_factor_of_two_to_the_inverse_exponent():
    rows = power_law("dense", 1.0, 0.25) + power_law("ours", 0.5, 0.25)
    found = {row["dense"]: row for row in time_to_loss.factors(rows, flops("dense", "ours"))}
    assert found[256]["value"] == pytest.approx(2**4)
    assert found[64]["value"] == pytest.approx(2**4)  # just the narrowest
    assert found[16]["value"] == pytest.approx(1)  # the narrowest is below: no less than it is
    assert found[256]["low"] == pytest.approx(found[256]["high"])


def test_a_worse_structure_has_a_factor_below_one_and_zero_where_it_never_arrives():
    rows = power_law("dense", 1.0, 0.25) + power_law("worse", 2.0, 0.25, widths=(16, 64, 256))
    found = {row["dense"]: row for row in time_to_loss.factors(rows, flops("dense", "worse"))}
    assert found[64]["value"] == pytest.approx(1 / 16)
    assert found[256]["value"] == 0
    assert time_to_loss.words(found[256]) == "never"
    assert found[256]["by_seed"] == [0, 0, 0]


def test_seeds_are_paired_and_their_spread_is_the_interval():
    rows = power_law("dense", 1.0, 0.25, noise=0.3) + power_law("ours", 0.5, 0.25, noise=0.3)
    (found,) = (
        row for row in time_to_loss.factors(rows, flops("dense", "ours")) if row["dense"] == 256
    )
    assert found["by_seed"] == pytest.approx([16, 16, 16])  # what both have in common is no noise
    rows = power_law("dense", 1.0, 0.25) + power_law("ours", 0.5, 0.25, noise=0.1)
    (found,) = (
        row for row in time_to_loss.factors(rows, flops("dense", "ours")) if row["dense"] == 256
    )
    expected = [(0.5 * math.exp(0.1 * (seed - 1))) ** -4 for seed in range(3)]
    assert found["by_seed"] == pytest.approx(expected)
    assert min(expected) <= found["low"] < found["value"] < found["high"] <= max(expected)


def test_a_run_that_diverged_costs_what_the_next_width_costs():
    rows = power_law("dense", 1.0, 0.25) + power_law("ours", 0.5, 0.25)
    for row in rows:
        if row["structure"] == "ours" and row["width"] == 16:
            row["loss"] = None
    found = {row["dense"]: row for row in time_to_loss.factors(rows, flops("dense", "ours"))}
    assert found[64]["value"] == pytest.approx(1)
    assert found[256]["value"] == pytest.approx(16)


def test_seconds_can_lose_where_flops_win():
    rows = power_law("dense", 1.0, 0.25) + power_law("ours", 0.5, 0.25)
    rows = [row | {"setup": "teacher", "lr": 0.5, "flops": row["width"] ** 2} for row in rows]
    times = [
        {"structure": structure, "width": width, "median": 1e3 * width**2 * slower}
        for structure, slower in (("dense", 1), ("ours", 32))
        for width in (16, 64, 256)
    ]
    found = time_to_loss.summarise(rows, {"dense": 0.5, "ours": 0.5}, times, steps=10)
    by_cost = {
        cost: {row["dense"]: row["value"] for row in found[cost]} for cost in ("flops", "seconds")
    }
    assert by_cost["flops"][256] == pytest.approx(16)
    assert by_cost["seconds"][256] == pytest.approx(0.5)


# ---- the program ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_smoke_run_has_factors_of_both_costs():
    result = time_to_loss.EXPERIMENT.main(["--smoke", "--setups", "digits ViT"])
    (summary,) = result["summaries"].values()
    for cost in ("flops", "seconds"):
        assert [(row["structure"], row["dense"]) for row in summary[cost]] == [
            ("BTT r=1", 32),
            ("BTT r=1", 96),
        ]
    assert len(time_to_loss.draw(result).axes) == 2
    table = time_to_loss.markdown(result, "digits ViT", "flops")
    assert table.startswith("|  | dense 32 | dense 96 |\n|---|--:|--:|\n| BTT r=1 | ")


# ---- data and models -----------------------------------------------------------------------------


def test_mixed_digits_are_mixtures_whose_targets_say_how_much_of_each():
    data = tasks.MixedDigits(0)
    x, y = data.batch(4000)
    assert x.shape == (4000, 64)
    torch.testing.assert_close(y.sum(1), torch.ones(4000))
    assert y.min() >= tasks.MixedDigits.smoothing / 10 - 1e-6
    assert y.max() <= 1 - tasks.MixedDigits.smoothing * 0.9 + 1e-6
    share = data._beta(200_000)
    exact = torch.distributions.Beta(tasks.MixedDigits.mixup, tasks.MixedDigits.mixup)
    assert share.mean().item() == pytest.approx(exact.mean.item(), abs=5e-3)
    assert share.std().item() == pytest.approx(exact.stddev.item(), abs=5e-3)
    assert (share < 0.1).float().mean().item() == pytest.approx(0.1319, abs=5e-3)  # its CDF


def test_the_loss_is_zero_for_a_model_that_gives_the_targets():
    _, y = tasks.MixedDigits(0).batch(50)
    assert tasks.MixedDigits.loss(y.log(), y).item() == pytest.approx(0, abs=1e-6)
    cross_entropy = -(y * torch.zeros(50, 10).log_softmax(-1)).sum(1).mean()
    entropy = -(y * y.log()).sum(1).mean()
    found = tasks.MixedDigits.loss(torch.zeros(50, 10), y)
    torch.testing.assert_close(found, cross_entropy - entropy)


def test_held_out_digits_are_no_training_digits():
    (train, _), (held, _) = (tasks._fold(heldout) for heldout in (False, True))
    assert len(train) + len(held) == 1797
    ours = {image.numpy().tobytes() for image in train}
    assert not any(image.numpy().tobytes() in ours for image in held)


def test_the_vit_reads_patches_and_starts_as_the_paper_says():
    torch.manual_seed(0)
    model = convert(
        models.ViT(64, 64, 10), BTT(), include="blocks.*", zero_init=["*c_proj", "*query"]
    )
    torch.nn.init.normal_(model.head.weight)
    x = torch.randn(3, 64)
    before = model(x)
    for name, module in model.blocks.named_modules():
        if name.endswith(("c_proj", "query")):
            assert not module.to_dense().any()
            assert module.cores[0].any()
    seen = []
    model.embed.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    model(x)
    pixels = x[0].unflatten(0, (8, 8))
    torch.testing.assert_close(seen[0][0, 5], pixels[2:4, 2:4].flatten())
    moved = x.unflatten(1, (8, 8)).roll(2, 2).flatten(1)  # other places, so another output
    assert not torch.allclose(model(moved), before)
