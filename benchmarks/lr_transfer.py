"""Does the dense model's learning rate carry over to structures and widths? Figure 2 of "Compute
Better Spent".

    python -m benchmarks.lr_transfer            # the full result, results/lr_transfer.{json,png}
    python -m benchmarks.lr_transfer --smoke    # seconds
    python -m benchmarks.lr_transfer --structures low-rank    # the others' rows are kept

An MLP of three hidden layers on scikit-learn's digits, Adam, no schedule. All its matrices but the
head's are structured; the head stays dense, starts at zero and follows muP across widths. For each
structure, width, rule (naive: cores at the dense layer's rate; aware: `param_groups`) and base
learning rate: the final loss on the whole training set (figure 2b), and the RMS of the change of
the last hidden features over training (figure 2a).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn

import structlin
from benchmarks.record import RESULTS
from benchmarks.runs import ONLY, digits, keep, parser, rows_of_others, run_all
from structlin import stability

STRUCTURES = {
    "dense": lambda width: structlin.Dense(),
    "low-rank": lambda width: structlin.LowRank(rank=math.isqrt(width)),
    "Kronecker": lambda width: structlin.Kronecker(),
    "Monarch": lambda width: structlin.Monarch(blocks=4),
    "TT r=4": lambda width: structlin.TT(rank=4),
    "BTT r=1": lambda width: structlin.BTT(rank=1),
    "BTT r=4": lambda width: structlin.BTT(rank=4),
}
BASE_WIDTH = 64
RULES = ("naive", "aware")
LINES = {"naive": (".--", "naive"), "aware": (".-", "ours")}  # of the picture

Job = tuple[str, int, str]  # structure, width, rule
Flat = dict[str, list[str]]


def mlp(structure: str, width: int) -> nn.Sequential:
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10),
    )  # fmt: skip
    nn.init.zeros_(model[-1].weight)
    for layer in (model[0], model[2], model[4], model[6]):
        nn.init.zeros_(layer.bias)
    structlin.convert(model, STRUCTURES[structure](width), exclude="6", init="mup")
    return model


def make_optimizer(model: nn.Module, lr: float, width: int, rule: str) -> torch.optim.Optimizer:
    aware = rule == "aware"
    base = {width: BASE_WIDTH}
    return torch.optim.Adam(structlin.param_groups(model, lr, base=base, structure_aware=aware))


def train(
    model: nn.Sequential, lr: float, width: int, rule: str, steps: int, batch: int = 256
) -> tuple[float, float]:
    """The final loss on all images, and the RMS change of the last hidden features."""
    x, y = digits()
    features = model[:-1]
    before = features(x).detach()
    optimizer = make_optimizer(model, lr, width, rule)
    for _ in range(steps):
        chosen = torch.randint(len(x), (batch,))
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        final = F.cross_entropy(model(x), y).item()
        return final, (features(x) - before).square().mean().sqrt().item()


def sweep(job: Job, lrs: Sequence[float], seeds: int, steps: int) -> list[dict[str, Any]]:
    """A row for each rate and seed of a structure, width and rule."""
    structure, width, rule = job
    changes = list[float | None]()  # in the order of the sweep's runs

    def train_once(model: nn.Module, lr: float, width: int) -> float:
        assert isinstance(model, nn.Sequential)
        loss, change = train(model, lr, width, rule, steps)
        changes.append(change if math.isfinite(change) else None)
        return loss

    build = partial(mlp, structure)
    found = stability.lr_sweep(build, [width], lrs, train_once, seeds=range(seeds)).rows
    named = {"structure": structure, "width": width, "rule": rule}
    return [
        {**named, "lr": run.lr, "seed": run.seed, "loss": run.loss, "feature_change": change}
        for run, change in zip(found, changes, strict=True)
    ]


def check_coordinates(structure: str, widths: Sequence[int], lr: float, steps: int) -> Flat:
    """rule -> the layers whose features, or their changes, do not keep their size across widths."""
    x, y = digits()
    draw = torch.Generator().manual_seed(0)
    chosen = [torch.randint(len(x), (256,), generator=draw) for _ in range(steps)]
    found = {}
    for rule in RULES:
        check = stability.coordinate_check(
            partial(mlp, structure),
            widths,
            [(x[which], y[which]) for which in chosen],
            loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer=lambda model, width, rule=rule: make_optimizer(model, lr, width, rule),
            steps=steps,
        )
        found[rule] = sorted({slope.layer for slope in check.not_flat})
    return found


def best_lrs(
    rows: Iterable[dict[str, Any]],
) -> dict[tuple[str, int, str], tuple[float, dict[float, float]]]:
    """(structure, width, rule) -> the lr with the least loss, geometric mean over the seeds, and
    those means."""
    losses: dict[tuple[str, int, str], dict[float, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        loss = math.inf if row["loss"] is None else row["loss"]
        losses[row["structure"], row["width"], row["rule"]][row["lr"]].append(math.log(loss))
    means = {
        key: {lr: math.exp(sum(logs) / len(logs)) for lr, logs in sorted(by_lr.items())}
        for key, by_lr in losses.items()
    }
    return {key: (min(mean, key=mean.__getitem__), mean) for key, mean in means.items()}


def shifts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By how many factors of 2 the best lr lies from dense's at the base width, and what dense's lr
    costs in loss."""
    best = best_lrs(rows)
    reference = best["dense", BASE_WIDTH, "aware"][0]
    table = [
        {
            "structure": structure,
            "width": width,
            "rule": rule,
            "best_lr": lr,
            "shift": math.log2(lr / reference),
            "best_loss": means[lr],
            "loss_at_reference_lr": means[reference] if math.isfinite(means[reference]) else None,
        }
        for (structure, width, rule), (lr, means) in best.items()
    ]
    structured = [row for row in table if row["structure"] != "dense"]
    moved = {
        rule: [abs(row["shift"]) for row in structured if row["rule"] == rule] for rule in RULES
    }
    return {
        "reference_lr": reference,
        "mean_shift": {rule: sum(found) / len(found) for rule, found in moved.items()},
        "largest_shift": {rule: max(found) for rule, found in moved.items()},
        "table": table,
    }


