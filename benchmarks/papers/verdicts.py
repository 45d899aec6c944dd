"""The table at the head of docs/results.md: each claim of the papers, and what our rows say of it.

Verdicts and numbers are computed from the kept results. "yes" and "no" are of the setting that was
run, which is smaller than the paper's everywhere, and in some rows another one; the page says how.
"""

from collections.abc import Sequence
from math import exp
from statistics import fmean
from typing import Any

from benchmarks.papers.tables import interval, names, one, select
from benchmarks.record import read, table

TASKS = ("teacher", "digits")
SATURATION = False  # shown by no run
MORE = 1.01  # a loss over another that counts as higher


def verdicts() -> str:
    """Every claim that was tried."""
    rows = [*better_spent(), *duality(), *norm(), *stability()]
    lines = [[f"{where}: {claim}", verdict, found] for where, claim, verdict, found in rows]
    head, _, *body = table(["the paper's claim", "here", "what was found"], lines).splitlines()
    return "\n".join([head, "|---|---|---|", *body])


def judge(*holds: bool) -> str:
    return "yes" if all(holds) else "in part" if any(holds) else "**no**"


def better_spent() -> list[tuple[str, ...]]:
    return [carries_over(), untuned(), tuned(), *scaling_laws(), *gpts(), *appendices()]


def carries_over() -> tuple[str, ...]:
    moved = read("lr_transfer")
    largest, mean = moved["largest_shift"], moved["mean_shift"]
    return (
        "CBS 2b",
        "dense's best learning rate carries over with the structure-aware rule",
        judge(largest["aware"] <= 1 < largest["naive"]),
        f"within a factor of {2 ** largest['aware']:.0f} ({mean['aware']:.2f} factors of 2 on "
        f"average) for 6 structures and 3 widths; without it of {2 ** largest['naive']:.0f} "
        f"({mean['naive']:.2f}): [optimizers](optimizers.md)",
    )


def untuned() -> tuple[str, ...]:
    rows = read("papers/cbs_tuning")["advantages"]
    aware = [select(rows, rule="aware", width=width) for width in (64, 256)]
    wins = [sum(row["dense's"] > MORE for row in found) for found in aware]
    return (
        "CBS 1c",
        "naive structures saturate untuned, aware ones do not",
        judge(*(2 * won > len(found) for won, found in zip(wins, aware, strict=True)), SATURATION),
        f"at dense's rate aware ends more than 1 % lower for {wins[0]} of {len(aware[0])} "
        f"structures at width 64 and {wins[1]} of {len(aware[1])} at 256; wider, not run",
    )


def tuned() -> tuple[str, ...]:
    rows = read("papers/cbs_tuning")["advantages"]
    aware = [select(rows, rule="aware", width=width) for width in (64, 256)]
    wins = [sum(row["tuned"] > MORE for row in found) for found in aware]
    return (
        "CBS 3",
        "aware ends lower also when both are tuned (FFN structured, attention dense)",
        "not run",
        f"in an MLP that is structured throughout, where the paper does not claim it, aware ends "
        f"more than 1 % lower for {wins[0]} of {len(aware[0])} structures at width 64 and "
        f"{wins[1]} of {len(aware[1])} at 256",
    )


