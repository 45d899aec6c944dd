"""`densify(where="slower")`: a layer that a clock finds slower than dense becomes dense, no other.

The clock of these tests is a number that each layer's forward pass moves on: nothing is timed here.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from structlin import BTT, TT, StructuredLinear, _timing, convert, densify
from tests.models import snapshot

Cost = Callable[[nn.Module, Tensor], float]


@pytest.fixture
def takes(monkeypatch):
    """`takes(structured, dense)`: how many seconds a call takes; gives the list of calls."""
    now, calls = [0.0], []

    def set_costs(structured: Cost, dense: Cost) -> list[nn.Module]:
        for kind, cost in ((StructuredLinear, structured), (nn.Linear, dense)):

            def forward(self, x, real=kind.forward, cost=cost):
                now[0] += cost(self, x)
                calls.append(self)
                return real(self, x)

            monkeypatch.setattr(kind, "forward", forward)
        return calls

    monkeypatch.setattr(_timing, "perf_counter", lambda: now[0])
    return set_costs


def always(seconds: float) -> Cost:
    return lambda layer, x: seconds


def mixed() -> nn.Module:
    layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128, bias=False))
    return convert(layers, TT(rank=2), overrides={"2": BTT()}).eval()


def test_only_the_slower_layers_become_dense_and_the_function_stays(takes):
    model, x = mixed(), torch.randn(5, 64)
    y, kept = model(x), model[2]
    takes(lambda layer, x: 3.0 if layer.in_features == 64 else 1.0, always(2.0))
    assert densify(model, where="slower", tokens=16) is model
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, StructuredLinear]
    assert model[2] is kept
    torch.testing.assert_close(model(x), y, atol=1e-5, rtol=1e-4)
    assert set(model.state_dict()) == {"0.weight", "0.bias", "2.cores.0", "2.cores.1"}


@pytest.mark.parametrize(("tokens", "kind"), [(4, nn.Linear), (6, StructuredLinear)])
def test_the_layers_are_timed_at_that_many_tokens(takes, tokens, kind):
    takes(lambda layer, x: 5.0 + len(x), lambda layer, x: 2.0 * len(x))
    assert type(densify(mixed(), where="slower", tokens=tokens)[0]) is kind


def test_slow_rounds_and_the_first_one_do_not_decide(takes):
    model, structured = convert(nn.Sequential(nn.Linear(8, 8)), BTT()), []

    def cost(layer: nn.Module, x: Tensor) -> float:
        structured.append(layer)
        return 1000.0 if len(structured) <= 5 else 1.0  # the first, and four of the nine that count

    takes(cost, always(2.0))
    assert isinstance(densify(model, where="slower", tokens=1)[0], StructuredLinear)


def test_the_two_layers_take_turns(takes):
    model = convert(nn.Sequential(nn.Linear(8, 8)), BTT())
    calls = takes(always(1.0), always(2.0))
    densify(model, where="slower", tokens=1)
    assert [type(layer) for layer in calls[:6]] == [StructuredLinear, nn.Linear] * 3


def test_layers_that_are_alike_are_timed_once(takes):
    model = convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16)), BTT())
    calls = takes(always(1.0), always(2.0))
    densify(model, where="slower", tokens=1)
    assert {layer for layer in calls if isinstance(layer, StructuredLinear)} == {model[0], model[2]}


def test_hooks_do_not_see_the_timing_and_random_numbers_stay(takes):
    model, seen = convert(nn.Sequential(nn.Linear(8, 8)), BTT()), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(module))
    torch.manual_seed(3)
    expected = torch.randn(2)
    torch.manual_seed(3)
    takes(always(1.0), always(2.0))
    densify(model, where="slower", tokens=1)
    assert torch.equal(torch.randn(2), expected)
    assert not seen


def test_a_merged_layer_is_a_copy_of_what_the_cores_were(takes):
    model, x = mixed(), torch.randn(5, 64)
    with torch.no_grad():
        for core in model[0].cores:
            core.mul_(2)
    y = model(x)  # the weights were edited after the layer had run
    takes(always(2.0), always(1.0))
    torch.testing.assert_close(
        densify(model, where="slower", tokens=16)(x), y, atol=1e-5, rtol=1e-4
    )


def test_conv1d_and_a_root_layer_come_back_as_what_they_were(takes):
    transformers = pytest.importorskip("transformers")
    conv = convert(nn.Sequential(transformers.pytorch_utils.Conv1D(64, 64)), TT(rank=4))
    takes(always(2.0), always(1.0))
    assert type(densify(conv, where="slower", tokens=16)[0]) is transformers.pytorch_utils.Conv1D
    root = StructuredLinear(64, 64, TT(rank=16))
    assert type(densify(root, where="slower", tokens=16)) is nn.Linear


def test_a_model_that_is_fast_everywhere_stays_as_it_is(takes):
    model = mixed()
    before = snapshot(model)
    takes(always(1.0), always(1.0))  # equal is not slower
    densify(model, where="slower", tokens=16)
    assert snapshot(model) == before


@pytest.mark.parametrize("tokens", [0, -1, 2.5, True, None])
def test_a_number_of_tokens_that_is_none_is_refused(tokens):
    with pytest.raises(ValueError, match=f"tokens={tokens} must be (a positive|an|at least)"):
        densify(mixed(), where="slower", tokens=tokens)


def test_what_cannot_be_merged_is_refused_and_stays(takes):
    with pytest.raises(ValueError, match="model=Linear has no structured layer"):
        densify(nn.Linear(3, 3), where="slower", tokens=1)
    with pytest.raises(ValueError, match=r"layer '0' has no values \(meta\)"):
        densify(nn.Sequential(StructuredLinear(8, 8, device="meta")), where="slower", tokens=1)
    model = mixed()
    model[0].register_forward_hook(lambda module, args, output: None)
    before = snapshot(model)
    takes(lambda layer, x: 3.0 if layer.in_features == 64 else 1.0, always(2.0))
    with pytest.raises(ValueError, match="layer '0' has hooks"):
        densify(model, where="slower", tokens=16)
    assert snapshot(model) == before
    model[2].register_forward_hook(lambda module, args, output: None)
    assert (
        type(densify(model[1:], where="slower", tokens=16)[1]) is StructuredLinear
    )  # it stays, with its hooks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "here"}, "where='here' is unknown; there are everywhere, slower"),
        ({"tokens": 16}, "tokens=16 goes with where='slower'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        densify(mixed(), **options)