def show(result: dict[str, Any], console: Console) -> None:
    widths = sorted({row["width"] for row in result["table"]})
    cells = {(row["structure"], row["width"], row["rule"]): row for row in result["table"]}
    table = Table(
        title=f"best learning rate against dense's at width {BASE_WIDTH}, "
        f"2^{math.log2(result['reference_lr']):g}: log2"
    )
    table.add_column("structure")
    for rule, width in product(RULES, widths):
        table.add_column(f"{rule} {width}", justify="right")
    for structure in STRUCTURES:
        found = [
            cells.get((structure, width, "aware" if structure == "dense" else rule))
            for rule, width in product(RULES, widths)
        ]
        table.add_row(structure, *(f"{row['shift']:+.0f}" if row else "" for row in found))
    console.print(table)
    for rule in RULES:
        mean, largest = result["mean_shift"][rule], result["largest_shift"][rule]
        console.print(
            f"{rule}: the best lr moves by {mean:.2f} factors of 2 on average, "
            f"{largest:.0f} at most"
        )


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/optimizers.md: log2 of the best learning rate over dense's at width 64."""
    widths = sorted({row["width"] for row in result["table"]})
    cells = {
        (row["structure"], row["width"], row["rule"]): f"{row['shift']:+.0f}"
        for row in result["table"]
    }
    lines = [
        f"| | {' | '.join(f'naive {w}' for w in widths)} | "
        f"{' | '.join(f'ours {w}' for w in widths)} |"
    ]
    lines.append("|---|" + "--:|" * (2 * len(widths)))
    for structure in STRUCTURES:
        found = [cells.get((structure, width, rule), "-") for rule, width in product(RULES, widths)]
        lines.append(f"| {structure} | {' | '.join(found)} |")
    mean, largest = result["mean_shift"], result["largest_shift"]
    for statistic, by_rule in (("mean", mean), ("largest", largest)):
        cells_of = [
            f"{by_rule[rule]:.2f}" if width == widths[0] else ""
            for rule, width in product(RULES, widths)
        ]
        lines.append(
            f"| {statistic} distance, all structures and widths | {' | '.join(cells_of)} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], result: dict[str, Any]) -> Figure:
    """Loss against the base learning rate at the least and the largest width: a panel for each
    structure, its curves by rule."""
    best, widths = best_lrs(rows), sorted({row["width"] for row in rows})
    names = [name for name in STRUCTURES if name != "dense" and (name, widths[0], "aware") in best]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(-(-len(names) // 3), min(3, len(names)), sharex=True, squeeze=False)
    colours = {widths[0]: "tab:purple", widths[-1]: "tab:green"}
    for axis, structure in zip(axes.flat, names, strict=False):
        for (width, colour), rule in product(colours.items(), RULES):
            lr, means = best[structure, width, rule]
            style, label = LINES[rule]
            axis.plot(
                *zip(*means.items(), strict=True), style, color=colour, label=f"{width}, {label}"
            )
            axis.plot([lr], [means[lr]], "o", color=colour, markersize=8)
        axis.axvline(result["reference_lr"], color="0.7", zorder=0)
        axis.set_xscale("log", base=2)
        axis.set(yscale="log", title=structure)
    for axis in axes[-1]:
        axis.set_xlabel("base learning rate")
    for axis in axes[:, 0]:
        axis.set_ylabel("final training loss")
    lines = axes[0, 0].get_legend_handles_labels()
    title = "width, rule of the rate; gray: dense's best rate"
    figure.legend(*lines, loc="outside lower center", ncols=4, title=title)
    return figure


def plot_some(result: dict[str, Any], structures: Sequence[str]) -> Figure:
    """Loss against the base learning rate: a row for each rule, a column for each of
    `structures`."""
    best, widths = best_lrs(result["rows"]), sorted({row["width"] for row in result["table"]})
    figure = Figure(figsize=(4 * len(structures), 5), layout="constrained")
    axes = figure.subplots(len(RULES), len(structures), sharex=True, sharey="col", squeeze=False)
    colours = colormaps["viridis"]([0.0, 0.45, 0.85])
    titles = {"naive": "cores at the dense rate", "aware": "param_groups"}
    for (line, rule), (column, structure) in product(enumerate(RULES), enumerate(structures)):
        axis = axes[line, column]
        for width, colour in zip(widths, colours, strict=True):
            lr, means = best[structure, width, rule]
            axis.plot(list(means), list(means.values()), ".-", color=colour, label=f"width {width}")
            axis.plot([lr], [means[lr]], "o", color=colour, markersize=8)
        axis.axvline(result["reference_lr"], color="0.7", zorder=0)
        axis.set_xscale("log", base=2)
        axis.set(yscale="log", title=f"{structure}, {titles[rule]}")
    for axis in axes[-1]:
        axis.set_xlabel("base learning rate; gray: dense's best")
    for axis in axes[:, 0]:
        axis.set_ylabel("final training loss")
    axes[0, 0].legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__, RESULTS)
    options.add_argument("--widths", type=int, nargs="+", default=[64, 256, 1024])
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument(
        "--lrs",
        type=int,
        nargs=2,
        default=[-9, -2],
        metavar=("LOW", "HIGH"),
        help="log2, inclusive",
    )
    options.add_argument("--structures", nargs="+", choices=list(STRUCTURES), help=ONLY)
    arguments = options.parse_args(argv)
    if arguments.smoke:
        arguments.widths, arguments.steps, arguments.seeds, arguments.lrs = [64], 3, 1, [-8, -7]
    lrs = [2.0**power for power in range(arguments.lrs[0], arguments.lrs[1] + 1)]
    setting = {"steps": arguments.steps, "batch": 256, "optimizer": "Adam", "data": "digits"}
    chosen, others, source = arguments.structures or list(STRUCTURES), [], None
    if arguments.structures:
        others, source = rows_of_others(arguments, "lr_transfer", setting, chosen)
    jobs: list[Job] = [
        (structure, width, rule)
        for width, structure, rule in product(arguments.widths, chosen, RULES)
        if structure != "dense" or rule == "aware"  # one core: both rules are the same
    ]
    jobs.sort(key=lambda job: -job[1])
    one = partial(sweep, lrs=lrs, seeds=arguments.seeds, steps=arguments.steps)
    rows = [*others, *(row for found in run_all(one, jobs, arguments) for row in found)]
    rows.sort(key=lambda row: (row["width"], row["structure"], row["rule"], row["lr"], row["seed"]))
    result = shifts(rows)
    show(result, Console(width=120))
    widths = arguments.widths if len(arguments.widths) > 1 else [*arguments.widths, 128]
    flat = check_coordinates("BTT r=1", widths, result["reference_lr"], min(arguments.steps, 10))
    for rule, layers in flat.items():
        text = ", ".join(layers) or "none"
        print(f"{rule}: layers of BTT r=1 that do not keep their size across widths: {text}")
    content = {"setting": setting, "kept": source, "not_flat": flat, **result, "rows": rows}
    keep(arguments, "lr_transfer", plot(rows, result), **content)


if __name__ == "__main__":
    main()
