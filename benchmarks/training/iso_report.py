"""What the runs of `iso_flops` come to: fronts, distances from dense, and fits of the fronts.

A front is fitted by loss = a + b (C / 1e12)^-c, with C the training FLOPs, by least squares of the
relative residuals of the means at each budget. Its interval is of 90 %, over draws of the seeds at
each budget. What a fit says beyond the largest budget that was run is an extrapolation.
"""

import math
import random
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks.harness import figures, record, report
from benchmarks.harness.experiment import Row
from benchmarks.harness.shown import Claim, Holds, judge_changes
from benchmarks.harness.statistics import log_loss, select, values

NORMALISED = "dense, weight norm"
DENSE = ("dense", NORMALISED)  # kinds; a structured one is compared with the better of them
CONTROLS = {  # kinds of model -> their numbers on pages
    "BTT r=4, no weight norm": "no_norm",
    "BTT r=4, no SiLU": "no_silu",
}
CELL = ("setup", "optimizer", "kind", "budget")  # what is compared at its own best width and rates
UNIT = 1e12  # FLOPs in which a fit takes them
FITTED_BUDGETS = 4  # at least, for the three numbers of a fit
DRAWS = 200
EXTRAPOLATED = (1e15, 1e18)


def kind_of(optimizer: str) -> str:
    """The optimizer of which this one is a variant, or itself.

    >>> kind_of("AdamW, beta2 .99")
    'AdamW'
    """
    return optimizer.partition(",")[0]


def name_flops(flops: float) -> str:
    """A budget as tables name it.

    >>> name_flops(2.5e11), name_flops(1e12)
    ('2.5e11', '1e12')
    """
    return f"{flops:.3g}".replace("e+", "e")


def best_of(rows: Sequence[Row], place: Row) -> Row:
    """The row of the lowest validation loss of seed 0."""
    return min(select(rows, **place, seed=0), key=log_loss)


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
        if row["optimizer"] != kind_of(row["optimizer"]):
            continue
        losses = [loss for loss in row["losses"] if loss is not None]
        if losses:
            line = f"{row['setup']}, {row['optimizer']}, {row['kind']}"
            text = f"{fmean(losses):.3f} (width {row['width']})"
            cells[line, name_flops(row["budget"])] = text
    return report.pivot(cells, list_budgets(result["table"]))


def list_budgets(rows: Sequence[Row]) -> list[str]:
    """The columns of a table, the smallest budget first."""
    return [name_flops(budget) for budget in sorted({*values(rows, "budget")})]


# ---- fronts, and how far they lie from dense's ---------------------------------------------------

Front = dict[float, list[float]]  # budget -> the test losses of all seeds, at the best width


def front_of(table: Sequence[Row], seeds: int, **line: str) -> Front:
    """The front of one setup, optimizer and kind, over the budgets at which so many seeds or
    more ran, and none diverged."""
    return {
        row["budget"]: row["losses"]
        for row in select(table, **line)
        if len(row["losses"]) >= seeds and all(row["losses"])
    }


def front_of_dense(table: Sequence[Row], seeds: int, **line: str) -> Front:
    """At each budget the losses of the dense kind with the lower mean."""
    best: Front = {}
    for kind in DENSE:
        for budget, losses in front_of(table, seeds, kind=kind, **line).items():
            if budget not in best or fmean(losses) < fmean(best[budget]):
                best[budget] = losses
    return best


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
        is_variant = row["optimizer"] != kind_of(row["optimizer"])
        if row["kind"] in DENSE or is_variant or not all(row["losses"]):
            continue
        dense = front_of_dense(table, len(row["losses"]), **line)
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
    """A table: percent above dense, by budget."""
    return tabulate_seeds(result, "above", "+.1f")


def gains(result: Row) -> str:
    """A table: by how much the loss of BTT of rank 4 is above dense's on characters, in the mean of
    the seeds, by optimizer and budget."""
    cells = {}
    for row in select(compare(result["table"]), setup="Python", kind="BTT r=4"):
        cells[row["optimizer"], name_flops(row["budget"])] = f"{fmean(row['above']):+.1f} %"
    return report.pivot(cells, list_budgets(result["table"]))


def compute(result: Row) -> str:
    """A table: how many times the budget dense needs for the structured loss, by budget."""
    return tabulate_seeds(result, "compute", ".2f")


def tabulate_seeds(result: Row, name: str, digits: str) -> str:
    """A number that `compare` finds for each seed: a line for each data, optimizer and kind."""
    cells = {}
    for row in compare(result["table"]):
        line = f"{row['setup']}, {row['optimizer']}, {row['kind']}"
        if name in row:
            cells[line, name_flops(row["budget"])] = span(row[name], digits)
    return report.pivot(cells, list_budgets(result["table"]))


