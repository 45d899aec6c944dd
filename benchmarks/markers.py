"""The numbers inside the sentences of README.md and docs/, computed from the kept results.

A page has `<!-- n:group.name -->1.19<!-- /n -->`, which a reader sees as 1.19. `benchmarks.pages`
writes the number anew. A group is a function below that returns its numbers by name. A marker
never begins a line: Markdown would end the paragraph there.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from math import exp
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.harness.record import read
from benchmarks.harness.report import interval, same
from benchmarks.harness.statistics import one, select
from benchmarks.papers.summary import count_verdicts
from benchmarks.speed.layer import FEW
from benchmarks.training import gpt_seconds, lr_transfer, transfer

Row = dict[str, Any]
MARKER = re.compile(r"<!-- n:(\w+)\.(\w+) -->(.*?)<!-- /n -->", re.DOTALL)
SEEDS = ("", "_seed1", "_seed2")  # of the programs of examples/
LEVEL = 1.05  # a ratio of losses up to which docs/optimizers.md says "at most 5 % higher"


def fill_numbers(text: str, groups: Mapping[str, Callable[[], Mapping[str, str]]]) -> str:
    """`text` with every number between `<!-- n:group.name -->` and `<!-- /n -->` made anew.

    Raises:
        KeyError: no function of `groups` returns a number of that name.

    >>> fill_numbers("2 + 2 = <!-- n:sum.two -->5<!-- /n -->", {"sum": lambda: {"two": "4"}})
    '2 + 2 = <!-- n:sum.two -->4<!-- /n -->'
    """

    def made(match: re.Match[str]) -> str:
        group, name, _ = match.groups()
        if group not in groups or name not in groups[group]():
            raise KeyError(f"no number {group}.{name}: benchmarks/markers.py has none of that name")
        return f"<!-- n:{group}.{name} -->{groups[group]()[name]}<!-- /n -->"

    return MARKER.sub(made, text)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f}"


def least_and_most(values: Iterable[float], form: str, suffix: str = "") -> dict[str, str]:
    """The ends of `values` under the names "<suffix>least" and "<suffix>most"."""
    found = list(values)
    return {f"{suffix}least": format(min(found), form), f"{suffix}most": format(max(found), form)}


# ---- speed ---------------------------------------------------------------------------------------


def layer_rows(name: str, **wanted: Any) -> Iterator[Row]:
    """The rows of square layers as they run by default, that have what is `wanted`."""
    for row in select(read(name)["rows"], implementation="auto", **wanted):
        if row["d_in"] == row["d_out"]:
            yield row


def find_btt(name: str, dtype: str) -> Row:
    """BTT of rank 1 at width 1024, forward and backward of 4096 tokens."""
    wanted = {"structure": "BTT r=1", "d_in": 1024, "tokens": 4096, "backward": True}
    (row,) = layer_rows(name, dtype=dtype, **wanted)
    return row


def front() -> dict[str, str]:
    """BTT of rank 1 at width 1024 on both CPUs, in float32 and bfloat16."""
    speeds = [
        find_btt(name, dtype)["x_dense"]["median"]
        for name, dtype in product(("layer", "layer_xeon"), ("float32", "bfloat16"))
    ]
    return {"slowest": f"{min(speeds):.1f}", "fastest": f"{max(speeds):.1f}"}


def few() -> dict[str, str]:
    """Forward passes of few tokens, without gradients, against nn.Linear."""
    found = {}
    for machine, name in (("epyc", "layer"), ("xeon", "layer_xeon")):
        rows = [row for row in layer_rows(name, backward=False) if row["tokens"] in FEW]
        speeds = [row["x_dense"]["median"] for row in rows]
        found["layers"] = str(len(rows))
        found[f"{machine}_slower"] = str(sum(speed < 1 for speed in speeds))
        found[f"{machine}_least"] = f"{min(speeds):.2f}"
    return found


def roofline() -> dict[str, str]:
    machines = {"xeon": "layer_xeon", "epyc": "layer"}
    return {
        f"{machine}_{dtype}": f"{find_btt(name, dtype)['fused_share']:.2f}"
        for (machine, name), dtype in product(machines.items(), ("float32", "bfloat16"))
    }


def model() -> dict[str, str]:
    """Whole models, not compiled; a share is of the speed of the model without linear layers. And
    what compiling makes of BTT's speed against dense."""
    speeds = {
        (row["variant"], row["model"], row["task"]): row["x_dense"]
        for row in select(read("model")["rows"], compiled=False)
    }
    shares = [
        speed["median"] / speeds["none", name, task]["median"]
        for (variant, name, task), speed in speeds.items()
        if variant == "BTT r=1, all"
    ]
    training = [found for (_, *job), found in speeds.items() if job == ["GPT-2 small", "training"]]
    widest = max(training, key=lambda found: found["p80"] / found["p20"])
    everywhere = select(read("model")["rows"], variant="BTT r=1, all", compiled=True)
    compiled = [
        row["x_dense"]["median"] / speeds[row["variant"], row["model"], row["task"]]["median"]
        for row in everywhere
    ]
    return {
        **least_and_most(shares, ".2f", "share_"),
        **least_and_most(compiled, ".2f", "compiled_"),
        "spread_low": f"{widest['p20']:.1f}",
        "spread_high": f"{widest['p80']:.1f}",
        "gpt_training": f"{speeds['BTT r=1, all', 'GPT-2 small', 'training']['median']:.1f}",
    }


