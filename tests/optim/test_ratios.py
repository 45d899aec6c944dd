"""Optimizers that keep the ratios between rates, and `keep_ratios`, against rates set by hand."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim import optimizer as torchs

from benchmarks.zoo import import_timm
from structlin import BTT, LowRank, convert, keep_ratios, param_groups
from structlin.optim import SOAP, AdamW, Muon, Normed
from structlin.optim._block import BlockOptimizer

LR = 0.03
OPTIMIZERS = [
    torch.optim.AdamW,
    partial(torch.optim.AdamW, fused=True),
    partial(torch.optim.SGD, momentum=0.9),
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    AdamW,
    Muon,
    SOAP,
]
NATIVE = [AdamW, Muon, SOAP]  # which need no keep_ratios


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(16, 36), nn.GELU(), nn.Linear(36, 16)), BTT(rank=2))


def make(kind, model, lr=LR):
    if kind in (Muon, SOAP):
        return kind(model, lr, other_lr=lr / 7, weight_decay=0.1)
    if kind is AdamW:
        return AdamW(model, lr, weight_decay=0.1)
    return kind(param_groups(model, lr, weight_decay=0.1))


def make_by_hand(kind, model):
    """The twin whose rates a test sets itself: torch's AdamW for ours."""
    return make(torch.optim.AdamW if kind is AdamW else kind, model)


def fill_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def set_rates(optimizer, rate):
    """Those of a loop that knows the ratios."""
    if isinstance(optimizer, BlockOptimizer):  # as one that is made at this rate
        fresh_groups = make(type(optimizer), optimizer.model, rate or 1.0).param_groups
        for group, fresh in zip(optimizer.param_groups, fresh_groups, strict=True):
            group.update(lr=rate, lr_mult=fresh["lr_mult"])
        return
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_mult"]


def step_all(seed, *pairs):
    for model, optimizer in pairs:
        fill_gradients(model, seed)
        optimizer.step()


def rate_at(step):
    return LR * (step + 1) / 3 if step < 3 else LR / (step + 1)


def train_by_hand(kind, model, steps=6):
    optimizer = make_by_hand(kind, model)
    for step in range(steps):
        set_rates(optimizer, rate_at(step))
        step_all(step, (model, optimizer))
    return optimizer


def train_kept(optimizer, model, steps=range(6)):
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        step_all(step, (model, optimizer))
        assert {group["lr"] for group in optimizer.param_groups} == {rate_at(step)}


def assert_same(model, other):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


def assert_close(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


# ---- the steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_loop_that_sets_one_rate_makes_the_steps_of_rates_that_are_scaled_by_hand(kind):
    model, twin = model_of(), model_of()
    base = make(kind, model)
    optimizer = keep_ratios(base)
    assert "step" not in vars(base)
    assert (optimizer is base) == (kind in NATIVE)
    assert keep_ratios(optimizer) is optimizer
    assert {group["lr"] for group in optimizer.param_groups} == {LR}
    train_kept(optimizer, model)
    train_by_hand(kind, twin)
    assert_same(model, twin)


RULES = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8, eta_min=0.01),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.2, anneal_epochs=3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "timm": lambda o: pytest.importorskip("timm.scheduler").CosineLRScheduler(
        o, 8, lr_min=0.01, warmup_t=2, warmup_lr_init=0.001
    ),
    "transformers": lambda o: pytest.importorskip(
        "transformers"
    ).get_cosine_with_min_lr_schedule_with_warmup(o, 2, 8, min_lr=0.01),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, *NATIVE])
