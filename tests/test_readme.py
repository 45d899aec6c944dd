"""What the README shows is what happens. Its tables and pictures: tests/test_pages.py."""

import doctest
import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = " ".join(README.split())


def test_the_readme_has_at_most_1000_words():
    assert 500 < len(README.split()) <= 1000  # code and the bars of tables count as well


def test_the_readmes_code_gives_the_output_that_it_shows():
    results = doctest.testfile(str(ROOT / "README.md"), module_relative=False, encoding="utf-8")
    assert results.attempted > 10
    assert results.failed == 0


def test_the_readme_shows_picture_installation_and_code_in_this_order_on_its_first_screen():
    lines = README.splitlines()
    found = [
        next(n for n, line in enumerate(lines) if line.startswith(start))
        for start in ("![", "```bash", "```python")
    ]
    assert found == sorted(found)
    assert found[-1] < 30


def test_every_path_that_the_readme_names_exists():
    named = re.findall(r"\b(?:examples|benchmarks|structlin|docs|tests)/[\w/.-]*\w", README)
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists(), name


def test_the_main_job_is_the_program_that_the_first_command_runs():
    pytest.importorskip("matplotlib")
    from benchmarks import pages

    command = pages.read(pages.MAIN_JOB)["command"]
    assert command == f"{pages.MAIN_JOB}.py"
    first = next(line for line in README.splitlines() if line.startswith("pip install"))
    assert first.endswith(f"&& python examples/{command}")
    assert f"](benchmarks/results/{pages.MAIN_JOB}.png)" in README


def test_what_is_said_of_the_main_job_is_what_the_kept_results_have():
    kept = [
        json.loads((ROOT / f"benchmarks/results/train_mlp_lm{end}.json").read_text())["rows"]
        for end in ("", "_seed1", "_seed2")
    ]
    dense, dense_wide, wide, widest = kept[0]
    assert wide["width"] == dense_wide["width"] == 1024
    assert abs(wide["loss"] / dense_wide["loss"] - 1) < 0.005
    share = wide["clock"][-1] / dense_wide["clock"][-1]
    assert f"within 0.5 % of dense's loss in {share:.2f} of its seconds" in TEXT
    assert "at the FLOPs of the first model, it ends lowest" in TEXT
    assert widest["flops"] <= dense["flops"]
    assert widest["loss"] == min(row["loss"] for row in kept[0])
    share = widest["seconds to the loss of"]["dense 1024"] / dense_wide["clock"][-1]
    assert f"where dense 1024 ends after {share:.2f} of its seconds" in TEXT
    assert "(with two other seeds, below it)" in TEXT
    assert all(rows[2]["loss"] < rows[1]["loss"] for rows in kept[1:])
    minutes = sum(row["clock"][-1] for row in kept[0]) / 60
    assert "in four minutes on two CPU cores" in TEXT
    assert 3 < minutes < 4  # of training; evaluations come on top


def test_what_is_said_of_learning_rates_is_what_the_kept_result_has():
    pytest.importorskip("matplotlib")
    from benchmarks import pages

    result = pages.read("lr_transfer")
    mean, largest = result["mean_shift"], result["largest_shift"]
    assert (
        f"the best rate lies {mean['aware']:.2f} factors of 2 from dense's with `param_groups`, "
        f"{mean['naive']:.2f} without; at most {largest['aware']:.0f} and {largest['naive']:.0f}"
    ) in TEXT
    loss, moved = Counter[str](), Counter[tuple[str, str]]()
    rows = {(row["structure"], row["width"], row["rule"]): row for row in result["table"]}
    for (structure, width, rule), row in rows.items():
        moved[structure, rule] += abs(row["shift"])
        if rule == "naive":
            better = row["best_loss"] < rows[structure, width, "aware"]["best_loss"]
            loss["naive" if better else "aware"] += 1
    assert f"the naive rule ends lower in {loss['naive']} of {loss.total()} cases" in TEXT
    nearer, farther = pages.TRANSFER
    assert f"{nearer.split()[0]}, whose best rates our rule brings nearer" in TEXT
    assert moved[nearer, "aware"] < moved[nearer, "naive"]
    assert f"{farther} of 4 blocks, whose are nearer without" in TEXT
    assert moved[farther, "aware"] > moved[farther, "naive"]