def peers() -> dict[str, str]:
    """Our speed over that of other packages."""
    rows = [row for row in read("peers")["rows"] if "structlin_x" in row]

    def speeds(structure: str, name: str = "", **wanted: Any) -> list[float]:
        return [
            row["structlin_x"]["median"]
            for row in select(rows, **wanted)
            if row["structure"].startswith(structure) and name in row["implementation"]
        ]

    training = {"dtype": "float32", "backward": True}
    few = [*speeds("Monarch 4", tokens=16, **training), *speeds("BLAST", tokens=16, **training)]
    forming = {"tokens": 4096, "dtype": "bfloat16", "backward": False}
    return {
        "fastkron": str(sum(speed > 1 for speed in speeds("Kronecker", "fastkron"))),
        **least_and_most(speeds("BTT", "strided", tokens=4096), ".1f", "btt_"),
        "monarch": f"{min(speeds('Monarch 4', tokens=4096, **training)):.2f}",
        **least_and_most(few, ".2f", "few_"),
        "tt": f"{min(speeds('TT r=8', 'reconstructed', **forming)):.2f}",
    }


# ---- training ------------------------------------------------------------------------------------


def main() -> dict[str, str]:
    """The main job: dense 256, dense 512, structured 512, structured and as wide as dense 256's
    FLOPs allow. Three seeds on an EPYC, and the first on a Xeon."""
    fewer, lower, higher, shares = [], [], [], []
    for _, dense, ours, widest in (read(f"train_gpt{end}")["rows"] for end in (*SEEDS, "_xeon")):
        fewer.append(dense["clock"][-1] / widest["seconds to the loss of"]["dense 512"])
        lower.append(100 * (1 - widest["loss"] / dense["loss"]))
        higher.append(100 * (ours["loss"] / dense["loss"] - 1))
        shares.append(100 * ours["clock"][-1] / dense["clock"][-1])
    return {
        **least_and_most(fewer, ".1f", "fewer_"),
        **least_and_most(lower, ".1f", "lower_"),
        **least_and_most(higher, ".1f", "higher_"),
        **least_and_most(shares, ".0f", "share_"),
    }


def mlp() -> dict[str, str]:
    """The MLPs of examples/: dense 512, dense 1024, BTT 1024, BTT 3296."""
    kept = [read(f"train_mlp_lm{end}")["rows"] for end in SEEDS]
    fewer = [
        dense["clock"][-1] / widest["seconds to the loss of"]["dense 1024"]
        for _, dense, _, widest in kept
    ]
    below = sum(ours["loss"] < dense["loss"] for _, dense, ours, _ in kept)
    return {"below": str(below), **least_and_most(fewer, ".1f", "fewer_")}


