"""How should a converted layer start? Models by others, trained from scratch by the README's lines.

    python -m benchmarks.training.starts                   # in full: results/starts.{json,png}
    python -m benchmarks.training.starts --nanogpt FOLDER  # with model.py of a checkout
    python -m benchmarks.training.starts --smoke           # seconds

Every model is built by its own code, with its own initialisation. Then `convert` replaces its
linear layers, all but the head, by structured ones of equal width, in one of these ways:

    match        init="match": the Frobenius norm of the dense weight, by the last core
    evenly       the same norm, shared evenly by the cores
    mup          init="mup": muP's scale, whatever the model's own initialisation is
    match, norm  "match" with weight normalisation
    match, ends  "match", and the last layer of each residual branch starts at zero
    mup, ends    "mup", and the last layer of each residual branch starts at zero
    paper        "mup, ends" with weight normalisation, and an untied head starts at zero, as in
                 "Compute Better Spent"

AdamW by `param_groups`, or Muon. The learning rate is the dense model's best of factors of 2 (on
seed 0); "tuned" is each start's own best, searched in the same way. The held-out loss is that of
the last step. A run has one thread, and runs that an earlier result in --out has are not repeated.
"""

import gzip
import io
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import structlin
from benchmarks.harness.experiment import Job, Runs, climb, parser, result_path
from benchmarks.harness.record import RESULTS
from benchmarks.harness.report import table
from benchmarks.harness.statistics import best, curve_of_rates, student, untried
from benchmarks.harness.tasks import digits
from benchmarks.zoo import import_timm
from structlin import BTT, LowRank, Monarch, StructuredLinear

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import compare
import train_gpt
import train_mlp_lm

CONTEXT, WINDOW = 32, 16  # characters that a GPT reads, and the MLP
MODELS = ("GPT-2", "nanoGPT", "ViT", "MLP")
STRUCTURES = {
    "BTT r=1": BTT(rank=1),
    "Monarch 4": Monarch(blocks=4),
    "low-rank 16": LowRank(rank=16),
}
STARTS = ("match", "evenly", "mup", "match, norm", "match, ends", "mup, ends", "paper")
FIRST_RATES = {"AdamW": 1e-3, "Muon": 0.01}  # where the search for dense's begins
SOME = ("GPT-2", "ViT")  # the models of what BTT and AdamW are not
TUNED = [(name, "AdamW", "BTT r=1") for name in SOME]  # each start at its own best rate too
TITLES = ("model", "optimizer", "structure", "start", "lr", "seed")
ENDS = {  # the last layers of residual branches
    "GPT-2": ["*c_proj"],
    "nanoGPT": ["*c_proj"],
    "ViT": ["*attn.proj", "*mlp.fc2"],
    "MLP": ["blocks.*"],
}
HEADS = {"ViT": "head", "MLP": "lm_head"}  # GPTs tie theirs to the embedding
FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
Key = tuple[str, str, str, str]  # model, optimizer, structure, start
Run = tuple[str, str, str, str, float, int]  # and learning rate, seed
Row = dict[str, Any]
ROUNDS = 100  # of a search, at most


@dataclass(frozen=True)
class Sizes:
    """Of the models, the MLP's width apart, which is 4 times as large, and of what they read."""

    width: int = 128
    depth: int = 2
    steps: int = 400
    batch: int = 8  # sequences; twice as many images, 8 times as many windows of the MLP
    heldout: int = 256  # sequences; 4 times as many images, 16 times as many windows


# ---- models and data -----------------------------------------------------------------------------


def build(name: str, sizes: Sizes, vocabulary: int, nanogpt: Path | None) -> nn.Module:
    """The dense model, made and initialised by its own code."""
    width, depth = sizes.width, sizes.depth
    if name == "GPT-2":
        from transformers import GPT2Config, GPT2LMHeadModel

        shape = {"n_positions": CONTEXT, "n_embd": width, "n_layer": depth, "n_head": 4}
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **shape, **drops, **ends))
    if name == "nanoGPT":
        owner: Any = load_nanogpt(nanogpt)
        shape = {"block_size": CONTEXT, "n_embd": width, "n_layer": depth, "n_head": 4}
        with redirect_stdout(io.StringIO()):  # it prints how many parameters it has
            return owner.GPT(owner.GPTConfig(vocab_size=vocabulary, bias=False, **shape))
    if name == "ViT":
        import_timm()
        from timm.models.vision_transformer import VisionTransformer

        shape = {"img_size": 28, "patch_size": 7, "in_chans": 1, "embed_dim": width}
        return VisionTransformer(num_classes=vocabulary, depth=depth, num_heads=4, **shape)
    return train_mlp_lm.MLP(vocabulary, WINDOW, 4 * width, depth + 1)


