import pytest
from torch import nn

from structlin import BTT, convert, summary
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


def test_a_matrix_that_two_layers_share_counts_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    result = summary(model)
    assert result.other_params == 16  # the biases
    assert result.flops == 2 * 2 * 64


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="model=ReLU has no linear layer"):
        summary(nn.ReLU())
