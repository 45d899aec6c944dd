"""The tables of docs/results/, from the kept results; `benchmarks.pages` writes them."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from math import exp, log, log2
from statistics import fmean
from typing import Any

from benchmarks.harness.record import read
from benchmarks.harness.report import interval, same, table
from benchmarks.harness.statistics import one, select
from benchmarks.harness.statistics import values as names

Row = dict[str, Any]


# ---- Compute Better Spent ------------------------------------------------------------------------


def scaling() -> str:
    """Figures 4 and 5: exponents, and losses over dense's at equal FLOPs."""
    compared = read("papers/cbs_scaling")["comparisons"]
    titles = [""]
    for task in compared:
        titles += [f"exponent, {task}", "loss / dense's at equal FLOPs"]
    lines = []
    for structure in compared["teacher"]["exponents"]:
        cells = [structure]
        for found in compared.values():
            cells.append(interval(found["exponents"][structure], 3, same))
            ratio = found["against_dense"][structure]
            cells.append("1" if structure == "dense" else interval(ratio, 2, exp))
        lines.append(cells)
    return table(titles, lines)


def vision(name: str) -> str:
    """Figure 4: exponents of residual MLPs or ViTs, and losses over dense's at equal FLOPs."""
    result = read(f"papers/{name}")
    lines = []
    for structure, power in result["exponents"].items():
        found = select(result["rows"], structure=structure)
        against = select(result["pairs"], pair=[structure, "dense"])
        ratio = interval(against[0]["loss"], 2, exp) if against else "1"
        widths = ", ".join(map(str, sorted(names(found, "width"))))
        rate = f"2^{log2(found[-1]['lr']):g}"
        lines.append([structure, widths, rate, interval(power, 3, same), ratio])
    titles = ["", "widths", "base rate", "exponent", "loss / dense's at equal FLOPs"]
    return table(titles, lines)


def some_layers() -> str:
    """Figure 3: each rule at its best rate."""
    tuned, lines = read("papers/cbs_ffn")["tuned"], []
    for rule in tuned["loss"]:
        loss, error = (tuned[part][rule] for part in ("loss", "error"))
        means = [exp(fmean(each["logs"].values())) for each in (loss, error)]
        rates = [f"2^{log2(each['lr']):g}" for each in (loss, error)]
        lines.append([rule, f"{means[0]:.3f}", rates[0], f"{100 * means[1]:.1f} %", rates[1]])
    return table(["", "held-out loss", "at rate", "test error", "at rate"], lines)


def features() -> str:
    """Figure 2a: mean RMS change of the last features by a step, geometric mean over the seeds."""
    rows = read("papers/cbs_features")["rows"]
    widths, lines = sorted(names(rows, "width")), []
    for structure, rule in dict.fromkeys((row["structure"], row["rule"]) for row in rows):
        found = select(rows, structure=structure, rule=rule)
        changes = [[log(row["change"]) for row in select(found, width=width)] for width in widths]
        label = structure if structure == "dense" else f"{structure}, {rule}"
        lines.append([label, *(f"{exp(fmean(logs)):.3f}" for logs in changes)])
    return table(["", *(f"width {width}" for width in widths)], lines)


def norm() -> str:
    """Figure 7: RMS of the residual stream, and the loss."""
    result = read("papers/cbs_norm")
    rates, lines = result["setting"]["lrs"], []
    for row in result["table"]:
        large = row["lr"] == "large"
        rms = [f"{row['start']:.2f}"]
        rms += [f"{row[key]:,.0f}" if large else f"{row[key]:.1f}" for key in ("half", "end")]
        lines.append([f"2^{log2(rates[row['lr']]):g}, {row['model']}", *rms, f"{row['loss']:.3f}"])
    return table(["rate, model", "start", "half-way", "end", "held-out loss"], lines)


