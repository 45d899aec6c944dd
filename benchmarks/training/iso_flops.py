"""Loss at equal training FLOPs, where width and length are both free.

    python -m benchmarks.training.iso_flops # two days, in pieces
    python -m benchmarks.training.iso_flops --budgets 1e12 --setups Python
    python -m benchmarks.training.iso_flops --smoke # seconds; results/iso_flops.{json,png}

Every run of a budget takes the same FLOPs: a narrower model makes more steps. A model's width goes
along `WIDTHS` until the best one has both its neighbours, so each kind is compared at its own best
width and length. The models, the data and the starts are those of `gpt_seconds`.

Kinds: "dense"; "BTT r=4" and the like, with structured MLPs (SiLU between the cores) and attention;
"BTT r=4, wide MLPs", whose MLPs are structured with hidden layers of eight times the width, and
whose attention is dense.

Rates are searched by factors of 2 at the two smallest budgets, first at the width where the search
begins, then again at the best width. From there the library's own rules carry them (muP from dense
width 256). All choices are made by the validation loss of seed 0. Reported is the test loss: the
windows of the held-out tenth are divided in turns, 512 to validate and 2,048 to test.

A run keeps a checkpoint beside its result and goes on from it. The file of rows goes on too.
"""

import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

import structlin
from benchmarks.harness import figures, models, record, report, training
from benchmarks.harness.experiment import Axis, Experiment, Row, Runs
from benchmarks.harness.statistics import log_loss, select, values
from benchmarks.harness.tasks import Batch
from benchmarks.training import gpt_seconds
from structlin import BTT

BATCH_TOKENS = 512
WIDTHS = [32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768]
TUNED_BUDGETS = 2  # the smallest ones, at which rates are searched
SECONDS_BETWEEN_CHECKPOINTS = 120.0
VALIDATION_WINDOWS = 512
TEST_WINDOWS = 2048
MLP_MULTIPLE = 4  # hidden features of an MLP per feature of the model
WIDE_MLP_MULTIPLE = 8
STRUCTURED = {  # ranks in MLPs and in attention; None: dense
    "BTT r=4": (4, 4),
    "BTT r=2": (2, 2),
    "BTT r=1": (1, 1),
    "BTT r=4, wide MLPs": (4, None),
}
START_WIDTHS = {  # where the search begins at the smallest budget
    "dense": 64,
    "BTT r=4": 96,
    "BTT r=2": 128,
    "BTT r=1": 160,
    "BTT r=4, wide MLPs": 64,
}
START_RATES = {
    "AdamW": {"lr": 2**-9, "other_lr": 2**-9},
    "Muon": {"lr": 2**-6, "other_lr": 2**-7},
    "SOAP": {"lr": 2**-6, "other_lr": 2**-7},
}
CELL = ("setup", "optimizer", "kind", "budget")  # what is compared at its own best width and rates


# ---- models and data -----------------------------------------------------------------------------


def make_task(setup: str, seed: int, sizes: Row) -> gpt_seconds.Task:
    return gpt_seconds.make_task(setup, seed, sizes[setup])


def build(setup: str, kind: str, width: int, seed: int, sizes: Row, device: str) -> nn.Module:
    """A model of this width, on the device."""
    task, start = make_task(setup, seed, sizes), gpt_seconds.SETUPS[setup]
    if kind == "dense":
        structure = None if start.zero else structlin.Dense()
        return models.build(task, width, structure, seed, device, **gpt_seconds.PLAIN)
    mlp_rank, attention_rank = STRUCTURED[kind]
    attention = structlin.Dense() if attention_rank is None else BTT(rank=attention_rank)
    if kind.endswith("wide MLPs"):
        task = WideMLPs(task)
    options = {"overrides": {"*attn*": attention}, "weight_norm": start.weight_norm}
    structure = BTT(rank=mlp_rank).activate()
    return models.build(task, width, structure, seed, device, **gpt_seconds.PLAIN | options)


class WideMLPs:
    """A task whose models have MLPs of `WIDE_MLP_MULTIPLE` times the width."""

    def __init__(self, task: gpt_seconds.Task) -> None:
        self.task = task
        self.weight_norm = task.weight_norm

    def model(self, width: int) -> nn.Module:
        model = self.task.model(width)
        hidden = WIDE_MLP_MULTIPLE * width
        for block in model.blocks:
            block.mlp.c_fc = nn.Linear(width, hidden, bias=False)
            block.mlp.c_proj = nn.Linear(hidden, width, bias=False)
        models.initialise(model, embedding=0.2)
        return model


