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

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, training
from benchmarks.harness.experiment import (
    Axis,
    Experiment,
    Job,
    Row,
    Runs,
    Tune,
    climb,
    combinations,
    tune,
)
from benchmarks.harness.statistics import best, curve_of_rates, select, tuned_on_first
from benchmarks.harness.tasks import EXAMPLES, Plateau, compare, of_examples

STRUCTURES = {"dense": None, "BTT r=1": structlin.BTT(rank=1)}
RATES = {"AdamW": 2.0**-9, "Muon": 2.0**-6}  # where the search begins
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
WAYS = {"dense": ["all of it", ADAMW], "BTT r=1": [*WITHOUT, ADAMW]}


class Pairs(Plateau):
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
# text -> its class, share of the steps, and structure -> settings
TEXTS: dict[str, tuple[type[Plateau], float, dict[str, list[str]]]] = {
    "characters": (Plateau, 1.0, {each: [*SETTINGS] for each in STRUCTURES}),
    "pairs of characters": (Pairs, SHORT, {"dense": [*SETTINGS][:3], "BTT r=1": []}),
}
FIRST = (2.0**-4.5, 2.0**-4)  # rates of each setting

Make = Callable[[nn.Module], torch.optim.Optimizer]
Sizes = Mapping[str, Mapping[str, int]]  # by task


# ---- a run ---------------------------------------------------------------------------------------


def train(part: str, **job: Any) -> Row:
    return PARTS[part](**job)


def train_plain(
    task: str, structure: str, optimizer: str, lr: float, seed: int, steps: int, sizes: Sizes
) -> Row:
    make = partial(OPTIMIZERS[optimizer], lr=lr)
    curve = descend(EXAMPLES[task], structure, seed, steps, make, sizes=sizes[task])
    return {"loss": curve[-1][1], "curve": curve}


def train_short(steps: int, **job: Any) -> Row:
    return train_plain(**job, steps=shorten(steps))


def train_tuned(structure: str, way: str, lr: float, seed: int, steps: int, sizes: Sizes) -> Row:
    chosen = TUNED | {name: USUAL[name] for name in WITHOUT.get(way, ())}
    if way == ADAMW:
        make: Make = partial(adamw, lr=lr)
    else:
        make, steps = muon_of(chosen, lr), shorten(steps)
    gpt = {"sizes": sizes["GPT"], "chosen": chosen}
    curve = descend(Plateau, structure, seed, steps, make, **gpt)
    return {"steps": steps, "loss": curve[-1][1]}


def train_setting(
    text: str, structure: str, setting: str, lr: float, seed: int, steps: int, sizes: Sizes
) -> Row:
    (kind, share, _), chosen = TEXTS[text], USUAL | SETTINGS[setting]
    steps, gpt = max(1, round(share * steps)), {"sizes": sizes["GPT"], "chosen": chosen}
    curve = descend(kind, structure, seed, steps, muon_of(chosen, lr), **gpt)
    return {"steps": steps, "loss": curve[-1][1]}


PARTS: dict[str, Callable[..., Row]] = {
    "rows": train_plain, "short": train_short, "tuned": train_tuned, "settings": train_setting,
}  # fmt: skip


def descend(
    kind: type[compare.Task],
    structure: str,
    seed: int,
    steps: int,
    make: Make,
    *,
    sizes: Mapping[str, int],
    chosen: Mapping[str, Any] = MappingProxyType({}),
) -> training.Curve:
    """Train; the held-out loss after every twentieth of the steps.

    Args:
        sizes: of the model and its batches.
        chosen: schedule and weight normalisation, if not those of the task.
    """
    task = of_examples(kind, seed, **sizes)
    task.weight_norm = chosen.get("weight_norm", task.weight_norm)
    linear = chosen.get("schedule") == TUNED["schedule"]
    rate = warmup_linear if linear else compare.warmup_cosine
    model = compare.build(task, sizes["width"], STRUCTURES[structure], seed)
    return training.follow(model, make(model), task, steps, points=20, rate=rate)


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(structlin.param_groups(model, lr), betas=(0.9, 0.95))


def muon(model: nn.Module, lr: float, **options: Any) -> torch.optim.Optimizer:
    return structlin.optim.Muon(model, lr, other_lr=OTHER_LR, **options)


OPTIMIZERS = {"AdamW": adamw, "Muon": partial(muon, method="ns")}


def muon_of(chosen: Row, lr: float) -> Make:
    options = {name: chosen[name] for name in ("masses", "momentum", "other_lr")}
    return partial(structlin.optim.Muon, lr=lr, **options)


def shorten(steps: int) -> int:
    return max(1, round(SHORT * steps))


