"""GPTs on characters, in nanoGPT's manner, dense and structured, with the same training FLOPs.

    python examples/train_gpt.py            # four minutes on a CPU core; seconds with --smoke

They learn the text of Python's standard library. Each has the width and the rates that were the
best for 1e12 FLOPs in benchmarks/training/iso_flops.py, and as many steps as its FLOPs allow: what
costs less in a step trains for longer. Sources: nanoGPT (github.com/karpathy/nanoGPT); muP as in
Yang et al. 2022 (arXiv:2203.03466); isoFLOP curves as in Hoffmann et al. 2022 (arXiv:2203.15556).
On a GPU: --device cuda --amp.
"""

import argparse
import json
import math
import pydoc_data.topics
import sys
import time
from pathlib import Path
from sysconfig import get_path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import structlin

MLP = structlin.BTT(rank=4).activate()  # the structure of MLPs, with SiLU between its cores
ATTENTION = structlin.BTT(rank=4)  # the structure of attention
HEAD = 32  # features of an attention head, at every width; muP divides by HEAD, not by its root
HEAD_STD = 0.02  # of the start of the output layer
TURNS = 50  # of each model; a slow minute of the machine slows all models
BASE_WIDTH = 256  # of the dense model for which the rates are; muP scales them to other widths
SIZES = {"budget": 1e12, "depth": 2, "context": 64, "batch": 8, "seed": 0}
SMOKE = {"budget": 4e8, "depth": 1, "context": 16, "batch": 2}


class Recipe(NamedTuple):
    """What a model is, and how it trains."""

    structured: bool
    optimizer: str
    width: int
    lr: float  # by AdamW of everything, by SOAP of hidden matrices
    other_lr: float  # of everything else


RECIPES = [
    Recipe(False, "AdamW", width=64, lr=2**-9, other_lr=2**-9),
    Recipe(True, "AdamW", width=64, lr=2**-9, other_lr=2**-9),
    Recipe(False, "SOAP", width=64, lr=2**-6, other_lr=2**-6),
    Recipe(True, "SOAP", width=96, lr=2**-5, other_lr=2**-7),
]


