import pytest
import torch
from torch import nn

from structlin import (
    BTT,
    TT,
    BlockDiagonal,
    Dense,
    LowRank,
    Monarch,
    StructuredLinear,
    _report,
    _timing,
    convert,
    summary,
)
from structlin._kernels import engine
from tests.models import GPT


def test_a_summary_adds_up_to_the_model():
    model = convert(GPT(width=64, depth=3), BTT(rank=2), include="ffn")
    result = summary(model)
    assert result.params + result.other_params == sum(p.numel() for p in model.parameters())
    cores = sum(
        core.numel()
        for block in model.h
        for layer in (block.mlp.c_fc, block.mlp.c_proj)
        for core in layer.cores
    )
    dense = 3 * (64 * 192 + 64 * 64) + 64 * 50
    assert result.params == cores + dense
    assert result.flops == 2 * (cores + dense)  # nothing is shared in BTT


def test_equal_layers_share_a_row():
    rows = {row.name: row for row in summary(convert(GPT(depth=3), BTT(), include="ffn")).rows}
    assert set(rows) == {
        "h.*.attn.c_attn",
        "h.*.attn.c_proj",
        "h.*.mlp.c_fc",
        "h.*.mlp.c_proj",
        "lm_head",
    }
    assert rows["h.*.mlp.c_fc"].layers == 3
    assert rows["h.*.mlp.c_fc"].structure == "BTT(rank=1)"
    assert rows["lm_head"].structure == "dense"


def test_the_table_shows_padding_waste():
    text = str(summary(convert(nn.Sequential(nn.Linear(64, 101)), BTT())))
    assert "+0.0% in, +3.0% out" in text  # 101 -> 104 = 8 x 13


def test_the_table_is_a_text_in_a_notebook_too(monkeypatch):
    found = summary(nn.Linear(4, 4))
    before = str(found)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(found) == before


def test_a_matrix_that_two_layers_share_counts_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    result = summary(model)
    assert result.other_params == 16  # the biases
    assert result.flops == 2 * 2 * 64


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="model=ReLU has no linear layer"):
        summary(nn.ReLU())


# ---- activations ---------------------------------------------------------------------------------


def count_saved(layer: nn.Module, width: int) -> float:
    """Numbers of the tensors that autograd keeps, parameters left out, for one of 101 tokens."""
    tokens, kept = 101, {}

    def keep(tensor):
        kept[tensor.data_ptr(), tensor.numel()] = tensor
        return tensor

    x = torch.randn(tokens, width, dtype=next(layer.parameters()).dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    held = {parameter.data_ptr() for parameter in layer.parameters()}
    own = [tensor for tensor in kept.values() if tensor.data_ptr() not in held]
    return sum(tensor.numel() for tensor in own if tensor.numel() % tokens == 0) / tokens


@pytest.mark.parametrize(
    ("structure", "width", "dtype"),
    [
        (BTT(rank=2), 64, torch.float32),
        (BTT(rank=1, cores=3), 60, torch.bfloat16),
        (TT(rank=4), 74, torch.float64),  # padded
        (Monarch(blocks=4), 64, torch.float32),
        (Monarch(blocks=2), 1024, torch.float64),  # large blocks are left to BLAS
        (BlockDiagonal(blocks=2), 64, torch.float32),
        (LowRank(rank=3), 64, torch.float32),
        (BTT(rank=2).activate(), 64, torch.float32),
        (LowRank(rank=3).activate(), 64, torch.float32),
        (Dense(), 64, torch.float32),
    ],
)
def test_a_layer_keeps_as_many_numbers_as_its_row_says(structure, width, dtype):
    if not engine.load():
        pytest.skip("the numbers are those that the compiled engine keeps")
    layer = StructuredLinear(width, width, structure, bias=False, dtype=dtype)
    (row,) = summary(nn.Sequential(layer)).rows
    assert row.saved == count_saved(layer, width)


def test_without_the_engine_the_input_of_every_core_is_kept(monkeypatch):
    layer = StructuredLinear(64, 64, BTT(rank=2), bias=False)
    monkeypatch.setattr("structlin._product.op.pays", lambda *arguments: False)
    assert count_saved(layer, 64) == 64 + 128
    assert "the input of every core" in " ".join(str(summary.__doc__).split())


def test_dense_layers_keep_their_input_and_rows_add_up():
    result = summary(nn.Sequential(nn.Linear(16, 64), nn.Linear(32, 8), nn.Linear(32, 8)))
    assert [row.saved for row in result.rows] == [16, 64]
    assert result.saved == 80
    assert "saved" in str(result)


# ---- time ----------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A structured layer takes 1 second, a dense one a second for each of its 101 tokens."""
    now = [0.0]
    monkeypatch.setattr(_timing, "perf_counter", lambda: now[0])
    for kind, seconds in ((StructuredLinear, lambda x: 1), (nn.Linear, len)):

        def forward(self, x, real=kind.forward, seconds=seconds):
            now[0] += seconds(x)
            return real(self, x)

        monkeypatch.setattr(kind, "forward", forward)


def test_each_distinct_layer_is_timed_beside_the_dense_one(clock):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5))
    result = summary(convert(model, BTT(), include=["0", "1", "2"]), measure=101)
    assert [(row.seconds, row.dense_seconds) for row in result.rows] == [(3, 303), (101, 101)]
    assert (result.seconds, result.dense_seconds) == (104, 404)
    assert "303000.00" in str(result)
    assert "dense ms" in str(result)


def test_layers_of_one_kind_are_timed_once_under_whatever_names(clock, monkeypatch):
    timed, time = [], _report._time
    monkeypatch.setattr(
        _report, "_time", lambda layer, n: timed.append(layer.name) or time(layer, n)
    )
    model = nn.ModuleDict({name: nn.Linear(16, 16, bias=name == "k") for name in "qkvo"})
    result = summary(convert(model, BTT()), measure=101)
    assert timed == ["q", "k"]
    assert [row.seconds for row in result.rows] == [1, 1, 1, 1]


def test_nothing_is_timed_unless_asked_for():
    result = summary(nn.Linear(4, 4))
    assert result.seconds is None
    assert "dense ms" not in str(result)


def test_timing_leaves_gradients_random_numbers_and_the_model_as_they_were():
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), BTT(), weight_norm=True)
    model[0].cores[0].grad = torch.ones_like(model[0].cores[0])
    model[1].cores[0].requires_grad_(False)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with torch.no_grad():
        result = summary(model, measure=3)
    assert torch.equal(torch.rand(1), expected)
    assert result.seconds > 0
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["0.cores.0"]
    assert model[0].cores[0].grad.eq(1).all()


@pytest.mark.parametrize("measure", [0, -1, 2.5, True])
def test_a_number_of_tokens_to_time_must_be_positive(measure):
    with pytest.raises(ValueError, match=f"measure={measure!r}"):
        summary(nn.Linear(4, 4), measure=measure)


def test_a_layer_without_values_cannot_be_timed():
    with pytest.raises(ValueError, match=r"measure=4: layer '0' has no values \(meta\)"):
        summary(nn.Sequential(nn.Linear(4, 4, device="meta")), measure=4)
