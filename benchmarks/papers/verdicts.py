"""Each claim of the papers and what our rows say of it, and what is not tested: for
docs/results.md and benchmarks/results/verdicts.json.

Verdicts and numbers are computed from the kept results. They are of the setting that was run, which
is smaller than the paper's everywhere, and in some rows another one; the page says how.
"""

from collections.abc import Sequence
from functools import partial
from math import exp, log
from typing import Any

from benchmarks.harness.record import read
from benchmarks.harness.report import interval, percent, same, table
from benchmarks.harness.statistics import (
    Estimate,
    above,
    below,
    bootstrap,
    curve_of,
    exponent,
    judge,
    one,
    seeds_of,
    select,
    student,
    within,
)
from benchmarks.harness.statistics import values as names
from benchmarks.papers import cbs_ffn, cbs_gpt, cbs_projection, cbs_scaling
from benchmarks.papers.md_alignment import ISOMETRY
from benchmarks.papers.md_watermark import ERASED, VISIBLE
from benchmarks.papers.md_width import MUCH
from benchmarks.papers.verdicts_norm import norm
from benchmarks.training.gpt_seconds import needed

TASKS = ("teacher", "digits")
SHARED = ("Kronecker", "TT r=4")  # structures that share parameters
VISION = {"cbs_mlp": "CBS 4a-b, residual MLPs", "cbs_vit": "CBS 4c-d, ViTs"}
FIGURE_4 = ("dense", "low-rank", *SHARED, "Monarch b=4", "BTT r=1")
RANKS, BLOCKS = ("BTT r=4", "BTT r=1"), ("Monarch b=4", "Monarch b=16")
GROWTH, LOSS = "growth / BTT's", "loss / BTT's"  # of `cbs_norm`
NEGLIGIBLE = 1.02  # a loss over another that is not above it
FLAT = 0.15  # a power of the width, without its sign
ROUNDING = 1e-5  # of float32, in a product of 256 features


def find_verdicts() -> list[tuple[str, ...]]:
    """Every claim that was tried: figure, claim, verdict, and the numbers that decided it."""
    return [*better_spent(), *duality(), *norm(), *stability()]


def better_spent() -> list[tuple[str, ...]]:
    return [
        *features(),
        carries_over(),
        *untuned(),
        *some_layers(),
        *scaling_laws(),
        *(line for name in VISION for line in vision(name)),
        *gpts(),
        *appendices(),
    ]


def features() -> list[tuple[str, ...]]:
    result = read("papers/cbs_features")
    grown = result["growth"]["aware"]
    short = result["shortfall"]
    return [
        (
            "CBS 2a",
            '"structure-aware learning rate scaling produces consistent feature learning for all '
            'structures used"',
            judge(*(within(found, log(2)) for found in grown.values())),
            "the mean change of a step grows from width 64 to 1024 by a factor of "
            + listed(grown)
            + f", dense's by {interval(result['dense'], 2, exp)}",
        ),
        (
            "CBS 2a",
            '"the naive approach causes much smaller or vanishing updates to the features"',
            judge(*(below(found, log(1 / 2)) for found in short.values())),
            f"at width 1024 it has {listed(short)} of the aware rule's",
        ),
        (
            "CBS 2a",
            '"the effect is most pronounced for BTT and Kronecker"',
            judge(*(below(found) for found in result["pronounced"])),
            "; ".join(
                f"{first}'s naive share is {interval(found, 2, exp)} of that of {second}"
                for found in result["pronounced"]
                for first, second in [found["pair"]]
            ),
        ),
    ]


def listed(found: dict[str, Estimate]) -> str:
    return ", ".join(f"{interval(each, 2, exp)} ({name})" for name, each in found.items())


def carries_over() -> tuple[str, ...]:
    moved = read("lr_transfer")
    largest, mean = moved["largest_shift"], moved["mean_shift"]
    return (
        "CBS 2b",
        "dense's best learning rate carries over with the structure-aware rule",
        judge(largest["aware"] <= 1 < largest["naive"]),
        f"within a factor of {2 ** largest['aware']:.0f} ({mean['aware']:.2f} factors of 2 on "
        f"average) for 6 structures and 3 widths; without it of {2 ** largest['naive']:.0f} "
        f"({mean['naive']:.2f})",
    )


