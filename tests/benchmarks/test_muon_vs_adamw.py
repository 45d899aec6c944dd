"""benchmarks.training.muon_vs_adamw: the rates tried, the best one, and pairs of characters."""

import argparse

import pytest

pytest.importorskip("matplotlib")

from benchmarks.training import muon_vs_adamw as benchmark


def rows(losses, setting="defaults", seed=0):
    """Of one setting; losses: exponent of the rate -> loss."""
    made = {"text": "characters", "structure": "dense", "setting": setting, "seed": seed}
    return [{**made, "lr": 2.0**power, "steps": 8, "loss": loss} for power, loss in losses.items()]


def test_rates_are_tried_until_both_beside_the_best_have_been():
    def tried(losses):
        return sorted(run[3] for run in benchmark.next_rates(rows(losses)))

    assert tried({-4.5: 2.0, -4.0: 2.1}) == [2.0**-5]
    assert tried({-4.5: 2.0, -4.0: 1.9}) == [2.0**-3.5]
    assert tried({-4.0: 2.0}) == [2.0**-4.5, 2.0**-3.5]
    assert tried({-5.0: 2.1, -4.5: 2.0, -4.0: 2.1}) == []


def test_losses_by_seed_are_those_at_the_rate_that_seed_0_finds_best():
    made = rows({-5.0: 2.1, -4.5: 2.0, -4.0: 2.2}) + rows({-4.0: 1.0, -4.5: 2.3}, seed=2)
    made += rows({-4.5: 1.5}, seed=1) + rows({-4.5: 1.9, -4.0: 1.8}, setting="momentum 0.85")
    found = {("characters", "dense", "defaults"): [2.0, 1.5, 2.3]}
    assert benchmark.setting_losses(made) == found  # the other one's best rate is not known yet
    line = "| characters, dense, defaults | 8 | 2^-4.5 | 1.933 | 2.000, 1.500, 2.300 |"
    assert line in benchmark.settings_markdown({"settings": made})


def test_pairs_of_characters_are_the_tokens_two_by_two(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abacab" * 40 + "c")
    options = argparse.Namespace(data=path, seed=0, steps=1, batch=2, context=4, depth=1)
    text = benchmark.Pairs(options)
    assert text.vocabulary == 2  # ab and ac; the odd c is left out
    assert text.train[:6].tolist() == [0, 1, 0, 0, 1, 0]
    assert len(text.train) == 108  # nine tenths of 120
    options.data = None
    assert benchmark.Pairs(options).vocabulary > 1000
