"""What the README shows is what happens. Its tables, numbers and words: tests/test_pages.py."""

import doctest
import json
import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readmes_code_gives_the_output_that_it_shows():
    results = doctest.testfile(str(ROOT / "README.md"), module_relative=False, encoding="utf-8")
    assert results.attempted >= 10
    assert results.failed == 0


def test_the_first_screen_of_the_readme_says_the_gain_then_what_to_change_then_how_to_install():
    lines = README.splitlines()
    starts = ("**What you gain.**", "**When dense is the better buy.**", "```diff", "```bash")
    places = [next(n for n, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert places == sorted(places)
    assert places[-1] < 45


def test_the_lines_that_the_readme_changes_keep_the_ratios_in_a_loop_that_sets_one_rate():
    block = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)[0].splitlines()
    removed = [line[1:] for line in block if line.startswith("-")]
    added = [line[1:] for line in block if line.startswith("+")]
    weights = {}
    for lines in (removed, added):
        torch.manual_seed(0)
        loop = {"torch": torch, "model": torch.nn.Sequential(torch.nn.Linear(64, 4096)), "lr": 1.0}
        exec("\n".join(lines), loop)
        for group in loop["optimizer"].param_groups:
            group["lr"] = 1e-3  # as nanoGPT's loop does
        loop["model"](torch.ones(2, 64)).square().sum().backward()
        before = [parameter.detach().clone() for parameter in loop["model"].parameters()]
        loop["optimizer"].step()
        moves = zip(loop["model"].parameters(), before, strict=True)
        weights[len(weights)] = [(now - then).abs().max().item() for now, then in moves]
    dense, structured = weights.values()
    assert max(dense) < 1.5e-3  # Adam's first step is the rate, and decay
    assert max(structured) > 3e-3  # a core's rate is a multiple of dense's


def test_every_path_that_the_readme_names_exists():
    named = re.findall(
        r"(?<!com/)\b(?:examples|benchmarks|structlin|docs|tests)/[\w/.-]*\w", README
    )
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists(), name


def test_the_main_job_is_the_program_that_the_first_command_runs():
    kept = json.loads((ROOT / "benchmarks/results/train_gpt.json").read_text(encoding="utf-8"))
    first = next(line for line in README.splitlines() if line.startswith("pip install"))
    assert first.endswith(f"&& python {' '.join(kept['command'])}")
    assert "](benchmarks/results/train_gpt.png)" in README
