"""The numbers of docs/results.md about time to a loss are those of the kept results."""

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

from benchmarks import time_to_loss

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_mlp_language_models_were_kept_for_three_seeds():
    kept = [read(f"train_mlp_lm{end}") for end in ("", "_seed1", "_seed2")]
    assert [result["seed"] for result in kept] == [0, 1, 2]
    assert kept[0]["command"] == "train_mlp_lm.py"


def test_the_tables_of_time_to_loss_are_those_of_the_kept_result():
    result = read("time_to_loss")
    assert set(result["summaries"]) == set(time_to_loss.SETUPS)
    assert result["threads"] == 2
    for setup in result["summaries"]:
        for cost in ("flops", "seconds"):
            assert time_to_loss.markdown(result, setup, cost) in PAGE


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
            tried = time_to_loss.losses_of(
                result["rows"],
                setup=setup,
                structure=structure,
                width=time_to_loss.SETUPS[setup].base,
                seed=0,
            )
            assert {lr / 2, lr, 2 * lr} <= set(tried)
            assert tried[lr] == min(tried.values())


def test_where_another_rate_would_have_been_better_at_the_widest_model_the_page_says_so():
    result, text = read("time_to_loss"), " ".join(PAGE.split())
    said = {
        ("digits MLP", "dense"): "(half of it: {better} for {chosen},",
        ("digits MLP", "low-rank"): "{better} for {chosen})",
        ("teacher", "Monarch 16"): "(twice: {better} for {chosen}; dense 1024 has {dense}",
        ("digits ViT", "dense"): "(twice: {better} for {chosen}; BTT 256 has {btt} on that seed",
    }
    for setup, summary in result["summaries"].items():
        checks = {check["structure"]: check for check in summary["checks"]}
        lrs = result["lrs"][setup]
        names = {structure: f"2^{math.log2(lr):g}" for structure, lr in lrs.items()}
        at_chosen = {name: check["losses"][names[name]] for name, check in checks.items()}
        for structure, check in checks.items():
            if check["best_over_chosen"] == 1:
                assert (setup, structure) not in said
                continue
            losses = {
                "better": min(check["losses"].values()),
                "chosen": at_chosen[structure],
                "dense": at_chosen["dense"],
                "btt": at_chosen["BTT r=1"],
            }
            shown = {name: f"{loss:.4f}" for name, loss in losses.items()}
            assert said[setup, structure].format(**shown) in text