def gpt() -> str:
    """Figure 9: losses of dense at its better rate, and of BTT."""
    result = read("papers/cbs_gpt")
    rows = select(result["rows"], eps=result["setting"]["eps"])
    groups: dict[tuple[str, int], dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row["structure"], row["width"]][row["lr"]].append(row)
    lines = []
    for structure, width in sorted(groups, key=lambda key: (key[0] != "dense", key[1])):
        by_rate = groups[structure, width].values()
        best = min(by_rate, key=lambda found: fmean(row["loss"] for row in found))
        losses = ", ".join(f"{row['loss']:.3f}" for row in best)
        flops, head = best[0]["flops"], best[0]["head_flops"]
        cells = [structure, str(width), f"{flops:,}", f"{100 * head / flops:.0f} %", losses]
        lines.append(cells)
    titles = ["", "width", "FLOPs per token", "of the head", "held-out loss, by seed"]
    return table(titles, lines)


# ---- Modular Duality -----------------------------------------------------------------------------

WAYS = {  # of `dualize`, as the page names them
    "svd": "svd",
    "ns": "ns (ours, default)",
    "fast": "fast (ours)",
    "cubic": "cubic (1.5, -0.5)",
    "quintic": "(2, -1.5, 0.5)",
    "quintic-steep": "(3, -3.2, 1.2)",
    "jordan": "Muon's (3.4445, -4.7750, 2.0315)",
    "polar-express": "Polar Express",
    "sketch": "sketch (half the rank)",
}


def width() -> str:
    """Figure 1: the best rate by width, and the loss at it."""
    found = read("papers/md_width")["transfer"]
    labels = {"Adam, SP": "Adam, standard", "Adam, muP": "Adam, muP", "dualized": "dualized"}
    widths = list(found["dualized"]["optima"])
    lines = []
    for method, label in labels.items():
        row = found[method]
        cells = [f"{row['optima'][w]:+.1f}; {row['losses'][w]:.3f}" for w in widths]
        lines.append([label, *cells, f"{row['drift']:+.2f}"])
    return table(["log2 of the best rate; least loss", *widths, "per doubling"], lines)


def watermark() -> str:
    """Figure 2: accuracy, and the letter's contrast, means over the seeds."""
    rows, lines = read("papers/md_watermark")["rows"], []
    for lr in sorted(names(rows, "lr")):
        cells = [f"{lr:g}" if lr >= 1 else f"1/{1 / lr:g}"]
        for method in ("plain", "dualized"):
            found = select(rows, method=method, lr=lr)
            cells.append(f"{fmean(row['accuracy'] for row in found):.3f}")
            cells.append(f"{fmean(row['contrast'] for row in found):.2f}")
        lines.append(cells)
    titles = ["lr", "plain: accuracy", "contrast", "dualized: accuracy", "contrast"]
    return table(titles, lines)


def coefficients() -> str:
    """Section 5.3: what each way to the polar factor does."""
    rows, lines = read("papers/md_coefficients")["table"], []

    def span(ends: list[float] | None) -> str:
        low, high = (f"{end:.3f}" for end in ends) if ends else ("", "")
        return low if low == high else f"{low}-{high}"

    for method, label in WAYS.items():
        row = one(rows, method=method)
        slope, losses = row["slope at zero"], row["losses"]
        efficiency = [row["efficiency"][key] for key in ("64 x 64", "cond. 1e4")]
        lines.append(
            [
                label,
                str(row["steps"] or ""),
                f"{float(f'{slope:.3g}'):.0f}" if slope else "",
                span(row["above 0.001"]),
                span(row["above 0.01"]),
                *(f"{value:.3f}" for value in [*efficiency, row["efficiency in training"]]),
                f"{row['loss']:.4f} ({losses[0]:.4f}-{losses[1]:.4f})",
            ]
        )
    titles = ["method", "steps", "slope at 0", "above 1e-3 go to", "above 1e-2 go to"]
    titles += ["efficiency, 64 x 64", "cond. 1e4", "in training", "final loss (seeds)"]
    return table(titles, lines)


