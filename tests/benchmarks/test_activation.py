"""What the activation between two layers of an MLP takes: it is what the step says it is, and its
share is that of the round."""

import doctest

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from benchmarks.speed import activation
from structlin import StructuredLinear


@pytest.mark.parametrize("name", activation.TINY_MODELS)
def test_the_activations_are_changed_and_nothing_else(name, monkeypatch):
    models = []
    monkeypatch.setattr(activation, "training", lambda model, shape: models.append(model))
    changes = [activation.FULL, activation.WITHOUT, activation.RELU, activation.ONE]
    for change in changes:
        activation.make_step(activation.shape(name), change, False, False)
    full, without, relu, one = ([*model.modules()] for model in models)
    assert [type(a) is type(b) for a, b in zip(full, without, strict=True)].count(False) == 1
    for kind, modules in ((nn.Identity, without), (nn.ReLU, relu), (nn.GELU, one)):
        assert sum(type(module) is kind for module in modules) >= 1
        assert sum(isinstance(module, StructuredLinear) for module in modules) == 2
    x = torch.randn(50)
    pairs = enumerate(zip(full, relu, strict=True))
    (place,) = [n for n, (own, other) in pairs if type(own) is not type(other)]
    torch.testing.assert_close(full[place](x), one[place](x))


def test_the_bound_is_a_share_of_a_whole_step():
    assert not doctest.testmod(activation).failed
    rows = activation.measure("ViT, tiny", compiled=False, half=True, seconds=0)
    assert [row["change"] for row in rows] == [activation.WITHOUT, activation.RELU]
    assert all(row["rounds"] > 0 and row["saved"]["median"] < 1 for row in rows)