def test_every_scheduler_gives_all_groups_the_dense_models_rate(name, kind):
    import_timm()
    dense = torch.optim.AdamW(nn.Linear(2, 2).parameters(), LR)
    model, twin = model_of(), model_of()
    kept, by_hand = keep_ratios(make(kind, model)), make_by_hand(kind, twin)
    schedules = RULES[name](dense), RULES[name](kept)
    for step in range(8):
        rate = dense.param_groups[0]["lr"]
        assert {group["lr"] for group in kept.param_groups} == {rate}
        set_rates(by_hand, rate)
        for group in by_hand.param_groups:
            for option in {"betas", "momentum"} & set(group):  # which OneCycleLR sets as well
                group[option] = kept.param_groups[0][option]
        dense.step()
        step_all(step, (model, kept), (twin, by_hand))
        for schedule in schedules:
            schedule.step(*[step] * (name == "timm"))
    if name != "OneCycleLR":  # which gives Muon's other parameters momentum of their own
        assert_close(model, twin)
    if not isinstance(kept, BlockOptimizer):
        assert_same(model, twin)


@pytest.mark.parametrize("kind", NATIVE)
def test_a_rate_that_is_a_tensor_is_that_of_every_group_and_may_be_filled(kind):
    model, twin, rate = model_of(), model_of(), torch.tensor(LR)
    optimizer, by_hand = make(kind, model, rate), make_by_hand(kind, twin)
    for step in range(4):
        rate.fill_(rate_at(step))
        set_rates(by_hand, rate_at(step))
        step_all(step, (model, optimizer), (twin, by_hand))
        assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert_close(model, twin)


def test_keep_ratios_gives_each_group_a_tensor_of_its_own():
    model, rate = model_of(), torch.tensor(LR)
    optimizer = keep_ratios(torch.optim.AdamW(model[0].parameters(), rate), model)
    optimizer.add_param_group({"params": [model[2].bias]})
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    plateau.step(1.0)
    plateau.step(1.0)  # halves every tensor in place, once
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    assert rates == pytest.approx([LR / 2] * len(rates))


