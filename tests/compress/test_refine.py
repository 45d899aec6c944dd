"""Refinement: each block, fitted to the dense block's output."""

import copy

import pytest
import torch
from torch import Tensor, nn

from structlin import BTT, BlockDiagonal, LowRank, Monarch, compress, plan_compression
from structlin._compress import refine
from structlin._model.blocks import blocks_of_layers
from structlin._model.linears import linear_layers
from tests.models import snapshot


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + self.down(torch.relu(self.up(self.norm(x)))), None


class Model(nn.Module):
    def __init__(self, blocks: int = 2, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x, _ = block(x)
        return x


class Rooted(Block):
    """Its output is that of a block, and its gradients are not numbers."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        y, _ = super().forward(x)
        return y + (0 * y).sqrt(), None


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 10, 16) * torch.logspace(0, -1, 16) for _ in range(3)]


def measure(model: nn.Module, dense: nn.Module, batches: list[Tensor]) -> float:
    """The relative error of the model's output."""
    with torch.no_grad():
        gaps = sum((model(x) - dense(x)).double().square().sum() for x in batches)
        return float((gaps / sum(dense(x).double().square().sum() for x in batches)).sqrt())


@pytest.mark.parametrize(
    "family", [LowRank(rank=4), BTT(), Monarch(), BlockDiagonal(blocks=2)], ids=str
)
def test_it_lowers_the_error_of_the_model_as_the_plan_says(model, batches, family):
    options = {"keep": None, "include": "*"}
    plain = compress(copy.deepcopy(model), family, batches, **options)
    new = copy.deepcopy(model)
    planned = plan_compression(new, family, batches, refine=40, **options)
    state = {name: value.clone() for name, value in new.state_dict().items()}
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    planned.apply()
    assert [*planned.blocks] == ["blocks.0", "blocks.1"]
    assert all(after <= before for before, after in planned.blocks.values())
    error = measure(new, model, batches)
    assert error < measure(plain, model, batches)
    assert error == pytest.approx(planned.blocks["blocks.1"][1], rel=1e-4)
    assert not torch.equal(new.blocks[0].norm.weight, model.blocks[0].norm.weight)
    assert all(parameter.requires_grad for parameter in new.parameters())


def test_a_block_that_would_become_worse_stays_as_it_was(model, batches, monkeypatch):
    plain = compress(copy.deepcopy(model), LowRank(rank=4), batches, keep=None)
    monkeypatch.setattr(refine, "LR", 10.0)
    planned = plan_compression(copy.deepcopy(model), LowRank(rank=4), batches, refine=3, keep=None)
    same = planned.apply()
    assert all(before == after for before, after in planned.blocks.values())
    for name, value in plain.state_dict().items():
        assert torch.equal(value, same.state_dict()[name]), name


def test_padding_has_no_say(batches):
    class Masked(Model):
        def forward(self, x, attention_mask):
            return super().forward(x)

    torch.manual_seed(0)
    model, found = Masked(), []
    mask = torch.ones(8, 10, dtype=torch.bool)
    mask[:, 6:] = False
    for far in (0.0, 100.0):
        given = [torch.where(mask[..., None], x, torch.tensor(far)) for x in batches]
        given = [{"x": x, "attention_mask": mask} for x in given]
        planned = plan_compression(
            copy.deepcopy(model), LowRank(rank=4), given, refine=10, keep=None
        )
        found.append([error for pair in planned.blocks.values() for error in pair])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("empty", [[0], [0, 1]])
def test_batches_without_tokens_are_passed_over(model, batches, empty):
    given = [x[:0] if n in empty else x for n, x in enumerate(batches)]
    planned = plan_compression(model, LowRank(rank=4), given, refine=20, keep=None)
    assert all(after < before for before, after in planned.blocks.values())


def test_a_model_of_half_precision_is_refined(model, batches):
    dense, half = copy.deepcopy(model), model.bfloat16()
    given = [x.bfloat16() for x in batches]
    planned = plan_compression(half, LowRank(rank=4), given, refine=40, keep=None)
    assert all(after < before for before, after in planned.blocks.values())
    assert {p.dtype for p in planned.apply().parameters()} == {torch.bfloat16}
    assert measure(half.float(), dense, batches) < 1


def test_biases_and_norms_that_two_blocks_share_stay(model, batches):
    first, second = model.blocks
    first.down.bias, second.norm.weight = second.down.bias, first.norm.weight
    bias = first.down.bias.detach().clone()
    planned = plan_compression(model, LowRank(rank=4), batches, refine=10, keep=None)
    planned.apply()
    assert torch.equal(first.down.bias, bias)
    assert first.down.bias is second.down.bias
    assert torch.equal(first.norm.weight, torch.ones(16))
    assert not torch.equal(first.norm.bias, torch.zeros(16))
    assert all(after < before for before, after in planned.blocks.values())


def test_blocks_are_what_is_repeated():
    def name_blocks(model: nn.Module) -> list[str]:
        return [name for name, _ in blocks_of_layers(model, linear_layers(model)).values()]

    assert name_blocks(Model()) == ["blocks.0", "blocks.1"]
    assert name_blocks(nn.ModuleDict({"a": Model(), "b": Model(1)})) == [
        "a.blocks.0",
        "a.blocks.1",
        "b.blocks.0",
    ]
    assert name_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == [""]
    assert name_blocks(nn.Linear(4, 4)) == []
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    assert name_blocks(encoder) == ["layers.0", "layers.1"]


def test_a_model_without_blocks_is_refined_as_a_whole(batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    new = copy.deepcopy(model)
    planned = plan_compression(new, LowRank(rank=4), batches, refine=40, include="*", keep=None)
    ((before, after),) = planned.blocks.values()
    assert after < before
    assert measure(planned.apply(), model, batches) == pytest.approx(after, rel=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.norm.weight.data.add_(1),
        lambda block: setattr(block, "norm", copy.deepcopy(block.norm)),
    ],
    ids=["values", "module"],
)
def test_a_plan_is_refused_once_a_norm_that_it_changes_has_changed(model, batches, change):
    planned = plan_compression(model, LowRank(rank=4), batches, refine=10, keep=None)
    change(model.blocks[1])
    with pytest.raises(ValueError, match=r"block 'blocks\.1' got other weights"):
        planned.apply()


def test_a_block_that_gives_another_output_each_time_is_left_with_a_warning(model, batches):
    class Noisy(Block):
        def forward(self, x):
            return super().forward(x)[0] * torch.rand(()), None

    model.blocks[1] = Noisy(16)
    with pytest.warns(UserWarning, match=r"'blocks\.1' is not refined: it does not give the same"):
        planned = plan_compression(model, LowRank(rank=4), batches, refine=5, keep=None)
    assert [*planned.blocks] == ["blocks.0"]


class InPlace(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        y, _ = super().forward(x.clone())
        x.mul_(0).add_(y)
        return x, None


class Through(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


class Overwriting(Block):
    """With large inputs, what the gradient of a linear layer needs is gone."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        h = self.norm(x)
        y = self.down(torch.relu(self.up(h)))
        if x.mean() > 5:
            h.mul_(0.5)
        return h + y, None


class Appending(Block):
    """It leaves its output in a list that the model gives to it."""

    def forward(self, x: Tensor, outputs: list[Tensor]) -> tuple[Tensor, None]:
        outputs.append(super().forward(x)[0])
        return outputs[-1], None


class Summing(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        outputs: list[Tensor] = []
        for block in self.blocks:
            x, _ = block(x, outputs)
        return x + outputs[0]


@pytest.mark.parametrize("kind", [InPlace, Appending])
def test_a_block_that_writes_into_its_input_is_refined_as_one_that_does_not(kind, model, batches):
    other = copy.deepcopy(model) if kind is InPlace else Summing()
    other.load_state_dict(model.state_dict())
    for block in other.blocks:
        block.__class__ = kind
    options = {"keep": 0.6, "refine": 8, "allocation": "error"}
    found = plan_compression(other, LowRank(rank=1), batches, **options).blocks
    expected = plan_compression(model, LowRank(rank=1), batches, **options).blocks
    assert [*found] == ["blocks.0", "blocks.1"]
    for name, errors in found.items():
        assert errors == pytest.approx(expected[name], rel=1e-3)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_block_whose_gradient_cannot_be_taken_is_left_with_a_warning(model, batches, place):
    model.blocks[1].__class__ = Overwriting
    model.first, model.blocks[0] = nn.Identity(), Through()
    batches[place] = batches[place] + 10  # the other batches have gradients
    options = {"keep": None, "include": "blocks.1*"}
    plain = plan_compression(copy.deepcopy(model), LowRank(rank=4), batches, **options)
    expected = "'blocks.1' is not refined: its gradient cannot be taken .*inplace"
    with pytest.warns(UserWarning, match=expected):
        planned = plan_compression(model, LowRank(rank=4), batches, refine=5, **options)
    assert not planned.blocks
    pairs = zip(planned.apply().parameters(), plain.apply().parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_block_whose_input_has_no_copy_is_left_with_a_warning(model, batches):
    class Reading(Block):
        def forward(self, x, numbers):
            return super().forward(x)

    class Streaming(Model):
        def forward(self, x):
            for block in self.blocks:
                x, _ = block(x, (n for n in range(3)))
            return x

    streaming = Streaming(blocks=1)
    for block in streaming.blocks:
        block.__class__ = Reading
    with pytest.warns(
        UserWarning, match=r"'blocks\.0' is not refined: a generator cannot be copied"
    ):
        planned = plan_compression(
            streaming, LowRank(rank=4), batches, refine=5, keep=None, exclude="first"
        )
    assert not planned.blocks


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"refine": -1}, ValueError, "refine=-1 must be at least 0"),
        ({"refine": 10**9}, ValueError, "refine=1000000000 must be at most 1000000"),
        ({"refine": True}, TypeError, "refine=True must be an integer of at least 0"),
        ({"refine": 5}, ValueError, "refine=5 needs batches"),
    ],
)
def test_wrong_options_are_refused(model, options, error, message):
    with pytest.raises(error, match=message):
        plan_compression(model, LowRank(rank=4), None, **options)


def test_where_the_rate_is_too_high_it_is_lowered_once(model, batches, monkeypatch):
    dense, options = copy.deepcopy(model), {"keep": None, "refine": 20}
    rates, real = [], refine._descend

    def descend(*given):
        rates.append(given[-1])
        real(*given[:-1], 10.0 if len(rates) == 1 else rates[-1])

    monkeypatch.setattr(refine, "_descend", descend)
    planned = plan_compression(model, LowRank(rank=4), batches, include="blocks*", **options)
    assert rates == [refine.LR, refine.LR / 4, refine.LR]
    assert all(after < before for before, after in planned.blocks.values())
    first = planned.blocks["blocks.0"]
    planned.apply()
    assert measure(model, dense, batches) < 1
    assert first[1] > 0


def errors_of(batches: list[Tensor], **options) -> dict[str, float]:
    torch.manual_seed(0)
    planned = plan_compression(Model(), LowRank(rank=4), batches, allocation="error", **options)
    return planned.errors


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("part", [Model, Block])
def test_a_model_without_gradients_is_calibrated_but_not_refined(off, part, batches, monkeypatch):
    monkeypatch.setattr(part, "forward", off()(part.forward))
    options = {"include": "blocks*"}
    torch.manual_seed(0)
    if (
        part is Block or off is torch.inference_mode
    ):  # otherwise blocks have gradients by themselves
        given = {"keep": None, "allocation": "error", "refine": 4, **options}
        with pytest.raises(ValueError, match="refine=4 takes gradients, but the model turns them"):
            plan_compression(Model(), LowRank(rank=4), batches, **given)
    with pytest.raises(ValueError, match=r"allocation='error' is .* turns gradients off"):
        plan_compression(Model(), LowRank(rank=4), batches, **options)
    found = errors_of(batches, **options)
    monkeypatch.undo()
    expected = errors_of(batches, **options)
    assert found == pytest.approx(expected)


def test_gradients_that_are_no_numbers_are_named_and_nothing_is_changed(model, batches):
    model.blocks[1] = Rooted(16)
    before = snapshot(model)
    options = {"keep": None, "allocation": "error"}
    with pytest.raises(ValueError, match="refine=2: a block has gradients that are not finite"):
        compress(model, LowRank(rank=4), batches, refine=2, **options)
    assert snapshot(model) == before
    compress(model, LowRank(rank=4), batches, **options)
