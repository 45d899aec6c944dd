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
    StructuredLinear,
    convert,
    param_groups,
)
from structlin.optim import Muon
from tests.models import GPT


def flat(groups, key="lr"):
    """Parameter name -> a value of its group."""
    return {name: group[key] for group in groups for name in group["param_names"]}


def test_each_trainable_parameter_is_in_exactly_one_group():
    model = convert(GPT(tied=True), BTT(rank=2), include="ffn", weight_norm=True)
    model.h[0].attn.c_attn.weight.requires_grad_(False)
    model.h[1].mlp.c_fc.cores[0].requires_grad_(False)
    groups = param_groups(model, 1e-3, weight_decay=0.1)
    grouped = [id(p) for group in groups for p in group["params"]]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == trainable
    names = dict(model.named_parameters(remove_duplicate=False))
    for group in groups:
        assert [id(names[name]) for name in group["param_names"]] == [
            id(p) for p in group["params"]
        ]


def test_cores_get_their_multiplier_and_everything_else_the_rate_itself():
    model = convert(GPT(width=64), Kronecker(), include="ffn")
    rates = flat(param_groups(model, 0.01))
    assert rates["h.0.mlp.c_fc.cores.0"] == pytest.approx(0.01 * 64 / 8 / 2)
    assert rates["h.0.mlp.c_proj.cores.1"] == pytest.approx(0.01 * 256 / 16 / 2)
    assert {
        rates[name]
        for name in ("wte.weight", "h.0.ln_1.weight", "h.0.mlp.c_fc.bias", "lm_head.weight")
    } == {0.01}


def test_the_rate_of_a_core_is_by_structure_and_by_width():
    small, model = GPT(width=64), convert(GPT(width=256), BTT(rank=2), include="ffn")
    name = "h.0.mlp.c_fc"
    dense = flat(param_groups(GPT(width=256), 0.01, base=small))[f"{name}.weight"]
    wide = flat(param_groups(model, 0.01, base=small))
    plain = flat(param_groups(model, 0.01), "lr_mult")
    assert wide[f"{name}.cores.0"] == pytest.approx(dense * plain[f"{name}.cores.0"])
    assert wide == flat(param_groups(model, 0.01, base=convert(small, Kronecker(), include="ffn")))
    assert set(flat(param_groups(model, 0.01, structure_aware=False)).values()) == {0.01}
    base = dict.fromkeys((256, 768, 1024), 64)  # CBS 3.3: one d0
    mult = flat(param_groups(model, 1.0, base=base), "lr_mult")
    for n, core in enumerate(model.h[0].mlp.c_fc.structure.cores):
        assert mult[f"{name}.cores.{n}"] == pytest.approx(64 / (2 * core.fan_in))


def test_masses_multiply_the_rate_of_a_layers_matrix_and_share_it_over_cores():
    model = convert(GPT(width=64), Kronecker(), include="ffn")
    before = flat(param_groups(model, 0.01, base={64: 16}))
    masses = {"lm_head": 4, "*c_fc": (0.25, 0.75), "*c_proj": 2.0}
    after = flat(param_groups(model, 0.01, base={64: 16}, masses=masses))
    factors = {name: after[name] / before[name] for name in after}
    changed = {name: factor for name, factor in factors.items() if factor != 1}
    assert changed.pop("lm_head.weight") == 4
    assert changed.pop("h.0.mlp.c_fc.cores.0") == pytest.approx(0.5)
    assert changed.pop("h.0.mlp.c_fc.cores.1") == pytest.approx(1.5)
    assert changed.pop("h.0.attn.c_proj.weight") == 2
    assert changed.pop("h.0.mlp.c_proj.cores.0") == 2
    assert changed.pop("h.0.mlp.c_proj.cores.1") == 2
    assert all(name.startswith("h.1.") for name in changed)


def test_biases_norms_gains_and_vectors_are_not_decayed():
    model = convert(GPT(), BTT(), include="ffn", weight_norm=True)
    model.norm = nn.LayerNorm((4, 4))  # a norm's gain may be a matrix
    decay = flat(param_groups(model, 1e-3, weight_decay=0.1), "weight_decay")
    for name, value in decay.items():
        is_matrix = "cores" in name or (
            name.endswith("weight") and "ln" not in name and "norm" not in name
        )
        assert value == (0.1 if is_matrix else 0.0), name


def test_without_a_number_the_optimizers_own_decay_holds_for_matrices_and_for_nothing_else():
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), BTT())
    groups = torch.optim.AdamW(param_groups(model, 1e-3), weight_decay=0.3).param_groups
    for name, decay in flat(groups, "weight_decay").items():
        assert decay == (0.3 if "cores" in name else 0.0), name
    with pytest.raises(ValueError, match=r"weight_decay=None: 0\.cores\.0 decays by 0\.25 times"):
        param_groups(model, 1e-3, weight_decay_scaling="constant")


