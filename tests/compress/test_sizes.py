"""What each layer keeps: curves and the choice among them, in plans; batches, and bad arguments."""

import copy
import math
import random
import re
from fractions import Fraction
from itertools import cycle, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structlin import (
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    Kronecker,
    LowRank,
    Monarch,
    Split,
    compress,
    plan_compression,
    summary,
)
from structlin._compress import replay, sensitivity, sizes
from structlin._compress.compress import measure
from structlin._compress.knapsack import (
    choose,
    choose_by_table,
    choose_greedily,
    sum_of_harms,
)
from structlin._compress.sizes import Share, allocate
from structlin._projection.curve import Curve, list_sizes, measure_curve
from structlin._projection.solve import project, relative_error
from structlin._structure.families import Family
from tests.models import GPT, snapshot

FAMILIES = (
    LowRank(rank=1),
    BTT(),
    Monarch(),
    BlockDiagonal(blocks=2),
    TT(rank=1),
    Split(split=2, of=BTT()),
)


def decaying(rows: int, columns: int, power: float) -> Tensor:
    """A random matrix whose singular values fall as 1 / k^power."""
    k = min(rows, columns)
    left, right = (torch.linalg.qr(torch.randn(n, k).double()).Q for n in (rows, columns))
    return (left / torch.arange(1, k + 1) ** power) @ right.mT


def draw_curves(family: Family) -> list[Curve]:
    """Of weights and covariances of spectra between flat and steep."""
    torch.manual_seed(0)
    roots = [decaying(n, n, power) for n, power in ((24, 0.1), (24, 1.5), (48, 0.7))]
    weights = [decaying(m, n, p) for m, n, p in ((24, 24, 0.2), (48, 24, 1.0), (24, 48, 1.8))]
    pairs = zip(weights, roots, strict=True)
    return [
        measure_curve(weight, list_sizes(family, *weight.shape[::-1], "params"), root @ root.mT)
        for weight, root in pairs
    ]


def sum_up(curves: list[Curve], sizes: list, harms: list[float]) -> float:
    found = zip(curves, sizes, harms, strict=True)
    return sum(harm * curve.errors[curve.sizes.index(size)] for curve, size, harm in found)