def untuned() -> list[tuple[str, ...]]:
    compared = read("papers/cbs_untuned")["comparisons"]

    def all_of(structure: str) -> list[dict[str, Any]]:
        return [by_structure[structure] for by_structure in compared.values()]

    def shares(structure: str) -> str:
        return " and ".join(interval(found["share"], 2, same) for found in all_of(structure))

    def losses(structure: str, rule: str) -> str:
        found = [each["against_dense"][rule] for each in all_of(structure)]
        return " and ".join(interval(each, 2, exp) for each in found)

    structures = ("BTT r=1", "Kronecker")
    saturated = [below(found["share"], 1 / 2) for name in structures for found in all_of(name)]
    monarch = [above(found["share"], 1 / 2) for found in all_of("Monarch b=4")]
    benefit = [
        holds
        for found in (each["against_dense"] for each in all_of("BTT r=1"))
        for holds in (below(found["aware"]), above(found["naive"]))
    ]
    return [
        (
            "CBS 1c",
            '"structured models quickly saturate as they are scaled up without structure-aware '
            'learning rates" (nothing tuned but dense)',
            judge(*saturated),
            "the naive rule's exponent is "
            + ", ".join(f"{shares(name)} of the aware rule's ({name})" for name in structures)
            + f"; {' and '.join(compared)}, widths to 576; saturated: below half",
        ),
        (
            "CBS 1c",
            '"Monarch is an exception" (4 blocks)',
            judge(*monarch),
            f"there the share is {shares('Monarch b=4')}",
        ),
        (
            "CBS 1c",
            'without the rule "the benefit of structured layers does not emerge"',
            judge(*benefit),
            f"at equal FLOPs BTT r=1 has {losses('BTT r=1', 'naive')} of dense's loss without, "
            f"{losses('BTT r=1', 'aware')} with it",
        ),
    ]


def some_layers() -> list[tuple[str, ...]]:
    """CBS figure 3: both rules tuned, structured FFNs beside dense attention."""
    result = read("papers/cbs_ffn")
    setting, found = result["setting"], result["aware / naive"]
    return [
        (
            "CBS 3",
            '"Structure-aware learning rates improve performance even after tuning", in a ViT with '
            "BTT in its FFNs and dense attention",
            judge(*(below(found[part]) for part in cbs_ffn.PARTS)),
            f"the rule has {interval(found['loss'], 2, exp)} of the naive one's held-out loss and "
            f"{interval(found['error'], 2, exp)} of its test error, each at its best rate (width "
            f"{setting['width']}, {setting['steps']} steps of the digits)",
        )
    ]


