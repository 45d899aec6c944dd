"""What does it cost to divide updates by their modular norm? MN appendix A.4.

    python -m benchmarks.papers.mn_overhead            # results/papers/mn_overhead.{json,png}
    python -m benchmarks.papers.mn_overhead --smoke    # seconds

The paper's prototype took 23 % more time for training with normalised updates than without. Here:
the compound GPT, one training step (forward, backward, Adam, normalisation) against the same
without normalisation, by width and by tokens per step: the work of forward and backward goes as the
tokens, that of normalising does not. The paper's sweeps have 128 windows of 128 tokens, 16384.
Three ways to normalise: `Normed` by `spectral_bound`, the default, which is never too small;
`Normed` with two warm-started power iterations; and `net.normalize`, the algebra's own, on the
update that Adam makes. Medians of interleaved rounds; to be run on an idle machine.
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

from benchmarks.papers import md_sweeps
from benchmarks.runs import keep, parser
from structlin import modular
from structlin.optim import Normed

CONTEXT, VOCABULARY = 128, 256
WAYS = ("Adam", "bound", "power", "net.normalize")
PAPER, LARGE = 0.23, 4096  # the overhead that it measured; tokens of a step


def gpt(width: int, blocks: int) -> modular.Module:
    return modular.GPT(
        VOCABULARY, context=CONTEXT, width=width, heads=max(1, width // 64), blocks=blocks
    )


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


def measure(width: int, blocks: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of forward + backward, and of each way's step on the same gradients."""
    torch.manual_seed(0)
    net = gpt(width, blocks)
    data = torch.randint(VOCABULARY, (max(1, tokens // CONTEXT), CONTEXT + 1))

    def forward_backward() -> None:
        net.zero_grad()
        F.cross_entropy(net(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()).backward()

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
        "width": width, "blocks": blocks, "tokens": data.shape[0] * CONTEXT, "seconds": found,
        "spread": {name: [min(values), max(values)] for name, values in times.items()},
        "overhead": {way: (found[way] - found["Adam"]) / step for way in WAYS[1:]},
    }  # fmt: skip


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
    settings = [(width, tokens) for width in options.widths for tokens in options.tokens]
    if options.smoke:
        settings, options.rounds, options.blocks = [(64, 128)], 1, 1
    rows = [
        measure(width, options.blocks, tokens, options.rounds)
        for width, tokens in track(settings, "measuring")
    ]
    result = {"claims": claims(rows), "rows": rows}
    console = Console(width=140)
    show(rows, options, console)
    if not options.smoke:
        md_sweeps.say(console, result["claims"])
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
