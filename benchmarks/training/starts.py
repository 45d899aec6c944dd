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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import structlin
from benchmarks.harness import figures, training
from benchmarks.harness.experiment import Axis, Experiment, Job, Row, Runs, Tune, tune
from benchmarks.harness.report import table
from benchmarks.harness.statistics import log_loss, seeds_of, select, student, tuned_on_first
from benchmarks.harness.tasks import (
    Batch,
    Samples,
    Windows,
    compare,
    digits,
    of_examples,
    train_gpt,
    train_mlp_lm,
)
from benchmarks.zoo import import_timm
from structlin import BTT, LowRank, Monarch, StructuredLinear

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
TITLES = ("model", "optimizer", "structure", "start")
SIZES = {  # of the models, the MLP's width apart, which is 4 times as large, and of what they read
    "width": 128,
    "depth": 2,
    "steps": 400,
    "batch": 8,  # sequences; twice as many images, 8 times as many windows of the MLP
    "heldout": 256,  # sequences; 4 times as many images, 16 times as many windows
}
ENDS = {  # the last layers of residual branches
    "GPT-2": ["*c_proj"],
    "nanoGPT": ["*c_proj"],
    "ViT": ["*attn.proj", "*mlp.fc2"],
    "MLP": ["blocks.*"],
}
HEADS = {"ViT": "head", "MLP": "lm_head"}  # GPTs tie theirs to the embedding
FASHION = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
Key = tuple[str, ...]  # the values of TITLES
Sizes = Mapping[str, int]


# ---- models and data -----------------------------------------------------------------------------


def build(name: str, sizes: Sizes, vocabulary: int, nanogpt: str = "") -> nn.Module:
    """The dense model, made and initialised by its own code."""
    width, depth = sizes["width"], sizes["depth"]
    if name == "GPT-2":
        from transformers import GPT2Config, GPT2LMHeadModel

        shape = {"n_positions": CONTEXT, "n_embd": width, "n_layer": depth, "n_head": 4}
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **shape, **drops, **ends))
    if name == "nanoGPT":
        owner: Any = load_nanogpt(Path(nanogpt))
        shape = {"block_size": CONTEXT, "n_embd": width, "n_layer": depth, "n_head": 4}
        with redirect_stdout(io.StringIO()):  # it prints how many parameters it has
            return owner.GPT(owner.GPTConfig(vocab_size=vocabulary, bias=False, **shape))
    if name == "ViT":
        import_timm()
        from timm.models.vision_transformer import VisionTransformer

        shape = {"img_size": 28, "patch_size": 7, "in_chans": 1, "embed_dim": width}
        return VisionTransformer(num_classes=vocabulary, depth=depth, num_heads=4, **shape)
    return train_mlp_lm.MLP(vocabulary, WINDOW, 4 * width, depth + 1)


