"""How exact must Muon's polar factors be? Losses by method, at equal steps and at equal seconds.

    python -m benchmarks.speed.polar            # in full: results/polar.{json,png}; rows there stay
    python -m benchmarks.speed.polar --smoke    # seconds

The GPT of examples/, dense and BTT. Every method has its rate tuned by factors of 2 on seed 0 (a
rate is tried beyond the highest until that is not the best), then runs with all seeds; and once
more with as many steps as fit into the seconds that the method with the quickest step takes (its
schedule as long as its run). The seconds of a step, forward and backward included, are measured
once, the methods in turn, on one thread.
"""

from collections.abc import Mapping
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import figures, timing, training
from benchmarks.harness.experiment import Axis, Experiment, Row, Runs, Tune, combinations, tune
from benchmarks.harness.record import environment
from benchmarks.harness.statistics import select, tuned_on_first
from benchmarks.harness.tasks import Plateau, compare, of_examples
from benchmarks.papers.polar_factors import PAPERS, inverse_root
from benchmarks.training.muon_vs_adamw import SIZES, STRUCTURES, descend, muon

METHODS: dict[str, dict[str, Any]] = {
    "default": {},  # fast, 5 steps, in bfloat16 where matrices are large
    "inverse-root": {"method": inverse_root},
    "ns, 8 steps": {"method": "ns"},
    "fast, 6 steps": {"method": "fast"},
    "fast, 5 steps, bfloat16": {"method": "fast", "ns_steps": 5, "dtype": torch.bfloat16},
    "jordan, 5 steps, bfloat16": {"method": PAPERS["jordan"], "dtype": torch.bfloat16},
}
LRS = [2.0**power for power in (-6, -5, -4)]  # the first rates
RATES = Tune(start=lambda job: LRS[1], lowest=LRS[0])

Times = Mapping[str, Mapping[str, float]]  # structure -> method -> milliseconds of a step


def train(
    structure: str, method: str, steps: int, lr: float, seed: int, sizes: dict[str, int]
) -> Row:
    make = partial(muon, lr=lr, **METHODS[method])
    return {"loss": descend(Plateau, structure, seed, steps, make, sizes=sizes)[-1][1]}


def time_steps(rounds: int, sizes: Mapping[str, int]) -> Times:
    """Medians of rounds in turn."""
    torch.set_num_threads(1)
    task = of_examples(Plateau, 0, **sizes)
    inputs, targets = task.batch(0)
    found = {}
    for structure, family in STRUCTURES.items():
        works = {}
        for method, options in METHODS.items():
            model = compare.build(task, sizes["width"], family, 0)

            def loss(model: torch.nn.Module = model) -> Tensor:
                return training.cross_entropy(model, inputs, targets)

            works[method] = training.step_of(muon(model, lr=LRS[0], **options), loss)
        times = timing.milliseconds(works, rounds=(rounds, rounds))
        found[structure] = {method: each["median"] for method, each in times.items()}
    return found


def count_steps(times: Times, structure: str, method: str, steps: int) -> int:
    """As many as take the seconds of `steps` of the quickest method."""
    mine = times[structure]
    return max(1, round(steps * min(mine.values()) / mine[method]))


def design(runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
    """Every method tuned at equal steps; at its rate again for equal seconds."""
    steps, seeds = runs.setting["steps"], axes["seed"]
    measure = partial(time_steps, runs.options.rounds, runs.setting["sizes"])
    times = runs.once("milliseconds", measure)
    runs.once("timed", environment)
    for pair in combinations({name: axes[name] for name in ("structure", "method")}):
        group = {**pair, "steps": steps}
        lr = tuned_on_first(tune(runs, group, seeds, RATES))[0]["lr"]
        group["steps"] = count_steps(times, **pair, steps=steps)
        runs.of({**group, "lr": lr, "seed": seed} for seed in seeds)
    return runs.all()


def summarise(rows: list[Row], times: Times, steps: int) -> list[Row]:
    """A row of each method, its losses at equal "steps" and "seconds"."""
    table = []
    for pair in ({"structure": s, "method": m} for s in STRUCTURES for m in METHODS):
        if not select(rows, **pair):
            continue
        lr = tuned_on_first(rows, **pair, steps=steps)[0]["lr"]
        row = {**pair, "lr": lr, "step_ms": times[pair["structure"]][pair["method"]]}
        counts = {"steps": steps, "seconds": count_steps(times, **pair, steps=steps)}
        for name, count in counts.items():
            losses = [row["loss"] for row in select(rows, **pair, lr=lr, steps=count)]
            ends = {"least": min(losses), "most": max(losses), "seeds": len(losses)}
            row[name] = {"steps": count, "loss": fmean(losses), **ends}
        table.append(row)
    return table


def draw(result: Row) -> figures.Figure:
    figure, grid = figures.panels([*STRUCTURES])
    for axes, structure in zip(grid, STRUCTURES, strict=True):
        shown = select(result["table"], structure=structure)
        for name, marker in (("steps", "o"), ("seconds", "s")):
            found = [row[name] for row in shown]
            means = [each["loss"] for each in found]
            ends = [[abs(each["loss"] - each[end]) for each in found] for end in ("least", "most")]
            options = {"fmt": marker, "label": f"equal {name}", "alpha": 0.7}
            axes.errorbar(means, range(len(shown)), xerr=ends, **options)
        axes.set_yticks(range(len(shown)), [row["method"] for row in shown])
        axes.set_xlabel("held-out loss (nats): mean, least to most")
        axes.legend(fontsize="small")
    return figure


EXPERIMENT = Experiment(
    name="polar",
    about=__doc__,
    run=train,
    axes={
        "structure": [*STRUCTURES],
        "method": [*METHODS],
        "steps": lambda job: [],
        "lr": [],
    },
    sizes={"steps": 800, "sizes": {**SIZES["GPT"], "weight_norm": Plateau.weight_norm}},
    note={"lrs": LRS},
    smoke={
        "steps": 2,
        "sizes": {"width": 32, "depth": 1, "context": 64, "batch": 2},
        "seeds": 1,
        "rounds": 2,
    },
    extra={"rounds": 25},
    design=design,
    analyse=lambda rows: {},
    beside=lambda chosen, found: {
        "table": summarise(found["rows"], found["milliseconds"], chosen["steps"])
    },
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