def alignment() -> str:
    """Sections 6.4 and 6.5: how aligned updates are, and how far weights move."""
    lines = []
    for way, numbers in read("papers/md_alignment")["estimates"].items():
        cells = [way]
        for found in numbers.values():
            cells.append(", ".join(f"{each['value']:.2f}" for each in found["widths"].values()))
            cells.append(interval(found["power"], 2, same))
        lines.append(cells)
    widths = ", ".join(found["widths"])
    titles = [f"alignment at {widths}", "power of the width", "movement", "power of the width"]
    return table(["", *titles], lines)


# ---- Scalable Optimization in the Modular Norm ---------------------------------------------------

METHODS = ("normed Adam", "Adam", "normed SGD", "SGD")


def transfer() -> str:
    """Figures 1 and 4: the best rates, and what keeping the smallest size's costs."""
    lines = []
    for setup, found in read("papers/mn_transfer")["transfer"].items():
        sizes = ", ".join(found["Adam"]["optima"])
        cells = [f"{setup} {sizes}"]
        for method in METHODS:
            optima = " ".join(f"{value:+.1f}" for value in found[method]["optima"].values())
            cost = found[method]["cost"]
            cells.append(f"{optima} (diverges)" if cost is None else f"{optima} ({cost:.2f}x)")
        lines.append(cells)
    return table(["", *METHODS], lines)


def nanogpt() -> str:
    """Figure 5: the best rates of plain Adam, the least losses, and what keeping a rate costs."""
    lines = []
    for setup, by_method in read("papers/mn_nanogpt")["transfer"].items():
        found = by_method["Adam"]
        cells = [f"{found['optima'][n]:+.1f}; {loss:.2f}" for n, loss in found["losses"].items()]
        cost = interval(found["estimates"]["cost"], 2, exp)
        lines.append([f"{setup} {', '.join(found['optima'])}", *cells, cost])
    return table(["log2 of the best rate; least loss", "smallest", "largest", "cost"], lines)


def contexts() -> str:
    """Figure 8: the best rate of normed Adam, and the least loss, by context."""
    found = read("papers/mn_context")["transfer"]["normed Adam"]
    cells = [f"{found['optima'][n]:+.1f}; {loss:.3f}" for n, loss in found["losses"].items()]
    return table(["context", *found["losses"]], [["log2 of the best rate; least loss", *cells]])


def normed() -> str:
    """Appendix D.5: losses of normed and plain optimizers, each at its best rate."""
    lines = []
    for row in read("papers/mn_normed")["comparisons"]:
        rates = zip(row["lrs"], row["at end"], strict=True)
        cells = [f"{log2(lr):+.0f}" + " (end)" * end for lr, end in rates]
        losses = [f"{loss:.3f}" for loss in row["losses"]]
        label = f"{row['optimizer']}, {row['set']}"
        lines.append([label, *losses, interval(row, 2, exp), *cells])
    titles = ["", "normed", "plain", "normed / plain", "log2 of the best rate, normed", "plain"]
    return table(titles, lines)


def tared() -> str:
    """Figure 6: the best rate and the least loss by depth."""
    found = read("papers/mn_mass")["depth"]
    labels = {"tared": "tared, mass 1 for all blocks", "free": "free, mass 1 for each layer"}
    lines = [
        [
            label,
            *(
                f"{found[name]['optima'][n]:+.1f}, {loss:.4f}"
                for n, loss in found[name]["losses"].items()
            ),
        ]
        for name, label in labels.items()
    ]
    depths = [f"{n} blocks" for n in found["tared"]["losses"]]
    return table(["log2 of the best rate, least loss", *depths], lines)


