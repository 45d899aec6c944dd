"""Which options around Muon's step train better? Each at its best rate, on the GPT of examples/,
dense and BTT.

    python -m benchmarks.muon_options            # in full: results/muon_options.{json,png}
    python -m benchmarks.muon_options --smoke    # seconds

An option is a function of a step: it changes the gradient before, or the weights after. Each has
its rate tuned on seed 0 (a rate is tried beyond the highest until that is not the best) and then
runs with all seeds, but for those that lose to plain Muon by more than CLEAR on seed 0, dense and
BTT. Batches and schedule are those of benchmarks.muon_vs_adamw. Runs of before keep the place where
they were made.
"""

import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks import muon_vs_adamw
from benchmarks.harness import report
from benchmarks.harness.experiment import parser, run_all
from benchmarks.harness.record import RESULTS, environment, save_json
from benchmarks.muon_vs_adamw import SIZES, STRUCTURES, TASKS
from structlin.duality import spectral_bound

LRS = [2.0**power for power in (-6, -5, -4)]
CLEAR = 0.03  # nats
MEMORY = 0.95  # of the running means of NorMuon and SOAP
DECAY = 0.1
TAIL = 0.2  # of the steps, whose weights are averaged
EVERY = 10  # steps between SOAP's eigendecompositions

Kept = dict[str, Any]  # of a matrix, between steps
Run = tuple[str, str, float, int]  # structure, option, lr, seed


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


def train(run: Run, steps: int) -> dict[str, Any]:
    structure, option, lr, seed = run
    make = partial(Changed, lr=lr, steps=steps, other_lr=muon_vs_adamw.OTHER_LR, **OPTIONS[option])
    curve = muon_vs_adamw.descend("GPT", structure, seed, steps, make)
    loss = curve[-1][1]
    row = {"structure": structure, "option": option, "lr": lr, "seed": seed}
    return {**row, "loss": loss if math.isfinite(loss) else 1e9}


def key(row: dict[str, Any]) -> Run:
    return row["structure"], row["option"], row["lr"], row["seed"]


def best_rates(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, float]]:
    """(structure, option) -> the rate with the least loss on seed 0, and that loss."""
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows:
        pair = row["structure"], row["option"]
        if row["seed"] == 0 and (pair not in best or row["loss"] < best[pair][1]):
            best[pair] = row["lr"], row["loss"]
    return best


def higher_rates(rows: Iterable[dict[str, Any]]) -> list[Run]:
    """The next rate of every option whose best is the highest that was tried."""
    rows = list(rows)
    tried: dict[tuple[str, str], float] = {}
    for row in rows:
        pair = row["structure"], row["option"]
        tried[pair] = max(tried.get(pair, 0.0), row["lr"])
    return [(*pair, 2 * lr, 0) for pair, (lr, _) in best_rates(rows).items() if lr == tried[pair]]


def survivors(best: dict[tuple[str, str], tuple[float, float]]) -> list[str]:
    """Options that on seed 0 do not lose clearly to plain Muon on both structures."""
    return [
        option
        for option in OPTIONS
        if any(
            best[structure, option][1] <= best[structure, "plain"][1] + CLEAR
            for structure in STRUCTURES
        )
    ]


