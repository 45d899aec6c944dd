"""Does the dense model's learning rate carry over to structures and widths? Figure 2 of "Compute
Better Spent".

    python -m benchmarks.training.lr_transfer          # in full: results/lr_transfer.*
    python -m benchmarks.training.lr_transfer --smoke  # seconds
    python -m benchmarks.training.lr_transfer --structures low-rank  # the others' rows are kept

An MLP of three hidden layers on scikit-learn's digits, Adam, no schedule. All its matrices but the
head's are structured; the head stays dense, starts at zero and follows muP across widths. Monarch
has 4 blocks, where the figure's has 16, and low-rank the rank sqrt(width). For each
structure, width, rule (naive: cores at the dense layer's rate; aware: `param_groups`) and base
learning rate: the final loss on the whole training set (figure 2b), and the RMS of the change of
the last hidden features over training (figure 2a). Both rules also with four times the rate for the
head, in the structured models and in the dense one.
"""

from collections import defaultdict
from itertools import chain, product
from statistics import fmean

import torch
from torch import nn

import structlin
from benchmarks.harness import figures, models, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.models import BASE_WIDTH
from benchmarks.harness.report import listed, number, table
from benchmarks.harness.shown import Claim, Holds
from benchmarks.harness.statistics import (
    Estimate,
    above,
    curve_of_rates,
    differences,
    one,
    optimum,
    seeds_of,
    select,
    shifts,
    student,
    values,
    within,
)
from benchmarks.harness.tasks import PlainDigits

STRUCTURES = {
    name: models.STRUCTURES[name]
    for name in ("dense", "low-rank", "Kronecker", "Monarch", "TT r=4", "BTT r=1", "BTT r=4")
}
HEAD = ", head x4"
RULES = ("naive", "aware")
WIDTHS = [64, 256, 1024]
BATCH = 256
SHOWN = ("BTT r=1", "Monarch")  # in the picture: our rule is nearer, and the naive one
LEVEL = 1.05  # a ratio of losses up to which docs/optimizers.md says "at most 5 % higher"


def rules_of(job: Row) -> list[str]:
    """For dense both rules are the same."""
    rules = RULES[1:] if job["structure"] == "dense" else RULES
    return [rule + head for head, rule in product(("", HEAD), rules)]


def mlp(structure: str, width: int) -> nn.Sequential:
    model = models.mlp(64, width, width, width, 10)
    nn.init.zeros_(model[-1].weight)
    for layer in model[::2]:
        nn.init.zeros_(layer.bias)
    return structlin.convert(model, STRUCTURES[structure](width), exclude="6", init="mup")


def make_optimizer(model: nn.Module, lr: float, width: int, rule: str) -> torch.optim.Optimizer:
    options = {"base": {width: BASE_WIDTH}, "structure_aware": rule.startswith("aware")}
    masses = {"6": 4} if rule.endswith(HEAD) else None
    return torch.optim.Adam(structlin.param_groups(model, lr, masses=masses, **options))


def train(structure: str, width: int, rule: str, lr: float, seed: int, steps: int) -> Row:
    """The final loss on all images, and the RMS change of the last hidden features."""
    torch.manual_seed(seed)
    model = mlp(structure, width)
    task = PlainDigits()
    features = model[:-1]
    before = features(task.x).detach()
    optimizer = make_optimizer(model, lr, width, rule)
    final = training.train(model, optimizer, task, steps, batch=BATCH, schedule="constant")
    change = (features(task.x).detach() - before).square().mean().sqrt().item()
    return {"loss": final, "feature_change": training.finite(change)}


