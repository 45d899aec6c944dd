"""What the pages show of the kept results of examples/."""

from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from benchmarks.harness.record import Row, read
from benchmarks.harness.report import least_and_most, losses, table
from benchmarks.harness.shown import Shown

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


# ---- examples/train_gpt.py: dense by Muon and by SOAP, structured by SOAP, of the same FLOPs -----


class Gpts(NamedTuple):
    """The runs of the three models, seed by seed."""

    muon: list[Row]  #: dense by Muon
    soap: list[Row]  #: dense by SOAP
    structured: list[Row]  #: by SOAP


def read_gpts() -> Gpts:
    gpts = Gpts([], [], [])
    for suffix in SEEDS:
        for runs, run in zip(gpts, read(f"train_gpt{suffix}")["rows"], strict=True):
            runs.append(run)
    return gpts


def numbers_of_gpts(result: Row) -> dict[str, str]:
    """By how many percent the structured model's loss is lower, and its seconds over dense's on the
    EPYC of seed 0 and on the Xeon of the others."""
    gpts = read_gpts()
    texts: dict[str, str] = {}
    for name, dense_runs in (("muon", gpts.muon), ("soap", gpts.soap)):
        percents = []
        for run, dense in zip(gpts.structured, dense_runs, strict=True):
            percents.append(100 * (1 - run["loss"] / dense["loss"]))
        epyc, *xeon = compare_seconds(gpts.structured, dense_runs)
        texts |= least_and_most(f"main.{name}_", percents, ".1f")
        texts[f"main.{name}_seconds_epyc"] = f"{epyc:.2f}"
        texts[f"main.{name}_seconds_xeon"] = f"{min(xeon):.2f} to {max(xeon):.2f}"
    return texts | numbers_of_the_newest()


def compare_seconds(runs: list[Row], compared_runs: list[Row]) -> list[float]:
    """The seconds of a step over the other model's, seed by seed: on the EPYC, then the Xeon."""
    pairs = zip(runs, compared_runs, strict=True)
    return [run["ms"] / compared["ms"] for run, compared in pairs]


def numbers_of_the_newest() -> dict[str, str]:
    """Of the newest run of seed 0: its losses, and what the other numbers say of the others."""
    muon, soap, ours = read("train_gpt_newest")["rows"]
    return {
        "newest.losses": losses([muon["loss"], soap["loss"], ours["loss"]]),
        "newest.muon": f"{100 * (1 - ours['loss'] / muon['loss']):.1f}",
        "newest.soap": f"{100 * (1 - ours['loss'] / soap['loss']):.1f}",
        "newest.muon_seconds": f"{ours['ms'] / muon['ms']:.2f}",
        "newest.soap_seconds": f"{ours['ms'] / soap['ms']:.2f}",
    }


def seconds_on_a_xeon() -> dict[str, float]:
    """By how much more the seconds of dense by SOAP and of the structured model, each over those of
    dense by Muon, are on the Xeon of seeds 1 and 2 than on the EPYC of seed 0."""
    gpts = read_gpts()
    ratios = {}
    for name, runs in (("SOAP", gpts.soap), ("structured", gpts.structured)):
        epyc, *xeon = compare_seconds(runs, gpts.muon)
        ratios[name] = fmean(xeon) / epyc
    return ratios


def show_runs(result: Row) -> str:
    """The models; seconds of the training of seed 0, and losses of all seeds."""
    lines = []
    for runs in read_gpts():
        row = runs[0]
        lines.append(
            [
                f"{row['label']} by {row['optimizer']}",
                str(row["width"]),
                f"{row['params'] / 1e6:.2f} M",
                f"{row['flops'] / 1e6:.2f} M",
                f"{row['clock'][-1]:.0f}",
                losses([run["loss"] for run in runs]),
            ]
        )
    titles = ["", "width", "parameters", "FLOPs per token", "seconds"]
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
