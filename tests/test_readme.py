"""What the README shows is what happens. Its tables, numbers and words: tests/test_pages.py."""

import doctest
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readmes_code_gives_the_output_that_it_shows():
    results = doctest.testfile(str(ROOT / "README.md"), module_relative=False, encoding="utf-8")
    assert results.attempted >= 10
    assert results.failed == 0


def test_the_readme_shows_picture_installation_and_code_in_this_order_on_its_first_screen():
    lines = README.splitlines()
    found = [
        next(n for n, line in enumerate(lines) if line.startswith(start))
        for start in ("![", "```bash", "```python")
    ]
    assert found == sorted(found)
    assert found[-1] < 45


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