def scaling_laws() -> list[tuple[str, ...]]:
    compared = read("papers/cbs_scaling")["comparisons"]

    def ratios(structure: str, against: str = "dense") -> list[dict[str, float]]:
        if against == "dense":
            return [compared[task]["against_dense"][structure] for task in TASKS]
        pair = [structure, against]
        return [one(compared[task]["log_ratios"], pair=pair) for task in TASKS]

    def losses(*pair: str) -> str:
        return " and ".join(interval(found, 2, exp) for found in ratios(*pair))

    def lower(*pair: str) -> list[bool]:
        return [found["high"] < 0 for found in ratios(*pair)]

    def exponents(structure: str) -> list[float]:
        return [compared[task]["exponents"][structure]["value"] for task in TASKS]

    dense, btt = exponents("dense"), exponents("BTT r=1")
    steepest = [max(compared[task]["exponents"].items(), key=value_of)[0] for task in TASKS]
    steeper = [one(compared[task]["exponent_differences"])["low"] > 0 for task in TASKS]
    shared = ("Kronecker", "TT r=4")
    flatter = [e < d for name in shared for e, d in zip(exponents(name), dense, strict=True)]
    worse = [found["low"] > 0 for name in shared for found in ratios(name)]
    ordered = [("BTT r=1", "BTT r=2"), ("BTT r=2", "BTT r=4"), ("Monarch b=16", "Monarch b=4")]
    more = ratios("BTT r=1", "BTT r=1, 3 cores")
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
            "BTT has the best exponent of all structures",
            judge(*(name.startswith("BTT") for name in steepest)),
            f"the largest are those of {steepest[0]} (teacher) and {steepest[1]} (digits)",
        ),
        (
            "CBS 4",
            "structures that share parameters, Kronecker and TT, are above dense at equal FLOPs",
            judge(*worse),
            f"Kronecker has {losses('Kronecker')} of dense's loss, TT r=4 {losses('TT r=4')}",
        ),
        (
            "CBS 4",
            "and scale worse than dense",
            judge(*flatter),
            f"their exponent is smaller than dense's in {sum(flatter)} of {len(flatter)} cases",
        ),
        (
            "CBS 5",
            "a lower rank of BTT, more blocks of Monarch, are better at equal FLOPs",
            judge(*(holds for pair in ordered for holds in lower(*pair))),
            f"BTT r=1 has {losses(*ordered[0])} of the loss of r=2, Monarch of 16 blocks "
            f"{losses(*ordered[2])} of that of 4",
        ),
        per_width(),
        (
            "CBS 12",
            "more than two cores bring no or negligible improvement",
            judge(*(found["value"] < 0.02 for found in more)),
            f"two cores have {losses('BTT r=1', 'BTT r=1, 3 cores')} of the loss of three",
        ),
    ]


def per_width() -> tuple[str, ...]:
    rows = select(read("papers/cbs_scaling")["rows"], lr=2**-6)
    held = []
    for costly, cheap in (("BTT r=4", "BTT r=1"), ("Monarch b=4", "Monarch b=16")):
        for task in TASKS:
            found = select(rows, task=task, structure=costly)
            for width in names(found, "width"):
                losses = [
                    fmean(
                        row["loss"] for row in select(rows, task=task, structure=name, width=width)
                    )
                    for name in (costly, cheap)
                ]
                held.append(losses[0] < losses[1])
    return (
        "CBS 6",
        "at equal width a higher rank of BTT, fewer blocks of Monarch, are better",
        judge(*held),
        f"for BTT r=4 against 1 and Monarch of 4 blocks against 16 at {sum(held)} of {len(held)} "
        "widths and tasks",
    )


def value_of(item: tuple[str, dict[str, float]]) -> float:
    return item[1]["value"]


def gpts() -> list[tuple[str, ...]]:
    rows = read("papers/cbs_norm")["table"]
    found = {(row["lr"], row["model"]): row for row in rows}
    pairs = [(found[lr, "BTT"], found[lr, "BTT, normalised"]) for lr in ("usual", "large")]
    ratios = read("papers/cbs_gpt")["log_ratios"]
    counted, body = ratios["all FLOPs"], ratios["without the head's FLOPs"]
    return [
        (
            "CBS 7",
            "a BTT GPT's activations grow; with weight normalisation they do not, at no cost",
            judge(*(n["end"] < b["end"] / 2 and n["loss"] < 1.01 * b["loss"] for b, n in pairs)),
            " and ".join(
                f"{b['end']:,.0f} against {n['end']:,.0f}, loss {b['loss']:.3f} against "
                f"{n['loss']:.3f}"
                for b, n in pairs
            )
            + " (usual rate, large rate)",
        ),
        (
            "CBS 9",
            "a BTT GPT is below dense at equal FLOPs; not where the head's are not counted",
            judge(counted["high"] < 0, body["high"] >= 0),
            f"{interval(counted, 3, exp)} of dense's loss, and {interval(body, 3, exp)}; 2 seeds",
        ),
    ]


