"""Every trap that was met on a real model: handled, or refused with its reason."""

import copy
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import structlin
from structlin import (
    BTT,
    LowRank,
    StructuredLinear,
    compress,
    convert,
    densify,
    plan,
    plan_compression,
)
from tests.models import GPT, snapshot


class FunctionalReader(nn.Module):
    """timm's BEiT, SwinV2 and EVA02, and Mamba, read `self.qkv.weight` and never call the layer."""

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
        self.base_layer, self.lora_A = (
            nn.Linear(16, 16),
            nn.ModuleDict({"default": nn.Linear(16, 2)}),
        )


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


def float8(layer: nn.Linear) -> None:
    layer.to(torch.float8_e4m3fn)


def reshaped(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.zeros(8, 16))


def buffered(layer: nn.Linear) -> None:
    bias = layer.bias.detach()
    del layer.bias
    layer.register_buffer("bias", bias)


def scaled(layer: nn.Linear) -> None:
    layer.scale = nn.Parameter(torch.ones(16))
    layer.register_buffer("mask", torch.ones(16))


class Special(nn.Linear):
    pass


HOOKS = "has hooks, which would be lost: _"
WEIGHTS_HOOKS = "has hooks on its weight, which would be lost"
MORE = "has more than a layer of its kind has, .* lost: "
PATCHED = "has methods of its own, offloaded or patched, which would be lost: "
CHANGED: dict[str, tuple[Callable[[nn.Linear], object], str]] = {  # what is done to one layer
    "quantised": (quantised, "has a weight of type Int8Tensor"),
    "float8": (float8, "has a weight of type Parameter and dtype torch.float8_e4m3fn"),
    "parametrised": (nn.utils.parametrizations.spectral_norm, "Parametrized"),
    "normalised": (nn.utils.parametrizations.weight_norm, "Parametrized"),
    "pruned": (lambda m: prune.random_unstructured(m, "weight", 0.5), "no weight parameter"),
    "forward hook": (lambda m: m.register_forward_hook(lambda *_: None), HOOKS),
    "backward hook": (lambda m: m.register_full_backward_hook(lambda *_: None), HOOKS),
    "state-dict hook": (
        lambda m: m.register_state_dict_post_hook(lambda *_: None), f"{HOOKS}state_dict_hooks",
    ),
    "state-dict pre-hook": (
        lambda m: m.register_state_dict_pre_hook(print), f"{HOOKS}state_dict_pre_hooks",
    ),
    "loading hook": (
        lambda m: m.register_load_state_dict_pre_hook(print), f"{HOOKS}load_state_dict_pre_hooks",
    ),
    "hook after loading": (
        lambda m: m.register_load_state_dict_post_hook(print),
        f"{HOOKS}load_state_dict_post_hooks",
    ),
    "weight's hook": (lambda m: m.weight.register_hook(lambda grad: 2 * grad), WEIGHTS_HOOKS),
    "weight's hook after accumulation": (
        lambda m: m.weight.register_post_accumulate_grad_hook(print), WEIGHTS_HOOKS,
    ),
    "weight's attribute": (
        lambda m: setattr(m.weight, "lr_scale", 3.0),
        "has attributes on its weight, which would be lost: lr_scale",
    ),
    "attribute of ours": (
        lambda m: setattr(m, "cores", 3),
        "has an attribute 'cores', a name that StructuredLinear needs",
    ),
    "patched method": (lambda m: setattr(m, "extra_repr", str), f"{PATCHED}extra_repr"),
    "patched forward": (offloaded, f"{PATCHED}forward"),
    "changed weight": (
        reshaped, r"has a weight of shape \(8, 16\), no longer that of the layer: \(16, 16\)",
    ),
    "changed bias": (
        lambda m: setattr(m, "bias", nn.Parameter(torch.zeros(1))),
        r"has a bias of shape \(1,\), not \(out_features,\) = \(16,\)",
    ),
    "bias as a buffer": (buffered, f"{MORE}bias"),
    "more parameters": (scaled, f"{MORE}scale, mask"),
    "mup": (infshape, "width of the mup package"),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "attention of torch.nn": (
        lambda: nn.MultiheadAttention(16, 2), "out_proj", "belongs to nn.MultiheadAttention",
    ),
    "experts as one parameter": (
        Experts, "experts.gate_up_proj", "parameters, no linear layers, and stay dense",
    ),
    "LoRA base": (LoRA, "base_layer", "belongs to an adapter"),
    "LoRA adapter": (LoRA, "lora_A.*", "belongs to an adapter"),
    "subclass": (lambda: nn.ModuleDict({"it": Special(16, 16)}), "it", "is a Special"),
    "converted already": (
        lambda: nn.ModuleDict({"it": StructuredLinear(16, 16)}), "it", "is structured already",
    ),
    "tied": (lambda: GPT(tied=True), "lm_head", "shares its weight with wte; untie=True"),
    "tied, by its role": (lambda: GPT(tied=True), "head", "lm_head.*shares its weight with wte"),
    "lazy": (
        lambda: nn.ModuleDict({"it": nn.LazyLinear(16), "other": nn.Linear(16, 16)}),
        "it",
        "is a LazyLinear",
    ),
} | {
    trap: (partial(layer_of, change), "it", reason) for trap, (change, reason) in CHANGED.items()
}  # fmt: skip


