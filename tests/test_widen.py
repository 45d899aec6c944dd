"""`widen` finds the widest model within a budget, `cost` counts a model: against formulas by
hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structlin import BTT, LowRank, Monarch, StructuredLinear, convert, cost, widen
from tests.models import GPT

X = torch.zeros(2, 8)


def build_mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    )


def count_btt(d_in: int, d_out: int) -> int:
    """Parameters of a BTT of rank 1, for widths with factors whose ratio is at most 4."""

    def small(n: int) -> int:
        return max(k for k in range(1, n + 1) if n % k == 0 and k * k <= n)

    return d_in * small(d_out) + d_out * small(d_in)


class Attention(nn.Module):
    """`heads` heads of 8 features, of any width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 24 * heads), nn.Linear(8 * heads, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 8)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


# ---- the width -----------------------------------------------------------------------------------


@pytest.mark.parametrize("match", ["flops", "params"])
@pytest.mark.parametrize("dense", [64, 100, 200])
def test_it_is_the_largest_width_within_the_budget(match, dense):
    def count(width, square):
        weights = 11 * width + square
        return 2 * weights if match == "flops" else weights + 2 * width + 3

    found = widen(build_mlp, BTT(rank=1), dense=dense, match=match, include="2")
    budget = count(dense, dense * dense)
    costs = {d: count(d, count_btt(d, d)) for d in range(16, 1025, 16)}  # none of them is padded
    assert found.width == max(d for d, amount in costs.items() if amount <= budget) < 1024
    assert getattr(found.structured, match) == costs[found.width]
    assert getattr(found.dense, match) == budget