@pytest.mark.parametrize("kind", [Muon, SOAP])
def test_the_rate_of_everything_else_follows_the_matrices_rate_in_the_ratio_it_began_with(kind):
    model, twin = model_of(), model_of()
    optimizer = make(kind, model)
    biases = torch.optim.AdamW([twin[0].bias, twin[2].bias], betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(4):
        for group in (*optimizer.param_groups, *biases.param_groups):
            group["lr"] = rate_at(step)
        biases.param_groups[0]["lr"] /= 7
        step_all(step, (model, optimizer), (twin, biases))
    torch.testing.assert_close(model[0].bias, twin[0].bias)
    torch.testing.assert_close(model[2].bias, twin[2].bias)


@pytest.mark.parametrize("fails", [False, True])
def test_a_closure_reads_and_sets_the_dense_models_rate_and_so_does_a_step_that_fails(fails):
    model, twin, seen = model_of(), model_of(), []
    optimizer = keep_ratios(make(Muon, model))

    def closure():
        assert torch.is_grad_enabled()
        seen.append({group["lr"] for group in optimizer.param_groups})
        for group in optimizer.param_groups:
            group["lr"] = rate_at(0)
        fill_gradients(model, 0)
        if fails:
            model[0].bias.grad.fill_(float("nan"))
        return torch.tensor(1.0)

    if fails:
        with pytest.raises(FloatingPointError):
            optimizer.step(closure)
    else:
        assert optimizer.step(closure) == 1
        train_by_hand(Muon, twin, steps=1)
        assert_same(model, twin)
    assert seen == [{LR}]
    assert {group["lr"] for group in optimizer.param_groups} == {rate_at(0)}


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_of_the_step_sets_the_rates_of_all_groups(when):
    model, twin, seen = model_of(), model_of(), []
    optimizer = keep_ratios(make(torch.optim.AdamW, model))
    by_hand = make(torch.optim.AdamW, twin)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)

    def hook(optimizer, *_):
        seen.append({group["lr"] for group in optimizer.param_groups})
        schedule.step()

    getattr(optimizer, f"register_step_{when}_hook")(hook)
    for step in range(3):
        set_rates(by_hand, LR * 0.5 ** (step + (when == "pre")))
        step_all(step, (model, optimizer), (twin, by_hand))
    assert seen == [{LR}, {LR / 2}, {LR / 4}]
    assert_same(model, twin)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_steps(fused):
    model, twin = model_of(), model_of()
    plain = torch.optim.AdamW(param_groups(twin, LR), fused=fused)
    optimizer = keep_ratios(torch.optim.AdamW(param_groups(model, LR), fused=fused))
    for of, stepped in ((model, optimizer), (twin, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        fill_gradients(of, 0)
        scaler.scale(torch.ones(()))
        scaler.step(stepped)
        scaler.update()
        before = [p.clone() for p in of.parameters()]
        fill_gradients(of, 1)
        of[0].bias.grad.fill_(torch.inf)
        scaler.step(stepped)
        scaler.update()
        assert scaler.get_scale() == 2
        assert all(map(torch.equal, of.parameters(), before))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_what_else_an_optimizer_has_is_the_wrapped_ones():
    model = model_of()
    base = torch.optim.AdamW(param_groups(model, LR))
    base.note = "theirs"
    optimizer = keep_ratios(base)
    assert optimizer.note == "theirs"
    assert optimizer.state is base.state
    optimizer.note = "set"
    assert base.note == "set"
    with pytest.raises(AttributeError, match="no attribute '_step_supports_amp_scaling'"):
        _ = optimizer._step_supports_amp_scaling


@pytest.mark.filterwarnings("ignore")  # torch's own, where it compiles
@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW, Muon])
def test_the_compiled_step_keeps_the_ratios(kind):
    model, twin = model_of(), model_of()
    by_hand = make_by_hand(kind, twin)
    if kind is Muon:
        optimizer = Muon(model, LR, other_lr=LR / 7, weight_decay=0.1, nonfinite="ignore")
    else:
        optimizer = make(kind, model)
    optimizer = keep_ratios(optimizer)
    rates = [torch.tensor(LR) for _ in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    torch.compiler.reset()
    whole = kind in NATIVE  # torch's own breaks its graph at `_use_grad`
    step = torch.compile(optimizer.step, fullgraph=whole, backend="eager")
    for n in range(4):
        for rate in rates:
            rate.fill_(rate_at(n))
        set_rates(by_hand, rate_at(n))
        fill_gradients(model, n)
        step()
        step_all(n, (twin, by_hand))
        assert [group["lr"] for group in optimizer.param_groups] == rates
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


# ---- copies and files ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, *NATIVE])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state"])
def test_a_copy_keeps_the_ratios_and_goes_on_bit_for_bit(way, kind):
    model, twin = model_of(), model_of()
    optimizer = keep_ratios(make(kind, model))
    train_kept(optimizer, model, range(3))
    if way == "state":
        again = keep_ratios(make(kind, model))
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif way == "deepcopy":
        model, again = copy.deepcopy((model, optimizer))
    else:
        model, again = pickle.loads(pickle.dumps((model, optimizer)))
    assert type(again) is type(optimizer)
    assert type(getattr(again, "base", again) if kind not in NATIVE else again) is kind
    train_kept(again, model, range(3, 6))
    train_by_hand(kind, twin)
    assert_close(model, twin)
    if not isinstance(again, BlockOptimizer):
        assert_same(model, twin)


@pytest.mark.parametrize("kept", [AdamW, lambda m, lr: keep_ratios(make(torch.optim.AdamW, m, lr))])
def test_a_state_goes_neither_to_nor_from_an_optimizer_that_does_not_keep_ratios(kept):
    model, twin = model_of(), model_of()
    optimizer, plain = kept(model, lr=LR), torch.optim.AdamW(param_groups(twin, LR))
    step_all(0, (model, optimizer), (twin, plain))
    rates = [group["lr"] for group in plain.param_groups]
    with pytest.raises(ValueError, match="was saved without keep_ratios"):
        optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="a different number of parameter groups"):
        plain.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in plain.param_groups] == rates
    assert {group["lr"] for group in optimizer.param_groups} == {LR}
    for state in (AdamW(model, LR).state_dict(), keep_ratios(plain).state_dict()):
        optimizer.load_state_dict(state)  # the two who keep them read each other's


