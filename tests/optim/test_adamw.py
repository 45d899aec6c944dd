"""`optim.AdamW`, against torch's AdamW in float64 that steps one matrix at a time."""

import copy
import importlib.util
import inspect
import pickle
from math import sqrt

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from structlin import BTT, Kronecker, StructuredLinear, convert, densify, param_groups
from structlin.optim import AdamW, Depth, _adamw
from tests.models import GPT

LR = 0.02


def model_of(bias=True, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64, bias), nn.GELU(), nn.Linear(64, 16, bias))
    return convert(model, BTT(rank=2), **options).double()


def fill_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def multiplier_of(layer, name):
    """By the formula of Qiu et al.: in_features / (cores * fan_in) of a core."""
    if "cores" not in name:
        return 1.0
    core = dict(layer.named_parameters())[name]
    return layer.in_features / (len(layer.cores) * core.shape[-1])


class OneAtATime:
    """torch's AdamW of each parameter by itself, whose rates the test multiplies."""

    def __init__(self, model, weight_decay):
        self.optimizers = []
        for layer in model:
            for name, p in layer.named_parameters():
                decay = weight_decay if "cores" in name else 0.0
                optimizer = torch.optim.AdamW([p], lr=1.0, weight_decay=decay)
                self.optimizers.append((optimizer, multiplier_of(layer, name)))

    def step(self, lr, betas):
        for optimizer, multiplier in self.optimizers:
            optimizer.param_groups[0].update(lr=lr * multiplier, betas=betas)
            optimizer.step()


def assert_close(model, twin):
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


# ---- the rates -----------------------------------------------------------------------------------