# ---- fits ----------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """loss = floor + scale (FLOPs / UNIT)^-exponent"""

    floor: float
    scale: float
    exponent: float

    def at(self, flops: float) -> float:
        return self.floor + self.scale * (flops / UNIT) ** -self.exponent

    def flops_to_reach(self, loss: float) -> float:
        """Infinite where the loss is not above the floor.

        >>> round(Fit(1.0, 1.0, 0.5).flops_to_reach(1.5) / UNIT, 6)
        4.0
        """
        if loss <= self.floor:
            return math.inf
        return UNIT * ((loss - self.floor) / self.scale) ** (-1 / self.exponent)


def fit(losses: Mapping[float, float]) -> Fit:
    """The fit of a loss for each budget.

    >>> true = Fit(1.2, 0.4, 0.3)
    >>> found = fit({budget: true.at(budget) for budget in (2.5e11, 1e12, 5e12, 2e13)})
    >>> [round(number, 3) for number in found]
    [1.2, 0.4, 0.3]
    """
    from scipy.optimize import curve_fit

    budgets = np.array(sorted(losses))
    heights = np.array([losses[budget] for budget in budgets])

    def curve(flops: np.ndarray, floor: float, scale: float, exponent: float) -> np.ndarray:
        return floor + scale * (flops / UNIT) ** -exponent

    start = (0.9 * heights.min(), 0.3 * heights.min(), 0.3)
    bounds = ([0, 0, 0.01], [heights.min(), 10, 2])
    numbers, _ = curve_fit(curve, budgets, heights, p0=start, bounds=bounds, sigma=heights)
    return Fit(*map(float, numbers))


def fits_of_draws(front: Front, seed: int) -> list[Fit]:
    """Fits of the means of as many draws of the seeds, at each budget by itself."""
    draw = random.Random(seed)
    found = []
    for _ in range(DRAWS):
        means = {
            budget: fmean(draw.choices(losses, k=len(losses))) for budget, losses in front.items()
        }
        found.append(fit(means))
    return found


def interval(numbers: Sequence[float], digits: str) -> str:
    """Of 90 % of the draws.

    >>> interval([float(n) for n in range(101)], ".0f")
    '5 to 95'
    """
    ordered = sorted(numbers)
    tail = len(ordered) // 20
    return f"{ordered[tail]:{digits}} to {ordered[-1 - tail]:{digits}}"


def fit_all(table: Sequence[Row]) -> list[Row]:
    """The fit of each front that has enough budgets, its residuals and what it says beyond them;
    for a structured one also the compute that dense's fit needs for the same loss. A front and
    dense's beside it are fitted at the budgets that both have."""
    rows = []
    for setup, optimizer, kind in dict.fromkeys(
        (row["setup"], row["optimizer"], row["kind"]) for row in table
    ):
        front = front_of(table, 1, setup=setup, optimizer=optimizer, kind=kind)
        dense = front_of_dense(table, 1, setup=setup, optimizer=optimizer)
        budgets = front.keys() & dense.keys()
        if len(budgets) < FITTED_BUDGETS:
            continue
        front = {budget: front[budget] for budget in budgets}
        dense = {budget: dense[budget] for budget in budgets}
        rows.append(
            {"setup": setup, "optimizer": optimizer, "kind": kind} | describe_fit(front, dense)
        )
    return rows


def describe_fit(front: Front, dense: Front) -> Row:
    """Of one front, beside dense's."""
    means = {budget: fmean(losses) for budget, losses in front.items()}
    best = fit(means)
    draws = fits_of_draws(front, seed=0)
    dense_best = fit({budget: fmean(losses) for budget, losses in dense.items()})
    dense_draws = fits_of_draws(dense, seed=1)
    row: Row = {
        "fit": f"{best.floor:.2f} + {best.scale:.3f} (C / 1e12)^-{best.exponent:.3f}",
        "residual": max(abs(best.at(budget) / loss - 1) for budget, loss in means.items()),
    }
    for flops in (*sorted(front), *EXTRAPOLATED):
        ratios = [
            other.flops_to_reach(one.at(flops)) / flops
            for one, other in zip(draws, dense_draws, strict=True)
        ]
        row[f"compute at {name_flops(flops)}"] = dense_best.flops_to_reach(best.at(flops)) / flops
        row[f"interval at {name_flops(flops)}"] = interval(ratios, ".2f")
    for flops in EXTRAPOLATED:
        row[f"loss at {name_flops(flops)}"] = best.at(flops)
        row[f"interval of the loss at {name_flops(flops)}"] = interval(
            [one.at(flops) for one in draws], ".2f"
        )
    return row