@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_the_errors_of_low_rank_are_the_singular_values_that_are_left_out(shape, weighed):
    torch.manual_seed(0)
    weight, root = torch.randn(shape).double(), torch.randn(shape[1], shape[1]).double()
    covariance = root @ root.mT / 100 if weighed else None
    values = torch.linalg.svdvals(weight @ root / 10 if weighed else weight).square()
    sizes = list_sizes(LowRank(rank=1), *shape[::-1], "params")
    curve = measure_curve(weight, sizes, covariance)
    assert curve.whole == pytest.approx(values.sum().item(), rel=1e-4)
    ranks = [size.family.rank for size in curve.sizes[:-1]]
    assert ranks == [1, 2, 3, 4, 5, 6, 7]  # 8 costs more than dense
    expected = [values[rank:].sum().item() for rank in ranks]
    assert curve.errors == pytest.approx([*expected, 0.0], rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_sizes_rise_in_cost_and_only_dense_costs_as_much_as_dense(family):
    for widths in ((24, 48), (48, 48), (384, 96)):
        for of in ("params", "flops"):
            sizes = list_sizes(family, *widths, of)
            costs = [size.cost for size in sizes]
            assert costs == sorted(set(costs))
            assert sizes[-1].family == Dense()
            assert costs[-1] == widths[0] * widths[1] * (1 if of == "params" else 2)
            assert all(size.family != Dense() for size in sizes[:-1])


@pytest.mark.parametrize(
    ("width", "aligned"),
    [(384, [*range(8, 192, 8)]), (2048, [*range(8, 513, 8), *range(576, 1024, 64)])],
)
def test_ranks_are_multiples_of_eight_where_there_is_room_and_of_64_where_there_is_much(
    width, aligned
):
    sizes = list_sizes(LowRank(rank=1), width, width, "params")[:-1]
    assert [size.family.rank for size in sizes] == [*range(1, 8), *aligned]


@pytest.mark.parametrize("family", [BTT(), LowRank(rank=1), Monarch()], ids=str)
def test_to_keep_more_is_never_worse_by_one_percent_and_no_share_is_exceeded(family):
    curves = draw_curves(family)
    total = sum(curve.sizes[-1].cost for curve in curves)
    for harms in ([1.0, 1.0, 1.0], [1.0, 30.0, 0.1]):
        last = float("inf")
        for percent in range(35, 101):
            sizes = allocate(curves, percent / 100, harms)
            costs = [size.cost for size in sizes]
            assert sum(costs) <= percent / 100 * total
            error = sum_up(curves, sizes, harms)
            assert error <= last * 1.01
            last = error
        assert last == 0
        assert all(size.family == Dense() for size in sizes)


@pytest.mark.parametrize("family", [BTT(), LowRank(rank=1)], ids=str)
@pytest.mark.parametrize("keep", [0.3, 0.4, 0.5, 0.6, 0.7, 0.9])
def test_the_choice_is_within_one_percent_of_the_best_of_all(keep, family):
    curves, harms = draw_curves(family), [1.0, 3.0, 0.5]
    limit = keep * sum(curve.sizes[-1].cost for curve in curves)
    choices = product(*(curve.sizes for curve in curves))
    fitting = [sizes for sizes in choices if sum(size.cost for size in sizes) <= limit]
    best = min(sum_up(curves, list(sizes), harms) for sizes in fitting)
    harm = sum_up(curves, allocate(curves, keep, harms), harms)
    assert best * (1 - 1e-9) <= harm <= 1.01 * best
    assert choose(curves, limit, harms).bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_the_table_finds_the_best_of_all_choices_and_the_bound_lies_below_it(seed):
    draw = random.Random(seed)
    size = list_sizes(LowRank(rank=1), 16, 16, "params")[0]
    curves = []
    for _ in range(4):
        costs = sorted(draw.sample(range(1, 60), draw.randint(2, 6)))
        errors = sorted((draw.random() ** 3 for _ in costs), reverse=True)
        sizes = [size._replace(cost=cost) for cost in costs]
        curves.append(Curve(sizes, errors, 1.0))
    harms = [draw.choice([0.0, 0.1, 1.0, 10.0]) for _ in curves]
    least = sum(curve.sizes[0].cost for curve in curves)
    most = sum(curve.sizes[-1].cost for curve in curves)
    limit = draw.uniform(least, most)
    sums = []
    for options in product(*(range(len(curve.sizes)) for curve in curves)):
        chosen = [curve.sizes[n].cost for curve, n in zip(curves, options, strict=True)]
        if sum(chosen) <= limit:
            harm = (h * c.errors[n] for h, c, n in zip(harms, curves, options, strict=True))
            sums.append(sum(harm))
    options = choose_by_table(curves, limit, harms)
    assert sum(c.sizes[n].cost for c, n in zip(curves, options, strict=True)) <= limit
    harm = sum(h * c.errors[n] for h, c, n in zip(harms, curves, options, strict=True))
    assert harm == pytest.approx(min(sums), rel=1e-12)
    choice = choose(curves, limit, harms)
    assert choice.bound <= min(sums) * (1 + 1e-9)
    assert min(sums) * (1 - 1e-9) <= choice.harm <= 1.01 * min(sums) + 1e-15


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_rounded_costs_lose_nothing_where_the_greedy_choice_does(seed):
    """As for the 210 layers of SmolLM2 in Monarch, whose costs are multiples of a small number.
    Where each was rounded up the choice lost more than the greedy one, for it left room."""
    draw = random.Random(seed)
    curves = []
    for widths in [(576, 576), (192, 576), (1536, 576), (576, 1536)] * 15:
        sizes = list_sizes(Monarch(), *widths, "params")
        scale = draw.random()
        gains = [scale * draw.random() ** 3 for _ in sizes[1:]]
        errors = [sum(gains[n:]) for n in range(len(sizes))]
        curves.append(Curve(sizes, errors, errors[0]))
    harms = [1.0] * len(curves)
    limit = 0.8 * sum(curve.sizes[-1].cost for curve in curves)
    rounded, exact = (
        sum_of_harms(curves, choose_by_table(curves, limit, harms, cells), harms)
        for cells in (1 << 12, 1 << 18)
    )
    assert choose_greedily(curves, limit, harms).harm > 1.01 * exact
    assert rounded == pytest.approx(exact, rel=1e-3)
    chosen = choose(curves, limit, harms)
    assert chosen.harm <= 1.01 * exact
    costs = [c.sizes[n].cost for c, n in zip(curves, chosen.options, strict=True)]
    assert sum(costs) <= limit


def test_a_layer_that_does_no_harm_stays_at_its_smallest_size():
    curves = draw_curves(LowRank(rank=1))
    smallest = curves[1].sizes[0]
    assert allocate(curves, 0.5, [1.0, 0.0, 1.0])[1] == smallest
    assert allocate(curves, 0.5, [1.0, 100.0, 1.0])[1] != smallest


def test_a_size_that_is_no_better_is_passed_over():
    sizes = list_sizes(LowRank(rank=1), 16, 16, "params")
    errors = [0.5, 0.6, 0.5, 0.1, 0.1, 0.1, 0.1, 0.0]
    (size,) = allocate([Curve(sizes, errors, 1.0)], 0.7, [1.0])
    assert size.family == LowRank(rank=4)


# ---- in a model ----------------------------------------------------------------------------------

TOKENS = torch.arange(48).reshape(4, 12)


@pytest.mark.parametrize(
    "batches",
    [
        [TOKENS],
        [(TOKENS,)],
        [{"tokens": TOKENS}],
        (batch for batch in TOKENS.split(2)),
    ],
)
def test_batches_are_of_any_kind(batches):
    planned = plan_compression(GPT(), BTT(), batches, include="*mlp.c_fc", keep=None)
    assert all(0 < error < 1 for error in planned.errors.values())


@pytest.mark.parametrize("count", ["params", "flops"])
def test_all_layers_that_no_size_fits_are_named_with_what_leaves_them_dense(count):
    widths = (64, 128), (128, 10), (10, 6)
    model = nn.Sequential(*(nn.Linear(*each) for each in widths))
    before = snapshot(model)
    named = r"'1' \(Monarch of 128 -> 10\), '2' \(Monarch of 10 -> 6\); exclude=\['1', '2'\]"
    with pytest.raises(ValueError, match=named):
        compress(model, Monarch(blocks=2), [torch.randn(200, 64)], count=count)
    assert snapshot(model) == before
    compress(model, Monarch(blocks=2), [torch.randn(200, 64)], count=count, exclude=["1", "2"])


ROW = torch.arange(64.0).cos()[None]


@pytest.mark.parametrize(
    ("batch", "bias", "warning"),
    [
        (
            torch.zeros(30, 64),
            True,
            r"no input that varies reached 0, 2: projected by weight alone",
        ),
        (torch.zeros(30, 64), False, r"no input that varies reached 0, 2"),
        (ROW, True, r"no input that varies reached 0, 2"),
        (ROW.expand(30, 64), True, r"no input that varies reached 0, 2"),
        (ROW, False, r"far fewer tokens .*: 0 \(1 of 64\), 2 \(1 of 128\); give more batches"),
        (ROW * torch.arange(3.0)[:, None], True, r"far fewer tokens .*: 0 \(3 of 64\)"),
    ],
)
@pytest.mark.parametrize("allocation", ["sensitivity", "error"])
def test_of_batches_that_tell_little_it_warns_and_spends_what_is_kept(
    batch, bias, warning, allocation
):
    torch.manual_seed(0)
    widths = (64, 128), (128, 64)
    first, second = (nn.Linear(*each, bias=bias) for each in widths)
    model = nn.Sequential(first, nn.GELU(), second)
    with pytest.warns(UserWarning, match=warning):
        planned = plan_compression(model, LowRank(rank=1), [batch], allocation=allocation)
    assert all(0 < error < 1 for error in planned.errors.values())
    if allocation == "error":  # both layers are alike, and so few tokens tell no difference
        assert [decision.structure.rank for decision in planned.decisions] == [16, 24]
    assert summary(planned.apply()).params > 0.37 * 2 * 64 * 128


def by_weight(model, family, **options):
    """The plan without data: each layer's error counts alike."""
    return plan_compression(model, family, None, allocation="error", **options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batches": TOKENS}, TypeError, "batches=Tensor must be an iterable of batches"),
        ({"batches": 3}, TypeError, "batches=3 must be an iterable"),
        ({"batches": [(TOKENS, TOKENS)]}, TypeError, r"batches: .* give the inputs alone"),
        ({"batches": [{"y": TOKENS}]}, TypeError, r"batches: .*missing a required argument"),
        ({"batches": lambda model: None}, TypeError, "batches=.* must be an iterable"),
        ({"allocation": "loss"}, ValueError, "allocation='loss' is unknown; there are sensitivity"),
        ({"batches": None}, ValueError, "allocation='sensitivity' needs batches"),
        ({"init": "mup"}, TypeError, "init"),
        ({"zero_init": "*c_proj"}, TypeError, "zero_init"),
        ({"keep": 0}, ValueError, "keep=0 must be a fraction"),
        ({"keep": 1.5}, ValueError, "keep=1.5 must be a fraction"),
        ({"keep": True}, TypeError, "keep=True must be a fraction"),
        ({"keep": "half"}, TypeError, "keep='half' must be a fraction"),
        ({"keep": 0.01}, ValueError, r"keep=0.01 is .* keep=0\.\d+ or more"),
        (
            {"keep": 0.5, "structure": Kronecker()},
            ValueError,
            r"keep: Kronecker\(\) has no sizes to choose from; keep=None keeps it",
        ),
        (
            {"structure": BTT().activate()},
            ValueError,
            "^compress needs a matrix, and a structure with between='silu' is none",
        ),
        (
            {"structure": BTT().activate(), "keep": None},
            ValueError,
            "^layer 'h.0.attn.c_attn': compress needs a matrix",
        ),
        ({"structure": Dense().structure(256, 256)}, ValueError, "no size to choose; keep=None"),
        (
            {"keep": 0.5, "count": "macs"},
            ValueError,
            "count='macs' is unknown; there are params, flops",
        ),
        (
            {"keep": None, "count": "flops"},
            ValueError,
            "count='flops' goes with a fraction to keep, say keep=0.5",
        ),
        (
            {"keep": 0.01, "count": "flops"},
            ValueError,
            "FLOPs per token; the smallest structures",
        ),
        ({"structure": [BTT(), LowRank(rank=1)]}, TypeError, "must be a family such as"),
        ({"untie": True}, ValueError, "untie=True: no layer that is converted shares its weight"),
    ],
)
def test_bad_arguments_are_refused_and_the_model_stays_as_it_was(arguments, error, message):
    model = GPT()
    before = snapshot(model)
    given = {"structure": BTT(), "batches": [TOKENS], **arguments}
    with pytest.raises(error, match=message):
        compress(model, **given)
    assert snapshot(model) == before
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())


