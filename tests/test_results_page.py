"""The kept results behind docs/results/time_to_loss.md are whole."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from benchmarks.harness.statistics import curve_of_rates, select
from benchmarks.training import time_to_loss

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_mlp_language_models_were_kept_for_three_seeds():
    kept = [read(f"train_mlp_lm{end}") for end in ("", "_seed1", "_seed2")]
    assert [result["seed"] for result in kept] == [0, 1, 2]
    assert kept[0]["command"] == "train_mlp_lm.py"


def test_both_costs_of_all_setups_were_kept_on_two_threads():
    result = read("time_to_loss")
    assert set(result["summaries"]) == set(time_to_loss.SETUPS)
    assert all({"flops", "seconds"} <= set(found) for found in result["summaries"].values())
    assert result["threads"] == 2


def test_every_structure_of_the_kept_result_has_three_seeds_and_a_rate_inside_its_grid():
    result = read("time_to_loss")
    for setup, summary in result["summaries"].items():
        for structure, lr in result["lrs"][setup].items():
            widths = time_to_loss.SETUPS[setup].widths[structure]
            seeds = [
                (row["width"], row["seed"])
                for row in summary["chosen"]
                if row["structure"] == structure
            ]
            assert sorted(seeds) == [(width, seed) for width in widths for seed in range(3)]
            base = select(result["rows"], setup=setup, structure=structure, seed=0)
            tried = curve_of_rates(select(base, width=time_to_loss.BASE_WIDTH))
            assert {lr / 2, lr, 2 * lr} <= set(tried)
            assert tried[lr] == min(tried.values())
