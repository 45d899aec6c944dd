"""What do the coefficients of the Newton-Schulz iteration do? MD section 5.3.

    python -m benchmarks.papers.md_coefficients          # results/papers/md_coefficients.{json,png}
    python -m benchmarks.papers.md_coefficients --smoke  # seconds

An odd polynomial applied again and again to the singular values takes them to 1. The paper's
points: with more coefficients fewer steps do (the quintics against the cubic); what counts in few
steps is the slope at zero, by which the small singular values grow, and to have it steep Muon's
(3.4445, -4.7750, 2.0315) gives up convergence, 1 not being a fixed point; that is said not to hurt
training.

Here for all methods of `dualize`, the near-exact schedule "ns" among them, each with the number of
steps it has by default: its map of singular values relative to the Frobenius norm (its slope at
zero, and where it takes what lies above 1e-3 and 1e-2); `dual_efficiency`, 1 for the exact
factor, on matrices and on the gradients of an MLP in training; and the loss that MLP (of width 128,
on digits) ends with when `Muon` uses the method, over 3 seeds. Next to it the steps that the
convergent iterations need to take all above 1e-2 to within 1 % of 1.
"""

import math
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.papers import sweeps
from benchmarks.papers.polar_factors import COEFFICIENTS, METHODS, dual_efficiency, find_polar
from benchmarks.runs import digits, keep, parser, run_all
from structlin import dualize

LRS = [2.0**power for power in range(-5, 0)]
CONVERGENT = ("cubic", "quintic", "quintic-steep")

Run = tuple[str, float, int]  # method, lr, seed


def mapped(method: str, values: Tensor, steps: int | None = None) -> Tensor:
    """What `method` makes of singular values (n,), in units of the Frobenius norm of the matrix, in
    float64.

    Each is the smaller one of a matrix diag(cos, sin) of its own, so that the norm is 1 and no
    value depends on others.

    >>> mapped("cubic", torch.tensor([0.1]), steps=1).round(decimals=4)
    tensor([0.1495], dtype=torch.float64)
    """
    sines = values.double()
    matrices = torch.diag_embed(torch.stack([(1 - sines**2).sqrt(), sines], dim=-1))
    if method in COEFFICIENTS:
        return dualize(matrices, method=COEFFICIENTS[method], ns_steps=steps)[:, 1, 1]
    return find_polar(matrices, method)[:, 1, 1]


def properties(method: str) -> dict[str, Any]:
    """Of the map of singular values; "sketch" has none, as it drops the smaller half of them."""
    if method == "sketch":
        return {"steps": None, "slope at zero": None, "above 0.001": None, "above 0.01": None}
    values = torch.logspace(-6, math.log10(0.5**0.5), 2001, dtype=torch.float64)
    image = mapped(method, values)
    bands = {
        f"above {bound:g}": [
            image[values >= bound].min().item(),
            image[values >= bound].max().item(),
        ]
        for bound in (1e-3, 1e-2)
    }
    steps = len(COEFFICIENTS[method]) if method in COEFFICIENTS else None
    slope = math.prod(a for a, _, _ in COEFFICIENTS[method]) if steps else None
    return {"steps": steps, "slope at zero": slope, **bands}


def steps_to_converge(method: str, above: float = 1e-2, within: float = 1e-2) -> int:
    values = torch.logspace(math.log10(above), math.log10(0.5**0.5), 201)
    return next(n for n in range(1, 100) if (mapped(method, values, n) - 1).abs().max() < within)


