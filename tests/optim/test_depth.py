import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from structlin import BTT, LowRank, convert, param_groups
from structlin.optim import Depth, Muon
from tests.models import GPT, Block
from tests.optim.test_groups import flat


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
        model, 0.05, other_lr=0.02, weight_decay=0.5, method="svd", depth=depth
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
        depth=Depth(base=2, alpha=alpha),
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


def test_blocks_are_read_from_the_list_of_modules_and_counted():
    assert Depth(base=2).ratio(GPT(depth=6)) == 3
    wrapped = torch.compile(convert(GPT(depth=6), BTT(), include="ffn"), backend="eager")
    assert Depth(base=2).ratio(nn.Sequential(wrapped)) == 3


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_muons_steps_in_blocks_have_the_length_of_depth_and_decay_with_it(alpha):
    torch.manual_seed(0)
    model = convert(GPT(depth=8), BTT(), include="ffn").double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    setting = Depth(base=2, alpha=alpha)
    optimizer = Muon(model, 0.1, method="svd", momentum=0.0, depth=setting, matrices="all")
    muon = Muon(model, 0.1, weight_decay=0.3, depth=setting, matrices="all")
    decays = flat(muon.param_groups, "weight_decay")
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


def test_a_deeper_model_finds_its_layers_widths_in_any_block_of_the_base():
    base, model = GPT(width=64, depth=1), convert(GPT(width=256, depth=3), BTT(), include="ffn")
    with pytest.raises(ValueError, match=r"base has no linear layer 'h\.1\.attn\.c_attn'"):
        param_groups(model, 1.0, base=base)
    rates = flat(param_groups(model, 1.0, base=base, depth=Depth(base=1)))
    assert rates["h.0.mlp.c_fc.cores.0"] == rates["h.2.mlp.c_fc.cores.0"]
    assert rates["h.2.attn.c_attn.weight"] == 0.25


class TwoStacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(Block(8) for _ in range(3))
        self.second = nn.ModuleList(Block(8) for _ in range(5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Depth(base=2, alpha=0.4), r"alpha=0\.4 must be from 0\.5"),
        (lambda: Depth(base=2, alpha=1.5), r"alpha=1\.5 must be from 0\.5"),
        (lambda: param_groups(GPT(), 1e-3, depth=8), "depth=8 must be a Depth"),
        (lambda: Depth(base=1).scale_(GPT()), "ends=None: name the last layers"),
    ],
)
def test_exponents_and_depths_out_of_range_are_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize("optimizer", [param_groups, Muon])
@pytest.mark.parametrize(
    ("model", "ends", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), None, "has no nn.ModuleList"),
        (TwoStacks(), None, "cannot be read, it has blocks in 'first', 'second'"),
        (GPT(), "*c_out", r"ends: '\*c_out' matches no linear layer"),
        (GPT(), "lm_head", "'lm_head' is in no residual block"),
        (
            convert(GPT(), BTT(), include="ffn", weight_norm=True),
            "*mlp.c_proj",
            r"'h\.0\.mlp\.c_proj' is weight-normalised",
        ),
    ],
)
def test_a_depth_that_cannot_be_read_is_refused(optimizer, model, ends, message):
    with pytest.raises(ValueError, match=message):
        optimizer(model, 1e-3, depth=Depth(base=2, ends=ends))


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_a_parametrised_layer_is_no_end_and_nothing_is_scaled(kind):
    model = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4))
    getattr(nn.utils.parametrizations, kind)(model[2][1])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"the weight of '2\.1' is made of parameters"):
        Depth(base=1, ends="*1").scale_(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_pruned_layer_is_scaled_as_an_end():
    model = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4))
    end = model[0][0]
    prune.l1_unstructured(end, "weight", 0.5)
    before = end.weight.clone()
    Depth(base=1, ends="*0").scale_(model)
    end(torch.ones(1, 4))  # the hook of pruning makes the weight
    assert torch.equal(end.weight, before / 4)


def test_a_layer_that_was_scaled_is_not_scaled_again_and_other_layers_still_can_be():
    model = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4))
    before = copy.deepcopy(model.state_dict())
    Depth(base=1, ends="*1").scale_(model)
    after = copy.deepcopy(model.state_dict())
    with pytest.raises(
        RuntimeError, match=r"'0\.1' was scaled by Depth\.scale_ before.*0\.25 twice"
    ):
        Depth(base=1, ends=["*0", "*1"]).scale_(model)
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    Depth(base=1, ends="*.0").scale_(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] / 4)
