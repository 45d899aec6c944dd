"""A GPT on characters, in nanoGPT's manner: dense and structured layers side by side.

    python examples/train_gpt.py            # three minutes on two CPU cores; seconds with --smoke

They learn the text of Python's standard library. Sources: nanoGPT (github.com/karpathy/nanoGPT);
muP as in Yang et al. 2022 (arXiv:2203.03466). On a GPU: --device cuda --amp.
"""

import argparse
import json
import math
import pydoc_data.topics
import sys
import time
from pathlib import Path
from sysconfig import get_path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import structlin
from structlin.optim import SOAP, Muon

STRUCTURE = structlin.BTT(rank=4).activate()  # of the MLPs, with SiLU between its cores
CONVERT = {
    "overrides": {"*attn*": structlin.BTT(rank=4)},  # attention has no SiLU between its cores
    "weight_norm": True,
}
HEAD = 32  # features of an attention head, at every width; muP divides by HEAD, not by its root
TURN = 20  # steps until the next model has its turn; a slow minute of the machine slows all models
SIZES = {
    "width": 256,
    "depth": 2,
    "context": 64,
    "batch": 32,
    "steps": 250,
    "lr": 0.06,  # of hidden matrices
    "other_lr": 0.002,  # of everything else
    "seed": 0,
}
SMOKE = {"width": 64, "depth": 1, "context": 16, "batch": 2, "steps": 6}


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

    def __init__(self, label, model, optimizer, params, flops_per_token, options):
        self.label = label
        self.model = model
        self.optimizer = optimizer
        self.params = params
        self.flops_per_token = flops_per_token  # of a forward pass
        self.options = options
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.relative_rate)
        self.seconds = 0.0
        self.losses = []  # (steps so far, held-out loss)

    def relative_rate(self, step):
        """The learning rate over its peak: a line up, then a cosine down to a tenth."""
        steps = self.options.steps
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


def make_run(label, build, width, make_optimizer, data, options, head_std=0.0):
    """A run of the model `build(width)`. All models start from the same seed.

    The head starts at zero, or with the standard deviation `head_std`.
    """
    torch.manual_seed(options.seed)
    model = build(width)
    nn.init.normal_(model.head.weight, std=head_std)
    x, y = data.heldout[0]
    cost = structlin.cost(model, x[:1])
    flops_per_token = cost.flops // y[:1].numel()
    model.to(options.device)
    optimizer = make_optimizer(model)
    return Run(label, model, optimizer, cost.params, flops_per_token, options)


def train(runs, data, options):
    """Train all runs on the same batches, in turns of `TURN` steps."""
    evaluate_every = max(1, options.steps // 20)
    for turn_start in range(0, options.steps, TURN):
        turn_end = min(turn_start + TURN, options.steps)
        for run in runs:
            for step in range(turn_start, turn_end):
                start = time.perf_counter()
                x, y = data.batch(step)
                run.step(x, y)
                run.seconds += time.perf_counter() - start

                steps_done = step + 1
                if steps_done % evaluate_every == 0 or steps_done == options.steps:
                    run.evaluate(steps_done, data.heldout)


# ---- the result ----------------------------------------------------------------------------------


def report(runs, data, options):
    """Print a table, write a plot and results.json, and return a row for each run."""
    _, y = data.heldout[0]
    tokens_per_step = options.batch * y[:1].numel()
    rows = [summarize(run, tokens_per_step, options.steps) for run in runs]
    line = "{label:18}{optimizer:6}{width:5}{params:12,}{flops:12,}{ms:9.1f} ms{loss:9.4f}"
    for row in rows:
        print(line.format(**row))
    options.out.mkdir(parents=True, exist_ok=True)
    plot(rows, options.out / "loss.png")
    result = {"command": sys.argv, "seed": options.seed, "torch": torch.__version__, "rows": rows}
    (options.out / "results.json").write_text(json.dumps(result))
    return rows


def summarize(run, tokens_per_step, steps):
    """What results.json keeps of a run."""
    seconds_per_step = run.seconds / steps
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


def compare(build, data, options, head_std=0.0):
    """Dense by Muon, dense by SOAP, and as wide a structured model as dense's FLOPs allow by SOAP.

    `build(width)` makes the dense model.
    """
    x, _ = data.heldout[0]
    widened = structlin.widen(
        build, STRUCTURE, dense=options.width, example=x[:1], multiple=HEAD, **CONVERT
    )
    base = build(options.width)  # the rates are for this model; muP scales them to other widths

    def build_structured(width):
        return structlin.convert(build(width), STRUCTURE, init="mup", **CONVERT)

    def muon(model):
        return Muon(model, options.lr, momentum=0.9, other_lr=options.other_lr, base=base)

    def soap(model):
        return SOAP(model, options.lr, other_lr=options.other_lr, base=base)

    dense_muon = make_run("dense", build, options.width, muon, data, options, head_std)
    dense_soap = make_run("dense", build, options.width, soap, data, options, head_std)
    structured_soap = make_run(
        STRUCTURE.label, build_structured, widened.width, soap, data, options, head_std
    )
    runs = [dense_muon, dense_soap, structured_soap]

    structlin.StructuredLinear(8, 8)(torch.zeros(1, 8))  # builds the engine before times
    structlin.show_config()
    train(runs, data, options)
    return report(runs, data, options)


def main(argv=None):
    options = parse(__doc__, "out/train_gpt", SIZES, SMOKE, argv)
    characters, ids = read_text(options.data)
    data = Windows(ids, options.context, options.batch, options.seed)

    def build(width):
        return GPT(len(characters), options.context, options.depth, width)

    return compare(build, data, options, head_std=0.02)


if __name__ == "__main__":
    main()
