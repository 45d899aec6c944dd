"""What does it cost to divide updates by their modular norm? MN appendix A.4.

    python -m benchmarks.papers.mn_overhead            # results/papers/mn_overhead.{json,png}
    python -m benchmarks.papers.mn_overhead --smoke    # seconds

The paper (A.4): "we trained a width 64 ResMLP with 8 blocks and block-depth 2 for 10k steps on the
CIFAR-10 dataset. We repeated the experiment with and without normalization [...] the overhead of
modular normalization was around 23 %." Here: one training step (forward, backward, Adam,
normalisation) against the same without normalisation, of that ResMLP with batches of 128 (random
numbers of CIFAR-10's shape); and of the compound GPT by width and by tokens per step: the work of
forward and backward goes as the tokens, that of normalising does not. The paper's sweeps of GPTs
have 128 windows of 128 tokens, 16384.

Three ways to normalise: `Normed` by `spectral_bound`, the default, which is never too small;
`Normed` with two warm-started power iterations, the paper's way; and `net.normalize`, the algebra's
own, on the update that Adam makes. Medians of interleaved rounds, for the ResMLP with the interval
of the mean over the rounds; to be run on an idle machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import structlin
from benchmarks.papers import sweeps
from benchmarks.papers.intervals import Estimate, student
from benchmarks.runs import keep, parser
from structlin import modular
from structlin.optim import Normed

CONTEXT, VOCABULARY = 128, 256
IMAGES, PIXELS, CLASSES = 128, 3072, 10  # a batch of CIFAR-10
WAYS = ("Adam", "bound", "power", "net.normalize")
PAPER, LARGE = 0.23, 4096  # the overhead that it measured; tokens of a step


def gpt(width: int, blocks: int, tokens: int) -> tuple[modular.Module, Tensor, Tensor]:
    """The network, its inputs and targets."""
    heads = max(1, width // 64)
    net = modular.GPT(VOCABULARY, context=CONTEXT, width=width, heads=heads, blocks=blocks)
    data = torch.randint(VOCABULARY, (max(1, tokens // CONTEXT), CONTEXT + 1))
    return net, data[:, :-1], data[:, 1:]


def resmlp() -> tuple[modular.Module, Tensor, Tensor]:
    """The paper's network, its inputs and targets."""
    net = modular.ResMLP(PIXELS, CLASSES, width=64, blocks=8, block_depth=2)
    return net, torch.randn(IMAGES, PIXELS), torch.randint(CLASSES, (IMAGES,))


def stepper(way: str, net: modular.Module) -> Callable[[], None]:
    """What is done after the backward pass."""
    adam = torch.optim.Adam(
        net.parameters(), lr=1.0 if way == "net.normalize" else 1e-3, betas=(0.9, 0.99)
    )
    if way == "Adam":
        return adam.step
    if way in ("bound", "power"):
        return Normed(adam, net, masses=modular.masses(net), norm=way).step
    weights = dict(net.named_parameters())

    @torch.no_grad()
    def step() -> None:
        before = {name: weight.clone() for name, weight in weights.items()}
        adam.step()
        update = {name: weight - before[name] for name, weight in weights.items()}
        for name, change in net.normalize(update, target=1e-3).items():
            weights[name].copy_(before[name] + change)

    return step


def measure(net: modular.Module, x: Tensor, y: Tensor, rounds: int) -> dict[str, Any]:
    """Seconds of forward + backward, and of each way's step on the same gradients."""

    def forward_backward() -> None:
        net.zero_grad()
        F.cross_entropy(net(x).flatten(0, -2), y.flatten()).backward()

    forward_backward()
    steps = {way: stepper(way, net) for way in WAYS}
    for step in steps.values():
        step()  # makes the state
    times: dict[str, list[float]] = {"forward + backward": []} | {way: [] for way in WAYS}
    for _ in range(rounds):
        times["forward + backward"].append(seconds(forward_backward))
        for way, step in steps.items():
            times[way].append(seconds(step))
    found = {name: statistics.median(values) for name, values in times.items()}
    step = found["forward + backward"] + found["Adam"]
    return {
        "seconds": found,
        "spread": {name: [min(values), max(values)] for name, values in times.items()},
        "overhead": {way: (found[way] - found["Adam"]) / step for way in WAYS[1:]},
        "intervals": {way: added(times, way) for way in WAYS[1:]} if rounds > 1 else None,
    }


