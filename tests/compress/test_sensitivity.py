"""What an error in a layer does to the model, against formulas; one covariance at a time."""

import copy
import gc
import weakref
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from structlin import LowRank, compress, plan_compression
from structlin._compress.replay import observe
from structlin._compress.sensitivity import list_inputs, measure_sensitivities
from structlin._model.linears import linear_layers
from tests.models import snapshot


def weigh(model, batches, loss=None):
    replay, layers = observe(model, linear_modules(model), batches), linear_layers(model)
    found = measure_sensitivities(replay, layers, loss)
    return [found[layer.module] for layer in layers]


def linear_modules(model):
    return [layer.module for layer in linear_layers(model)]


def measure_harms(model, batches):
    """The mean over the outputs of each layer."""
    return [found.mean().item() for found in weigh(model, batches)]


def test_harms_of_linear_layers_are_the_sizes_of_what_follows():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))).double()
    batches = [torch.randn(500, 8).double() for _ in range(4)]
    harms = measure_harms(model, batches)
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
    with pytest.raises(ValueError, match=f"allocation='error' is.*{message}"):
        plan_compression(model, LowRank(rank=1), batches, keep=0.5)
    plan_compression(model, LowRank(rank=1), batches, keep=0.5, allocation="error")


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
    found = []
    for far in (0.0, 1e6):
        x[:, 3:] = far
        batches = [{"x": x.clone(), "attention_mask": mask}]
        found.append(measure_harms(model, batches))
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
    used, unused = measure_harms(model, [torch.ones(3, 4)])
    assert used > 0
    assert unused == 0


class Logits(nn.Sequential):
    """Named outputs, as of transformers."""

    def forward(self, x):
        return {"logits": super().forward(x), "states": x}


@pytest.fixture
def no_prior(monkeypatch):
    monkeypatch.setattr("structlin._compress.sensitivity.PRIOR_TOKENS", 0)


@pytest.mark.parametrize("loss", [None, "divergence"])
def test_of_logits_the_weights_are_the_fisher_information(loss, no_prior):
    """That of softmax at its logits is diag(p) - p p^T; a layer before sees it through W."""
    torch.manual_seed(0)
    first, last = nn.Linear(4, 6, bias=False), nn.Linear(6, 5, bias=False)
    x = torch.randn(20000, 4)
    model = (Logits if loss is None else nn.Sequential)(first, last)
    p = last(first(x)).detach().softmax(-1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    before = torch.einsum("tij,ia,ja->a", fisher, last.weight.detach(), last.weight.detach())
    expected = before, fisher.diagonal(dim1=1, dim2=2).sum(0)
    for found, wanted in zip(weigh(model, [x], loss), expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0)


def test_half_of_the_weighed_error_is_the_divergence_in_nats(no_prior):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)), torch.randn(5000, 4)
    weights = weigh(model, [x], "divergence")
    logs = model(x).log_softmax(-1)
    for layer, g in zip((model[0], model[2]), weights, strict=True):
        for output in range(len(g)):
            error = 1e-2 * torch.randn(len(x))

            def disturb(module, args, y, error=error, output=output):
                return y + error[:, None] * torch.eye(y.shape[1])[output]

            handle = layer.register_forward_hook(disturb)
            found = (logs.exp() * (logs - model(x).log_softmax(-1))).sum().item()
            handle.remove()
            expected = 0.5 * g[output].item() * error.square().mean().item()
            assert found == pytest.approx(expected, rel=0.2)


def test_a_loss_of_ones_own_gives_its_gradients(no_prior):
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3), torch.randn(10, 4)
    (found,) = weigh(nn.Sequential(layer), [x], lambda output: (output**3).sum())
    expected = (3 * layer(x).detach() ** 2).square().sum(0)
    torch.testing.assert_close(found.float(), expected)


def write_relu(y):
    y[y < 0] = 0.0
    return y


@pytest.mark.parametrize("write", [nn.ReLU(inplace=True), write_relu], ids=["ReLU", "items"])
@pytest.mark.parametrize("shape", [(40, 4), (8, 5, 4)])  # of three dimensions an output is a view
@pytest.mark.parametrize("trains", [True, False])
def test_what_is_written_into_an_output_in_place_comes_after_it(write, shape, trains, no_prior):
    class Model(nn.Sequential):
        def forward(self, x):
            return self[1](write(self[0](x)))

    torch.manual_seed(0)
    model = Model(nn.Linear(4, 6), nn.Linear(6, 3)).requires_grad_(trains)
    x = torch.randn(*shape)
    found, _ = weigh(model, [x], lambda output: output.sum())
    is_open = model[0](x).detach().flatten(0, -2) > 0  # (tokens, 6)
    expected = (is_open * model[1].weight.detach().sum(0)).square().sum(0)
    torch.testing.assert_close(found.float(), expected)