def summarise(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of each option, its losses by seed at its best rate; `wins`: seeds below plain Muon."""
    rows = list(rows)
    best, table = best_rates(rows), []
    for (structure, option), (lr, _) in best.items():
        wanted = sorted((r for r in rows if key(r)[:3] == (structure, option, lr)), key=key)
        losses = {row["seed"]: row["loss"] for row in wanted}
        plain = {
            row["seed"]: row["loss"]
            for row in rows
            if key(row)[:3] == (structure, "plain", best[structure, "plain"][0])
        }
        table.append(
            {
                "structure": structure,
                "option": option,
                "lr": lr,
                "loss": sum(losses.values()) / len(losses),
                "losses": list(losses.values()),
                "wins": sum(loss < plain[seed] for seed, loss in losses.items()),
            }
        )
    return table


def cell(row: dict[str, Any]) -> str:
    losses = ", ".join(f"{loss:.3f}" for loss in row["losses"])
    return f"{losses} (2^{math.log2(row['lr']):g})"


def markdown(result: dict[str, Any]) -> str:
    """Losses by seed and the rate, a column per structure, and what wins."""
    found = {(row["option"], row["structure"]): row for row in result["table"]}
    lines = [[option, *(cell(found[option, each]) for each in STRUCTURES)] for option in OPTIONS]
    seeds = max(len(row["losses"]) for row in result["table"])
    names = ", ".join(winners(result["table"], seeds)) or "none"
    says = f"Below plain Muon for every seed on dense and BTT: {names}."
    return f"{report.table(['', *STRUCTURES], lines)}\n\n{says}"


def winners(table: list[dict[str, Any]], seeds: int) -> list[str]:
    """The options with less loss than plain Muon for every seed on both structures."""
    wins = {(row["option"], row["structure"]): row["wins"] for row in table}
    return [o for o in OPTIONS if all(wins[o, structure] == seeds for structure in STRUCTURES)]


def show(table: list[dict[str, Any]], seeds: int, console: Console) -> None:
    shown = Table(title="held-out loss (nats) by seed, and the rate")
    for title in ("option", *STRUCTURES):
        shown.add_column(title)
    found = {(row["option"], row["structure"]): row for row in table}
    for option in OPTIONS:
        shown.add_row(option, *(cell(found[option, structure]) for structure in STRUCTURES))
    console.print(shown)
    names = ", ".join(winners(table, seeds)) or "none"
    console.print(f"below plain Muon for all seeds, dense and BTT: {names}")


def plot(table: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, structure in zip(figure.subplots(1, len(STRUCTURES)), STRUCTURES, strict=True):
        chosen = [row for row in table if row["structure"] == structure]
        for place, row in enumerate(chosen):
            axes.plot(row["losses"], [place] * len(row["losses"]), "o", color="C0", alpha=0.7)
        axes.set_yticks(range(len(chosen)), [row["option"] for row in chosen])
        axes.set(title=structure, xlabel="held-out loss (nats), by seed")
    return figure


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, RESULTS)
    arguments.add_argument("--steps", type=int, default=280)
    arguments.add_argument("--seeds", type=int, default=3)
    options = arguments.parse_args(argv)
    if options.smoke:
        options.steps, options.seeds = 2, 1
        SIZES["GPT"].update(width=32, depth=1, batch=2)
        del LRS[1:]
    path = options.out / "muon_options.json"
    keeps = not options.smoke or options.out != options.kept
    setting = {
        "steps": options.steps, "sizes": SIZES["GPT"] | {"weight_norm": TASKS["GPT"].weight_norm},
        "clear": CLEAR, "memory": MEMORY, "decay": DECAY, "tail": TAIL, "every": EVERY,
    }  # fmt: skip
    found = json.loads(path.read_text()) if keeps and path.exists() else {}
    rows = {key(row): row for row in found.get("rows", []) if found["setting"] == setting}

    def save(**content: Any) -> None:
        if keeps:
            save_json(path, setting=setting, **content, rows=list(rows.values()))

    def add(row: dict[str, Any]) -> None:
        rows[key(row)] = {**row, "machine": environment()["machine"]}
        save()

    def run(runs: Iterable[Run]) -> None:
        missing = [each for each in runs if each not in rows]
        run_all(partial(train, steps=options.steps), missing, options, add)

    run((structure, option, lr, 0) for option in OPTIONS for structure in STRUCTURES for lr in LRS)
    while not options.smoke and (more := higher_rates(rows.values())):
        run(more)
    best = best_rates(rows.values())
    run(
        (structure, option, best[structure, option][0], seed)
        for option in survivors(best)
        for structure in STRUCTURES
        for seed in range(1, options.seeds)
    )
    table = summarise(rows.values())
    show(table, options.seeds, Console(width=140))
    if keeps:
        save(table=table)
        plot(table).savefig(path.with_suffix(".png"), dpi=90)


if __name__ == "__main__":
    main()
