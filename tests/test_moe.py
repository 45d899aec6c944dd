"""A mixture is the loop over its experts, token by token; what is derived of a core is that of the
single structure."""

import copy
import pickle
from math import log, sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import structlin
from structlin import (
    BTT,
    TT,
    Dense,
    LowRank,
    Monarch,
    StructuredLinear,
    convert,
    optim,
    param_groups,
    stability,
    summary,
)
from structlin._kernels import engine, op
from structlin.moe import Mixture, load_balancing_loss

ACTIVE = BTT(rank=2).activate()
FAMILIES = [Dense(), LowRank(rank=3), BTT(), BTT(rank=2), Monarch(blocks=2), TT(rank=2, cores=3)]
FAMILIES += [ACTIVE]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


def tokens(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mixture(family, experts=4, top_k=2, widths=(12, 20), **options):
    """One whose router tells tokens apart, in float64."""
    torch.manual_seed(0)
    options = {"dtype": torch.float64} | options
    layer = Mixture(*widths, family, experts=experts, top_k=top_k, **options)
    with torch.no_grad():
        layer.router.weight.normal_()
        if layer.bias is not None:
            layer.bias.normal_()
    return layer


def experts_of(layer, family):
    """Each expert as a layer of its own."""
    found = []
    for n in range(layer.experts):
        single = StructuredLinear(
            layer.in_features, layer.out_features, family, bias=False, dtype=torch.float64
        )
        batches = [core.batch for core in single.structure.cores]
        parts = [core[n * b : (n + 1) * b] for core, b in zip(layer.cores, batches, strict=True)]
        found.append(single.set_cores_([part.detach() for part in parts]))
    return found


def by_loop(layer, family, x):
    """The definition, one token at a time."""
    experts, rows = experts_of(layer, family), []
    for token in x.reshape(-1, x.shape[-1]):
        logits = (layer.router.weight @ token).tolist()
        chosen = sorted(range(len(logits)), key=lambda e: -logits[e])[: layer.top_k]
        total = sum(torch.tensor(logits[e]).exp().double() for e in chosen)
        y = sum(torch.tensor(logits[e]).exp().double() / total * experts[e](token) for e in chosen)
        rows.append(y if layer.bias is None else y + layer.bias)
    return torch.stack(rows).reshape(*x.shape[:-1], layer.out_features)


# ---- the product ---------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (5, 3), (3, 3), (2, 2)])
def test_a_mixture_is_the_weighted_sum_of_its_experts_token_by_token(family, experts, top_k):
    layer, x = mixture(family, experts, top_k), tokens(3, 5, 12)
    assert_close(layer(x), by_loop(layer, family, x), rtol=1e-6, atol=1e-6)


def test_an_expert_without_tokens_and_a_batch_without_tokens_are_no_special_case():
    layer, x = mixture(BTT(), experts=8), tokens(1, 12)
    assert_close(layer(x), by_loop(layer, BTT(), x), rtol=1e-6, atol=1e-6)
    assert layer(x[:0]).shape == (0, 20)
    layer(x).sum().backward()
    for core in layer.cores:  # never None: every process and every step has all gradients
        assert core.grad.shape == core.shape
        used = core.grad.unflatten(0, (8, -1)).flatten(1).abs().sum(1) > 0
        assert used.sum() == 2


@every_family
def test_one_expert_of_one_is_the_structured_layer_itself(family):
    layer, x = mixture(family, experts=1, top_k=1), tokens(6, 12)
    (single,) = experts_of(layer, family)
    assert_close(layer(x), single(x) + layer.bias, rtol=0, atol=1e-13)


def test_widths_that_the_structure_pads_are_those_of_the_layer():
    family = TT(rank=2)
    layer, x = mixture(family, widths=(11, 17)), tokens(4, 11)
    assert any(layer.padding)
    assert_close(layer(x), by_loop(layer, family, x), rtol=1e-6, atol=1e-6)


@every_family
@pytest.mark.parametrize("engine", [True, False])
def test_experts_wider_than_the_layer_are_cut(family, engine, monkeypatch):
    if not engine:
        monkeypatch.setattr(op, "available", lambda x: False)
    structure, x = family.structure(12, 20), tokens(9, 11)
    layer = mixture(structure, widths=(11, 18))
    assert layer.padding == (1, 2)
    wanted = by_loop(layer, structure, x)
    assert_close(layer(x), wanted, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        assert_close(layer(x), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", [LowRank(rank=3), BTT(rank=2), TT(rank=2), ACTIVE], ids=str)
def test_gradients_are_those_of_finite_differences(family):
    layer, x = mixture(family, widths=(6, 8), weight_norm=True), tokens(5, 6)
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def function(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x.requires_grad_(), *values), fast_mode=True)


def test_weight_normalisation_takes_the_norm_over_all_experts():
    layer = mixture(BTT(rank=2), weight_norm=True)
    with torch.no_grad():
        layer.cores[0].mul_(3)
        layer.gains.fill_(1.5)
    core = layer.cores[0].detach()
    factor = 1.5 * min(1.0, layer.stds[0] / core.square().mean().sqrt().item())
    assert_close(layer.effective_cores()[0], factor * core)


def test_under_autocast_the_output_has_its_dtype():
    layer, x = Mixture(16, 16), torch.randn(5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert_close(y.float(), layer(x), rtol=0.05, atol=0.1)


def test_without_the_engine_it_computes_the_same(monkeypatch):
    layer, x = mixture(BTT(rank=2), weight_norm=True), tokens(40, 12).requires_grad_()
    leaves = [x, *layer.parameters()]
    own = []
    for available in (op.available, lambda x: False):
        monkeypatch.setattr(op, "available", available)
        y = layer(x)
        own.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    assert_close(*own)


def test_second_derivatives_are_those_of_finite_differences():
    layer, x = mixture(BTT(), widths=(6, 8), bias=False), tokens(4, 6).requires_grad_()
    assert torch.autograd.gradgradcheck(layer, (x,), fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("weight_norm", [False, True])
def test_compiled_it_is_one_graph_and_computes_the_same(weight_norm):
    if not engine.load():
        pytest.skip("there is no engine here")
    model = nn.Sequential(mixture(BTT(), weight_norm=weight_norm), nn.ReLU())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for n in (7, 40, 3):
        x = tokens(n, 12).requires_grad_()
        found = []
        for run in (compiled, model):
            y = run(x)
            loss = y.square().sum() + load_balancing_loss(model)
            found.append([y.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])])
        assert_close(*found)


@pytest.mark.slow
# torch looks at the gradient of what goes into the second graph
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_compiled_without_the_engine_it_computes_the_same(monkeypatch):
    monkeypatch.setattr(op, "available", lambda x: False)
    model, x = nn.Sequential(mixture(BTT()), nn.ReLU()), tokens(7, 12)
    torch._dynamo.reset()
    assert_close(torch.compile(model, backend="eager")(x), model(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_compiled_in_one_graph_where_no_engine_takes_it_it_says_so():
    torch._dynamo.reset()
    compiled = torch.compile(mixture(LowRank(rank=2)), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="structlin: no engine takes all experts"):
        compiled(tokens(7, 12))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, about itself
@pytest.mark.parametrize("family", [BTT(), LowRank(rank=2)])
def test_compiled_by_inductor_the_router_has_its_whole_gradient(family):
    torch._dynamo.reset()
    layer = mixture(family)
    compiled, x, found = torch.compile(layer), tokens(3, 3, 12), []
    for run in (compiled, layer):
        loss = run(x).square().mean() + load_balancing_loss(layer)
        found.append(torch.autograd.grad(loss, list(layer.parameters())))
    assert_close(*found)


# ---- what is derived -----------------------------------------------------------------------------


@every_family
def test_rates_and_initial_scale_of_a_core_are_those_of_the_single_structure(family):
    layer, single = Mixture(64, 128, family, experts=8), StructuredLinear(64, 128, family)
    assert layer.stds == single.stds
    for core, std in zip(layer.cores, layer.stds, strict=True):
        assert abs(core.std().item() / std - 1) < 5 / sqrt(core.numel())

    def rates(module, **options):
        groups = param_groups(nn.Sequential(module), 0.01, **options)
        return {name: group["lr"] for group in groups for name in group["param_names"]}

    for optimizer in ("adam", "sgd"):
        ours, theirs = rates(layer, optimizer=optimizer), rates(single, optimizer=optimizer)
        assert {name: ours[name] for name in theirs} == theirs
        assert ours.keys() - theirs.keys() == {"0.router.weight"}
        assert ours["0.router.weight"] == 0.01
    for name in rates(single):
        base = rates(layer, base={64: 16, 128: 32})
        assert base[name] == rates(single, base={64: 16, 128: 32})[name]
    assert base["0.router.weight"] == 0.01 / 4


def test_the_router_starts_small_and_sends_tokens_to_all_experts():
    torch.manual_seed(0)
    layer = Mixture(256, 64, experts=8)
    assert abs(layer.router.weight.std().item() / (sqrt(8) / 256) - 1) < 0.1
    _, chosen = layer.route(torch.randn(4096, 256))
    assert chosen.flatten().bincount(minlength=8).min() > 4096 * 2 / 8 / 3
    before = layer.router.weight.clone()
    layer.router.reset_parameters()
    assert not layer.router.weight.equal(before)


def test_a_step_of_muon_has_the_same_norm_in_every_block_of_every_expert():
    layer = mixture(BTT(rank=2), widths=(16, 16))
    before = [core.detach().clone() for core in layer.cores]
    layer(tokens(200, 16)).square().sum().backward()
    optim.Muon(layer, lr=0.1, method="svd", momentum=0.0, nesterov=False).step()
    for core, old in zip(layer.cores, before, strict=True):
        _, m, n = core.shape
        norms = sqrt(n / m) * torch.linalg.matrix_norm(core.detach() - old, ord=2)
        assert_close(norms, torch.full_like(norms, 0.05))  # half of it: there are two cores


def test_flops_are_those_of_the_active_experts_and_the_router():
    family = BTT()
    single = family.structure(256, 256)
    model = nn.Sequential(Mixture(256, 256, family, experts=8, top_k=2))
    row, router = summary(model).rows
    assert row.flops == 2 * single.flops
    assert row.params == 8 * single.params
    assert router.flops == 2 * 256 * 8
    x = torch.randn(100, 256)
    assert structlin.cost(model, x).flops == 100 * (row.flops + router.flops)
    with torch.device("meta"):
        meta = nn.Sequential(Mixture(256, 256, family, experts=8, top_k=2))
    assert structlin.cost(meta, x).flops == structlin.cost(model, x).flops
    assert row.structure == "2 of 8 BTT(rank=1)"


def test_its_norm_is_that_of_the_expert_with_the_largest():
    family = BTT(rank=2)
    layer = mixture(family, bias=False)
    with torch.no_grad():
        layer.cores[0][2 * len(layer.cores[0]) // 4 :].mul_(2)
    norms = [
        sqrt(12 / 20) * torch.linalg.matrix_norm(expert.to_dense(), ord=2)
        for expert in experts_of(layer, family)
    ]
    found = {row.layer: row for row in stability.metrics(nn.Sequential(layer), tokens(8, 12)).rows}
    assert found["0"].dependency == pytest.approx(max(norms).item(), rel=0.01)
    assert max(norms) > 1.2 * min(norms)


# ---- balance -------------------------------------------------------------------------------------


def test_the_balance_is_the_formula_and_least_where_all_experts_get_as_much():
    layer, x = mixture(BTT(), experts=4), tokens(50, 12)
    layer(x)
    logits = (x @ layer.router.weight.T).detach()
    share = torch.zeros(4, dtype=torch.float64)
    for row in logits:
        for e in sorted(range(4), key=lambda e: -row[e])[:2]:
            share[e] += 1 / 100
    p = torch.tensor([[v.exp() / row.exp().sum() for v in row] for row in logits]).double().mean(0)
    size = sum(row.exp().sum().log() ** 2 for row in logits) / len(logits)
    expected = 4 * (p * share).sum() + 0.1 * size
    assert_close(layer.balance, expected, rtol=1e-5, atol=1e-6)
    assert load_balancing_loss(layer).equal(layer.balance)
    with torch.no_grad():
        layer.router.weight.zero_()
    layer(x)
    assert layer.balance.item() == pytest.approx(1 + 0.1 * log(4) ** 2)


def test_the_balance_alone_spreads_the_tokens():
    torch.manual_seed(0)
    layer, x = Mixture(16, 16, experts=4), torch.randn(512, 16) + 1
    with torch.no_grad():
        layer.router.weight[0] += 0.3

    def largest():
        return layer.route(x)[1].flatten().bincount(minlength=4).max().item() / 1024

    assert largest() > 0.45
    optimizer = torch.optim.Adam(layer.router.parameters(), lr=0.01)
    for _ in range(200):
        layer(x)
        optimizer.zero_grad()
        load_balancing_loss(layer).backward()
        optimizer.step()
    assert largest() < 0.3


def test_balance_is_for_training_and_the_mean_over_the_mixtures():
    model = nn.Sequential(Mixture(16, 16), nn.ReLU(), Mixture(16, 16))
    with pytest.raises(ValueError, match="of its 2 mixtures 0 made a forward pass in training"):
        load_balancing_loss(model)
    model.eval()(torch.randn(9, 16))
    assert model[0].balance is None
    model.train()(torch.randn(9, 16))
    assert_close(load_balancing_loss(model), (model[0].balance + model[2].balance) / 2)
    load_balancing_loss(model).backward()
    assert model[0].router.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match=r"model=Linear has no structlin\.moe\.Mixture"):
        load_balancing_loss(nn.Linear(2, 2))


# ---- models and files ----------------------------------------------------------------------------


def build(dense=False):
    torch.manual_seed(0)
    first = nn.Linear(16, 24) if dense else Mixture(16, 24, BTT(rank=2), experts=4)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(24, 16))


@pytest.mark.parametrize("dense", [True, False])
def test_it_is_saved_and_loaded_into_a_dense_model_or_one_like_it(tmp_path, dense):
    model, x = build(), torch.randn(7, 16)
    with torch.no_grad():
        model[0].router.weight.normal_()
    structlin.save(model, tmp_path)
    again = structlin.load(build(dense=dense), tmp_path)
    assert type(again[0]) is Mixture
    assert_close(again(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"experts": 8}, {"top_k": 3}, None])
def test_the_state_of_another_mixture_is_refused(options, tmp_path):
    options = {"experts": 4, "top_k": 2} | options if options else None
    other = build()
    family = BTT(rank=2)
    other[0] = Mixture(16, 24, family, **options) if options else StructuredLinear(16, 24, family)
    with pytest.raises(RuntimeError, match=r"in the model, .* in the state"):
        other.load_state_dict(build().state_dict())
    structlin.save(build(), tmp_path)
    with pytest.raises(ValueError, match="in the file"):
        structlin.load(other, tmp_path)


def test_it_is_copied_and_pickled_after_a_forward_pass():
    layer, x = mixture(BTT()), tokens(5, 12)
    y = layer(x)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert again.balance is None
        assert_close(again(x), y)
    assert layer.balance is not None


def test_it_is_made_without_values_and_then_initialised():
    with torch.device("meta"):
        layer = Mixture(16, 16)
    layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert abs(layer.cores[0].std().item() / layer.stds[0] - 1) < 0.5


def test_convert_leaves_it_and_its_router_alone():
    model = nn.ModuleDict({"mlp": Mixture(64, 64), "proj": nn.Linear(64, 64)})
    convert(model, BTT())
    assert type(model["mlp"]) is Mixture
    assert isinstance(model["mlp"].router, nn.Linear)
    assert type(model["proj"]) is StructuredLinear
    assert structlin.densify(model, where="slower", tokens=1)["mlp"] is model["mlp"]


def test_f_linear_by_its_weight_runs_through_the_experts():
    layer, x = mixture(BTT()), tokens(5, 12)
    assert layer.weight.shape == (20, 12)
    assert_close(F.linear(x, layer.weight, layer.bias), layer(x))


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 0}, "experts=0 must be at least 1"),
        ({"experts": 2.5}, "experts=2.5 must be an integer"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"experts": 4, "top_k": 5}, "top_k=5 is more than there are experts=4"),
        ({"top_k": 1}, "top_k=1 of experts=8: the weight of one expert is always 1.*top_k=2"),
        ({"init": "none"}, "init='none' is unknown"),
    ],
)
def test_numbers_that_make_no_mixture_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Mixture(16, 16, **options)


