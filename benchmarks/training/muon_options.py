"""Which options around Muon's step train better? Each at its best rate, on the GPT of examples/,
dense and BTT.

    python -m benchmarks.training.muon_options            # in full: results/muon_options.{json,png}
    python -m benchmarks.training.muon_options --smoke    # seconds

An option is a function of a step: it changes the gradient before, or the weights after. Each has
its rate tuned on seed 0 (a rate is tried beyond the highest until that is not the best) and then
runs with all seeds, but for those that lose to plain Muon by more than CLEAR on seed 0, dense and
BTT. Batches and schedule are those of benchmarks.training.muon_vs_adamw.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures
from benchmarks.harness.experiment import Axis, Experiment, Row, Runs, Tune, combinations, tune
from benchmarks.harness.statistics import curve_of_rates, select, tuned_on_first, values
from benchmarks.harness.tasks import Plateau
from benchmarks.training import muon_vs_adamw
from benchmarks.training.muon_vs_adamw import SIZES, STRUCTURES
from structlin.duality import spectral_bound

RATES = Tune(start=lambda job: 2.0**-5, lowest=2.0**-6)
CLEAR = 0.03  # nats
MEMORY = 0.95  # of the running means of NorMuon and SOAP
DECAY = 0.1
TAIL = 0.2  # of the steps, whose weights are averaged
EVERY = 10  # steps between SOAP's eigendecompositions

Kept = dict[str, Any]  # of a matrix, between steps


# ---- the options ---------------------------------------------------------------------------------
# after: (weight before, step, gradient, rate, kept) -> weight; matrices are the last two dimensions


def row_scale(weight: Tensor, step: Tensor, gradient: Tensor, lr: float, kept: Kept) -> Tensor:
    """NorMuon (arXiv:2510.05491): rows divided by a running RMS of their own, the step's Frobenius
    norm as before."""
    norm = _frobenius(step)
    squares = (step / norm).square().mean(-1, keepdim=True)  # (..., fan_out, 1)
    mean = kept.setdefault("rows", squares.clone()).lerp_(squares, 1 - MEMORY)
    scaled = step / (mean.sqrt() + 1e-12)
    return weight + scaled * (norm / _frobenius(scaled))


def cautious_decay(weight: Tensor, step: Tensor, gradient: Tensor, lr: float, kept: Kept) -> Tensor:
    """Weight decay of those entries that the step shrinks."""
    return weight + step - lr * DECAY * weight * (weight * step < 0)


def cautious_step(weight: Tensor, step: Tensor, gradient: Tensor, lr: float, kept: Kept) -> Tensor:
    """Only those entries whose step descends the gradient (arXiv:2411.16085), the others' length
    on them."""
    descends = (step * gradient < 0).to(step.dtype)
    return weight + step * descends / descends.mean((-2, -1), keepdim=True).clamp(min=0.1)


def sphere(weight: Tensor, step: Tensor, gradient: Tensor, lr: float, kept: Kept) -> Tensor:
    """Each matrix keeps the Frobenius norm that it starts with; those that start at zero are
    free."""
    moved = weight + step
    norm = kept.setdefault("norm", _frobenius(weight))
    return moved * torch.where(norm > 1e-20, norm / _frobenius(moved), 1)


def regularize(weight: Tensor, step: Tensor, gradient: Tensor, lr: float, kept: Kept) -> Tensor:
    """The modular norm's: decay of matrices whose RMS->RMS operator norm is above 1, by the
    excess."""
    moved = weight + step
    rows, columns = moved.shape[-2:]
    norm = spectral_bound(moved)[..., None, None] * math.sqrt(columns / rows)
    excess = (norm - 1).clamp(min=0) / norm.clamp(min=1)
    return moved * (1 - lr * DECAY * excess)


def soap(gradient: Tensor, kept: Kept) -> Tensor:
    """SOAP (arXiv:2409.11321): Adam's division by the RMS in the eigenbases of the running means of
    G G^T and G^T G, block by block; Muon follows."""
    kept["n"] = n = kept.get("n", 0) + 1
    for name, square in (("left", gradient @ gradient.mT), ("right", gradient.mT @ gradient)):
        mean = kept.setdefault(name, square.clone()).lerp_(square, 1 - MEMORY)
        if n % EVERY == 1:
            kept[name, "basis"] = torch.linalg.eigh(mean).eigenvectors
    left, right = kept["left", "basis"], kept["right", "basis"]
    turned = left.mT @ gradient @ right
    squares = turned.square()
    mean = kept.setdefault("squares", squares.clone()).lerp_(squares, 1 - MEMORY)
    return left @ (turned / (mean.sqrt() + 1e-12)) @ right.mT


def _frobenius(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, keepdim=True).clamp(min=1e-30)


class Changed(structlin.optim.Muon):
    """Muon with a `before` (gradient, kept) and an `after` of its steps, and the mean of the last
    `tail` of `steps` steps' weights in the place of the last."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        steps: int,
        before: Callable[[Tensor, Kept], Tensor] | None = None,
        after: Callable[[Tensor, Tensor, Tensor, float, Kept], Tensor] | None = None,
        tail: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(model, lr, **options)
        self.before, self.after, self.tail = before, after, tail
        self.steps_left, self.averaged, self.means = steps, max(1, round(tail * steps)), {}
        self.kept: dict[Tensor, Kept] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        groups = [group for group in self.param_groups if group["kind"] == "matrix"]
        rates = {p: float(group["lr"]) for group in groups for p in group["params"]}
        gradients = {p: p.grad for p in rates}
        weights = {p: p.clone() for p in rates} if self.after else {}
        if self.before:
            for p, gradient in gradients.items():
                p.grad = self.before(gradient, self.kept.setdefault(p, {}))
        super().step()
        for p, gradient in gradients.items():
            p.grad = gradient
        for p, weight in weights.items():
            kept = self.kept.setdefault(p, {})
            p.copy_(self.after(weight, p - weight, gradients[p], rates[p], kept))
        self.steps_left -= 1
        if self.tail and self.steps_left < self.averaged:
            count = self.averaged - self.steps_left
            for p in self.model.parameters():
                mean = self.means.setdefault(p, p.clone()).lerp_(p, 1 / count)
                if self.steps_left == 0:
                    p.copy_(mean)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "NorMuon's row scale": {"after": row_scale},
    "SOAP per block": {"before": soap},
    "cautious decay": {"after": cautious_decay},
    "cautious steps": {"after": cautious_step},
    "tail averaging": {"tail": TAIL},
    "cap of 2": {"max_spectral_norm": 2.0},
    "sphere": {"after": sphere},
    "regularize": {"after": regularize},
}


