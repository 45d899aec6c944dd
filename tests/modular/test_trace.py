"""`modular.trace`: plain models against the same networks written in the algebra, and rules against
derivatives."""

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from structlin import BTT, Kronecker, StructuredLinear, convert, modular
from structlin.modular import masses
from structlin.modular.trace import trace
from structlin.optim import Muon
from tests.models import GPT

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def derivative(model, x, dx, step=1e-6):
    """Of the model at x, along dx."""
    ahead, behind = (
        model(*(each + sign * step * d for each, d in zip(x, dx, strict=True))) for sign in (1, -1)
    )
    return (ahead - behind) / (2 * step)


def plain(in_features, out_features):
    return nn.Linear(in_features, out_features, bias=False)


class ResMLP(nn.Module):
    """modular.ResMLP without the algebra."""

    def __init__(self, in_features, out_features, width, blocks, block_depth):
        super().__init__()
        self.input, self.head, self.width = (
            plain(in_features, width),
            plain(width, out_features),
            width,
        )
        self.blocks = nn.ModuleList(
            nn.ModuleList(plain(width, width) for _ in range(block_depth)) for _ in range(blocks)
        )

    def forward(self, x):
        x = self.input(x.flatten(1))
        for block in self.blocks:
            y = x
            for layer in block:
                y = layer(F.rms_norm(y, (self.width,))).abs()
                y = y - y.mean(-1, keepdim=True)
            x = (1 - 1 / len(self.blocks)) * x + y / len(self.blocks)
        return self.head(x)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.q, self.k, self.v, self.out = (plain(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / q.shape[-1]) / 3
        return self.out(y.transpose(-2, -3).flatten(-2))


class TransformerBlock(nn.Module):
    def __init__(self, width, heads, share):
        super().__init__()
        self.attention, self.share = Attention(width, heads), share
        self.fc, self.proj, self.norm = (
            plain(width, 4 * width),
            plain(4 * width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x):
        x = (1 - self.share) * x + self.share * self.attention(self.norm(x))
        return (1 - self.share) * x + self.share * self.proj(
            math.sqrt(2) * F.gelu(self.fc(self.norm(x)))
        )


class Transformer(nn.Module):
    """modular.GPT without the algebra."""

    def __init__(self, vocabulary, context, width, heads, blocks):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, 1 / (2 * blocks)) for _ in range(blocks))
        )
        self.norm, self.head = nn.LayerNorm(width), plain(width, vocabulary)

    def forward(self, tokens):
        x = 0.5 * self.wte(tokens) + 0.5 * self.wpe(torch.arange(tokens.shape[-1]))
        return self.head(self.norm(self.blocks(x)))


def sequential():
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, 3))
    written = modular.Linear(20, 3) @ modular.ReLU() @ modular.Linear(6, 20)
    return model, written, torch.randn(2, 6), None


def resmlp():
    model = ResMLP(6, 3, width=16, blocks=4, block_depth=2)
    written = modular.ResMLP(6, 3, width=16, blocks=4, block_depth=2, blocks_mass=2.0)
    return model, written, torch.randn(2, 3, 2), {"input": 1, "head": 1, "blocks.*": 2}


def transformer():
    model = Transformer(11, 5, width=16, heads=2, blocks=3)
    written = modular.GPT(11, context=5, width=16, heads=2, blocks=3)
    return model, written, torch.zeros(2, 5, dtype=torch.long), {"embedding": 1, "head": 1, "*": 5}


@pytest.fixture(
    params=[sequential, resmlp, transformer], scope="module", ids=lambda make: make.__name__
)
def pair(request):
    """The trace of a plain model and the same network as it is written in the algebra, weight for
    weight."""
    torch.manual_seed(0)
    model, written, example, rules = request.param()
    net = trace(
        model.double(), example.double() if example.is_floating_point() else example, masses=rules
    )
    order = {term.name: n for n, term in enumerate(net.terms())}
    assert len(order) == len(written.terms())
    return net, written.double()


