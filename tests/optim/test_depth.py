import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from structlin import BTT, Kronecker, LowRank, Monarch, convert, param_groups
from structlin.optim import Depth, Muon
from tests.models import GPT, Block
from tests.optim.test_groups import flat

IN_BLOCKS = ("h.0.mlp.c_fc.weight", "h.3.attn.c_attn.bias", "h.7.ln_2.weight")
OUTSIDE = ("wte.weight", "ln_f.weight", "ln_f.bias", "lm_head.weight")


class ResMLP(nn.Module):
    """Residual blocks whose branches are multiplied by `m` in the forward pass."""

    def __init__(self, depth, m=1.0, width=16):
        super().__init__()
        self.embed, self.head, self.m = nn.Linear(4, width), nn.Linear(width, 3), m
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width)
            )
            for _ in range(depth)
        )

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + self.m * block(x)
        return self.head(x)


def trained(model, optimizer, steps=6):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=draw, dtype=torch.float64)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), torch.arange(8) % 3)
        loss.backward()
        optimizer.step()
    return model(x).detach()


OPTIMIZERS = {
    "adamw": lambda model, depth: torch.optim.AdamW(
        param_groups(model, 0.02, weight_decay=0.5, eps=1e-3, depth=depth)
    ),
    "sgd": lambda model, depth: torch.optim.SGD(
        param_groups(model, 0.05, optimizer="sgd", weight_decay=0.05, depth=depth), momentum=0.9
    ),
    "muon": lambda model, depth: Muon(
        model, 0.05, other_lr=0.02, eps=1e-3, weight_decay=0.5, method="svd", depth=depth
    ),
    "muon, signs": lambda model, depth: Muon(
        model, 0.05, other="sign", other_lr=0.02, method="svd", depth=depth
    ),
}


@pytest.mark.parametrize("structure", [None, BTT(), LowRank(rank=2)])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_that_hold_the_multiplier_train_as_a_forward_that_multiplies(
    name, alpha, structure
):
    torch.manual_seed(0)
    held = ResMLP(depth=6).double()
    if structure is not None:
        convert(held, structure, include="blocks*")
    multiplied = copy.deepcopy(held)
    by_forward, by_weights = (
        Depth(base=2, alpha=alpha),
        Depth(base=2, alpha=alpha, ends="blocks.*.3"),
    )
    multiplied.m = by_forward.multiplier(multiplied)
    assert multiplied.m == pytest.approx(3**-alpha)
    by_weights.scale_(held)
    ours = trained(held, OPTIMIZERS[name](held, by_weights))
    theirs = trained(multiplied, OPTIMIZERS[name](multiplied, by_forward))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    start = trained(multiplied, OPTIMIZERS[name](multiplied, by_forward), steps=1)
    assert (start - theirs).abs().max() > 1e-3  # it has trained


@pytest.mark.parametrize("alpha", [0.5, 0.75, 1.0])
def test_adams_rates_and_eps_are_completeps_table(alpha):
    """Width 64 to 256 and 2 to 8 blocks; the table with its multipliers, by hand."""
    base, model = GPT(width=64, depth=2), GPT(width=256, depth=8)
    groups = param_groups(
        model,
        1.0,
        weight_decay=1.0,
        eps=1.0,
        base=base,
        weight_decay_scaling="constant",
        depth=Depth(alpha=alpha),
    )
    rate, eps, decay = (flat(groups, key) for key in ("lr", "eps", "weight_decay"))
    for n in range(8):
        for name in ("mlp.c_fc", "mlp.c_proj", "attn.c_attn", "attn.c_proj"):
            weight, bias = f"h.{n}.{name}.weight", f"h.{n}.{name}.bias"
            assert rate[weight] == pytest.approx(4 ** (alpha - 1) / 4)
            assert rate[bias] == pytest.approx(4 ** (alpha - 1))
            assert (decay[weight], decay[bias]) == (4, 0)
            assert eps[weight] == eps[bias] == pytest.approx(4**-alpha / 4)
        norm = f"h.{n}.ln_1.weight"
        assert (rate[norm], decay[norm]) == (pytest.approx(4 ** (alpha - 1)), 0)
        assert eps[norm] == pytest.approx(4**-alpha / 4)
    assert (rate["wte.weight"], eps["wte.weight"], decay["wte.weight"]) == (1, 1 / 4, 1)
    assert (rate["ln_f.weight"], eps["ln_f.weight"], decay["ln_f.weight"]) == (1, 1 / 4, 0)
    # no multiplier behind the head: its gradients stay of order 1
    assert (rate["lm_head.weight"], eps["lm_head.weight"]) == (1 / 4, 1)