def load_nanogpt(folder: Path) -> ModuleType:
    spec = spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["nanogpt_model"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


def loss_of(name: str, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    if name == "nanoGPT":
        return model(inputs, targets.contiguous())[1]
    logits = model(inputs).logits if name == "GPT-2" else model(inputs)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def load(name: str, seed: int, sizes: Sizes) -> tuple[Samples | Windows, int, int]:
    """What a model reads, how many samples a batch has, and how many are held out."""
    batch, heldout = sizes["batch"], sizes["heldout"]
    if name == "ViT":
        x, y = read_images()
        held = 4 * heldout
        return Samples((x[held:], y[held:]), (x[:held], y[:held]), seed), 2 * batch, held
    if name == "MLP":
        text = read_text(train_mlp_lm.NextCharacter, WINDOW, 16 * heldout)
        return Windows(text, seed), 8 * batch, 16 * heldout
    return Windows(read_text(train_gpt.Text, CONTEXT, heldout), seed), batch, heldout


@cache
def read_text(kind: type[train_gpt.Text], context: int, heldout: int) -> train_gpt.Text:
    """The standard library's by characters, with so many windows held out."""
    held = type(kind.__name__, (kind,), {"heldout_windows": heldout})
    return of_examples(held, 0, context=context, depth=0, batch=0)


@cache
def read_images() -> Batch:
    """Fashion-MNIST; where it is not installed, a smoke run has scikit-learn's digits, enlarged."""
    if not FASHION.is_dir():
        flat, labels = digits()
        return F.interpolate(flat.view(-1, 1, 8, 8), size=28), labels
    images = read_idx("train-images-idx3-ubyte", header=16)
    labels = read_idx("train-labels-idx1-ubyte", header=8)
    return (images.view(-1, 1, 28, 28).float() / 255 - 0.286) / 0.353, labels.long()


def read_idx(name: str, header: int) -> Tensor:
    with gzip.open(FASHION / f"{name}.gz") as file:
        return torch.frombuffer(bytearray(file.read()[header:]), dtype=torch.uint8)


# ---- a run ---------------------------------------------------------------------------------------


def restart(model: nn.Module, name: str, structure: str, way: str) -> nn.Module:
    """Convert the model in one of the ways above."""
    start, _, more = way.partition(", ")
    options: dict[str, Any] = {
        "init": "mup" if start in ("mup", "paper") else "match",
        "zero_init": ENDS[name] if "paper" in way or more == "ends" else (),
        "weight_norm": "paper" in way or more == "norm",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that small layers grow
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


def train(
    model: str,
    optimizer: str,
    structure: str,
    start: str,
    lr: float,
    seed: int,
    sizes: Sizes,
    nanogpt: str = "",
) -> Row:
    data, batch, heldout = load(model, seed, sizes)
    torch.manual_seed(seed)
    vocabulary = data.text.vocabulary if isinstance(data, Windows) else 10
    net = build(model, sizes, vocabulary, nanogpt)
    if start != "dense":
        net = restart(net, model, structure, start)
    if optimizer == "AdamW":
        groups = structlin.param_groups(net, lr)
        descent: Any = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    else:
        descent = structlin.optim.Muon(net, lr)

    def loss(step: int) -> Tensor:
        return loss_of(model, net, *data.batch(batch))

    rate = partial(compare.warmup_cosine, steps=sizes["steps"])
    if not training.descend(descent, loss, sizes["steps"], schedule=rate):
        return {"loss": None}
    with torch.no_grad():
        parts = zip(*(tensor.split(256) for tensor in data.new(heldout)), strict=True)
        held = [loss_of(model, net.eval(), *part).item() for part in parts]
    return {"loss": training.finite(fmean(held))}


# ---- the runs ------------------------------------------------------------------------------------


def plan_starts(models: Iterable[str]) -> list[Key]:
    """What is compared with dense: BTT under AdamW in every way, the rest on two of the models."""
    keys: list[Key] = [(name, "AdamW", "BTT r=1", way) for name in models for way in STARTS]
    some = [name for name in SOME if name in models]
    for name, way in product(some, ("match", "mup", "mup, ends")):
        keys += [(name, "AdamW", structure, way) for structure in ("Monarch 4", "low-rank 16")]
        keys.append((name, "Muon", "BTT r=1", way))
    return keys


def dense_of(key: Key) -> Key:
    return key[0], key[1], "", "dense"


def job_of(key: Key) -> Job:
    return dict(zip(TITLES, key, strict=True))


def design(runs: Runs, axes: Mapping[str, Axis]) -> list[Row]:
    """Dense, tuned; every start at dense's rate; then some at their own."""
    runs.sizes["nanogpt"] = nanogpt = runs.options.nanogpt
    smoke, seeds = runs.options.smoke, axes["seed"]
    if not (smoke or FASHION.is_dir()):
        raise SystemExit(f"the ViT reads Fashion-MNIST from {FASHION}: install its package")
    keys = plan_starts([name for name in axes["model"] if name != "nanoGPT" or nanogpt])
    keys = keys[::2] if smoke else keys
    rates = {}
    for dense in dict.fromkeys(map(dense_of, keys)):
        found = tune(runs, job_of(dense), seeds, Tune(lambda job: FIRST_RATES[job["optimizer"]]))
        rates[dense] = lr = tuned_on_first(found)[0]["lr"]
        own = [job_of(key) for key in keys if dense_of(key) == dense]
        runs.of({**job, "lr": lr, "seed": seed} for job in own for seed in seeds)
    for key in keys:
        if key[:3] in TUNED:
            first = rates[dense_of(key)]
            tune(runs, job_of(key), seeds, Tune(lambda job, first=first: first))
    return runs.all()


# ---- what is found -------------------------------------------------------------------------------


def compare_starts(rows: Sequence[Row], *, tuned: bool = False) -> dict[Key, list[float]]:
    """Log of the loss over dense's of the same seed, by seed, at dense's best rate or, `tuned`, at
    each one's own. A run that diverged is infinite."""
    found: dict[Key, list[float]] = {}
    for key in dict.fromkeys(tuple(row[name] for name in TITLES) for row in rows):
        dense = tuned_on_first(rows, **job_of(dense_of(key)))
        mine = select(rows, **job_of(key))
        mine = tuned_on_first(mine) if tuned else select(mine, lr=dense[0]["lr"])
        ours, theirs = ({row["seed"]: log_loss(row) for row in each} for each in (mine, dense))
        found[key] = [ours[seed] - theirs[seed] for seed in sorted(ours)]
    return found


def show(result: Row, *, tuned: bool = False) -> str:
    """Markdown: by how many percent losses are above dense's, see `say`."""
    rows, lines = result["rows"], []
    found, seeds = compare_starts(rows, tuned=tuned), len(seeds_of(rows))
    cells = {key: say(logs) for key, logs in found.items() if key[2] and len(logs) == seeds}
    if tuned:
        cells = {key: cell for key, cell in cells.items() if key[:3] in TUNED}
    used = [way for way in STARTS if any(key[3] == way for key in cells)]
    for group in dict.fromkeys(key[:3] for key in cells):
        lines.append([", ".join(group), *(cells.get((*group, way), "") for way in used)])
    return table(["% over dense", *used], lines)


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


def draw(result: Row) -> figures.Figure:
    """Each start's losses over dense's, at dense's rate, a point for each seed."""
    found = compare_starts(result["rows"])
    names = [name for name in MODELS if any(key[0] == name for key in found)]
    figure, grid = figures.panels(names, columns=2, size=5)
    for axes, name in zip(grid, names, strict=True):
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
        axes.set_ylabel("held-out loss over dense's (%)")
        axes.set_xticks(range(len(groups)), [", ".join(group) for group in groups])
    grid[0].legend(ncols=4, fontsize="small")
    return figure


EXPERIMENT = Experiment(
    name="starts",
    about=__doc__,
    run=train,
    axes={
        "model": [*MODELS],
        "optimizer": lambda job: FIRST_RATES,
        "structure": lambda job: STRUCTURES,
        "start": lambda job: STARTS,
        "lr": [],
    },
    sizes={"sizes": SIZES},
    note={"seeds": 3, **({} if FASHION.is_dir() else {"images": "digits"})},
    smoke={"sizes": {"width": 32, "depth": 1, "steps": 2, "batch": 2, "heldout": 2}, "seeds": 1},
    extra={"nanogpt": ""},
    design=design,
    analyse=lambda rows: {},
    show=lambda result: (show(result), show(result, tuned=True)),
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