def added(times: dict[str, list[float]], way: str) -> Estimate:
    """What `way` adds to a step, as a share of it: each round's, with the interval of the mean."""
    rounds = zip(times["forward + backward"], times["Adam"], times[way], strict=True)
    return student([(ours - adam) / (work + adam) for work, adam, ours in rounds])


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def claims(rows: list[dict[str, Any]]) -> dict[str, bool]:
    large = [row for row in rows if row["tokens"] >= LARGE]
    text = f"from {LARGE} tokens per step, a quarter of the paper's, every way adds less than 10 %"
    shares = [share for row in large for share in row["overhead"].values()]
    return {
        text: bool(large) and all(share < 0.1 for share in shares),
        **{
            f"{way} adds less than 10 % at every number of tokens": all(
                row["overhead"][way] < 0.1 for row in rows
            )
            for way in WAYS[1:]
        },
        "every way adds less than the paper's 23 % at every number of tokens": all(
            share < PAPER for row in rows for share in row["overhead"].values()
        ),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = _options().parse_args(arguments)
    structlin.show_config()  # builds the engine, so that no time has that in it
    settings = [(width, tokens) for width in options.widths for tokens in options.tokens]
    if options.smoke:
        settings, options.rounds, options.blocks = [(64, 128)], 1, 1
    torch.manual_seed(0)
    paper = measure(*resmlp(), 1 if options.smoke else 5 * options.rounds)
    rows = [
        {
            "width": width,
            "blocks": options.blocks,
            "tokens": tokens,
            **measure(*gpt(width, options.blocks, tokens), options.rounds),
        }
        for width, tokens in track(settings, "measuring")
    ]
    result = {"claims": claims(rows), "paper's setting": paper, "rows": rows}
    console = Console(width=140)
    shares = ", ".join(f"{way} {100 * share:.1f} %" for way, share in paper["overhead"].items())
    console.print(f"ResMLP of width 64, 8 blocks of depth 2, batches of {IMAGES}: {shares}")
    show(rows, options, console)
    if not options.smoke:
        sweeps.say(console, result["claims"])
    setting = {
        "blocks": options.blocks,
        "rounds": options.rounds,
        "threads": torch.get_num_threads(),
        "paper": PAPER,
    }
    keep(options, "mn_overhead", plot(rows), setting=setting, **result)
    return result


def show(rows: list[dict[str, Any]], options: argparse.Namespace, console: Console) -> None:
    table = Table(
        title=f"GPT of {options.blocks} blocks, float32, {torch.get_num_threads()} threads: "
        f"median of {options.rounds} rounds; what normalising adds to a training step"
    )
    for title in (
        "width",
        "tokens",
        "fwd + bwd ms",
        *(f"{way} ms" for way in WAYS),
        *(f"+ {way}" for way in WAYS[1:]),
    ):
        table.add_column(title, justify="right")
    for row in rows:
        times = [f"{1e3 * value:.1f}" for value in row["seconds"].values()]
        table.add_row(
            str(row["width"]),
            str(row["tokens"]),
            *times,
            *(f"{100 * row['overhead'][way]:.1f} %" for way in WAYS[1:]),
        )
    console.print(table)


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    names = [f"{row['width']}\n{row['tokens']}" for row in rows]
    for n, way in enumerate(WAYS[1:]):
        axes.bar(
            [m + 0.27 * (n - 1) for m in range(len(rows))],
            [100 * row["overhead"][way] for row in rows],
            0.25,
            label=way,
        )
    axes.axhline(100 * PAPER, color="0.5", ls="--", label="the paper")
    axes.set_xticks(range(len(rows)), names)
    axes.set(xlabel="width, tokens per step", ylabel="% added to a training step")
    axes.legend()
    return figure


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    options.add_argument("--widths", type=int, nargs="+", default=[128, 256])
    options.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    options.add_argument("--blocks", type=int, default=3)
    options.add_argument("--rounds", type=int, default=5)
    return options


if __name__ == "__main__":
    main()
