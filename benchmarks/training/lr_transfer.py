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
from typing import Any

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
    rules = RULES[job["structure"] == "dense" :]
    return [rule + head for head in ("", HEAD) for rule in rules]


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
    model, task = mlp(structure, width), PlainDigits()
    features = model[:-1]
    before, optimizer = features(task.x).detach(), make_optimizer(model, lr, width, rule)
    final = training.train(model, optimizer, task, steps, batch=BATCH, schedule="constant")
    change = (features(task.x).detach() - before).square().mean().sqrt().item()
    return {"loss": final, "feature_change": training.finite(change)}


def markdown(result: Row) -> str:
    """The table of docs/optimizers.md: log2 of the best learning rate over dense's at width 64."""
    widths = sorted(values(result["table"], "width"))
    cells = {
        (row["structure"], row["width"], row["rule"]): f"{row['shift']:+.0f}"
        for row in result["table"]
    }
    columns = [*product(RULES, widths)]
    lines = [
        [name, *(cells.get((name, width, rule), "-") for rule, width in columns)]
        for name in STRUCTURES
    ]
    for statistic in ("mean", "largest"):
        found = result[f"{statistic}_shift"]
        numbers = [f"{found[rule]:.2f}" if width == widths[0] else "" for rule, width in columns]
        lines.append([f"{statistic} distance, all structures and widths", *numbers])
    names = {"naive": "naive", "aware": "our rule"}
    return table(["", *(f"{names[rule]} {width}" for rule, width in columns)], lines)


def tuned_losses(result: Row) -> str:
    """The naive rule's loss over our rule's, each at its best rate, and both at dense's."""
    rows = result["table"]
    widths = sorted(values(rows, "width"))
    lines = []
    for structure in [name for name in STRUCTURES if name != "dense"]:
        ratios = []
        for kind, width in product(("best_loss", "loss_at_reference_lr"), widths):
            of = [one(rows, structure=structure, width=width, rule=rule) for rule in RULES]
            ratios.append(f"{of[0][kind] / of[1][kind]:.2f}")
        lines.append([structure, *ratios])
    titles = [f"tuned, {w}" for w in widths] + [f"dense's rate, {w}" for w in widths]
    return table(["", *titles], lines)


def compare_rules(result: Row, rule: str, other: str, kind: str = "best_loss") -> dict[int, Any]:
    """Width -> for each structure the loss with `rule` over that with `other`."""
    rows, found = result["table"], defaultdict(list)
    for row in select(rows, rule="naive"):
        if row["structure"] != "dense":
            where = {name: row[name] for name in ("structure", "width")}
            pair = [one(rows, **where, rule=each)[kind] for each in (rule, other)]
            found[row["width"]].append(pair[0] / pair[1])
    return found


def numbers(result: Row) -> dict[str, str]:
    mean, largest = result["mean_shift"], result["largest_shift"]
    tuned = [*chain(*compare_rules(result, "aware", "naive").values())]
    kept = compare_rules(result, "aware", "naive", "loss_at_reference_lr")
    won = {width: sum(ratio < 1 for ratio in ratios) for width, ratios in kept.items()}
    found = {
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
        found |= {f"rates.{rule}_mean": f"{mean[rule]:.2f}"}
        found |= {f"rates.{rule}_factor": f"{2 ** largest[rule]:.0f}"}
        for name, structure in (("lowrank", "low-rank"), ("monarch", "Monarch")):
            rows = select(result["table"], structure=structure, rule=rule)
            found[f"rates.{rule}_{name}"] = f"{fmean(abs(row['shift']) for row in rows):.2f}"
    for name, other in (("head", "naive"), ("heads", "naive" + HEAD)):
        ratios = [*chain(*compare_rules(result, "aware" + HEAD, other).values())]
        found[f"rates.{name}_wins"] = str(sum(each <= 1 for each in ratios))
        found[f"rates.{name}_level"] = str(sum(1 < each <= LEVEL for each in ratios))
    return found


def distances(result: Row, structure: str, width: int, rule: str) -> list[float]:
    """By how many factors of 2 the best rate lies from dense's at the base width, seed by seed;
    both between the grid's points."""
    rows = result["rows"]
    ours = select(rows, structure=structure, width=width, rule=rule)
    dense = select(rows, structure="dense", width=BASE_WIDTH, rule="aware")
    found = []
    for seed in seeds_of(dense):
        curves = [curve_of_rates(select(each, seed=seed)) for each in (ours, dense)]
        found.append(optimum(curves[0]) - optimum(curves[1]))
    return found


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
    found = {}
    for structure in structures_of(result):
        by_rule = []
        for rule in RULES:
            by_width = [
                [abs(each) for each in distances(result, structure, width, rule)]
                for width in values(result["rows"], "width")
            ]
            by_rule.append([fmean(of_seed) for of_seed in zip(*by_width, strict=True)])
        found[structure] = differences(*by_rule)
    return found


def judge_rates(result: Row) -> tuple[Holds, str]:
    """Every structure's best rate at every width is within a factor of 2 of dense's; and without
    the rule every structure's is further away."""
    aware = [within(each, 1.0) for each in from_dense(result, "aware")]
    naive = [within(each, 1.0) for each in from_dense(result, "naive")]
    said = [
        f"within a factor of 2 at {held.count(True)} of {len(held)} structures and widths, beyond "
        f"at {held.count(False)}, undecided at {held.count(None)} {of}"
        for held, of in ((aware, "with the rule"), (naive, "without it"))
    ]
    closer = nearer(result)
    said.append("by how many factors of 2 the rule is nearer: " + listed(closer, number))
    return [*aware, *map(above, closer.values())], "; ".join(said)


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
