import inspect
import re
import weakref

import pytest
import torch
from torch import nn

from structlin import (
    BTT,
    TT,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    Split,
    Structure,
    StructuredLinear,
    compress,
    convert,
    plan,
    plan_compression,
)
from structlin._convert.plan import Plan
from structlin._model.kinds import role_of
from tests.models import GPT, linear_names, snapshot

MLP_LAYERS = {"h.0.mlp.c_fc", "h.0.mlp.c_proj", "h.1.mlp.c_fc", "h.1.mlp.c_proj"}
ATTENTION_LAYERS = {"h.0.attn.c_attn", "h.0.attn.c_proj", "h.1.attn.c_attn", "h.1.attn.c_proj"}


def structured(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, StructuredLinear)}


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({}, MLP_LAYERS | ATTENTION_LAYERS),
        ({"include": "*mlp*"}, MLP_LAYERS),
        ({"include": "ffn"}, MLP_LAYERS),
        ({"include": "attention"}, ATTENTION_LAYERS),
        ({"include": ["h.0.mlp.*", "h.1.*c_fc"]}, MLP_LAYERS - {"h.1.mlp.c_proj"}),
        ({"include": r"re:h\.\d\.mlp\.c_fc"}, {"h.0.mlp.c_fc", "h.1.mlp.c_fc"}),
        ({"include": "*"}, MLP_LAYERS | ATTENTION_LAYERS),
        ({"include": "head"}, {"lm_head"}),
        ({"include": "lm_head"}, {"lm_head"}),
        ({"include": ["*mlp*", "*head*"]}, MLP_LAYERS | {"lm_head"}),
        ({"exclude": ["*c_proj", "attention"]}, {"h.0.mlp.c_fc", "h.1.mlp.c_fc"}),
        ({"include": lambda m, _: m.in_features > 64}, {"h.0.mlp.c_proj", "h.1.mlp.c_proj"}),
        ({"include": lambda m, _: m.out_features in (50, 256)}, {"h.0.mlp.c_fc", "h.1.mlp.c_fc"}),
        ({"include": ["*0.mlp.c_fc", lambda _, name: "head" in name]}, {"h.0.mlp.c_fc", "lm_head"}),
        ({"exclude": lambda module, name: "attn" in name}, MLP_LAYERS),
        (
            {"include": "ffn", "overrides": {lambda _, name: "h.0." in name: None}},
            {"h.1.mlp.c_fc", "h.1.mlp.c_proj"},
        ),
        ({"include": "ffn", "overrides": {"h.0.*": None}}, {"h.1.mlp.c_fc", "h.1.mlp.c_proj"}),
        (
            {"include": "ffn", "overrides": {"h.1.attn.c_attn": LowRank(rank=4)}},
            MLP_LAYERS | {"h.1.attn.c_attn"},
        ),
    ],
)  # fmt: skip
def test_rules_choose_the_layers(selection, expected):
    model = GPT()
    assert convert(model, BTT(), **selection) is model
    assert structured(model) == expected