def rates() -> dict[str, str]:
    """Learning-rate transfer on digits: the naive rule and ours."""
    result = read("lr_transfer")
    mean, largest, table = result["mean_shift"], result["largest_shift"], result["table"]
    pairs = {
        (row["structure"], row["width"]): (
            row,
            one(table, structure=row["structure"], width=row["width"], rule="aware"),
        )
        for row in select(table, rule="naive")
    }
    tuned = [naive["best_loss"] / ours["best_loss"] for naive, ours in pairs.values()]
    kept = "loss_at_reference_lr"
    won = [width for (_, width), (naive, ours) in pairs.items() if ours[kept] < naive[kept]]
    shifts = {
        f"{rule}_{name}": fmean(
            abs(row["shift"]) for row in select(table, structure=structure, rule=rule)
        )
        for rule in ("naive", "aware")
        for name, structure in (("lowrank", "low-rank"), ("monarch", "Monarch"))
    }
    return {
        **{f"{rule}_mean": f"{mean[rule]:.2f}" for rule in lr_transfer.RULES},
        **{f"{rule}_factor": f"{2 ** largest[rule]:.0f}" for rule in lr_transfer.RULES},
        **{name: f"{shift:.2f}" for name, shift in shifts.items()},
        "cases": str(len(pairs)),
        "naive_wins": str(sum(ratio < 1 for ratio in tuned)),
        "naive_by": f"{1 / min(tuned):.1f}",
        "aware_wins": str(len(won)),
        "aware_wins_wide": str(won.count(1024)),
        "aware_wins_narrow": str(won.count(64)),
        **head_rates(result),
    }


def head_rates(result: Row) -> dict[str, str]:
    """Both rules with four times the head's rate: in how many cases the loss is no higher than that
    of a naive rule, or at most 5 % higher, all of them tuned."""
    table, shift = result["table"], result["mean_shift"]
    places = [row for row in select(table, rule="naive") if row["structure"] != "dense"]

    def compare(rule: str, other: str) -> list[float]:
        of = [{key: row[key] for key in ("structure", "width")} for row in places]
        losses = ([one(table, **w, rule=each)["best_loss"] for w in of] for each in (rule, other))
        return [mine / theirs for mine, theirs in zip(*losses, strict=True)]

    ours, naive = (f"{rule}{lr_transfer.HEAD}" for rule in ("aware", "naive"))
    found = {"head_mean": f"{shift[ours]:.2f}", "naive_head_mean": f"{shift[naive]:.2f}"}
    for name, ratios in {"head": compare(ours, "naive"), "heads": compare(ours, naive)}.items():
        found |= {f"{name}_wins": str(sum(each <= 1 for each in ratios))}
        found |= {f"{name}_level": str(sum(1 < each <= LEVEL for each in ratios))}
    return found


def step() -> dict[str, str]:
    """What a step of Muon costs."""
    runs = {
        (row["width"], row["threads"]): {each["optimizer"]: each for each in row["optimizers"]}
        for row in read("optimizer")["rows"]
    }
    found = least_and_most(
        (each["structlin Muon"]["beside_torch"]["median"] for each in runs.values()), ".2f"
    )
    for threads, name in ((1, "one_"), (2, "two_")):
        shares = [
            100 * each["structlin Muon on BTT"]["share"]["median"]
            for (_, count), each in runs.items()
            if count == threads
        ]
        found |= least_and_most(shares, ".1f", name)
    return found


def far(summary: list[Row], method: str) -> list[Row]:
    """The points of the grid whose best rate is beyond sqrt 2 of the base point's."""
    return [row for row in transfer.on_grid(summary, method) if abs(row["shift"]) > 0.5]


