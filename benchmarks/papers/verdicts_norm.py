"""The verdicts on the claims of "Scalable Optimization in the Modular Norm": see `verdicts`."""

from collections.abc import Sequence
from math import exp, log
from typing import Any

from benchmarks.harness.record import read
from benchmarks.harness.report import interval, percent, same
from benchmarks.harness.statistics import above, below, judge, select, within
from benchmarks.papers.mn_mass_gpt import NEAR_DEFAULT
from benchmarks.papers.mn_overhead import PAPER

MATCHES = 1.05  # a loss over another that is not above it
SMALL = 1.02  # a loss over the least, where a mass is reasonable
NETWORKS = {"GPT": "MN 1", "ResMLP": "MN 4", "ResNet": "MN 4"}  # and their figures
Verdict = tuple[str, ...]


def norm() -> list[Verdict]:
    masses = [row for sizes in read("papers/mn_mass")["masses"].values() for row in sizes.values()]
    costs = [row["curve"]["1.0"] / row["least"] for row in masses]
    depth = read("papers/mn_mass")["depth"]
    tared, free = (2 ** depth[name]["range"] for name in ("tared", "free"))
    measured = read("papers/mn_overhead")
    adds = [100 * each for row in measured["rows"] for each in overheads(row)]
    paper = measured["paper's setting"]["intervals"]
    return [
        *(transferred(network, figure) for network, figure in NETWORKS.items()),
        across_width(),
        *losses_over_sizes(),
        *against_nanogpt(),
        *tuned_normed(),
        (
            "MN 3",
            "one mass of the blocks is good at every size",
            judge(max(costs) < 1.25),
            f"mass 1 costs at most {100 * (max(costs) - 1):.0f} % (ResMLP)",
        ),
        *masses_of_gpts(),
        (
            "MN 6",
            "tared masses keep the best rate over depth, free ones do not",
            judge(tared < 2, free > 2),
            f"from 2 blocks to 32 it moves by {tared:.1f} tared and {free:.1f} free, with "
            f"{min_ratio(depth):.1f} to {max_ratio(depth):.1f} times the loss free",
        ),
        over_contexts(),
        (
            "MN A.4",
            '"the overhead of modular normalization was around 23%" (ResMLP, power iterations)',
            judge(below(paper["power"], PAPER), below(paper["bound"], PAPER)),
            f"in that setting, on a CPU, {interval(paper['power'], 0, percent)} % by power "
            f"iterations and {interval(paper['bound'], 0, percent)} % by our bound; on a GPT "
            f"{min(adds):.1f} to {max(adds):.1f} %",
        ),
    ]


def transferred(network: str, figure: str) -> Verdict:
    """Figures 1 and 4: by how much the best rates move over width and depth."""
    result = read("papers/mn_transfer")
    by_axis = {axis: result["transfer"][f"{network}, {axis}"] for axis in ("width", "blocks")}
    ends = {axis: list(found["Adam"]["optima"]) for axis, found in by_axis.items()}
    moved = {
        method: [found[method]["estimates"]["moved"] for found in by_axis.values()]
        for method in ("normed Adam", "normed SGD", "Adam", "SGD")
    }
    normed = [*moved["normed Adam"], *moved["normed SGD"]]
    where = [f"{axis} {sizes[0]} to {sizes[-1]}" for axis, sizes in ends.items()]
    return (
        figure,
        '"normed optimization, with both Adam and SGD as the base optimizer, allows for successful '
        f'learning rate transfer across width and depth": {network}',
        judge(*(within(each, 1.0) for each in normed)),
        f"over {where[0]}, and {where[1]}, the best rate moves by these factors of 2: "
        + "; ".join(
            f"{method} {' and '.join(interval(each, 2, same) for each in found)}"
            for method, found in moved.items()
        )
        + f" ({result['setting']['steps']} steps); successful: less than one",
    )


def across_width() -> Verdict:
    result = read("papers/mn_transfer")["comparisons"]["transfer"]
    more = {
        method: {network: found[method]["width"] for network, found in result.items()}
        for method in ("Adam", "SGD")
    }
    shown = {
        method: ", ".join(f"{interval(each, 2, same)} ({name})" for name, each in found.items())
        for method, found in more.items()
    }
    return (
        "MN D.5",
        'normed Adam exhibits "significantly better transfer across width" than Adam',
        judge(*(above(each) for each in more["Adam"].values())),
        f"Adam's best rate moves by this many factors of 2 more: {shown['Adam']}; SGD's, of which "
        f"the paper says nothing, than normed SGD's: {shown['SGD']}",
    )


def losses_over_sizes() -> list[Verdict]:
    """D.5 and figures 9 to 12: normed against plain at every size of the sweeps of figures 1
    and 4."""
    result = read("papers/mn_transfer")
    rows = result["comparisons"]["losses"]
    found = []
    for name, claim, limit in (
        ("Adam", '"matches or outperforms unnormed Adam in both test and training loss"', MATCHES),
        ("SGD", '"consistently significantly outperforms ordinary SGD"', 1.0),
    ):
        chosen = [row for row in rows if row["pair"][1][1] == name]
        holds = [below(row, log(limit)) for row in chosen]
        ratios = [exp(row["value"]) for row in chosen]
        found.append(
            (
                "MN D.5, 9-12",
                f"normed {name} {claim}: {len(NETWORKS)} networks, over width and depth",
                judge(*holds),
                f"in {holds.count(True)} of {len(holds)} comparisons its loss is below {limit:g} "
                f"of {name}'s, in {holds.count(False)} above, in {holds.count(None)} undecided; "
                f"it has {min(ratios):.2f} to {max(ratios):.2f} of it "
                f"({result['setting']['steps']} steps)",
            )
        )
    return found


