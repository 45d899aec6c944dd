"""examples/compress.py at tiny sizes."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import compress


def test_compress_leaves_a_table_a_plot_and_results(tmp_path, capsys):
    rows = compress.main(["--smoke", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert [(row["family"], row["aware"]) for row in rows[1:]] == [
        (family, aware) for family in ("btt", "monarch") for aware in (False, True)
    ]
    dense, *others = rows
    for row in others:
        assert row["params"] <= 0.65 * dense["params"]  # the head stays dense
        assert row["after"] < dense["after"] + 0.5
    assert "btt, calibrated" in shown
    assert json.loads((tmp_path / "compress.json").read_text())["rows"] == rows
    assert (tmp_path / "compress.png").stat().st_size > 1000


def test_compress_takes_a_checkpoint_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    from benchmarks.zoo import llama

    letters = {letter: n for n, letter in enumerate("_ abcdefghijklmnopqrstuvwxyz.,")}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="_").save_pretrained(tmp_path / "m")
    llama().save_pretrained(tmp_path / "m")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    options = ["--smoke", "--model", str(tmp_path / "m"), "--data", str(text), "--families", "lowrank"]
    rows = compress.main([*options, "--out", str(tmp_path / "out")])
    assert [row["family"] for row in rows] == ["dense", "lowrank", "lowrank"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", "0"], "'0' is not a fraction"),
        (["--budgets", "half"], "'half' is not a fraction"),
        (["--families", "fft"], "invalid choice"),
        (["--model", "nowhere"], "--model nowhere: no such folder"),
        (["--data", "nowhere.txt"], "no such file"),
    ],
)
def test_compress_refuses_bad_arguments_with_one_message(arguments, message, capsys):
    with pytest.raises(SystemExit):
        compress.main(["--smoke", *arguments])
    assert message in capsys.readouterr().err