def scaling_laws() -> list[tuple[str, ...]]:
    compared = read("papers/cbs_scaling")["comparisons"]

    def ratios(structure: str, against: str = "dense") -> list[dict[str, float]]:
        if against == "dense":
            return [compared[task]["against_dense"][structure] for task in TASKS]
        pair = [structure, against]
        return [one(compared[task]["log_ratios"], pair=pair) for task in TASKS]

    def losses(*pair: str) -> str:
        return " and ".join(interval(found, 2, exp) for found in ratios(*pair))

    def lower(*pair: str) -> list[bool | None]:
        return [below(found) for found in ratios(*pair)]

    def exponents(structure: str) -> list[float]:
        return [compared[task]["exponents"][structure]["value"] for task in TASKS]

    dense, btt = exponents("dense"), exponents("BTT r=1")
    steepest = [
        max(FIGURE_4, key=lambda name: compared[task]["exponents"][name]["value"]) for task in TASKS
    ]
    steeper = [above(one(compared[task]["exponent_differences"])) for task in TASKS]
    flatter = [flatness(task, name) for name in SHARED for task in TASKS]
    worse = [above(found) for name in SHARED for found in ratios(name)]
    ordered = [("BTT r=1", "BTT r=2"), ("BTT r=2", "BTT r=4"), ("Monarch b=16", "Monarch b=4")]
    ranks = [(f"BTT r={r}, 3 cores", f"BTT r={2 * r}, 3 cores") for r in (1, 2)]
    cores = [("BTT r=1", f"BTT r=1, {n} cores") for n in (3, 4)]
    return [
        (
            "CBS 4",
            "BTT is below dense at equal FLOPs, with the larger exponent",
            judge(*lower("BTT r=1"), *steeper),
            f"{losses('BTT r=1')} of dense's loss (teacher, digits); exponents {btt[0]:.3f} and "
            f"{btt[1]:.3f}, dense {dense[0]:.3f} and {dense[1]:.3f}",
        ),
        (
            "CBS 4",
            '"BTT achieves the best scaling" of the structures in the figure',
            judge(*(name == "BTT r=1" for name in steepest)),
            f"the largest exponent is that of {steepest[0]} (teacher), {steepest[1]} (digits)",
        ),
        (
            "CBS 4",
            "structures that share parameters, Kronecker and TT, are above dense at equal FLOPs",
            judge(*worse),
            f"Kronecker has {losses('Kronecker')} of dense's loss, TT r=4 {losses('TT r=4')}",
        ),
        (
            "CBS 4",
            '"structures with FLOPs equal to parameters scale better than those with parameter '
            'sharing (Kronecker and TT)": dense than these',
            judge(*(below(found) for found in flatter)),
            "their exponents exceed dense's by "
            + ", ".join(interval(found, 3, same) for found in flatter)
            + " (Kronecker and TT r=4, each on teacher and digits)",
        ),
        (
            "CBS 5",
            "a lower rank of BTT, more blocks of Monarch, are better at equal FLOPs",
            judge(*(holds for pair in ordered for holds in lower(*pair))),
            f"BTT r=1 has {losses(*ordered[0])} of the loss of r=2, Monarch of 16 blocks "
            f"{losses(*ordered[2])} of that of 4",
        ),
        *per_width(),
        (
            "CBS 11",
            '"Lower BTT-ranks have better compute-efficiency for BTT with c=3"',
            judge(*(holds for pair in ranks for holds in lower(*pair))),
            f"r=1 has {losses(*ranks[0])} of the loss of r=2 (teacher, digits), r=2 "
            f"{losses(*ranks[1])} of that of r=4",
        ),
        (
            "CBS 12",
            '"increasing c beyond 2 leads to no or negligible improvement"',
            judge(*(below(found, log(NEGLIGIBLE)) for pair in cores for found in ratios(*pair))),
            f"two cores have {losses(*cores[0])} of the loss of three, {losses(*cores[1])} of that "
            f"of four; negligible: below {NEGLIGIBLE}",
        ),
    ]


def flatness(task: str, structure: str) -> Estimate:
    """By how much the structure's exponent exceeds dense's, over the seeds."""
    rows = select(read("papers/cbs_scaling")["rows"], task=task)
    curves = [select(rows, structure=name) for name in (structure, "dense")]
    differences = []
    for seed in sorted(names(rows, "seed")):
        ours, dense = (exponent(curve_of(found, [seed])) for found in curves)
        differences.append(ours - dense)
    return student(differences)


def per_width() -> list[tuple[str, ...]]:
    """Figure 6: the costlier structure against the cheaper at each width they share."""
    return [
        (
            "CBS 6",
            claim,
            judge(*(below(found) for found in costs.values())),
            f"{costly} has "
            + ", ".join(f"{interval(found, 2, exp)} ({name})" for name, found in costs.items())
            + f" of the loss of {cheap}",
        )
        for claim, costly, cheap in (
            ('"BTT with a higher rank achieves lower train error per unit width"', *RANKS),
            ('"Monarch with fewer blocks achieves lower train error per unit width"', *BLOCKS),
        )
        for costs in [ratios_per_width(costly, cheap)]
    ]


def ratios_per_width(first: str, second: str) -> dict[str, Estimate]:
    """Task and width -> log of the ratio of the losses, over the seeds."""
    rows = select(read("papers/cbs_scaling")["rows"], lr=cbs_scaling.LR)
    found = {}
    for task in TASKS:
        ours, theirs = (select(rows, task=task, structure=name) for name in (first, second))
        for width in sorted(set(names(ours, "width")) & set(names(theirs, "width"))):
            found[f"{task} {width}"] = student(
                [
                    log(row["loss"] / one(theirs, width=width, seed=row["seed"])["loss"])
                    for row in select(ours, width=width)
                ]
            )
    return found


