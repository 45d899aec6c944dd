"""Does duality-based descent train better than AdamW? The GPT and the ViT of examples/, dense and
BTT.

    python -m benchmarks.training.muon_vs_adamw          # in full: results/muon_vs_adamw.{json,png}
    python -m benchmarks.training.muon_vs_adamw --smoke  # seconds

Both optimizers have their learning rate tuned by factors of 2 on seed 0, for each task and
structure apart; then 3 seeds at the best. Same batches, steps and schedule. Under AdamW cores
follow `param_groups`; what Muon leaves to AdamW (biases, norms) has AdamW's usual rate. Shown: the
held-out loss, after how many steps Muon has reached AdamW's final one, and of the GPT also the loss
of Muon trained for SHORT of the steps alone, at the same rate, its schedule as long as its run.
Muon's polar factors are those of method="ns"; benchmarks.speed.polar compares methods.

Then SHORT of the steps with what was tuned for them by hand on seed 0 of BTT, TUNED, and without
each part of it; and all of AdamW's steps with the schedule and without weight normalisation, as
there.

Then Muon's defaults, parts of TUNED and all of it, each at its own best rate: seed 0 tries rates
until those next to the best, a factor of sqrt 2 away, are no better. On characters for all steps;
on pairs of characters, a vocabulary of thousands instead of a hundred, for SHORT of them. Runs that
an earlier result in --out has are not repeated.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import structlin
from benchmarks.harness import report
from benchmarks.harness.experiment import keep, parser, run_all
from benchmarks.harness.record import RESULTS, save_json

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import compare
import train_gpt
import train_vit

TASKS = {"GPT": train_gpt.Text, "ViT": train_vit.Images}
STRUCTURES = {"dense": None, "BTT r=1": structlin.BTT(rank=1)}
LRS = {
    "AdamW": [2.0**power for power in range(-11, -6)],
    "Muon": [2.0**power for power in range(-8, -3)],
}
OTHER_LR = 2.0**-9
SHORT = 0.35  # of the steps
SIZES = {
    "GPT": {"width": 128, "depth": 2, "context": 64, "batch": 8},
    "ViT": {"width": 128, "depth": 2, "batch": 32},
}

USUAL: dict[str, Any] = {
    "lr": 2.0**-5, "masses": None, "momentum": 0.95, "other_lr": OTHER_LR,
    "schedule": "cosine to 1/10", "weight_norm": True,
}  # fmt: skip
TUNED = {
    "lr": 2.0**-3.5, "masses": {"lm_head": 0.4, "wte": 0.1, "wpe": 0.1}, "momentum": 0.75,
    "other_lr": 2.0**-6, "schedule": "linear to 1/20", "weight_norm": False,
}  # fmt: skip
WITHOUT = {  # name -> what is as usual
    "all of it": (),
    "without lr and masses": ("lr", "masses"),
    "without momentum": ("momentum",),
    "without other_lr": ("other_lr",),
    "without schedule": ("schedule",),
    "with weight normalisation": ("weight_norm",),
}
ADAMW = "AdamW, all steps"


class Pairs(train_gpt.Text):
    """Tokens are pairs of characters."""

    def tokenise(self, text: str) -> tuple[int, Tensor]:
        count, characters = super().tokenise(text[: len(text) // 2 * 2])
        pairs, ids = (count * characters[::2] + characters[1::2]).unique(return_inverse=True)
        return len(pairs), ids


SHORTER = {"momentum": 0.85}
TENTH = {"wte": 0.1, "wpe": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {  # what is not as usual
    "defaults": {},
    "momentum 0.85": SHORTER,
    "and a tenth for embeddings": SHORTER | {"masses": TENTH},
    "what was tuned for 280 steps": {name: TUNED[name] for name in TUNED if name != "lr"},
}
# text -> its class, share of the steps, and (structure, setting)
TEXTS: dict[str, tuple[type[train_gpt.Text], float, list[tuple[str, str]]]] = {
    "characters": (train_gpt.Text, 1.0, list(product(STRUCTURES, SETTINGS))),
    "pairs of characters": (Pairs, SHORT, list(product(["dense"], list(SETTINGS)[:3]))),
}
FIRST = (2.0**-4.5, 2.0**-4)  # rates

Sizes = Mapping[str, Mapping[str, int]]  # by task
Run = tuple[str, str, str, float, int]  # task, structure, optimizer, lr, seed
TunedRun = tuple[str, str, float, int]  # structure, way, lr, seed
SettingRun = tuple[str, str, str, float, int]  # text, structure, setting, lr, seed


def train(run: Run, steps: int, sizes: Sizes) -> dict[str, Any]:
    task, structure, name, lr, seed = run
    make = partial(OPTIMIZERS[name], lr=lr)
    curve = descend(task, structure, seed, steps, make, sizes=sizes[task])
    row = {"task": task, "structure": structure, "optimizer": name, "lr": lr, "seed": seed}
    return {**row, "loss": curve[-1][1], "curve": curve}


def descend(
    task_name: str,
    structure: str,
    seed: int,
    steps: int,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    weight_norm: bool | None = None,
    rate: Callable[[int, int], float] = compare.warmup_cosine,
    kind: type[compare.Task] | None = None,
    *,
    sizes: Mapping[str, int],
) -> list[tuple[int, float]]:
    """Train; the held-out loss after every twentieth of the steps.

    Args:
        weight_norm: of structured layers; None: the task's.
        rate: (step, steps) -> learning rate relative to its peak.
        kind: the task's class; None: the one of that name.
        sizes: of the model and its batches.
    """
    task = (kind or TASKS[task_name])(
        argparse.Namespace(data=None, seed=seed, steps=steps, **sizes)
    )
    task.weight_norm = task.weight_norm if weight_norm is None else weight_norm
    model = compare.build(task, sizes["width"], STRUCTURES[structure], seed)
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    curve = []
    for step in range(steps):
        inputs, targets = task.batch(step)
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, steps // 20) == 0 or step + 1 == steps:
            curve.append((step + 1, compare.evaluate(model, task.heldout, "cpu")[0]))
    return curve


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(structlin.param_groups(model, lr), betas=(0.9, 0.95))


def muon(model: nn.Module, lr: float, **options: Any) -> torch.optim.Optimizer:
    return structlin.optim.Muon(model, lr, other_lr=OTHER_LR, **options)


OPTIMIZERS = {"AdamW": adamw, "Muon": partial(muon, method="ns")}


def warmup_linear(step: int, steps: int) -> float:
    """As `compare.warmup_cosine`, but on a line to a twentieth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 1 - 0.95 * (step - warmup) / max(1, steps - warmup)


