"""`structlin.modular` as ordinary modules: training, optimizers, conversion, compilation, copies,
bad input."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.papers.mn_transfer import paper_groups
from benchmarks.papers.networks import GPT, ResMLP, ResNet
from structlin import (
    BTT,
    Kronecker,
    StructuredLinear,
    convert,
    densify,
    load,
    param_groups,
    save,
)
from structlin import modular as md
from structlin.modular import Conv2D, Embed, Identity, Linear, ReLU, Structured, masses
from structlin.modular.module import Add, Scale
from structlin.optim import Muon, Normed
from tests.optim.test_muon import norms

NETS = {
    "ResMLP": (lambda: ResMLP(12, 5, width=8, blocks=3, block_depth=2), lambda: torch.randn(4, 12)),
    "ResNet": (
        lambda: ResNet(3, 5, width=4, blocks=2, blocks_mass=3),
        lambda: torch.randn(2, 3, 6, 6),
    ),
    "GPT": (
        lambda: GPT(11, context=6, width=8, heads=2, blocks=2),
        lambda: torch.randint(11, (2, 6)),
    ),
    "structured": (
        lambda: (
            Structured(16, 9, BTT(rank=2))
            @ (-3 * ReLU())
            @ Structured(4, 16, Kronecker(), mass=2, masses=(1, 3))
        ),
        lambda: torch.randn(4, 4),
    ),
    "converted": (
        lambda: convert(ResMLP(16, 5, width=16, blocks=2), BTT(), include="blocks.*"),
        lambda: torch.randn(4, 16),
    ),
    "padded": (lambda: Linear(11, 3) @ Structured(7, 11, Kronecker()), lambda: torch.randn(4, 7)),
}


@pytest.fixture(params=NETS)
def case(request):
    build, inputs = NETS[request.param]
    return build().double(), inputs()


def backward(net: nn.Module, x: torch.Tensor) -> None:
    y = net(x if x.dtype == torch.long else x.double())
    F.cross_entropy(y.flatten(0, -2), torch.arange(y[..., 0].numel()) % y.shape[-1]).backward()


def values(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_start_with_all_singular_values_of_norm_1(dtype):
    torch.set_default_dtype(dtype)
    try:
        linear, embed, conv, structured = (
            Linear(6, 9),
            Embed(7, 5),
            Conv2D(4, 6),
            Structured(16, 9, BTT(rank=2)),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    matrices = [
        linear.linear.weight,
        *structured.linear.cores,
        9 * conv.conv.weight.flatten(2).permute(2, 0, 1),
    ]
    for matrix in matrices:
        m, n = matrix.shape[-2:]
        singular = (n / m) ** 0.5 * np.linalg.svd(matrix.detach().numpy(), compute_uv=False)
        np.testing.assert_allclose(singular, 1, atol=1e-5)
    np.testing.assert_allclose(embed.embedding.weight.detach().square().mean(-1), 1, atol=1e-5)
    for atom in (linear, embed, conv):
        assert atom.norm(dict(atom.named_parameters())).item() == pytest.approx(1, abs=1e-5)


def test_a_padded_layer_counts_what_is_cut_off():
    net = Structured(7, 11, Kronecker()).double()
    structure = net.linear.structure
    assert (structure.in_features, structure.out_features) == (8, 12)
    assert net.sensitivity == pytest.approx((7 / 8 * 12 / 11) ** 0.5)
    assert net.terms()[0].sensitivity == pytest.approx((12 / 11) ** 0.5)
    assert norms(net.linear.to_dense()) <= net.sensitivity + 1e-6


@pytest.mark.parametrize(("given", "shares"), [(None, [1, 1]), ((1, 3), [0.5, 1.5])])
def test_a_structured_layer_splits_its_mass_over_its_cores(given, shares):
    net = Structured(16, 16, BTT(rank=2), mass=2, masses=given)
    steps = net.dualize(
        {name: torch.randn_like(p) for name, p in net.named_parameters()}, method="svd"
    )
    assert net.mass == 2
    assert [term.mass for term in net.terms()] == shares
    for step, share in zip(steps.values(), shares, strict=True):
        np.testing.assert_allclose(norms(step), share / 2, rtol=1e-5)  # every block of a core


# Steps


def test_muon_without_momentum_makes_the_steps_of_dualize(case):
    net, x = case
    twin = copy.deepcopy(net)
    for module in (net, twin):
        backward(module, x)
    options = {"momentum": 0.0, "method": "ns", "matrices": "all"}
    Muon(net, lr=0.1, masses=masses(net), **options).step()
    twin.descend_(0.1)
    torch.testing.assert_close(values(net), values(twin), rtol=1e-9, atol=1e-9)


def test_a_step_of_normed_has_the_rate_as_its_norm_and_keeps_the_directions(case):
    net, x = case
    backward(net, x)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    Normed(torch.optim.SGD(net.parameters(), lr=0.3), net, masses=masses(net)).step()
    for name, p in net.named_parameters():  # every weight's part has that norm by itself
        step = before[name] - p.detach()
        assert 0.3 * 0.87 <= net.norm({name: step}).item() <= 0.3 * (1 + 1e-9)
        cosine = torch.cosine_similarity(step.flatten(), p.grad.flatten(), dim=0)
        assert cosine.item() == pytest.approx(1)


def test_a_dual_step_has_the_target_as_its_norm_and_decreases_the_loss(case):
    net, x = case
    backward(net, x)
    steps = net.dualize(target=0.3, method="svd")
    assert net.norm(steps).item() == pytest.approx(0.3)
    assert sum((p.grad * steps[name]).sum() for name, p in net.named_parameters()) > 0


def test_a_negative_factor_does_not_turn_the_step_around():
    net = -1 * Linear(4, 3)
    gradients = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    steps = net.dualize(gradients)
    assert net.sensitivity == 1
    assert sum((gradients[name] * steps[name]).sum() for name in steps) > 0


def test_zero_maps_to_zero_and_never_to_nan():
    net = GPT(11, context=6, width=8, heads=2, blocks=1)
    zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    steps = net.dualize(zeros)
    assert all(not step.any() and step.isfinite().all() for step in steps.values())
    assert not net.dual_norm(zeros)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    backward(net, torch.randint(11, (2, 6)))
    assert all(p.grad.isfinite().all() for p in net.parameters())
    assert not net.norm(zeros)


def test_an_embedding_without_gradient_stays_and_the_others_move_by_their_full_step():
    net, gradient = Embed(3, 4), torch.tensor([[1.0] * 4, [0.0] * 4, [-3.0] * 4])
    torch.testing.assert_close(
        net.dualize({"embedding.weight": gradient})["embedding.weight"], gradient.sign()
    )


def test_what_has_mass_zero_is_frozen_and_its_term_is_zero():
    frozen, free = Linear(4, 4, mass=0), Linear(4, 4, mass=2)
    net = free @ frozen
    update = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    steps = net.dualize(update)
    assert not steps["0.linear.weight"].any()
    assert norms(steps["1.linear.weight"]) == pytest.approx(1, abs=1e-3)
    assert net.norm(update).item() == pytest.approx(norms(update["1.linear.weight"]))
    assert net.mass == 2
    assert net.sharpness == (0, 1, 0)
    assert not any(step.any() for step in net.tare(0).dualize(update).values())
    assert net.norm(update) == 0


def test_tare_scales_all_masses_alike():
    net = Linear(3, 2, mass=3) @ Linear(4, 3)
    assert net.tare(2) is net
    assert [part.mass for part in net.parts.values()] == [0.5, 1.5]
    assert net.tare().mass == 1


def test_a_power_has_weights_of_its_own_for_each_copy():
    module = Linear(6, 6, mass=0.5)
    net = module**3 @ module
    drawn = [p.detach() for p in net.parameters()]
    assert len(drawn) == 4
    assert not any(torch.allclose(a, b) for n, a in enumerate(drawn) for b in drawn[:n])
    assert net.mass == 2
    x = torch.randn(2, 6)
    torch.testing.assert_close((module**0)(x), x)


def test_a_tuple_on_either_side_of_a_composition_and_a_bond_in_two_places():
    relu = ReLU()
    a, b, c = Linear(3, 4), Linear(3, 4), Linear(2, 3)
    net = (a, relu @ b) @ relu @ c
    x = torch.randn(5, 2)
    h = c(x).relu()
    torch.testing.assert_close(net(x), (a(h), b(h).relu()))
    torch.testing.assert_close((Add() @ (a, b))(h), a(h) + b(h))
    assert net.sensitivity == pytest.approx((1 + 0.5**0.5) * 0.5**0.5)


# Ordinary modules


def test_training_decreases_the_loss_by_dualize_and_by_torchs_optimizers():
    torch.manual_seed(1)
    x, y = torch.randn(64, 12), torch.randint(5, (64,))
    for make in (None, torch.optim.AdamW):
        net = ResMLP(12, 5, width=16, blocks=3)
        optimizer = make and make(net.parameters(), lr=0.01)
        losses = []
        for _ in range(20):
            loss = F.cross_entropy(net(x), y)
            net.zero_grad()
            loss.backward()
            optimizer.step() if optimizer else net.descend_(0.1)
            losses.append(loss.item())
        assert losses[-1] < 0.8 * losses[0]


def test_state_and_copies_keep_weights_and_attributes(case):
    net, _ = case
    twin = copy.deepcopy(net)
    twin.load_state_dict(net.state_dict())
    assert twin.attributes == net.attributes
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in net.parameters()}
    twin.reset_parameters()
    assert all(
        not torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True)
    )


def test_a_converted_network_keeps_its_attributes_and_returns():
    net = ResMLP(16, 5, width=16, blocks=2)
    before, names = net.attributes, list(net.state_dict())
    convert(net, BTT(rank=2), include="blocks.*")
    inside = [module for module in net.modules() if isinstance(module, StructuredLinear)]
    assert len(inside) == 2
    assert net.attributes[:2] == pytest.approx(before[:2])
    assert net.sharpness.alpha > before.alpha  # two cores curve, one matrix does not
    cores = [term for term in net.terms() if "cores" in term.name]
    assert [term.mass for term in cores] == pytest.approx([0.25] * 4)
    assert param_groups(net, lr=0.1)
    densify(net)
    assert list(net.state_dict()) == names
    assert net.attributes == pytest.approx(before)


def test_the_parts_of_gpt_have_the_roles_that_convert_reads_from_names():
    net = GPT(64, context=8, width=16, heads=2, blocks=1)
    structured = {
        name
        for name, module in convert(net, BTT(), include="ffn").named_modules()
        if "cores" in name
    }
    assert structured
    assert all(name.startswith("blocks.0.mlp.") for name in structured)
    convert(net, BTT())  # all but the head
    assert isinstance(net.head.parts["2"].linear, nn.Linear)
    dense = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    assert dense == ["head.2.linear"]
    assert (ReLU() @ net).parts["0"] is net


def test_a_converted_network_is_saved_and_loaded(tmp_path):
    net, x = (
        convert(ResMLP(16, 5, width=16, blocks=2), BTT(), include="blocks.*"),
        torch.randn(3, 16),
    )
    save(net, tmp_path / "net.safetensors")
    torch.testing.assert_close(
        load(ResMLP(16, 5, width=16, blocks=2), tmp_path / "net.safetensors")(x), net(x)
    )


def test_weight_normalisation_and_an_activation_between_cores_have_no_norm_in_the_algebra():
    dense = Linear(16, 16) @ Linear(16, 16)
    net = convert(copy.deepcopy(dense), BTT(), weight_norm=True)
    with pytest.raises(ValueError, match=r"no norm for gains .* convert with weight_norm=False"):
        net.dualize({})
    for refused in (
        convert(dense, BTT().activate()).terms,
        lambda: md.Structured(16, 16, BTT().activate()),
    ):
        with pytest.raises(ValueError, match=r"^the algebra needs a matrix.* between='silu'"):
            refused()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("name", ["GPT", "structured"])
def test_networks_compile_without_graph_breaks(name):
    torch._dynamo.reset()
    build, inputs = NETS[name]
    net, x = build(), inputs()
    torch.testing.assert_close(torch.compile(net, fullgraph=True, backend="eager")(x), net(x))


def test_on_meta_and_in_bfloat16():
    with torch.device("meta"):
        net = ResMLP(12, 5, width=8, blocks=2)
    net.to_empty(device="cpu").reset_parameters()
    assert net.norm(dict(net.named_parameters())).isfinite()
    net.bfloat16()
    backward_steps = net.dualize({name: torch.randn_like(p) for name, p in net.named_parameters()})
    assert {step.dtype for step in backward_steps.values()} == {torch.bfloat16}
    assert net.norm(backward_steps).item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf")])
def test_a_rate_that_is_negative_or_not_finite_descends_nowhere(lr):
    net = Linear(2, 2)
    before = net.linear.weight.detach().clone()
    with pytest.raises(ValueError, match=f"lr={lr} must be finite and not negative"):
        net.descend_(lr, {"linear.weight": torch.ones(2, 2)})
    assert torch.equal(net.linear.weight, before)


def test_an_update_that_does_not_fit_changes_no_weight():
    net = Linear(2, 2) @ Linear(2, 2)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    with pytest.raises(ValueError, match=r"'1.linear.weight' has shape \(1, 2\)"):
        net.descend_(
            0.1, {"0.linear.weight": torch.ones(2, 2), "1.linear.weight": torch.ones(1, 2)}
        )
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_a_layer_without_mass_is_refused_by_an_optimizers_masses_or_frozen_and_left_out():
    net = Linear(2, 2) @ Linear(2, 2, mass=0)
    with pytest.raises(ValueError, match=r"'0.linear.weight' has mass 0.*requires_grad_"):
        masses(net)
    net.parts["0"].requires_grad_(False)
    assert masses(net) == {"1.linear": 1}
    Muon(net, masses=masses(net))


# What is refused


def test_weights_that_are_tied_after_they_were_composed_are_refused():
    net = Linear(4, 4) @ ReLU() @ Linear(4, 4)
    net.parts["2"].linear.weight = net.parts["0"].linear.weight
    net(torch.randn(2, 4)).sum().backward()
    for use in (net.dualize, lambda: net.norm({}), lambda: masses(net)):
        with pytest.raises(
            ValueError, match=r"'0.linear.weight' and '2.linear.weight' are the same weight"
        ):
            use()


shared = Linear(4, 4)
BAD = {
    "widths": (
        lambda: Linear(4, 2) @ ReLU() @ Linear(6, 3), ValueError,
        r"Linear\(4 -> 2\) takes 4 features, not 3",
    ),
    "channels": (
        lambda: Conv2D(4, 2) @ Conv2D(3, 5), ValueError,
        r"Conv2D\(4 -> 2\) takes 4 channels, not 5",
    ),
    "sum": (lambda: Linear(4, 2) + Linear(4, 3), ValueError, "they give 2 and 3 features"),
    "residual": (
        lambda: (Identity() + Linear(4, 3)) @ Linear(2, 4), ValueError,
        "they give 4 and 3 features",
    ),
    "tuple": (
        lambda: Linear(4, 2) @ (Linear(4, 4), Linear(4, 4)), ValueError,
        "takes one input, .* tuple of 2",
    ),
    "no tuple": (
        lambda: Add() @ Linear(4, 4), ValueError, "Add takes a tuple of inputs.* 4 features",
    ),
    "attention": (
        lambda: md.FunctionalAttention(causal=True) @ (Linear(4, 4), Linear(4, 4)), ValueError,
        "q, k, v",
    ),
    "keys": (
        lambda: md.FunctionalAttention(causal=True) @ (Linear(4, 4), Linear(4, 2), Linear(4, 4)),
        ValueError,
        "queries have 4 features and keys 2",
    ),
    "heads": (
        lambda: md.SplitHeads(3) @ Linear(4, 4), ValueError,
        "heads=3 does not divide the 4 features",
    ),
    "tokens": (lambda: Embed(5, 4) @ Linear(4, 4), ValueError, "Embed takes tokens .* 4 features"),
    "empty tuple": (lambda: Linear(4, 4) @ (), ValueError, "no modules"),
    "zero": (lambda: 0 * Linear(4, 4), ValueError, "a=0 must be finite and not 0"),
    "infinite": (lambda: Linear(4, 4) * float("inf"), ValueError, "a=inf must be finite"),
    "no number": (lambda: Scale("2"), TypeError, "a='2' must be a number"),
    "power": (
        lambda: Linear(4, 4) ** -1, ValueError, r"M \*\* n: n=-1 must be at least 0",
    ),
    "half": (lambda: Linear(4, 4) ** 0.5, TypeError, r"M \*\* n: n=0.5 must be an integer"),
    "power widths": (lambda: Linear(4, 2) ** 2, ValueError, r"takes 4 features, not 2"),
    "twice": (
        lambda: shared @ ReLU() @ shared, ValueError,
        r"'0.linear.weight' and '2.linear.weight' are the same",
    ),
    "twice in a sum": (lambda: shared + 2 * shared, ValueError, "are the same weight"),
    "negative mass": (
        lambda: Linear(4, 4, mass=-1), ValueError, "mass=-1 must be finite and not negative",
    ),
    "negative tare": (lambda: Linear(4, 4).tare(-1), ValueError, "mass=-1"),
    "tare of nothing": (
        lambda: (ReLU() @ Identity()).tare(2), ValueError, r"tare\(2\): Composite has mass 0",
    ),
    "core masses": (
        lambda: Structured(4, 4, Kronecker(), masses=(0, 0)), ValueError,
        "sum, which divides, must not be zero",
    ),
    "negative core mass": (
        lambda: Structured(4, 4, Kronecker(), masses=(2, -1)), ValueError, r"\[1\]=-1 must be",
    ),
    "infinite core mass": (
        lambda: Structured(4, 4, Kronecker(), masses=(1, np.inf)), ValueError, r"\[1\]=inf must be",
    ),
    "three core masses": (
        lambda: Structured(4, 4, Kronecker(), masses=(1, 1, 1)), ValueError,
        "structure has 2 cores",
    ),
    "torch's module": (
        lambda: Linear(4, 4) @ nn.ReLU(), TypeError,
        r"ReLU\(\) is no module.*there may be a modular.ReLU",
    ),
    "a number": (lambda: Linear(4, 4) + 1, TypeError, "1 is no module of"),
    "no gradient": (
        lambda: Linear(4, 4).dualize(), ValueError, "no weight of Linear has a gradient",
    ),
    "name": (
        lambda: Linear(4, 4).norm({"weight": torch.ones(4, 4)}), ValueError,
        "there are linear.weight",
    ),
    "shape": (
        lambda: Linear(4, 2).dualize({"linear.weight": torch.ones(4, 2)}), ValueError,
        r"\(4, 2\).*\(2, 4\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_the_number_that_is_wrong(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


# ---- the paper's code, where it differs ----------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_plain_optimizers_step_as_in_the_papers_parametrisation(optimizer):
    def make(groups):
        if optimizer == "sgd":
            return torch.optim.SGD(groups, lr=0.1)
        return torch.optim.Adam(groups, lr=0.1, eps=1e-30)

    net = md.Linear(64, 16) @ md.ReLU() @ md.Linear(16, 64) @ md.Embed(10, 16)
    scales = [4.0, 2.0, 0.5]  # sqrt(16), sqrt(64 / 16), sqrt(16 / 64)
    stored = [
        torch.nn.Parameter(p.detach() / s) for p, s in zip(net.parameters(), scales, strict=True)
    ]
    tokens = torch.arange(10)
    theirs, ours = make(stored), make(paper_groups(net, 0.1, optimizer=optimizer))
    for _ in range(3):
        embedding, first, last = (s * p for s, p in zip(scales, stored, strict=True))
        loss = ((embedding[tokens] @ first.T).relu() @ last.T).square().mean()
        for each, value in ((theirs, loss), (ours, net(tokens).square().mean())):
            each.zero_grad()
            value.backward()
            each.step()
    for p, q, s in zip(net.parameters(), stored, scales, strict=True):
        torch.testing.assert_close(p, s * q, rtol=1e-3, atol=1e-4)