def vision(name: str) -> list[tuple[str, ...]]:
    """CBS figure 4, of residual MLPs or of ViTs."""
    result, figure = read(f"papers/{name}"), VISION[name]
    exponents = result["exponents"]
    shared = [name for name in exponents if name.startswith(("Kronecker", "TT"))]
    own = [name for name in exponents if name not in shared]  # a parameter for each product

    def steeper(first: str, second: str) -> Estimate:
        for row in select(result["pairs"], pair=[first, second]):
            return dict(row["steeper"])
        found = one(result["pairs"], pair=[second, first])["steeper"]
        return {"value": -found["value"], "low": -found["high"], "high": -found["low"]}

    def loss(first: str, second: str = "dense") -> Estimate:
        return dict(one(result["pairs"], pair=[first, second])["loss"])

    def powers(*names: str) -> str:
        return ", ".join(f"{interval(exponents[name], 3, same)} ({name})" for name in names)

    def losses(*names: str) -> str:
        return ", ".join(f"{interval(loss(name), 2, exp)} ({name})" for name in names)

    others = [name for name in exponents if name != "BTT r=1"]
    excess = steeper("Monarch b=4", "dense")
    return [
        (
            figure,
            '"BTT has the largest scaling exponent"',
            judge(*(above(steeper("BTT r=1", name)) for name in others)),
            f"the exponents are {powers(*exponents)}",
        ),
        (
            figure,
            '"and consistently outperforms all other structures"',
            judge(*(below(loss("BTT r=1", name)) for name in others)),
            "at equal FLOPs it has "
            + ", ".join(f"{interval(loss('BTT r=1', name), 2, exp)} ({name})" for name in others)
            + " of their losses",
        ),
        (
            figure,
            '"Structures that do not share parameters [...] consistently achieve better scaling '
            'laws"',
            judge(*(above(steeper(a, b)) for a in own for b in shared)),
            "their exponents exceed "
            + " and ".join(
                f"that of {b} by " + ", ".join(interval(steeper(a, b), 3, same) for a in own)
                for b in shared
            )
            + f" ({', '.join(own)})",
        ),
        (
            figure,
            "structures that share parameters, Kronecker and TT, are above dense at equal FLOPs",
            judge(*(above(loss(name)) for name in shared)),
            f"{losses(*shared)} of dense's loss",
        ),
        (
            figure,
            'Monarch of 4 blocks "achieves equal or lower train and test error than dense for the '
            'same amount of compute, though it does not improve the scaling exponent"',
            judge(below(loss("Monarch b=4"), log(NEGLIGIBLE)), below(excess)),
            f"{interval(loss('Monarch b=4'), 2, exp)} of dense's held-out loss; its exponent is "
            f"larger by {interval(excess, 3, same)}; equal: below {NEGLIGIBLE}",
        ),
    ]


def gpts() -> list[tuple[str, ...]]:
    return [*normalisation(), equal_loss(), *heads()]


def heads() -> list[tuple[str, ...]]:
    """CBS figure 9: GPTs with and without the head's FLOPs."""
    result = read("papers/cbs_gpt")
    setting, ratios = result["setting"], result["log_ratios"]
    counted, body = ratios["all FLOPs"], ratios["without the head's FLOPs"]
    left = ratios["beyond half of the gain"]
    return [
        (
            "CBS 9",
            '"When including language modeling head compute, BTT is more efficient than dense"',
            judge(below(counted)),
            f"at equal FLOPs it has {interval(counted, 3, exp)} of dense's loss, "
            f"{interval(ratios['all FLOPs, one rate'], 3, exp)} where dense too is not tuned (rank "
            f"{setting['rank']}, {setting['heads']} heads, {setting['steps']} steps)",
        ),
        (
            "CBS 9",
            '"When excluding language modeling head compute, BTT and dense perform similarly"',
            judge(within(body, cbs_gpt.EQUAL)),
            f"{interval(body, 3, exp)} of dense's loss; similarly: within 2 %",
        ),
        (
            "CBS 9",
            '"the improvement primarily comes from reducing the compute spent in the language '
            'modeling head"',
            judge(below(counted) and above(left)),
            "the log ratio without the head's FLOPs is larger than half of that with them by "
            f"{interval(left, 3, same)}",
        ),
    ]