def markdown(result: Row) -> str:
    """The table of docs/optimizers.md: log2 of the best learning rate over dense's at width 64."""
    widths = sorted(values(result["table"], "width"))
    shifts_by_place = {}
    for row in result["table"]:
        shifts_by_place[row["structure"], row["rule"], row["width"]] = f"{row['shift']:+.0f}"
    columns = [*product(RULES, widths)]
    lines = []
    for name in STRUCTURES:
        cells = [shifts_by_place.get((name, *column), "-") for column in columns]
        lines.append([name, *cells])
    for statistic in ("mean", "largest"):
        distance = result[f"{statistic}_shift"]
        cells = [f"{distance[rule]:.2f}" if width == widths[0] else "" for rule, width in columns]
        lines.append([f"{statistic} distance, all structures and widths", *cells])
    names = {"naive": "naive", "aware": "our rule"}
    return table(["", *(f"{names[rule]} {width}" for rule, width in columns)], lines)


def tuned_losses(result: Row) -> str:
    """The naive rule's loss over our rule's, each at its best rate, and both at dense's."""
    rows = result["table"]
    widths = sorted(values(rows, "width"))
    lines = []
    for structure in STRUCTURES:
        if structure == "dense":
            continue
        cells = [structure]
        for kind, width in product(("best_loss", "loss_at_reference_lr"), widths):
            naive = one(rows, structure=structure, width=width, rule="naive")
            aware = one(rows, structure=structure, width=width, rule="aware")
            cells.append(f"{naive[kind] / aware[kind]:.2f}")
        lines.append(cells)
    titles = [f"tuned, {w}" for w in widths] + [f"dense's rate, {w}" for w in widths]
    return table(["", *titles], lines)


def compare_rules(
    result: Row, rule: str, compared: str, kind: str = "best_loss"
) -> dict[int, list[float]]:
    """Width -> for each structure the loss with `rule` over that with `compared`."""
    rows = result["table"]
    ratios = defaultdict(list)
    for row in select(rows, rule="naive"):
        if row["structure"] != "dense":
            place = {name: row[name] for name in ("structure", "width")}
            loss = one(rows, **place, rule=rule)[kind]
            ratios[row["width"]].append(loss / one(rows, **place, rule=compared)[kind])
    return ratios


def numbers(result: Row) -> dict[str, str]:
    mean = result["mean_shift"]
    largest = result["largest_shift"]
    tuned = [*chain(*compare_rules(result, "aware", "naive").values())]
    won = {}  # width -> how many structures have the lower loss by our rule, at dense's rate
    for width, ratios in compare_rules(result, "aware", "naive", "loss_at_reference_lr").items():
        won[width] = sum(ratio < 1 for ratio in ratios)
    texts = {
        "rates.cases": str(len(tuned)),
        "rates.naive_wins": str(sum(ratio > 1 for ratio in tuned)),
        "rates.naive_by": f"{max(tuned):.1f}",
        "rates.aware_wins": str(sum(won.values())),
        "rates.aware_wins_wide": str(won[max(WIDTHS)]),
        "rates.aware_wins_narrow": str(won[min(WIDTHS)]),
        "rates.head_mean": f"{mean['aware' + HEAD]:.2f}",
        "rates.naive_head_mean": f"{mean['naive' + HEAD]:.2f}",
    }
    for rule in RULES:
        texts[f"rates.{rule}_mean"] = f"{mean[rule]:.2f}"
        texts[f"rates.{rule}_factor"] = f"{2 ** largest[rule]:.0f}"
        for name, structure in (("lowrank", "low-rank"), ("monarch", "Monarch")):
            rows = select(result["table"], structure=structure, rule=rule)
            texts[f"rates.{rule}_{name}"] = f"{fmean(abs(row['shift']) for row in rows):.2f}"
    for name, compared in (("head", "naive"), ("heads", "naive" + HEAD)):
        ratios = [*chain(*compare_rules(result, "aware" + HEAD, compared).values())]
        texts[f"rates.{name}_wins"] = str(sum(ratio <= 1 for ratio in ratios))
        texts[f"rates.{name}_level"] = str(sum(1 < ratio <= LEVEL for ratio in ratios))
    return texts