def test_an_example_counts_attention_so_that_fixed_heads_leave_more_for_the_width():
    tokens, dense = 6, 32
    x = torch.zeros(2, tokens, 1)

    def count(width, heads, linear):  # of 2 x 6 tokens
        return 2 * tokens * (2 * linear + 4 * tokens * 8 * heads)

    found = {}
    for kind, heads_of in (("fixed", lambda width: 4), ("scaled", lambda width: width // 8)):

        def build(width, heads_of=heads_of):
            return nn.Sequential(nn.Linear(1, width), Attention(width, heads_of(width)))

        found[kind] = widen(build, BTT(), dense=dense, example=x, multiple=8, include="1.*")
        width = found[kind].width
        heads = heads_of(width)
        assert found[kind].dense.flops == count(dense, 4, dense + 4 * dense * 32)
        linear = width + count_btt(width, 24 * heads) + count_btt(8 * heads, width)
        assert found[kind].structured.flops == count(width, heads, linear)
    assert found["fixed"].width > found["scaled"].width > dense


def test_widths_that_the_structure_or_the_model_refuses_are_passed_over():
    def build(width):
        assert width % 48 == 0, "heads"
        return build_mlp(width)

    found = widen(build, Monarch(blocks=4), dense=192, include="2", multiple=16)
    costs = {d: 2 * (11 * d + 2 * d * d // 4) for d in range(48, 2048, 48)}
    budget = 2 * (11 * 192 + 192 * 192)
    assert found.width == max(d for d, amount in costs.items() if amount <= budget)


def test_a_model_may_be_the_budget():
    model = nn.Linear(128, 128)
    found = widen(lambda width: nn.Linear(width, width), LowRank(rank=8), dense=model, multiple=1)
    assert found.width == 128 * 128 // 16
    assert found.dense.params == 128 * 129


def test_the_model_that_is_built_has_the_width_the_options_and_the_cost():
    tokens = torch.zeros(1, 5, dtype=torch.long)
    found = widen(GPT, BTT(rank=2), dense=64, example=tokens, include="ffn", weight_norm=True)
    model = found.build()
    layers = [module for module in model.modules() if isinstance(module, StructuredLinear)]
    assert len(layers) == 4
    assert all(layer.gains is not None for layer in layers)
    assert model.ln_f.weight.shape == (found.width,)
    assert cost(model, tokens) == found.structured
    assert cost(GPT(64), tokens) == found.dense
    assert str(found.width) in str(found)


def test_a_model_that_the_meta_device_cannot_build_or_run_is_built_for_real():
    class Model(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.scales = [scale.item() for scale in torch.linspace(0, 1, 2)]
            self.linear = nn.Linear(width, width)

        def forward(self, x):
            return self.linear(x) if x.sum().item() < 1e9 else x

    x = torch.zeros(3, 1).expand(3, 64)
    with pytest.raises(RuntimeError):  # which width the example has is the model's affair
        widen(Model, BTT(), dense=32, example=x)
    found = widen(Model, BTT(), dense=64, match="params", multiple=32)
    plain = widen(
        lambda width: nn.Linear(width, width), BTT(), dense=64, match="params", multiple=32
    )
    assert found.width == plain.width
    assert found.structured == plain.structured


# ---- counting ------------------------------------------------------------------------------------


def test_a_count_is_of_the_whole_model_and_of_a_shared_parameter_once():
    model, tokens = GPT(width=16, depth=1, vocabulary=10, tied=True), torch.zeros(2, 7).long()
    linear = 12 * 16 * 16 + 16 * 10
    assert cost(model, tokens).flops == 14 * (2 * linear + 4 * 7 * 16)
    assert cost(model).flops == 2 * linear
    assert cost(model).params == sum(p.numel() for p in model.parameters())


def test_torchs_encoder_layer_and_batch_norm_are_counted_and_left_as_they_were():
    layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    assert cost(layer, torch.zeros(1, 3, 8)).flops == 3 * (2 * (4 * 64 + 2 * 128) + 4 * 3 * 8)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert cost(model, torch.ones(1, 4)).flops == 32
    assert model.training
    assert model[1].num_batches_tracked == 0


def test_a_structured_model_costs_the_same_on_a_device_and_on_none():
    x = torch.zeros(3, 64)
    with torch.device("meta"):
        nowhere = convert(build_mlp(64), BTT(rank=2), include="2", init="mup")
    here = convert(build_mlp(64), BTT(rank=2), include="2")
    assert cost(here, torch.zeros(3, 8)) == cost(nowhere, torch.zeros(3, 8))
    assert cost(here, {"input": x[:, :8]}) == cost(here, [x[:, :8]])


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "part"),
    [
        ({"build": nn.Linear(4, 4)}, TypeError, "must be a function from a width to a model"),
        ({"build": lambda width: width}, TypeError, "build(64) returned 64: it must return a"),
        ({"build": lambda width: build_mlp(32)}, ValueError, "build must make a wider model"),
        (
            {"dense": (96, 192)},
            TypeError,
            "dense=(96, 192) must be an integer",
        ),
        (
            {"dense": True},
            TypeError,
            "dense=True must be an integer",
        ),
        ({"dense": 0}, ValueError, "dense=0 must be at least 1"),
        ({"multiple": 2.5}, TypeError, "multiple=2.5 must be an integer"),
        ({"multiple": 2**21}, ValueError, "multiple=2097152 must be at most 1048576"),
        ({"match": "time"}, ValueError, "match='time' is unknown; there are flops, params"),
        (
            {"dense": 2},
            ValueError,
            "dense's 52 FLOPs: no multiple of 16 will do: BTT(",
        ),
        ({"dense": nn.ReLU()}, ValueError, "model=ReLU has no parameter"),
        ({"includes": "2"}, TypeError, "widen() got an unexpected keyword argument 'includes'"),
        ({"init": "best"}, ValueError, "init='best' is unknown"),
        ({"weight_norm": 1}, TypeError, "weight_norm=1 is of type int"),
        ({"include": "3"}, ValueError, "BTT(rank=1) fits none; the last refusal"),
    ],
)
def test_bad_input_is_named(change, error, part):
    arguments = {"build": build_mlp, "structure": BTT(), "dense": 64} | change
    with pytest.raises(error) as raised:
        widen(**arguments)
    assert part in str(raised.value)


def test_a_width_at_which_the_model_divides_by_zero_is_passed_over():
    def build(width: int) -> nn.Module:
        heads = width // 32  # none at width 16
        return build_mlp(width // heads * heads)

    def build_even(width: int) -> nn.Module:
        if width < 32:
            raise ValueError("no head")
        return build(width)

    found, wanted = (widen(each, BTT(), dense=64) for each in (build, build_even))
    assert (found.width, found.structured) == (wanted.width, wanted.structured)
    assert found.width > 64


def test_another_error_of_the_users_function_is_theirs_with_the_width():
    def build(width: int) -> nn.Module:
        if width >= 256:
            raise KeyError("no heads for it")
        return build_mlp(width)

    with pytest.raises(KeyError, match="no heads for it") as raised:
        widen(build, BTT(), dense=128)
    if hasattr(raised.value, "add_note"):  # from Python 3.11 on
        assert "structlin.widen called your function with width=256" in raised.value.__notes__


def test_a_model_in_the_place_of_its_function_is_named_in_one_short_line():
    with pytest.raises(TypeError) as raised:
        widen(nn.Sequential(*(nn.Linear(4, 4) for _ in range(50))), dense=64)
    assert str(raised.value) == "build=Sequential must be a function from a width to a model"


def test_where_no_width_fits_the_last_refusal_is_named_with_its_width():
    def build(width: int) -> nn.Module:
        if width != 64:
            raise ValueError("heads are 64 wide")
        return build_mlp(width)

    with pytest.raises(ValueError, match=r"at width \d+, was: ValueError: heads are 64 wide"):
        widen(build, BTT(), dense=64, multiple=48)