def normalisation() -> list[tuple[str, ...]]:
    """CBS figure 7: weight normalisation, and what the paper found not to replace it."""
    found = read("papers/cbs_norm")["estimates"]
    normed = [each["BTT, normalised"] for each in found.values()]
    others = {name: each for name, each in found["usual"].items() if name != "BTT, normalised"}

    def list_of(key: str, rows: Sequence[dict[str, Estimate]]) -> str:
        return " and ".join(interval(row[key], 2, exp) for row in rows)

    return [
        (
            "CBS 7",
            '"normalization eliminates the unbounded growth of the activations" of a BTT GPT',
            judge(*(below(row[GROWTH], log(1 / 2)) for row in normed)),
            f"they grow by {list_of('growth', normed)}, {list_of(GROWTH, normed)} of the factor "
            "without (usual rate, large rate); eliminated: below half",
        ),
        (
            "CBS 7",
            '"weight normalization also improves validation loss"',
            judge(*(below(row[LOSS]) for row in normed)),
            f"{list_of(LOSS, normed)} of the loss without (usual rate, large rate)",
        ),
        (
            "CBS 7",
            '"alternatives such as lowering the learning rate and increasing weight decay [...] '
            'only reduce the rate of growth at the cost of worse performance"',
            judge(
                *(
                    holds
                    for row in others.values()
                    for holds in (below(row[GROWTH]), above(row[LOSS]))
                )
            ),
            "; ".join(
                f"{name.removeprefix('BTT, ')}: {interval(row[GROWTH], 2, exp)} of the growth, "
                f"{interval(row[LOSS], 2, exp)} of the loss"
                for name, row in others.items()
            ),
        ),
    ]


def equal_loss() -> tuple[str, ...]:
    """CBS figure 8: how many times fewer FLOPs a BTT ViT needs for a dense one's loss."""
    rows = read("papers/cbs_vit")["rows"]
    dense, ours = (select(rows, structure=name) for name in ("dense", "BTT r=1"))

    def fewer(n: int, seeds: Sequence[int]) -> float:
        cost, loss = curve_of(dense, seeds)[n]
        points = [(exp(flops), exp(log)) for flops, log in curve_of(ours, seeds)]
        return exp(cost) / needed(points, exp(loss))

    widths = sorted(names(dense, "width"))
    found = [bootstrap(partial(fewer, n), seeds_of(rows)) for n in range(len(widths))]
    pairs = zip(widths, found, strict=True)
    listed = ", ".join(f"{interval(each, 1, same)} (dense {width})" for width, each in pairs)
    return (
        "CBS 8",
        '"BTT reaches the same performance of a dense ViT-S/32 with up to 3.8x fewer FLOPs"; here '
        "the widest dense ViT of the digits",
        judge(above(found[-1], 1.0)),
        f"{listed} times fewer FLOPs",
    )


def appendices() -> list[tuple[str, ...]]:
    exact = cbs_projection.holds(read("papers/cbs_projection"))
    sgd = read("papers/cbs_sgd")["shifts"]
    largest = [sgd[task]["largest_shift"]["aware"] for task in TASKS]
    means = [sgd[task]["mean_shift"] for task in TASKS]
    return [
        (
            "CBS D",
            "from which rank on a structure is every matrix; which family contains which",
            judge(*exact),
            f"{len(exact)} bounds and inclusions, to 2e-15",
        ),
        (
            "CBS H",
            "no claim of the paper, which derives an SGD rule and tests none; our hypothesis: "
            "with it dense's best rate is the structure's",
            judge(*(each <= 1 for each in largest)),
            f"within a factor of {2 ** max(largest):.0f}; {means[0]['aware']:.2f} and "
            f"{means[1]['aware']:.2f} factors of 2 on average, without the rule "
            f"{means[0]['naive']:.2f} and {means[1]['naive']:.2f}",
        ),
    ]


def duality() -> list[tuple[str, ...]]:
    steps = read("papers/md_coefficients")["steps to converge"]
    quintics = [steps["quintic"], steps["quintic-steep"]]
    return [
        *rates_by_width(),
        *watermark(),
        (
            "MD 5.3",
            "quintics need fewer steps than the cubic",
            judge(*(each < steps["cubic"] for each in quintics)),
            f"{quintics[0]} and {quintics[1]} against {steps['cubic']}",
        ),
        *aligned(),
    ]