def test_what_a_subclass_adds_to_a_structured_layer_trains_too():
    class Scaled(StructuredLinear):
        def __init__(self, *widths):
            super().__init__(*widths)
            self.scale, self.mix = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8, 8))

    decay = flat(param_groups(nn.Sequential(Scaled(8, 8)), 1e-3, weight_decay=0.1), "weight_decay")
    assert (decay["0.scale"], decay["0.mix"]) == (0, 0.1)


def test_the_base_of_sgd_must_have_every_vector_and_gains_need_none():
    small = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16, bias=False))
    large = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    with pytest.raises(ValueError, match=r"base has no parameter '1\.bias'"):
        param_groups(large, 0.1, optimizer="sgd", base=small)
    convert(large, BTT(), weight_norm=True)
    large[1] = nn.LayerNorm(64, bias=False)
    mult = flat(param_groups(large, 0.1, optimizer="sgd", base=small), "lr_mult")
    assert (mult["0.gains"], mult["1.weight"], mult["0.bias"]) == (1, 4, 4)


def test_equal_groups_are_merged_and_named():
    model = convert(GPT(width=64, depth=8), Kronecker(), include="ffn")
    groups = param_groups(model, 1e-3, weight_decay=0.1)
    assert all("eps" not in group for group in groups)
    assert sorted(group["name"] for group in groups) == [
        "lr x1",
        "lr x1, no decay",
        "lr x4",
        "lr x8",
    ]


def test_a_rate_tuned_at_a_base_width_transfers_by_mup():
    small, large = GPT(width=64), GPT(width=256)
    by_model = flat(param_groups(large, 0.01, base=small), "lr_mult")
    by_widths = flat(param_groups(large, 0.01, base={256: 64, 768: 192, 1024: 256}), "lr_mult")
    assert by_model == by_widths
    assert by_model["h.0.mlp.c_fc.weight"] == by_model["lm_head.weight"] == 0.25
    assert {by_model[name] for name in ("wte.weight", "h.0.ln_1.bias", "h.0.mlp.c_fc.bias")} == {1}


def test_a_base_may_be_converted_too():
    small, large = GPT(width=64), GPT(width=256)
    convert(large, BTT(rank=2), include="ffn")
    converted = convert(GPT(width=64), LowRank(rank=2), include="ffn")
    for key in ("lr_mult", "eps"):
        by_dense = flat(param_groups(large, 0.01, eps=1e-8, base=small), key)
        assert by_dense == flat(param_groups(large, 0.01, eps=1e-8, base=converted), key)