def appendices() -> list[tuple[str, ...]]:
    claims = read("papers/cbs_projection")["claims"]
    sgd = read("papers/cbs_sgd")["shifts"]
    largest = [sgd[task]["largest_shift"]["aware"] for task in TASKS]
    means = [sgd[task]["mean_shift"] for task in TASKS]
    return [
        (
            "CBS D",
            "from which rank on a structure is every matrix; which family contains which",
            judge(*(claim["holds"] for claim in claims)),
            f"{len(claims)} bounds and inclusions, to 2e-15",
        ),
        (
            "CBS H",
            "an SGD rule (derived there; that dense's rate is then the structure's is our reading)",
            judge(*(each <= 1 for each in largest)),
            f"within a factor of {2 ** max(largest):.0f}; {means[0]['aware']:.2f} and "
            f"{means[1]['aware']:.2f} factors of 2 on average, without the rule "
            f"{means[0]['naive']:.2f} and {means[1]['naive']:.2f}",
        ),
        ("CBS 2a, 4c-d, 8, 10, 11", "as the paper has them", "not run", ""),
    ]


def duality() -> list[tuple[str, ...]]:
    methods = read("papers/md_width")["transfer"]
    moved = {name: 2 ** row["range"] for name, row in methods.items()}
    adam = [methods[name]["losses"] for name in ("Adam, SP", "Adam, muP")]
    shares = [
        loss / min(each[width] for each in adam)
        for width, loss in methods["dualized"]["losses"].items()
    ]
    rows = read("papers/md_watermark")["rows"]
    stable = {
        name: max(
            (row for row in select(rows, method=name) if row["accuracy"] >= 0.95),
            key=lambda row: float(row["lr"]),
        )
        for name in ("plain", "dualized")
    }
    plain, dualized = stable["plain"], stable["dualized"]
    steps = read("papers/md_coefficients")["steps to converge"]
    quintics = [steps["quintic"], steps["quintic-steep"]]
    muon = read("muon_vs_adamw")["table"]
    return [
        (
            "MD 1",
            "Adam's best rate falls with width; by muP and dualized it stays; dualized ends lowest",
            judge(moved["Adam, SP"] > 4, moved["dualized"] < 4, max(shares) < 1),
            f"it moves by a factor of {moved['Adam, SP']:.0f}, {moved['Adam, muP']:.1f} and "
            f"{moved['dualized']:.1f}; dualized has {min(shares):.2f} to {max(shares):.2f} of the "
            "better Adam's loss; 20 steps, where the paper has thousands",
        ),
        (
            "MD 2",
            "at the largest stable rate dualized training erases a watermark, plain training not",
            judge(dualized["contrast"] > 0.8, plain["contrast"] < 0.2),
            f"contrast {dualized['contrast']:.2f} against {plain['contrast']:.2f}, accuracy "
            f"{dualized['accuracy']:.3f} against {plain['accuracy']:.3f}; 60 steps for 1000",
        ),
        (
            "MD 5.3",
            "quintics need fewer steps than the cubic",
            judge(*(each < steps["cubic"] for each in quintics)),
            f"{quintics[0]} and {quintics[1]} against {steps['cubic']}",
        ),
        (
            "MD 6",
            "dualized training of GPTs needs fewer steps (the paper: NanoGPT, wall time)",
            judge(*(row["Muon"]["loss"] < row["AdamW"]["loss"] for row in muon)),
            "lower loss than AdamW for "
            f"{sum(row['Muon']['loss'] < row['AdamW']['loss'] for row in muon)} of {len(muon)} "
            "models; wall time is not measured: [optimizers](optimizers.md)",
        ),
        ("MD 6.4, 6.5", "alignment; the batch size that is needed", "not run", ""),
    ]