class Frozen(nn.Module):
    """Its first part takes no gradients; `cut` says how."""

    def __init__(self, cut):
        super().__init__()
        self.first, self.last, self.cut = nn.Linear(8, 8), nn.Linear(8, 8), cut

    def forward(self, x):
        if self.cut == "detach":
            return self.last(self.first(x).tanh().detach())
        with getattr(torch, self.cut)():
            y = self.first(x).tanh()
        return self.last(y.clone())


@pytest.mark.parametrize("cut", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("keep", [None, 0.5])
def test_layers_around_which_gradients_are_off_are_named_and_can_be_left_out(cut, keep):
    model, batches = Frozen(cut), [torch.randn(50, 8)]
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"turns gradients off .* around these layers: first;"):
        compress(model, LowRank(rank=1), batches, keep=keep)
    assert snapshot(model) == before
    compress(model, LowRank(rank=1), batches, keep=keep, exclude="first")


def test_a_layer_that_has_inputs_but_no_gradient_is_named_as_harmless():
    model, batches = Frozen("detach"), [torch.randn(50, 8)]
    with pytest.warns(UserWarning, match="no gradient of the loss reached first: their errors"):
        planned = plan_compression(model, LowRank(rank=1), batches, keep=0.5)
    assert planned.decisions[0].resolved.params == 8 + 8


def test_few_tokens_draw_the_weights_to_their_mean():
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    spread = []
    for tokens in (10, 100, 10000):
        (g,) = weigh(nn.Sequential(layer), [torch.randn(tokens, 4)], lambda y: (y @ SCALES).sum())
        spread.append((g.max() / g.min()).item())
    assert 1 < spread[0] < spread[1] < spread[2] < 9
    assert spread[2] > 8


SCALES = torch.tensor([1.0, 2.0, 3.0])


class Scaled(nn.Module):
    def __init__(self, scales: Tensor) -> None:
        super().__init__()
        self.layer, self.scales = nn.Linear(16, 12, bias=False), scales

    def forward(self, x):
        return self.layer(x) * self.scales


def test_outputs_that_count_more_are_nearer_as_eckart_and_young_have_it(no_prior):
    torch.manual_seed(0)
    scales = torch.logspace(-1, 1, 12)
    model, x = Scaled(scales), torch.randn(4000, 16) @ torch.diag(torch.logspace(0, -1, 16))
    weight = model.layer.weight.detach().clone()
    new = compress(model, LowRank(rank=4), [x], keep=None).layer.to_dense()
    error = (scales[:, None] * ((weight - new) @ x.mT)).square().sum()
    least = torch.linalg.svdvals(scales[:, None] * (weight @ x.mT))[4:].square().sum()
    assert error <= 1.001 * least