def test_at_alpha_one_depth_changes_no_rate_and_at_a_half_only_those_in_blocks():
    model = GPT(depth=8)
    assert set(flat(param_groups(model, 1.0, depth=Depth(base=2))).values()) == {1.0}
    rates = flat(param_groups(model, 1.0, depth=Depth(base=2, alpha=0.5)))
    assert {rates[name] for name in IN_BLOCKS} == {0.5}
    assert {rates[name] for name in OUTSIDE} == {1.0}


def test_sgd_moves_a_deep_chain_as_far_as_a_shallow_one():
    """x -> (1 + m w) x, from w = 0: one step moves the output by L m^2 lr, whatever L and alpha."""
    for depth, alpha in ((2, 1.0), (8, 0.5), (8, 0.75), (32, 1.0)):
        model = nn.ModuleList(
            nn.Sequential(
                nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False).requires_grad_(False)
            )
            for _ in range(depth)
        ).double()
        for block in model:
            nn.init.zeros_(block[0].weight)
            nn.init.ones_(block[1].weight)
        setting = Depth(base=2, alpha=alpha)
        m, x = setting.multiplier(model), torch.ones(1, dtype=torch.float64)
        for block in model:
            x = x + m * block(x)
        x.sum().backward()
        lr = 1e-6
        torch.optim.SGD(param_groups(model, lr, optimizer="sgd", depth=setting)).step()
        x = torch.ones(1, dtype=torch.float64)
        for block in model:
            x = x + m * block(x)
        assert (1 - x.item()) / lr == pytest.approx(2, rel=1e-4)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_muons_steps_in_blocks_have_the_length_of_depth_and_decay_with_it(alpha):
    torch.manual_seed(0)
    model = convert(GPT(depth=8), BTT(), include="ffn").double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    setting = Depth(base=2, alpha=alpha)
    optimizer = Muon(model, 0.1, method="svd", momentum=0.0, nesterov=False, depth=setting)
    decays = flat(Muon(model, 0.1, weight_decay=0.3, depth=setting).param_groups, "weight_decay")
    model(torch.arange(6)[None]).square().mean().backward()
    optimizer.step()
    step = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    core = model.h[3].mlp.c_fc.structure.cores[1]
    norm = torch.linalg.matrix_norm(step["h.3.mlp.c_fc.cores.1"], 2).max()
    inside = 4 ** (alpha - 1)
    assert norm * (core.fan_in / core.fan_out) ** 0.5 == pytest.approx(0.1 / 2 * inside)
    head = torch.linalg.matrix_norm(step["lm_head.weight"], 2)
    assert head * (64 / 50) ** 0.5 == pytest.approx(0.1)
    assert decays["h.3.mlp.c_fc.cores.1"] == pytest.approx(0.3 * inside)
    assert decays["lm_head.weight"] == decays["wte.weight"] == 0.3


def test_blocks_are_read_from_the_list_of_modules_and_counted():
    assert Depth(base=2).ratio(GPT(depth=6), None) == 3
    assert Depth().ratio(GPT(depth=6), GPT(depth=4)) == 1.5
    wrapped = torch.compile(convert(GPT(depth=6), BTT(), include="ffn"), backend="eager")
    assert Depth(base=2).ratio(nn.Sequential(wrapped), None) == 3