def test_a_share_may_be_numpys_or_a_fraction():
    model = GPT()
    plain = str(by_weight(model, BTT(), keep=0.5))
    for keep in (np.float32(0.5), np.float64(0.5), Fraction(1, 2)):
        assert str(by_weight(model, BTT(), keep=keep)) == plain


def test_one_measurement_serves_every_share():
    model, batches, options = GPT(), [TOKENS], {"include": "*mlp*", "progress": False}
    measured = measure(
        model, BTT(), batches, Share(0.4), None, False, include="*mlp*",
        exclude=(), overrides=None, untie=False,
    )  # fmt: skip
    for keep, refine in ((0.8, 0), (0.4, 2), (0.6, 0)):
        planned = measured.plan(Share(keep), refine, progress=False)
        alone = plan_compression(model, BTT(), batches, keep=keep, refine=refine, **options)
        assert planned.errors == alone.errors
        assert planned.blocks == alone.blocks
        assert str(planned) == str(alone)


def test_a_share_of_flops_is_kept_where_parameters_are_shared_and_the_plan_shows_the_choice():
    dense = 4 * 64 * 256  # parameters; a dense layer has twice as many FLOPs per token
    used = {}
    for of in ("params", "flops"):
        torch.manual_seed(0)
        planned = by_weight(GPT(), TT(rank=1), include="ffn", keep=0.5, count=of)
        chosen = [decision.resolved for decision in planned.decisions if decision.resolved]
        used[of] = (
            sum(new.params for new in chosen) / dense,
            sum(new.flops for new in chosen) / (2 * dense),
        )
        rows = [row.split() for row in str(planned).splitlines() if "TT(rank=" in row]
        flops = sum(int(row[9].replace(",", "")) for row in rows)  # a row has alike layers' sum
        assert flops == sum(new.flops for new in chosen)
    assert used["params"][0] <= 0.5 < used["params"][1]
    assert used["flops"][1] <= 0.5
    assert used["flops"][0] < used["params"][0]