def train(run: Run, steps: int, width: int = 128) -> dict[str, Any]:
    method, lr, seed = run
    torch.manual_seed(seed)
    x, y = digits()
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip
    descent = structlin.optim.Muon(model, lr, method=METHODS[method])
    schedule = torch.optim.lr_scheduler.LambdaLR(descent, lambda step: 1 - step / steps)
    efficiencies = []
    for step in range(steps):
        chosen = torch.randint(len(x), (256,))
        loss = F.cross_entropy(model(x[chosen]), y[chosen])
        descent.zero_grad()
        loss.backward()
        if step % max(1, steps // 10) == 0:
            gradient = model[2].weight.grad
            assert gradient is not None
            efficiencies.append(dual_efficiency(gradient, find_polar(gradient, method)).item())
        descent.step()
        schedule.step()
    with torch.no_grad():
        final = F.cross_entropy(model(x), y).item()
    return {
        "method": method, "size": width, "lr": lr, "seed": seed,
        "loss": final if math.isfinite(final) else None, "efficiency": min(efficiencies),
    }  # fmt: skip


def efficiencies(method: str) -> dict[str, float]:
    """Least of 16 matrices of each kind, float32: Gaussian ones of two shapes, and one of condition
    number 1e4."""
    seeded = torch.Generator().manual_seed(0)
    gauss = torch.randn(16, 64, 64, generator=seeded)
    u, v = torch.linalg.qr(gauss).Q, torch.linalg.qr(torch.randn(16, 64, 64, generator=seeded)).Q
    kinds = {
        "64 x 64": gauss,
        "64 x 256": torch.randn(16, 64, 256, generator=seeded),
        "cond. 1e4": u @ torch.diag(torch.logspace(0, -4, 64)) @ v.mT,
    }
    return {
        name: dual_efficiency(g, find_polar(g, method)).min().item() for name, g in kinds.items()
    }


def claims(table: list[dict[str, Any]], converge: dict[str, int]) -> dict[str, bool]:
    rows = {row["method"]: row for row in table}
    per_step = {
        name: rows[name]["slope at zero"] ** (1 / rows[name]["steps"])
        for name in (*CONVERGENT, "jordan")
    }
    exact, inexact = rows["svd"], rows["jordan"]
    spread = max(row["losses"][1] - row["losses"][0] for row in (exact, inexact))
    return {
        "the quintics converge in fewer steps than the cubic": (
            max(converge["quintic"], converge["quintic-steep"]) < converge["cubic"]
        ),
        "Muon's coefficients grow small values fastest per step": max(
            per_step, key=per_step.__getitem__
        )
        == "jordan",
        "they do not converge: what lies above 1e-2 stays off 1 by more than 10 %": (
            max(abs(end - 1) for end in inexact["above 0.01"]) > 0.1
        ),
        "training with them ends within the spread over seeds of the exact factor": (
            abs(inexact["loss"] - exact["loss"]) <= spread
        ),
        "ours, 'ns', takes all above 1e-3 to within 1e-3 of 1": (
            max(abs(end - 1) for end in rows["ns"]["above 0.001"]) < 1e-3
        ),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--seeds", type=int, default=3)
    options = options.parse_args(arguments)
    if options.smoke:
        options.steps, options.seeds = 2, 1
    runs: list[Run] = list(product(METHODS, LRS, range(options.seeds)))
    rows = run_all(partial(train, steps=options.steps), runs, options)
    curves = sweeps.losses(rows)
    table = []
    for method in METHODS:
        curve = next(curve for (name, _), curve in curves.items() if name == method)
        lr = sweeps.best(curve)
        chosen = [row for row in rows if (row["method"], row["lr"]) == (method, lr)]
        ends = [row["loss"] for row in chosen if row["loss"] is not None]
        table.append(
            {
                "method": method, **properties(method), "efficiency": efficiencies(method),
                "efficiency in training": min(row["efficiency"] for row in chosen),
                "lr": lr, "loss": curve[lr], "losses": [min(ends), max(ends)],
            }
        )  # fmt: skip
    converge = {method: steps_to_converge(method) for method in CONVERGENT}
    result = {"claims": claims(table, converge), "table": table, "steps to converge": converge}
    console = Console(width=170)
    show(result, console)
    if not options.smoke:
        sweeps.say(console, result["claims"])
    setting = {
        "width": 128,
        "steps": options.steps,
        "seeds": options.seeds,
        "batch": 256,
        "data": "digits",
    }
    keep(options, "md_coefficients", plot(table), setting=setting, **result, rows=rows)
    return result


def show(result: dict[str, Any], console: Console) -> None:
    shown = Table(
        title="methods of dualize: maps of singular values; "
        "least efficiency of 16 matrices; training"
    )
    shown.add_column("method")
    kinds = list(result["table"][0]["efficiency"])
    for heading in (
        "steps",
        "slope at 0",
        "> 1e-3 to",
        "> 1e-2 to",
        *kinds,
        "in training",
        "best lr",
        "loss",
        "of seeds",
    ):
        shown.add_column(heading, justify="right")
    for row in result["table"]:
        slope = "" if row["slope at zero"] is None else f"{row['slope at zero']:.3g}"
        bands = [_range(row[f"above {bound}"], "{:.3f}") for bound in ("0.001", "0.01")]
        shares = [*row["efficiency"].values(), row["efficiency in training"]]
        shown.add_row(
            row["method"], str(row["steps"] or ""), slope, *bands,
            *(f"{share:.3f}" for share in shares),
            f"2^{math.log2(row['lr']):g}", f"{row['loss']:.4f}", _range(row["losses"], "{:.4f}"),
        )  # fmt: skip
    console.print(shown)
    for method, steps in result["steps to converge"].items():
        console.print(
            f"{method} {COEFFICIENTS[method][0]}: "
            f"{steps} steps take all above 1e-2 to within 1 % of 1"
        )


def _range(ends: list[float] | None, form: str) -> str:
    return "" if ends is None else "-".join(form.format(end) for end in ends)


def plot(table: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    values = torch.logspace(-5, math.log10(0.5**0.5), 600)
    for method in COEFFICIENTS:
        left.plot(
            values,
            mapped(method, values),
            label=f"{method}, {len(COEFFICIENTS[method])} steps",
            lw=1,
        )
    left.set_xscale("log")
    left.set(xlabel="singular value / Frobenius norm", ylabel="becomes", title="maps")
    left.legend(fontsize=8)
    low, high = zip(*(row["losses"] for row in table), strict=True)
    mean = [row["loss"] for row in table]
    error = [
        [m - a for m, a in zip(mean, low, strict=True)],
        [b - m for m, b in zip(mean, high, strict=True)],
    ]
    right.errorbar([row["method"] for row in table], mean, yerr=error, fmt="o", capsize=3)
    right.tick_params(axis="x", rotation=60)
    right.set(
        ylabel="final loss (nats)", title="an MLP trained with each, at its best learning rate"
    )
    return figure


if __name__ == "__main__":
    main()