def fits(result: Row) -> str:
    """A table: the fits, and what they say beyond the largest budget."""
    cells = {}
    for row in fit_all(result["table"]):
        line = f"{row['setup']}, {row['optimizer']}, {row['kind']}"
        cells[line, "loss"] = row["fit"]
        cells[line, "largest residual"] = f"{100 * row['residual']:.2f} %"
        for flops in EXTRAPOLATED:
            name = name_flops(flops)
            spread = row[f"interval of the loss at {name}"]
            cells[line, f"loss at {name}, extrapolated"] = (
                f"{row[f'loss at {name}']:.2f} ({spread})"
            )
            if row["kind"] not in DENSE:
                spread = row[f"interval at {name}"]
                cells[line, f"compute of dense at {name}"] = (
                    f"{row[f'compute at {name}']:.2f} ({spread})"
                )
    return report.pivot(cells)


# ---- means to be ahead ---------------------------------------------------------------------------


def means(result: Row) -> str:
    """A table: by how many percent a variant of an optimizer changes the loss of the same kind of
    model, budget by budget; a minus is lower."""
    cells = {}
    for row in result["table"]:
        parent = {"optimizer": kind_of(row["optimizer"]), "kind": row["kind"]}
        if parent["optimizer"] == row["optimizer"]:
            continue
        same = select(result["table"], setup=row["setup"], budget=row["budget"], **parent)
        if not same or not all([*row["losses"], *same[0]["losses"]]):
            continue
        changes = [
            100 * (loss / other - 1)
            for loss, other in zip(row["losses"], same[0]["losses"], strict=False)
        ]
        line = f"{row['setup']}, {row['kind']}, {row['optimizer']}"
        cells[line, name_flops(row["budget"])] = span(changes, "+.1f")
    return report.pivot(cells)


def show(result: Row) -> list[str]:
    """What the command prints: all tables that have rows."""
    shown = [fronts(result), distances(result), compute(result)]
    if fit_all(result["table"]):
        shown.append(fits(result))
    if any(row["optimizer"] != kind_of(row["optimizer"]) for row in result["table"]):
        shown.append(means(result))
    return shown


# ---- pages ---------------------------------------------------------------------------------------


def numbers(result: Row) -> dict[str, str]:
    """For the pages: by how much BTT of rank 4 differs from dense on characters, under names such
    as "iso.AdamW_1e12"; and in how many seeds dense is ahead at the largest budget by AdamW."""
    texts = {"iso.runs": str(len(result["rows"]))}
    compared = select(compare(result["table"]), setup="Python", kind="BTT r=4")
    for row in compared:
        texts[f"iso.{row['optimizer']}_{name_flops(row['budget'])}"] = in_words(row["above"])
    largest = max(select(compared, optimizer="AdamW"), key=lambda row: row["budget"])
    wins = sum(above > 0 for above in largest["above"])
    texts["iso.dense_wins"] = f"{wins} of {len(largest['above'])}"
    return texts | numbers_of_weight_norm(result) | numbers_of_a_longer_run(result)


def numbers_of_weight_norm(result: Row) -> dict[str, str]:
    """By how much weight normalisation changes dense's loss on characters, as
    "iso.norm_AdamW_1e12"; and how far BTT by AdamW without it, or without SiLU, is from the better
    dense kind."""
    texts = {}
    for row in select(result["table"], setup="Python", kind=NORMALISED):
        same = {name: row[name] for name in CELL if name != "kind"}
        for plain in select(result["table"], kind="dense", **same):
            pairs = zip(row["losses"], plain["losses"], strict=False)
            above = [100 * (loss / other - 1) for loss, other in pairs]
            name = f"iso.norm_{row['optimizer']}_{name_flops(row['budget'])}"
            texts[name] = in_words(above)
    for row in select(compare(result["table"]), setup="Python", optimizer="AdamW"):
        if row["kind"] in CONTROLS:
            name = f"iso.{CONTROLS[row['kind']]}_{name_flops(row['budget'])}"
            texts[name] = in_words(row["above"])
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


def judge_best_allocation(result: Row) -> tuple[Holds, str]:
    """Whether BTT of rank 4 by AdamW has a lower loss than dense on characters, at each budget."""
    rows = select(compare(result["table"]), setup="Python", kind="BTT r=4", optimizer="AdamW")
    return judge_changes(
        {name_flops(row["budget"]): row["above"] for row in rows if len(row["above"]) > 1}
    )


CLAIM = Claim(
    "CBS 9",
    "the same, with width and length both free",
    'BTT "is more efficient than dense for training small GPT-2 language models": each at its own '
    "best width and length for a budget of training FLOPs, by AdamW",
    judge_best_allocation,
)


def draw(result: Row) -> figures.Figure:
    """Test losses against training FLOPs: a panel for each optimizer, a line for each kind."""
    points = [
        {"setup": row["setup"], "optimizer": row["optimizer"], "kind": row["kind"]}
        | {"FLOPs": row["budget"], "loss": loss}
        for row in result["table"]
        for loss in row["losses"]
        if loss is not None
    ]
    panel = ["setup", "optimizer"]
    return figures.curves(points, "FLOPs", panel=panel, line=["kind"], columns=3)