def updates(net, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = [net.get_parameter(term.name) for term in net.terms()]
    return {
        term.name: torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        for term, weight in zip(net.terms(), weights, strict=True)
    }


def test_a_plain_model_has_the_attributes_of_the_same_network_in_the_algebra(pair):
    net, written = pair
    assert net.attributes == pytest.approx(written.attributes)
    assert net.sharpness == pytest.approx(written.sharpness)
    for mine, theirs in zip(net.terms(), written.terms(), strict=True):
        assert (mine.mass, mine.sensitivity) == pytest.approx((theirs.mass, theirs.sensitivity))


def test_a_plain_model_has_the_norm_and_the_duality_map_of_the_same_network(pair):
    net, written = pair
    mine, theirs = updates(net), updates(written)
    torch.testing.assert_close(net.norm(mine), written.norm(theirs))
    for function in ("dualize", "normalize"):
        results = getattr(net, function)(mine), getattr(written, function)(theirs)
        for a, b in zip(*(result.values() for result in results), strict=True):
            torch.testing.assert_close(a, b)
    assert net.norm(net.dualize(mine, method="svd")).item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("written", "example"),
    [
        (lambda: modular.ResMLP(6, 3, width=16, blocks=3, block_depth=2), (2, 6)),
        (lambda: modular.ResNet(2, 3, width=4, blocks=3), (2, 2, 6, 6)),
        (lambda: modular.GPT(11, context=5, width=16, heads=2, blocks=2), None),
        (lambda: modular.Structured(12, 6, Kronecker(), mass=3), (2, 12)),
    ],
)
def test_a_network_of_the_algebra_is_what_its_trace_says(written, example):
    written = written()
    net = trace(
        written, torch.zeros(2, 5, dtype=torch.long) if example is None else torch.randn(example)
    )
    assert net.attributes == pytest.approx(written.attributes)
    assert [term.name for term in net.terms()] == [term.name for term in written.terms()]
    for mine, theirs in zip(net.terms(), written.terms(), strict=True):
        assert (mine.mass, mine.sensitivity) == pytest.approx((theirs.mass, theirs.sensitivity))
    written.tare(9.0)
    assert net.mass != pytest.approx(9)  # masses are its own, weights are not
    assert net.get_parameter(net.terms()[0].name) is written.get_parameter(net.terms()[0].name)


class Residual(nn.Module):
    def __init__(self, depth, scaled):
        super().__init__()
        self.layers, self.scaled = nn.ModuleList(plain(8, 8) for _ in range(depth)), scaled

    def forward(self, x):
        depth = len(self.layers)
        for layer in self.layers:
            y = F.relu(layer(x))
            x = (1 - 1 / depth) * x + y / depth if self.scaled else x + y
        return x


def test_sensitivities_of_residual_branches_add():
    half = 1 / math.sqrt(2)
    net = trace(Residual(3, scaled=False), torch.randn(2, 8))
    assert net.sensitivity == pytest.approx((1 + half) ** 3)
    assert [t.sensitivity for t in net.terms()] == pytest.approx(
        [half * (1 + half) ** n for n in (2, 1, 0)]
    )
    net = trace(Residual(3, scaled=True), torch.randn(2, 8))
    assert net.sensitivity == pytest.approx((2 / 3 + half / 3) ** 3)
    assert [t.sensitivity for t in net.terms()] == pytest.approx(
        [half / 3 * (2 / 3 + half / 3) ** n for n in (2, 1, 0)]
    )


def test_sums_in_place_are_those_out_of_place():
    class InPlace(Residual):
        def forward(self, x):
            x = x.clone()
            for layer in self.layers:
                x += F.relu(layer(x), inplace=True)
            return x

    nets = [trace(kind(2, False), torch.randn(2, 8)) for kind in (InPlace, Residual)]
    assert nets[0].attributes == pytest.approx(nets[1].attributes)


def test_a_step_of_muon_is_the_duality_map():
    torch.manual_seed(0)
    model = Transformer(11, 5, width=16, heads=2, blocks=2).double()
    net = trace(model, torch.zeros(2, 5, dtype=torch.long))
    before = copy.deepcopy(dict(model.named_parameters()))
    for owner in (model, net):
        optimizer = Muon(
            owner, lr=0.1, momentum=0.0, nesterov=False, method="svd", masses=masses(net)
        )
        optimizer.zero_grad()
        net(torch.tensor([[1, 2, 3, 4, 5]])).logsumexp(-1).sum().backward()
        step = net.dualize(method="svd")
        for name, weight in model.named_parameters():
            weight.data.copy_(before[name])
        optimizer.step()
        assert len(step) == len(net.terms())
        for name, change in step.items():
            torch.testing.assert_close(before[name] - model.get_parameter(name), 0.1 * change)


