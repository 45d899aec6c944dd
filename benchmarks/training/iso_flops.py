"""Loss at equal training FLOPs, where width and length are both free.

    python -m benchmarks.training.iso_flops # two days, in pieces
    python -m benchmarks.training.iso_flops --budgets 1e12 --setups Python
    python -m benchmarks.training.iso_flops --smoke # seconds; results/iso_flops.{json,png}

Every run of a budget takes the same FLOPs: a narrower model makes more steps. A model's width goes
along `WIDTHS` until the best one has both its neighbours, so each kind is compared at its own best
width and length. The models, the data and the starts are those of `gpt_seconds`.

Kinds: "dense"; "dense, weight norm", with the weight normalisation that structured models of
characters have; "BTT r=4" and the like, with structured MLPs (SiLU between the cores) and
attention; "BTT r=4 in MLPs", whose attention stays as it is in "dense"; "BTT r=4, wide MLPs", with
hidden layers of eight times the width, and attention of dense layers with weight normalisation;
"BTT r=4, no SiLU" and "BTT r=4, no weight norm", which tell what these two do for the gain;
"BTT r=2, 2 of 8 experts", whose every linear layer is a mixture of such matrices, of which each
token takes two (arXiv:2410.02117). Structured kinds are compared with the dense kind that has the
lower loss.

Rates are searched by factors of 2 at the budgets up to 5e12, for AdamW up to 2e13, first at the
width where the search begins, then again at the best width. From there the library's own rules
carry them (muP from dense width 256). All choices are made by the validation loss of seed 0.
Reported is the test loss: the windows of the held-out tenth are divided in turns, 512 to validate
and 2,048 to test.

A run keeps a checkpoint beside its result and goes on from it. The file of rows goes on too.
"""

import math
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import structlin
from benchmarks.harness import models, training
from benchmarks.harness.experiment import Axis, Experiment, Row, Runs
from benchmarks.harness.statistics import log_loss, select
from benchmarks.harness.tasks import Batch
from benchmarks.training import gpt_seconds, iso_report, mixtures
from benchmarks.training.iso_report import CELL, NORMALISED, best_of, kind_of
from examples.moe import BALANCE
from structlin import BTT, Dense
from structlin.optim._soap import Eigenbases

BATCH_TOKENS = 512
WIDTHS = [32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768]
LARGEST_OF_ALL_KINDS = 5e12  # FLOPs; beyond them dense and the best structured kinds are run
LARGEST_TUNED = {"AdamW": 8e13, "Muon": 5e12, "SOAP": 5e12}  # FLOPs up to which rates are searched
SECONDS_BETWEEN_CHECKPOINTS = 120.0
VALIDATION_WINDOWS = 512
TEST_WINDOWS = 2048
WIDE_MLP_MULTIPLE = 8  # hidden features of a wide MLP per feature of the model


class Kind(NamedTuple):
    """How the dense model is converted."""

    mlp: structlin.Family
    attention: structlin.Family | None  #: None: attention stays as the dense model has it
    start_width: int  #: where the search begins at the smallest budget
    weight_norm: bool | None = None  #: None: as structured models of the setup have it
    has_wide_mlps: bool = False


SILU_4 = BTT(rank=4).activate()
KINDS = {
    NORMALISED: Kind(Dense(), Dense(), start_width=64, weight_norm=True),
    "BTT r=4": Kind(SILU_4, BTT(rank=4), start_width=96),
    "BTT r=2": Kind(BTT(rank=2).activate(), BTT(rank=2), start_width=128),
    "BTT r=1": Kind(BTT(rank=1).activate(), BTT(rank=1), start_width=160),
    "BTT r=4 in MLPs": Kind(SILU_4, None, start_width=64),
    "BTT r=4, wide MLPs": Kind(SILU_4, Dense(), start_width=64, has_wide_mlps=True),
    "BTT r=4, no SiLU": Kind(BTT(rank=4), BTT(rank=4), start_width=64),
    "BTT r=4, no weight norm": Kind(SILU_4, BTT(rank=4), start_width=64, weight_norm=False),
}
MIXED = {"BTT r=2, 2 of 8 experts": 2, "BTT r=4, 2 of 8 experts": 4}  # the rank of an expert
EXPERTS = {"experts": 8, "top_k": 2}
DENSE_START_WIDTH = 64  # that of mixtures too
START_RATES = {
    "AdamW": {"lr": 2**-9, "other_lr": 2**-9},
    "Muon": {"lr": 2**-6, "other_lr": 2**-7},
    "SOAP": {"lr": 2**-6, "other_lr": 2**-7},
}
RECIPES: dict[str, Row] = {  # options of an optimizer; "batch": the windows of a batch
    "AdamW": {},
    "Muon": {},
    "SOAP": {},
    "AdamW, beta2 .99": {"betas": (0.9, 0.99)},
    "AdamW, batches of 2048": {"batch": 32},
    "SOAP, a basis at every step": {"precondition_frequency": 1},
    "SOAP, then the polar factor": {},
}