@pytest.mark.parametrize("weight_norm", [False, True])
def test_cores_are_set_of_all_experts_at_once(weight_norm):
    layer, other = (mixture(BTT(), weight_norm=weight_norm) for _ in range(2))
    before = [core.detach().clone() for core in layer.cores]
    with pytest.raises(ValueError, match=r"the structure needs \(12, 4, 4\)"):
        layer.set_cores_([torch.ones(core.shape) for core in layer.structure.cores])
    assert_close(list(layer.cores), before)
    with torch.no_grad():
        for core in other.cores:
            core.normal_(0, 0.01)
    layer.set_cores_([core.detach() for core in other.cores])
    x = tokens(5, 12)
    assert_close(layer(x), other(x))


def test_under_vmap_it_is_refused_by_name():
    layer, x = mixture(BTT()), tokens(3, 5, 12)
    with pytest.raises(RuntimeError, match=r"a mixture cannot run under torch.func.vmap"):
        torch.func.vmap(layer)(x)
    grad = torch.func.grad(lambda x: layer(x).square().sum())  # of one sample there is no doubt
    leaf = x[0].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(layer(leaf).square().sum(), leaf)
    assert_close(grad(x[0]), wanted)


def test_there_is_no_one_matrix():
    model = nn.Sequential(Mixture(16, 16, bias=False))
    for form in (model[0].to_dense, lambda: model[0].weight + 1):
        with pytest.raises(ValueError, match="a mixture of 8 experts has no one matrix"):
            form()
    with pytest.raises(ValueError, match="no one matrix: it can not take one"):
        model[0].from_dense_(torch.eye(16))
    with pytest.raises(ValueError, match="layer '0' is a Mixture"):
        structlin.densify(model)
    with pytest.raises(ValueError, match="last dimension must be in_features=16"):
        model(torch.randn(3, 8))