def test_the_first_override_that_matches_holds():
    model = convert(GPT(), BTT(), overrides={"h.0.*": LowRank(rank=4), "*c_fc": Kronecker()})
    labels = {
        name: model.get_submodule(name).label
        for name in ("h.0.mlp.c_fc", "h.1.mlp.c_fc", "h.1.mlp.c_proj")
    }
    assert list(labels.values()) == ["LowRank(rank=4)", "Kronecker()", "BTT(rank=1)"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"include": "*nlp*"},
            ValueError,
            r"include: '\*nlp\*' matches no linear layer; the model has, for example",
        ),
        ({"include": "fnn"}, ValueError, "matches no linear layer; did you mean 'ffn'"),
        ({"include": "mlp"}, ValueError, r"must match the whole name; did you mean '\*mlp\*'"),
        ({"zero_init": "branch_end"}, ValueError, "did you mean 'branch-end'"),
        ({"include": ["*mlp*", "transformer.*"]}, ValueError, "include: 'transformer"),
        ({"include": "h.0.mlp"}, ValueError, r"it is a container; its layers are 'h\.0\.mlp\.\*'"),
        ({"include": "router"}, ValueError, "roles in this model are attention, ffn, head"),
        ({"include": []}, ValueError, "include=.* has no pattern"),
        ({"include": "re:h.(mlp"}, ValueError, "not a regular expression"),
        ({"exclude": "decoder.*"}, ValueError, r"exclude: 'decoder\.\*'"),
        ({"overrides": {"h.7.*": None}}, ValueError, r"overrides: 'h\.7\.\*'"),
        ({"zero_init": "*out_proj"}, ValueError, "zero_init: "),
        (
            {"include": "ffn", "zero_init": "*attn.c_proj"},
            ValueError,
            "zero_init: .* converts nothing",
        ),
        (
            {"include": "ffn", "exclude": "ffn"},
            ValueError,
            "include: 'ffn' converts nothing: .* excluded",
        ),
        ({"exclude": ["ffn", "attention"]}, ValueError, "nothing to convert in GPT"),
        (
            {"include": lambda module, name: False},
            ValueError,
            "include: the function <lambda> matches no linear layer",
        ),
        ({"exclude": nn.Linear}, TypeError, "exclude: <class .*Linear'> is no pattern"),
        ({"filter_fn": lambda module, name: False}, TypeError, "filter_fn"),
        ({"mode": "dense"}, TypeError, "mode"),
        (
            {"structure": BTT(rank=9)},
            ValueError,
            r"layer 'h\.0\.attn\.c_attn' \(64 -> 192\), .*rank=9 is over .* 8",
        ),
        ({"structure": Monarch(blocks=5)}, ValueError, "blocks=5 does not divide in_features=64"),
        ({"structure": "btt"}, TypeError, "structure='btt' must be a family"),
        ({"structure": None}, TypeError, "structure=None must be a family"),
        ({"overrides": ["*c_fc"]}, TypeError, "overrides=.* must be a mapping"),
        (
            {"overrides": {"*mlp*": LowRank(rank=4), "h.1.mlp.c_fc": None}},
            ValueError,
            r"'h\.1\.mlp\.c_fc' is for no layer: .* is for overrides: '\*mlp\*', which stands bef",
        ),
        ({"include": 3}, TypeError, "3 is no pattern"),
        ({"include": ["*mlp*", ""]}, TypeError, "'' is no pattern"),
        ({"overrides": {"*c_fc": LowRank}}, TypeError, "must be a family"),
        (
            {"structure": Dense().structure(64, 64)},
            ValueError,
            "out_features=192 is larger than the structure's 64",
        ),
        ({"init": "kaiming"}, ValueError, "init='kaiming' is unknown"),
        ({"inlcude": "*mlp*"}, TypeError, "inlcude"),
    ],
)
def test_bad_arguments_are_refused_and_the_model_stays_as_it_was(arguments, error, message):
    model = GPT()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        convert(model, **arguments)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("model", "error"), [(nn.Sequential(nn.ReLU()), ValueError), (torch.zeros(3), TypeError)]
)
def test_a_model_without_linear_layers_is_refused(model, error):
    with pytest.raises(error, match="model="):
        convert(model)


def test_a_plan_shows_every_layer_and_changes_nothing_until_applied():
    model = GPT()
    before = snapshot(model)
    planned = plan(model, BTT(), include="ffn")
    text = str(planned)
    assert snapshot(model) == before
    assert all(re.sub(r"\.\d+\.", ".*.", name) in text for name in linear_names(model))
    assert "head: only converted when named" not in text
    assert "not included" in text
    assert "overrides: 'h.1.*' is None" in str(plan(model, BTT(), overrides={"h.1.*": None}))
    planned.apply()
    assert structured(model) == MLP_LAYERS
    with pytest.raises(ValueError, match="a plan is applied once"):
        planned.apply()


@pytest.mark.parametrize(("do", "show"), [(convert, plan), (compress, plan_compression)])
def test_what_is_done_and_its_plan_take_the_same_arguments(do, show):
    own, other = inspect.signature(do), inspect.signature(show)
    assert own.parameters == other.parameters
    assert list(own.parameters)[:2] == ["model", "structure"]
    assert (own.return_annotation, other.return_annotation) == (nn.Module, Plan)


@pytest.mark.parametrize("options", [{}, {"init": "project"}], ids=str)
def test_a_structure_is_made_once_for_each_layer(options, monkeypatch):
    made, real = [], BTT.structure

    def count(self, in_features, out_features):
        made.append((in_features, out_features))
        return real(self, in_features, out_features)

    monkeypatch.setattr(BTT, "structure", count)
    model = convert(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), BTT(), **options)
    assert len(made) == 2
    assert [layer.label for layer in model] == ["BTT(rank=1)", "BTT(rank=1)"]