def divergence(dense: Tensor, logits: Tensor) -> float:
    p = dense.log_softmax(-1)
    return (p.exp() * (p - logits.log_softmax(-1))).sum(-1).mean().item()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ranks_chosen_by_sensitivity_are_near_the_best_of_all(seed):
    torch.manual_seed(seed)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(3)]
    for layer, power in zip(layers, (0.2, 0.8, 1.5), strict=True):
        values = torch.arange(1, 17) ** -power
        layer.weight.data = torch.linalg.qr(torch.randn(16, 16)).Q * (3 * values)
    dense, x = nn.Sequential(*layers[:2], nn.Tanh(), layers[2]), torch.randn(2000, 16)
    options = {"loss": "divergence", "include": "*"}
    found = {}
    for ranks in product(range(1, 9), repeat=3):  # 8 has as many parameters as dense
        if sum(ranks) == 12:  # half of the parameters
            named = zip(("0", "1", "3"), ranks, strict=True)
            chosen = {name: None if rank == 8 else LowRank(rank=rank) for name, rank in named}
            model = copy.deepcopy(dense)
            compress(model, LowRank(rank=1), [x], overrides=chosen, keep=None, **options)
            found[ranks] = divergence(dense(x), model(x))
    planned = plan_compression(copy.deepcopy(dense), LowRank(rank=1), [x], keep=0.5, **options)
    own = divergence(dense(x), planned.apply()(x))
    assert own <= 1.1 * min(found.values())
    assert own <= 0.5 * sorted(found.values())[len(found) // 2]


@dataclass
class Answer:
    features: Tensor
    note: str = ""


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("loss", [None, lambda answer: answer.features.square().sum()])
def test_a_model_that_returns_a_dataclass_keeps_what_one_that_returns_a_tensor_does(
    reentrant, loss
):
    class Answering(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=True) if reentrant else layer(x)
            return Answer(x)

    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    answering = Answering(*copy.deepcopy(plain))
    batches = [torch.randn(20, 8)]
    found = plan_compression(answering, LowRank(rank=1), batches, keep=0.5, loss=loss)
    loss_of_plain = None if loss is None else lambda y: loss(Answer(y))
    expected = plan_compression(plain, LowRank(rank=1), batches, keep=0.5, loss=loss_of_plain)
    assert [each.structure for each in found.decisions] == [
        each.structure for each in expected.decisions
    ]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_loss_of_the_users_own_may_read_any_object_that_a_checkpointed_model_returns():
    class Answering(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = checkpoint(layer, x, use_reentrant=True)
            return SimpleNamespace(features=x)

    torch.manual_seed(0)
    model = Answering(nn.Linear(8, 8), nn.Linear(8, 8))
    found = weigh(model, [torch.randn(20, 8)], lambda answer: answer.features.square().sum())
    assert all(each.min() > 0 for each in found)


def test_layers_whose_forward_is_called_directly_are_seen():
    class Direct(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = layer.forward(x)
            return x

    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    batches = [torch.randn(20, 8)]
    found = plan_compression(Direct(*copy.deepcopy(plain)), LowRank(rank=1), batches, keep=0.5)
    expected = plan_compression(plain, LowRank(rank=1), batches, keep=0.5)
    assert found.errors == expected.errors


def test_a_model_that_takes_derivatives_itself_is_told_what_does_without_gradients():
    class Force(nn.Sequential):
        def forward(self, x):
            return torch.func.grad(lambda x: super(Force, self).forward(x).tanh().sum())(x)

    model = Force(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"^allocation='error' is needed"):
        compress(model, LowRank(rank=1), [torch.randn(20, 8)], keep=0.5)


def test_batches_without_a_row_are_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"^batches: no row of them reaches the layers"):
        compress(model, LowRank(rank=1), [torch.zeros(0, 8)], keep=0.5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss": "kl"}, ValueError, "loss='kl' is unknown; there are divergence, outputs"),
        ({"loss": 3}, TypeError, "loss=3 must be a text: divergence, outputs"),
        ({"loss": "outputs", "allocation": "error"}, ValueError, "loss='outputs' goes with"),
        ({"loss": "outputs", "batches": None, "allocation": "error"}, ValueError, "goes with"),
        ({"loss": lambda y: y}, TypeError, r"loss must return .* shape \(20, 8\), requires_grad"),
        ({"loss": lambda y: 1.0}, TypeError, "loss must return .* it returned float"),
        ({"loss": lambda y: y.detach().sum()}, TypeError, "requires_grad=False"),
        ({"loss": lambda y: 0 * y.sum()}, ValueError, "has only gradients of zero"),
        ({"loss": lambda y: (0 * y).sqrt().sum()}, ValueError, "gradients that are not finite"),
        ({"loss": lambda y: y.sum() * torch.nan}, ValueError, "^loss returned nan"),
        (
            {"loss": lambda y: F.cross_entropy(y, torch.arange(20))},
            ValueError,
            "the label 8 is outside of the loss, which has 8 classes",
        ),
    ],
)
@pytest.mark.parametrize("keep", [None, 0.5])
def test_a_wrong_loss_is_named_and_the_model_stays_as_it_was(options, error, message, keep):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = snapshot(model)
    given = {"batches": [torch.randn(20, 8)], "keep": keep, **options}
    with pytest.raises(error, match=message):
        compress(model, LowRank(rank=1), **given)
    assert snapshot(model) == before


def test_each_layers_covariance_is_that_of_its_inputs_in_the_dense_model():
    torch.manual_seed(0)
    shared = nn.Linear(6, 6, bias=False)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), shared, nn.Tanh(), shared).double()
    batches = [torch.randn(10, 4).double() for _ in range(2)]
    layers = linear_layers(model)
    replay = observe(model, linear_modules(model), batches)
    found = {layer.name: covariance for layer, _, covariance in list_inputs(replay, layers)}
    first, second = found["0"], found["1"]
    x = torch.cat(batches)
    torch.testing.assert_close(first, x.mT @ x / 20)
    h = model[0](x).detach()
    both = torch.cat([h, shared(h).detach().tanh()])  # the layer is called twice
    torch.testing.assert_close(second, both.mT @ both / 40)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # as they are observed
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["plain", "new", "reentrant"])
def test_the_activations_of_a_call_are_freed_without_pythons_search_for_cycles(use_reentrant):
    hidden = []

    class Model(nn.Sequential):
        def forward(self, x):
            up, down = self
            h = up(x)
            if use_reentrant is None:
                y = down(h)
            else:
                y = checkpoint(down, h, use_reentrant=use_reentrant)
            hidden.append(weakref.ref(h.untyped_storage()))
            return y

    model = Model(nn.Linear(4, 8), nn.Linear(8, 4))
    gc.disable()
    try:
        weigh(model, [torch.randn(16, 4) for _ in range(2)])
        alive = [storage for storage in hidden if storage() is not None]
    finally:
        gc.enable()
    assert len(hidden) >= 4  # both calls are observed, and made with gradients
    assert alive == []
