"""How many times fewer seconds and FLOPs until dense's loss does a structured GPT or ViT need?

    pip install --no-deps exllamav2                      # text of an encyclopedia
    apt-get install dataset-fashion-mnist                # images
    python -m benchmarks.training.gpt_seconds            # results/gpt_seconds.{json,png}; days
    python -m benchmarks.training.gpt_seconds --setups Wikipedia --widths 512 --optimizers Muon
    python -m benchmarks.training.gpt_seconds --smoke    # seconds

The models are those of examples/: blocks with attention heads of 32 features, as many in each model
as fill the dense width. All linear layers of the blocks are structured, but for attention's output
layer where a kind names attention's input alone; SiLU stands between the cores of the MLPs. The
last layer of each branch starts at zero, but for "no zero start", which is not normalised either.
The rate rises for WARM_UP steps. A model trains for the whole schedule, for a half or
for a quarter of it, each with a decay of its own. A structure's losses at the ends of its schedules
are interpolated in logarithms. The factor is how many times less than dense it needs until the loss
of dense's longest schedule; "never": its whole schedule does not meet it.

Rates are tuned for every kind and optimizer on seed 0, at dense width 256 for the whole schedule (a
shorter one wants higher rates): by factors of 2 until the best has both its neighbours. muP and
`param_groups` take AdamW's rates to the other widths; Muon's stay as they are. Dense, against which
all are compared, is tuned at every width, first at that rate and half of it.
Intervals are 95 %, bootstrap over the seeds; with three they are about the range. Seconds are steps
times the time of a step over dense's, the batch not counted: medians of rounds in which all models
of a width take turns, on as many threads as torch takes, with their 20th and 80th percentiles.
results/gpt_seconds_epyc.json has the times of earlier runs on another machine, and no losses.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

import structlin
from benchmarks.compression import vision
from benchmarks.compression.smollm2 import pretrained, require
from benchmarks.harness import figures, models, report, training
from benchmarks.harness.experiment import Axis, Experiment, Row, Runs, Tune, combinations, tune
from benchmarks.harness.record import read
from benchmarks.harness.statistics import (
    best,
    bootstrap,
    curve_of_rates,
    log_loss,
    one,
    seeds_of,
    select,
    values,
)
from benchmarks.harness.tasks import Characters, Images
from benchmarks.harness.timing import interleaved, ratio, wall
from structlin import BTT, Dense, LowRank, Monarch

VOCABULARY = 2048
BASE = 128  # the dense width at which AdamW's rates are meant
TUNED = 256  # the dense width at which rates are tuned
LENGTHS = (1.0, 0.5, 0.25)  # of the schedule
RATES = {"AdamW": 4e-3, "Muon": 2**-5, "AdamW, normed": 2**-6}  # where the search for each begins
OTHER_LR = 4e-3  # Muon's, of gains, biases and norms
WARM_UP = 100  # steps, a fifth of a run at most
MOMENTUM = 0.85  # Muon's, of runs as short as these


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
        parts = [vision.read_fashion(name) for name in ("train", "t10k")]
        if parts[0] is None or parts[1] is None:
            raise SystemExit("Fashion-MNIST is not here: apt-get install dataset-fashion-mnist")
        train, held = ((part[0].float().unsqueeze(1), part[1]) for part in parts if part)
        super().__init__(seed, train, held, patch=7, **sizes)


Task = Characters | Fashion


@dataclass(frozen=True)
class Setup:
    """Data, and what the models of all widths share."""

    task: type[Task]
    source: pretrained.Source | None  # of the text; None: the task's own data
    sizes: Mapping[str, int]


TEXT = {"context": 128, "batch": 8, "depth": 4, "steps": 1500}
SETUPS = {
    "Wikipedia": Setup(Subwords, pretrained.TEXTS["wiki"], TEXT),
    "Python": Setup(Characters, None, TEXT),
    "Fashion-MNIST": Setup(Fashion, None, {"batch": 64, "depth": 4, "steps": 1000}),
}


@dataclass(frozen=True)
class Kind:
    """A model beside dense."""

    structure: Callable[[int], structlin.Family | None]  # of the model's own width; None: dense
    wider: float = 1  # than dense
    options: Mapping[str, Any] = field(default_factory=dict)  # of `convert`


LINEAR_ATTENTION = {"overrides": {"*attn*": BTT(rank=2)}}


def silu(family: Callable[[int], structlin.Family], **options: Any) -> Kind:
    """SiLU between the cores of the MLPs alone."""
    options = LINEAR_ATTENTION | options
    return Kind(lambda width: family(width).activate(), options=options)


BTT_ONE = Kind(lambda _: BTT(rank=1))
BTT_SILU = silu(lambda _: BTT(rank=1))
NO_ZERO_START = {"weight_norm": False, "zero_init": ()}
ATTENTION_INPUT = {"*attn.c_attn": BTT(rank=2), "*attn.c_proj": None}
INPUT_NOT_ZERO = ATTENTION_INPUT | {"*attn.c_proj": Dense()}  # a dense layer's own start is zero
HEAD = LINEAR_ATTENTION["overrides"] | {"*head": BTT(rank=4)}
KINDS = {
    "dense": Kind(lambda _: None),
    "dense, weight normalisation": Kind(lambda _: Dense()),
    "dense, no zero start": Kind(lambda _: Dense(), options=NO_ZERO_START),
    "BTT r=1": BTT_ONE,
    "BTT r=1, attention r=2": replace(BTT_ONE, options=LINEAR_ATTENTION),
    "BTT r=1 + SiLU everywhere": replace(BTT_SILU, options={}),
    "BTT r=1 + SiLU, attention dense": replace(BTT_SILU, options={"include": "ffn"}),
    "BTT r=1 + SiLU, attention r=2": BTT_SILU,
    "BTT r=1 + SiLU, attention r=2, head r=4": silu(lambda _: BTT(rank=1), overrides=HEAD),
    "BTT r=1 + SiLU, attention r=2, width x 1.25": replace(BTT_SILU, wider=1.25),
    "BTT r=1 + SiLU, attention r=2, width x 1.5": replace(BTT_SILU, wider=1.5),
    "BTT r=1 + SiLU, attention's input r=2, width x 1.5": replace(
        silu(lambda _: BTT(rank=1), overrides=ATTENTION_INPUT), wider=1.5
    ),
    "BTT r=1 + SiLU, attention r=2, width x 1.5, not normalised": replace(
        silu(lambda _: BTT(rank=1), weight_norm=False), wider=1.5
    ),
    "BTT r=1 + SiLU, attention r=2, width x 1.5, no zero start": replace(
        silu(lambda _: BTT(rank=1), **NO_ZERO_START), wider=1.5
    ),
    "BTT r=2 + SiLU, attention r=2, width x 1.5, no zero start": replace(
        silu(lambda _: BTT(rank=2), **NO_ZERO_START), wider=1.5
    ),
    "BTT r=2 + SiLU, attention's input r=2, width x 1.5, no zero start": replace(
        silu(lambda _: BTT(rank=2), overrides=INPUT_NOT_ZERO, **NO_ZERO_START), wider=1.5
    ),
    "BTT r=1 + SiLU, attention r=2, width x 2": replace(BTT_SILU, wider=2),
    "BTT r=2 + SiLU, attention r=2": silu(lambda _: BTT(rank=2)),
    "BTT r=2 + SiLU, attention r=2, width x 1.25": replace(silu(lambda _: BTT(rank=2)), wider=1.25),
    "Monarch 4 + SiLU, attention r=2": silu(lambda _: Monarch(blocks=4)),
    "low-rank d/4 + SiLU, attention r=2": silu(lambda width: LowRank(rank=width // 4)),
}
BEST = {  # optimizer -> what docs/gpts.md is about
    "AdamW": "BTT r=1 + SiLU, attention r=2, width x 1.5",
    "Muon": "BTT r=2 + SiLU, attention's input r=2, width x 1.5, no zero start",
}
ELSEWHERE = "gpt_seconds_epyc"  # the times of another machine
NARROWER = "BTT r=1 + SiLU, attention r=2, width x 1.25"  # what the page says of 768
RANK_TWO = "BTT r=2 + SiLU, attention r=2, width x 1.25"  # what it says of 256 and 512


def make_task(setup: str, width: int, seed: int, sizes: Mapping[str, int]) -> Task:
    """The task of a model that is compared with dense of that width."""
    source, task = SETUPS[setup].source, SETUPS[setup].task
    path = None if source is None else require(source)
    heads = max(1, width // models.HEAD)
    return read_task(task, path=path, seed=seed, heads=heads, **sizes)


@cache
def read_task(task: type[Task], path: Path | None, seed: int, **sizes: int) -> Task:
    return task(seed, path, **sizes)


def build(
    setup: str, kind: str, width: int, seed: int, sizes: Mapping[str, int], device: str = "cpu"
) -> nn.Module:
    """`width`: of the dense model that it is compared with."""
    task, found = make_task(setup, width, seed, sizes), KINDS[kind]
    own = round(width * found.wider)
    return models.build(task, own, found.structure(own), seed, device, **found.options)


def make_trainer(
    setup: str, optimizer: str, kind: str, width: int, lr: float, seed: int, sizes: Row
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(setup, kind, width, seed, sizes)
    if optimizer == "Muon":
        return model, structlin.optim.Muon(model, lr, other_lr=OTHER_LR, momentum=MOMENTUM)
    if optimizer == "AdamW, normed":
        adam = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)
        return model, structlin.optim.Normed(adam, model)
    groups = structlin.param_groups(model, lr, base=build(setup, "dense", BASE, 0, sizes, "meta"))
    return model, torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), fused=True)


def train(
    setup: str,
    optimizer: str,
    kind: str,
    width: int,
    length: float,
    lr: float,
    seed: int,
    **sizes: Any,
) -> Row:
    """The held-out loss, FLOPs of a training step, parameters."""
    size = sizes[setup]
    task, steps = make_task(setup, width, seed, size), max(1, round(length * size["steps"]))
    model, adam = make_trainer(setup, optimizer, kind, width, lr, seed, size)

    warmup = max(1, min(WARM_UP, steps // 5))
    curve = training.follow(model, adam, task, steps, warmup)
    tokens = 3 * len(task.batch(0)[0]) * task.tokens  # backward costs twice what forward does
    cost = structlin.cost(model, task.heldout[0][0][:1])
    return {
        "loss": curve[-1][1],
        "curve": curve,
        "steps": steps,
        "flops": tokens * (cost.flops // task.tokens),
        "params": cost.params,
    }


def time_steps(
    setup: str, optimizer: str, width: int, kinds: Sequence[str], sizes: Row, seconds: float
) -> list[Row]:
    """A training step of each kind in turns, all on one batch: milliseconds, and the spread of its
    time over dense's of the same round."""
    batch = make_task(setup, width, 0, sizes).batch(0)

    def work(kind: str) -> Callable[[], None]:
        model, own = make_trainer(setup, optimizer, kind, width, RATES[optimizer], 0, sizes)
        return training.step_of(own, partial(training.cross_entropy, model, *batch))

    works = {kind: work(kind) for kind in kinds}
    for step in works.values():
        step()  # warms up
    until = time.perf_counter() + seconds
    clock = partial(wall, device="cpu")
    times = interleaved(works, clock, rounds=(3, 99), until=until)
    where = {"setup": setup, "optimizer": optimizer, "width": width}
    return [
        {**where, "kind": kind, "milliseconds": 1e3 * median(each)} | ratio(each, times["dense"])
        for kind, each in times.items()
    ]


