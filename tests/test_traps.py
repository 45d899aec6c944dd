"""Every trap that was met on a real model: handled, or refused with its reason. Source: notes/ecosystem.md, 1.1-1.3."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from structlin import BTT, StructuredLinear, convert, plan, to_dense_
from tests.models import GPT, snapshot


class FunctionalReader(nn.Module):
    """timm's BEiT, SwinV2 and EVA02 read `self.qkv.weight` and never call the layer; Mamba does the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.qkv.weight.dtype), self.qkv.weight, torch.zeros(48))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(4, 32, 16))
        self.q_proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.q_proj(x)


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A = nn.Linear(16, 16), nn.ModuleDict({"default": nn.Linear(16, 2)})


def layer_of(change: Callable[[nn.Linear], object]) -> nn.Module:
    layer = nn.Linear(16, 16)
    change(layer)
    return nn.ModuleDict({"it": layer, "other": nn.Linear(16, 16)})


def infshape(layer: nn.Linear) -> None:
    layer.weight.infshape = object()


def offloaded(layer: nn.Linear) -> None:
    layer.forward = lambda x: x


def quantised(layer: nn.Linear) -> None:
    class Int8Tensor(Tensor):
        pass

    layer.weight = nn.Parameter(torch.zeros(16, 16).as_subclass(Int8Tensor), requires_grad=False)


def scaled(layer: nn.Linear) -> None:
    layer.scale = nn.Parameter(torch.ones(16))
    layer.register_buffer("mask", torch.ones(16))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "attention of torch.nn": (lambda: nn.MultiheadAttention(16, 2), "out_proj", "belongs to nn.MultiheadAttention"),
    "experts as one parameter": (Experts, "experts.gate_up_proj", "parameters, no linear layers, and stay dense"),
    "LoRA base": (LoRA, "base_layer", "belongs to an adapter"),
    "LoRA adapter": (LoRA, "lora_A.*", "belongs to an adapter"),
    "quantised": (lambda: layer_of(quantised), "it", "has a weight of type Int8Tensor"),
    "parametrised": (lambda: layer_of(nn.utils.parametrizations.spectral_norm), "it", "Parametrized"),
    "pruned": (lambda: layer_of(lambda m: prune.random_unstructured(m, "weight", 0.5)), "it", "no weight parameter"),
    "forward hook": (lambda: layer_of(lambda m: m.register_forward_hook(lambda *_: None)), "it", "has hooks"),
    "backward hook": (lambda: layer_of(lambda m: m.register_full_backward_hook(lambda *_: None)), "it", "has hooks"),
    "patched forward": (lambda: layer_of(offloaded), "it", "has a forward of its own"),
    "more parameters": (lambda: layer_of(scaled), "it", "more than a layer of its kind has, .* lost: scale, mask"),
    "mup": (lambda: layer_of(infshape), "it", "width of the mup package"),
    "converted already": (lambda: nn.ModuleDict({"it": StructuredLinear(16, 16)}), "it", "is structured already"),
    "tied": (lambda: GPT(tied=True), "lm_head", "shares its weight with wte; untie=True"),
    "lazy": (lambda: nn.ModuleDict({"it": nn.LazyLinear(16), "other": nn.Linear(16, 16)}), "it", "is a LazyLinear"),
}  # fmt: skip


@pytest.mark.parametrize("trap", REFUSED)
def test_what_cannot_be_converted_is_refused_when_it_is_named(trap):
    build, name, reason = REFUSED[trap]
    model = build()
    modules = [(key, id(module)) for key, module in model.named_modules()]
    with pytest.raises(ValueError, match=reason):
        convert(model, BTT(), include=name)
    assert [(key, id(module)) for key, module in model.named_modules()] == modules


@pytest.mark.parametrize("trap", ["quantised", "parametrised", "pruned", "forward hook", "patched forward", "mup"])
def test_what_cannot_be_converted_is_skipped_with_its_reason_when_it_is_not_named(trap):
    build, name, reason = REFUSED[trap]
    model = build()
    assert reason in " ".join(str(plan(model, BTT())).split())
    convert(model, BTT())
    assert not isinstance(model[name], StructuredLinear)
    assert isinstance(model["other"], StructuredLinear)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_a_compiled_model_is_refused():
    with pytest.raises(ValueError, match=r"wrapped by torch.compile, .*: unwrap the model"):
        convert(torch.compile(GPT()), BTT())


def test_experts_held_as_one_parameter_are_said_to_stay_dense():
    with pytest.warns(UserWarning, match=r"left dense.*experts\.gate_up_proj \(4, 32, 16\)"):
        convert(Experts(), BTT())
    with pytest.raises(ValueError, match=r"'ffn' matches no linear layer.*experts\.gate_up_proj"):
        convert(Experts(), BTT(), include="ffn")


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


READERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "functional qkv": (FunctionalReader, (2, 5, 16)),
    "TransformerEncoder": (encoder, (2, 5, 32)),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(32, 2, 64, 0.0, batch_first=True), (2, 5, 32)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:left dense")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("reader", READERS)
def test_what_reads_the_weight_itself_runs_through_the_structure(reader, training, monkeypatch):
    build, shape = READERS[reader]
    model, x = build(), torch.randn(shape)
    convert(model, BTT(rank=2)).train(training)
    inputs = (x, x) if "Decoder" in reader else (x,)
    expected = to_dense_(copy.deepcopy(model))(*inputs)
    monkeypatch.setattr(StructuredLinear, "to_dense", lambda self: pytest.fail("formed the dense matrix"))
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(model(*inputs), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:left dense")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_in_eval_mode_takes_a_padding_mask():
    model, x = convert(encoder(), BTT(rank=2)).eval(), torch.randn(2, 5, 32)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        kept = model(x, src_key_padding_mask=mask)[~mask]
        expected = to_dense_(copy.deepcopy(model))(x, src_key_padding_mask=mask)[~mask]
    torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("init", ["mup", "project"])
def test_frozen_and_bfloat16_models_stay_what_they_were(init):
    model = GPT().to(torch.bfloat16).requires_grad_(False)
    convert(model, BTT(rank=2), init=init)
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, False)}
    assert model(torch.arange(6).reshape(1, 6)).isfinite().all()


def test_under_autocast_the_output_has_the_dtype_that_a_dense_layer_gives():
    layer, x = convert(nn.Linear(16, 16), BTT()), torch.randn(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == nn.Linear(16, 16)(x).dtype == torch.bfloat16


def test_an_old_optimizers_parameters_are_no_longer_the_models():
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    convert(model, BTT(), include="ffn")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert not any(id(core) in held for core in model.h[0].mlp.c_fc.cores)


def test_the_root_layer_is_returned_and_the_old_one_stays_dense():
    layer = nn.Linear(16, 16)
    new = convert(layer, BTT())
    assert isinstance(new, StructuredLinear)
    assert type(layer) is nn.Linear


def test_a_refused_model_is_as_it_was_even_when_another_layer_could_be_converted():
    model = GPT(tied=True)
    before = snapshot(model)
    with pytest.raises(ValueError, match="lm_head"), warnings.catch_warnings():
        convert(model, BTT(), include=["ffn", "lm_head"])
    assert snapshot(model) == before