def test_the_atoms_hold_the_models_own_layers_and_a_trace_descends():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    net = trace(model, torch.randn(2, 4))
    x = torch.randn(16, 4)
    assert torch.equal(net(x), model(x))
    losses = []
    for _ in range(5):
        loss = (net(x) - x[:, :2]).square().mean()
        model.zero_grad()
        loss.backward()
        net.descend_(0.1)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    net.reset_parameters()
    weights = {term.name: model.get_parameter(term.name) for term in net.terms()}
    assert set(weights) == {"0.weight", "2.weight"}  # a bias has no part in the norm
    norms = [
        math.sqrt(w.shape[1] / w.shape[0]) * torch.linalg.matrix_norm(w, 2)
        for w in weights.values()
    ]
    assert [norm.item() for norm in norms] == pytest.approx([1, 1], rel=1e-4)
    assert net.tare(6.0).mass == 6
    copied = copy.deepcopy(net)
    assert copied.expression.get_parameter("0.linear.weight") is copied.get_parameter("0.weight")
    assert copied.get_parameter("0.weight") is not net.get_parameter("0.weight")


def test_structured_layers_are_composites_of_their_cores():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    dense = trace(model, torch.randn(2, 64))
    net = trace(convert(model, BTT(rank=2)), torch.randn(2, 64))
    assert net.sensitivity == dense.sensitivity
    assert [(t.name, t.mass) for t in net.terms()] == [
        ("0.cores.0", 0.5), ("0.cores.1", 0.5), ("2.cores.0", 0.5), ("2.cores.1", 0.5)
    ]  # fmt: skip
    written = (
        modular.Structured(64, 64, BTT(rank=2))
        @ modular.ReLU()
        @ modular.Structured(64, 64, BTT(rank=2))
    ).double()
    net._orig_mod.double()
    torch.testing.assert_close(net.norm(updates(net)), written.norm(updates(written)))
    assert set(masses(net)) == {"0", "2"}


def test_gpts_and_vits_in_nanogpts_manner_are_typed():
    import train_gpt
    import train_vit

    # attention is scaled by 1 / d, of the sum of three parts
    block = (1 + 3) * (1 + 1 / math.sqrt(2))
    for model, example, entry in (
        (
            train_gpt.GPT(16, 8, 64, 2),
            torch.zeros(2, 8, dtype=torch.long),
            2,
        ),  # tokens and positions
        (
            train_vit.ViT(torch.Size((3, 8, 8)), 4, 10, 64, 2),
            torch.randn(2, 3, 8, 8),
            1,
        ),  # positions are constant
    ):
        net = trace(model, example)
        assert net.sensitivity == pytest.approx(entry * block**2)
        assert net.mass == sum(p.ndim == 2 for p in model.parameters())
        masses(net)
    net = trace(GPT(16, depth=1), torch.zeros(1, 8, dtype=torch.long))
    # 1 / sqrt(d), one head
    assert net.sensitivity == pytest.approx((1 + 3 * math.sqrt(16)) * (1 + 1 / math.sqrt(2)))


def test_attention_scaled_by_c_over_d_has_sensitivity_c():
    torch.manual_seed(0)
    d = 16
    for scale in (1 / d, 4 / d, None):

        class Attended(nn.Module):
            def forward(self, q, k, v, scale=scale):
                return F.scaled_dot_product_attention(q, k, v, scale=scale)

        bound = trace(Attended(), tuple(torch.randn(3, 1, 1, 5, d))).sensitivity / 3
        assert bound == {1 / d: 1, 4 / d: 4, None: 4}[scale]
        for _ in range(50):
            x, dx = torch.randn(2, 3, 1, 1, 5, d, dtype=torch.float64)
            x = x / x.square().mean(-1, keepdim=True).sqrt()
            change = derivative(Attended(), x, dx)
            sizes = [each.square().mean(-1).sqrt().max() for each in (change, *dx)]
            assert sizes[0] <= bound * sum(sizes[1:])