TWINS = {  # a model, one a quarter as wide, and the parameters whose fan-in is four times as large
    "convolution": (nn.Conv2d(32, 8, 3), nn.Conv2d(8, 8, 3), ["weight"]),
    "convolution, by widths": (nn.Conv2d(32, 8, 3), {9 * 32: 9 * 8}, ["weight"]),
    "transposed": (nn.ConvTranspose2d(32, 4, 3), nn.ConvTranspose2d(8, 4, 3), ["weight"]),
    "untied head": (GPT(width=256), GPT(width=64, tied=True), ["lm_head.weight"]),
    "attention": (
        nn.MultiheadAttention(32, 2), nn.MultiheadAttention(8, 2),
        ["in_proj_weight", "out_proj.weight"],
    ),
    "attention of other keys": (
        nn.MultiheadAttention(32, 2, kdim=16, vdim=16), nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
        ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_the_rate_of_a_weight_falls_as_its_fan_in_rises(name):
    large, base, weights = TWINS[name]
    mult = flat(param_groups(large, 1.0, base=base), "lr_mult")
    assert {mult[weight] for weight in weights} == {0.25}


def test_sgd_rates_follow_fan_out_over_fan_in():
    small, large = GPT(width=64), convert(GPT(width=256), Monarch(), include="ffn")
    mult = flat(param_groups(large, 0.1, optimizer="sgd", base=small), "lr_mult")
    assert mult["h.0.attn.c_attn.weight"] == 1  # both widths grow alike
    assert mult["lm_head.weight"] == 0.25  # an output layer
    assert mult["wte.weight"] == mult["h.0.ln_1.weight"] == mult["h.0.attn.c_attn.bias"] == 4
    first = large.h[0].mlp.c_fc.structure.cores[0]
    assert mult["h.0.mlp.c_fc.cores.0"] == pytest.approx(
        (first.fan_out / first.fan_in) / (1024 / 256)
    )


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("widths", [(0, 8), (8, 0)])
def test_a_width_of_zero_gives_no_rate(widths):
    here, there = (nn.Linear(width, 8) for width in widths)
    with pytest.raises(ValueError, match=r"base: a layer has the widths .* at least 1"):
        param_groups(here, 0.1, base=there)


WIDTHS = (64, 256, 1024)
STRUCTURED = [Kronecker(), LowRank(rank=4), Monarch(), BTT(), BTT(rank=2), TT(rank=2), Dense()]


@pytest.mark.parametrize("structure", STRUCTURED, ids=str)
def test_eps_keeps_its_ratio_to_the_gradients_of_cores_that_pass_on_their_signal(structure):
    """With entries 1 / fan_in every core maps ones to ones, at norm 1; of the mean of the outputs
    all entries of a gradient are then equal, and eps is the same part of them at every width."""
    ratios = []
    for width in WIDTHS:
        layer = StructuredLinear(width, width, structure, bias=False, dtype=torch.float64)
        with torch.no_grad():
            for core in layer.cores:
                core.fill_(1 / core.shape[-1])
        layer(torch.ones(3, width, dtype=torch.float64)).mean().backward()
        groups = param_groups(layer, 1.0, eps=1.0, base={width: 64})
        for name, core in layer.named_parameters():
            assert core.grad.max() == pytest.approx(core.grad.min().item())
            ratios.append(flat(groups, "eps")[name] / core.grad.max().item())
    assert ratios == pytest.approx([64.0] * len(ratios))


def test_eps_of_vectors_falls_as_their_width_and_that_of_an_output_layer_stays():
    large = convert(GPT(width=256), BTT(), include="ffn", weight_norm=True)
    eps = flat(param_groups(large, 1.0, eps=1e-8, base={256: 64, 768: 192, 1024: 256}), "eps")
    for name in ("wte.weight", "h.0.ln_1.bias", "h.0.mlp.c_fc.bias", "h.1.attn.c_attn.weight"):
        assert eps[name] == pytest.approx(1e-8 / 4)
    assert eps["lm_head.weight"] == eps["h.0.mlp.c_fc.gains"] == 1e-8


@pytest.mark.parametrize(("scaling", "power"), [("1/width", 1), ("constant", 0)])
def test_rate_times_decay_goes_as_the_named_power_of_the_rate_and_muons_is_constant(scaling, power):
    model = convert(GPT(width=256), BTT(rank=2), include="ffn")
    base = {256: 64, 768: 192, 1024: 256}
    groups = param_groups(model, 0.01, weight_decay=0.1, base=base, weight_decay_scaling=scaling)
    rates, decays = flat(groups, "lr_mult"), flat(groups, "weight_decay")
    muon = Muon(model, 0.01, weight_decay=0.1, base=base, matrices="all").param_groups
    for name, value in flat(muon, "weight_decay").items():
        if value:
            assert 0.01 * rates[name] * decays[name] == pytest.approx(0.001 * rates[name] ** power)
            assert value == pytest.approx(0.1)
    core = model.h[0].mlp.c_fc.structure.cores[0]
    f = 64 / (2 * core.fan_in)  # as a dense layer of width 2 fan_in
    assert rates["h.0.mlp.c_fc.cores.0"] == pytest.approx(f)
    assert decays["h.0.mlp.c_fc.cores.0"] == pytest.approx(0.1 * f ** (power - 1))
    assert decays["h.0.attn.c_attn.weight"] == pytest.approx(0.1 * 0.25 ** (power - 1))
    assert decays["wte.weight"] == pytest.approx(0.1)
    eps = flat(muon, "eps")
    assert eps["h.0.ln_1.weight"] == eps["h.0.mlp.c_fc.bias"] == pytest.approx(1e-8 / 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0}, "lr=0 must be positive"),
        ({"lr": "1e-3"}, "lr='1e-3' is text, as YAML reads 1e-3"),
        ({"weight_decay_scaling": "sqrt"}, "='sqrt' is unknown; there are 1/width, constant"),
        ({"optimizer": "lion"}, "optimizer='lion' is unknown"),
        ({"eps": 1e-8, "optimizer": "sgd"}, "eps=1e-08: optimizer='sgd' has none"),
        ({"masses": {"head": 4}}, "masses: 'head' matches no layer"),
        ({"masses": {"lm_head": 0}}, "masses are positive"),
        ({"base": nn.Linear(3, 3)}, "base has no linear layer 'h.0.attn.c_attn'"),
        ({"base": {65: 16}}, "no parameter of the model has the width 65"),
        ({"base": {"64": 16}}, "base="),
        ({"model": StructuredLinear(4, 4).requires_grad_(False)}, "has no trainable parameter"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        param_groups(**{"model": GPT(), "lr": 1e-3, **arguments})
