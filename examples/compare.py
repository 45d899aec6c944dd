"""What the training examples share: the Transformer block, the options, runs side by side,
checkpoints, table and plots.

The runs see the same batches. They take turns of a few steps, so that a machine that slows down
slows all of them: their seconds compare. There are four:

    dense              nn.Linear everywhere, at `--width`
    dense_wide         at twice the width
    structured         at twice the width, all linear layers of the blocks
    structured_wide    at the largest width of no more FLOPs a token than the first dense model

`--lr` is meant for the first one. muP carries it to the other widths, and `structlin.param_groups`
to the cores. With `--optimizer muon` it is in units of operator norm per step, the same for every
shape. With an activation between the cores (`--between`), attention has BTT of rank `--attention`
without one. The table says after how many seconds of training each model is as good as the dense
ones at their end.

`structlin.widen` finds the last width. A training step is three times the FLOPs of a forward pass;
those are counted on one sequence, attention and head included (the causal half that a fused kernel
may skip is counted too).
"""

import argparse
import json
import math
import os
import pickle
import platform
import sys
import tempfile
import textwrap
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, dataclass, fields
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from torch import Tensor, nn

import structlin

HEAD = 32  # features of an attention head, at every width
ATTENTION = 2  # rank of BTT in attention, where MLPs have an activation between their cores
# operator norm per step, between the best of the dense GPT and ViT (training/muon_vs_adamw.py)
MUON_LR = 2**-6
FILL = "as many as fill the width"
TURN = 20  # steps of one run before the next has its turn
EVALUATIONS = 20  # of the held-out loss in a run; a checkpoint is written at each
Batch = tuple[Tensor, Tensor]  # inputs, targets


# ---- the model -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """`heads` heads of HEAD features; None: as many as fill the width."""

    def __init__(self, width: int, causal: bool, heads: int | None = None) -> None:
        super().__init__()
        self.causal, inner = causal, HEAD * heads if heads else width
        self.c_attn = nn.Linear(width, 3 * inner, bias=False)
        self.c_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        # (batch, heads, tokens, HEAD)
        q, k, v = self.c_attn(x).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        # muP: not 1 / sqrt
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=1 / HEAD)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, causal: bool, heads: int | None = None) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width, bias=False), Attention(width, causal, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width, bias=False), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@torch.no_grad()
def initialise(model: nn.Module, *, embedding: float) -> None:
    """muP: hidden layers 1 / sqrt(fan_in); zero for the head (but see `Task.head_std`) and the last
    linear layer of each residual branch.

    Args:
        embedding: standard deviation of embeddings, the same at every width.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            zero = name.endswith(("head", "c_proj"))
            module.weight.zero_() if zero else module.weight.normal_(0, module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0, embedding)


# ---- the task and its runs -----------------------------------------------------------------------


class Task(ABC):
    """What is trained on what. `ValueError` and `OSError` from its making are errors of the command
    line."""

    title: str  # heads the table
    metric: str  # names `score`
    tokens: int  # of one sequence
    heads: int | None = None  # of attention, at every width; None: as many as fill the width
    zero_init: tuple[str, ...] = ("*c_proj",)  # what starts at zero: see structlin.convert
    weight_norm: bool = False  # of structured layers
    head_std: float = 0.0  # of the start of the head's matrix
    config: dict[str, Any]  # what makes a checkpoint another one
    heldout: list[Batch]

    @abstractmethod
    def model(self, width: int) -> nn.Module:
        """The dense model."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """The batch of a step: a function of the seed and of `step` alone, so that a run resumes
        anywhere."""

    @abstractmethod
    def score(self, loss: float, accuracy: float) -> float:
        """The held-out figure that people quote."""


@dataclass(frozen=True)
class Run:
    name: str
    label: str
    width: int
    structure: structlin.Family | None
    options: Mapping[str, Any]  # of `convert`
    flops: int  # a token, forward
    config: dict[str, Any]
    path: Path  # of the checkpoint

    def __str__(self) -> str:
        return f"{self.label}, width {self.width}"


def generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + step)


def build(
    task: Task,
    width: int,
    structure: structlin.Family | None,
    seed: int,
    device: str = "cpu",
    **changes: Any,
) -> nn.Module:
    """The dense model, or converted; `changes` are options of `convert` beside the task's own."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = task.model(width)
        if structure is not None:
            options = {"zero_init": task.zero_init, "weight_norm": task.weight_norm}
            options["init"] = "mup"  # as the dense model's, see `initialise`
            structlin.convert(model, structure, **(options | changes))
        for name, head in model.named_children():
            if task.head_std and name.endswith("head"):
                if isinstance(head, nn.Linear):
                    nn.init.normal_(head.weight, std=task.head_std)
                elif isinstance(head, structlin.StructuredLinear):
                    entries = head.in_features * head.out_features
                    head.match_norm_(task.head_std * math.sqrt(entries))
    return model