def test_patterns_may_come_from_a_generator():
    model = convert(GPT(), BTT(), include=(f"h.{n}.mlp.c_fc" for n in range(2)))
    assert structured(model) == {"h.0.mlp.c_fc", "h.1.mlp.c_fc"}
    with pytest.raises(ValueError, match=r"zero_init=.* with init='project'"):
        convert(GPT(), BTT(), init="project", zero_init=(name for name in ["*c_proj"]))


def test_a_function_is_asked_about_every_name_of_a_shared_layer():
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    asked = []
    convert(
        model, BTT(), include=lambda module, name: asked.append((module, name)) or name == "b.0"
    )
    assert asked == [(shared, "a"), (shared, "b.0")]
    assert isinstance(model["a"], StructuredLinear)


def test_a_plan_that_another_one_has_overtaken_is_refused_and_changes_nothing():
    model = GPT()
    late, first = plan(model, LowRank(rank=4)), plan(model, BTT(), include="ffn")
    first.apply()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"layer 'h\.0\.mlp\.c_fc' was replaced after this plan"):
        late.apply()
    assert snapshot(model) == before


def test_a_layer_keeps_device_dtype_grad_mode_training_flag_and_bias():
    model = GPT().to(torch.bfloat16)
    model.h[0].mlp.c_fc.weight.requires_grad_(False)
    model.h[0].mlp.c_fc.bias.requires_grad_(False)
    model.h[1].mlp.c_fc.eval()
    biases = {name: model.get_submodule(name).bias for name in MLP_LAYERS}
    convert(model, BTT(rank=2), include="ffn", weight_norm=True)
    frozen, evaluating = model.h[0].mlp.c_fc, model.h[1].mlp.c_fc
    assert not any(p.requires_grad for p in frozen.parameters())
    assert all(p.requires_grad for p in evaluating.parameters())
    assert not evaluating.training
    assert frozen.training
    for name, bias in biases.items():
        assert model.get_submodule(name).bias is bias
        assert all(core.dtype == torch.bfloat16 for core in model.get_submodule(name).cores)


def test_lazy_layers_whose_widths_nobody_knows_yet_stay_beside_those_that_are_converted():
    model = nn.Sequential(nn.LazyConv1d(4, 1), nn.Flatten(), nn.LazyLinear(16), nn.Linear(16, 64))
    planned = plan(model, LowRank(rank=2))
    assert "is a LazyLinear" in str(planned)
    convert(model, LowRank(rank=2))
    assert type(model[3]) is StructuredLinear
    assert model(torch.ones(2, 3, 5)).shape == (2, 64)


def test_a_model_on_meta_stays_there_until_it_is_initialised():
    with torch.device("meta"):
        model = GPT()
    with pytest.warns(UserWarning, match=r"have no values \(meta\): h\.0\.mlp\.c_fc.* init='mup'"):
        convert(model, BTT(), include="ffn")
    assert all(p.is_meta for p in model.parameters())
    layer = model.to_empty(device="cpu").h[0].mlp.c_fc
    layer.reset_parameters()
    assert layer.cores[0].std().item() == pytest.approx(8**-0.5, rel=0.1)


@torch.no_grad()
def test_a_converted_model_starts_at_the_scale_of_the_models_own_initialisation():
    torch.manual_seed(0)
    model = GPT()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            layer.weight.normal_(0, 0.01 if name.endswith("c_proj") else 0.02)
    model.h[1].mlp.c_proj.weight.zero_()
    norms = {name: model.get_submodule(name).weight.norm().item() for name in linear_names(model)}
    convert(model, BTT(rank=1))
    assert structured(model)
    for name in structured(model):
        layer = model.get_submodule(name)
        assert layer.to_dense().norm().item() == pytest.approx(norms[name], rel=0.25)
    first, last = model.h[1].mlp.c_proj.cores
    assert first.count_nonzero() == first.numel()
    assert last.count_nonzero() == 0


@pytest.mark.parametrize("init", ["mup", "spectral", "orthogonal"])
def test_a_rule_by_name_does_not_ask_for_the_models_own_scale(init):
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    nn.init.zeros_(model[0].weight)
    convert(model, BTT(rank=1), init=init)
    assert model[0].to_dense().norm().item() > 1
    assert model[0].init_scale == 1


