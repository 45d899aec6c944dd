"""benchmarks/compression/tokens.py: which rows there are, and that SVD-LLM gets the same ranks."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks.compression import smollm2, tokens
from benchmarks.harness.experiment import combinations
from structlin import LowRank, convert

SIZES = {"model": "tiny", "context": 24, "windows": 3}


# ---- which rows there are ------------------------------------------------------------------------


def test_the_dense_model_has_one_row_and_every_method_one_for_each_share_and_count():
    dense = []
    smaller = []
    for job in combinations(tokens.EXPERIMENT.axes):
        row = (job["family"], job["keep"], job["tokens"])
        if job["family"] == "dense":
            dense.append(row)
        else:
            smaller.append(row)

    assert dense == [("dense", 1.0, 4096)]
    expected = []
    for family in ("SVD-LLM", "low-rank", "BTT"):
        for keep in (0.8, 0.6):
            for count in (4096, 16384, 65536, 262144):
                expected.append((family, keep, count))
    assert sorted(smaller) == sorted(expected)


# ---- a row ---------------------------------------------------------------------------------------


def find_perplexity(model, windows):
    """exp of the mean of -log p(next token), in float64; windows are `(windows, context)`."""
    with torch.no_grad():
        logits = model(windows).logits.double()
    log_p = logits.log_softmax(-1)[:, :-1]  # (windows, context - 1, vocabulary)
    next_tokens = windows[:, 1:]
    log_p_next = log_p.gather(-1, next_tokens[..., None])
    return math.exp(-log_p_next.mean().item())


def test_perplexity_is_that_of_the_next_tokens_of_held_out_windows():
    model, texts = smollm2.make_tiny()
    (row,) = tokens.run(96, "dense", 1.0, **SIZES)
    for name in ("wiki", "c4"):
        windows = smollm2.cut(texts[name], 3, 24)
        expected = find_perplexity(model, windows)
        assert row[f"perplexity_{name}"] == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def low_rank_rows():
    """The row of low-rank, and that of SVD-LLM with its ranks."""
    torch.manual_seed(0)
    return tokens.run(96, "low-rank", 0.6, **SIZES)


def count_dense_weights():
    """Those of the linear layers in the blocks."""
    model, _ = smollm2.make_tiny()
    count = 0
    for name, layer in model.named_modules():
        if name.startswith("model.layers.") and isinstance(layer, nn.Linear):
            count += layer.weight.numel()
    return count


def test_svd_llm_with_the_same_ranks_has_the_same_number_of_parameters(low_rank_rows):
    low_rank, svd_llm = low_rank_rows
    assert low_rank["method"] == "low-rank"
    assert svd_llm["method"] == "SVD-LLM, ranks of low-rank"
    assert low_rank["params"] == svd_llm["params"]
    dense = count_dense_weights()
    assert 0.5 * dense < low_rank["params"] <= 0.6 * dense


def test_ranks_are_read_from_the_layers_that_are_not_dense():
    model, _ = smollm2.make_tiny()
    up = "model.layers.0.mlp.up_proj"
    convert(model, LowRank(rank=5), include=up)
    assert tokens.find_ranks(model) == {up: 5}


def test_windows_of_calibration_come_from_no_held_out_text():
    _, texts = smollm2.make_tiny()
    known = texts["known"]
    batches = tokens.list_batches("tiny", 96, 24)
    assert [batch["input_ids"].shape for batch in batches] == [(1, 24)] * 4
    assert batches[0]["input_ids"][0].equal(known[:24])
    assert batches[-1]["input_ids"][0].equal(known[-24:])