def norm() -> list[tuple[str, ...]]:
    result = read("papers/mn_transfer")
    found = result["transfer"].values()
    normed, plain = (
        [2 ** each[f"{prefix}{name}"]["range"] for each in found for name in ("Adam", "SGD")]
        for prefix in ("normed ", "")
    )
    moves = [a > b for a, b in zip(plain, normed, strict=True)]
    masses = [row for sizes in read("papers/mn_mass")["masses"].values() for row in sizes.values()]
    costs = [row["curve"]["1.0"] / row["least"] for row in masses]
    depth = read("papers/mn_mass")["depth"]
    tared, free = (2 ** depth[name]["range"] for name in ("tared", "free"))
    adds = [100 * each for row in read("papers/mn_overhead")["rows"] for each in overheads(row)]
    lower = {name: least_losses(result["rows"], name) for name in ("Adam", "SGD")}
    return [
        (
            "MN 1, 4",
            "the best rate of normed Adam and SGD stays over width and depth, the plain ones' not",
            judge(max(normed) <= 2, all(moves)),
            f"it moves by factors of up to {max(normed):.2f} normed and up to {max(plain):.0f} "
            f"plain, by more in {sum(moves)} of {len(moves)} cases; one seed, 40 and 50 steps",
        ),
        *(
            (
                "MN D.5",
                claim,
                judge(*lower[name]),
                f"lower at {sum(lower[name])} of {len(lower[name])} sizes, tuned, training loss; "
                f"plain {name} is not in the paper's parametrisation",
            )
            for name, claim in (
                ("Adam", "normed Adam matches or outperforms Adam"),
                ("SGD", "normed SGD significantly outperforms SGD"),
            )
        ),
        (
            "MN 3",
            "one mass of the blocks is good at every size",
            judge(max(costs) < 1.25),
            f"mass 1 costs at most {100 * (max(costs) - 1):.0f} % (ResMLP; the GPT is not run)",
        ),
        (
            "MN 6",
            "tared masses keep the best rate over depth, free ones do not",
            judge(tared < 2, free > 2),
            f"from 2 blocks to 32 it moves by {tared:.1f} tared and {free:.1f} free, with "
            f"{min_ratio(depth):.1f} to {max_ratio(depth):.1f} times the loss free",
        ),
        (
            "MN A.4",
            "normalising took 23 % more time (ResMLP; not run here)",
            "not run",
            f"on a GPT it takes {min(adds):.1f} to {max(adds):.1f} % more",
        ),
        ("MN 5, 7, 8, 9-12, ResNet", "as the paper has them", "not run", ""),
    ]


def overheads(row: dict[str, Any]) -> Sequence[float]:
    found: dict[str, float] = row["overhead"]
    return [*found.values()]


def least_losses(rows: Sequence[dict[str, Any]], name: str) -> list[bool]:
    """Whether the normed optimizer has the lower loss, each at its best rate, at every size."""
    held = []
    for network, axis in dict.fromkeys((row["network"], row["axis"]) for row in rows):
        for size in names(select(rows, network=network, axis=axis), "size"):
            least = [
                min(row["loss"] for row in found if row["loss"] is not None)
                for method in (f"normed {name}", name)
                for found in [select(rows, network=network, axis=axis, size=size, method=method)]
            ]
            held.append(least[0] < least[1])
    return held


def min_ratio(depth: dict[str, Any]) -> float:
    return min(loss_ratios(depth))


def max_ratio(depth: dict[str, Any]) -> float:
    return max(loss_ratios(depth))


def loss_ratios(depth: dict[str, Any]) -> list[float]:
    tared, free = depth["tared"]["losses"], depth["free"]["losses"]
    return [float(free[blocks] / loss) for blocks, loss in tared.items()]


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
        ("BM", "In Norm and Out Norm", "not run", ""),
    ]