def test_the_smallest_share_that_the_error_names_works():
    with pytest.raises(ValueError, match="or more") as refused:
        by_weight(GPT(), BTT(), keep=0.001, count="flops")
    least = float(re.search(r"keep=(0\.\d+) or more", str(refused.value))[1])
    by_weight(GPT(), BTT(), keep=least, count="flops")


@pytest.mark.parametrize(
    ("family", "most"), [(BTT(), 1.6), (Monarch(blocks=4), 1.6), (BTT(cores=3), 2.0)]
)
def test_a_curve_knows_what_alternating_least_squares_leaves(family, most):
    torch.manual_seed(0)
    weight, covariance = torch.randn(64, 64), (torch.randn(300, 64) @ torch.randn(64, 64)).T.cov()
    output = torch.linspace(0.1, 2.0, 64)
    curve = measure_curve(weight, list_sizes(family, 64, 64, "params"), covariance, output)
    metric = {"covariance": covariance, "output": output}
    sizes, errors = curve.sizes[:-1], curve.errors[:-1]
    for size, error in zip(sizes, errors, strict=True):
        if size.cost > curve.sizes[-1].cost / 16:
            cores = project(weight, size.structure, **metric)
            left = relative_error(weight, size.structure, cores, **metric) ** 2
            assert 1 / most < error / (curve.whole * left) < most