# ---- models and data -----------------------------------------------------------------------------


def make_task(setup: str, seed: int, sizes: Row) -> gpt_seconds.Task:
    return gpt_seconds.make_task(setup, seed, sizes[setup])


def build(setup: str, kind: str, width: int, seed: int, sizes: Row, device: str) -> nn.Module:
    """A model of this width, on the device."""
    task, start = make_task(setup, seed, sizes), gpt_seconds.SETUPS[setup]
    if kind == "dense":
        structure = None if start.zero else Dense()
        return models.build(task, width, structure, seed, device, **gpt_seconds.PLAIN)
    if kind in MIXED:
        model = models.build(task, width, None, seed, device, **gpt_seconds.PLAIN)
        return mix(model, MIXED[kind], start.weight_norm, device)
    parts = KINDS[kind]
    if parts.has_wide_mlps:
        task = WideMLPs(task)
    options: Row = {
        "weight_norm": start.weight_norm if parts.weight_norm is None else parts.weight_norm
    }
    if parts.attention is None:
        options["include"] = "*mlp*"
    else:
        options["overrides"] = {"*attn*": parts.attention}
    return models.build(task, width, parts.mlp, seed, device, **gpt_seconds.PLAIN | options)


def mix(model: nn.Module, rank: int, weight_norm: bool, device: str) -> nn.Module:
    """The model with mixtures in the place of its blocks' linear layers; SiLU in those of MLPs."""
    for name, layer in list(model.blocks.named_modules()):
        if not isinstance(layer, nn.Linear):
            continue
        family = BTT(rank=rank).activate() if "mlp" in name else BTT(rank=rank)
        with torch.device(device):
            mixture = mixtures.Mixture(
                layer.in_features, layer.out_features, family, **EXPERTS, weight_norm=weight_norm
            )
        model.blocks.set_submodule(name, mixture)
    return model


class WideMLPs:
    """A task whose models have MLPs of `WIDE_MLP_MULTIPLE` times the width."""

    def __init__(self, task: gpt_seconds.Task) -> None:
        self.task = task
        self.weight_norm = task.weight_norm

    def model(self, width: int) -> nn.Module:
        model = self.task.model(width)
        hidden = WIDE_MLP_MULTIPLE * width
        for block in model.blocks:
            block.mlp.c_fc = nn.Linear(width, hidden, bias=False)
            block.mlp.c_proj = nn.Linear(hidden, width, bias=False)
        models.initialise(model, embedding=0.2)
        return model


@cache
def evaluation_batches(setup: str, **sizes: int) -> dict[str, list[Batch]]:
    """Windows spread over the held-out tenth: every fifth validates, the others test."""
    task = make_task(setup, 0, {setup: sizes})
    total = sizes.get("windows", VALIDATION_WINDOWS + TEST_WINDOWS)
    starts = torch.linspace(0, len(task.held) - task.tokens - 1, total).long()
    validates = torch.arange(total) % 5 == 0
    parts = {"validation": starts[validates], "test": starts[~validates]}
    return {
        name: [task.windows(task.held, chunk) for chunk in part.split(64)]
        for name, part in parts.items()
    }