# ---- the runs ------------------------------------------------------------------------------------


def train(
    option: str, structure: str, lr: float, seed: int, steps: int, sizes: dict[str, int]
) -> Row:
    def make(model: nn.Module) -> Changed:
        options = {"other_lr": muon_vs_adamw.OTHER_LR, **OPTIONS[option]}
        return Changed(model, lr, steps=steps, **options)

    curve = muon_vs_adamw.descend(Plateau, structure, seed, steps, make, sizes=sizes)
    return {"loss": curve[-1][1]}


def design(runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
    """Every option's rate on seed 0; then all seeds of those that do not lose clearly."""
    seeds = axes["seed"]
    groups = [*combinations({name: axes[name] for name in ("option", "structure")})]
    for group in groups:
        tune(runs, group, seeds[:1], RATES)
    left = survivors(runs.all())
    for group in groups:
        if group["option"] in left:
            tune(runs, group, seeds, RATES)
    return runs.all()


def survivors(rows: list[Row]) -> list[str]:
    """Options that on seed 0 do not lose clearly to plain Muon on both structures."""

    def least(structure: str, option: str) -> float:
        mine = select(rows, structure=structure, option=option, seed=0)
        return min(curve_of_rates(mine).values())

    return [
        option
        for option in values(rows, "option")
        if any(least(each, option) <= least(each, "plain") + CLEAR for each in STRUCTURES)
    ]


def summarise(rows: list[Row]) -> list[Row]:
    """A row of each option, its losses by seed at its best rate; `wins`: seeds below plain Muon."""
    table = []
    for option in values(rows, "option"):
        for structure in STRUCTURES:
            mine = tuned_on_first(rows, structure=structure, option=option)
            losses = {row["seed"]: row["loss"] for row in mine}
            theirs = tuned_on_first(rows, structure=structure, option="plain")
            plain = {row["seed"]: row["loss"] for row in theirs}
            table.append(
                {
                    "structure": structure,
                    "option": option,
                    "lr": mine[0]["lr"],
                    "loss": sum(losses.values()) / len(losses),
                    "losses": list(losses.values()),
                    "wins": sum(loss < plain[seed] for seed, loss in losses.items()),
                }
            )
    return table


EXPERIMENT = Experiment(
    name="muon_options",
    about=__doc__,
    run=train,
    axes={"option": [*OPTIONS], "structure": [*STRUCTURES], "lr": lambda job: [RATES.start(job)]},
    sizes={"steps": 280, "sizes": {**SIZES["GPT"], "weight_norm": Plateau.weight_norm}},
    note={"clear": CLEAR, "memory": MEMORY, "decay": DECAY, "tail": TAIL, "every": EVERY},
    smoke={
        "steps": 2,
        "sizes": {"width": 32, "depth": 1, "context": 64, "batch": 2},
        "seeds": 1,
    },
    design=design,
    analyse=lambda rows: {"table": summarise(rows)},
    draw=lambda result: figures.rates(result["rows"], panel=["structure"], line=["option"]),
)

if __name__ == "__main__":
    EXPERIMENT.main()
