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
CONVERT = {"overrides": {"*attn*": structlin.BTT(rank=4)}, "weight_norm": True}  # without SiLU
HEAD = 32  # features of an attention head, at every width; muP divides by HEAD, not by its root
TURN = 20  # steps before the next model has its turn, so that their seconds compare
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
        # positions are learned, but start as waves: attention then soon finds the tokens before
        frequencies = (2 * context) ** -(torch.arange(0, width, 2) / width)
        angles = torch.arange(context)[:, None] * frequencies
        waves = math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]
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
    """The characters of a text, and the text as their numbers; None: that of the library."""
    if path is not None:
        text = path.read_text("utf-8")
    else:
        texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
        for module in sorted(Path(get_path("stdlib")).glob("*.py")):
            texts.append(module.read_text("utf-8", "ignore"))
        text = "\n".join(texts).encode("ascii", "ignore").decode()
    points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    return points.unique(return_inverse=True)


class Windows:
    """Windows of a text and the characters that follow; the last tenth of the text is held out."""

    def __init__(self, ids, context, size, seed, heldout=128, part=32):
        self.train_ids, heldout_ids = ids.tensor_split([len(ids) - len(ids) // 10])
        self.context, self.size, self.seed = context, size, seed
        starts = torch.linspace(0, len(heldout_ids) - context - 1, heldout).long()
        self.heldout = [self.cut(heldout_ids, chunk) for chunk in starts.split(part)]

    def cut(self, ids, starts):
        window = ids[starts[:, None] + torch.arange(self.context + 1)]
        return window[:, :-1], window[:, 1:]

    def batch(self, step):
        """Follows from the seed and the step alone."""
        random = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        last = len(self.train_ids) - self.context
        return self.cut(self.train_ids, torch.randint(last, (self.size,), generator=random))


# ---- training ------------------------------------------------------------------------------------


class Run:
    """A model and its optimizer, and how its training goes."""

    def __init__(self, label, model, optimizer, cost_per_token, options):
        self.label = label
        self.model = model
        self.optimizer = optimizer
        self.params, self.flops = cost_per_token
        self.options = options
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        self.seconds = 0.0
        self.losses = []  # (steps so far, held-out loss)

    def rate(self, step):
        """Relative to its peak: up on a line, then down on a cosine to a tenth."""
        steps = self.options.steps
        warmup = max(1, steps // 20, min(50, steps // 5))
        if step < warmup:
            return (step + 1) / warmup
        return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

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
    def evaluate(self, step, heldout):
        total = sum(self.loss(x, y, "sum").item() for x, y in heldout)
        loss = total / sum(y.numel() for _, y in heldout)
        self.losses.append((step, loss))
        name, width = type(self.optimizer).__name__, self.model.head.in_features
        print(
            f"{self.label:18}{name:6}{width:5}   step {step:4}{loss:9.4f}{self.seconds:8.1f} s",
            flush=True,
        )


def train(runs, data, options):
    """All runs on the same batches, in turns of `TURN` steps."""
    for first_step in range(0, options.steps, TURN):
        for run in runs:
            for step in range(first_step, min(first_step + TURN, options.steps)):
                start = time.perf_counter()
                run.step(*data.batch(step))
                run.seconds += time.perf_counter() - start
                done = step + 1
                if done % max(1, options.steps // 20) == 0 or done == options.steps:
                    run.evaluate(done, data.heldout)


def make_run(build, structure, make_optimizer, data, options, head_std=0.0, **convert):
    """A run of the model of `build()`: dense if `structure` is None, else converted.

    The rates are meant for the dense model of `options.width`, and muP takes them to others.
    """
    torch.manual_seed(options.seed)
    model = build()
    if structure is not None:
        structlin.convert(model, structure, init="mup", **convert)
    nn.init.normal_(model.head.weight, std=head_std)
    x, y = data.heldout[0]
    cost = structlin.cost(model, x[:1])
    model.to(options.device)
    optimizer = make_optimizer(model)
    label = "dense" if structure is None else structure.label
    return Run(label, model, optimizer, (cost.params, cost.flops // y[:1].numel()), options)


# ---- the result ----------------------------------------------------------------------------------


def report(runs, data, options):
    """Print a table, write a plot and results.json, and return a row for each run."""
    tokens = options.batch * data.heldout[0][1][:1].numel()  # of a step
    figure, (by_seconds, by_flops) = plt.subplots(
        1, 2, sharey=True, figsize=(11, 4.5), layout="constrained"
    )
    rows = []
    for run in runs:
        steps, losses = zip(*run.losses, strict=True)
        seconds_per_step = run.seconds / options.steps
        flops = [3 * step * tokens * run.flops for step in steps]  # backward takes twice forward's
        row = {
            "label": run.label,
            "params": run.params,
            "optimizer": type(run.optimizer).__name__,
            "width": run.model.head.in_features,
            "flops": run.flops,
            "ms": round(1e3 * seconds_per_step, 2),
            "loss": losses[-1],
            "clock": [round(step * seconds_per_step, 2) for step in steps],
            "curve": [*zip(flops, losses, strict=True)],
        }
        rows.append(row)
        line = "{label:18}{optimizer:6}{width:5}{params:12,}{flops:12,}{ms:9.1f} ms{loss:9.4f}"
        print(line.format(**row))
        by_seconds.plot(row["clock"], losses, label=f"{row['label']}, {row['optimizer']}")
        by_flops.plot(flops, losses)
    by_seconds.set(xlabel="seconds of training", ylabel="held-out loss (nats)", yscale="log")
    by_flops.set(xlabel="training FLOPs", xscale="log")
    by_flops.tick_params(axis="x", which="both", labelrotation=45)
    by_seconds.legend()
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / "loss.png", dpi=150)
    result = {"command": sys.argv, "seed": options.seed, "torch": torch.__version__, "rows": rows}
    (options.out / "results.json").write_text(json.dumps(result))
    return rows


def parse(about, out, sizes, smoke, argv):
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a text file, UTF-8")
    for name, value in (sizes | {"out": Path(out), "device": "cpu"}).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--amp", action="store_true", help="bfloat16 by autocast")
    parser.add_argument("--smoke", action="store_true", help="seconds: does it run?")
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**smoke, out=Path("out/smoke"))
    return parser.parse_args(argv)


def compare(build, data, options, head_std=0.0):
    """Dense by Muon, dense by SOAP, and as wide a structured model as dense's FLOPs allow by SOAP.

    `build(width)` makes the dense model; `train_vit.py` has another one.
    """
    example = data.heldout[0][0][:1]
    wide = structlin.widen(
        build, STRUCTURE, dense=options.width, example=example, multiple=HEAD, **CONVERT
    )
    rates = {"lr": options.lr, "other_lr": options.other_lr, "base": build(options.width)}

    def muon(model):
        return Muon(model, momentum=0.9, **rates)

    def soap(model):
        return SOAP(model, **rates)

    def dense():
        return build(options.width)

    def widest():
        return build(wide.width)

    runs = [
        make_run(dense, None, muon, data, options, head_std),
        make_run(dense, None, soap, data, options, head_std),
        make_run(widest, STRUCTURE, soap, data, options, head_std, **CONVERT),
    ]
    structlin.show_config()  # builds the engine before a step is timed
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