def load_nanogpt(folder: Path | None) -> ModuleType:
    assert folder is not None
    spec = spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["nanogpt_model"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def loss_of(name: str, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    if name == "nanoGPT":
        return model(inputs, targets)[1]
    logits = model(inputs).logits if name == "GPT-2" else model(inputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Characters:
    """The standard library's text: windows, and the characters after each (the MLP: after the
    last)."""

    def __init__(self, context: int, batch: int, heldout: int) -> None:
        codes = torch.frombuffer(bytearray(train_gpt.read_text(None), "ascii"), dtype=torch.uint8)
        kinds, ids = codes.unique(return_inverse=True)
        cut = len(ids) - len(ids) // 10
        self.vocabulary, self.context, self.train = len(kinds), context, ids[:cut]
        self.batch_size, held = batch, ids[cut:]
        starts = torch.linspace(0, len(held) - context - 1, heldout).long()
        self.heldout = self.windows(held, starts)

    def windows(self, ids: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        window = ids[starts[:, None] + torch.arange(self.context + 1)]  # (batch, context + 1)
        targets = window[:, 1:] if self.context == CONTEXT else window[:, -1]
        return window[:, :-1], targets.contiguous()

    def batch(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        last = len(self.train) - self.context
        return self.windows(self.train, torch.randint(last, (self.batch_size,), generator=random))


class Images:
    """Fashion-MNIST; where it is not installed, a smoke run has scikit-learn's digits, enlarged."""

    vocabulary = 10

    def __init__(self, batch: int, heldout: int) -> None:
        if FASHION.is_dir():
            images = read_idx("train-images-idx3-ubyte", header=16)
            labels = read_idx("train-labels-idx1-ubyte", header=8)
            x, y = images.view(-1, 1, 28, 28).float() / 255, labels.long()
            x = (x - 0.286) / 0.353
        else:
            flat, y = digits()
            x = F.interpolate(flat.view(-1, 1, 8, 8), size=28)
        self.batch_size, self.x, self.y = batch, x[heldout:], y[heldout:]
        self.heldout = x[:heldout], y[:heldout]

    def batch(self, random: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(self.x), (self.batch_size,), generator=random)
        return self.x[chosen], self.y[chosen]


def read_idx(name: str, header: int) -> Tensor:
    with gzip.open(FASHION / f"{name}.gz") as file:
        return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)


@cache
def load(name: str, batch: int, heldout: int) -> Characters | Images:
    if name == "ViT":
        return Images(2 * batch, 4 * heldout)
    if name == "MLP":
        return Characters(WINDOW, 8 * batch, 16 * heldout)
    return Characters(CONTEXT, batch, heldout)


# ---- a run ---------------------------------------------------------------------------------------


def start(model: nn.Module, name: str, structure: str, way: str) -> nn.Module:
    """Convert the model in one of the ways above."""
    start, _, more = way.partition(", ")
    init = "mup" if start in ("mup", "paper") else "match"
    zeros = ENDS[name] if "paper" in way or more == "ends" else ()
    norm = "paper" in way or more == "norm"
    options: dict[str, Any] = {"init": init, "zero_init": zeros, "weight_norm": norm}
    model = structlin.convert(model, STRUCTURES[structure], **options)
    if way == "paper" and name in HEADS:
        nn.init.zeros_(model.get_submodule(HEADS[name]).weight)
    if way == "evenly":
        share_evenly(model)
    return model


@torch.no_grad()
def share_evenly(model: nn.Module) -> None:
    """Share the factor of the last core between all cores of a layer."""
    for layer in (m for m in model.modules() if isinstance(m, StructuredLinear)):
        share = layer.init_scale ** (1 / len(layer.cores))
        for core in layer.cores:
            core.mul_(share)
        layer.cores[-1].div_(layer.init_scale)


def train(job: Mapping[str, Any], sizes: Sizes, nanogpt: Path | None) -> Row:
    name, optimizer_name, structure, way, lr, seed = (job[title] for title in TITLES)
    data = load(name, sizes.batch, sizes.heldout)
    torch.manual_seed(seed)
    model = build(name, sizes, data.vocabulary, nanogpt)
    if way != "dense":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that small layers grow
            model = start(model, name, structure, way)
    if optimizer_name == "AdamW":
        groups = structlin.param_groups(model, lr)
        optimizer: Any = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    else:
        optimizer = structlin.optim.Muon(model, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: compare.warmup_cosine(step, sizes.steps)
    )
    random = torch.Generator().manual_seed(seed)
    for _ in range(sizes.steps):
        loss = loss_of(name, model, *data.batch(random))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        parts = zip(*(tensor.split(256) for tensor in data.heldout), strict=True)
        held = [loss_of(name, model.eval(), *part).item() for part in parts]
    final = fmean(held)
    return {"loss": final if math.isfinite(final) else None}


def train_job(sizes: Sizes, nanogpt: Path | None, **job: Any) -> Row:
    return train(job, sizes, nanogpt)


# ---- the experiment ------------------------------------------------------------------------------


def plan_starts(models: Iterable[str]) -> list[Key]:
    """What is compared with dense: BTT under AdamW in every way, the rest on two of the models."""
    keys = [(name, "AdamW", "BTT r=1", way) for name in models for way in STARTS]
    for name, way in product(SOME, ("match", "mup", "mup, ends")):
        keys += [(name, "AdamW", structure, way) for structure in ("Monarch 4", "low-rank 16")]
        keys.append((name, "Muon", "BTT r=1", way))
    return keys


def curve_of(rows: Iterable[Row], key: Key) -> dict[float, float]:
    """Learning rate -> held-out loss on seed 0."""
    return {
        row["lr"]: math.inf if row["loss"] is None else row["loss"]
        for row in rows
        if key_of(row) == key and row["seed"] == 0
    }


def key_of(row: Row) -> Key:
    return row["model"], row["optimizer"], row["structure"], row["start"]


def job_of(key: Key) -> Job:
    return dict(zip(TITLES, key, strict=False))


def dense_of(key: Key) -> Key:
    return key[0], key[1], "", "dense"


def next_rates(rows: list[Row], start: float) -> list[Job]:
    of_first = [row for row in rows if row["seed"] == 0]
    return [{"lr": lr} for lr in untried(curve_of_rates(of_first), start)]


def compare_starts(rows: Sequence[Row], rate_of: Callable[[Key], float]) -> dict[Key, list[float]]:
    """Log of the loss over dense's of the same seed, by seed, at `rate_of` each key; dense has its
    own best rate. A run that diverged is infinite."""
    losses = {
        (*key_of(row), row["lr"], row["seed"]): math.inf if row["loss"] is None else row["loss"]
        for row in rows
    }
    found: dict[Key, list[float]] = {}
    for key in dict.fromkeys(key_of(row) for row in rows):
        dense = dense_of(key)
        own, base = rate_of(key), best(curve_of(rows, dense))
        seeds = [run[-1] for run in losses if run[:5] == (*key, own)]
        pairs = [(losses[(*key, own, n)], losses.get((*dense, base, n))) for n in sorted(seeds)]
        found[key] = [math.log(loss / least) for loss, least in pairs if least is not None]
    return found


def show(result: Mapping[str, Any], which: str = "at dense's rate") -> str:
    """Markdown: by how many percent losses are above dense's, see `say`."""
    rows = result["rows"]

    def rate_of(key: Key) -> float:
        return best(curve_of(rows, key if which == "tuned" else dense_of(key)))

    found = compare_starts(rows, rate_of)
    lines = []
    for name, optimizer, structure in dict.fromkeys(key[:3] for key in found if key[2]):
        cells = []
        for way in STARTS:
            key = (name, optimizer, structure, way)
            logs = found.get(key, [])
            searched = which != "tuned" or not untried(curve_of(rows, key), 1.0)
            complete = searched and len(logs) == result["setting"]["seeds"]
            cells.append(say(logs) if complete else "")
        if any(cells):
            lines.append([f"{name}, {optimizer}, {structure}", *cells])
    used = [n for n in range(len(STARTS)) if any(line[n + 1] for line in lines)]
    lines = [[line[0], *(line[n + 1] for n in used)] for line in lines]
    return table(["% over dense", *(STARTS[n] for n in used)], lines)


def say(logs: Sequence[float]) -> str:
    """The mean in percent, and how far the 95 % interval reaches from it.

    >>> say([0.01, 0.02, 0.03]), say([0.01])
    ('+2.0 ± 2.5', '+1.0')
    """
    percent = [100 * math.expm1(log) for log in logs]
    if len(percent) < 2 or not all(map(math.isfinite, percent)):
        return f"{fmean(percent):+.1f}"
    found = student(percent)
    return f"{found['value']:+.1f} ± {found['high'] - found['value']:.1f}"


def plot(rows: Sequence[Row]) -> Figure:
    """Each start's losses over dense's, at dense's rate, a point for each seed."""
    found = compare_starts(rows, lambda key: best(curve_of(rows, dense_of(key))))
    names = [name for name in MODELS if any(key[0] == name for key in found)]
    figure = Figure(figsize=(10, 3 * len(names)), layout="constrained")
    for axes, name in zip(figure.subplots(len(names), 1, squeeze=False)[:, 0], names, strict=True):
        groups = list(dict.fromkeys(key[1:3] for key in found if key[0] == name and key[2]))
        for n, way in enumerate(STARTS):
            points = [
                (place + 0.1 * (n - 3), 100 * math.expm1(log))
                for place, group in enumerate(groups)
                for log in found.get((name, *group, way), [])
            ]
            if points:
                axes.plot(*zip(*points, strict=True), "o", markersize=4, label=way)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(title=name, ylabel="held-out loss over dense's (%)")
        axes.set_xticks(range(len(groups)), [", ".join(group) for group in groups])
    figure.axes[0].legend(ncols=4, fontsize="small")
    return figure


def main() -> None:
    arguments = parser(__doc__, RESULTS)
    arguments.add_argument("--steps", type=int, default=Sizes.steps)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT; without it none")
    options = arguments.parse_args()
    sizes = replace(Sizes(), steps=options.steps)
    if options.smoke:
        options.seeds, sizes = 1, Sizes(width=32, depth=1, steps=2, batch=2, heldout=2)
    models = [name for name in MODELS if name != "nanoGPT" or options.nanogpt]
    setting = {"sizes": asdict(sizes), "seeds": options.seeds}
    if not FASHION.is_dir():
        if not options.smoke:
            raise SystemExit(f"the ViT reads Fashion-MNIST from {FASHION}: install its package")
        setting["images"] = "digits"

    runs = Runs(
        train_job,
        TITLES,
        options,
        path=result_path(options, "starts"),
        setting=setting,
        sizes={"sizes": sizes, "nanogpt": options.nanogpt},
    )

    def run(jobs: Sequence[Run]) -> None:
        runs.of(dict(zip(TITLES, job, strict=True)) for job in jobs)

    keys = plan_starts(models)
    if options.smoke:
        keys = keys[::2]
    dense = list(dict.fromkeys(map(dense_of, keys)))
    if options.smoke:
        run([(*key, FIRST_RATES[key[1]], 0) for key in (*dense, *keys)])
    else:
        for optimizer, first in FIRST_RATES.items():
            own = [key for key in keys if key[1] == optimizer]
            base = list(dict.fromkeys(map(dense_of, own)))
            climb(runs, [(job_of(key), first) for key in base], next_rates, [0], ROUNDS)
            rows = runs.all()
            rates = {key: best(curve_of(rows, key)) for key in base}
            seeds = range(options.seeds)
            run([(*key, rates[dense_of(key)], n) for n in seeds for key in (*base, *own)])
        tuned = [key for key in keys if key[:3] in TUNED]
        rows = runs.all()
        places = [(job_of(key), best(curve_of(rows, dense_of(key)))) for key in tuned]
        climb(runs, places, next_rates, [0], ROUNDS)
        rows = runs.all()
        run([(*key, best(curve_of(rows, key)), n) for n in seeds for key in tuned])
    rows = runs.all()
    result = {"setting": setting, "rows": rows}
    print(show(result), show(result, "tuned"), sep="\n\n")
    runs.save()
    if runs.path:
        plot(rows).savefig(runs.path.with_suffix(".png"), dpi=90)


if __name__ == "__main__":
    main()