@pytest.mark.parametrize("family", [BTT().activate(), Split(split=3, of=BTT().activate())], ids=str)
def test_a_structure_with_an_activation_starts_at_the_scale_of_its_layer_and_is_not_projected(
    family,
):
    torch.manual_seed(0)
    dense, x = nn.Linear(256, 768, bias=False), torch.randn(1000, 256)
    wanted = dense(x).square().mean().sqrt().item()
    model = nn.Sequential(dense)
    with pytest.raises(ValueError, match=r"^layer '0': init='project' needs a matrix"):
        convert(model, family, init="project")
    assert model[0] is dense
    assert "silu" in str(plan(model, family))
    convert(model, family)
    assert model[0].structure.between == "silu"
    assert model(x).square().mean().sqrt().item() == pytest.approx(wanted, rel=0.1)


def test_weights_that_are_not_finite_have_no_scale_to_start_at():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    nn.init.constant_(model[1].weight, float("nan"))
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"layer '1' is not finite; take init='mup'"):
        convert(model, BTT(rank=1))
    assert snapshot(model) == before
    convert(model, BTT(rank=1), init="mup")


def test_a_model_that_is_one_linear_layer_is_replaced():
    old = nn.Linear(64, 32, bias=False)
    layer = convert(old, LowRank(rank=4))
    assert isinstance(layer, StructuredLinear)
    assert type(old) is nn.Linear
    assert layer.bias is None
    assert layer(torch.randn(2, 64)).shape == (2, 32)


def test_layers_that_grow_are_converted_with_one_warning_that_lists_them():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(64, 64))
    with pytest.warns(
        UserWarning, match=r"these layers grow, in parameters: 0 \(256 -> 288\), 1 \(256 -> 288\)"
    ) as caught:
        convert(model, LowRank(rank=9))
    assert len(caught) == 1
    assert structured(model) == {"0", "1", "2"}


def test_layers_of_few_parameters_and_more_flops_than_dense_are_named():
    with pytest.warns(UserWarning, match=r"grow, in FLOPs per token: 0 \(8,192 -> 16,384\)$"):
        model = convert(nn.Sequential(nn.Linear(64, 64)), TT(rank=8))
    assert model[0].structure.params < 64 * 64


def test_layers_that_are_padded_much_are_named_once_with_what_would_fit():
    structure = LowRank(rank=3).structure(32, 32)
    model = nn.Sequential(nn.Linear(10, 32), nn.Linear(32, 28), nn.Linear(13, 24))
    with pytest.warns(UserWarning, match="padded") as caught:
        convert(model, structure, overrides={"2": BTT()})
    first, last = (str(each.message) for each in caught)
    assert "layer '0'" in first
    assert "in_features=10 is padded to 32, by 220.0%" in first
    assert "a family such as BTT(rank=1)" in first
    assert "layer '2': BTT(rank=1): in_features=13 is padded to 15, by 15.4%; 12 and 14 fit" in last
    for layer in model:
        x = torch.randn(40, layer.in_features)
        torch.testing.assert_close(layer(x), x @ layer.to_dense().T + layer.bias)


def test_a_layer_with_hooks_stays_dense_with_a_warning():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].weight.register_hook(lambda gradient: gradient)
    model[1].register_forward_hook(lambda module, args, output: None)
    with pytest.warns(UserWarning, match="left dense, for they have hooks.*: 0, 1$") as caught:
        convert(model, BTT())
    assert len(caught) == 1
    assert structured(model) == {"2"}


@pytest.mark.parametrize(
    "hold",
    [
        lambda layer: [layer],
        lambda layer: {"gelu": (nn.GELU(), layer)},
        lambda layer: layer.forward,
    ],
)
def test_a_layer_that_a_plain_attribute_holds_too_stays_dense_with_a_warning(hold):
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model.body.order = hold(model.body[0])  # as a forward may call it
    message = "left dense: body.0 is held by the attribute 'body.order' too"
    with pytest.warns(UserWarning, match=message) as caught:
        convert(model, BTT())
    assert len(caught) == 1
    assert structured(model) == {"body.1"}


def test_a_model_that_was_loaded_from_a_checkpoint_warns_that_it_starts_afresh():
    model = GPT()
    model.config = type("Config", (), {"_name_or_path": "openai-community/gpt2"})()
    with pytest.warns(
        UserWarning,
        match="loaded from 'openai-community/gpt2': init='match' starts its .* afresh",
    ):
        convert(model)