def carried() -> dict[str, str]:
    """What carries over to more width and depth: `transfer` in the pages."""
    result = read("transfer")
    summary = result["summary"]
    grid = {method: transfer.on_grid(summary, method) for method in transfer.METHODS}
    costs = {
        name: f"{max(row['cost'] for row in grid[method]):.2f}"
        for name, method in (
            ("cost_normed", "Normed"),
            ("cost_power", transfer.POWER),
            ("cost_adamw", "AdamW"),
            ("cost_muon", "Muon"),
        )
    }
    most = {
        (method, structure): max(
            abs(row["shift"]) for row in grid[method] if row["structure"] == structure
        )
        for method, structure in product(("AdamW", "plain AdamW"), transfer.FEW)
    }
    return {
        **costs,
        "points": str(len(grid["Normed"])),
        "adamw_far": str(len(far(summary, "AdamW"))),
        "muon_far": str(len(far(summary, "Muon"))),
        "muon_most": f"{max(row['shift'] for row in far(summary, 'Muon')):.2f}",
        "no_decay": str(transfer.best_decays(summary).count(0.0)),
        "control_dense": f"{most['plain AdamW', 'dense']:.1f}",
        "control_btt": f"{most['plain AdamW', 'BTT r=1']:.1f}",
        "ruled_dense": f"{most['AdamW', 'dense']:.2f}",
        "ruled_btt": f"{most['AdamW', 'BTT r=1']:.2f}",
        "control_cost": f"{max(row['cost'] for row in grid['plain AdamW']):.0f}",
    }


def gpts() -> dict[str, str]:
    """What the structured GPT costs over dense's of width 512, and how many times fewer seconds it
    needs until dense's loss, on both machines; how far above dense it ends on the other text; and
    what narrower ones have, at 768 and with rank 2."""
    of = {"setup": "Python", "optimizer": "AdamW", "width": 512, "kind": gpt_seconds.BEST["AdamW"]}
    rows = gpt_seconds.at_best_rates(read("gpt_seconds")["rows"])
    numbers: dict[str, str] = {}
    for machine, name in (("xeon", "gpt_seconds"), ("epyc", "gpt_seconds_epyc")):
        table = gpt_seconds.tabulate(rows, read(name)["times"])
        (found,) = (row for row in select(table, **of) if "until" in row)
        numbers |= {
            "flops": f"{found['flops']:.2f}",
            machine: f"{min(found['until']['seconds']['by_seed']):.1f}",
        }

    def beside_dense(kind: str, **where: Any) -> tuple[Row, float]:
        rows = select(read("gpt_seconds")["table"], **where, optimizer="AdamW")
        ours, dense = (select(rows, kind=each)[0] for each in (kind, "dense"))
        return ours, fmean(ours["losses"]) / fmean(dense["losses"]) - 1

    _, higher = beside_dense(of["kind"], setup="Wikipedia", width=512)
    narrow, above = beside_dense(gpt_seconds.NARROWER, setup="Python", width=768)
    ranked, below = beside_dense(gpt_seconds.RANK_TWO, setup="Python", width=512)
    return numbers | {
        "wikipedia": percent(higher),
        "narrow_loss": percent(-above, 1),
        "narrow_seconds": f"{narrow['seconds']:.2f}",
        "rank_loss": percent(-below, 1),
        "rank_seconds": f"{ranked['seconds']:.2f}",
    }


def smollm2() -> dict[str, str]:
    """The excess perplexity of the best of ours over that of SVD-LLM, by what is kept, right after
    compression and healed."""
    found: dict[str, list[str]] = {"calibrated": [], "healed": []}
    for keep, excess in sorted(read("smollm2").get("excess", {}).items(), reverse=True):
        for way, texts in found.items():
            ours = {name: each for name, each in excess.items() if name.endswith(f", {way}")}
            if ours:
                best = min(ours, key=lambda name: ours[name]["value"])
                method = best.removesuffix(f", {way}")
                texts.append(f"{interval(ours[best], 2, same)} at {keep} ({method})")
    names = {"excess": "calibrated", "healed": "healed"}
    return {name: "; ".join(found[way]) or "not run" for name, way in names.items()}