def test_layers_with_an_override_keep_it_and_are_not_counted():
    planned = by_weight(
        GPT(), BTT(), include="ffn", keep=0.5, overrides={"h.0.mlp.c_fc": LowRank(rank=3)}
    )
    chosen = {
        decision.layer.name: decision.structure
        for decision in planned.decisions
        if decision.structure
    }
    assert chosen.pop("h.0.mlp.c_fc") == LowRank(rank=3)
    used = sum(
        decision.resolved.params for decision in planned.decisions if decision.layer.name in chosen
    )
    assert used <= 0.5 * 3 * 64 * 256


def test_split_goes_with_keep_and_the_plan_says_so():
    planned = by_weight(GPT(), Split(split=3, of=BTT()), include="*c_attn", keep=0.5)
    assert "3 x BTT(rank=" in str(planned)
    model = planned.apply()
    assert model.h[0].attn.c_attn.label.startswith("3 x BTT(rank=")
    model(TOKENS)


def test_a_share_that_no_sizes_reach_is_named_before_the_model_runs():
    model = GPT()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model need not run"))
    for allocation in ("sensitivity", "error"):
        with pytest.raises(ValueError, match=r"keep=0\.001.* or more"):
            plan_compression(model, BTT(), [TOKENS], keep=0.001, allocation=allocation)


def test_a_layer_that_stays_dense_is_the_models_own_and_the_plan_says_so():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(64, 1) @ torch.randn(1, 16))
    planned = by_weight(model, LowRank(rank=1), keep=0.9, include="*")
    assert [decision.structure for decision in planned.decisions] == [LowRank(rank=1), None]
    assert planned.decisions[1].reason == "dense: within what is kept"
    assert "dense: within what is kept" in str(planned)
    last = model[2]
    assert planned.apply()[2] is last


@pytest.mark.parametrize("keep", [0.5, 0.3])
def test_of_a_model_without_values_all_layers_keep_about_the_same_share(keep):
    model, options = GPT().to("meta"), {"keep": keep, "allocation": "error"}
    planned = plan_compression(model, LowRank(rank=1), None, **options)
    chosen = [each for each in planned.decisions if each.resolved is not None]
    shares = [d.resolved.params / (d.layer.in_features * d.layer.out_features) for d in chosen]
    assert shares == pytest.approx([keep] * len(chosen), abs=0.15)  # as much as 8 ranks
    assert not planned.errors
    assert "LowRank(rank=" in str(planned)
    with pytest.raises(ValueError, match=r"layer 'h\.0\..*' was on the meta device"):
        planned.apply()
    with pytest.raises(ValueError, match="is on the meta device and has no values to keep"):
        plan_compression(model, LowRank(rank=1), [torch.arange(3)], **options)


# ---- errors of a block, measured where the prediction does not hold ------------------------------