def aligned() -> list[tuple[str, ...]]:
    """MD 6.4 and 6.5. What a simple answer and a non-trivial amount are is in `md_alignment`."""
    found = read("papers/md_alignment")["estimates"]
    large, small, adam = found.values()

    def list_of(way: dict[str, Any], name: str) -> str:
        return ", ".join(f"{each['value']:.2f}" for each in way[name]["widths"].values())

    def power(way: dict[str, Any]) -> str:
        return interval(way["movement"]["power"], 2, same)

    widths = ", ".join(large["alignment"]["widths"])
    return [
        (
            "MD 6.4",
            'how far updates "align with incoming activation vectors" is simple for dualized ones, '
            '"for which all singular values have the same magnitude"',
            judge(
                within(large["alignment"]["power"], FLAT),
                *(above(each, ISOMETRY) for each in large["alignment"]["widths"].values()),
            ),
            f"the RMS of dW x is {list_of(large, 'alignment')} of the largest that it can be, at "
            f"widths {widths}; by Adam {list_of(adam, 'alignment')}; dualized with batches of 8 "
            f"{list_of(small, 'alignment')}",
        ),
        (
            "MD 6.5",
            'dualized, "the weights should move a non-trivial relative amount at large width even '
            'in the Frobenius norm - provided the batch size is not too small"',
            judge(
                within(large["movement"]["power"], FLAT), below(small["movement"]["power"], -FLAT)
            ),
            f"by {list_of(large, 'movement')} of W at widths {widths}, which goes with the width "
            f"to the power {power(large)}; with batches of 8 to {power(small)}, by Adam to "
            f"{power(adam)}; non-trivial: not below -{FLAT}",
        ),
    ]


def rates_by_width() -> list[tuple[str, ...]]:
    """MD figure 1. What "mostly", "fairly" and "much" mean is in `md_width`'s docstring."""
    result = read("papers/md_width")
    found, steps = result["estimates"], result["setting"]["steps"]
    drift, excess, shares = found["drift"], found["excess"], found["dualized / Adam"]
    stable = judge(below(excess["dualized"]))
    lower = ", ".join(f"{interval(share, 2, exp)} ({n})" for n, share in shares.items())
    return [
        (
            "MD 1",
            '"in standard parameterization (SP), Adam\'s optimal learning rate drifts to the left"',
            judge(below(drift["Adam, SP"])),
            f"by {interval(drift['Adam, SP'], 2, same)} factors of 2 for a doubling of the width, "
            f"32 to {max(map(int, shares))}; {steps} steps of the digits at a constant rate",
        ),
        (
            "MD 1",
            '"maximal update parameterization [...] mostly corrects this drift"',
            judge(below(excess["Adam, muP"])),
            f"{interval(drift['Adam, muP'], 2, same)}; mostly: to less than half",
        ),
        (
            "MD 1",
            '"our duality-based method has a fairly stable optimal learning rate"',
            stable,
            f"{interval(drift['dualized'], 2, same)}; fairly stable: less than half of SP's drift",
        ),
        (
            "MD 1",
            'it "also reaches much lower loss"',
            judge(*(below(share, log(MUCH)) for share in shares.values())),
            f"{lower} of the better Adam's loss, by width; much: below {MUCH}",
        ),
    ]


def watermark() -> list[tuple[str, ...]]:
    result = read("papers/md_watermark")
    found, setting = result["estimates"], result["setting"]
    contrast, rates = found["contrast"], found["lrs"]
    plain, dualized = contrast["plain"], contrast["dualized"]
    shown = {name: ", ".join(f"{lr:g}" for lr in lrs) for name, lrs in rates.items()}
    return [
        (
            "MD 2",
            'dualized training "erases the watermark at the highest stable learning rate", plain '
            "training does not",
            judge(above(dualized, ERASED), below(plain, VISIBLE)),
            f"contrast {interval(dualized, 2, same)} (erased: above {ERASED}) and "
            f"{interval(plain, 2, same)} (visible: below {VISIBLE}), at rates of "
            f"{shown['dualized']} and {shown['plain']} by seed; width {setting['width']}, "
            f"{setting['steps']} steps",
        ),
        (
            "MD 2",
            'dualized training "reach[es] higher training accuracies than the non-dualized method"',
            judge(above(found["accuracy"])),
            f"by {interval(found['accuracy'], 1, percent)} percentage points, each at its best "
            "rate",
        ),
    ]


