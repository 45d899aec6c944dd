"""`merge`: for inference, what is slower than dense becomes dense; nothing else changes, and nothing is stale."""

import copy

import pytest
import torch
from torch import nn

from structlin import BTT, TT, StructuredLinear, convert
from structlin._convert import merge
from tests.models import snapshot


def mixed() -> nn.Module:
    layers = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512, bias=False))
    return convert(layers, TT(rank=16), overrides={"2": BTT()}).eval()


def test_only_the_slower_layers_become_dense_and_the_function_stays():
    model, x = mixed(), torch.randn(5, 64)
    y, kept = model(x), model[2]
    assert merge(model, tokens=4096) is model
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, StructuredLinear]
    assert model[2] is kept
    torch.testing.assert_close(model(x), y, atol=1e-5, rtol=1e-4)
    assert set(model.state_dict()) == {"0.weight", "0.bias", "2.cores.0", "2.cores.1"}


def test_how_many_tokens_decides():
    assert isinstance(merge(mixed(), tokens=10**6)[0], nn.Linear)
    wide = convert(nn.Sequential(nn.Linear(2048, 2048)), TT(rank=16))
    assert isinstance(merge(copy.deepcopy(wide), tokens=1)[0], StructuredLinear)
    assert isinstance(merge(wide, tokens=4096)[0], nn.Linear)


def test_a_merged_layer_is_a_copy_of_what_the_cores_were():
    model, x = mixed(), torch.randn(5, 64)
    with torch.no_grad():
        for core in model[0].cores:
            core.mul_(2)
    y = model(x)  # the weights were edited after the layer had run
    torch.testing.assert_close(merge(model, tokens=4096)(x), y, atol=1e-5, rtol=1e-4)


def test_conv1d_and_a_root_layer_come_back_as_what_they_were():
    transformers = pytest.importorskip("transformers")
    conv = convert(nn.Sequential(transformers.pytorch_utils.Conv1D(64, 64)), TT(rank=16))
    assert type(merge(conv, tokens=4096)[0]) is transformers.pytorch_utils.Conv1D
    assert type(merge(StructuredLinear(64, 64, TT(rank=16)), tokens=4096)) is nn.Linear


def test_a_model_that_is_fast_everywhere_stays_as_it_is():
    model = convert(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 1024)), BTT())
    before = snapshot(model)
    merge(model, tokens=4096)
    assert snapshot(model) == before


@pytest.mark.parametrize("tokens", [0, -1, 2.5, True, None])
def test_a_number_of_tokens_that_is_none_is_refused(tokens):
    with pytest.raises(ValueError, match=f"tokens={tokens} must be a positive integer"):
        merge(mixed(), tokens=tokens)


def test_what_cannot_be_merged_is_refused_and_stays():
    with pytest.raises(ValueError, match="model=Linear has no structured layer"):
        merge(nn.Linear(3, 3), tokens=1)
    model = mixed()
    model[0].register_forward_hook(lambda module, args, output: None)
    before = snapshot(model)
    with pytest.raises(ValueError, match="layer '0' has hooks"):
        merge(model, tokens=4096)
    assert snapshot(model) == before
    model[2].register_forward_hook(lambda module, args, output: None)
    assert type(merge(model[1:], tokens=4096)[1]) is StructuredLinear  # it stays, so its hooks do not matter