OF_ANOTHER_RANK = {
    "AdamW": lambda model: AdamW(model, LR),
    "Muon": lambda model: Muon(model, LR),
    "keep_ratios": lambda model: keep_ratios(torch.optim.AdamW(param_groups(model, LR))),
    "Normed": lambda model: Normed(torch.optim.SGD(model.parameters(), LR, momentum=0.9), model),
}


@pytest.mark.parametrize("make_one", OF_ANOTHER_RANK.values(), ids=OF_ANOTHER_RANK)
def test_a_state_of_another_rank_is_refused_though_names_and_groups_are_the_same(make_one):
    def model_of_rank(rank):
        return convert(nn.Sequential(nn.Linear(16, 36), nn.Linear(36, 16)), LowRank(rank=rank))

    model, other = model_of_rank(4), model_of_rank(8)
    optimizer, other_optimizer = make_one(model), make_one(other)
    fill_gradients(other, 0)
    other_optimizer.step()
    with pytest.raises(
        ValueError, match=r"another model: .* is \(1, 4, 16\) here and \(1, 8, 16\)"
    ):
        optimizer.load_state_dict(other_optimizer.state_dict())
    assert not optimizer.state


def test_muon_refuses_a_state_from_when_each_group_had_a_rate_of_its_own():
    optimizer = make(Muon, model_of())
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["keeps_ratios"]
    with pytest.raises(ValueError, match=r"its rates have the ratios in them: .* Muon"):
        optimizer.load_state_dict(state)


def test_groups_that_are_added_later_have_the_dense_models_rate():
    model, other = model_of(), model_of()
    optimizer = keep_ratios(make(torch.optim.AdamW, model))
    for group in param_groups(other[0], LR):
        optimizer.add_param_group(group)
    optimizer.add_param_group({"params": [("bias", other[2].bias)], "lr": LR})
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [LR] * len(optimizer.param_groups)
    )
    mults = [group["lr_mult"] for group in param_groups(other[0], LR)]
    assert [group["lr_mult"] for group in optimizer.param_groups][-len(mults) - 1 :] == [*mults, 1]
    muon = Muon([model[0].cores[0]], LR, model=model, other_lr=LR / 7)
    muon.add_param_group({"params": [model[2].bias]})
    assert [group["lr_mult"] for group in muon.param_groups] == pytest.approx([1, 1 / 7])
    assert [group["lr"] for group in muon.param_groups] == [LR, LR]