@pytest.mark.parametrize("trap", REFUSED)
def test_what_cannot_be_converted_is_refused_when_it_is_named(trap):
    build, name, reason = REFUSED[trap]
    model = build()
    modules = [(key, id(module)) for key, module in model.named_modules()]
    with pytest.raises(ValueError, match=reason):
        convert(model, BTT(), include=name)
    assert [(key, id(module)) for key, module in model.named_modules()] == modules


@pytest.mark.parametrize("trap", CHANGED)
def test_what_cannot_be_converted_is_skipped_with_its_reason_when_it_is_not_named(trap):
    build, name, reason = REFUSED[trap]
    model = build()
    assert re.search(reason, " ".join(str(plan(model, BTT())).split()))
    hooked = pytest.warns(UserWarning, match="left dense, for they have hooks")
    with hooked if reason.startswith("has hooks") else nullcontext():
        convert(model, BTT())
    assert not isinstance(model[name], StructuredLinear)
    assert isinstance(model["other"], StructuredLinear)


KEPT: dict[str, tuple[Callable[[StructuredLinear], object], str]] = {
    "hook": (lambda m: m.register_forward_hook(print), f"{HOOKS}forward_hooks"),
    "state-dict hook": (
        lambda m: m.register_state_dict_post_hook(lambda *_: None), f"{HOOKS}state_dict_hooks",
    ),
    "core's hook": (
        lambda m: m.cores[1].register_hook(lambda grad: 2 * grad), "has hooks on its cores.1",
    ),
    "core's attribute": (
        lambda m: setattr(m.cores[0], "lr_scale", 3.0), "attributes on its cores.0, .*: lr_scale",
    ),
    "hook of the list": (
        lambda m: m.cores.register_forward_pre_hook(print), "has hooks, .*_forward_pre_hooks",
    ),
    "more parameters": (scaled, f"{MORE}scale, mask"),
    "pruned core": (
        lambda m: prune.l1_unstructured(m.cores, "0", 0.5), rf"{MORE}cores\.0_orig, cores\.0_mask",
    ),
    "parametrised core": (
        lambda m: parametrize.register_parametrization(m.cores, "0", nn.Identity()),
        rf"{MORE}cores\.parametrizations",
    ),
    "patched forward": (offloaded, f"{PATCHED}forward"),
}  # fmt: skip


@pytest.mark.parametrize("trap", KEPT)
def test_a_structured_layer_that_would_lose_something_does_not_become_dense(trap):
    change, reason = KEPT[trap]
    model = nn.Sequential(StructuredLinear(16, 16), StructuredLinear(16, 16))
    change(model[1])
    modules = list(model.modules())
    with pytest.raises(ValueError, match=f"layer '1' .*{reason}"):
        densify(model)
    assert list(model.modules()) == modules


def test_a_subclass_of_the_layer_does_not_become_dense():
    class Scaled(StructuredLinear):
        pass

    model = nn.Sequential(Scaled(16, 16))
    with pytest.raises(ValueError, match="layer '0' is a Scaled: its own behaviour would be lost"):
        densify(model)
    assert type(model[0]) is Scaled


def test_attributes_of_a_layer_and_hooks_of_its_bias_go_there_and_back():
    model, grads = nn.Sequential(nn.Linear(16, 16)), []
    model[0].RESIDUAL_SCALE = 0.5
    model[0].bias.register_hook(grads.append)
    for change in (lambda: convert(model, BTT()), lambda: densify(model)):
        change()
        assert model[0].RESIDUAL_SCALE == 0.5
        model(torch.ones(2, 16)).sum().backward()
        assert torch.equal(grads.pop(), torch.full((16,), 2.0))
    assert type(model[0]) is nn.Linear
    assert set(vars(model[0])) == {*vars(nn.Linear(1, 1)), "RESIDUAL_SCALE"}