def against_nanogpt() -> list[Verdict]:
    """Figure 5."""
    result = read("papers/mn_nanogpt")
    more, rows = result["comparisons"]["transfer"], result["comparisons"]["losses"]
    moved = {
        network: " and ".join(
            interval(
                result["transfer"][f"{network}, {axis}"]["Adam"]["estimates"]["moved"], 2, same
            )
            for axis in more
        )
        for network in ("GPT", "nanoGPT")
    }
    ratios = [exp(row["value"]) for row in rows]
    return [
        (
            "MN 5, D.4",
            '"even without using the normed optimizer, our implementation with orthogonal '
            'initialization transferred learning rate better" than nanoGPT',
            judge(*(above(each) for each in more.values())),
            f"over width and over depth Adam's best rate moves by {moved['GPT']} factors of 2 "
            f"(GPT) and by {moved['nanoGPT']} (nanoGPT), the latter by "
            + " and ".join(interval(each, 2, same) for each in more.values())
            + f" more ({result['setting']['steps']} steps)",
        ),
        (
            "MN 4, D.4",
            'the changes to nanoGPT "recover standard performance"',
            judge(*(below(row, log(MATCHES)) for row in rows)),
            f"the GPT has {min(ratios):.2f} to {max(ratios):.2f} of nanoGPT's loss, by size, in "
            "training and test, both by Adam at its best rate",
        ),
    ]


def masses_of_gpts() -> list[Verdict]:
    """Figures 3 and 7. What "quite well" and "reasonable" mean is in `mn_mass_gpt`'s docstring."""
    found = read("papers/mn_mass_gpt")["estimates"]
    moved, near = found["moved"], f"{NEAR_DEFAULT}"
    masses = found["masses"]
    good = [
        float(mass)
        for mass in masses["Python"]
        if all(below(each[mass], log(SMALL)) for each in masses.values())
    ]
    return [
        (
            "MN 3",
            '"both mass and learning rate transfer quite well from a smaller GPT [...] to a larger '
            'one"',
            judge(
                within(moved["mass"], 2.0),
                within(moved["lr"], 1.0),
                below(found["cost"], log(SMALL)),
            ),
            f"the best mass moves by {interval(moved['mass'], 2, same)} factors of 2, the best "
            f"rate by {interval(moved['lr'], 2, same)}; the small GPT's cost the larger one a "
            f"factor of {interval(found['cost'], 3, exp)} in loss (widths 32 and 96, 3 and 6 "
            "blocks)",
        ),
        (
            "MN 7",
            'a mass in one region "is reasonable" "across all three datasets"; here by the default',
            judge(*(below(each[near], log(SMALL)) for each in masses.values())),
            f"mass {NEAR_DEFAULT:g} costs a factor of "
            + ", ".join(f"{interval(each[near], 3, exp)} ({name})" for name, each in masses.items())
            + f" in loss; reasonable: below {SMALL}, on all three the case for "
            + (" and ".join(f"{mass:g}" for mass in good) or "none"),
        ),
    ]


def over_contexts() -> Verdict:
    result = read("papers/mn_context")
    setting, found = result["setting"], result["estimates"]
    contexts = setting["contexts"]
    return (
        "MN 8, D.7",
        '"we report good transfer of the optimal learning rate from small contexts to long '
        'contexts"',
        judge(within(found["moved"], 1.0)),
        f"normed Adam's moves by {interval(found['moved'], 2, same)} factors of 2 from context "
        f"{contexts[0]} to {contexts[-1]}; keeping the shortest one's costs a factor of "
        f"{interval(found['cost'], 2, exp)} in loss (a small GPT, {setting['steps']} steps); good: "
        "less than one",
    )


def overheads(row: dict[str, Any]) -> Sequence[float]:
    found: dict[str, float] = row["overhead"]
    return [*found.values()]


def tuned_normed() -> list[Verdict]:
    """D.5: an optimizer normed against plain, each at its best rate, in training and test loss."""
    compared = read("papers/mn_normed")["comparisons"]
    return [
        (
            "MN D.5",
            claim,
            judge(*(below(row, limit) for row in select(compared, optimizer=name))),
            f"normed {name} has "
            + ", ".join(
                f"{interval(row, 2, exp)} of {name}'s {row['set']} loss"
                for row in select(compared, optimizer=name)
            )
            + " (ResMLP of width 64, 200 steps)",
        )
        for name, claim, limit in (
            (
                "Adam",
                '"the normed Adam optimizer matches or outperforms unnormed Adam in both test and '
                'training loss"',
                log(MATCHES),
            ),
            ("SGD", '"normed SGD consistently significantly outperforms ordinary SGD"', 0.0),
        )
    ]


def min_ratio(depth: dict[str, Any]) -> float:
    return min(loss_ratios(depth))


def max_ratio(depth: dict[str, Any]) -> float:
    return max(loss_ratios(depth))


def loss_ratios(depth: dict[str, Any]) -> list[float]:
    tared, free = depth["tared"]["losses"], depth["free"]["losses"]
    return [float(free[blocks] / loss) for blocks, loss in tared.items()]