class Assigned:
    """nanoGPT's loop: one rate for every group."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0
        self.step()

    def step(self):
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = LR / self.count


def warm_up_and_decay(optimizer):
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
        lr_scheduler.CosineAnnealingLR(optimizer, 6, eta_min=LR / 5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 3 * LR, total_steps=10),
    "SequentialLR": warm_up_and_decay,
    "an assignment": Assigned,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_steps_are_those_of_each_matrix_by_itself_at_its_own_multiple_of_the_dense_rate(name):
    model, twin, dense = model_of(), model_of(), nn.Linear(2, 2)
    optimizer = AdamW(model, LR, weight_decay=0.1)
    of_dense = torch.optim.AdamW(dense.parameters(), LR)
    by_hand = OneAtATime(twin, 0.1)
    schedules = SCHEDULES[name](optimizer), SCHEDULES[name](of_dense)
    for step in range(8):
        rate, betas = (of_dense.param_groups[0][option] for option in ("lr", "betas"))
        assert {group["lr"] for group in optimizer.param_groups} == {rate}
        for each in (model, twin):
            fill_gradients(each, step)
        optimizer.step()
        of_dense.step()
        by_hand.step(rate, betas)
        for schedule in schedules:
            schedule.step()
    assert_close(model, twin)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"base": {16: 4, 64: 16}, "weight_decay_scaling": "constant"},
        {"structure_aware": False, "masses": {"2": 3.0}},
        {"masses": {"0": (0.25, 0.75)}},
    ],
)
def test_the_groups_are_those_of_param_groups_with_the_ratios_taken_out(options):
    model = model_of()
    mine = AdamW(model, LR, weight_decay=0.3, **options).param_groups
    theirs = param_groups(model, LR, weight_decay=0.3, **options)
    for key in ("lr_mult", "weight_decay", "name", "param_names"):
        assert [group[key] for group in mine] == [group[key] for group in theirs]
    assert [group["lr"] * group["lr_mult"] for group in mine] == [g["lr"] for g in theirs]
    assert {group["eps"] for group in mine} == {1e-8}


def test_eps_follows_the_gradients_where_it_is_asked_to():
    model, base = model_of(), {16: 4, 64: 16}
    depth = Depth(base=1)
    blocks = nn.Sequential(nn.ModuleList([model]))
    for each, options in ((model, {"base": base}), (blocks, {"depth": depth})):
        mine = AdamW(each, LR, eps=1e-6, scale_eps=True, **options).param_groups
        theirs = param_groups(each, LR, eps=1e-6, weight_decay=0.0, **options)
        assert [group["eps"] for group in mine] == [group["eps"] for group in theirs]


@pytest.mark.parametrize(("given", "decay"), [({}, 0.01), ({"weight_decay": 0.5}, 0.5)])
def test_matrices_decay_by_torchs_default_or_the_given_number_and_nothing_else_does(given, decay):
    model = model_of()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fill_gradients(model, 0)
    for p in model.parameters():
        p.grad.zero_()
    AdamW(model, LR, **given).step()
    for layer, module in model.named_children():
        for name, p in module.named_parameters():
            full = f"{layer}.{name}"
            share = LR * multiplier_of(module, name) * decay if "cores" in name else 0.0
            torch.testing.assert_close(p, (1 - share) * before[full], rtol=1e-12, atol=0)


def test_what_no_weight_decay_names_does_not_decay():
    class Declared(GPT):
        def no_weight_decay(self):
            return {"wte.weight", "h.0.mlp.c_fc.weight"}

    optimizer = AdamW(convert(Declared(), BTT(), include="ffn"))
    decays = {n: g["weight_decay"] for g in optimizer.param_groups for n in g["param_names"]}
    assert decays["wte.weight"] == decays["h.0.mlp.c_fc.cores.1"] == 0
    assert decays["h.1.mlp.c_fc.cores.1"] == 0.01


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"amsgrad": True}])
def test_options_of_torchs_adamw_have_their_meaning(options):
    options = {"betas": (0.8, 0.9), "eps": 1e-3, "maximize": True, **options}
    model, twin = model_of().float(), model_of().float()
    mine = AdamW(model, LR, weight_decay=0.2, **options)
    theirs = torch.optim.AdamW(param_groups(twin, LR, weight_decay=0.2), **options)
    for step in range(3):
        for each in (model, twin):
            fill_gradients(each, step)
        mine.step()
        theirs.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_every_option_of_torchs_adamw_is_here_but_differentiable():
    theirs = inspect.signature(torch.optim.AdamW.__init__).parameters
    mine = inspect.signature(AdamW.__init__).parameters
    assert set(theirs) - set(mine) == {"params", "differentiable"}
    for name in set(theirs) & set(mine) - {"self"}:
        assert mine[name].default == theirs[name].default
    assert not any(kind.kind is kind.VAR_KEYWORD for kind in mine.values())


def test_a_rate_of_zero_moves_nothing_and_a_later_one_has_the_ratios():
    model, twin = model_of(), model_of()
    optimizer = AdamW(model, 0, weight_decay=0.0)
    fill_gradients(model, 0)
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = LR
    optimizer.step()
    pairs = zip(model[0].cores, twin[0].cores, strict=True)
    moved = [(p - q).abs().mean().item() for p, q in pairs]
    fans_in = [core.shape[-1] for core in model[0].cores]
    assert moved[0] / moved[1] == pytest.approx(fans_in[1] / fans_in[0], rel=0.1)


# ---- parameters ----------------------------------------------------------------------------------


def test_a_parameter_that_is_unfrozen_later_steps_from_then_on():
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = AdamW(model, LR)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
        id(p) for p in model.parameters()
    }
    model[0].requires_grad_(True)
    before = [p.detach().clone() for p in model[0].parameters()]
    fill_gradients(model, 0)
    optimizer.step()
    assert not any(map(torch.equal, model[0].parameters(), before))


def test_a_layer_that_the_model_has_grown_and_one_of_its_own_are_added_with_their_ratios():
    model = model_of()
    optimizer = AdamW(model, LR, weight_decay=0.1)
    count = len(optimizer.param_groups)
    model.append(StructuredLinear(16, 64, BTT(rank=2)).double())
    optimizer.add_param_group({"params": model[3], "lr": 0.5, "weight_decay": 0.2})
    apart = StructuredLinear(16, 64, BTT(rank=2))
    optimizer.add_param_group({"params": apart})
    for layer, lr, decay in ((model[3], 0.5, 0.2), (apart, LR, 0.1)):
        found = {
            id(p): (group["lr"], group["lr_mult"], group["weight_decay"])
            for group in optimizer.param_groups[count:]
            for p in group["params"]
        }
        for name, p in layer.named_parameters():
            mult = multiplier_of(layer, name)
            assert found[id(p)] == (lr, pytest.approx(mult), decay if "cores" in name else 0.0)
    for group in param_groups(nn.ModuleList([StructuredLinear(16, 64, BTT(rank=2))]), 0.5):
        optimizer.add_param_group(group)
        assert optimizer.param_groups[-1]["lr"] == 0.5
        assert optimizer.param_groups[-1]["lr_mult"] == group["lr_mult"]
    with pytest.raises(ValueError, match=r"of shape \(3,\) belongs to no module of Sequential"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match=r"betas=\(0.9, 1\.0\) must be"):
        optimizer.add_param_group({"params": nn.Linear(2, 2), "betas": (0.9, 1.0)})
    with pytest.raises(TypeError, match="lr='1e-3' is text"):
        optimizer.add_param_group({"params": nn.Linear(2, 2), "lr": "1e-3"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": [nn.Parameter(torch.ones(3))]}, "model=list must be a torch.nn.Module"),
        ({"model": nn.Sequential()}, "model=Sequential has no parameters"),
        ({"lr": -1.0}, "lr=-1.0 must be"),
        ({"lr": "1e-3"}, "lr='1e-3' is text"),
        ({"betas": (1.0, 0.9)}, r"betas=\(1.0, 0.9\) must be"),
        ({"eps": -1.0}, "eps=-1.0 must be"),
        ({"weight_decay": None}, "weight_decay=None must be a number"),
        ({"weight_decay_scaling": "sqrt"}, "='sqrt' is unknown"),
        ({"masses": {"head": 4}}, "masses: 'head' matches no layer"),
        ({"base": nn.Linear(3, 3)}, "base has no linear layer '0'"),
        ({"fused": 1}, "fused=1 is of type int; take True or False"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        AdamW(**{"model": model_of(), **arguments})


# ---- the step ------------------------------------------------------------------------------------


def test_hooks_run_once_for_a_step_and_see_the_dense_rate():
    model, seen = model_of(), []
    torch.optim.AdamW(model.parameters())  # torch wraps the step of a class when one is made
    spec = importlib.util.spec_from_file_location("structlin.optim._again", _adamw.__file__)
    imported_later = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported_later)
    optimizer = imported_later.AdamW(model, LR)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda optimizer, *_: seen.append([g["lr"] for g in optimizer.param_groups]))
    fill_gradients(model, 0)
    optimizer.step()
    assert seen == [[LR] * len(optimizer.param_groups)] * 2


def test_a_step_that_fails_leaves_the_dense_rates():
    model = model_of()
    optimizer = AdamW(model, LR)
    fill_gradients(model, 0)
    model[2].bias.grad = model[2].bias.grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert {group["lr"] for group in optimizer.param_groups} == {LR}


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_unscales_and_skips_what_is_not_finite(fused):
    model, twin = model_of().float(), model_of().float()
    optimizer = AdamW(model, LR, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    fill_gradients(model, 0)
    for p in model.parameters():
        p.grad.mul_(4)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    fill_gradients(twin, 0)
    AdamW(twin, LR, fused=fused).step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    before = [p.detach().clone() for p in model.parameters()]
    model[0].bias.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2
    assert all(map(torch.equal, model.parameters(), before))


def test_a_closure_gives_the_loss_with_gradients_and_sees_the_dense_rate():
    model = model_of()
    optimizer, x = AdamW(model, LR), torch.randn(4, 16, dtype=torch.float64)

    def closure():
        assert {group["lr"] for group in optimizer.param_groups} == {LR}
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure) > 0


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["file", "deepcopy", "pickle", "distributed", "flattened"])
def test_training_goes_on_bit_for_bit(way, tmp_path):
    model = model_of()
    optimizer = AdamW(model, LR, weight_decay=0.1)

    def train(model, optimizer, steps):
        schedule = lr_scheduler.OneCycleLR(optimizer, LR, total_steps=9)
        for step in steps:
            fill_gradients(model, step)
            optimizer.step()
            schedule.step()

    train(model, optimizer, range(3))
    if way == "deepcopy":
        twin, again = copy.deepcopy((model, optimizer))
    elif way == "pickle":
        twin, again = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        twin = copy.deepcopy(model)
        again = AdamW(twin, 1.0)
        if way == "file":
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
            again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        else:
            from torch.distributed.checkpoint import state_dict as dcp

            options = dcp.StateDictOptions(flatten_optimizer_state_dict=way == "flattened")
            state = dcp.get_optimizer_state_dict(model, optimizer, options=options)
            state = copy.deepcopy(state)
            dcp.set_optimizer_state_dict(twin, again, state, options=options)
    assert [g["lr_mult"] for g in again.param_groups] == [
        g["lr_mult"] for g in optimizer.param_groups
    ]
    assert all(group["params"] for group in again.param_groups)
    train(model, optimizer, range(3, 6))
    train(twin, again, range(3, 6))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    again.add_param_group({"params": nn.Linear(2, 2)})  # what a copy reads its rule for


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    optimizer = AdamW(model_of(), LR)
    other = AdamW(nn.Sequential(*model_of(), nn.Linear(2, 2)), 1.0).state_dict()
    with pytest.raises(ValueError, match=r"another model: it lacks \[\] and has \['3\.bias', "):
        optimizer.load_state_dict(other)
    other = AdamW(model_of(), 1.0, masses={"0": (0.9, 0.1)}).state_dict()
    with pytest.raises(ValueError, match="another model: its parameters are in another order or"):
        optimizer.load_state_dict(other)
    assert {group["lr"] for group in optimizer.param_groups} == {LR}


def test_parameters_are_added_all_or_none():
    model = model_of()
    optimizer = AdamW(model, LR)
    groups = len(optimizer.param_groups)
    model.insert(0, nn.Linear(16, 16))  # its weight comes before the bias, which is held
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [model[0].weight, model[1].bias]})
    assert len(optimizer.param_groups) == groups


# ---- a rate that carries over --------------------------------------------------------------------


@pytest.mark.parametrize("structure", [None, BTT(rank=2), Kronecker()], ids=str)
def test_the_first_step_changes_what_a_layer_does_by_as_much_for_every_structure(structure):
    """The RMS of the change of the outputs for one input; of dense, it is lr * width / sqrt(width)
    in the direction of the signs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    if structure is not None:
        convert(model, structure)
    x, before = torch.randn(1, 256), model[0](torch.eye(256)).detach()
    model(x).square().sum().backward()
    AdamW(model, 1e-4, weight_decay=0.0).step()
    change = model[0](torch.eye(256)).detach() - before  # (in_features, out_features)
    norm = torch.linalg.matrix_norm(change, 2).item() / 256 / 1e-4
    assert 0.2 < norm < 2.5 * sqrt(2)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_an_optimizer_that_was_made_before_convert_is_refused_at_every_step(steps_before):
    model = nn.Sequential(nn.Linear(16, 16))
    optimizer = AdamW(model, 1e-3)
    for _ in range(steps_before):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()
    convert(model, BTT(rank=1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(2, 16)).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"0\.cores\.0 is in no group.* convert first"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    AdamW(model, 1e-3).step()
    assert not any(map(torch.equal, model.parameters(), before))


def test_a_densified_model_is_refused_and_one_that_only_lost_or_only_grew_a_layer_is_not():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = AdamW(convert(model, BTT(rank=1)), 1e-3)
    del model[2]
    model(torch.ones(2, 16)).square().sum().backward()
    optimizer.step()
    grown = convert(nn.Sequential(nn.Linear(16, 16)), BTT(rank=1))
    other = AdamW(grown, 1e-3)
    grown.append(nn.Linear(16, 16))  # another optimizer may step it
    grown(torch.ones(2, 16)).square().sum().backward()
    other.step()
    densify(model)
    model(torch.ones(2, 16)).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight is in no group.* convert first"):
        optimizer.step()
