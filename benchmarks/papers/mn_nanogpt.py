"""Does plain Adam's learning rate transfer better on the paper's GPT than on nanoGPT? MN figure 5.

    python -m benchmarks.papers.mn_nanogpt            # results/papers/mn_nanogpt.{json,png}
    python -m benchmarks.papers.mn_nanogpt --smoke    # seconds

The paper, D.4, of Adam without normalisation on OpenWebText: "We found that even without using the
normed optimizer, our implementation with orthogonal initialization transferred learning rate
better"; section 4: "We compare with nanoGPT using standard initialization [...] to make sure our
changes recover standard performance". Here: the GPT of `mn_tasks`, with the rates of the paper's
parametrisation, and nanoGPT with its own initialisation; 120 steps of characters, 3 seeds. Rates,
optima and what is fixed before the runs are those of `mn_transfer`: better is what moves by less,
seed by seed, and a loss matches another if it is below 1.05 of it. First this was run for 50 steps,
in which nanoGPT, whose weights start small, came to no less than 3.2 nats, what the frequencies of
the characters give; so it was run for longer.
"""

import math
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn

from benchmarks.papers import mn_tasks, mn_transfer, sweeps
from benchmarks.papers.mn_transfer import Row, of
from benchmarks.runs import keep, parser, run_all

SIZES = {"width": [32, 128], "blocks": [1, 6]}
BASE = {"width": 32, "blocks": 3}
STARTS = {"GPT": 2.0**-6, "nanoGPT": 2.0**-8}  # rates from which the search goes
STEPS, WINDOWS = 120, 8

Run = tuple[str, str, int, float, int]  # network, axis, size, lr, seed


class NanoGPT(nn.Module):
    """nanoGPT's architecture with its initialisation (github.com/karpathy/nanoGPT, model.py),
    without dropout and biases: Gaussian weights of std 0.02, those that end a branch smaller by
    sqrt(2 blocks); x + f(x); attention scaled by 1 / sqrt(d); the head is the embedding."""

    def __init__(self, vocabulary: int, *, context: int, width: int, blocks: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(NanoBlock(width) for _ in range(blocks)))
        self.ln_f = nn.LayerNorm(width, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                branches = 2 * blocks if name.endswith("_proj.weight") else 1
                nn.init.normal_(weight, std=0.02 / math.sqrt(branches))

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, tokens) -> (batch, tokens, vocabulary)
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        return F.linear(self.ln_f(self.blocks(x)), self.wte.weight)


class NanoBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.c_attn = nn.Linear(width, 3 * width, bias=False)
        self.attn_proj = nn.Linear(width, width, bias=False)
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.mlp_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width)
        heads = self.c_attn(self.ln_1(x)).unflatten(-1, (3, mn_tasks.HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, features)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


def train(run: Run, steps: int) -> Row:
    network, axis, size, lr, seed = run
    torch.manual_seed(seed)
    shape = {**BASE, axis: size}
    net: nn.Module
    if network == "GPT":
        net = mn_tasks.build("GPT", **shape)
    else:
        net = NanoGPT(mn_tasks.characters()[1], context=mn_tasks.CONTEXT, **shape)
    found = mn_tasks.fit(net, "GPT", "Adam", lr, steps=steps, size=WINDOWS, seed=seed)
    named = dict(zip(("network", "axis", "size", "lr", "seed"), run, strict=True))
    return named | {"method": "Adam", "loss": found["train"], "test": found["test"]}


def comparisons(rows: list[Row]) -> dict[str, Any]:
    """By how much more nanoGPT's rate moves than the GPT's, and the GPT's losses over nanoGPT's."""
    pair = ("GPT", "Adam"), ("nanoGPT", "Adam")
    axes = dict.fromkeys(row["axis"] for row in rows)
    return {
        "transfer": {axis: mn_transfer.better(rows, axis, *pair) for axis in axes},
        "losses": mn_transfer.losses(rows, *pair),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3)
    chosen = options.parse_args(arguments)
    sizes, steps = ({"width": [8]}, 2) if chosen.smoke else (SIZES, STEPS)

    def run(network: str, axis: str, size: int, lrs: list[float]) -> list[Row]:
        runs = [(network, axis, size, lr, seed) for lr, seed in product(lrs, range(chosen.seeds))]
        return run_all(partial(train, steps=steps), runs, chosen)

    rows = [
        row
        for network, start in STARTS.items()
        for axis, all_ in sizes.items()
        for row in sweeps.search(partial(run, network, axis), all_, start)
    ]
    result = {"transfer": mn_transfer.transfers(rows), "comparisons": comparisons(rows)}
    console = Console(width=120)
    for name, by_method in result["transfer"].items():
        console.print(sweeps.table(f"{name}, {steps} steps", by_method, name.split(", ")[1]))
    console.print(result["comparisons"])
    setting = {"steps": steps, "windows": WINDOWS, "base": BASE, "data": "pydoc topics"}
    keep(chosen, "mn_nanogpt", plot(rows), setting=setting, **result, rows=rows)
    return result


def plot(rows: list[Row]) -> Figure:
    axes_of = dict.fromkeys(row["axis"] for row in rows)
    figure = Figure(figsize=(10, 4 * len(axes_of)), layout="constrained")
    grid = figure.subplots(len(axes_of), len(STARTS), sharey=True, squeeze=False)
    for (line, axis), (column, network) in product(enumerate(axes_of), enumerate(STARTS)):
        axes = grid[line, column]
        sweeps.plot(axes, of(rows, network=network, axis=axis), "Adam", axis)
        axes.set(title=f"{network}, Adam", ylabel="training loss at the end (nats)")
        axes.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
