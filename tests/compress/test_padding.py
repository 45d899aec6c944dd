"""Padding is no data: which rows of a layer's input count."""

import copy

import pytest
import torch
from torch import Tensor, nn

from structlin import LowRank, plan_compression
from structlin._compress.padding import find_masks, select_rows
from tests.compress.test_compressed_models import MASK, build

TOKENS = torch.tensor([[True, True, False], [True, False, False]])


class Masked(nn.Module):
    def forward(self, x, attention_mask=None, decoder_attention_mask=None, **others):
        return x


class Padded(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, src, src_key_padding_mask=None):
        return src


HIDES = [-100.0, -1e4, -1e9, torch.finfo().min, -torch.inf]  # added to the scores


@pytest.mark.parametrize(
    "mask",
    [
        *(TOKENS.to(dtype) for dtype in (torch.bool, torch.int64, torch.float32)),
        *(torch.zeros(2, 3).masked_fill(~TOKENS, hides) for hides in HIDES),
        TOKENS * torch.tensor([[1, 2, 3]]),  # it counts packed texts
    ],
)
def test_an_attention_mask_is_found_by_keyword_and_by_position(mask):
    for args, kwargs in [((0, mask), {}), ((0,), {"attention_mask": mask})]:
        (found,) = find_masks(Masked(), args, kwargs)
        assert torch.equal(found, TOKENS)


@pytest.mark.parametrize("hides", [TOKENS.logical_not(), (~TOKENS).float() * -1e9])
def test_a_key_padding_mask_is_true_or_minus_infinity_at_padding(hides):
    (found,) = find_masks(Padded(), (0,), {"src_key_padding_mask": hides})
    assert torch.equal(found, TOKENS)
    (found,) = find_masks(Padded(batch_first=False), (0, hides), {})
    assert torch.equal(found, TOKENS.mT)


@pytest.mark.parametrize("value", [0.5, -1.0, -99.0, torch.nan])
def test_a_mask_of_numbers_that_tell_nothing_is_refused_by_its_name(value):
    mask = TOKENS.float()
    mask[1, 2] = value
    with pytest.raises(ValueError, match=r"^attention_mask of a batch has the number .*booleans"):
        find_masks(Masked(), (0, mask), {})
    with pytest.raises(ValueError, match=r"^src_key_padding_mask of a batch has the number"):
        find_masks(Padded(), (0, mask), {})
    with pytest.raises(ValueError, match="attention_mask of a batch has no token, only padding"):
        find_masks(Masked(), (0, torch.zeros(2, 3)), {})


@pytest.mark.parametrize(
    "mask", [None, torch.ones(2, 3), torch.ones(2, 1, 3, 3).tril(), "text"], ids=str
)
def test_what_hides_no_token_is_no_mask(mask):
    assert find_masks(Masked(), (0,), {"attention_mask": mask}) == []


@pytest.mark.parametrize("shape", [(2, 3), (6,), (2, 3, 2)])
def test_rows_are_dropped_where_the_shape_says_what_they_are(shape):
    x = torch.randn(*shape, 5)
    keep = TOKENS.flatten().repeat_interleave(2 if len(shape) == 3 else 1)
    assert torch.equal(select_rows(x, [TOKENS]), x.reshape(-1, 5)[keep])


@pytest.mark.parametrize("shape", [(2,), (3, 2), (2, 4), (12,), ()])
def test_all_rows_count_where_no_mask_fits(shape):
    x = torch.randn(*shape, 5)
    assert torch.equal(select_rows(x, [TOKENS]), x.reshape(-1, 5))


def test_where_two_masks_fit_a_row_must_be_a_token_in_both():
    x, other = torch.randn(2, 3, 5), torch.tensor([[True, False, True], [True, True, True]])
    expected = torch.stack([x[0, 0], x[1, 0]])
    assert torch.equal(select_rows(x, [TOKENS, other]), expected)


def find_cores(model: nn.Module, batches: list[object]) -> dict[str, Tensor]:
    planned = plan_compression(copy.deepcopy(model), LowRank(rank=4), batches, keep=None)
    return {
        name: found.cores[1] @ found.cores[0]
        for name, found in planned.projections.items()
        if "pooler" not in name
    }


@pytest.mark.parametrize("name", ["bert", "t5"])  # t5: in the decoder's attention too
def test_a_padded_batch_counts_as_its_sentences_alone_do(name):
    model, batches = build(name)
    model = model.double()
    alone = [
        {"input_ids": ids[mask.bool()][None], "attention_mask": torch.ones(1, int(mask.sum()))}
        | ({"decoder_input_ids": ids[None, :5]} if name == "t5" else {})
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    expected, found = find_cores(model, alone), find_cores(model, batches)
    assert len(found) == {"bert": 12, "t5": 32}[name]
    assert any("EncDecAttention.k" in layer for layer in found) == (name == "t5")
    for layer, matrix in expected.items():
        torch.testing.assert_close(found[layer], matrix, rtol=1e-6, atol=1e-8)


def test_padding_without_a_mask_is_refused_and_a_mask_of_ones_says_that_it_is_meant():
    model, batches = build("bert")
    bare = [{"input_ids": batch["input_ids"]} for batch in batches]
    with pytest.raises(ValueError, match=r"input_ids has padding \(pad_token_id=0\).*give batches"):
        plan_compression(model, LowRank(rank=4), bare, keep=None)
    with pytest.raises(ValueError, match="input_ids has padding"):
        plan_compression(model, LowRank(rank=4), [batches[0]["input_ids"]], keep=None)
    meant = [{**batch, "attention_mask": torch.ones_like(MASK[:3])} for batch in bare]
    plan_compression(model, LowRank(rank=4), meant, keep=None)
    model.config.eos_token_id = 0  # a token that ends every text as well
    plan_compression(model, LowRank(rank=4), bare, keep=None)
