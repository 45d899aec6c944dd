"""benchmarks/compression/tokens.py: which rows there are, and that SVD-LLM gets the same ranks."""

import math
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks.compression import smollm2, tokens
from benchmarks.harness.experiment import combinations
from structlin import LowRank, convert
from tests.tables import read_table

SHAPE = {"model": "tiny", "context": 24, "windows": 3}
SIZES = SHAPE | {"seed": 0}


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
    for family in tokens.METHODS:
        for keep in (0.8, 0.6):
            for number in (4096, 16384, 65536, 262144):
                expected.append((family, keep, number))
    assert sorted(smaller) == sorted(expected)


def test_in_a_smoke_run_too_the_dense_model_has_one_row_at_the_fewest_tokens():
    assert tokens.is_run({"family": "dense", "keep": 1.0, "tokens": 96})
    assert not tokens.is_run({"family": "dense", "keep": 1.0, "tokens": 192})


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
    row = tokens.run(96, "dense", 1.0, **SIZES)
    for name in ("wiki", "c4"):
        windows = smollm2.cut(texts[name], 3, 24)
        expected = find_perplexity(model, windows)
        assert row[f"perplexity_{name}"] == pytest.approx(expected, rel=1e-5)


SAME_RANKS = "SVD-LLM, ranks of low-rank"


@pytest.fixture(autouse=True)
def folder_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "CHOSEN_RANKS", tmp_path)
    return tmp_path


def find_block_layers(model):
    """Name -> the linear layer, in the blocks."""
    layers = {}
    for name, layer in model.named_modules():
        if name.startswith("model.layers.") and isinstance(layer, nn.Linear):
            layers[name] = layer
    return layers


def test_svd_llm_with_the_same_ranks_has_the_same_number_of_parameters():
    low_rank = tokens.run(96, "low-rank", 0.6, **SIZES)
    svd_llm = tokens.run(96, SAME_RANKS, 0.6, **SIZES)
    assert low_rank["params"] == svd_llm["params"]
    model, _ = smollm2.make_tiny()
    dense = sum(layer.weight.numel() for layer in find_block_layers(model).values())
    assert 0.5 * dense < low_rank["params"] <= 0.6 * dense


def test_the_ranks_of_low_rank_are_chosen_once_for_each_count_and_share(
    folder_of_ranks, monkeypatch
):
    first = tokens.run(96, SAME_RANKS, 0.6, **SIZES)  # low-rank was not run before
    tokens.run(192, "low-rank", 0.6, **SIZES)
    tokens.run(96, "low-rank", 0.5, **SIZES)
    assert len([*folder_of_ranks.iterdir()]) == 3

    def compress_again(*arguments):
        raise AssertionError("the ranks are there")

    monkeypatch.setattr(tokens, "compress", compress_again)
    again = tokens.run(96, SAME_RANKS, 0.6, **SIZES)
    assert again["params"] == first["params"]
    assert tokens.run(96, SAME_RANKS, 0.5, **SIZES)["params"] < first["params"]


def test_ranks_are_read_from_the_layers_that_are_not_dense():
    model, _ = smollm2.make_tiny()
    up = "model.layers.0.mlp.up_proj"
    convert(model, LowRank(rank=5), include=up)
    assert tokens.find_ranks(model) == {up: 5}


def test_windows_of_calibration_come_from_no_held_out_text():
    _, texts = smollm2.make_tiny()
    known = texts["known"]
    batches = tokens.read(**SHAPE).list_batches(96)
    assert [batch["input_ids"].shape for batch in batches] == [(1, 24)] * 4
    assert batches[0]["input_ids"][0].equal(known[:24])
    assert batches[-1]["input_ids"][0].equal(known[-24:])


