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
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import structlin
from benchmarks.harness import figures, models, training
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import best, curve_of_rates, select, values
from benchmarks.harness.tasks import PlainDigits
from benchmarks.papers.polar_factors import COEFFICIENTS, METHODS, dual_efficiency, find_polar
from structlin import dualize

LRS = [2.0**power for power in range(-5, 0)]
CONVERGENT = ("cubic", "quintic", "quintic-steep")
WIDTH, BATCH = 128, 256


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


def properties(method: str) -> Row:
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


class OwnPolar(structlin.optim.Muon):
    """Muon whose polar factors are those of `find_polar`."""

    def __init__(self, model: torch.nn.Module, lr: float, method: str) -> None:
        super().__init__(model, lr)
        self.polar = partial(find_polar, method=method)

    def _decide(self, group: dict[str, Any]) -> list[Any]:
        stacks = super()._decide(group)
        return [replace(stack, polar=self.polar) if stack.polar else stack for stack in stacks]


def train(method: str, lr: float, seed: int, steps: int) -> Row:
    torch.manual_seed(seed)
    model = models.mlp(PlainDigits.inputs, WIDTH, WIDTH, PlainDigits.outputs)
    descent = OwnPolar(model, lr, method)
    found = []

    def measure(optimizer: Any, args: Any, kwargs: Any) -> None:
        if len(found) % max(1, steps // 10) == 0:
            gradient = model[2].weight.grad
            assert gradient is not None
            found.append(dual_efficiency(gradient, find_polar(gradient, method)).item())
        else:
            found.append(math.inf)

    descent.register_step_pre_hook(measure)
    loss = training.train(model, descent, PlainDigits(), steps, batch=BATCH, schedule="linear")
    return {"size": WIDTH, "loss": loss, "efficiency": min(found)}


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


def analyse(rows: list[Row]) -> Row:
    table = []
    for method in values(rows, "method"):
        mine = select(rows, method=method)
        curve = curve_of_rates(mine)
        lr = best(curve)
        chosen = select(mine, lr=lr)
        ends = [row["loss"] for row in chosen if row["loss"] is not None]
        table.append(
            {
                "method": method, **properties(method), "efficiency": efficiencies(method),
                "efficiency in training": min(row["efficiency"] for row in chosen),
                "lr": lr, "loss": curve[lr], "losses": [min(ends), max(ends)],
            }
        )  # fmt: skip
    converge = {method: steps_to_converge(method) for method in CONVERGENT}
    return {"table": table, "steps to converge": converge}


def draw(result: Row) -> figures.Figure:
    at = torch.logspace(-5, math.log10(0.5**0.5), 600)
    points = [
        {"method": method, "singular value / Frobenius norm": value, "becomes": image}
        for method in COEFFICIENTS
        for value, image in zip(at.tolist(), mapped(method, at).tolist(), strict=True)
    ]
    return figures.curves(
        points, "singular value / Frobenius norm", "becomes", line=["method"], log="x"
    )


EXPERIMENT = Experiment(
    name="papers/md_coefficients",
    about=__doc__,
    run=train,
    axes={"method": [*METHODS], "lr": LRS},
    sizes={"steps": 60},
    note={"width": WIDTH, "batch": BATCH, "data": "digits"},
    smoke={"steps": 2, "seeds": 1},
    analyse=analyse,
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