def train_tuned(run: TunedRun, steps: int, sizes: Sizes) -> dict[str, Any]:
    structure, way, lr, seed = run
    chosen = TUNED | {name: USUAL[name] for name in WITHOUT.get(way, ())}
    make = partial(adamw, lr=lr)
    if way != ADAMW:
        steps = max(1, round(SHORT * steps))
        make = muon_of(chosen, lr)
    how = make, chosen["weight_norm"], rate_of(chosen)
    curve = descend("GPT", structure, seed, steps, *how, sizes=sizes["GPT"])
    row = {"structure": structure, "way": way, "lr": lr, "seed": seed}
    return {**row, "steps": steps, "loss": curve[-1][1]}


def muon_of(chosen: dict[str, Any], lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    options = {name: chosen[name] for name in ("masses", "momentum", "other_lr")}
    return partial(structlin.optim.Muon, lr=lr, **options)


def rate_of(chosen: dict[str, Any]) -> Callable[[int, int], float]:
    return warmup_linear if chosen["schedule"] == TUNED["schedule"] else compare.warmup_cosine


def train_setting(run: SettingRun, steps: int, sizes: Sizes) -> dict[str, Any]:
    text, structure, setting, lr, seed = run
    kind, share, _ = TEXTS[text]
    chosen, steps = USUAL | SETTINGS[setting], max(1, round(share * steps))
    how = muon_of(chosen, lr), chosen["weight_norm"], rate_of(chosen)
    loss = descend("GPT", structure, seed, steps, *how, kind, sizes=sizes["GPT"])[-1][1]
    row = {"text": text, "structure": structure, "setting": setting, "lr": lr, "seed": seed}
    return {**row, "steps": steps, "loss": loss if math.isfinite(loss) else 1e9}


def setting_run(row: dict[str, Any]) -> SettingRun:
    return row["text"], row["structure"], row["setting"], row["lr"], row["seed"]


def next_rates(rows: Iterable[dict[str, Any]]) -> list[SettingRun]:
    """The rates next to the best of each setting that have not been tried."""
    losses: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        if row["seed"] == 0:
            halves = round(2 * math.log2(row["lr"]))  # of the rate's exponent
            losses[setting_run(row)[:3]][halves] = row["loss"]
    found: list[SettingRun] = []
    for chosen, tried in losses.items():
        best = min(tried, key=tried.__getitem__)
        beside = [halves for halves in (best - 1, best + 1) if halves not in tried]
        found += [(*chosen, 2.0 ** (halves / 2), 0) for halves in beside]
    return found


def best_settings(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(text, structure, setting) -> the row of seed 0 with the least loss."""
    best: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = setting_run(row)[:3]
        if row["seed"] == 0 and row["loss"] < best.get(key, {"loss": math.inf})["loss"]:
            best[key] = row
    return best


def setting_losses(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], list[float]]:
    """(text, structure, setting) -> losses by seed at the best rate, of the settings for which
    those beside it have been tried."""
    best, untuned = best_settings(rows), {run[:3] for run in next_rates(rows)}
    keys = [(text, *pair) for text, (_, _, pairs) in TEXTS.items() for pair in pairs]
    return {
        key: [
            row["loss"]
            for row in sorted(rows, key=lambda row: row["seed"])
            if setting_run(row)[:4] == (*key, best[key]["lr"])
        ]
        for key in keys
        if key in best and key not in untuned
    }


def settings_markdown(result: dict[str, Any]) -> str:
    """Losses by seed of defaults and what changes them, each at its best rate."""
    best, lines = best_settings(result["settings"]), []
    for (text, structure, setting), losses in setting_losses(result["settings"]).items():
        row = best[text, structure, setting]
        by_seed = ", ".join(f"{loss:.3f}" for loss in losses)
        figures = [f"2^{math.log2(row['lr']):g}", f"{sum(losses) / len(losses):.3f}", by_seed]
        lines.append([f"{text}, {structure}, {setting}", str(row["steps"]), *figures])
    return report.table(["", "steps", "lr", "mean", "by seed"], lines)


def tuned_jobs(adamw_lrs: dict[str, float], seeds: int) -> list[TunedRun]:
    """On BTT each part apart, on dense all together; AdamW at the rates (structure -> lr) that were
    tuned for it."""
    ways = [("BTT r=1", way) for way in WITHOUT] + [("dense", "all of it")]
    lrs = {(structure, way): USUAL["lr"] if "lr" in WITHOUT[way] else TUNED["lr"]
           for structure, way in ways}  # fmt: skip
    lrs |= {(structure, ADAMW): lr for structure, lr in adamw_lrs.items()}
    return [(*pair, lr, seed) for pair, lr in lrs.items() for seed in range(seeds)]


def tuned_markdown(result: dict[str, Any]) -> str:
    """Losses by seed of the short runs of what was tuned for them."""
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for row in sorted(result["tuned"], key=lambda row: row["seed"]):
        found[row["structure"], row["way"], row["steps"]].append(row["loss"])
    lines = [
        [f"{structure}, {way}", str(steps), f"{sum(losses) / len(losses):.3f}",
         ", ".join(f"{loss:.3f}" for loss in losses)]
        for (structure, way, steps), losses in found.items()
    ]  # fmt: skip
    return report.table(["", "steps", "mean", "by seed"], lines)


def finished(path: Path, setting: dict[str, Any], which: str) -> dict[Run, dict[str, Any]]:
    """Runs of an earlier result of the same setting, "rows" or "short": they are not repeated."""
    content = json.loads(path.read_text()) if path.exists() else {}
    rows = content.get(which, []) if content.get("setting") == setting else []
    return {
        (row["task"], row["structure"], row["optimizer"], row["lr"], row["seed"]): row
        for row in rows
    }


def tuned(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], float]:
    """(task, structure, optimizer) -> the learning rate with the least loss on seed 0."""
    losses: dict[tuple[str, str, str], dict[float, float]] = defaultdict(dict)
    for row in rows:
        if row["seed"] == 0:
            loss = row["loss"] if math.isfinite(row["loss"]) else math.inf
            losses[row["task"], row["structure"], row["optimizer"]][row["lr"]] = loss
    return {key: min(found, key=found.__getitem__) for key, found in losses.items()}


def compared(
    rows: list[dict[str, Any]], short: list[dict[str, Any]], steps: int
) -> list[dict[str, Any]]:
    """A row per task and structure: mean losses over the seeds, and the steps Muon needs for
    AdamW's final loss."""
    best, table = tuned(rows), []
    for task, structure in product(TASKS, STRUCTURES):
        found: dict[str, Any] = {"task": task, "structure": structure}
        runs = {}
        for name in LRS:
            lr = best[task, structure, name]
            key = {"task": task, "structure": structure, "optimizer": name, "lr": lr}
            runs[name] = sorted(
                (r for r in rows if key.items() <= r.items()), key=lambda r: r["seed"]
            )
            losses = [row["loss"] for row in runs[name]]
            found[name] = {
                "lr": lr,
                "loss": sum(losses) / len(losses),
                "least": min(losses),
                "most": max(losses),
            }
        reached = []
        for ours, theirs in zip(runs["Muon"], runs["AdamW"], strict=True):
            reached.append(
                next((step for step, loss in ours["curve"] if loss <= theirs["loss"]), None)
            )
        found["steps"] = steps
        found["muon_steps_to_adamws_loss"] = reached
        losses = [
            row["loss"] for row in short if (row["task"], row["structure"]) == (task, structure)
        ]
        found["short"] = {"steps": round(SHORT * steps), "losses": losses} if losses else None
        table.append(found)
    return table


def show(table: list[dict[str, Any]], console: Console) -> None:
    shown = Table(
        title="held-out loss (nats), mean over seeds (least to most), "
        "each optimizer at its own best lr"
    )
    for title in (
        "task",
        "structure",
        "AdamW lr",
        "AdamW loss",
        "Muon lr",
        "Muon loss",
        "Muon's steps to AdamW's loss",
        "Muon's loss, short",
    ):
        shown.add_column(title, justify="left" if title in ("task", "structure") else "right")
    for row in table:
        cells = []
        for name in LRS:
            result = row[name]
            spread = f"({result['least']:.3f} to {result['most']:.3f})"
            cells += [f"2^{math.log2(result['lr']):g}", f"{result['loss']:.3f} {spread}"]
        reached = ", ".join(
            "not reached" if step is None else str(step)
            for step in row["muon_steps_to_adamws_loss"]
        )
        cells.append(f"{reached} of {row['steps']}")
        if short := row["short"]:
            losses = ", ".join(f"{loss:.3f}" for loss in short["losses"])
            cells.append(f"{losses} ({short['steps']} steps)")
        shown.add_row(row["task"], row["structure"], *cells)
    console.print(shown)


def plot(rows: list[dict[str, Any]]) -> Figure:
    best = tuned(rows)
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(TASKS)), TASKS, strict=True):
        for (structure, name), colour in zip(
            product(STRUCTURES, LRS), ("C0", "C1", "C2", "C3"), strict=True
        ):
            chosen = [
                r
                for r in rows
                if (r["task"], r["structure"], r["optimizer"]) == (task, structure, name)
            ]
            chosen = [r for r in chosen if r["lr"] == best[task, structure, name]]
            for n, row in enumerate(chosen):
                label = f"{structure}, {name}" if n == 0 else None
                axes.plot(*zip(*row["curve"], strict=True), color=colour, label=label, alpha=0.8)
        axes.set(title=task, xlabel="step", ylabel="held-out loss (nats)", yscale="log")
        axes.legend()
    return figure