def cut_by_svd_llm(model, ids, keep):
    """The oracle of SVD-LLM, on the dense model in place; returns the numbers of its factors.

    X (tokens, in) are a layer's inputs, and R R^T = X^T X. The layer becomes [W R]_r R^-1, where
    [ ]_r is cut to its r largest singular values, and r (in + out) is at most `keep` of in * out.
    """
    inputs = {}
    hooks = []
    layers = find_block_layers(model)
    for name, layer in layers.items():

        def keep_inputs(module, args, name=name):
            inputs[name] = args[0].flatten(0, 1).double()

        hooks.append(layer.register_forward_pre_hook(keep_inputs))
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()

    params = 0
    for name, layer in layers.items():
        out_features, in_features = layer.weight.shape
        rank = int(keep * in_features * out_features / (in_features + out_features))
        _, scales, basis = torch.linalg.svd(inputs[name], full_matrices=False)
        root = basis.T * scales  # (in, in)
        u, values, v = torch.linalg.svd(layer.weight.detach().double() @ root)
        nearest = (u[:, :rank] * values[:rank]) @ v[:rank]
        layer.weight.data = (nearest @ torch.linalg.inv(root)).float()
        params += rank * (in_features + out_features)
    return params


def test_svd_llm_is_calibrated_on_those_tokens_and_keeps_the_same_share_of_each_layer():
    row = tokens.run(192, "SVD-LLM", 0.6, **SIZES)
    model, texts = smollm2.make_tiny()
    starts = torch.linspace(0, len(texts["known"]) - 24, 8).long()
    windows = [texts["known"][start : start + 24] for start in starts.tolist()]
    params = cut_by_svd_llm(model, torch.stack(windows), keep=0.6)

    assert row["params"] == params
    for name in ("wiki", "c4"):
        expected = find_perplexity(model, smollm2.cut(texts[name], 3, 24))
        assert row[f"perplexity_{name}"] == pytest.approx(expected, rel=1e-3)


def test_seconds_are_those_of_seeing_the_tokens_and_of_cutting(monkeypatch):
    ticks = count()  # each look at the clock is a second after the last one
    clock = SimpleNamespace(process_time=lambda: float(next(ticks)))
    tokens.observe.cache_clear()
    monkeypatch.setattr(tokens, "time", clock)
    dense = tokens.run(96, "dense", 1.0, **SIZES)
    svd_llm = tokens.run(96, "SVD-LLM", 0.6, **SIZES)
    low_rank = tokens.run(96, "low-rank", 0.6, **SIZES)
    same_ranks = tokens.run(96, SAME_RANKS, 0.6, **SIZES)
    assert dense["cpu_seconds"] == 0
    assert low_rank["cpu_seconds"] == 1
    # one to see the tokens, which both shares count, and one to cut
    assert svd_llm["cpu_seconds"] == 2
    assert same_ranks["cpu_seconds"] == 2


@pytest.mark.parametrize("family", ["low-rank", tokens.BFLOAT16])
def test_low_rank_is_calibrated_by_runs_in_the_precision_that_its_row_names(family, monkeypatch):
    dtypes = set()

    def compress(model, structure, batches, **options):
        dtypes.update(model(**batch).logits.dtype for batch in batches)

    monkeypatch.setattr(tokens.structlin, "compress", compress)
    tokens.run(96, family, 0.8, **SIZES)
    assert dtypes == {torch.bfloat16 if "bfloat16" in family else torch.float32}


def test_seconds_in_bfloat16_are_compared_with_those_of_the_same_tokens():
    rows = [
        {"family": "low-rank", "keep": 0.8, "tokens": 4096, "cpu_seconds": 200.0},
        {"family": "low-rank", "keep": 0.8, "tokens": 16384, "cpu_seconds": 600.0},
        {"family": tokens.BFLOAT16, "keep": 0.8, "tokens": 4096, "cpu_seconds": 130.0},
    ]
    assert tokens.numbers({"rows": rows})["tokens.bfloat16_seconds"] == "0.65"
    assert "tokens.bfloat16_seconds" not in tokens.numbers({"rows": rows[:2]})