def stability() -> list[tuple[str, ...]]:
    result = read("papers/bm_metrics")
    spectral = select(result["fresh"], init="spectral")
    dense = [row["dependency"] for row in select(spectral, structure="dense")]
    products = [row["dependency"] for row in spectral if row["structure"] != "dense"]
    powers = {
        optimizer: [
            abs(power)
            for by_name in result["exponents"].values()
            for power in by_name[optimizer].values()
        ]
        for optimizer in ("Muon", "AdamW, muP", "AdamW, one lr")
    }
    good = max(powers["Muon"] + powers["AdamW, muP"])
    return [
        (
            "BM",
            "the initial variance gives a dependency of order 1",
            judge(min(dense) > 0.9, min(products) > 0.9),
            f"{min(dense):.2f} to {max(dense):.2f} for dense layers, {min(products):.2f} to "
            f"{max(products):.2f} for products of cores, at every width",
        ),
        (
            "BM",
            "with its steps forward, dependency and update stay of order 1 at every width",
            judge(good < 0.15),
            f"powers of the width of at most {good:.2f} by Muon and by `param_groups`, up to "
            f"{max(powers['AdamW, one lr']):.2f} with one rate for all widths",
        ),
        *in_norm(),
    ]


def in_norm() -> list[tuple[str, ...]]:
    result = read("papers/bm_norms")
    sides, found = result["sides"].values(), result["estimates"]
    return [
        (
            "BM",
            "In Norm: (x / RMS(x)) W = x W / RMS(x), for structured layers as for dense ones",
            judge(max(sides) < ROUNDING),
            f"the sides differ by at most {max(sides):.0e} of their RMS in float32; whether it is "
            "faster is not measured",
        ),
        (
            "BM",
            "an FFN's output is at most the product of its matrices' dependencies, and \"even if "
            "we only apply RMS Norm to x, for the second parameter [...] the same stability metric "
            'approximately holds"',
            judge(
                *(row["largest share"] <= 1 for row in found),
                *(within(row["power"], FLAT) for row in found),
            ),
            f"the worst output found has {max(row['largest share'] for row in found):.2f} of the "
            f"bound; what the second matrix reads has an RMS of "
            f"{min(row['middle'][0] for row in found):.2f} to "
            f"{max(row['middle'][1] for row in found):.2f}, and goes with the width to the power "
            + ", ".join(
                f"{interval(row['power'], 2, same)} ({row['structure']}, {row['state']})"
                for row in found
            ),
        ),
    ]


# ---- what is not tested --------------------------------------------------------------------------

UNTESTED = (  # of the paper, and what was run instead or why not; durations are estimates
    ("CBS 2b: widths to 4096, 100 epochs of CIFAR-10", "60 steps of the digits, widths to 1024"),
    ("CBS 3: width 1024 on CIFAR-10, one base width", "width 144 on the digits, muP by layer"),
    ("CBS 1b, 4a-b: CIFAR, training error, widths to 16384", "digits, held out, widths to 576"),
    ("CBS 4c-d: CIFAR-100, low-rank; 8: ImageNet", "held-out digits, widths to 256"),
    ("CBS 9: widths 1024 to 2560, 600,000 steps", "widths to 576, 300 steps"),
    ("CBS 10a: seconds against FLOPs on a GPU", "a CPU's: [speed](speed.md)"),
    ("MD 1: 20 epochs of CIFAR-10, widths to 4096", "500 steps of the digits, widths to 256"),
    ("MD 6: GPTs need fewer steps", "on two small GPTs, at the tag `evidence-0.2`"),
    ("MD 6.1, 6.2: the wall time of NanoGPT", "no GPU"),
    (
        "MN 1, 3 to 5, 7, 9 to 12: 10,000 steps, CIFAR-10, OpenWebText, TinyStories, Shakespeare",
        "40 to 120 steps of digits and other texts, two or three sizes",
    ),
    ("MN A.1; A.2's `regularize`; C.4; section 5's cheaper norms", "not implemented"),
    ("BM: Out Norm, a constrained spectral norm", "not implemented"),
)


def untested() -> str:
    """What of the papers is not tested as they have it, and what was run instead."""
    head, _, *body = table(["of the paper", "here"], [list(row) for row in UNTESTED]).splitlines()
    return "\n".join([head, "|---|---|", *body])