def distances(result: Row, structure: str, width: int, rule: str) -> list[float]:
    """By how many factors of 2 the best rate lies from dense's at the base width, seed by seed;
    both between the grid's points."""
    rows = result["rows"]
    ours = select(rows, structure=structure, width=width, rule=rule)
    dense = select(rows, structure="dense", width=BASE_WIDTH, rule="aware")
    by_seed = []
    for seed in seeds_of(dense):
        curve = curve_of_rates(select(ours, seed=seed))
        dense_curve = curve_of_rates(select(dense, seed=seed))
        by_seed.append(optimum(curve) - optimum(dense_curve))
    return by_seed


def structures_of(result: Row) -> list[str]:
    return [name for name in values(result["rows"], "structure") if name != "dense"]


def from_dense(result: Row, rule: str) -> list[Estimate]:
    """`distances` of every structure and width, with intervals over the seeds."""
    widths = values(result["rows"], "width")
    places = product(structures_of(result), widths)
    return [student(distances(result, *place, rule)) for place in places]


def nearer(result: Row) -> dict[str, Estimate]:
    """Structure -> by how many factors of 2 our rule's best rates are nearer to dense's than the
    naive rule's: the mean over the widths, with its interval over the seeds."""
    estimates = {}
    for structure in structures_of(result):
        naive = mean_distances(result, structure, "naive")
        estimates[structure] = differences(naive, mean_distances(result, structure, "aware"))
    return estimates


def mean_distances(result: Row, structure: str, rule: str) -> list[float]:
    """The mean over the widths of `distances` without their signs, seed by seed."""
    by_width = []
    for width in values(result["rows"], "width"):
        by_width.append([*map(abs, distances(result, structure, width, rule))])
    return [*map(fmean, zip(*by_width, strict=True))]


def judge_rates(result: Row) -> tuple[Holds, str]:
    """Every structure's best rate at every width is within a factor of 2 of dense's; and without
    the rule every structure's is further away."""
    aware = [within(estimate, 1.0) for estimate in from_dense(result, "aware")]
    naive = [within(estimate, 1.0) for estimate in from_dense(result, "naive")]
    closer = nearer(result)
    words = (
        f"{describe_verdicts(aware)} with the rule; {describe_verdicts(naive)} without it; "
        f"by how many factors of 2 the rule is nearer: {listed(closer, number)}"
    )
    return [*aware, *map(above, closer.values())], words


def describe_verdicts(holds: list[bool | None]) -> str:
    return (
        f"within a factor of 2 at {holds.count(True)} of {len(holds)} structures and widths, "
        f"beyond at {holds.count(False)}, undecided at {holds.count(None)}"
    )


CLAIM = Claim(
    "CBS 2b",
    "dense's best rate carries over",
    "dense's best learning rate carries over with the structure-aware rule",
    judge_rates,
)
TABLES = {"learning rates": markdown, "tuned losses": tuned_losses}


EXPERIMENT = Experiment(
    name="lr_transfer",
    about=__doc__,
    numbers=numbers,
    tables=TABLES,
    claims=[CLAIM],
    place="optimizers.md#does-the-dense-rate-carry-over",
    run=train,
    axes={
        "structure": [*STRUCTURES],
        "width": WIDTHS,
        "rule": rules_of,
        "lr": [2.0**power for power in range(-9, -1)],
    },
    sizes={"steps": 60},
    note={"batch": BATCH, "optimizer": "Adam", "data": "digits"},
    draw=lambda result: figures.rates(
        [row for row in result["rows"] if row["structure"] in SHOWN and row["rule"] in RULES],
        panel=["structure", "rule"],
        line=["width"],
    ),
    smoke={"steps": 3, "width": [64], "lr": [2.0**-8, 2.0**-7], "seeds": 1},
    analyse=lambda rows: shifts(rows, BASE_WIDTH),
)

if __name__ == "__main__":
    EXPERIMENT.main()
