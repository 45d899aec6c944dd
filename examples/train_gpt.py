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
from functools import partial
from itertools import islice
from pathlib import Path
from sysconfig import get_path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import structlin
from structlin.optim import SOAP, Muon

STRUCTURE = structlin.BTT(rank=4).activate()  # with SiLU between its cores
CONVERT = {"overrides": {"*attn*": structlin.BTT(rank=4)}, "weight_norm": True}  # without one
SIZES = {"width": 256, "depth": 2, "context": 64, "batch": 32, "steps": 250, "seed": 0}
SIZES |= {"lr": 0.06, "other_lr": 0.002}  # of hidden matrices, and of everything else
SMOKE = {"width": 64, "depth": 1, "context": 16, "batch": 2, "steps": 6}
RUNS = [(1, False, partial(Muon, momentum=0.9)), (1, False, SOAP), (None, True, SOAP)]
HEAD = 32  # features of an attention head, at every width; muP divides by HEAD, not by its root
TURN = 20  # steps before the next model has its turn, so that their seconds compare


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn_norm, self.mlp_norm = (nn.LayerNorm(width, bias=False) for _ in range(2))
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
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        initialise(self, embedding=0.2)
        # positions are learned, but start as waves: attention then soon finds the tokens before
        at = torch.arange(context)[:, None] * (2 * context) ** -(torch.arange(0, width, 2) / width)
        waves = math.sqrt(2) * torch.cat([at.sin(), at.cos()], dim=1)[:, :width]
        self.positions.weight.data.copy_(0.2 * waves)

    def forward(self, ids):  # (batch, tokens) -> (batch, tokens, vocabulary)
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def initialise(model, embedding):
    """muP: 1 / sqrt(fan_in), but zero for the head and the last layer of each residual branch."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            zero, std = name.endswith(("head", "_out")), module.in_features**-0.5
            nn.init.zeros_(module.weight) if zero else nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=embedding)


def read_text(path):
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    texts += [m.read_text("utf-8", "ignore") for m in sorted(Path(get_path("stdlib")).glob("*.py"))]
    text = path.read_text("utf-8") if path else "\n".join(texts).encode("ascii", "ignore").decode()
    points = torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)
    return points.unique(return_inverse=True)


def loss_of(model, x, y, amp=False, **options):
    device = model.head.weight.device
    with torch.autocast(device.type, torch.bfloat16, enabled=amp):
        return F.cross_entropy(model(x.to(device)).flatten(0, -2), y.to(device).ravel(), **options)


def train(model, optimizer, batch, heldout, options, row):
    """Train on `batch(step)`, print and keep in `row` how that goes; pause after each step."""
    rise = max(1, options.steps // 20, min(50, options.steps // 5))

    def rate(step):  # relative to its peak: up on a line, down on a cosine to a tenth
        share = (step - rise) / max(1, options.steps - rise)
        return (step + 1) / rise if step < rise else 0.55 + 0.45 * math.cos(math.pi * share)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(1, options.steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, *batch(step - 1), options.amp).backward()
        optimizer.step()
        schedule.step()
        row["times"].append(time.perf_counter() - start)
        if step % max(1, options.steps // 20) == 0 or step == options.steps:
            with torch.no_grad():
                sums = [loss_of(model, *part, reduction="sum").item() for part in heldout]
            row["losses"].append((step, sum(sums) / sum(y.numel() for _, y in heldout)))
            line = "{label:18}{optimizer:6}{width:5}   step {0:4}{1:9.4f}{2:8.1f} s"
            print(line.format(*row["losses"][-1], sum(row["times"]), **row), flush=True)
        yield


def compare(dense, batch, heldout, options, structure, runs=RUNS, head_std=0.0, **convert):
    """Train a model for each of `runs`, in turns; show and keep a row of it. A run says how many
    times the width, None: as wide as dense's FLOPs allow; whether to convert; the optimizer."""
    rows, courses, narrow = [], [], options.width
    x, y = (part[:1] for part in heldout[0])  # one sequence
    wide = structlin.widen(dense, structure, dense=narrow, example=x, multiple=HEAD, **convert)
    for times, structured, make in runs:
        torch.manual_seed(options.seed)
        model = dense(times * narrow if times else wide.width)
        if structured:
            structlin.convert(model, structure, init="mup", **convert)
        nn.init.normal_(model.head.weight, std=head_std)
        cost = structlin.cost(model, x)
        model.to(options.device)
        optimizer = make(model, options.lr, other_lr=options.other_lr, base=dense(narrow))
        row = {"label": structure.label if structured else "dense", "params": cost.params}
        row |= {"optimizer": type(optimizer).__name__, "width": model.head.in_features}
        row |= {"flops": cost.flops // y.numel(), "times": [], "losses": []}
        rows.append(row)
        courses.append(train(model, optimizer, batch, heldout, options, row))
    structlin.show_config()  # builds the engine before a step is timed
    for course in courses * math.ceil(options.steps / TURN):
        [*islice(course, TURN)]
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(11, 4.5), layout="constrained")
    for row in rows:
        steps, losses = zip(*row.pop("losses"), strict=True)
        seconds = sum(row.pop("times")) / options.steps  # of a step
        flops = [3 * step * options.batch * y.numel() * row["flops"] for step in steps]
        row |= {"ms": round(1e3 * seconds, 2), "loss": losses[-1]}
        line = "{label:18}{optimizer:6}{width:5}{params:12,}{flops:12,}{ms:9.1f} ms{loss:9.4f}"
        print(line.format(**row))
        row["clock"] = [round(step * seconds, 2) for step in steps]
        row["curve"] = [*zip(flops, losses, strict=True)]
        axes[0].plot(row["clock"], losses, label=f"{row['label']}, {row['optimizer']}")
        axes[1].plot(flops, losses)
    axes[0].set(xlabel="seconds of training", ylabel="held-out loss (nats)", yscale="log")
    axes[1].set(xlabel="training FLOPs", xscale="log")
    axes[1].tick_params("x", which="both", labelrotation=45)
    axes[0].legend()
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


def main(argv=None):
    options = parse(__doc__, "out/train_gpt", SIZES, SMOKE, argv)
    characters, ids = read_text(options.data)
    train_ids, heldout_ids = ids.tensor_split([len(ids) - len(ids) // 10])

    def windows(ids, starts):
        window = ids[starts[:, None] + torch.arange(options.context + 1)]
        return window[:, :-1], window[:, 1:]

    def batch(step):  # follows from the seed and the step alone
        random = torch.Generator().manual_seed(1_000_003 * options.seed + step)
        last, size = len(train_ids) - options.context, (options.batch,)
        return windows(train_ids, torch.randint(last, size, generator=random))

    starts = torch.linspace(0, len(heldout_ids) - options.context - 1, 128).long()
    heldout = [windows(heldout_ids, part) for part in starts.split(32)]
    dense = partial(GPT, len(characters), options.context, options.depth)
    return compare(dense, batch, heldout, options, STRUCTURE, head_std=0.02, **CONVERT)


if __name__ == "__main__":
    main()