def example_of(task: Task) -> Tensor:
    """One sequence, on which FLOPs are counted."""
    return task.heldout[0][0][:1]


def forward_flops(
    task: Task, width: int, structure: structlin.Family | None, **changes: Any
) -> int:
    """FLOPs a token of the forward pass of one sequence. Nothing is computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a small layer grows: the real one will say so
        model = build(task, width, structure, seed=0, device="meta", **changes)
    return structlin.cost(model, example_of(task)).flops // task.tokens


def widest(task: Task, structure: structlin.Family, width: int, **changes: Any) -> Any:
    """The largest width, a multiple of the head size, with at most the FLOPs of dense's `width`."""
    example = example_of(task)
    return structlin.widen(
        task.model, structure, dense=width, example=example, multiple=HEAD, **changes
    )


def make_run(
    task: Task,
    options: argparse.Namespace,
    name: str,
    width: int,
    structure: structlin.Family | None,
) -> Run:
    """The run `name`, of the model of that width and structure (None: dense)."""
    config = task.config | {
        option: getattr(options, option)
        for option in ("seed", "steps", "batch", "optimizer", "lr", "depth")
    }
    config |= {"width": width, "structure": structure.label if structure else "none"}
    changes = attention_of(options) if structure else {}
    config |= {"attention": options.attention or ATTENTION} if changes else {}
    config |= {"amp": True} if options.amp else {}
    label = structure.label if structure else "dense"
    flops = forward_flops(task, width, structure, **changes)
    return Run(name, label, width, structure, changes, flops, config, options.out / f"{name}.pt")


def attention_of(options: argparse.Namespace) -> dict[str, Any]:
    """Options of `convert` for attention, whose cores have no activation between them.

    Raises:
        ValueError: a rank of attention, but no activation.
    """
    if "attention" not in options:
        return {}
    if options.between == "none":
        if options.attention:
            raise ValueError(f"--attention {options.attention} needs --between silu")
        return {}
    return {"overrides": {"*attn*": structlin.BTT(rank=options.attention or ATTENTION)}}


def choose(task: Task, options: argparse.Namespace) -> list[Run]:
    """The four runs above.

    Raises:
        ValueError: the options do not fit each other.
    """
    structure, width = structure_of(options), options.width
    if "heads" in options and width % HEAD and not task.heads:
        raise ValueError(f"--width {width} is not a multiple of the head size {HEAD}")
    dense = make_run(task, options, "dense", width, None)
    dense_wide = make_run(task, options, "dense_wide", 2 * width, None)
    structured = make_run(task, options, "structured", 2 * width, structure)
    wide = widest(task, structure, width, **structured.options).width
    structured_wide = make_run(task, options, "structured_wide", wide, structure)
    return [dense, dense_wide, structured, structured_wide]


# ---- checkpoints ---------------------------------------------------------------------------------