# ---- the runs ------------------------------------------------------------------------------------

WHERE = ("setup", "optimizer", "width")


def design(runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
    """Every kind at its rate, for all widths and lengths; dense at the best of each width."""
    for group in combinations({name: axes[name] for name in ("setup", "optimizer", "kind")}):

        def best_rate(width: int, *first: float, group: Row = group) -> float:
            where = {**group, "width": width, "length": max(LENGTHS)}
            looks = runs.of({**where, "lr": lr, "seed": 0} for lr in first)
            start = best(curve_of_rates(looks))
            return best(curve_of_rates(tune(runs, where, [0], Tune(lambda _: start))))

        rate = best_rate(TUNED, RATES[group["optimizer"]])
        grid = {name: axes[name] for name in ("width", "length", "seed")}
        jobs = [{**group, **job, "lr": rate} for job in combinations(grid)]
        if group["kind"] == "dense":
            others = sorted({*values(jobs, "width")} - {TUNED})
            rates = {width: best_rate(width, rate, rate / 2) for width in others}
            jobs = [job | {"lr": rates.get(job["width"], rate)} for job in jobs]
        runs.of(jobs)
    return runs.all()


def at_best_rates(rows: Sequence[Row]) -> list[Row]:
    """The rows of each kind and width at the best of the rates that its seed 0 ran for longest
    there."""
    found = []
    for of in combinations({name: values(rows, name) for name in WHERE} | {"kind": KINDS}):
        if first := select(mine := select(rows, **of), seed=0):
            longest = select(first, length=max(values(first, "length")))
            found += select(mine, lr=best(curve_of_rates(longest)))
    return found


def measure(chosen: Row, found: Row) -> Row:
    """The times of all steps, and what follows from them."""
    rows = at_best_rates(found["rows"])
    times: list[Row] = []
    for where in combinations({name: values(rows, name) for name in WHERE}):
        mine = select(rows, **where)
        if mine and select(mine, kind="dense", length=max(values(mine, "length"))):
            kinds = sorted(values(mine, "kind"), key=[*KINDS].index)
            size, seconds = chosen[where["setup"]], chosen["timed"]
            times += time_steps(**where, kinds=kinds, sizes=size, seconds=seconds)
    return {"threads": torch.get_num_threads(), "times": times, "table": tabulate(rows, times)}


def tabulate(rows: Sequence[Row], times: Sequence[Row]) -> list[Row]:
    """What follows from the rows, at the best rates, and from a machine's times."""
    return [
        where | row
        for where in combinations({name: values(times, name) for name in WHERE})
        if (now := select(times, **where))
        for row in compare_kinds(select(rows, **where), now)
    ]


def compare_kinds(rows: Sequence[Row], times: Sequence[Row]) -> list[Row]:
    """A row for each kind and length, over dense of the longest.

    Args:
        rows: of one width, at the best rates.
        times: of a step of each kind.
    """
    longest = max(values(select(rows, kind="dense"), "length"))
    dense = select(rows, kind="dense", length=longest)
    table = []
    for each in times:
        kind, mine = each["kind"], select(rows, kind=each["kind"])
        if not mine:
            continue
        steps = {row["length"]: row["steps"] / dense[0]["steps"] for row in mine}
        flops = mine[0]["flops"] / dense[0]["flops"]
        spent = {
            "seconds": {length: share * each["median"] for length, share in steps.items()},
            "flops": {length: share * flops for length, share in steps.items()},
        }
        for length in sorted(steps, reverse=True):
            runs = sorted(select(mine, length=length), key=lambda row: row["seed"])
            row = {
                "kind": kind,
                "own_width": round(runs[0]["width"] * KINDS[kind].wider),
                "params": runs[0]["params"],
                "lr": runs[0]["lr"],
                "steps": runs[0]["steps"],
                "losses": [run["loss"] for run in runs],
                **{cost: found[length] for cost, found in spent.items()},
                "spread": [steps[length] * each[name] for name in ("p20", "p80")],
            }
            if kind != "dense" and length == max(steps):
                seeds = sorted({*seeds_of(dense)} & {*seeds_of(runs)})
                whole = [n for n in steps if {*seeds} <= {*seeds_of(select(mine, length=n))}]
                row["until"] = {
                    cost: {"by_seed": [fewer([seed]) for seed in seeds]} | bootstrap(fewer, seeds)
                    for cost, found in spent.items()
                    for fewer in [partial(times_fewer, dense, mine, {n: found[n] for n in whole})]
                }
            table.append(row)
    return table


def needed(curve: Sequence[tuple[float, float]], loss: float) -> float:
    """What the first point of `curve` at or below `loss` costs, linear in logarithms between two;
    infinite if none is.

    >>> curve = [(10.0, 1.0), (1000.0, 0.25)]
    >>> round(needed(curve, 0.5)), needed(curve, 2.0), needed(curve, 0.1)
    (100, 10.0, inf)
    """
    if curve[0][1] <= loss:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 <= loss:
            if math.isinf(y0):  # diverged
                return x1
            share = math.log(y0 / loss) / math.log(y0 / y1)
            return float(x0 * (x1 / x0) ** share)
    return math.inf


def times_fewer(
    dense: Sequence[Row], rows: Sequence[Row], spent: Mapping[float, float], seeds: Sequence[int]
) -> float:
    """How many times less than dense a kind needs until dense's loss, over `seeds`; 0: never.

    Args:
        dense: its rows of the longest schedule.
        rows: of one kind.
        spent: length -> cost over dense's; of the lengths that all `seeds` have.
    """

    def loss(found: Sequence[Row]) -> float:
        return math.exp(fmean(log_loss(one(found, seed=seed)) for seed in seeds))

    curve = [(spent[length], loss(select(rows, length=length))) for length in sorted(spent)]
    return 1 / needed(curve, loss(dense))


# ---- the report ----------------------------------------------------------------------------------


def words(row: Row) -> str:
    """A factor with its interval where that shows; "never" if dense's loss is not met.

    >>> words({"value": 2, "low": 1.9, "high": 2.2}), words({"value": 2, "low": 2, "high": 2.01})
    ('2.0 (1.9 to 2.2)', '2.0')
    """
    if row["value"] == 0:
        return "never"
    value, low, high = (f"{row[name]:.1f}" for name in ("value", "low", "high"))
    return value if low == high else f"{value} ({low} to {high})"


def is_best(row: Row) -> bool:
    """Whether it is of the kind in `BEST` of its optimizer."""
    return bool(row["kind"] == BEST.get(row["optimizer"]))


def markdown(result: Row, elsewhere: Row) -> str:
    """A table of docs/gpts.md: `BEST` beside dense, whole schedules, a line for each width.

    Args:
        elsewhere: what has the times of another machine.
    """
    titles = [
        "",
        "dense width",
        "dense's loss, by seed",
        "structured",
        "FLOPs",
        "seconds",
        "times sooner",
    ]
    here = [row for row in result["table"] if is_best(row) and "until" in row]
    there = tabulate(at_best_rates(result["rows"]), elsewhere["times"])
    lines = []
    for row in sorted(here, key=lambda row: (row["setup"], row["optimizer"], row["width"])):
        where = {name: row[name] for name in WHERE}
        dense = max(
            select(result["table"], kind="dense", **where), key=lambda found: found["steps"]
        )
        data = ", ".join([row["setup"], *({row["optimizer"]} - {"AdamW"})])
        losses = [report.losses(found["losses"]) for found in (dense, row)]
        other = [found for found in select(there, **where) if is_best(found) and "until" in found]
        both = [row, *other]
        seconds = ", ".join(f"{found['seconds']:.2f}" for found in both)
        until = ", ".join(words(found["until"]["seconds"]) for found in both)
        flops = f"{row['flops']:.2f}"
        lines.append([data, str(row["width"]), *losses, flops, seconds, until])
    return report.table(titles, lines)


def candidates(result: Row) -> str:
    """A table of docs/gpts.md: every kind on the standard library's characters, at the width where
    rates are tuned."""
    rows = select(result["table"], setup="Python", optimizer="AdamW", width=TUNED)
    whole = max(row["steps"] for row in select(rows, kind="dense"))
    lines = [
        [row["kind"], f"{row['flops']:.2f}", f"{row['seconds']:.2f}", report.losses(row["losses"])]
        for row in select(rows, steps=whole)
    ]
    return report.table(["", "FLOPs", "seconds", "loss"], lines)


def draw(result: Row) -> figures.Figure:
    """Held-out loss of dense and `BEST` against seconds and FLOPs, over those of dense's longest
    schedule."""
    rows, points = at_best_rates(result["rows"]), []
    for row in (row for row in result["table"] if row["kind"] == "dense" or is_best(row)):
        where = {name: row[name] for name in (*WHERE, "kind")}
        if "until" not in row and row["kind"] != "dense":
            continue  # not its longest
        for run in select(rows, **where, steps=row["steps"]):
            points += [
                {**where, "of": cost, "over dense's": row[cost] * step / run["steps"], "loss": loss}
                for cost in ("seconds", "flops")
                for step, loss in run["curve"]
            ]
    shown: Row = {"panel": [*WHERE, "of"], "line": ["kind"], "log": "", "columns": 2}
    return figures.curves(points, "over dense's", **shown)


def settings(**changes: int) -> dict[str, dict[str, int]]:
    """What the runs of each setup share."""
    return {name: {**setup.sizes, **changes} for name, setup in SETUPS.items()}


def numbers(result: Row) -> dict[str, str]:
    """What the structured GPT costs over dense's of width 512, and how many times fewer seconds it
    needs until dense's loss, on both machines; how far above dense it ends on the other text; and
    what narrower ones have, at 768 and with rank 2."""
    of = {"setup": "Python", "optimizer": "AdamW", "width": 512, "kind": BEST["AdamW"]}
    rows, found = at_best_rates(result["rows"]), dict[str, str]()
    for machine, times in (("xeon", result["times"]), ("epyc", read(ELSEWHERE)["times"])):
        (row,) = (row for row in select(tabulate(rows, times), **of) if "until" in row)
        found["gpts.flops"] = f"{row['flops']:.2f}"
        found[f"gpts.{machine}"] = f"{min(row['until']['seconds']['by_seed']):.1f}"
    wikipedia = beside_dense(result, BEST["AdamW"], setup="Wikipedia", width=512)
    narrow = beside_dense(result, NARROWER, setup="Python", width=768)
    ranked = beside_dense(result, RANK_TWO, setup="Python", width=512)
    return found | {
        "gpts.wikipedia": report.percent(wikipedia["loss"] - 1),
        "gpts.narrow_loss": report.percent(1 - narrow["loss"], 1),
        "gpts.narrow_seconds": f"{narrow['seconds']:.2f}",
        "gpts.rank_loss": report.percent(1 - ranked["loss"], 1),
        "gpts.rank_seconds": f"{ranked['seconds']:.2f}",
    }


def beside_dense(result: Row, kind: str, **where: Any) -> dict[str, float]:
    """The loss and the seconds of a kind over dense's, by AdamW."""
    rows = select(result["table"], **where, optimizer="AdamW")
    ours, dense = (select(rows, kind=each)[0] for each in (kind, "dense"))
    return {"loss": fmean(ours["losses"]) / fmean(dense["losses"]), "seconds": ours["seconds"]}


TABLES = {
    "gpt seconds": lambda result: markdown(result, read(ELSEWHERE)),
    "gpt candidates": candidates,
}


EXPERIMENT = Experiment(
    name="gpt_seconds",
    about=__doc__,
    numbers=numbers,
    tables=TABLES,
    run=train,
    axes={
        "setup": [*SETUPS],
        "optimizer": [*RATES],
        "kind": [*KINDS],
        "width": [256, 512, 768],
        "length": [*LENGTHS],
        "lr": [],
    },
    sizes=settings(),
    note={
        "vocabulary": VOCABULARY,
        "base": BASE,
        "other_lr": OTHER_LR,
        "momentum": MOMENTUM,
        "head_std": models.HEAD_STD,
        "warm_up": WARM_UP,
    },
    smoke={
        **settings(batch=2, depth=1, steps=4),
        "setup": ["Python"],
        "optimizer": ["AdamW"],
        "kind": ["dense", "Monarch 4 + SiLU, attention r=2"],
        "width": [64],
        "seeds": 1,
        "timed": 0.0,
    },
    extra={"timed": 30.0},
    design=design,
    analyse=lambda rows: {},
    beside=measure,
    show=lambda result: [markdown(result, {"times": []})],
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
