"""How exact must Muon's polar factors be? Losses by method, at equal steps and at equal seconds.

    python -m benchmarks.speed.polar            # in full: results/polar.{json,png}; rows there stay
    python -m benchmarks.speed.polar --smoke    # seconds

The GPT of examples/, dense and BTT. Every method has its rate tuned by factors of 2 on seed 0 (a
rate is tried beyond the highest until that is not the best), then runs with all seeds; and once
more with as many steps as fit into the seconds that the method with the quickest step takes (its
schedule as long as its run). The seconds of a step, forward and backward included, are measured
before, the methods in turn, on one thread. Runs of before keep the place where they were made.
"""

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.harness import timing
from benchmarks.harness.experiment import parser, run_all
from benchmarks.harness.record import RESULTS, environment, save_json
from benchmarks.papers.polar_factors import PAPERS, inverse_root
from benchmarks.training import muon_vs_adamw
from benchmarks.training.muon_vs_adamw import SIZES, STRUCTURES, TASKS, compare

METHODS: dict[str, dict[str, Any]] = {
    "default": {},  # fast, 5 steps, in bfloat16 where matrices are large
    "inverse-root": {"method": inverse_root},
    "ns, 8 steps": {"method": "ns"},
    "fast, 6 steps": {"method": "fast"},
    "fast, 5 steps, bfloat16": {"method": "fast", "ns_steps": 5, "dtype": torch.bfloat16},
    "jordan, 5 steps, bfloat16": {"method": PAPERS["jordan"], "dtype": torch.bfloat16},
}
LRS = [2.0**power for power in (-6, -5, -4)]

Run = tuple[str, str, float, int, int]  # structure, method, lr, seed, steps
Sizes = Mapping[str, int]


def train(run: Run, sizes: Sizes) -> dict[str, Any]:
    structure, method, lr, seed, steps = run
    make = partial(muon_vs_adamw.muon, lr=lr, **METHODS[method])
    curve = muon_vs_adamw.descend("GPT", structure, seed, steps, make, sizes=sizes)
    row = {"structure": structure, "method": method, "lr": lr, "seed": seed, "steps": steps}
    return {**row, "loss": curve[-1][1]}