def make_optimizer(
    setup: str, optimizer: str, model: nn.Module, rates: Row, sizes: Row
) -> torch.optim.Optimizer:
    task = make_task(setup, 0, sizes)
    base: Any = models.build(task, sizes["base"], None, 0, "meta")
    widths = base_widths(model, sizes["base"])
    if widths:
        base = widths
    recipe = {name: option for name, option in RECIPES[optimizer].items() if name != "batch"}
    if kind_of(optimizer) == "AdamW":
        recipe = {"betas": (0.9, 0.95)} | recipe
        return structlin.optim.AdamW(
            model, rates["lr"], weight_decay=0.0, base=base, fused=True, **recipe
        )
    kinds = {"Muon": structlin.optim.Muon, "SOAP": structlin.optim.SOAP}
    kinds |= {"SOAP, then the polar factor": PolarSOAP}
    kind = kinds.get(optimizer, kinds[kind_of(optimizer)])
    return kind(model, **rates, base=base, momentum=gpt_seconds.MOMENTUM, **recipe)


class PolarEigenbases(Eigenbases):
    """The polar factor of SOAP's direction."""

    def find(self) -> Tensor:
        return structlin.polar_factor(super().find())


class PolarSOAP(structlin.optim.SOAP):
    direction = PolarEigenbases


def base_widths(model: nn.Module, base: int) -> dict[int, int]:
    """The widths of a model's mixtures -> those of one dense layer at the base width, whose rates
    each expert takes; empty without mixtures."""
    scale = Fraction(base, model.ln_f.weight.numel())
    widths = {}
    for layer in model.modules():
        if isinstance(layer, mixtures.Mixture):
            widths[layer.in_features] = int(scale * layer.in_features)
            widths[layer.experts.in_features] = int(scale * layer.in_features)
            widths[layer.experts.out_features] = int(scale * layer.out_features)
    return widths


# ---- a run ---------------------------------------------------------------------------------------