def test_a_weak_proxy_of_a_module_does_not_hold_it():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    model[1].before = [weakref.proxy(model[0])]
    assert structured(convert(model, BTT())) == {"0"}


def test_a_model_without_residual_branches_has_no_ends_of_them():
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pytest.raises(ValueError, match=r"'branch-end' matches no linear layer: .* a glob"):
        convert(plain, BTT(), zero_init="branch-end")


def test_branch_ends_of_blocks_without_inner_modules_are_found_and_the_plan_shows_them():
    layers = {"c_attn": nn.Linear(8, 24), "c_proj": nn.Linear(8, 8), "fc": nn.Linear(8, 8)}
    planned = plan(nn.ModuleDict(layers), BTT(), init="mup", zero_init="branch-end")
    shown = [line for line in str(planned).splitlines() if "starts at zero" in line]
    assert [line.split()[0] for line in shown] == ["c_proj"]


@pytest.mark.parametrize("init", ["mup", "match"])
@pytest.mark.parametrize("ends", ["*c_proj", "branch-end"])
def test_zero_init_zeroes_the_last_core_of_the_layers_named_alone(ends, init):
    model = convert(GPT(), BTT(), init=init, zero_init=ends)
    for name in structured(model):
        first, last = model.get_submodule(name).cores
        assert model.get_submodule(name).zero_init == name.endswith("c_proj")
        assert first.abs().min() > 0 or first.std() > 0
        assert (last == 0).all() == name.endswith("c_proj")


def test_a_declared_structure_is_converted_to_like_a_family():
    model = convert(GPT(), Structure("i -> o", "r i", "o r", i=64, o=192, r=3), include="*c_attn")
    assert model.h[0].attn.c_attn.structure.params == 3 * (64 + 192)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("transformer.h.3.attn.c_proj", "attention"),
        ("transformer.h.3.mlp.c_proj", "ffn"),
        ("model.layers.0.self_attn.q_proj", "attention"),
        ("model.layers.0.mlp.gate_proj", "ffn"),
        ("model.layers.0.mlp.gate", "router"),
        ("vit.encoder.layer.0.attention.output.dense", "attention"),
        ("vit.encoder.layer.0.output.dense", "ffn"),
        ("vit.encoder.layer.0.intermediate.dense", "ffn"),
        ("blocks.0.attn.qkv", "attention"),
        ("blocks.0.mlp.fc1", "ffn"),
        ("patch_embed.proj", "embedding"),
        ("head.fc", "head"),
        ("cls.predictions.decoder", "head"),
        ("encoder.layers.0.linear1", "ffn"),
        ("decoder.block.0.layer.1.EncDecAttention.q", "attention"),
        ("decoder.block.0.layer.2.DenseReluDense.wi", "ffn"),
        ("decoder.block.0.layer.2.DenseReluDense.wo", "ffn"),
        ("blocks.0.mlp.out_proj", "ffn"),
        ("blocks.0.sa.heads.0.key", "attention"),
        ("model.head", "head"),
        ("fc", "head"),
        ("layers.0.fc1", "ffn"),
        ("0", "other"),
    ],
)
def test_a_name_tells_the_role(name, role):
    assert role_of(name) == role


def _plan_conversion(model):
    return plan(model, LowRank(rank=2), init="project")


def _plan_compression(model):
    return plan_compression(model, LowRank(rank=2), [torch.randn(20, 8)], keep=None)


@pytest.mark.parametrize("make_plan", [_plan_conversion, _plan_compression])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            nn.Module.double,
            "has dtype torch.float64, and had torch.float32 when this",
        ),
        (nn.Module.bfloat16, "has dtype torch.bfloat16, and had torch.float32"),
        (lambda model: model.to("meta"), "has device meta, and had cpu when this plan was made"),
    ],
    ids=["double", "bfloat16", "meta"],
)
def test_a_plan_is_not_applied_to_a_model_of_another_dtype_or_device(make_plan, change, says):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    planned = make_plan(model)
    change(model)
    with pytest.raises(ValueError, match=f"layer '0' {says}"):
        planned.apply()
    assert type(model[0]) is type(model[2]) is nn.Linear


def test_a_plan_without_values_follows_the_models_dtype():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    planned = plan(model, LowRank(rank=2))
    x = torch.randn(3, 8, dtype=torch.float64)
    assert planned.apply().double()(x).dtype == torch.float64
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    planned = plan(model, LowRank(rank=2))
    model.double()
    assert planned.apply()(x).dtype == torch.float64