def time_steps(rounds: int, sizes: Sizes) -> dict[str, dict[str, float]]:
    """structure -> method -> milliseconds of a training step, the median of rounds in turn."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for structure, family in STRUCTURES.items():
        task = TASKS["GPT"](argparse.Namespace(data=None, seed=0, steps=1, **sizes))
        works = {}
        for method, options in METHODS.items():
            model = compare.build(task, sizes["width"], family, 0)
            optimizer = muon_vs_adamw.muon(model, lr=LRS[0], **options)
            works[method] = partial(take_step, model, optimizer, *task.batch(0))
            works[method]()
        times: dict[str, list[float]] = {method: [] for method in works}
        for _ in range(rounds):
            for method, work in works.items():
                times[method].append(1e3 * timing.wall(work, "cpu"))
        found[structure] = {
            method: timing.spread(values, low=10)["median"] for method, values in times.items()
        }
    return found


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor
) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
    optimizer.step()


def key(row: dict[str, Any]) -> Run:
    return row["structure"], row["method"], row["lr"], row["seed"], row["steps"]


def higher_rates(rows: Iterable[dict[str, Any]], steps: int) -> list[Run]:
    """The next rate of every method whose best is the highest that was tried."""
    rows = list(rows)
    return [
        (structure, method, 2 * lr, 0, steps)
        for (structure, method), lr in best_rates(rows, steps).items()
        if all(
            row["lr"] <= lr
            for row in rows
            if (row["structure"], row["method"]) == (structure, method)
        )
    ]


def best_rates(rows: Iterable[dict[str, Any]], steps: int) -> dict[tuple[str, str], float]:
    """(structure, method) -> the rate with the least loss on seed 0."""
    losses: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows:
        if row["seed"] == 0 and row["steps"] == steps:
            loss = row["loss"] if math.isfinite(row["loss"]) else math.inf
            losses.setdefault((row["structure"], row["method"]), {})[row["lr"]] = loss
    return {pair: min(found, key=found.__getitem__) for pair, found in losses.items()}


def summarise(
    rows: list[dict[str, Any]],
    rates: dict[tuple[str, str], float],
    steps: int,
    milliseconds: dict[str, dict[str, float]],
    counts: dict[tuple[str, str], int],
) -> list[dict[str, Any]]:
    """A row of each method, its losses at equal "steps" and, where that was timed, "seconds"."""
    table = []
    for (structure, method), lr in rates.items():
        row: dict[str, Any] = {"structure": structure, "method": method, "lr": lr}
        runs = {"steps": steps}
        if counts:
            row["step_ms"] = milliseconds[structure][method]
            runs["seconds"] = counts[structure, method]
        for name, count in runs.items():
            wanted = (structure, method, lr, count)
            losses = [
                r["loss"]
                for r in rows
                if (r["structure"], r["method"], r["lr"], r["steps"]) == wanted
            ]
            mean = sum(losses) / len(losses)
            row[name] = {
                "steps": count,
                "loss": mean,
                "least": min(losses),
                "most": max(losses),
                "seeds": len(losses),
            }
        table.append(row)
    return table


def spread(row: dict[str, Any]) -> str:
    return f"{row['loss']:.3f} ({row['least']:.3f} to {row['most']:.3f})"


def show(table: list[dict[str, Any]], console: Console) -> None:
    shown = Table(title="held-out loss (nats), mean over seeds (least to most), at the best lr")
    for n, title in enumerate(
        ("structure", "method", "lr", "equal steps", "ms a step", "steps", "equal seconds")
    ):
        shown.add_column(title, justify="left" if n < 2 else "right")
    for row in table:
        cells = [f"2^{math.log2(row['lr']):g}", spread(row["steps"])]
        if found := row.get("seconds"):
            cells += [f"{row['step_ms']:.1f}", str(found["steps"]), spread(found)]
        shown.add_row(row["structure"], row["method"], *cells)
    console.print(shown)


def plot(table: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, structure in zip(figure.subplots(1, 2), STRUCTURES, strict=True):
        chosen = [row for row in table if row["structure"] == structure]
        places = range(len(chosen))
        for name, marker in (("steps", "o"), ("seconds", "s")):
            if any(name not in row for row in chosen):
                continue
            means = [row[name]["loss"] for row in chosen]
            low = [row[name]["loss"] - row[name]["least"] for row in chosen]
            high = [row[name]["most"] - row[name]["loss"] for row in chosen]
            axes.errorbar(
                means, places, xerr=(low, high), fmt=marker, label=f"equal {name}", alpha=0.7
            )
        axes.set_yticks(places, [row["method"] for row in chosen])
        axes.set(title=structure, xlabel="held-out loss (nats): mean, least to most")
        axes.legend(fontsize="small")
    return figure


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, RESULTS)
    arguments.add_argument("--steps", type=int, default=800)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=25, help="of the timing")
    arguments.add_argument(
        "--untimed", action="store_true", help="without timing and runs of equal seconds"
    )
    options = arguments.parse_args(argv)
    structlin.show_config()  # builds the engine, so that no time has that in it
    sizes, lrs = SIZES["GPT"], LRS
    if options.smoke:
        options.steps, options.seeds, options.rounds = 2, 1, 2
        sizes, lrs = {**sizes, "width": 32, "depth": 1, "batch": 2}, LRS[:1]
    path: Path = options.out / "polar.json"
    keeps = not options.smoke or options.out != options.kept
    norm = {"weight_norm": TASKS["GPT"].weight_norm}
    setting = {"steps": options.steps, "sizes": sizes | norm, "lrs": lrs}
    found = json.loads(path.read_text()) if keeps and path.exists() else {}
    if found.get("setting") != setting:
        found = {"setting": setting}
    here = environment()
    rows = {key(row): row for row in found.get("rows", [])}

    def save(**content: Any) -> None:
        found.update(content, rows=list(rows.values()))
        if keeps:
            save_json(path, **{name: found[name] for name in found if name != "environment"})

    def add(row: dict[str, Any]) -> None:
        rows[key(row)] = {**row, "machine": here["machine"]}
        save()

    def run(runs: list[Run]) -> None:
        run_all(
            partial(train, sizes=sizes), [each for each in runs if each not in rows], options, add
        )

    pairs = [(structure, method) for structure in STRUCTURES for method in METHODS]
    milliseconds, counts = found.get("milliseconds", {}), dict[tuple[str, str], int]()
    if not options.untimed:
        if any(method not in milliseconds.get(structure, {}) for structure, method in pairs):
            save(milliseconds=(milliseconds := time_steps(options.rounds, sizes)), timed=here)
        for structure, method in pairs:
            times = milliseconds[structure]
            count = round(options.steps * min(times.values()) / times[method])
            counts[structure, method] = max(1, count)
    run([(*pair, lr, 0, options.steps) for pair in pairs for lr in lrs])
    while not options.smoke and (more := higher_rates(rows.values(), options.steps)):
        run(more)
    rates = best_rates(rows.values(), options.steps)
    seeds = range(options.seeds)
    run([(*pair, rates[pair], seed, options.steps) for pair in pairs for seed in seeds])
    if counts:
        run([(*pair, rates[pair], seed, counts[pair]) for pair in pairs for seed in seeds])
    table = summarise(list(rows.values()), rates, options.steps, milliseconds, counts)
    show(table, Console(width=140))
    if keeps:
        save(table=table)
        plot(table).savefig(path.with_suffix(".png"), dpi=90)


if __name__ == "__main__":
    main()
