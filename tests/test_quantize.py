"""`quantize`: the rule of rounding, what a rounded layer still does, files, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from structlin import (
    BTT,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    StructuredLinear,
    convert,
    densify,
    load,
    optim,
    param_groups,
    quantize,
    save,
    summary,
)
from structlin._engine import product
from structlin._engine.cpu import library
from structlin._layer.quantized import QuantizedLinear

FAMILIES = [BTT(rank=2), Monarch(blocks=4), LowRank(rank=7), Kronecker(), Dense()]

# torchao warns about itself and about what it could load on another machine
OWN_WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch.*"
)


def mlp(**options) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96, **options), nn.GELU(), nn.Linear(96, 64, **options))


@pytest.fixture(params=["engine", "loop"])
def _way(request, monkeypatch):
    if request.param == "loop":
        monkeypatch.setattr(library, "_state", library.State(False, "switched off by a test"))
    elif not library.load():
        pytest.skip(library._state.reason)


# ---- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@pytest.mark.parametrize("weight_norm", [False, True])
def test_each_row_is_rounded_to_the_nearest_of_256_steps(family, weight_norm):
    layer = StructuredLinear(64, 64, family, weight_norm=weight_norm)
    with torch.no_grad():
        layer.cores[0][:, 1] = 0  # a row that has no largest number
        if weight_norm:
            layer.gains.fill_(0.7)
    before = [core.detach().clone() for core in layer.effective_cores()]
    rounded = quantize(layer)
    for core, scale, was in zip(rounded.cores, rounded.scales, before, strict=True):
        assert core.dtype == torch.int8
        assert scale.dtype == torch.float32
        step = was.abs().amax(-1, keepdim=True) / 127.5
        torch.testing.assert_close(scale.data, step.where(step > 0, 1))
        assert ((core * scale - was).abs() <= 0.5001 * step).all()
        assert ((core.short().abs().amax(-1, keepdim=True) >= 127) == (step > 0)).all()
    assert rounded.gains is None


@torch.no_grad()
@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("order", ["half, quantize", "quantize, half"])
@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-5])
def test_small_rows_of_float16_keep_their_digits(size, order):
    layer = StructuredLinear(64, 96, Dense(), bias=False)
    layer.cores[0].normal_(std=size)
    weight, x = layer.to_dense().double(), 100 * torch.randn(64, 64).half()
    layer = quantize(layer.half()) if order == "half, quantize" else quantize(layer).half()
    assert layer.compute_dtype == layer.weight.dtype == torch.float16
    for n in (1, 64):
        wanted = x[:n].double() @ weight.T
        assert (layer(x[:n]).double() - wanted).norm() <= 0.01 * wanted.norm()


def test_the_scales_are_in_float32_at_least_and_the_layer_in_what_it_was_moved_to():
    layer = quantize(StructuredLinear(64, 32, LowRank(rank=5), bias=False))
    before = [scale.clone() for scale in layer.scales]
    wide = {torch.float64: torch.float64}
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float16, torch.float32):
        layer.to(dtype)
        assert layer(torch.randn(3, 64, dtype=dtype)).dtype == dtype
        assert {scale.dtype for scale in layer.scales} == {wide.get(dtype, torch.float32)}
        assert copy.deepcopy(layer).compute_dtype == dtype
    assert all(map(torch.equal, layer.scales, before))


@OWN_WARNINGS
def test_a_dense_layer_as_one_core_is_rounded_as_torchao_rounds_it():
    torchao = pytest.importorskip("torchao.quantization", exc_type=ImportError)
    linear = nn.Linear(48, 32)
    ours = quantize(convert(copy.deepcopy(linear), Dense(), init="project"))
    model = nn.Sequential(linear)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    theirs = model[0].weight
    assert (ours.cores[0][0] == theirs.qdata).float().mean() > 0.99  # they divide in another way
    torch.testing.assert_close(ours.scales[0].flatten(), theirs.scale.flatten())


# ---- a rounded layer -----------------------------------------------------------------------------


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 16, 40])
def test_every_way_multiplies_by_core_times_scale(family, dtype, n):
    layer = quantize(StructuredLinear(64, 96 if family != Monarch(blocks=4) else 64, family))
    layer.to(dtype)
    nn.init.normal_(layer.bias)
    assert {core.dtype for core in layer.cores} == {torch.int8}
    assert layer.weight.dtype == dtype
    x = torch.randn(2, n, 64).to(dtype)
    wanted = x.double() @ layer.to_dense().double().T + layer.bias.double()
    found = {"call": layer(x), "weight": nn.functional.linear(x, layer.weight, layer.bias)}
    with torch.no_grad():
        found["no_grad"] = layer(x)
    for y in found.values():
        assert y.dtype == dtype
        assert (y.double() - wanted).norm() <= 20 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("count", [5, 40])  # core by core; by W
def test_gradients_for_what_lies_before_and_for_the_bias_are_those_of_the_matrix(count):
    layer = quantize(StructuredLinear(12, 30, BTT(rank=2), dtype=torch.float64))
    assert product.forms_matrix(layer.structure, count) == (count == 40)
    x = torch.randn(count, 12, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(count, 30, dtype=torch.float64)
    dx, dbias = torch.autograd.grad(layer(x), [x, layer.bias], dy)
    torch.testing.assert_close(dx, dy @ layer.to_dense())
    torch.testing.assert_close(dbias, dy.sum(0))


@pytest.mark.usefixtures("_way")
def test_under_autocast_the_output_has_its_dtype():
    layer, x = quantize(StructuredLinear(64, 64, BTT())), torch.randn(3, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), atol=0.05, rtol=0.05)


def test_only_what_is_meant_is_rounded_and_all_else_of_a_layer_stays():
    layer = StructuredLinear(64, 64, BTT())
    layer.name = "theirs"
    model = nn.ModuleDict({"a": layer, "b": layer, "c": StructuredLinear(64, 64, BTT())})
    model["d"] = nn.Linear(64, 64)
    rest = model["c"], model["d"]
    assert quantize(model.eval(), exclude="c") is model
    assert (model["c"], model["d"]) == rest
    assert type(model["a"]) is QuantizedLinear
    assert model["a"] is model["b"]
    assert model["a"].bias is layer.bias
    assert (model["a"].name, model["a"].training) == ("theirs", False)
    quantize(model, include=["c"])
    assert type(model["c"]) is QuantizedLinear
    assert type(model["d"]) is nn.Linear


def test_param_groups_pass_over_int8_cores():
    model = quantize(convert(mlp(), BTT()), include="0")
    with pytest.warns(UserWarning, match="int8 layers do not train"):
        groups = param_groups(model, lr=1.0)
    found = {name for group in groups for name in group["param_names"]}
    assert found == {"0.bias", "2.cores.0", "2.cores.1", "2.bias"}


def test_new_cores_are_rounded_into_the_layer():
    layer = quantize(StructuredLinear(64, 32, LowRank(rank=5)))
    dense = torch.randn(32, 5) @ torch.randn(5, 64)
    layer.from_dense_(dense)
    assert {core.dtype for core in layer.cores} == {torch.int8}
    assert 0 < (layer.to_dense() - dense).norm() / dense.norm() < 0.02


def test_summary_counts_the_bytes_as_they_are_stored():
    model = convert(mlp(), LowRank(rank=8), include="0")
    params = 8 * (64 + 96)
    assert [row.bytes for row in summary(model).rows] == [4 * params, 4 * 64 * 96]
    assert "bytes" not in str(summary(model))
    found = summary(quantize(model))
    stored = sum(t.nbytes for name, t in model[0].state_dict().items() if name != "bias")
    assert [row.bytes for row in found.rows] == [stored, 4 * 64 * 96]
    assert stored == params + 4 * (8 + 96)
    assert found.bytes == stored + 4 * 64 * 96
    assert found.rows[0].structure == "LowRank(rank=8), int8"
    assert f"{stored:,}" in str(found)
    assert [row.bytes for row in summary(model.bfloat16()).rows][1] == 2 * 64 * 96


def test_summary_times_it_and_densify_leads_back():
    model = quantize(convert(mlp(), BTT()))
    assert summary(model, tokens=3).rows[0].seconds > 0
    x = torch.randn(5, 64)
    before = model(x)
    densify(model)
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-4)
    assert [type(module) for module in model] == [nn.Linear, nn.GELU, nn.Linear]


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("meta", [False, True])
def test_a_saved_model_comes_back_bit_equal(dtype, meta, tmp_path):
    pytest.importorskip("safetensors")
    model = quantize(convert(mlp(dtype=dtype), LowRank(rank=8), weight_norm=True))
    x = torch.randn(5, 64, dtype=dtype)
    save(model, tmp_path)
    with torch.device("meta" if meta else "cpu"):
        fresh = mlp()
    fresh = load(fresh, tmp_path)
    assert type(fresh[0]) is QuantizedLinear
    assert fresh[0].label == "LowRank(rank=8)"
    assert torch.equal(fresh(x), model(x))
    again = load(quantize(convert(mlp(), LowRank(rank=8))), tmp_path)
    assert torch.equal(again(x), model(x))


def test_a_file_or_a_state_of_int8_is_not_that_of_floats(tmp_path):
    pytest.importorskip("safetensors")
    model = convert(mlp(), LowRank(rank=8))
    rounded = quantize(copy.deepcopy(model))
    save(rounded, tmp_path)
    with pytest.raises(ValueError, match="quantized=None in the model, int8 in the file"):
        load(model, tmp_path)
    with pytest.raises(RuntimeError, match="quantized=int8 in the model, None in the state"):
        rounded.load_state_dict(model.state_dict())
    for one, other in ((rounded, model), (model, rounded)):
        with pytest.raises(RuntimeError, match=r"key\(s\) in state_dict: \"0\.scales\.0\""):
            one.load_state_dict(dict(other.state_dict()))  # without what the layers compute with


@pytest.mark.parametrize(
    "optimize", [optim.AdamW, optim.SOAP, optim.Muon, lambda model: param_groups(model, lr=0.1)]
)
def test_an_optimizer_of_int8_layers_warns_that_they_do_not_train(optimize):
    model = quantize(convert(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))))
    with pytest.warns(UserWarning, match="int8 layers do not train, .*: 0; quantize at the end"):
        optimize(model)


def test_a_kind_of_rounding_that_this_version_does_not_know_is_refused(tmp_path):
    pytest.importorskip("safetensors")
    from structlin._model.files import FILE

    save(quantize(convert(mlp(), LowRank(rank=8))), tmp_path)
    file, name = tmp_path / FILE, rb"quantized\":\"int"
    data = file.read_bytes()
    assert data.count(name + b"8") == 2
    file.write_bytes(data.replace(name + b"8", name + b"4"))
    with pytest.raises(ValueError, match="quantized='int4' is unknown; there are int8"):
        load(mlp(), tmp_path)


# ---- what is refused -----------------------------------------------------------------------------


class Own(StructuredLinear):
    """A layer of a class of its own."""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m[0].register_forward_hook(print), "layer '0' has hooks, which would be lost"),
        (lambda m: m[2].to("meta"), r"layer '2' has no values \(meta\)"),
        (lambda m: m[2].cores[1].data.fill_(torch.inf), "layer '2' has cores that are not finite"),
        (lambda m: m.append(Own(64, 64)), "layer '3' is a Own"),
    ],
)
def test_a_layer_that_cannot_be_rounded_is_named_and_nothing_changes(change, says):
    model = convert(mlp(), BTT())
    change(model)
    before = list(model)
    with pytest.raises(ValueError, match=says):
        quantize(model)
    assert all(one is other for one, other in zip(model, before, strict=True))
    quantize(model, exclude=says.partition("layer '")[2][0])


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        (nn.Linear(3, 3), {}, "model=Linear has no structured layer with floating-point cores"),
        (StructuredLinear(8, 8), {"exclude": "*"}, "leave no layer to quantize"),
        (StructuredLinear(8, 8), {"include": "mlp.*"}, "include: 'mlp.*' matches no linear layer"),
    ],
)
def test_a_call_that_rounds_nothing_is_refused(model, options, says):
    with pytest.raises(ValueError, match=says):
        quantize(model, **options)


def test_int8_cores_cannot_be_trained_or_started_afresh():
    layer = quantize(StructuredLinear(8, 8))
    with pytest.raises(RuntimeError, match="floating point dtype can require gradients"):
        layer.requires_grad_()
    with pytest.raises(ValueError, match="int8 cores do not start afresh"):
        layer.reset_parameters()
    with pytest.raises(ValueError, match="no structured layer with floating-point cores"):
        quantize(layer)
    with pytest.raises(TypeError, match=r"x has dtype torch\.float64, the cores have"):
        layer(torch.randn(2, 8, dtype=torch.float64))