# ---- the model -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn_norm = nn.LayerNorm(width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.attn_in = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):  # (batch, tokens, width)
        heads = self.attn_in(self.attn_norm(x)).unflatten(-1, (3, -1, HEAD))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, HEAD)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / HEAD)
        x = x + self.attn_out(y.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, depth, width):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        initialise(self, embedding=0.2)

        # Positions are learned. They start as waves, sin(p w) and cos(p w) for position p and
        # width / 2 frequencies w, so that attention soon finds the tokens before. The wavelengths
        # grow from 2 pi to 4 pi * context. The factor sqrt(2) gives the waves an RMS of 1.
        frequencies = (2 * context) ** -(torch.arange(0, width, 2) / width)
        angles = torch.arange(context)[:, None] * frequencies  # (context, width / 2)
        waves = math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=1)  # (context, width)
        self.positions.weight.data.copy_(0.2 * waves)

    def forward(self, ids):  # (batch, tokens) -> (batch, tokens, vocabulary)
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def initialise(model, embedding):
    """muP: 1 / sqrt(fan_in), but zero for the head and the last layer of each residual branch."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if name.endswith(("head", "_out")):
                nn.init.zeros_(module.weight)
            else:
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=embedding)


# ---- the data ------------------------------------------------------------------------------------


def read_text(path):
    """The sorted characters of a text, and the index of each of its characters among them.

    `path` None is the text of Python's standard library: its documentation and its modules.
    """
    text = read_standard_library() if path is None else path.read_text("utf-8")
    code_points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    characters, ids = code_points.unique(return_inverse=True)
    return characters, ids


def read_standard_library():
    topics = pydoc_data.topics.topics
    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(Path(get_path("stdlib")).glob("*.py")):
        texts.append(path.read_text("utf-8", "ignore"))
    return "\n".join(texts).encode("ascii", "ignore").decode()


class Windows:
    """Windows of a text and the characters that follow; the last tenth of the text is held out."""

    def __init__(self, ids, context, batch_size, seed, heldout_windows=128, heldout_batch=32):
        self.context = context
        self.batch_size = batch_size
        self.seed = seed
        train_count = len(ids) - len(ids) // 10
        self.train_ids = ids[:train_count]
        heldout_ids = ids[train_count:]
        starts = torch.linspace(0, len(heldout_ids) - context - 1, heldout_windows).long()
        self.heldout = [self.cut(heldout_ids, chunk) for chunk in starts.split(heldout_batch)]

    def cut(self, ids, starts):
        """x and y, `(windows, context)` each; y is one character later."""
        windows = ids[starts[:, None] + torch.arange(self.context + 1)]
        return windows[:, :-1], windows[:, 1:]

    def batch(self, step):
        """The batch of a step. It depends on the seed and the step alone."""
        random = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        start_count = len(self.train_ids) - self.context
        starts = torch.randint(start_count, (self.batch_size,), generator=random)
        return self.cut(self.train_ids, starts)


# ---- training ------------------------------------------------------------------------------------


class Run:
    """A model and its optimizer, and how its training goes."""

    def __init__(self, label, model, optimizer, steps, params, flops_per_token, options):
        self.label = label
        self.model = model
        self.optimizer = optimizer
        self.steps = steps
        self.params = params
        self.flops_per_token = flops_per_token  # of a forward pass
        self.options = options
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.relative_rate)
        self.seconds = 0.0
        self.losses = []  # (steps so far, held-out loss)

    def relative_rate(self, step):
        """The learning rate over its peak: a line up, then a cosine down to a tenth."""
        steps = self.steps
        # 5 % of the steps; a short run takes up to 50 steps, but no more than 20 %
        warmup = max(1, steps // 20, min(50, steps // 5))
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return 0.55 + 0.45 * math.cos(math.pi * progress)

    def loss(self, x, y, reduction="mean"):
        device = self.model.head.weight.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.options.amp):
            logits = self.model(x.to(device))
            return F.cross_entropy(logits.flatten(0, -2), y.to(device).ravel(), reduction=reduction)

    def step(self, x, y):
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.optimizer.step()
        self.schedule.step()

    @torch.no_grad()
    def evaluate(self, steps_done, heldout):
        total_loss = 0
        total_targets = 0
        for x, y in heldout:
            total_loss += self.loss(x, y, "sum").item()
            total_targets += y.numel()
        loss = total_loss / total_targets
        self.losses.append((steps_done, loss))
        optimizer = type(self.optimizer).__name__
        width = self.model.head.in_features
        print(
            f"{self.label:18}{optimizer:6}{width:5}   "
            f"step {steps_done:4}{loss:9.4f}{self.seconds:8.1f} s",
            flush=True,
        )


def make_run(label, build, width, make_optimizer, data, options, steps=None, head_std=0.0):
    """A run of the model `build(width)`. All models start from the same seed.

    It makes so many steps, or as many as `options.budget` allows. The head starts at zero, or with
    the standard deviation `head_std`.
    """
    torch.manual_seed(options.seed)
    model = build(width)
    nn.init.normal_(model.head.weight, std=head_std)
    x, y = data.heldout[0]
    cost = structlin.cost(model, x[:1])
    tokens = y[:1].numel()  # that a window predicts
    flops_per_token = cost.flops // tokens
    if steps is None:
        # a backward pass takes twice the FLOPs of a forward pass
        flops_of_a_step = 3 * options.batch * tokens * flops_per_token
        steps = max(1, round(options.budget / flops_of_a_step))
    model.to(options.device)
    optimizer = make_optimizer(model)
    return Run(label, model, optimizer, steps, cost.params, flops_per_token, options)


def train(runs, data):
    """Train all runs, in turns. Step n of every run sees the same batch."""
    for turn in range(TURNS):
        for run in runs:
            evaluate_every = max(1, run.steps // 20)
            for step in range(turn * run.steps // TURNS, (turn + 1) * run.steps // TURNS):
                start = time.perf_counter()
                x, y = data.batch(step)
                run.step(x, y)
                run.seconds += time.perf_counter() - start

                steps_done = step + 1
                if steps_done % evaluate_every == 0 or steps_done == run.steps:
                    run.evaluate(steps_done, data.heldout)


# ---- the result ----------------------------------------------------------------------------------


def report(runs, data, options):
    """Print a table, write a plot and results.json, and return a row for each run."""
    _, y = data.heldout[0]
    tokens_per_step = options.batch * y[:1].numel()
    rows = [summarize(run, tokens_per_step) for run in runs]
    print(f"{'':24}width  parameters FLOPs/token   steps   ms/step     loss")
    line = "{label:18}{optimizer:6}{width:5}{params:12,}{flops:12,}{steps:8,}{ms:10.1f}{loss:9.4f}"
    for row in rows:
        print(line.format(**row))
    options.out.mkdir(parents=True, exist_ok=True)
    plot(rows, options.out / "loss.png")
    result = {"command": sys.argv, "seed": options.seed, "torch": torch.__version__, "rows": rows}
    (options.out / "results.json").write_text(json.dumps(result))
    return rows


def summarize(run, tokens_per_step):
    """What results.json keeps of a run."""
    seconds_per_step = run.seconds / run.steps
    clock = []  # seconds of training at each evaluation
    curve = []  # (training FLOPs so far, held-out loss)
    for steps_done, loss in run.losses:
        clock.append(round(steps_done * seconds_per_step, 2))
        # a backward pass takes twice the FLOPs of a forward pass
        curve.append((3 * steps_done * tokens_per_step * run.flops_per_token, loss))
    _, final_loss = run.losses[-1]
    return {
        "label": run.label,
        "params": run.params,
        "optimizer": type(run.optimizer).__name__,
        "width": run.model.head.in_features,
        "flops": run.flops_per_token,
        "steps": run.steps,
        "ms": round(1e3 * seconds_per_step, 2),
        "loss": final_loss,
        "clock": clock,
        "curve": curve,
    }


def plot(rows, path):
    """The held-out losses, against seconds on the left and against FLOPs on the right."""
    figure, (by_seconds, by_flops) = plt.subplots(
        1, 2, sharey=True, figsize=(11, 4.5), layout="constrained"
    )
    for row in rows:
        flops, losses = zip(*row["curve"], strict=True)
        by_seconds.plot(row["clock"], losses, label=f"{row['label']}, {row['optimizer']}")
        by_flops.plot(flops, losses)
    by_seconds.set(xlabel="seconds of training", ylabel="held-out loss (nats)", yscale="log")
    by_seconds.legend()
    by_flops.set(xlabel="training FLOPs", xscale="log")
    by_flops.tick_params(axis="x", which="both", labelrotation=45)
    figure.savefig(path, dpi=150)


# ---- the program ---------------------------------------------------------------------------------


def parse(about, out, sizes, smoke, argv):
    """The options of a program; with --smoke the sizes in `smoke` are the defaults."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a text file, UTF-8")
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action="store_true", help="bfloat16 by autocast")
    parser.add_argument("--smoke", action="store_true", help="seconds: does it run?")
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**smoke, out=Path("out/smoke"))
    return parser.parse_args(argv)


