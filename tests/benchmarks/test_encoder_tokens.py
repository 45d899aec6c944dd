"""benchmarks/compression/encoder_tokens.py: which paragraphs calibrate, and what is measured."""

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from benchmarks.compression import encoder_tokens, minilm, tokens
from tests.tables import read_table

SIZES = {"model": "tiny", "paragraphs": 64}


@pytest.fixture(autouse=True)
def folder_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "CHOSEN_RANKS", tmp_path)


def list_texts(batches):
    """The paragraphs of batches; tokens of the tiny encoder are characters, and padding is 0."""
    texts = []
    for batch in batches:
        for ids in batch["input_ids"]:
            texts.append("".join(chr(n) for n in ids.tolist() if n))
    return texts


def test_calibration_takes_whole_paragraphs_until_there_are_enough_tokens():
    subject = encoder_tokens.read(**SIZES)
    few, many = (list_texts(subject.list_batches(count)) for count in (500, 5000))
    for count, texts in ((500, few), (5000, many)):
        lengths = sorted(map(len, texts))
        assert count <= sum(lengths) < count + lengths[-1]
    assert {*few} < {*many}


def test_no_paragraph_that_calibrates_is_measured():
    texts = encoder_tokens.cut_sentences()
    parts = [{*encoder_tokens.list_paragraphs(text)} for text in texts.values()]
    assert len(parts) == 3
    assert len(set.union(*parts)) == sum(map(len, parts))


def test_more_tokens_than_the_text_has_are_refused():
    subject = encoder_tokens.read(**SIZES)
    with pytest.raises(ValueError, match="tokens=100,000,000: the text has"):
        subject.list_batches(100_000_000)


def test_the_cosine_is_of_the_mean_of_a_paragraphs_tokens_before_and_after():
    subject = encoder_tokens.read(**SIZES)
    changed, tokenize = minilm.random_encoder()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    row = subject.measure(changed)
    texts = encoder_tokens.cut_sentences()
    for name in ("wiki", "c4"):
        cosines = []
        for text in encoder_tokens.list_paragraphs(texts[name])[:64]:
            batch = tokenize([text])
            with torch.no_grad():
                before = subject.dense(**batch).last_hidden_state.mean(1)
                after = changed(**batch).last_hidden_state.mean(1)
            cosines.append(F.cosine_similarity(before, after).item())
        assert row[f"cosine_{name}"] == pytest.approx(sum(cosines) / 64, rel=1e-5)
        spread = torch.tensor(cosines).std().item()
        student = 1.998341  # the 97.5 % quantile with 63 degrees of freedom
        reach = student * spread / math.sqrt(64)
        assert row[f"reach_{name}"] == pytest.approx(reach, rel=1e-3)


def test_ours_and_svd_llm_with_its_ranks_have_as_many_parameters():
    sizes = {"tokens": 500, "keep": 0.6, **SIZES}
    low_rank = encoder_tokens.run(family="low-rank", **sizes)
    same_ranks = encoder_tokens.run(family="SVD-LLM, ranks of low-rank", **sizes)
    assert low_rank["params"] == same_ranks["params"]


def test_a_page_has_the_cosine_and_its_interval():
    row = {"family": "BTT", "keep": 0.8, "tokens": 4096, "cosine_c4": 0.98765, "reach_c4": 0.00123}
    assert read_table(encoder_tokens.show_c4({"rows": [row]})) == [
        ["C4", "4,096 tokens"],
        ["BTT, keep 0.8", "0.988 ± 0.001"],
    ]