class Chain(nn.Module):
    """Blocks of one linear layer each, of falling singular values."""

    def __init__(self, scales, between, turned=True):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16, bias=False), between()) for _ in scales
        )
        for block, scale in zip(self.blocks, scales, strict=True):
            turn = torch.linalg.qr(torch.randn(16, 16)).Q if turned else torch.eye(16)
            block[0].weight.data = turn * (scale * torch.arange(1, 17) ** -0.7)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def change(dense, model, x):
    with torch.no_grad():
        y = dense(x)
        return ((model(x) - y).square().sum() / y.square().sum()).item()


@pytest.fixture
def ratios(monkeypatch):
    found = []
    measure = sizes._measure_ratios

    def spy(*args):
        found.append(measure(*args))
        return found[-1]

    monkeypatch.setattr(sizes, "_measure_ratios", spy)
    return found


def test_of_linear_blocks_the_prediction_holds_and_measuring_ends(ratios, monkeypatch):
    monkeypatch.setattr(sensitivity, "PRIOR_TOKENS", 0)
    torch.manual_seed(0)
    model, x = Chain([1.0] * 5, nn.Identity, turned=False), torch.randn(4000, 16)
    compress(model, LowRank(rank=1), x.split(500), keep=0.5, include="*")
    assert len(ratios) == 2
    assert all(abs(ratio - 1) < sizes.TOLERANCE for own in ratios for ratio in own)


def test_a_bias_carries_the_mean_of_an_error_where_harm_is_measured(ratios, monkeypatch):
    monkeypatch.setattr(sensitivity, "PRIOR_TOKENS", 0)
    torch.manual_seed(0)
    model = Chain([1.0] * 5, nn.Identity, turned=False)
    for block in model.blocks:
        block[0].bias = nn.Parameter(torch.zeros(16))
    x = 10 + torch.randn(4000, 16)  # far from zero
    compress(model, LowRank(rank=1), x.split(500), keep=0.5, include="*")
    assert len(ratios) == 2
    assert all(abs(ratio - 1) < sizes.TOLERANCE for own in ratios for ratio in own)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_where_tanh_bounds_what_errors_do_the_choice_is_nearer_the_best(seed, ratios, monkeypatch):
    torch.manual_seed(seed)
    dense, x = Chain([30.0, 1.0], nn.Tanh), torch.randn(4000, 16)
    batches = x.split(500)
    found = []
    for ranks in product(range(1, 9), repeat=2):
        if sum(ranks) == 8:
            chosen = {f"blocks.{n}.0": LowRank(rank=rank) for n, rank in enumerate(ranks)}
            model = copy.deepcopy(dense)
            compress(model, LowRank(rank=1), batches, overrides=chosen, keep=None, include="*")
            found.append(change(dense, model, x))
    options = {"keep": 0.5, "include": "*"}
    own = change(dense, compress(copy.deepcopy(dense), LowRank(rank=1), batches, **options), x)
    monkeypatch.setattr(sizes, "_correct_curves", lambda replay, offers, curves, *_: curves)
    plain = change(dense, compress(copy.deepcopy(dense), LowRank(rank=1), batches, **options), x)
    assert max(ratios[0]) < 0.5
    assert own <= 1.2 * min(found)
    assert own < plain