class Bounded(nn.Module):
    """Of operations whose sensitivities are bounds everywhere."""

    def __init__(self):
        super().__init__()
        self.input, self.first, self.second, self.head = (
            plain(6, 16),
            plain(16, 16),
            plain(16, 16),
            plain(32, 3),
        )

    def forward(self, x):
        x = self.input(x)
        x = x + 0.5 * self.first(x).abs()
        y = self.second(x).abs()
        return self.head(torch.cat([x / 3, y - y.mean(-1, keepdim=True)], -1))


def test_a_traced_model_amplifies_no_more_than_it_says():
    model = Bounded().double()
    net = trace(model, torch.randn(2, 6, dtype=torch.float64))
    net.reset_parameters()
    assert net.sensitivity == pytest.approx((1 + 0.5) * (1 / 3 + 1))
    gains = []
    for _ in range(100):
        x, dx = torch.randn(2, 1, 6, dtype=torch.float64)
        change = derivative(model, (x,), (dx,))
        gains.append((change.square().mean() / dx.square().mean()).sqrt().item())
    assert 0.2 * net.sensitivity < max(gains) <= net.sensitivity


def test_unequal_parts_of_a_projection_have_the_sensitivity_of_their_bound():
    class Grouped(nn.Module):
        def forward(self, x):
            return sum(part.mean(-1, keepdim=True) for part in x.split([4, 1, 1], dim=-1))

    assert trace(Grouped(), torch.randn(2, 6)).sensitivity == pytest.approx(
        math.sqrt(6 / 4 + 6 + 6)
    )


@pytest.mark.parametrize(
    ("pool", "shape", "kernel"),
    [
        (nn.MaxPool1d(3), (12,), (3,)),
        (nn.MaxPool2d(2), (8, 8), (2, 2)),
        (nn.MaxPool2d(3, stride=1, padding=1), (8, 8), (3, 3)),  # windows overlap
        (nn.MaxPool2d((1, 3), stride=(1, 2), ceil_mode=True), (8, 8), (1, 3)),
        (lambda x: F.max_pool2d(x, [2]), (8, 8), (2, 2)),
        (nn.MaxPool3d(2), (4, 4, 4), (2, 2, 2)),
    ],
)
def test_max_pooling_amplifies_by_the_root_of_its_window(pool, shape, kernel):
    class Model(nn.Module):
        def forward(self, x):
            return pool(x)

    def norm(x):  # the RMS of the channels, the largest over all else
        return x.square().mean(1).sqrt().max().item()

    torch.manual_seed(0)
    window = math.prod(kernel)
    x = torch.randn(1, window, *shape, dtype=torch.float64)
    net = trace(Model(), x)
    assert net.attributes.gamma == 0.0
    for _ in range(20):
        dx = torch.randn_like(x)
        assert norm(pool(x + dx) - pool(x)) <= net.sensitivity * norm(dx)
    # Every channel has its largest element in a place of its own: the bound is met.
    dx = torch.eye(window, dtype=torch.float64).view(1, window, *kernel)
    assert norm(pool(dx)) / norm(dx) == pytest.approx(net.sensitivity)


def test_gains_count_as_they_are_and_constants_shift():
    class Gained(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc, self.gain = (
                nn.LayerNorm(4),
                nn.Linear(4, 4),
                nn.Parameter(torch.full((4,), 0.1)),
            )
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x):
            return x + self.gain * self.fc(self.norm(x + self.shift))

    model = Gained()
    with torch.no_grad():
        model.norm.weight[1] = -3
    net = trace(model, torch.randn(2, 4))
    assert net.sensitivity == pytest.approx(1 + 0.1 * 3)
    assert [(t.name, t.sensitivity) for t in net.terms()] == [("fc.weight", pytest.approx(0.1))]


def test_a_frozen_layer_has_no_mass():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    net = trace(model, torch.randn(1, 4))
    assert [(t.name, t.mass) for t in net.terms()] == [("0.weight", 0), ("1.weight", 1)]
    assert masses(net) == {"1": 1.0}


