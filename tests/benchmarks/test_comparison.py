"""The comparison that others extend: a file adds a method."""

import json
import math

import pytest
import torch
from torch import nn

import structlin
from benchmarks.comparison import layers, methods
from benchmarks.comparison.methods import Method, find_methods, replace_layers

FILE = """
from torch import nn
from benchmarks.comparison.methods import Method, replace_layers


def build(in_features, out_features):
    return nn.Sequential(nn.Linear(in_features, 2, False), nn.Linear(2, out_features, False))


METHODS = [Method("two layers", replace_layers(build), "yours")]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    return tmp_path


def test_a_file_adds_a_method_to_the_table(folder, tmp_path, monkeypatch):
    (folder / "of_a_reader.py").write_text(FILE)
    found, _ = find_methods()
    assert found["two layers"].package == "yours"
    monkeypatch.setattr(layers, "METHODS", found)
    monkeypatch.setitem(layers.EXPERIMENT.axes, "method", [*found])
    monkeypatch.setitem(layers.EXPERIMENT.smoke, "method", ["dense", "two layers"])
    layers.EXPERIMENT.main(["--smoke", "--out", str(tmp_path)])
    kept = json.loads((tmp_path / "comparison.json").read_text())
    dense, two = kept["table"]
    assert (dense["method"], two["method"]) == ("dense", "two layers")
    assert two["flops"] < dense["flops"]
    assert two["params"] < dense["params"]
    assert all(math.isfinite(loss) for row in kept["table"] for loss in row["losses"])
    assert {*kept["times"]} == {"dense", "two layers"}
    assert (tmp_path / "comparison.png").exists()


def test_what_is_not_installed_is_left_out_with_its_name(folder):
    (folder / "rare.py").write_text("import no_such_package\n")
    found, left_out = find_methods()
    assert "rare: No module named 'no_such_package'" in left_out
    assert {"dense", "BTT(rank=1)"} <= {*found}


def test_two_methods_of_one_name_are_refused(folder):
    (folder / "twice.py").write_text(FILE.replace("two layers", "dense"))
    with pytest.raises(ValueError, match="there is another method 'dense'"):
        find_methods()


def test_all_layers_but_the_head_are_replaced():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp, self.lm_head = nn.Linear(8, 16, bias=False), nn.Linear(16, 4)

    model = Model()
    replace_layers(lambda *widths: nn.Identity())(model)
    assert isinstance(model.mlp, nn.Identity)
    assert isinstance(model.lm_head, nn.Linear)


@pytest.mark.parametrize("name", [*layers.METHODS])
def test_a_method_trains(name):
    sizes = {"width": 256, "heads": 8, "depth": 1, "context": 16, "batch": 2, "steps": 2}
    model = layers.build(layers.METHODS[name], 0, sizes)
    before = [each.detach().clone() for each in model.parameters() if each.requires_grad]
    optimizer = layers.make_optimizer(layers.METHODS[name], model, 1e-3)
    x, y = layers.make_task(0, **sizes).batch(0)
    for _ in range(5):  # what stands before a zero has no gradient at first
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = [each for each in model.parameters() if each.requires_grad]
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert isinstance(layers.METHODS[name], Method)
    if layers.METHODS[name].package == "structlin":
        assert any(isinstance(m, structlin.StructuredLinear) for m in model.modules())


def test_a_run_that_diverged_is_last(monkeypatch):
    rows = [{"losses": [None, 1.0]}, {"losses": [2.0, 3.0]}]
    assert min(rows, key=layers.mean_loss) is rows[1]