def accuracies(row: Row) -> str:
    """Of neighbours / of a linear probe."""
    return f"{row['neighbours']:.3f} / {row['probe']:.3f}"


def dinov2() -> dict[str, str]:
    """Accuracies of the vision transformer, low-rank, by what else is kept."""
    rows = select(read("dinov2")["rows"], method="low-rank", way="calibrated")
    shown = sorted((row for row in rows if row["keep"] != 0.5), key=lambda row: -row["keep"])
    return {"shares": ", ".join(f"{accuracies(row)} at {row['keep']:g}" for row in shown)}


def example() -> dict[str, str]:
    """What examples/compress.py takes and gives for SmolLM2."""
    result = read("compress")
    dense, small = result["rows"]
    return {
        "minutes": f"{result['cpu_seconds'] / 60:.0f}",
        "gigabytes": f"{result['peak_bytes'] / 1e9:.1f}",
        "dense": f"{dense['after']['perplexity']:.1f}",
        "after": f"{small['after']['perplexity']:.1f}",
        "healed": f"{small['healed']['perplexity']:.1f}",
        "megabytes": f"{small['bytes'] / 1e6:.0f}",
    }


def models() -> dict[str, str]:
    return {"count": str(len(read("models")["rows"]))}


# ---- the papers ----------------------------------------------------------------------------------


def cbs() -> dict[str, str]:
    """Compute Better Spent."""
    changed = read("papers/cbs_features")
    grown = [exp(found["value"]) for found in changed["growth"]["aware"].values()]
    short = {name: exp(found["value"]) for name, found in changed["shortfall"].items()}
    lowrank = short.pop("low-rank")
    aware = select(read("papers/cbs_tuning")["advantages"], rule="aware")
    means = {
        (kind, width): geometric_mean(row[kind] for row in select(aware, width=width))
        for kind, width in product(("tuned", "dense's"), (64, 256))
    }
    normed = {(r["lr"], r["model"]): r["loss"] for r in read("papers/cbs_norm")["table"]}

    def higher(name: str, rate: str = "usual") -> float:
        return float(normed[rate, f"BTT, {name}"] / normed[rate, "BTT"] - 1)

    untuned = read("papers/cbs_untuned")["comparisons"].values()
    saturated = [found["share"]["value"] for by_name in untuned for found in by_name.values()]
    btt = [by_name["BTT r=1"]["against_dense"] for by_name in untuned]
    ratios = read("papers/cbs_gpt")["log_ratios"]
    tasks = read("papers/cbs_sgd")["shifts"]
    shifts = {
        lowrank: max(
            abs(row["shift"])
            for found in tasks.values()
            for row in select(found["table"], rule="aware")
            if (row["structure"] == "low-rank") == lowrank
        )
        for lowrank in (True, False)
    }
    return {
        **least_and_most(grown, ".2f", "grown_"),
        "short_lowrank": f"{lowrank:.2f}",
        **least_and_most(short.values(), ".2f", "short_"),
        **least_and_most(saturated, ".2f", "untuned_"),
        **{
            f"untuned_{rule}": " and ".join(f"{exp(found[rule]['value']):.2f}" for found in btt)
            for rule in ("naive", "aware")
        },
        "tuned_64": percent(1 / means["tuned", 64] - 1),
        "tuned_256": percent(1 - means["tuned", 256]),
        "dense_64": percent(means["dense's", 64] - 1),
        "dense_256": percent(means["dense's", 256] - 1),
        "norm_usual": percent(-higher("normalised")),
        "norm_large": percent(-higher("normalised", "large")),
        "norm_quarter": percent(higher("a quarter of the rate")),
        "norm_decay": percent(higher("weight decay 1")),
        "gpt_all": interval(ratios["all FLOPs"], 3, exp),
        "gpt_body": interval(ratios["without the head's FLOPs"], 3, exp),
        "sgd_lowrank": f"{2 ** shifts[True]:.0f}",
        "sgd_others": f"{2 ** shifts[False]:.0f}",
        **{
            f"sgd_{task}_{rule}": f"{found['mean_shift'][rule]:.2f}"
            for task, found in tasks.items()
            for rule in ("naive", "aware")
        },
    }