def start_run(recipe, build, data, options):
    """The run of a recipe. `build(width)` makes the dense model."""

    def build_structured(width):
        return structlin.convert(
            build(width), MLP, overrides={"*attn*": ATTENTION}, weight_norm=True, init="mup"
        )

    def make_optimizer(model):
        base = build(BASE_WIDTH)
        if recipe.optimizer == "SOAP":
            return structlin.optim.SOAP(model, recipe.lr, other_lr=recipe.other_lr, base=base)
        return structlin.optim.AdamW(
            model, recipe.lr, betas=(0.9, 0.95), weight_decay=0.0, base=base, fused=True
        )

    label = MLP.label if recipe.structured else "dense"
    build_model = build_structured if recipe.structured else build
    return make_run(
        label, build_model, recipe.width, make_optimizer, data, options, head_std=HEAD_STD
    )


def main(argv=None):
    options = parse(__doc__, "out/train_gpt", SIZES, SMOKE, argv)
    characters, ids = read_text(options.data)
    data = Windows(ids, options.context, options.batch, options.seed)

    def build(width):
        return GPT(len(characters), options.context, options.depth, width)

    structlin.StructuredLinear(8, 8)(torch.zeros(1, 8))  # builds the engine before times
    structlin.show_config()
    runs = [start_run(recipe, build, data, options) for recipe in RECIPES]
    train(runs, data)
    return report(runs, data, options)


if __name__ == "__main__":
    main()