@pytest.mark.parametrize("attribute", ["_is_hf_initialized", "_dynamo_static_input_type"])
def test_what_loading_and_compiling_leave_on_a_weight_is_no_obstacle(attribute):
    layer = nn.Linear(16, 16)
    setattr(layer.weight, attribute, True)
    assert isinstance(convert(layer, BTT()), StructuredLinear)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch.compile": torch.compile,
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "FullyShardedDataParallel": shard,
}
CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "convert": lambda model: convert(model, LowRank(rank=2)),
    "plan": lambda model: plan(model, LowRank(rank=2)),
    "compress": lambda model: compress(model, LowRank(rank=2), None, keep=None),
    "densify": densify,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_model_that_is_wrapped_or_has_a_wrapped_part_is_refused(wrapper, change, one_process):
    part = nn.Sequential(nn.Linear(16, 16), StructuredLinear(16, 16))
    wrapped = WRAPPERS[wrapper](part)
    modules = list(part.modules())
    with pytest.raises(ValueError, match=f"the model itself is wrapped by {wrapper}, .*: unwrap"):
        CHANGES[change](wrapped)
    with pytest.raises(ValueError, match=f"model=ModuleDict: inside.it is wrapped by {wrapper}, "):
        CHANGES[change](nn.ModuleDict({"inside": nn.ModuleDict({"it": wrapped})}))
    assert list(part.modules()) == modules


@pytest.mark.parametrize("change", CHANGES)
def test_inference_mode_is_refused(change):
    model = nn.Sequential(nn.Linear(16, 16), StructuredLinear(16, 16))
    modules = list(model.modules())
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"torch\.inference_mode .* leave that mode"),
    ):
        CHANGES[change](model)
    assert list(model.modules()) == modules


def test_a_plan_is_not_applied_under_inference_mode_and_can_be_afterwards():
    planned = plan(nn.Linear(16, 16), BTT())
    with torch.inference_mode(), pytest.raises(ValueError, match="leave that mode"):
        planned.apply()
    assert not planned.apply().cores[0].is_inference()


@pytest.mark.parametrize(
    ("part", "calibrated"), [("weight", False), ("weight", True), ("bias", True)]
)
@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.detach()[0].add_(1e-3),  # which its version tells
        lambda part: part.data[3].add_(1e-3),
        lambda part: part.data.neg_(),
        lambda part: part.data.copy_(part.data.flip(0)),
    ],
)
def test_a_plan_whose_sizes_were_chosen_for_other_weights_is_refused(part, calibrated, change):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    batches = [torch.randn(50, 16)] if calibrated else None
    options = {"allocation": "error"}
    planned = plan_compression(model, LowRank(rank=1), batches, **options)
    change(getattr(model[1], part))
    before = snapshot(model)
    with pytest.raises(
        ValueError, match="layer '1' got other weights after this plan; make a new one"
    ):
        planned.apply()
    assert snapshot(model) == before
    plan_compression(model, LowRank(rank=1), batches, **options).apply()
    assert isinstance(model[1], StructuredLinear)


def test_a_plan_whose_layer_was_hooked_since_is_refused():
    model = nn.Sequential(nn.Linear(16, 16))
    planned = plan(model, BTT())
    model[0].weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(ValueError, match=r"layer '0' has hooks on its weight.* after this plan"):
        planned.apply()
    assert type(model[0]) is nn.Linear


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
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(32, 2, 64, 0.0, batch_first=True),
        (2, 5, 32),
    ),
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
    expected = densify(copy.deepcopy(model))(*inputs)
    monkeypatch.setattr(
        StructuredLinear, "to_dense", lambda self: pytest.fail("formed the dense matrix")
    )
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(model(*inputs), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:left dense")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_in_eval_mode_takes_a_padding_mask():
    model, x = convert(encoder(), BTT(rank=2)).eval(), torch.randn(2, 5, 32)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        kept = model(x, src_key_padding_mask=mask)[~mask]
        expected = densify(copy.deepcopy(model))(x, src_key_padding_mask=mask)[~mask]
    torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-4)


def test_a_transformers_that_cannot_be_used_stops_nobody_who_converts_another_model(monkeypatch):
    class PreTrainedModel(nn.Sequential):
        pass

    owner = SimpleNamespace(PreTrainedModel=PreTrainedModel)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", owner)
    monkeypatch.setitem(sys.modules, "structlin.hf", None)
    monkeypatch.delattr(structlin, "hf", raising=False)
    model = convert(nn.Sequential(nn.Linear(16, 16)), BTT())
    assert isinstance(model[0], StructuredLinear)
    for other in (
        PreTrainedModel(nn.Linear(16, 16)),
        PreTrainedModel(StructuredLinear(16, 16)),
    ):
        before = snapshot(other)
        change = densify if isinstance(other[0], StructuredLinear) else convert
        with pytest.raises(ImportError):
            change(other)
        assert snapshot(other) == before