def load(run: Run) -> dict[str, Any] | None:
    """The checkpoint of a run, or None if there is none yet.

    Raises:
        ValueError: the file is no checkpoint, or one of another configuration.
    """
    if not run.path.exists():
        return None
    try:
        state = torch.load(run.path, weights_only=True, map_location="cpu")
        theirs, _ = dict(state["config"]), state["history"]["times"]
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(
            f"{run.path} is not a checkpoint of this program: move it away, or pass another --out"
        ) from error
    keys = [*run.config, *(key for key in theirs if key not in run.config)]
    differ = [
        f"{key} is {theirs.get(key)!r} there and {run.config.get(key)!r} here"
        for key in keys
        if theirs.get(key) != run.config.get(key)
    ]
    if differ:
        raise ValueError(
            f"{run.path} is of another configuration: {'; '.join(differ)}. Pass another --out"
        )
    return state


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when all of it is written."""
    temporary = path.with_name(f"{path.name}.tmp")
    yield temporary
    os.replace(temporary, path)


# ---- training ------------------------------------------------------------------------------------


def warmup_cosine(step: int, steps: int, warmup: int | None = None) -> float:
    """Learning rate relative to its peak: linear warm-up, by default of 5 % of the steps, then a
    cosine to a tenth."""
    warmup = max(1, steps // 20 if warmup is None else warmup)
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Batch], device: str) -> tuple[float, float]:
    """Loss (nats) and accuracy, averaged over all targets."""
    loss = correct = count = 0.0
    for inputs, targets in batches:
        logits, targets = model(inputs.to(device)).flatten(0, -2), targets.to(device).flatten()
        loss += F.cross_entropy(logits, targets, reduction="sum").item()
        correct += (logits.argmax(-1) == targets).sum().item()
        count += len(targets)
    return loss / count, correct / count


def optimizer_of(
    model: nn.Module, base: nn.Module, options: argparse.Namespace
) -> torch.optim.Optimizer:
    """AdamW with the rates of `param_groups`, or Muon, whose rate needs none; `base` is the dense
    model of the first run."""
    if options.optimizer == "muon":
        return structlin.optim.Muon(model, options.lr, other_lr=options.other_lr)
    groups = structlin.param_groups(model, options.lr, base=base)
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)


def train(task: Task, run: Run, base: Run, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train to the end, from the checkpoint where there is one.

    Yields:
        The run's history, the same dict after each step: training losses and seconds of every step,
        evaluations `(step, loss, accuracy)`, params, lr.
    """
    device = options.device
    model = build(task, run.width, run.structure, options.seed, **run.options).to(device)
    optimizer = optimizer_of(model, build(task, base.width, None, 0, "meta"), options)
    history = {
        "losses": [],
        "times": [],
        "evaluations": [],
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "lr": [end(group["lr"] for group in optimizer.param_groups) for end in (min, max)],
    }
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, options.steps)
    )
    if state := load(run):
        history = state["history"]
        for name, part in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
            part.load_state_dict(state[name])
    forward = torch.compile(model) if options.compile else model
    products = partial(torch.autocast, torch.device(device).type, torch.bfloat16, options.amp)
    every = max(1, options.steps // EVALUATIONS)
    done = len(history["losses"])
    if done:
        yield history
    for step in range(done, options.steps):
        inputs, targets = (part.to(device) for part in task.batch(step))
        start = time.perf_counter()
        with products():
            loss = F.cross_entropy(forward(inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        history["losses"].append(loss.item())
        history["times"].append(time.perf_counter() - start)
        if (step + 1) % every == 0 or step + 1 == options.steps:
            with products():
                history["evaluations"].append([step + 1, *evaluate(model, task.heldout, device)])
            state = {"config": run.config, "history": history}
            state |= {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
            with replacing(run.path) as path:
                torch.save(state, path)
        yield history


# ---- the report ----------------------------------------------------------------------------------


def rows(
    task: Task, runs: list[Run], histories: list[dict], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """What the table and the plots show, as plain data.

    A point of `curve` is training FLOPs and held-out loss. `seconds` are those that all steps took;
    `clock` has, at each point, steps times the median of a step, which one pause of the machine
    does not change.
    """
    step_flops = 3 * task.tokens * options.batch  # times the forward FLOPs a token
    results = []
    for run, history in zip(runs, histories, strict=True):
        ms = 1e3 * median(history["times"])
        results.append({
            "run": run.name,
            "label": run.label,
            "width": run.width,
            "params": history["params"],
            "flops": run.flops,
            "loss": history["evaluations"][-1][1],
            task.metric: task.score(*history["evaluations"][-1][1:]),
            "ms": round(ms, 2),
            "seconds": round(sum(history["times"]), 1),
            "lr": history["lr"],
            "curve": [
                [step * step_flops * run.flops, loss] for step, loss, _ in history["evaluations"]
            ],
            "clock": [round(step * ms / 1e3, 2) for step, *_ in history["evaluations"]],
        })  # fmt: skip
    for row, run in zip(results, runs, strict=True):
        row["seconds to the loss of"] = {
            f"dense {dense.width}": seconds_until(row, other["loss"])
            for other, dense in zip(results, runs, strict=True)
            if dense.structure is None and dense is not run
        }
    return results


def seconds_until(row: dict[str, Any], loss: float) -> float | None:
    """Seconds of training after which the held-out loss is first at most `loss`, linear between two
    evaluations; None if it never is.

    >>> row = {"curve": [[1, 3.0], [2, 2.0], [3, 1.0]], "clock": [10.0, 20.0, 30.0]}
    >>> seconds_until(row, 1.5), seconds_until(row, 0.5)
    (25.0, None)
    """
    points = list(zip(row["clock"], (found for _, found in row["curve"]), strict=True))
    if points[0][1] <= loss:
        return points[0][0]
    for (early, above), (late, below) in pairwise(points):
        if below <= loss:
            return round(early + (late - early) * (above - loss) / (above - below), 2)
    return None


def table(task: Task, results: list[dict[str, Any]]) -> Table:
    shown = Table(
        title=task.title,
        caption="loss in nats, held out; FLOPs of a forward pass, 2 per multiply-add; seconds of "
        "training, in turns;\nuntil: steps times ms/step until the final loss of that model",
    )
    others = list(dict.fromkeys(name for row in results for name in row["seconds to the loss of"]))
    titles = ("run", "width", "params", "FLOPs/token", "loss", task.metric, "ms/step", "seconds")
    for title in (*titles, *(f"until\n{name}" for name in others)):
        shown.add_column(title, justify="left" if title == "run" else "right", no_wrap=True)
    for row in results:
        reached = [row["seconds to the loss of"].get(name, math.nan) for name in others]
        shown.add_row(
            row["label"],
            str(row["width"]),
            f"{row['params']:,}",
            f"{row['flops']:,}",
            f"{row['loss']:.4f}",
            f"{row[task.metric]:.4f}",
            f"{row['ms']:.1f}",
            f"{row['seconds']:.1f}",
            *("never" if s is None else "" if math.isnan(s) else f"{s:.1f}" for s in reached),
        )
    return shown


def plot(task: Task, results: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_seconds, by_flops = figure.subplots(1, 2, sharey=True)
    for row in results:
        flops, losses = zip(*row["curve"], strict=True)
        for axes, x in ((by_seconds, row["clock"]), (by_flops, flops)):
            axes.plot(x, losses, marker=".", label=f"{row['label']}, width {row['width']}")
    by_seconds.set(xlabel="seconds of training", ylabel="held-out loss (nats)", yscale="log")
    by_flops.set(xlabel="training FLOPs", xscale="log")
    for axes in (by_seconds, by_flops):
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter(LogFormatter())  # 2, not 2 x 10^0
        axes.grid(alpha=0.3, which="both")
    by_seconds.legend()
    figure.suptitle(textwrap.fill(task.title, 120), fontsize="medium")
    figure.savefig(path, dpi=150, format="png")


def machine(device: str) -> str:
    name = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    return f"{platform.system()} {platform.machine()}, {name}"


# ---- the command line ----------------------------------------------------------------------------


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 2^32 - 1")
    return int(text)


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def working(device: str) -> str:
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # each backend has its own
        raise argparse.ArgumentTypeError(
            f"{device!r} does not work here: {str(error).splitlines()[0]}"
        ) from None
    return device


def structure_of(options: argparse.Namespace) -> structlin.Family:
    """The family that the options name.

    Raises:
        ValueError: an option that the family does not have, or one that it needs and did not get.
    """
    given = {
        name: getattr(options, name)
        for name in ("rank", "blocks")
        if getattr(options, name) is not None
    }
    needed = [
        field.name
        for field in fields(structlin.FAMILIES[options.structure])
        if field.default is MISSING
    ]
    if missing := [name for name in needed if name not in given]:
        raise ValueError(f"--structure {options.structure} needs --{missing[0]}")
    family = structlin.family(options.structure, **given)
    if options.between == "none":
        return family
    narrow = 2 * options.width  # an MLP's first layer, as `choose` has it
    if len(family.structure(narrow, 4 * narrow).cores) < 2:
        raise ValueError(f"--structure {options.structure} has one core: pass --between none")
    return family.activate(options.between)


def arguments(about: str, data: str, defaults: dict[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", metavar="PATH", type=Path, help=data)
    parser.add_argument(
        "--structure",
        choices=list(structlin.FAMILIES),
        help="the family of structures (default: %(default)s)",
    )
    text = "activation between the cores of a structure (default: %(default)s)"
    parser.add_argument("--between", choices=("none", "silu"), help=text)
    parser.add_argument("--rank", type=positive, help="of btt, tt and lowrank")
    parser.add_argument("--blocks", type=positive, help="of monarch and blockdiagonal")
    for name in (
        "width",
        "depth",
        "steps",
        "batch",
        *(["context"] if "context" in defaults else []),
    ):
        parser.add_argument(f"--{name}", type=positive, help="default: %(default)s")
    if "attention" in defaults:
        text = f"rank of BTT in attention, where --between is used (default: {ATTENTION})"
        parser.add_argument("--attention", type=positive, help=text)
    if "heads" in defaults:
        fixed = f"of {HEAD} features, at every width (default: {defaults['heads'] or FILL})"
        parser.add_argument("--heads", type=positive, help=fixed)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), help="default: %(default)s")
    best = f"{defaults.get('lr')} for adamw and {MUON_LR} for muon"
    parser.add_argument("--lr", type=rate, help=f"of all runs (default: {best})")
    parser.add_argument("--seed", type=seed, help="default: %(default)s")
    parser.add_argument("--device", type=working, help="default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--amp", action="store_true", help="products in bfloat16, by autocast")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="for checkpoints, plot and results.json"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="of the results (default: results.json in --out)"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny sizes, a few steps; in a temporary folder without --out",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    same = {"structure": "btt", "between": "none", "seed": 0, "optimizer": "adamw"}
    parser.set_defaults(**{**same, **defaults, "lr": None}, device=device)
    return parser


def main(
    make: Callable[[argparse.Namespace], Task],
    about: str,
    *,
    data: str,
    defaults: dict[str, Any],
    smoke: dict[str, Any],
    argv: list[str] | None = None,
) -> list[dict[str, Any]]:
    """The whole program. A bad option, file or checkpoint ends it with one message before anything
    runs.

    Args:
        make: options -> task.
        about, data: help texts, of the program and of `--data`.
        defaults, smoke: options' defaults, and those that `--smoke` changes.

    Returns:
        One row per run, as in `results.json`.
    """
    parser = arguments(about, data, defaults)
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**smoke, out=None)
    options = parser.parse_args(argv)
    options.other_lr = defaults["lr"]  # what muon leaves to adamw
    options.lr = options.lr or (MUON_LR if options.optimizer == "muon" else options.other_lr)
    console = Console(width=None if sys.stdout.isatty() else 120)
    kept = options.out is not None
    with nullcontext(options.out) if kept else tempfile.TemporaryDirectory() as folder:
        options.out = Path(folder)
        try:
            task = make(options)
            runs = choose(task, options)
            for run in runs:
                load(run)  # a checkpoint in the way is an error now
            options.out.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        structlin.show_config()  # builds the engine, so that no step's seconds have that in them
        try:
            histories = train_all(task, runs, options, console)
        except KeyboardInterrupt:
            where = f"; the same command goes on from the checkpoints in {folder}" if kept else ""
            raise SystemExit(f"interrupted{where}") from None
        results = rows(task, runs, histories, options)
        console.print(table(task, results))
        with replacing(options.out / "loss.png") as path:
            plot(task, results, path)
        with replacing(options.json or options.out / "results.json") as path:
            command = " ".join([Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)])
            about_run = {
                "machine": machine(options.device),
                "torch": torch.__version__,
                "seed": options.seed,
            }
            everything = {**about_run, "command": command, "title": task.title, "rows": results}
            path.write_text(json.dumps(everything, indent=1) + "\n")
        if kept:
            console.print(f"checkpoints, loss.png and results.json are in {folder}")
    return results


def train_all(
    task: Task, runs: list[Run], options: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """Their histories. They take turns of `TURN` steps; a finished run is only read."""
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeRemainingColumn(),
    ]
    histories: dict[str, dict[str, Any]] = {}
    with Progress(*columns, console=console) as progress:
        bars = {
            run.name: progress.add_task(str(run), total=options.steps, loss="-") for run in runs
        }
        courses = {run.name: train(task, run, runs[0], options) for run in runs}
        while courses:
            for name, course in list(courses.items()):
                for history in islice(course, TURN):
                    histories[name] = history
                    loss = f"{history['losses'][-1]:.3f}"
                    progress.update(bars[name], completed=len(history["losses"]), loss=loss)
                if len(histories[name]["losses"]) == options.steps:
                    del courses[name]
    return [histories[run.name] for run in runs]
