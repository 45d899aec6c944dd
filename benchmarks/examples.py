"""What the pages show of the kept results of examples/."""

from itertools import pairwise
from typing import NamedTuple

from benchmarks.harness.record import Row, read
from benchmarks.harness.report import least_and_most, losses, table
from benchmarks.harness.shown import Shown
from benchmarks.training.iso_report import in_words

SEEDS = ("", "_seed1", "_seed2")  # of results/train_gpt*.json


def seconds_until(row: Row, loss: float) -> float | None:
    """Seconds of training after which the held-out loss is first at most `loss`, linear between two
    evaluations; None if it never is.

    >>> row = {"curve": [[1, 3.0], [2, 2.0], [3, 1.0]], "clock": [10.0, 20.0, 30.0]}
    >>> seconds_until(row, 1.5), seconds_until(row, 0.5)
    (25.0, None)
    """
    losses = [loss for _, loss in row["curve"]]
    if losses[0] <= loss:
        return row["clock"][0]
    points = zip(row["clock"], losses, strict=True)
    for (early, above), (late, below) in pairwise(points):
        if below <= loss:
            return round(early + (late - early) * (above - loss) / (above - below), 2)
    return None


def times_fewer(row: Row, dense: Row) -> float | None:
    """How many times fewer seconds a model needs until the dense model's final loss."""
    seconds = seconds_until(row, dense["loss"])
    return None if seconds is None else dense["clock"][-1] / seconds


# ---- examples/train_gpt.py: dense and structured by AdamW, dense and structured by SOAP ----------


class Gpts(NamedTuple):
    """The runs of the four models, seed by seed."""

    dense_adamw: list[Row]
    structured_adamw: list[Row]
    dense_soap: list[Row]
    structured_soap: list[Row]


def read_gpts() -> Gpts:
    gpts = Gpts([], [], [], [])
    for suffix in SEEDS:
        for runs, run in zip(gpts, read(f"train_gpt{suffix}")["rows"], strict=True):
            runs.append(run)
    return gpts


def numbers_of_gpts(result: Row) -> dict[str, str]:
    """By how many percent a structured model's loss lies above dense's by the same optimizer, in
    the mean of the seeds, and its seconds over dense's, of seed 0."""
    gpts = read_gpts()
    pairs = {
        "adamw": (gpts.structured_adamw, gpts.dense_adamw),
        "soap": (gpts.structured_soap, gpts.dense_soap),
    }
    texts: dict[str, str] = {}
    for name, (structured_runs, dense_runs) in pairs.items():
        above = [
            100 * (run["loss"] / dense["loss"] - 1)
            for run, dense in zip(structured_runs, dense_runs, strict=True)
        ]
        texts[f"main.{name}"] = in_words(above)
        texts[f"main.{name}_seconds"] = (
            f"{structured_runs[0]['clock'][-1] / dense_runs[0]['clock'][-1]:.1f}"
        )
    total = sum(runs[0]["clock"][-1] for runs in gpts)
    return texts | {"main.minutes": f"{total / 60:.1f}"}


def show_runs(result: Row) -> str:
    """The models; seconds of the training of seed 0, and losses of all seeds."""
    lines = []
    for runs in read_gpts():
        row = runs[0]
        lines.append(
            [
                f"{row['label']} by {row['optimizer']}",
                f"{row['width']}, {row['params'] // 1000} k",
                f"{row['steps']:,}",
                f"{row['clock'][-1]:.0f}",
                losses([run["loss"] for run in runs]),
            ]
        )
    titles = ["", "width, parameters", "steps", "seconds"]
    return table([*titles, "held-out loss, by seed"], lines)


# ---- examples/train_mlp_lm.py: dense 512, dense 1024, BTT 1024, BTT 3296 -------------------------


def numbers_of_mlps(_: Row) -> dict[str, str]:
    below = 0
    fewer = []
    for suffix in SEEDS:
        _, dense, structured, widest = read(f"train_mlp_lm{suffix}")["rows"]
        below += structured["loss"] < dense["loss"]
        fewer.append(times_fewer(widest, dense))
    return {"mlp.below": str(below), **least_and_most("mlp.fewer_", fewer, ".1f")}


EXAMPLES = [
    Shown(
        name="train_gpt",
        numbers=numbers_of_gpts,
        tables={"main job": show_runs},
    ),
    Shown(name="train_mlp_lm", numbers=numbers_of_mlps),
]