def test_muon_refuses_a_rate_of_zero_that_has_no_ratio_to_other_lr_and_takes_it_later():
    model = model_of()
    for lr in (0, torch.tensor(0.0)):
        with pytest.raises(ValueError, match=r"lr=.*0.* must be positive: .*other_lr / lr"):
            Muon(model, lr)
    assert Muon(nn.Linear(8, 8, bias=False), 0).param_groups[0]["lr_mult"] == 1
    optimizer = Muon(model, LR)
    before = [p.detach().clone() for p in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    step_all(0, (model, optimizer))
    assert all(map(torch.equal, model.parameters(), before))
    for group in optimizer.param_groups:
        group["lr"] = LR
    step_all(1, (model, optimizer))
    assert not any(map(torch.equal, model.parameters(), before))


# ---- optimizers that a framework made ------------------------------------------------------------


@pytest.mark.parametrize(("kind", "rule"), [(torch.optim.AdamW, "adam"), (torch.optim.SGD, "sgd")])
def test_groups_of_a_framework_are_divided_by_what_param_groups_has(kind, rule):
    model, twin = model_of(), model_of()
    named = dict(model.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named.items() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named.items() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = keep_ratios(kind(groups, lr=LR), model)
    by_hand = kind(param_groups(twin, LR, weight_decay=0.1, optimizer=rule))
    found = {
        name: (group["lr"] * group["lr_mult"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert found == {
        name: (group["lr"], group["weight_decay"])
        for group in by_hand.param_groups
        for name in group["param_names"]
    }
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            assert named[name] is p
    for step in range(3):
        step_all(step, (model, optimizer), (twin, by_hand))
    assert_same(model, twin)


def of_class(name, model):
    """An optimizer that nobody has heard of, by the name of another library's."""

    def step(self, closure=None):
        pass

    kind = type(name, (torch.optim.Optimizer,), {"step": step})
    return kind(model.parameters(), {"lr": LR, "weight_decay": 0.0})


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("AdamW", "adam"),
        ("AdamW8bit", "adam"),
        ("PagedAdamW", "adam"),
        ("NAdamW", "adam"),
        ("SGDW", "sgd"),
    ],
)
def test_the_rule_of_another_librarys_optimizer_is_read_from_its_name(name, rule):
    model = model_of()
    kept = keep_ratios(of_class(name, model), model)
    by_rule = {group["lr_mult"] for group in param_groups(model, LR, optimizer=rule)}
    assert {group["lr_mult"] for group in kept.param_groups} == by_rule


@pytest.mark.parametrize(
    "name", ["Lamb", "Adafactor", "Muon", "MuonWithAuxAdam", "AdaMuon", "SignSGD", "Lion"]
)
def test_an_optimizer_of_another_rule_is_refused_unless_the_rule_is_said(name):
    model = model_of()
    with pytest.raises(ValueError, match=f"rule=None: .* rule {name} follows; there are adam, "):
        keep_ratios(of_class(name, model), model)
    kept = keep_ratios(of_class(name, model), model, rule="sign")
    by_rule = {group["lr_mult"] for group in param_groups(model, LR, optimizer="sign")}
    assert {group["lr_mult"] for group in kept.param_groups} == by_rule
    with pytest.raises(ValueError, match="rule='lion' is unknown; there are adam"):
        keep_ratios(of_class(name, model), model, rule="lion")


def changed(optimizer, change):
    change(optimizer)
    return optimizer


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: keep_ratios(adamw(m)), r"model=None: the groups of AdamW have no lr_mult"),
        (
            lambda m: keep_ratios(changed(adamw(m), lambda o: fill_gradients(m, 0) or o.step()), m),
            "it has made a step: the groups of AdamW",
        ),
        (
            lambda m: keep_ratios(adamw(nn.Linear(3, 4)), m),
            r"model=Sequential: a parameter of shape \(4, 3\) is not",
        ),
        (lambda m: keep_ratios(m), "optimizer=Sequential must be"),
        (lambda m: keep_ratios(torch.optim.LBFGS(m.parameters())), "optimizer=LBFGS must be"),
        (lambda m: keep_ratios(Normed(adamw(m), m), m), "optimizer=Normed must be"),
        (
            lambda m: keep_ratios(
                changed(adamw(m), lambda o: o.param_groups[0].update(lr=None)), m
            ),
            "lr=None: AdamW chooses its rates itself",
        ),
        *(
            (
                lambda m, change=change: keep_ratios(changed(adamw(m), change), m),
                "AdamW has a scheduler or hooks of its step",
            )
            for change in (
                lambda o: lr_scheduler.ExponentialLR(o, 0.5),
                lambda o: o.register_step_pre_hook(print),
                lambda o: o.register_step_post_hook(print),
            )
        ),
    ],
)
def test_what_can_not_keep_ratios_is_refused_by_name(use, message):
    with pytest.raises((ValueError, TypeError), match=message):
        use(model_of())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_optimizer_that_was_given_refuses_to_step_by_itself(kind):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 2))
    given = kind(param_groups(convert(model, BTT()), lr=0.1), lr=0.1)
    kept = keep_ratios(given)
    model(torch.randn(3, 16)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    for bare in (given, copy.deepcopy(kept).base):
        with pytest.raises(RuntimeError, match=r"optimizer = structlin\.keep_ratios\(optimizer\)"):
            bare.step()
    assert all(map(torch.equal, before, model.parameters()))
    kept.step()
    assert not any(map(torch.equal, before, model.parameters()))
    assert not torchs._global_optimizer_pre_hooks
    assert not torchs._global_optimizer_post_hooks