def md() -> dict[str, str]:
    """Modular Duality."""
    shares = read("papers/md_width")["estimates"]["dualized / Adam"]
    contrast = read("papers/md_watermark")["estimates"]["contrast"]["plain"]
    kept = read("papers/md_coefficients")
    steps = kept["steps to converge"]
    spread = max(
        high / low for row in kept["table"] if row["losses"] for low, high in [row["losses"]]
    )
    return {
        **least_and_most((exp(found["value"]) for found in shares.values()), ".2f"),
        "contrast": f"{contrast['value']:.2f}",
        "cubic": str(steps["cubic"]),
        "quintic": str(steps["quintic"]),
        "steep": str(steps["quintic-steep"]),
        "spread": f"{spread:.1f}",
    }


def mn() -> dict[str, str]:
    """The Modular Norm."""
    found = read("papers/mn_transfer")["transfer"]
    fallen = {
        name: 2 ** -found[f"{network}, width"]["Adam"]["estimates"]["moved"]["value"]
        for name, network in (("mlp", "ResMLP"), ("conv", "ResNet"), ("gpt", "GPT"))
    }
    mass = read("papers/mn_mass")
    curves = [row["curve"] for sizes in mass["masses"].values() for row in sizes.values()]
    tared, free = mass["depth"]["tared"]["losses"], mass["depth"]["free"]["losses"]
    paper = read("papers/mn_overhead")["paper's setting"]["intervals"]
    cost = read("papers/mn_mass_gpt")["estimates"]["cost"]["value"]
    return {
        **{name: f"{factor:.1f}" for name, factor in fallen.items()},
        "near": str(
            math.ceil(100 * max(curve["1.0"] / min(curve.values()) - 1 for curve in curves))
        ),
        **least_and_most((free[blocks] / loss for blocks, loss in tared.items()), ".1f", "free_"),
        "cost": percent(exp(cost) - 1, 1),
        **{way: interval(paper[way], 0, lambda share: 100 * share) for way in ("power", "bound")},
    }


def bm() -> dict[str, str]:
    """Beyond MuP 2."""
    result = read("papers/bm_metrics")
    spectral = select(result["fresh"], init="spectral")
    dense = [abs(row["dependency"] - 1) for row in select(spectral, structure="dense")]
    products = [row["dependency"] for row in spectral if row["structure"] != "dense"]
    powers = [
        abs(power)
        for by_optimizer in result["exponents"].values()
        for name in ("Muon", "AdamW, muP")
        for power in by_optimizer[name].values()
    ]
    return {
        "core": f"{math.ceil(1000 * max(abs(row['largest core'] - 1) for row in spectral)) / 10}",
        "dense": f"{math.ceil(1000 * max(dense)) / 10}",
        **least_and_most(products, ".2f", "product_"),
        "power": f"{math.ceil(100 * max(powers)) / 100:.2f}",
        "sides": f"{max(read('papers/bm_norms')['sides'].values()):.0e}",
    }


GROUPS: dict[str, Callable[[], Mapping[str, str]]] = {
    name: cache(make)
    for name, make in {
        "front": front,
        "few": few,
        "roofline": roofline,
        "model": model,
        "peers": peers,
        "main": main,
        "mlp": mlp,
        "rates": rates,
        "step": step,
        "transfer": carried,
        "gpts": gpts,
        "smollm2": smollm2,
        "dinov2": dinov2,
        "example": example,
        "models": models,
        "verdicts": count_verdicts,
        "cbs": cbs,
        "md": md,
        "mn": mn,
        "bm": bm,
    }.items()
}