def test_modes_are_kept():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
    model[2].eval()
    trace(model, torch.randn(1, 4))
    assert [module.training for module in model.modules()] == [True, True, True, False]
    with pytest.raises(ValueError, match="can not export Sequential"):
        trace(model, torch.randn(1, 5))
    assert [module.training for module in model.modules()] == [True, True, True, False]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = plain(4, 8), plain(4, 8), plain(8, 4)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Sharpened(nn.Module):
    def forward(self, x):
        return x.exp()


def test_what_has_no_known_sensitivity_is_named_with_how_to_declare_it():
    model = nn.Sequential(plain(4, 4), Gated(), Sharpened())
    with pytest.raises(
        ValueError, match=r"silu \(in 1\); mul \(in 1\); exp \(in 2\).*sensitivities="
    ) as error:
        trace(model, torch.randn(1, 4))
    assert "linear" not in str(error.value)
    declared = {torch.ops.aten.silu: 0.5, torch.ops.aten.mul.Tensor: 2.0, Sharpened: (3.0, 1.0)}
    net = trace(model, torch.randn(1, 4), sensitivities=declared)
    assert net.sensitivity == pytest.approx(2 * (0.5 + 1) * 3)
    # gate, up, down, after the first
    assert [t.sensitivity for t in net.terms()] == pytest.approx([9, 3, 6, 3])
    assert math.isnan(net.sharpness.gamma)  # that of silu is not declared
    with pytest.raises(ValueError, match="sensitivities has Gated, but '1' has layers"):
        trace(model, torch.randn(1, 4), sensitivities={Gated: 1.0, Sharpened: 1.0})


def test_masks_that_depend_on_the_input_are_no_inputs():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.fc = nn.Embedding(5, 4), plain(4, 4)

        def forward(self, tokens):
            x = self.embed(tokens).masked_fill((tokens == 0)[..., None], 0.0)
            return self.fc(
                F.scaled_dot_product_attention(
                    x, x, x, attn_mask=(tokens > 0)[:, None], scale=1 / 4
                )
            )

    net = trace(Masked(), torch.arange(5)[None])
    assert [(t.name, t.sensitivity) for t in net.terms()] == [("embed.weight", 3), ("fc.weight", 1)]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = plain(4, 4), plain(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


class Twice(nn.Module):
    def __init__(self, nested=False):
        super().__init__()
        self.a = nn.Sequential(plain(4, 4)) if nested else plain(4, 4)

    def forward(self, x):
        return self.a(self.a(x))


class Zeroed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.gain = plain(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x + self.gain * self.a(x)


class Crossing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = plain(4, 4), plain(4, 4), plain(4, 4)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return self.c(a + b) + a


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Tied, "mass of '.' would count twice: it shares a weight with '.'"),
        (Twice, "mass of 'a' would count twice: it is called twice"),
        (lambda: Twice(nested=True), "mass of 'a.0' would count twice: it is called twice"),
        (Crossing, "mass of 'a' would count twice: the ways from it to the output cross"),
        (
            lambda: StructuredLinear(4, 4, weight_norm=True),
            r"StructuredLinear with gains \(weight_norm=True\)",
        ),
        (lambda: Zeroed(), "mul in Zeroed has sensitivity 0.0, by which the norm divides"),
        (
            lambda: nn.Conv1d(4, 4, 1),
            "Conv1d multiplies by weights of its own in conv1d; only Linear, StructuredLinear",
        ),
        (
            lambda: nn.utils.parametrizations.weight_norm(plain(4, 4)),
            "weight that is no parameter of its own",
        ),
    ],
)
def test_what_the_algebra_has_no_expression_for_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        trace(model(), torch.randn(4, 4))


def test_a_trace_of_a_model_that_was_converted_since_says_so():
    model = nn.Sequential(plain(16, 16), nn.ReLU(), plain(16, 10))
    net = trace(model, torch.randn(2, 16))
    convert(model, BTT(), include=["0"])
    with pytest.raises(ValueError, match="1 of 2 weights are no longer the model's"):
        masses(net)


def test_only_modules_are_traced():
    with pytest.raises(TypeError, match=r"model=function must be a torch.nn.Module"):
        trace(F.relu, torch.randn(1))
