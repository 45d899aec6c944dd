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
`PowerNormed`, two warm-started power iterations, the paper's way; and `net.normalize`, the
algebra's own, on the update that Adam makes. Medians of interleaved rounds, for the ResMLP with the
interval of the mean over the rounds; to be run on an idle machine.
"""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row
from benchmarks.harness.statistics import Estimate, student
from benchmarks.harness.timing import interleaved, wall
from benchmarks.papers import networks
from benchmarks.training.transfer import PowerNormed
from structlin import modular
from structlin.optim import Normed

CONTEXT, VOCABULARY = 128, 256
IMAGES, PIXELS, CLASSES = 128, 3072, 10  # a batch of CIFAR-10
WAYS = ("Adam", "bound", "power", "net.normalize")
PAPER = 0.23  # the overhead that it measured


def gpt(width: int, blocks: int, tokens: int) -> tuple[modular.Module, Tensor, Tensor]:
    """The network, its inputs and targets."""
    heads = max(1, width // 64)
    net = networks.GPT(VOCABULARY, context=CONTEXT, width=width, heads=heads, blocks=blocks)
    data = torch.randint(VOCABULARY, (max(1, tokens // CONTEXT), CONTEXT + 1))
    return net, data[:, :-1], data[:, 1:]


def resmlp() -> tuple[modular.Module, Tensor, Tensor]:
    """The paper's network, its inputs and targets."""
    net = networks.ResMLP(PIXELS, CLASSES, width=64, blocks=8, block_depth=2)
    return net, torch.randn(IMAGES, PIXELS), torch.randint(CLASSES, (IMAGES,))


def stepper(way: str, net: modular.Module) -> Callable[[], None]:
    """What is done after the backward pass."""
    adam = torch.optim.Adam(
        net.parameters(), lr=1.0 if way == "net.normalize" else 1e-3, betas=(0.9, 0.99)
    )
    if way == "Adam":
        return adam.step
    if way in ("bound", "power"):
        kind = Normed if way == "bound" else PowerNormed
        return kind(adam, net, masses=modular.masses(net)).step
    weights = dict(net.named_parameters())

    @torch.no_grad()
    def step() -> None:
        before = {name: weight.clone() for name, weight in weights.items()}
        adam.step()
        update = {name: weight - before[name] for name, weight in weights.items()}
        for name, change in net.normalize(update, target=1e-3).items():
            weights[name].copy_(before[name] + change)

    return step


def measure(net: modular.Module, x: Tensor, y: Tensor, rounds: int) -> Row:
    """Seconds of forward + backward, and of each way's step on the same gradients."""

    def forward_backward() -> None:
        net.zero_grad()
        F.cross_entropy(net(x).flatten(0, -2), y.flatten()).backward()

    works = {"forward + backward": forward_backward, **{way: stepper(way, net) for way in WAYS}}
    for work in works.values():
        work()  # makes gradients, then the states
    times = interleaved(works, lambda work: wall(work, "cpu"), rounds=(rounds, rounds))
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


def measure_gpt(width: int, tokens: int, blocks: int, rounds: int, threads: int) -> Row:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    return measure(*gpt(width, blocks, tokens), rounds)


def measure_paper(chosen: Row, found: Row) -> Row:
    torch.manual_seed(0)
    return {"paper's setting": measure(*resmlp(), 5 * chosen["rounds"])}


def draw(result: Row) -> figures.Figure:
    points = [
        {"width": row["width"], "tokens": row["tokens"], "work": work, "ms per step": 1e3 * seconds}
        for row in result["rows"]
        for work, seconds in row["seconds"].items()
    ]
    return figures.curves(points, "tokens", "ms per step", panel=["width"], line=["work"], base=2)


EXPERIMENT = Experiment(
    name="papers/mn_overhead",
    about=__doc__,
    run=measure_gpt,
    axes={"width": [128, 256], "tokens": [2048, 4096]},
    seeds=0,
    workers=1,
    sizes={"blocks": 3, "rounds": 5, "threads": 2},
    note={"paper": PAPER},
    smoke={"width": [64], "tokens": [128], "blocks": 1, "rounds": 1},
    analyse=lambda rows: {},
    beside=measure_paper,
    draw=draw,
)

if __name__ == "__main__":
    EXPERIMENT.main()