@cache
def evaluation_batches(setup: str, **sizes: int) -> dict[str, list[Batch]]:
    """Windows spread over the held-out tenth: every fifth validates, the others test."""
    task = make_task(setup, 0, {setup: sizes})
    total = sizes.get("windows", VALIDATION_WINDOWS + TEST_WINDOWS)
    starts = torch.linspace(0, len(task.held) - task.tokens - 1, total).long()
    validates = torch.arange(total) % 5 == 0
    parts = {"validation": starts[validates], "test": starts[~validates]}
    return {
        name: [task.windows(task.held, chunk) for chunk in part.split(64)]
        for name, part in parts.items()
    }


def make_optimizer(
    setup: str, optimizer: str, model: nn.Module, rates: Row, sizes: Row
) -> torch.optim.Optimizer:
    task = make_task(setup, 0, sizes)
    base = models.build(task, sizes["base"], None, 0, "meta")
    if optimizer == "AdamW":
        return structlin.optim.AdamW(
            model, rates["lr"], betas=(0.9, 0.95), weight_decay=0.0, base=base, fused=True
        )
    kinds = {"Muon": structlin.optim.Muon, "SOAP": structlin.optim.SOAP}
    return kinds[optimizer](model, **rates, base=base, momentum=gpt_seconds.MOMENTUM)


# ---- a run ---------------------------------------------------------------------------------------


