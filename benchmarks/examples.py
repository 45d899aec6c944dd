"""What the pages show of the kept results of examples/."""

from itertools import pairwise

from benchmarks.harness.record import Row, read
from benchmarks.harness.report import least_and_most, table
from benchmarks.harness.shown import Shown

SEEDS = ("", "_seed1", "_seed2")  # of results/train_gpt*.json
XEON = "train_gpt_xeon"


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


# ---- examples/train_gpt.py: dense 256, dense 512, structured 512, and of dense 256's FLOPs ------


def numbers_of_gpts(_: Row) -> dict[str, str]:
    """Three seeds on an EPYC, and the first on a Xeon."""
    fewer, lower, higher = [], [], []
    names = *(f"train_gpt{end}" for end in SEEDS), XEON
    for _, dense, structured, widest in (read(name)["rows"] for name in names):
        fewer.append(times_fewer(widest, dense))
        lower.append(100 * (1 - widest["loss"] / dense["loss"]))
        higher.append(100 * (structured["loss"] / dense["loss"] - 1))
    return {
        **least_and_most("main.fewer_", fewer, ".1f"),
        **least_and_most("main.lower_", lower, ".1f"),
        **least_and_most("main.higher_", higher, ".1f"),
    }


def show_runs(result: Row) -> str:
    """The runs on two machines; seconds are steps times the median of a step."""
    lines = []
    for row, other in zip(result["rows"], read(XEON)["rows"], strict=True):
        figures = [f"{row['flops']:,}", f"{row['loss']:.3f}"]
        seconds = [f"{each['clock'][-1]:.0f}" for each in (row, other)]
        lines.append([row["label"], str(row["width"]), *figures, *seconds])
    titles = ["", "width", "FLOPs per token", "held-out loss", "seconds, EPYC", "Xeon"]
    return table(titles, lines)


def show_seeds(_: Row) -> str:
    """The runs with seeds 0, 1, 2: a step's milliseconds over those of the widest dense model, and
    how many times fewer seconds until a dense model's final loss."""
    models = [*zip(*(read(f"train_gpt{end}")["rows"] for end in SEEDS), strict=True)]
    dense = [runs for runs in models if runs[0]["label"] == "dense"]
    lines = []
    for runs in models:
        shares = [row["ms"] / other["ms"] for row, other in zip(runs, dense[-1], strict=True)]
        row, untils = runs[0], []
        for others in dense:
            factors = [times_fewer(*pair) for pair in zip(runs, others, strict=True)]
            shown = ", ".join("never" if each is None else f"{each:.1f}" for each in factors)
            untils.append("" if runs == others else shown)
        figures = [str(row["width"]), f"{row['params']:,}", f"{row['flops']:,}"]
        losses = ", ".join(f"{each['loss']:.3f}" for each in runs)
        times = ", ".join(f"{each:.2f}" for each in shares)
        lines.append([row["label"], *figures, losses, times, *untils])
    titles = ["", "width", "params", "FLOPs per token", "held-out loss, by seed"]
    names = [f"dense {runs[0]['width']}" for runs in dense]
    untils = [f"until {name}'s loss" for name in names]
    return table([*titles, f"ms per step / {names[-1]}'s", *untils], lines)


# ---- examples/train_mlp_lm.py: dense 512, dense 1024, BTT 1024, BTT 3296 -------------------------


def numbers_of_mlps(_: Row) -> dict[str, str]:
    kept = [read(f"train_mlp_lm{end}")["rows"] for end in SEEDS]
    below = sum(structured["loss"] < dense["loss"] for _, dense, structured, _ in kept)
    fewer = [times_fewer(widest, dense) for _, dense, _, widest in kept]
    return {"mlp.below": str(below), **least_and_most("mlp.fewer_", fewer, ".1f")}


# ---- examples/compress.py: SmolLM2 ---------------------------------------------------------------


def numbers_of_compress(result: Row) -> dict[str, str]:
    dense, small = result["rows"]
    return {
        "example.minutes": f"{result['cpu_seconds'] / 60:.0f}",
        "example.gigabytes": f"{result['peak_bytes'] / 1e9:.1f}",
        "example.dense": f"{dense['after']['perplexity']:.1f}",
        "example.after": f"{small['after']['perplexity']:.1f}",
        "example.healed": f"{small['healed']['perplexity']:.1f}",
        "example.megabytes": f"{small['bytes'] / 1e6:.0f}",
    }


def show_answers(result: Row) -> str:
    """What the model says before and after, word by word, to the first and the last prompt."""
    lines = ["```text"]
    first, *_, last = zip(*(row["sample"] for row in result["rows"]), strict=True)
    for answers in (first, last):
        lines.append(answers[0].split(" -> ")[0])
        for row, answer in zip(result["rows"], answers, strict=True):
            name = "dense" if row["budget"] == 1 else f"keep {row['budget']:g}"
            text = answer.split(" -> ", 1)[1].replace("\n", "\\n")
            lines.append(f"  {name}: {text}")
    return "\n".join([*lines, "```"])


EXAMPLES = [
    Shown(
        name="train_gpt",
        numbers=numbers_of_gpts,
        tables={"main job": show_runs, "three seeds": show_seeds},
    ),
    Shown(name="train_mlp_lm", numbers=numbers_of_mlps),
    Shown(name="compress", numbers=numbers_of_compress, tables={"said": show_answers}),
]