# ---- what is shown -------------------------------------------------------------------------------


def make_row(family, keep, count, perplexity, nats):
    texts = {"perplexity_wiki": perplexity, "nats_wiki": nats}
    return {"family": family, "keep": keep, "tokens": count, **texts}


def test_the_sentences_have_the_minutes_of_low_rank_on_the_fewest_and_on_the_most_tokens():
    rows = []
    for family, keep, number, seconds in [
        ("BTT", 0.8, 1024, 30.0),
        ("low-rank", 0.8, 4096, 300.0),
        ("low-rank", 0.8, 16384, 600.0),
        ("low-rank", 0.8, 262144, 3600.0),
        ("low-rank", 0.6, 262144, 60.0),
        ("BTT", 0.8, 262144, 120.0),
    ]:
        rows.append(make_row(family, keep, number, 10.0, [1.0]) | {"cpu_seconds": seconds})
    assert tokens.numbers({"rows": []}) == {}
    expected = {
        "tokens.least": "4,096",
        "tokens.least_minutes_0.8": "5",
        "tokens.most": "262,144",
        "tokens.most_minutes_0.8": "60",
        "tokens.most_minutes_0.6": "1",
    }
    assert tokens.numbers({"rows": rows}) == expected


def test_the_table_of_gain_has_each_count_over_a_quarter_of_it():
    rows = [
        make_row("dense", 1.0, 4096, 9.96, [1.0, 2.0]),
        make_row("low-rank", 0.8, 4096, 20.0, [2.0, 3.0]),
        make_row("low-rank", 0.8, 16384, 10.0, [2.0 - math.log(2), 3.0 - math.log(2)]),
        make_row("low-rank", 0.6, 16384, 10.0, [1.0, 1.0]),  # no quarter
        make_row("BTT", 0.8, 65536, 10.0, [1.0, 1.0]),  # nor here
        make_row("SVD-LLM", 0.8, 4096, 10.0, [1.0, 1.0]),
    ]
    assert read_table(tokens.show_gain({"rows": rows})) == [
        ["Wikipedia", "16,384 tokens", "65,536 tokens"],
        ["low-rank, keep 0.8", "0.50 (0.50 to 0.50)", "not measured"],
    ]


def test_a_page_has_a_line_for_each_method_and_share_that_was_run_and_a_column_for_each_count():
    dense = make_row("dense", 1.0, 4096, 9.96, [1.0, 2.0, 3.0])
    rows = [
        dense,
        # the differences from dense are .3, .5, .7: their standard deviation is .2, and Student's
        # 97.5 % quantile with 2 degrees of freedom is 4.302653
        make_row("SVD-LLM", 0.6, 16384, 20.0, [1.3, 2.5, 3.7]),
        make_row("SVD-LLM", 0.8, 4096, 12.34, [1.5, 2.5, 3.5]),
        make_row("SVD-LLM, ranks of low-rank", 0.8, 16384, 11.0, [1.1, 2.1, 3.1]),
        make_row("BTT", 0.8, 4096, 13.0, [1.2, 2.2, 3.2]),
    ]
    reach = 100 * math.expm1(4.302653 * 0.2 / math.sqrt(3))
    missing = "not measured"

    assert read_table(tokens.show_wiki({"rows": rows})) == [
        ["Wikipedia", "4,096 tokens", "16,384 tokens"],
        ["dense", "10.0", "10.0"],
        ["BTT, keep 0.8", "13.0 ± 0 %", missing],
        ["SVD-LLM, ranks of low-rank, keep 0.8", missing, "11.0 ± 0 %"],
        ["SVD-LLM, keep 0.8", "12.3 ± 0 %", missing],
        ["SVD-LLM, keep 0.6", missing, f"20.0 ± {reach:.0f} %"],
    ]


def test_a_page_of_no_rows_says_so():
    expected = "Perplexity of C4 by calibration tokens: not measured."
    assert tokens.show_c4({"rows": []}) == expected