def flops_of_a_step(setup: str, kind: str, width: int, sizes: Row) -> tuple[int, int]:
    """Training FLOPs of one step (backward takes twice what forward does), and parameters."""
    task = make_task(setup, 0, sizes)
    model = build(setup, kind, width, 0, sizes, "meta")
    params = sum(parameter.numel() for parameter in model.parameters())
    flops_of_mixtures = 0
    for name, layer in list(model.named_modules()):
        if isinstance(layer, mixtures.Mixture):
            flops_of_mixtures += layer.flops
            model.set_submodule(name, Zeros(layer.out_features))
    cost = structlin.cost(model, task.heldout[0][0][:1].to("meta"))
    tokens = sizes[setup]["batch"] * task.tokens
    return 3 * tokens * (cost.flops // task.tokens + flops_of_mixtures), params


class Zeros(nn.Module):
    """Takes the place of a mixture where FLOPs are counted: its products depend on the data."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.out_features)


def train(
    setup: str, optimizer: str, kind: str, budget: float, width: int, lr: float, other_lr: float,
    seed: int, **sizes: Any,
) -> Row:  # fmt: skip
    """The validation and test losses after `budget` FLOPs; None where the run diverged."""
    sizes[setup] = sizes[setup] | {"batch": RECIPES[optimizer].get("batch", sizes[setup]["batch"])}
    flops, params = flops_of_a_step(setup, kind, width, sizes)
    steps = max(2, round(budget / flops))
    task = make_task(setup, seed, sizes)
    torch.manual_seed(seed)
    model = build(setup, kind, width, seed, sizes, "cpu")
    rates = {"lr": lr, "other_lr": other_lr}
    descent = make_optimizer(setup, optimizer, model, rates, sizes)
    name = f"{setup} {optimizer} {kind} {budget:.0e} {width} {lr:.6g} {other_lr:.6g} {seed}"
    checkpoint = Path(sizes["checkpoints"]) / f"{name}.pt" if sizes["checkpoints"] else None
    seconds = follow(model, descent, task, steps, checkpoint)
    losses: Row = {"validation": None, "test": None}
    if seconds is not None:
        batches = evaluation_batches(setup, **sizes[setup])
        for part in losses:
            losses[part] = training.finite(training.held_out(model.eval(), batches[part]))
    return {
        "loss": losses["validation"],
        "test": losses["test"],
        "steps": steps,
        "flops": flops,
        "params": params,
        "cpu_seconds": seconds,
    }


def follow(
    model: nn.Module,
    descent: torch.optim.Optimizer,
    task: gpt_seconds.Task,
    steps: int,
    checkpoint: Path | None,
) -> float | None:
    """Train with a linear warm-up and a cosine to a tenth, from the checkpoint if there is one.

    Returns:
        CPU seconds of this process, those before an interruption included; None if it diverged.
    """
    warm_up = max(1, min(gpt_seconds.WARM_UP, steps // 5))
    base_rates = [group["lr"] for group in descent.param_groups]
    first_step = 0
    earlier_seconds = 0.0
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        descent.load_state_dict(saved["optimizer"])
        first_step = saved["step"]
        earlier_seconds = saved["seconds"]
    start = time.process_time()
    saved_at = time.monotonic()
    for step in range(first_step, steps):
        share = (step + 1) / warm_up
        if step >= warm_up:
            share = 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))
        for group, rate in zip(descent.param_groups, base_rates, strict=True):
            group["lr"] = rate * share
        loss = training.cross_entropy(model, *task.batch(step))
        loss = loss + BALANCE * mixtures.balance_of(model)
        if not math.isfinite(loss.item()):
            return None
        descent.zero_grad()
        loss.backward()
        try:
            descent.step()
        except FloatingPointError:  # Muon's, on gradients that are not finite
            return None
        if checkpoint is not None and time.monotonic() > saved_at + SECONDS_BETWEEN_CHECKPOINTS:
            saved_at = time.monotonic()
            save_checkpoint(
                checkpoint, model, descent, step + 1, earlier_seconds + time.process_time() - start
            )
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return earlier_seconds + time.process_time() - start


def save_checkpoint(
    path: Path, model: nn.Module, descent: torch.optim.Optimizer, step: int, seconds: float
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": descent.state_dict()}
    written = path.with_suffix(".new")
    torch.save(state | {"step": step, "seconds": seconds}, written)
    written.replace(path)


# ---- the search ----------------------------------------------------------------------------------


def design(runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
    """Each cell by itself, the smallest budget first, since a budget starts from the one before."""
    for budget in sorted(axes["budget"]):
        for setup in axes["setup"]:
            for kind in axes["kind"]:
                for optimizer in axes["optimizer"]:
                    cell = {"setup": setup, "optimizer": optimizer, "kind": kind, "budget": budget}
                    if is_planned(cell):
                        search_cell(runs, cell, axes["seed"])
    return runs.all()


def is_planned(cell: Row) -> bool:
    """Whether a cell is worth its hours. At 2e13 FLOPs that holds for both dense kinds, BTT of rank
    4, and this in MLPs alone; at 8e13 for the first three on characters, by AdamW and SOAP.
    Variants of optimizers are for dense and BTT of rank 4 at two budgets, on characters; mixtures
    and controls are for AdamW.
    """
    characters = cell["setup"] == "Python"
    if cell["kind"] in iso_report.CONTROLS:
        return characters and cell["optimizer"] == "AdamW" and cell["budget"] == 1e12
    best_kinds = ("dense", "BTT r=4")
    if cell["optimizer"] != kind_of(cell["optimizer"]):
        return characters and cell["kind"] in best_kinds and cell["budget"] in (1e12, 5e12)
    if cell["budget"] > 2e13:
        large_kinds = (*best_kinds, NORMALISED)
        return characters and cell["kind"] in large_kinds and cell["optimizer"] != "Muon"
    if cell["budget"] > LARGEST_OF_ALL_KINDS:
        return cell["kind"] in (*best_kinds, NORMALISED, "BTT r=4 in MLPs")
    return cell["kind"] not in MIXED or (characters and cell["optimizer"] == "AdamW")


def search_cell(runs: Runs, cell: Row, seeds: Sequence[int]) -> None:
    """The best rates and the best width of a cell by seed 0, then all seeds there."""
    job = start_of(runs.all(), cell)
    is_tuned = cell["budget"] <= LARGEST_TUNED[kind_of(cell["optimizer"])]
    searches_rates = is_tuned and not runs.options.smoke
    rounds = 1 if runs.options.smoke else 10
    if searches_rates:
        job = search_rates(runs, cell, job, rounds)
    job = search_width(runs, cell, job, rounds)
    if searches_rates:
        job = search_rates(runs, cell, job, rounds)
        job = search_width(runs, cell, job, rounds)
    runs.of(job | {"seed": seed} for seed in seeds)


def start_of(rows: Sequence[Row], cell: Row) -> Row:
    """Where the search of a cell begins: at the best of its own runs; or of those by the optimizer
    of which its own is a variant; or of the next smaller budget that has been run, whose width
    grows as the fourth root of the FLOPs."""
    for optimizer in (cell["optimizer"], kind_of(cell["optimizer"])):
        earlier = select(rows, **cell | {"optimizer": optimizer}, seed=0)
        if earlier:
            best = min(earlier, key=log_loss)
            return cell | {name: best[name] for name in ("width", "lr", "other_lr")}
    same = {name: cell[name] for name in CELL if name != "budget"}
    smaller = [row for row in select(rows, **same) if row["budget"] < cell["budget"]]
    if not smaller:
        rates = START_RATES[kind_of(cell["optimizer"])]
        kind = KINDS.get(cell["kind"])
        width = DENSE_START_WIDTH if kind is None else kind.start_width
        return cell | rates | {"width": width}
    budget = max(row["budget"] for row in smaller)
    best = best_of(smaller, same | {"budget": budget})
    grown = best["width"] * (cell["budget"] / budget) ** 0.25
    width = min(WIDTHS, key=lambda width: abs(width - grown))
    return cell | {"width": width, "lr": best["lr"], "other_lr": best["other_lr"]}


def search_rates(runs: Runs, cell: Row, job: Row, rounds: int) -> Row:
    """Rates by factors of 2 at the job's width, until the best has both neighbours of each."""
    place = cell | {"width": job["width"]}
    for _ in range(rounds):
        candidates = [job]
        for name in gpt_seconds.names_of(kind_of(cell["optimizer"])):
            candidates += [job | {name: job[name] * factor} for factor in (0.5, 2)]
        if kind_of(cell["optimizer"]) == "AdamW":  # which has one rate
            candidates = [each | {"other_lr": each["lr"]} for each in candidates]
        runs.of(candidate | {"seed": 0} for candidate in candidates)
        best = best_of(runs.all(), place)
        before = job
        job = place | {"lr": best["lr"], "other_lr": best["other_lr"]}
        if job == before:
            break
    return job


def search_width(runs: Runs, cell: Row, job: Row, rounds: int) -> Row:
    """Widths at the job's rates, until the best has both its neighbours."""
    rates = {"lr": job["lr"], "other_lr": job["other_lr"]}
    for _ in range(rounds):
        position = WIDTHS.index(job["width"])
        candidates = [
            job | {"width": width} for width in WIDTHS[max(0, position - 1) : position + 2]
        ]
        runs.of(candidate | {"seed": 0} for candidate in candidates)
        before = job
        job = cell | rates | {"width": best_of(runs.all(), cell | rates)["width"]}
        if job == before:
            break
    return job


EXPERIMENT = Experiment(
    name="iso_flops",
    about=__doc__,
    claims=[iso_report.CLAIM],
    place="budgets.md",
    numbers=iso_report.numbers,
    tables={
        "iso fronts": iso_report.fronts,
        "iso gains": iso_report.gains,
        "iso distances": iso_report.distances,
        "iso compute": iso_report.compute,
        "iso fits": iso_report.fits,
    },
    run=train,
    axes={
        "setup": ["Python", "Wikipedia"],
        "optimizer": [*RECIPES],
        "kind": ["dense", *KINDS, *MIXED],
        "budget": [2.5e11, 1e12, 5e12, 2e13, 8e13],
        "width": [],
        "lr": [],
        "other_lr": [],
    },
    sizes={"base": 256, "checkpoints": "out/iso_flops"}
    | {
        name: {k: v for k, v in gpt_seconds.SETUPS[name].sizes.items() if k != "steps"}
        for name in ("Python", "Wikipedia")
    },
    note={
        "vocabulary": gpt_seconds.VOCABULARY,
        "head_std": models.HEAD_STD,
        "momentum": gpt_seconds.MOMENTUM,
    },
    smoke={
        "checkpoints": "",
        "setup": ["Python"],
        "Python": {"context": 64, "batch": 2, "depth": 1, "windows": 20},
        "optimizer": ["AdamW", "SOAP"],
        "kind": ["dense", "BTT r=4"],
        "budget": [1e8, 4e8],
        "seeds": 1,
    },
    analyse=lambda rows: {"table": iso_report.tabulate(rows)},
    design=design,
    show=iso_report.show,
    draw=iso_report.draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
