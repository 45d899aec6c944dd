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
        return [job["lr"] for job in benchmark.next_rates(rows(losses), benchmark.FIRST)]

    assert tried({}) == [2.0**-4.5, 2.0**-4]
    assert tried({-4.5: 2.0, -4.0: 2.1}) == [2.0**-5]
    assert tried({-4.5: 2.0, -4.0: 1.9}) == [2.0**-3.5]
    assert tried({-4.0: 2.0}) == [2.0**-4.5, 2.0**-3.5]
    assert tried({-5.0: 2.1, -4.5: 2.0, -4.0: 2.1}) == []


def test_losses_by_seed_are_those_at_the_rate_that_seed_0_finds_best():
    made = rows({-5.0: 2.1, -4.5: 2.0, -4.0: 2.2}) + rows({-4.0: 1.0, -4.5: 2.3}, seed=2)
    made += rows({-4.5: 1.5}, seed=1) + rows({-4.5: 1.9, -4.0: 1.8}, setting="momentum 0.85")
    assert benchmark.setting_losses(made) == {
        ("characters", "dense", "defaults"): [2.0, 1.5, 2.3],
        ("characters", "dense", "momentum 0.85"): [1.8],
    }


def test_the_steps_that_muon_needs_are_those_to_adamws_loss_of_the_same_seed():
    def row(optimizer, seed, *losses):
        curve = [[10 * (n + 1), loss] for n, loss in enumerate(losses)]
        where = {"part": "rows", "task": "GPT", "structure": "dense", "optimizer": optimizer}
        return {**where, "lr": 1.0, "seed": seed, "loss": losses[-1], "curve": curve}

    made = [row("AdamW", 0, 5.0, 4.0), row("AdamW", 1, 3.0, 2.0)]
    made += [row("Muon", 0, 4.0, 3.0), row("Muon", 1, 3.5, 2.5)]
    (found,) = benchmark.compare_optimizers(made)
    assert found["muon_steps_to_adamws_loss"] == [10, None]
    assert found["Muon"] == {"lr": 1.0, "loss": 2.75, "least": 2.5, "most": 3.0}
    assert (found["steps"], found["short"]) == (20, None)


def test_a_smoke_run_has_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "descend", lambda *_, **options: [(2, 3.0)])
    options = ["--smoke", "--structures", "dense", "--out", str(tmp_path)]
    result = benchmark.EXPERIMENT.main(options)
    assert {len(result[part]) for part in ("rows", "tuned", "settings")} == {4, 2}
    assert result["short"] == [
        {"task": "GPT", "structure": "dense", "optimizer": "Muon", "lr": 2.0**-6, "seed": 0}
        | {"loss": 3.0, "curve": [(2, 3.0)]}
    ]
    assert [row["structure"] for row in result["table"]] == ["dense"] * 2


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
