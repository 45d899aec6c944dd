"""What the pages show of the kept results of examples/."""

from itertools import pairwise
from statistics import fmean

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
    points = list(zip(row["clock"], (found for _, found in row["curve"]), strict=True))
    if points[0][1] <= loss:
        return points[0][0]
    for (early, above), (late, below) in pairwise(points):
        if below <= loss:
            return round(early + (late - early) * (above - loss) / (above - below), 2)
    return None


def times_fewer(row: Row, dense: Row) -> float | None:
    """How many times fewer seconds a model needs until the dense model's final loss."""
    seconds = seconds_until(row, dense["loss"])
    return None if seconds is None else dense["clock"][-1] / seconds


# ---- examples/train_gpt.py: dense by Muon and by SOAP, structured by SOAP, of the same FLOPs -----


def read_gpts() -> list[tuple[Row, ...]]:
    """The three models, each with its runs of all seeds."""
    return [*zip(*(read(f"train_gpt{end}")["rows"] for end in SEEDS), strict=True)]


def numbers_of_gpts(result: Row) -> dict[str, str]:
    """By how many percent the structured model's loss is lower, and its seconds over dense's on the
    EPYC of seed 0 and on the Xeon of the others."""
    found, (muon, soap, ours) = dict[str, str](), read_gpts()
    for name, dense in (("muon", muon), ("soap", soap)):
        lower = [100 * (1 - a["loss"] / b["loss"]) for a, b in zip(ours, dense, strict=True)]
        epyc, *xeon = (a["ms"] / b["ms"] for a, b in zip(ours, dense, strict=True))
        found |= least_and_most(f"main.{name}_", lower, ".1f")
        found[f"main.{name}_seconds_epyc"] = f"{epyc:.2f}"
        found[f"main.{name}_seconds_xeon"] = f"{min(xeon):.2f} to {max(xeon):.2f}"
    return found | numbers_of_the_newest()


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
    muon, soap, ours = read_gpts()
    found = {}
    for name, runs in (("SOAP", soap), ("structured", ours)):
        epyc, *xeon = (run["ms"] / dense["ms"] for run, dense in zip(runs, muon, strict=True))
        found[name] = fmean(xeon) / epyc
    return found


def show_runs(result: Row) -> str:
    """The models; seconds of the training of seed 0, and losses of all seeds."""
    lines = []
    for runs in read_gpts():
        row = runs[0]
        sizes = [f"{row['params'] / 1e6:.2f} M", f"{row['flops'] / 1e6:.2f} M"]
        label = f"{row['label']} by {row['optimizer']}"
        end = [f"{row['clock'][-1]:.0f}", losses([run["loss"] for run in runs])]
        lines.append([label, str(row["width"]), *sizes, *end])
    titles = ["", "width", "parameters", "FLOPs per token", "seconds"]
    return table([*titles, "held-out loss, by seed"], lines)


# ---- examples/train_mlp_lm.py: dense 512, dense 1024, BTT 1024, BTT 3296 -------------------------


def numbers_of_mlps(_: Row) -> dict[str, str]:
    kept = [read(f"train_mlp_lm{end}")["rows"] for end in SEEDS]
    below = sum(structured["loss"] < dense["loss"] for _, dense, structured, _ in kept)
    fewer = [times_fewer(widest, dense) for _, dense, _, widest in kept]
    return {"mlp.below": str(below), **least_and_most("mlp.fewer_", fewer, ".1f")}


EXAMPLES = [
    Shown(
        name="train_gpt",
        numbers=numbers_of_gpts,
        tables={"main job": show_runs},
    ),
    Shown(name="train_mlp_lm", numbers=numbers_of_mlps),
]