def main() -> None:
    arguments = parser(__doc__, RESULTS)
    arguments.add_argument("--steps", type=int, default=800)
    arguments.add_argument("--seeds", type=int, default=3)
    options = arguments.parse_args()
    sizes, lrs = SIZES, LRS
    if options.smoke:
        options.steps, options.seeds = 2, 1
        sizes = {task: {**of, "width": 32, "depth": 1, "batch": 2} for task, of in SIZES.items()}
        lrs = {name: rates[:1] for name, rates in LRS.items()}

    norm = {task: kind.weight_norm for task, kind in TASKS.items()}
    setting = {
        "steps": options.steps, "sizes": sizes, "other_lr": OTHER_LR, "weight_norm": norm,
    }  # fmt: skip

    def rows_of(runs: list[Run], steps: int, which: str) -> list[dict[str, Any]]:
        kept = finished(options.out / "muon_vs_adamw.json", setting, which)
        missing = [run for run in runs if run not in kept]
        return [kept[run] for run in runs if run in kept] + run_all(
            partial(train, steps=steps, sizes=sizes), missing, options
        )

    grid = [(*key, lr, 0) for key in product(TASKS, STRUCTURES, LRS) for lr in lrs[key[2]]]
    rows = rows_of(grid, options.steps, "rows")
    best = tuned(rows)
    more = [(*key, lr, seed) for key, lr in best.items() for seed in range(1, options.seeds)]
    rows += rows_of(more, options.steps, "rows")
    shorter = [
        ("GPT", structure, "Muon", best["GPT", structure, "Muon"], seed)
        for structure in STRUCTURES
        for seed in range(options.seeds)
    ]
    short = rows_of(shorter, max(1, round(SHORT * options.steps)), "short")
    table = compared(rows, short, options.steps)
    show(table, Console(width=140))
    path = options.out / "muon_vs_adamw.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    same = earlier.get("setting") == setting and earlier.get("recipe") == TUNED
    same_settings = same and earlier.get("changes", SETTINGS) == SETTINGS
    kept = {
        (row["structure"], row["way"], row["lr"], row["seed"]): row
        for row in (earlier["tuned"] if same else ())
    }
    jobs = tuned_jobs({each: best["GPT", each, "AdamW"] for each in STRUCTURES}, options.seeds)
    missing = [job for job in jobs if job not in kept]
    made = run_all(partial(train_tuned, steps=options.steps, sizes=sizes), missing, options)
    found = kept | dict(zip(missing, made, strict=True))
    result = {
        "setting": setting, "table": table, "recipe": TUNED, "tuned": [found[job] for job in jobs],
        "rows": rows, "short": short, "changes": SETTINGS,
    }  # fmt: skip
    earlier_rows = earlier.get("settings", []) if same_settings else []
    result["settings"] = run_settings(options, result, earlier_rows)
    print(tuned_markdown(result), settings_markdown(result), sep="\n\n")
    keep(options, "muon_vs_adamw", plot(rows), **result)


def run_settings(
    options: argparse.Namespace, result: dict[str, Any], earlier: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of SETTINGS, each kept beside `result` as it is made."""
    rows = {setting_run(row): row for row in earlier}

    def add(row: dict[str, Any]) -> None:
        rows[setting_run(row)] = row
        if not options.smoke:
            content = {**result, "settings": [*rows.values()]}
            save_json(options.out / "muon_vs_adamw.json", **content)

    def run(runs: Iterable[SettingRun]) -> None:
        missing = [each for each in runs if each not in rows]
        run_all(
            partial(train_setting, steps=options.steps, sizes=result["setting"]["sizes"]),
            missing,
            options,
            add,
        )

    chosen = [(text, *each) for text, (_, _, pairs) in TEXTS.items() for each in pairs]
    run((*each, lr, 0) for each in chosen for lr in FIRST)
    while not options.smoke and (more := next_rates(rows.values())):
        run(more)
    best = best_settings(rows.values())
    run((*each, best[each]["lr"], seed) for seed in range(1, options.seeds) for each in chosen)
    return [*rows.values()]


if __name__ == "__main__":
    main()
