"""What an error in a layer does to the model, against formulas; one covariance at a time."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from structlin import BTT, LowRank, Monarch, plan_compression
from structlin._compress.calibration import observe
from structlin._compress.sensitivity import measure_covariances, measure_sensitivities
from structlin._model.survey import linear_layers


def measure_harms(model, layers, batches):
    """Of each layer, the mean over its outputs."""
    found = measure_sensitivities(model, layers, observe(model, layers, batches).calls)
    return [found[layer.module].mean().item() for layer in layers]


def test_harms_of_linear_layers_are_the_sizes_of_what_follows():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))).double()
    batches = [torch.randn(500, 8).double() for _ in range(4)]
    layers = linear_layers(model)
    harms = measure_harms(model, layers, batches)
    first, second, third = (layer.weight.detach() for layer in model)
    outputs = torch.cat(batches) @ (third @ second @ first).mT
    after = third @ second, third, torch.eye(8).double()
    expected = [len(outputs) * a.norm() ** 2 / 8 / outputs.norm() ** 2 for a in after]
    assert harms == pytest.approx([each.item() for each in expected], rel=0.1)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (lambda x: x.argmax(-1), "returns no floating tensor that has a gradient"),
        (lambda x: x / 0, "returns values that are not finite"),
        (lambda x: x.masked_fill(x > 0, -torch.inf), "returns values that are not finite"),
    ],
)
def test_a_model_without_sensitivities_is_refused_and_can_take_another_allocation(last, message):
    class Model(nn.Sequential):
        def forward(self, x):
            return last(super().forward(x))

    model, batches = Model(nn.Linear(8, 8), nn.Linear(8, 8)), [torch.randn(20, 8)]
    with pytest.raises(ValueError, match=f"allocation='error' or 'uniform'.*{message}"):
        plan_compression(model, LowRank(rank=1), batches, keep=0.5)
    for way in ("error", "uniform"):
        plan_compression(model, LowRank(rank=1), batches, keep=0.5, allocation=way)


def test_padding_does_no_harm():
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, attention_mask):
            return self.second(self.first(x))

    model, x = Model(), torch.randn(2, 6, 4)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[:, 3:] = False
    layers, found = linear_layers(model), []
    for far in (0.0, 1e6):
        x[:, 3:] = far
        batches = [{"x": x.clone(), "attention_mask": mask}]
        found.append(measure_harms(model, layers, batches))
    assert found[0] == pytest.approx(found[1])
    assert min(found[0]) > 0


def test_a_layer_that_the_output_does_not_depend_on_does_no_harm_and_frozen_models_work():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            self.unused(x)
            return {"out": self.used(x), "n": 3}

    model = Model().requires_grad_(False)
    layers = linear_layers(model)
    used, unused = measure_harms(model, layers, [torch.ones(3, 4)])
    assert used > 0
    assert unused == 0


def test_each_layers_covariance_is_that_of_its_inputs_in_the_dense_model():
    torch.manual_seed(0)
    shared = nn.Linear(6, 6, bias=False)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), shared, nn.Tanh(), shared).double()
    batches = [torch.randn(10, 4).double() for _ in range(2)]
    layers = linear_layers(model)
    seen = observe(model, layers, batches)
    found = {layer.name: each for layer, each in measure_covariances(model, layers, seen)}
    first, second = found["0"], found["1"]
    x = torch.cat(batches)
    torch.testing.assert_close(first, x.mT @ x / 20)
    h = model[0](x).detach()
    both = torch.cat([h, shared(h).detach().tanh()])  # the layer is called twice
    torch.testing.assert_close(second, both.mT @ both / 40)


def copy_last(seed: int) -> tuple[nn.Module, list[Tensor]]:
    """A small transformer that has learned to say the token before, and batches."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(16, 32), encoder, nn.Linear(32, 16))
    mixing = torch.diag(torch.logspace(0, -1, 16)) @ torch.linalg.qr(torch.randn(16, 16)).Q
    batches = [torch.randn(16, 12, 16) @ mixing for _ in range(4)]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(150):
        x = batches[step % 4]
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), batches


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", [LowRank(rank=1), BTT(), Monarch()], ids=str)
def test_to_keep_more_makes_a_transformer_no_worse_on_the_calibration_data(family, seed):
    dense, batches = copy_last(seed)
    errors = []
    with torch.no_grad():
        for keep in (0.3, 0.45, 0.5, 0.6, 0.65, 0.8, 0.9, 1.0):
            options = {"keep": keep, "include": "1.*"}
            planned = plan_compression(copy.deepcopy(dense), family, batches, **options)
            model = planned.apply()
            errors.append(sum((model(x) - dense(x)).square().sum().item() for x in batches) ** 0.5)
    assert all(more <= less * (1 + 1e-6) for less, more in pairwise(errors))
    assert errors[-1] == 0
