"""The GPU run rehearsed on a CPU: its gate, its files, and where it stops."""

import json

import pytest
import torch

from benchmarks import gpu
from structlin._engine import views


def test_part_a_checks_then_measures_and_keeps_both(tmp_path):
    gpu.main(["a", "--smoke", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "gate.json").read_text())["rows"]
    assert len(rows) > 40
    assert all(row["passed"] for row in rows)
    assert {"products", "copies", "results into views"} <= {row["check"] for row in rows}
    layers = json.loads((tmp_path / "products.json").read_text())["rows"]
    assert {"loop", "without copies", "nn.Linear"} <= {row["way"] for row in layers}
    assert all(row["predicted_ms"] > 0 for row in layers)
    assert len(list(tmp_path.iterdir())) <= 8


def test_a_wrong_product_stops_the_run_before_anything_is_timed(tmp_path, monkeypatch):
    right = views.gradients

    def wrong(dy, x, *rest):
        dx, *others = right(dy, x, *rest)
        return [dx * 1.01, *others]

    with torch.library._scoped_library("structlin", "IMPL") as library:
        library.impl("gradients.views", wrong, "CPU")
        with pytest.raises(SystemExit) as stopped:
            gpu.main(["a", "--smoke", "--out", str(tmp_path)])
    assert stopped.value.code == gpu.STOP
    rows = json.loads((tmp_path / "gate.json").read_text())["rows"]
    assert not all(row["passed"] for row in rows)
    assert not (tmp_path / "products.json").exists()


def test_part_b_trains_both_models_on_a_text_whose_entropy_is_kept(tmp_path):
    gpu.train(tmp_path / "training.json", "cpu", 20.0, smoke=True)
    kept = json.loads((tmp_path / "training.json").read_text())
    assert {row["model"] for row in kept["rows"]} == {"dense", "BTT r=1"}
    assert 0 < kept["entropy"] < torch.tensor(float(gpu.VOCABULARY)).log()


def test_without_a_gpu_nothing_is_measured_and_that_is_said(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    gpu.main(["a", "--out", str(tmp_path)])
    assert "no GPU" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