def flops_of_a_step(setup: str, kind: str, width: int, sizes: Row) -> tuple[int, int]:
    """Training FLOPs of one step (backward takes twice what forward does), and parameters."""
    task = make_task(setup, 0, sizes)
    model = build(setup, kind, width, 0, sizes, "meta")
    cost = structlin.cost(model, task.heldout[0][0][:1].to("meta"))
    tokens = sizes[setup]["batch"] * task.tokens
    return 3 * tokens * (cost.flops // task.tokens), cost.params


def train(
    setup: str, optimizer: str, kind: str, budget: float, width: int, lr: float, other_lr: float,
    seed: int, **sizes: Any,
) -> Row:  # fmt: skip
    """The validation and test losses after `budget` FLOPs; None where the run diverged."""
    flops, params = flops_of_a_step(setup, kind, width, sizes)
    steps = max(2, round(budget / flops))
    task = make_task(setup, seed, sizes)
    torch.manual_seed(seed)
    model = build(setup, kind, width, seed, sizes, "cpu")
    rates = {"lr": lr, "other_lr": other_lr}
    descent = make_optimizer(setup, optimizer, model, rates, sizes)
    name = f"{setup} {optimizer} {kind} {budget:.0e} {width} {lr:.6g} {other_lr:.6g} {seed}"
    checkpoint = Path(sizes["checkpoints"]) / f"{name}.pt" if sizes["checkpoints"] else None
    seconds = follow(model, descent, task, steps, checkpoint)
    losses: Row = {"validation": None, "test": None}
    if seconds is not None:
        batches = evaluation_batches(setup, **sizes[setup])
        for part in losses:
            losses[part] = training.finite(training.held_out(model.eval(), batches[part]))
    return {
        "loss": losses["validation"],
        "test": losses["test"],
        "steps": steps,
        "flops": flops,
        "params": params,
        "cpu_seconds": seconds,
    }


def follow(
    model: nn.Module,
    descent: torch.optim.Optimizer,
    task: gpt_seconds.Task,
    steps: int,
    checkpoint: Path | None,
) -> float | None:
    """Train with a linear warm-up and a cosine to a tenth, from the checkpoint if there is one.

    Returns:
        CPU seconds of this process, those before an interruption included; None if it diverged.
    """
    warm_up = max(1, min(gpt_seconds.WARM_UP, steps // 5))
    base_rates = [group["lr"] for group in descent.param_groups]
    first_step = 0
    earlier_seconds = 0.0
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        descent.load_state_dict(saved["optimizer"])
        first_step = saved["step"]
        earlier_seconds = saved["seconds"]
    start = time.process_time()
    saved_at = time.monotonic()
    for step in range(first_step, steps):
        share = (step + 1) / warm_up
        if step >= warm_up:
            share = 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))
        for group, rate in zip(descent.param_groups, base_rates, strict=True):
            group["lr"] = rate * share
        loss = training.cross_entropy(model, *task.batch(step))
        if not math.isfinite(loss.item()):
            return None
        descent.zero_grad()
        loss.backward()
        try:
            descent.step()
        except FloatingPointError:  # Muon's, on gradients that are not finite
            return None
        if checkpoint is not None and time.monotonic() > saved_at + SECONDS_BETWEEN_CHECKPOINTS:
            saved_at = time.monotonic()
            save_checkpoint(
                checkpoint, model, descent, step + 1, earlier_seconds + time.process_time() - start
            )
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return earlier_seconds + time.process_time() - start


def save_checkpoint(
    path: Path, model: nn.Module, descent: torch.optim.Optimizer, step: int, seconds: float
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": descent.state_dict()}
    written = path.with_suffix(".new")
    torch.save(state | {"step": step, "seconds": seconds}, written)
    written.replace(path)


# ---- the search ----------------------------------------------------------------------------------


def design(runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
    """Each cell by itself, the smallest budget first, since a budget starts from the one before."""
    budgets = sorted(axes["budget"])
    for position, budget in enumerate(budgets):
        searches_rates = position < TUNED_BUDGETS and not runs.options.smoke
        for setup in axes["setup"]:
            for kind in axes["kind"]:
                for optimizer in axes["optimizer"]:
                    cell = {"setup": setup, "optimizer": optimizer, "kind": kind, "budget": budget}
                    search_cell(runs, cell, axes["seed"], searches_rates)
    return runs.all()


def search_cell(runs: Runs, cell: Row, seeds: Sequence[int], searches_rates: bool) -> None:
    """The best rates and the best width of a cell by seed 0, then all seeds there."""
    job = start_of(runs.all(), cell)
    rounds = 1 if runs.options.smoke else 10
    if searches_rates:
        job = search_rates(runs, cell, job, rounds)
    job = search_width(runs, cell, job, rounds)
    if searches_rates:
        job = search_rates(runs, cell, job, rounds)
        job = search_width(runs, cell, job, rounds)
    runs.of(job | {"seed": seed} for seed in seeds)


def start_of(rows: Sequence[Row], cell: Row) -> Row:
    """Where the search of a cell begins: at the best of the next smaller budget that has been run,
    whose width grows as the fourth root of the FLOPs."""
    same = {name: cell[name] for name in CELL if name != "budget"}
    smaller = [row for row in select(rows, **same) if row["budget"] < cell["budget"]]
    if not smaller:
        rates = START_RATES[cell["optimizer"]]
        return cell | rates | {"width": START_WIDTHS[cell["kind"]]}
    budget = max(row["budget"] for row in smaller)
    best = best_of(smaller, same | {"budget": budget})
    grown = best["width"] * (cell["budget"] / budget) ** 0.25
    width = min(WIDTHS, key=lambda width: abs(width - grown))
    return cell | {"width": width, "lr": best["lr"], "other_lr": best["other_lr"]}


def search_rates(runs: Runs, cell: Row, job: Row, rounds: int) -> Row:
    """Rates by factors of 2 at the job's width, until the best has both neighbours of each."""
    place = cell | {"width": job["width"]}
    for _ in range(rounds):
        candidates = [job]
        for name in gpt_seconds.names_of(cell["optimizer"]):
            candidates += [job | {name: job[name] * factor} for factor in (0.5, 2)]
        if cell["optimizer"] == "AdamW":  # which has one rate
            candidates = [each | {"other_lr": each["lr"]} for each in candidates]
        runs.of(candidate | {"seed": 0} for candidate in candidates)
        best = best_of(runs.all(), place)
        before = job
        job = place | {"lr": best["lr"], "other_lr": best["other_lr"]}
        if job == before:
            break
    return job


def search_width(runs: Runs, cell: Row, job: Row, rounds: int) -> Row:
    """Widths at the job's rates, until the best has both its neighbours."""
    rates = {"lr": job["lr"], "other_lr": job["other_lr"]}
    for _ in range(rounds):
        position = WIDTHS.index(job["width"])
        candidates = [
            job | {"width": width} for width in WIDTHS[max(0, position - 1) : position + 2]
        ]
        runs.of(candidate | {"seed": 0} for candidate in candidates)
        before = job
        job = cell | rates | {"width": best_of(runs.all(), cell | rates)["width"]}
        if job == before:
            break
    return job


def best_of(rows: Sequence[Row], place: Row) -> Row:
    """The row of the lowest validation loss of seed 0."""
    return min(select(rows, **place, seed=0), key=log_loss)


# ---- the report ----------------------------------------------------------------------------------


def tabulate(rows: Sequence[Row]) -> list[Row]:
    """For each cell its best width and rates, and the test losses of all seeds there."""
    table = []
    cells = [{name: row[name] for name in CELL} for row in rows]
    for cell in dict.fromkeys(tuple(cell.items()) for cell in cells):
        place = dict(cell)
        best = best_of(rows, place)
        chosen = {name: best[name] for name in ("width", "lr", "other_lr", "steps", "params")}
        same = select(rows, **place, width=best["width"], lr=best["lr"], other_lr=best["other_lr"])
        by_seed = sorted(same, key=lambda row: row["seed"])
        tests = [row["test"] for row in by_seed]
        table.append(place | chosen | {"losses": tests, "widths": width_curve(rows, place)})
    return sorted(
        table, key=lambda row: (row["setup"], row["optimizer"], row["kind"], row["budget"])
    )


def width_curve(rows: Sequence[Row], place: Row) -> list[tuple[int, float]]:
    """The lowest test loss of seed 0 at each width, at the rates that validation chose there."""
    curve = []
    for width in sorted({*values(select(rows, **place), "width")}):
        test = best_of(rows, place | {"width": width})["test"]
        if test is not None:
            curve.append((width, test))
    return curve


def fronts(result: Row) -> str:
    """A table: mean test losses at the best width, a line for each data, optimizer and kind."""
    cells = {}
    for row in result["table"]:
        losses = [loss for loss in row["losses"] if loss is not None]
        if losses:
            line = f"{row['setup']}, {row['optimizer']}, {row['kind']}"
            cells[line, f"{row['budget']:.0e}"] = f"{fmean(losses):.3f} (width {row['width']})"
    return report.pivot(cells)


Front = dict[float, list[float]]  # budget -> the test losses of all seeds, at the best width


def front_of(table: Sequence[Row], seeds: int, **line: str) -> Front:
    """The front of one setup, optimizer and kind, over the budgets at which so many seeds or
    more ran, and none diverged."""
    return {
        row["budget"]: row["losses"]
        for row in select(table, **line)
        if len(row["losses"]) >= seeds and all(row["losses"])
    }


def flops_to_reach(loss: float, front: Mapping[float, float]) -> float:
    """The FLOPs at which a front has this loss: a line between the logarithms of two budgets, the
    last or the first two where the loss lies beyond them.

    >>> round(flops_to_reach(1.5, {1e12: 2.0, 4e12: 1.0}) / 1e12, 3)
    1.778
    >>> round(flops_to_reach(1.0, {1e12: 4.0, 1e14: 2.0}) / 1e16, 3)
    1.0
    """
    budgets = sorted(front)
    below = next((budget for budget in budgets[1:] if front[budget] <= loss), budgets[-1])
    above = budgets[budgets.index(below) - 1]
    share = math.log(front[above] / loss) / math.log(front[above] / front[below])
    return above * (below / above) ** share


def compare(table: Sequence[Row]) -> list[Row]:
    """Each structured front beside dense's of the same data and optimizer, budget by budget.

    "above" holds for each seed by how many percent its loss lies above dense's. "compute" holds
    for each seed how many times this budget dense needs for that loss; it is left out where dense
    ran at one budget.
    """
    rows = []
    for row in table:
        line = {"setup": row["setup"], "optimizer": row["optimizer"]}
        if row["kind"] == "dense" or not all(row["losses"]):
            continue
        dense = front_of(table, len(row["losses"]), kind="dense", **line)
        if row["budget"] not in dense:
            continue
        pairs = zip(row["losses"], dense[row["budget"]], strict=False)  # dense may have more
        compared = line | {"kind": row["kind"], "budget": row["budget"]}
        compared["above"] = [100 * (loss / other - 1) for loss, other in pairs]
        if len(dense) > 1:
            compared["compute"] = [
                flops_to_reach(loss, {budget: losses[seed] for budget, losses in dense.items()})
                / row["budget"]
                for seed, loss in enumerate(row["losses"])
            ]
        rows.append(compared)
    return rows


def span(numbers: Sequence[float], digits: str) -> str:
    """The mean, and in brackets the least and the most of the seeds.

    >>> span([1.0, 2.0, 4.5], ".1f")
    '2.5 (1.0 to 4.5)'
    """
    ends = f"{min(numbers):{digits}} to {max(numbers):{digits}}"
    return f"{fmean(numbers):{digits}} ({ends})" if len(numbers) > 1 else f"{numbers[0]:{digits}}"


def distances(result: Row) -> str:
    """A table: percent above dense, and the compute that dense needs, by budget."""
    cells = {}
    for row in compare(result["table"]):
        line = f"{row['setup']}, {row['optimizer']}, {row['kind']}"
        budget = f"{row['budget']:.0e}"
        cells[line, f"{budget}: % above dense"] = span(row["above"], "+.1f")
        if "compute" in row:
            cells[line, f"{budget}: compute of dense"] = span(row["compute"], ".2f")
    return report.pivot(cells)


def numbers(result: Row) -> dict[str, str]:
    """For the pages: by how much BTT of rank 4 differs from dense on characters, under names such
    as "iso.AdamW_1e12"."""
    texts = {"iso.runs": str(len(result["rows"]))}
    for row in select(compare(result["table"]), setup="Python", kind="BTT r=4"):
        budget = f"{row['budget']:.0e}".replace("+", "")
        texts[f"iso.{row['optimizer']}_{budget}"] = in_words(row["above"])
    return texts | numbers_of_the_largest_budget(result) | numbers_of_a_longer_run(result)


def numbers_of_the_largest_budget(result: Row) -> dict[str, str]:
    """The same at the largest budget at which every optimizer has more than one seed, under names
    such as "iso.adamw"."""
    rows = select(compare(result["table"]), setup="Python", kind="BTT r=4")
    above = {
        (row["optimizer"], row["budget"]): row["above"] for row in rows if len(row["above"]) > 1
    }
    optimizers = {optimizer for optimizer, _ in above}
    budget = max(
        budget
        for _, budget in above
        if all((optimizer, budget) in above for optimizer in optimizers)
    )
    texts = {"iso.budget": f"{budget:.0e}".replace("+", "")}
    for optimizer in optimizers:
        texts[f"iso.{optimizer.lower()}"] = in_words(above[optimizer, budget])
    return texts


def in_words(above: Sequence[float]) -> str:
    """By how much a loss differs from dense's in the mean of the seeds.

    >>> in_words([-1.0, -2.0]), in_words([0.5])
    ('1.5 % lower', '0.5 % higher')
    """
    mean = fmean(above)
    return f"{abs(mean):.1f} % {'lower' if mean < 0 else 'higher'}"


def numbers_of_a_longer_run(result: Row) -> dict[str, str]:
    """Dense on characters by SOAP at the budget nearest to the FLOPs of dense 256 of `gpt_seconds`,
    which is wider and trains on fewer tokens."""
    place = {"setup": "Python", "kind": "dense", "optimizer": "SOAP"}
    (wide,) = select(record.read("gpt_seconds")["table"], **place, width=256)
    flops = wide["flops"] * wide["steps"]
    longer = min(
        select(result["table"], **place), key=lambda row: abs(math.log(row["budget"] / flops))
    )
    return {
        "iso.longer_width": str(longer["width"]),
        "iso.longer_steps": f"{longer['steps']:,}",
        "iso.longer_loss": f"{fmean(longer['losses']):.3f}",
        "iso.longer_flops": f"{100 * longer['budget'] / flops:.0f} %",
        "iso.wide_loss": f"{fmean(wide['losses']):.3f}",
    }


def draw(result: Row) -> figures.Figure:
    """Test losses against training FLOPs, a line for each kind and optimizer."""
    points = [
        {"setup": row["setup"], "line": f"{row['kind']}, {row['optimizer']}"}
        | {"FLOPs": row["budget"], "loss": loss}
        for row in result["table"]
        for loss in row["losses"]
        if loss is not None
    ]
    return figures.curves(points, "FLOPs", panel=["setup"], line=["line"], columns=2)


EXPERIMENT = Experiment(
    name="iso_flops",
    about=__doc__,
    numbers=numbers,
    tables={"iso fronts": fronts, "iso distances": distances},
    run=train,
    axes={
        "setup": ["Python", "Wikipedia"],
        "optimizer": ["AdamW", "Muon", "SOAP"],
        "kind": ["dense", *STRUCTURED],
        "budget": [1e12, 5e12, 2e13, 8e13],
        "width": [],
        "lr": [],
        "other_lr": [],
    },
    sizes={"base": 256, "checkpoints": "out/iso_flops"}
    | {
        name: {k: v for k, v in gpt_seconds.SETUPS[name].sizes.items() if k != "steps"}
        for name in ("Python", "Wikipedia")
    },
    note={
        "vocabulary": gpt_seconds.VOCABULARY,
        "head_std": models.HEAD_STD,
        "momentum": gpt_seconds.MOMENTUM,
    },
    smoke={
        "checkpoints": "",
        "setup": ["Python"],
        "Python": {"context": 64, "batch": 2, "depth": 1, "windows": 20},
        "optimizer": ["AdamW", "SOAP"],
        "kind": ["dense", "BTT r=4"],
        "budget": [1e8, 4e8],
        "seeds": 1,
    },
    analyse=lambda rows: {"table": tabulate(rows)},
    design=design,
    show=lambda result: [fronts(result), distances(result)],
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