class Residual(nn.Module):
    """Blocks with biases, of two layers each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)
        )

    def forward(self, x, attention_mask=None):
        for block in self.blocks:
            x = x + block(x)
        return x if attention_mask is None else x * attention_mask[..., None]


def find_ratios(ratios, model, batches):
    ratios.clear()
    plan_compression(model, LowRank(rank=1), batches, keep=0.5, include="*", progress=False)
    return [ratio for own in ratios for ratio in own]


def test_rows_that_come_one_by_one_have_the_harm_of_rows_that_come_together(ratios):
    torch.manual_seed(0)
    model, x = Residual(), 2 + torch.randn(8, 16)
    together = find_ratios(ratios, model, [x])
    apart = find_ratios(ratios, model, x.split(1))
    assert all(0.5 < a / b < 2 for a, b in zip(apart, together, strict=True))  # the probes differ
    assert find_ratios(ratios, model, list(x)) == apart  # vectors


@pytest.mark.parametrize("padding", [100.0, math.nan])
def test_padding_changes_no_measured_harm(ratios, padding):
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(4, 8, 16)
    plain = {"x": x, "attention_mask": torch.ones(4, 8)}
    padded = {
        "x": torch.cat([x, torch.full((4, 24, 16), padding)], 1),
        "attention_mask": torch.cat([torch.ones(4, 8), torch.zeros(4, 24)], 1),
    }
    expected = find_ratios(ratios, model, [plain])
    assert find_ratios(ratios, model, [padded]) == pytest.approx(expected, rel=1e-3)


def test_where_outputs_with_errors_are_not_finite_the_prediction_stands(ratios, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(sizes, "measure_change", lambda *_: next(harms))
    harms = cycle([math.nan, math.inf])
    model, x = Chain([1.0] * 3, nn.Identity), torch.randn(400, 16)
    compress(model, LowRank(rank=1), [x], keep=0.5, include="*")
    assert ratios == [[1.0, 1.0]] * 2


def test_where_errors_change_the_shape_of_an_output_the_prediction_stands(ratios):
    class Positive(Residual):
        def forward(self, x):
            y = super().forward(x)
            return y[y[:, 0] > 0]

    class Named(Residual):
        def forward(self, x):
            y = super().forward(x)
            return {str(n): row for n, row in enumerate(y) if row[0] > 0}

    torch.manual_seed(0)
    x = torch.randn(64, 16)
    for kind in (Positive, Named):
        assert set(find_ratios(ratios, kind(), [x])) == {1.0}


def test_a_token_that_is_impossible_before_counts_nothing():
    torch.manual_seed(0)
    before, after = torch.randn(2, 5, 8, dtype=torch.double)
    expected = 2 * F.kl_div(
        after.log_softmax(-1), before.log_softmax(-1), reduction="sum", log_target=True
    )
    masked = [torch.cat([logits, torch.full((5, 2), -math.inf)], -1) for logits in (before, after)]
    for pair in ((before, after), masked):
        found = sizes.measure_change(*pair, "divergence", [])
        assert found == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("place", [0, 1])
def test_a_batch_without_tokens_is_passed_over_where_harm_is_measured(place):
    class Logits(GPT):
        def forward(self, tokens):
            return {"logits": super().forward(tokens)}

    batches = [TOKENS, TOKENS]
    batches.insert(place, TOKENS[:0])
    planned = plan_compression(Logits(), LowRank(rank=1), batches, keep=0.5)
    assert all(0 < error < 1 for error in planned.errors.values())
    nothing = torch.zeros(0, 8)
    assert sizes.measure_change(nothing, nothing, "divergence", []) == 0


def test_the_harm_of_many_rows_is_estimated_from_some_for_all(monkeypatch):
    torch.manual_seed(0)
    before, change = torch.randn(2, 4000, 8, dtype=torch.double)
    after = before + 0.1 * change
    expected = 2 * F.kl_div(
        after.log_softmax(-1), before.log_softmax(-1), reduction="sum", log_target=True
    )
    monkeypatch.setattr(sensitivity, "MEASURED_ROWS", 1000)
    found = sizes.measure_change(before, after, "divergence", [])
    assert found == pytest.approx(expected.item(), rel=0.1)
    assert found != pytest.approx(expected.item(), rel=1e-6)  # not all rows were measured


def test_no_more_calls_are_checked_than_have_enough_rows_and_the_dense_model_runs_once(monkeypatch):
    torch.manual_seed(0)
    model = Chain([30.0] * 4, nn.Tanh)
    runs = []
    run = replay.Replay.run

    def count(self, call, layers=(), *args, **options):
        runs.append(len(list(layers)))
        return run(self, call, layers, *args, **options)

    checked = []
    measure = sizes._measure_ratios

    def spy(*args):
        before = len(runs)
        found = measure(*args)
        checked.append(runs[before:])
        return found

    monkeypatch.setattr(replay.Replay, "run", count)
    monkeypatch.setattr(sizes, "_measure_ratios", spy)
    for rows, calls in ((100, 4), (1024, 2), (3000, 1)):
        checked.clear()
        batches = torch.randn(8, rows, 16).unbind()
        compress(copy.deepcopy(model), LowRank(rank=1), batches, keep=0.5, include="*")
        assert len(checked) >= 2
        # two shares of each call with errors in one layer, and no run of the dense model
        assert all(found == [1] * (2 * calls) for found in checked)