def overhead() -> str:
    """Appendix A.4: milliseconds, and what normalising adds."""
    result, lines = read("papers/mn_overhead"), []
    paper = {"width": 64, "tokens": "128 images, ResMLP", **result["paper's setting"]}
    for row in [paper, *result["rows"]]:
        ms = {name: 1e3 * seconds for name, seconds in row["seconds"].items()}
        ways = ("bound", "power", "net.normalize")
        cells = [str(row["width"]), str(row["tokens"]), f"{ms['forward + backward']:.0f}"]
        cells += [f"{ms[name]:.1f}" for name in ("Adam", *ways)]
        shares = ", ".join(f"{100 * row['overhead'][way]:.1f}" for way in ways)
        lines.append([*cells, f"{shares} %"])
    titles = ["width", "tokens", "forward + backward, ms", "Adam", "`Normed`, bound"]
    return table([*titles, "`Normed`, power", "`net.normalize`", "added by each"], lines)


# ---- Beyond MuP 2 --------------------------------------------------------------------------------


def fresh() -> str:
    """The dependency of fresh layers, in brackets the largest norm of a core."""
    rows = read("papers/bm_metrics")["fresh"]
    widths = sorted(names(rows, "width"))
    chosen = [("dense", "spectral"), ("dense", "mup")]
    chosen += [(name, "spectral") for name in ("low-rank", "Monarch", "BTT r=1", "BTT r=4")]
    lines = []
    for structure, init in chosen:
        cells = [f"{structure}, {init}"]
        for n in widths:
            row = one(rows, structure=structure, init=init, width=n)
            core = "" if structure == "dense" else f" ({row['largest core']:.2f})"
            cells.append(f"{row['dependency']:.2f}{core}")
        lines.append(cells)
    cells = ["every family, orthogonal"]
    for n in widths:
        found = [row["dependency"] for row in select(rows, init="orthogonal", width=n)]
        cells.append(f"{min(found):.2f} to {max(found):.2f}")
    return table(["", *(f"width {n}" for n in widths)], [*lines, cells])


def training() -> str:
    """The three numbers of the hidden layer at the last step that was read."""
    result = read("papers/bm_metrics")
    rows, metrics = result["rows"], ("forward", "dependency", "update")
    widths = sorted(names(rows, "width"))
    lines = []
    for structure, optimizer in product(
        result["exponents"], ("Muon", "AdamW, muP", "AdamW, one lr")
    ):
        cells = [f"{structure}, {optimizer}"]
        for n in widths:
            row = one(rows, structure=structure, optimizer=optimizer, width=n)
            forward, dependency, update = (row[key][-1] for key in metrics)
            cells.append(f"{forward:.2f} / {dependency:.2f} / {update:.3f}")
        powers = result["exponents"][structure][optimizer]
        lines.append([*cells, " / ".join(f"{powers[key]:+.2f}" for key in metrics)])
    return table(["", *(f"width {n}" for n in widths), "powers"], lines)


def ffn() -> str:
    """An FFN of which only the input is normalised."""
    lines = []
    for row in read("papers/bm_norms")["estimates"]:
        middle = "{:.2f} to {:.2f}".format(*row["middle"])
        power = interval(row["power"], 2, same)
        share = f"{row['largest share']:.2f}"
        lines.append([f"{row['structure']}, {row['state']}", middle, power, share])
    return table(["", "middle", "power of the width", "worst output / its bound"], lines)


# page of docs/results/ -> its tables
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "compute_better_spent": {
        "scaling": scaling,
        "residual MLPs": partial(vision, "cbs_mlp"),
        "ViTs": partial(vision, "cbs_vit"),
        "some layers": some_layers,
        "features": features,
        "normalisation": norm,
        "GPT": gpt,
    },
    "modular_duality": {
        "width": width,
        "watermark": watermark,
        "coefficients": coefficients,
        "alignment": alignment,
    },
    "modular_norm": {
        "transfer": transfer,
        "nanoGPT": nanogpt,
        "normed": normed,
        "contexts": contexts,
        "tared": tared,
        "overhead": overhead,
    },
    "beyond_mup": {"fresh": fresh, "training": training, "ffn": ffn},
}
