"""benchmarks/compression/tokens.py: which rows there are, and that SVD-LLM gets the same ranks."""

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks.compression import smollm2, tokens
from benchmarks.harness.experiment import combinations
from structlin import LowRank, convert

SIZES = {"model": "tiny", "context": 24, "windows": 3}


def test_the_dense_model_has_one_row_and_every_method_one_for_each_share_and_count():
    jobs = [*combinations(tokens.EXPERIMENT.axes)]
    dense = [job for job in jobs if job["family"] == "dense"]
    assert [(job["tokens"], job["keep"]) for job in dense] == [(4096, 1.0)]
    smaller = {(job["tokens"], job["family"], job["keep"]) for job in jobs} - {(4096, "dense", 1.0)}
    assert len(smaller) == 4 * 3 * 2 == len(jobs) - 1
    assert {keep for *_, keep in smaller} == {0.8, 0.6}


def test_perplexity_is_that_of_the_next_tokens_of_held_out_windows():
    model, texts = smollm2.make_tiny()
    row = tokens.run(96, "dense", 1.0, **SIZES)[0]
    for name in ("wiki", "c4"):
        windows = smollm2.cut(texts[name], 3, 24)
        with torch.no_grad():
            log_p = F.log_softmax(model(windows).logits.double(), -1)
        known = log_p[:, :-1].gather(-1, windows[:, 1:, None])
        expected = math.exp(-known.mean().item())
        assert row[f"perplexity_{name}"] == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def low_rank_rows():
    torch.manual_seed(0)
    return tokens.run(96, "low-rank", 0.6, **SIZES)


def test_svd_llm_with_the_same_ranks_has_the_same_number_of_parameters(low_rank_rows):
    ours, peer = low_rank_rows
    assert [ours["method"], peer["method"]] == ["low-rank", tokens.SAME_RANKS]
    assert ours["params"] == peer["params"]
    dense = sum(
        module.weight.numel()
        for name, module in smollm2.make_tiny()[0].named_modules()
        if name.startswith(smollm2.PART) and isinstance(module, torch.nn.Linear)
    )
    assert 0.5 * dense < ours["params"] <= 0.6 * dense


def test_ranks_are_read_from_the_layers_that_are_not_dense():
    model = smollm2.make_tiny()[0]
    up = "model.layers.0.mlp.up_proj"
    convert(model, LowRank(rank=5), include=up)
    assert tokens.find_ranks(model) == {up: 5}


def test_windows_of_calibration_come_from_no_held_out_text():
    known = smollm2.make_tiny()[1]["known"]
    batches = tokens.list_batches("tiny", 96, 24)
    assert [batch["input_ids"].shape for batch in batches] == [(1, 24)] * 4
    assert batches[0]["input_ids"][0].equal(known[:24])
    assert batches[-1]["input_ids"][0].equal(known[-24:])
