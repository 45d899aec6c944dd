"""The fronts of `iso_flops` against seconds: what a training step of each best model takes here.

    python -m benchmarks.training.iso_seconds            # minutes; results/iso_seconds.{json,png}
    python -m benchmarks.training.iso_seconds --smoke    # seconds

For each data, optimizer, kind and budget the step of the model of the best width is timed, all
models in turns, on as many threads as torch takes. A run's seconds are its steps times the median
time of one. So all seconds of a front are of one machine and of one sitting, whatever the machines
on which the losses were found. At equal seconds a structured model is compared with dense's front
of the same optimizer: the least losses, and lines in logarithms between any two.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.harness import figures, record, report, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import select
from benchmarks.harness.timing import interleaved, ratio, wall
from benchmarks.training import gpt_seconds, iso_flops
from benchmarks.training.iso_report import (
    CELL,
    DENSE,
    in_words,
    kind_of,
    list_budgets,
    name_flops,
    span,
)

PERIOD = 5  # steps that are timed together: each holds SOAP's work on its bases once
TINY_RATES = {"lr": 1e-6, "other_lr": 1e-6}


def time_steps(setup: str, seconds: float) -> list[Row]:
    """A row for each cell of the table: milliseconds of a step, and its spread over the first's."""
    cells = []
    for row in select(record.read("iso_flops")["table"], setup=setup):
        if row["optimizer"] == kind_of(row["optimizer"]) and all(row["losses"]):
            cells.append(row)
    works = {number: make_work(cell) for number, cell in enumerate(cells)}
    for warm_up in works.values():
        warm_up()
    until = time.perf_counter() + seconds
    times = interleaved(works, partial(wall, device="cpu"), rounds=(3, 999), until=until)
    rows = []
    for number, cell in enumerate(cells):
        place = {name: cell[name] for name in (*CELL, "width", "steps", "losses")}
        milliseconds = 1e3 * median(times[number]) / PERIOD
        rows.append(
            place
            | {"milliseconds": milliseconds, "seconds": cell["steps"] * milliseconds / 1e3}
            | {"rounds": len(times[number]), "threads": torch.get_num_threads()}
            | ratio(times[number], times[0])
        )
    return rows


def make_work(cell: Row) -> Callable[[], None]:
    """`PERIOD` training steps of a cell's best model, always on the same batch."""
    sizes = iso_flops.EXPERIMENT.sizes
    setup = cell["setup"]
    model = iso_flops.build(setup, cell["kind"], cell["width"], 0, sizes, "cpu")
    optimizer = iso_flops.make_optimizer(setup, cell["optimizer"], model, TINY_RATES, sizes)
    batch = iso_flops.make_task(setup, 0, sizes).batch(0)
    step = training.step_of(optimizer, partial(training.cross_entropy, model, *batch))

    def take_steps() -> None:
        for _ in range(PERIOD):
            step()

    return take_steps


def compare(rows: Sequence[Row]) -> list[Row]:
    """For each structured front, budget by budget: seconds over those of the better dense kind, and
    by how many percent the loss of each seed lies above dense's front at the same seconds. Left out
    where dense's front is not that cheap or that dear."""
    compared = []
    for row in rows:
        if row["kind"] in DENSE:
            continue
        place = {"setup": row["setup"], "optimizer": row["optimizer"]}
        dense = [other for other in select(rows, **place) if other["kind"] in DENSE]
        same_budget = select(dense, budget=row["budget"])
        if not same_budget or len(dense) < 2:
            continue
        best = min(same_budget, key=lambda other: fmean(other["losses"]))
        found: Row = place | {"kind": row["kind"], "budget": row["budget"]}
        found["seconds over dense"] = row["seconds"] / best["seconds"]
        above = find_above(row, dense)
        if above:
            found["above"] = above
        compared.append(found)
    return sorted(compared, key=lambda row: row["budget"])


def find_above(row: Row, dense: Sequence[Row]) -> list[float]:
    """By how many percent each seed's loss lies above dense's front at the same seconds, for the
    first seeds: as many as that front has there. Empty where it has none."""
    for seeds in range(len(row["losses"]), 0, -1):
        front = [other for other in dense if len(other["losses"]) >= seeds]
        limited = row | {"losses": row["losses"][:seeds]}
        if len(front) > 1:
            over_dense = gpt_seconds.over_front(limited, row["seconds"], front)
            if None not in over_dense:
                return [100 * (ratio - 1) for ratio in over_dense if ratio is not None]
    return []


def fronts(result: Row) -> str:
    """A table: seconds of a run at the best width, and its mean loss."""
    cells = {}
    for row in result["rows"]:
        line = f"{row['setup']}, {row['optimizer']}, {row['kind']}"
        text = f"{fmean(row['losses']):.3f} in {row['seconds']:.0f} s"
        cells[line, name_flops(row["budget"])] = text
    return report.pivot(cells, list_budgets(result["rows"]))


def ratios(result: Row) -> str:
    """A table: seconds over dense's at equal FLOPs."""
    cells = {}
    for row in compare(result["rows"]):
        line = f"{row['setup']}, {row['optimizer']}, {row['kind']}"
        cells[line, name_flops(row["budget"])] = f"{row['seconds over dense']:.2f}"
    return report.pivot(cells, list_budgets(result["rows"]))


def distances(result: Row) -> str:
    """A table: percent above dense's at equal seconds."""
    cells = {}
    for row in compare(result["rows"]):
        line = f"{row['setup']}, {row['optimizer']}, {row['kind']}"
        if "above" in row:
            cells[line, name_flops(row["budget"])] = span(row["above"], "+.1f")
    return report.pivot(cells, list_budgets(result["rows"]))


def numbers(result: Row) -> dict[str, str]:
    """For the pages: what BTT of rank 4 by AdamW takes and gains at each budget."""
    rows = select(compare(result["rows"]), optimizer="AdamW", kind="BTT r=4")
    times_as_long = [row["seconds over dense"] for row in rows]
    texts = {
        "iso.seconds_least": f"{min(times_as_long):.1f}",
        "iso.seconds_most": f"{max(times_as_long):.1f}",
        "iso.threads": str(result["rows"][0]["threads"]),
    }
    for row in rows:
        if "above" in row:
            texts[f"iso.equal_seconds_{name_flops(row['budget'])}"] = in_words(row["above"])
    return texts


def draw(result: Row) -> figures.Figure:
    """Test losses against seconds, a line for each kind and optimizer."""
    points = []
    for row in result["rows"]:
        line = f"{row['kind']}, {row['optimizer']}"
        for loss in row["losses"]:
            point: dict[str, Any] = {"setup": row["setup"], "line": line}
            points.append(point | {"seconds": row["seconds"], "loss": loss})
    return figures.curves(points, "seconds", panel=["setup"], line=["line"], columns=2)


EXPERIMENT = Experiment(
    name="iso_seconds",
    about=__doc__,
    run=time_steps,
    axes={"setup": ["Python"]},
    sizes={"seconds": 180.0},
    smoke={"seconds": 0.0},
    seeds=0,
    workers=1,
    analyse=lambda rows: {},
    numbers=numbers,
    tables={"iso seconds": ratios, "iso equal seconds": distances},
    show=lambda result: [fronts(result), ratios(result), distances(result)],
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