def warmup_linear(step: int, steps: int) -> float:
    """As `compare.warmup_cosine`, but on a line to a twentieth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 1 - 0.95 * (step - warmup) / max(1, steps - warmup)


# ---- the runs ------------------------------------------------------------------------------------


def design(runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
    """Both optimizers; with their best rates the short runs; then the settings."""
    seeds = axes["seed"]

    def groups(part: str, *names: str) -> list[Job]:
        return [*combinations({"part": [part], **{name: axes[name] for name in names}})]

    for group in groups("rows", "task", "structure", "optimizer"):
        tune(runs, group, seeds, Tune(start=lambda job: RATES[job["optimizer"]]))
    jobs = []
    for structure in axes["structure"]:
        gpt = {"task": "GPT", "structure": structure}
        rates = {name: rate_of(runs, part="rows", optimizer=name, **gpt) for name in RATES}
        jobs.append({"part": "short", **gpt, "optimizer": "Muon", "lr": rates["Muon"]})
        for way in WAYS[structure]:
            lr = USUAL["lr"] if "lr" in WITHOUT.get(way, ()) else TUNED["lr"]
            lr = rates["AdamW"] if way == ADAMW else lr
            jobs.append({"part": "tuned", "structure": structure, "way": way, "lr": lr})
    runs.of({**job, "seed": seed} for job in jobs for seed in seeds)
    settings = groups("settings", "text", "structure", "setting")
    rounds = 1 if runs.options.smoke else 100
    climb(runs, [(group, FIRST) for group in settings], next_rates, seeds[:1], rounds)
    jobs = [{**group, "lr": rate_of(runs, **group)} for group in settings]
    runs.of({**job, "seed": seed} for job in jobs for seed in seeds)
    return runs.all()


def rate_of(runs: Runs, **wanted: Any) -> float:
    lr: float = tuned_on_first(runs.all(), **wanted)[0]["lr"]
    return lr


def next_rates(rows: list[Row], first: tuple[float, ...]) -> list[Job]:
    """The rates of a setting to try next: `first`, then those next to the best."""
    if not rows:
        return [{"lr": lr} for lr in first]
    tried = curve_of_rates(select(rows, seed=0))
    halves = round(2 * math.log2(best(tried)))  # of the rate's exponent
    beside = (2.0 ** (n / 2) for n in (halves - 1, halves + 1))
    return [{"lr": lr} for lr in beside if lr not in tried]


# ---- what is found -------------------------------------------------------------------------------


def compare_optimizers(rows: list[Row]) -> list[Row]:
    """A row per task and structure: mean losses over the seeds, and the steps Muon needs for
    AdamW's final loss."""
    table = []
    for task, structure in product(SIZES, STRUCTURES):
        gpt = {"task": task, "structure": structure}
        if not select(rows, part="rows", **gpt):
            continue
        runs = {name: tuned_on_first(rows, part="rows", optimizer=name, **gpt) for name in RATES}
        found: Row = {**gpt, "steps": runs["Muon"][0]["curve"][-1][0], "short": None}
        for name, mine in runs.items():
            losses = [row["loss"] for row in mine]
            ends = {"least": min(losses), "most": max(losses)}
            found[name] = {"lr": mine[0]["lr"], "loss": fmean(losses), **ends}
        found["muon_steps_to_adamws_loss"] = [
            next((step for step, loss in ours["curve"] if loss <= theirs["loss"]), None)
            for ours, theirs in zip(runs["Muon"], runs["AdamW"], strict=True)
        ]
        if short := select(rows, part="short", **gpt):
            losses = [row["loss"] for row in sorted(short, key=lambda row: row["seed"])]
            found["short"] = {"steps": short[0]["curve"][-1][0], "losses": losses}
        table.append(found)
    return table


def losses_by_seed(rows: list[Row], *names: str) -> dict[tuple[str, ...], list[float]]:
    """The values of `names` -> losses by seed at the best rate."""
    keys = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    return {
        key: [row["loss"] for row in tuned_on_first(rows, **dict(zip(names, key, strict=True)))]
        for key in keys
    }


def setting_losses(rows: list[Row]) -> dict[tuple[str, ...], list[float]]:
    """(text, structure, setting) -> losses by seed at the best rate."""
    return losses_by_seed(rows, "text", "structure", "setting")


def analyse(rows: list[Row]) -> Row:
    tuned = losses_by_seed(select(rows, part="tuned"), "structure", "way")
    found = tuned | setting_losses(select(rows, part="settings"))
    losses = {", ".join(key): each for key, each in found.items()}
    table = compare_optimizers(rows)
    return {"table": table, "recipe": TUNED, "changes": SETTINGS, "losses": losses}


def draw(result: Row) -> figures.Figure:
    """The curves of both optimizers at their best rates."""
    rates = {
        (row["task"], row["structure"], name): row[name]["lr"]
        for row in result["table"]
        for name in RATES
    }
    points = [
        {**row, "step": step, "held-out loss (nats)": loss}
        for row in result["rows"]
        if row["lr"] == rates[row["task"], row["structure"], row["optimizer"]]
        for step, loss in row["curve"]
    ]
    shown = {"panel": ["task"], "line": ["structure", "optimizer"], "log": "y"}
    return figures.curves(points, "step", "held-out loss (nats)", **shown)


EXPERIMENT = Experiment(
    name="muon_vs_adamw",
    about=__doc__,
    run=train,
    axes={
        "task": lambda job: SIZES,
        "structure": [*STRUCTURES],
        "optimizer": lambda job: RATES,
        "way": lambda job: WAYS[job["structure"]],
        "text": lambda job: TEXTS,
        "setting": lambda job: TEXTS[job["text"]][2][job["structure"]],
        "lr": [],
    },
    lists={part: {"part": part} for part in PARTS},
    sizes={"steps": 800, "sizes": SIZES},
    note={"other_lr": OTHER_LR, "weight_norm": {n: EXAMPLES[n].weight_norm for n in SIZES}},
    smoke={
        "steps": 2,
        "sizes": {task: of | {"width": 32, "depth": 1, "batch": 2} for task, of in SIZES.items()},
        "text": ["characters"],
        "setting": [*SETTINGS][:2],
        "seeds": 1,
    },
    design=design,
    analyse=analyse,
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