def test_a_deeper_model_finds_its_layers_widths_in_any_block_of_the_base():
    base, model = GPT(width=64, depth=1), convert(GPT(width=256, depth=3), BTT(), include="ffn")
    with pytest.raises(ValueError, match=r"base has no linear layer 'h\.1\.attn\.c_attn'"):
        param_groups(model, 1.0, base=base)
    rates = flat(param_groups(model, 1.0, base=base, depth=Depth()))
    assert rates["h.0.mlp.c_fc.cores.0"] == rates["h.2.mlp.c_fc.cores.0"]
    assert rates["h.2.attn.c_attn.weight"] == 0.25


class TwoStacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(Block(8) for _ in range(3))
        self.second = nn.ModuleList(Block(8) for _ in range(5))


def test_blocks_in_two_places_have_to_be_named():
    model = TwoStacks()
    with pytest.raises(ValueError, match=r"cannot be read, it has blocks in 'first', 'second'"):
        param_groups(model, 1.0, depth=Depth(base=1))
    assert Depth(base=1, blocks="second.*").ratio(model, None) == 5
    assert Depth(base=1, blocks="*.*").ratio(model, None) == 8
    rates = flat(param_groups(model, 1.0, depth=Depth(base=1, blocks="second.*", alpha=0.5)))
    assert rates["first.2.mlp.c_fc.weight"] == 1
    assert rates["second.2.mlp.c_fc.weight"] == pytest.approx(5**-0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Depth(base=0), "base=0 must be at least 1"),
        (lambda: Depth(base=2, alpha=0.4), r"alpha=0\.4 must be from 0\.5"),
        (lambda: Depth(base=2, alpha=1.5), r"alpha=1\.5 must be from 0\.5"),
        (lambda: Depth(base=2, alpha=float("nan")), "alpha=nan"),
    ],
)
def test_exponents_and_depths_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("optimizer", [param_groups, Muon])
@pytest.mark.parametrize(
    ("model", "depth", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Depth(base=2), "has no nn.ModuleList"),
        (
            convert(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), BTT()),
            Depth(base=2),
            "has no nn.ModuleList",
        ),
        (GPT(), Depth(), "the model has 2 blocks; how many had the one where lr was tuned"),
        (GPT(), Depth(base=2, blocks="g.*"), r"no module of GPT is named 'g\.\*'"),
        (GPT(), Depth(base=2, ends="*c_out"), r"ends: '\*c_out' matches no linear layer"),
        (GPT(), Depth(base=2, ends="lm_head"), "'lm_head' is in no residual block"),
        (
            convert(GPT(), BTT(), include="ffn", weight_norm=True),
            Depth(base=2, ends="*mlp.c_proj"),
            r"'h\.0\.mlp\.c_proj' is weight-normalised",
        ),
    ],
)
def test_a_depth_that_cannot_be_read_is_refused(optimizer, model, depth, message):
    with pytest.raises(ValueError, match=message):
        optimizer(model, 1e-3, depth=depth)


def test_a_depth_that_is_a_number_is_refused():
    with pytest.raises(TypeError, match=r"blocks=3 must be a glob .* is base="):
        Depth(blocks=3)
    with pytest.raises(TypeError, match="depth=8 must be a Depth"):
        param_groups(GPT(), 1e-3, depth=8)


def test_scaling_needs_the_ends_named():
    with pytest.raises(ValueError, match="ends=None: name the last layers"):
        Depth(base=1).scale_(GPT())


def test_only_the_last_core_and_the_bias_of_an_end_are_scaled():
    model = convert(GPT(depth=4), Kronecker(), include="ffn")
    nn.init.ones_(model.h[1].mlp.c_proj.bias)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    Depth(base=2, ends="*mlp.c_proj").scale_(model)
    for name, p in model.named_parameters():
        scaled = ".mlp.c_proj." in name and not name.endswith("cores.0")
        torch.testing.assert_close(p.detach(), before[name] * (0.5 if scaled else 1.0))


def test_a_muon_with_a_depth_survives_deepcopy():
    model = convert(GPT(depth=4), Monarch(), include="ffn")
    optimizer = Muon(model, 0.1, depth=Depth(base=1, alpha=0.5))
    again = copy.deepcopy(optimizer)
    p, q = optimizer.param_groups[0]["params"][0], again.param_groups[0]["params"][0]
    assert again._roster.step_length(q) == optimizer._roster.step_length(p)
