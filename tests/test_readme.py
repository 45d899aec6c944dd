"""What the README shows is what happens."""

import doctest
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readmes_code_gives_the_output_that_it_shows():
    results = doctest.testfile(str(ROOT / "README.md"), module_relative=False, encoding="utf-8")
    assert results.attempted > 10
    assert results.failed == 0


def test_the_readmes_code_begins_by_line_12():
    assert README.splitlines().index("```python") < 12


def test_every_path_that_the_readme_names_exists():
    named = re.findall(r"\b(?:examples|benchmarks|structlin|docs)/[\w/.*{},-]*\w", README)
    assert named
    for path in named:
        stem, _, choices = path.partition("{")
        for name in (
            [stem + choice for choice in choices.rstrip("}").split(",")] if choices else [path]
        ):
            assert (ROOT / name).exists(), name


def test_the_numbers_of_the_learning_rate_table_are_those_of_the_kept_result():
    pytest.importorskip("sklearn")
    from benchmarks.lr_transfer import markdown

    result = json.loads((ROOT / "benchmarks/results/lr_transfer.json").read_text())
    assert markdown(result) in README


def test_the_numbers_of_the_main_job_are_those_of_the_kept_result():
    result = json.loads((ROOT / "benchmarks/results/train_gpt.json").read_text())
    assert result["command"] == "train_gpt.py"
    for row in result["rows"]:
        counts = f"{row['width']} | {row['params']:,} | {row['flops']:,}"
        figures = f"{row['loss']:.3f} | {row['bits/char']:.3f} | {row['seconds']:.0f}"
        assert f"| {row['label']} | {counts} | {figures} |" in README


def test_the_numbers_of_the_optimizer_table_are_those_of_the_kept_result():
    result = json.loads((ROOT / "benchmarks/results/muon_vs_adamw.json").read_text())
    for row in result["table"]:
        reached = ", ".join(
            "never" if step is None else str(step) for step in row["muon_steps_to_adamws_loss"]
        )
        losses = f"{row['AdamW']['loss']:.3f} | {row['Muon']['loss']:.3f}"
        assert (
            f"| {row['task']}, {row['structure']} | {losses} | {reached} of {row['steps']} |"
            in README
        )


def test_the_numbers_of_the_speed_tables_are_those_of_the_kept_results():
    from benchmarks import layer, model

    assert (
        layer.markdown(json.loads((ROOT / "benchmarks/results/layer.json").read_text()), "float32")
        in README
    )
    assert (
        model.markdown(json.loads((ROOT / "benchmarks/results/model.json").read_text())) in README
    )


def test_what_is_said_beside_the_speed_table_is_what_the_kept_results_have():
    def speeds(name):
        rows = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["rows"]
        plain = [row for row in rows if row["implementation"] == "auto"]
        keys = ("d_in", "tokens", "dtype", "backward", "structure")
        assert plain
        return {
            tuple(row[key] for key in keys): row["x_dense"]["median"]
            for row in plain
            if row["d_in"] == row["d_out"]
        }

    text, kept = " ".join(README.split()), speeds("layer")
    narrow, wide = (kept[width, 4096, "bfloat16", True, "BTT r=1"] for width in (1024, 2048))
    assert (
        f"In bfloat16 it is {narrow:.1f} times as fast as dense at 1024 and {wide:.1f} times at "
        "2048" in text
    )
    lowest = min(speed for (_, tokens, *_), speed in kept.items() if tokens == 4096)
    assert (
        f"the slowest structure of all widths and both dtypes has {lowest:.2f} of dense's speed"
        in text
    )
    few = [
        speed
        for (_, tokens, dtype, *_), speed in kept.items()
        if tokens == 16 and dtype == "bfloat16"
    ]
    assert f"16 tokens in bfloat16 has {min(few):.2f} to {max(few):.2f} of it" in text
    fresh = speeds("layer_default_allocator")[1024, 4096, "float32", True, "BTT r=1"]
    assert f"BTT r=1 was {fresh:.1f} times as fast as dense at 1024" in text


def test_what_is_said_of_other_packages_is_what_the_kept_result_has():
    rows = json.loads((ROOT / "benchmarks/results/peers.json").read_text())["rows"]
    rows = [
        row
        for row in rows
        if row["tokens"] == 4096 and row["dtype"] == "float32" and "structlin_x" in row
    ]
    keys = [(row["structure"], row["implementation"].split()[0], row["backward"]) for row in rows]
    speed = {
        key: f"{row['structlin_x']['median']:.2f}" for key, row in zip(keys, rows, strict=True)
    }
    forward, both = (speed["Kronecker", "pyfastkron", backward] for backward in (False, True))
    text = " ".join(README.split())
    assert f"we have {forward} of its speed forward, {both} forward and backward" in text
    assert f"Monarch 16 at {speed['Monarch 16', 'torch-structured', True]}" in text
    assert f"torchTT at {speed['TT r=8', 'torchTT', True]}" in text


def test_the_cosines_of_the_sentence_encoder_are_those_of_the_kept_result():
    rows = json.loads((ROOT / "benchmarks/results/minilm.json").read_text())["rows"]
    half = {
        (row["family"], row["calibrated"]): f"{row['cosine']:.2f}"
        for row in rows
        if row["budget"] == 0.5
    }
    text = " ".join(README.split())
    for family in ("BTT", "low-rank", "block-diagonal"):
        found = re.search(rf"(\d\.\d\d) \({family}, [^)]*?(\d\.\d\d)", text)
        assert found is not None
        assert found.groups() == (half[family, False], half[family, True])


def test_the_code_of_the_theory_page_gives_the_output_that_it_shows():
    results = doctest.testfile(
        str(ROOT / "docs/theory.md"), module_relative=False, encoding="utf-8"
    )
    assert results.attempted > 10
    assert results.failed == 0
