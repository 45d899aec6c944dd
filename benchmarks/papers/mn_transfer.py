"""Does dividing updates by their modular norm make the learning rate transfer? MN figures 1, 4 and
9 to 12.

    python -m benchmarks.papers.mn_transfer                  # results/papers/mn_transfer.json
    python -m benchmarks.papers.mn_transfer --networks GPT   # first this one; what is kept stays
    python -m benchmarks.papers.mn_transfer --smoke          # seconds

The paper, section 4: "normed optimization, with both Adam and SGD as the base optimizer, allows for
successful learning rate transfer across width and depth for GPT training on OpenWebText (Figure 1),
as well as ResMLP and ResNet training on CIFAR-10 (Figure 4)". D.5: normed Adam has "significantly
better transfer across width. The difference in depth transfer is less stark", it "matches or
outperforms unnormed Adam in both test and training loss", and "normed SGD consistently
significantly outperforms ordinary SGD".

Here: the same networks, much smaller, on scikit-learn's digits and the texts of pydoc, 50 steps, 3
seeds. As in the paper: no weight decay, the learning rate falls linearly to zero, Adam with betas
(0.9, 0.99), SGD with momentum 0.9. "normed" means that each update is divided by its modular norm;
plain optimizers make the steps of the paper's parametrisation (`paper_groups`). Rates go by factors
of 2 from the best of the size before until the best has both its neighbours, each the mean of the
seeds' log losses; where the optimum lies between is the vertex of a parabola, for each seed.

Fixed before the runs: a transfer is successful if from the smallest size to the largest the optimum
moves by less than a factor of 2; it is better than another if it moves by less, seed by seed; a
loss matches another if it is below 1.05 of it, both at their best rates.
"""

from itertools import product
from math import exp, log, prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import training
from benchmarks.harness.experiment import Experiment, Row, Search
from benchmarks.harness.report import listed, number, table
from benchmarks.harness.shown import Claim, Holds
from benchmarks.harness.statistics import (
    Estimate,
    above,
    below,
    differences,
    log_ratios,
    moved_by_seed,
    select,
    student,
    transfer,
    tuned,
    values,
    within,
)
from benchmarks.harness.tasks import Batch, Digits, Task, Text, text
from benchmarks.papers import networks
from structlin import modular
from structlin.optim import Normed

SIZES = {
    "ResMLP": {"width": [16, 256], "blocks": [2, 18]},
    "ResNet": {"width": [8, 32], "blocks": [1, 6]},
    "GPT": {"width": [32, 64, 128], "blocks": [1, 6]},
}
BASE = {  # where only the other one changes
    "ResMLP": {"width": 32, "blocks": 3},
    "ResNet": {"width": 16, "blocks": 3},
    "GPT": {"width": 32, "blocks": 3},
}
STARTS = {  # log2 of the rates from which the search goes, at the smallest size
    "ResMLP": {"normed Adam": 0, "Adam": -5, "normed SGD": 0, "SGD": 2},
    "ResNet": {"normed Adam": 0, "Adam": -5, "normed SGD": 0, "SGD": 2},
    "GPT": {"normed Adam": 0, "Adam": -5, "normed SGD": 0, "SGD": 0},
}
SAMPLES = {"ResMLP": 64, "ResNet": 32, "GPT": 8}  # of a batch
METHODS = ("normed Adam", "Adam", "normed SGD", "SGD")
MATCHES = 1.05  # a loss over another that is not above it
CONTEXT = 32
HEADS = 4
EVALUATED = {"ResMLP": 4096, "ResNet": 1024, "GPT": 64}  # samples of a loss


class Images(Digits):
    def batch(self, size: int) -> Batch:  # (size, 1, 8, 8)
        x, y = super().batch(size)
        return x.view(-1, 1, 8, 8), y


def build(network: str, *, width: int, blocks: int) -> modular.Module:
    if network == "ResMLP":
        return networks.ResMLP(64, 10, width=width, blocks=blocks, block_depth=2)
    if network == "ResNet":
        return networks.ResNet(1, 10, width=width, blocks=blocks)
    size = {"context": CONTEXT, "width": width, "heads": HEADS, "blocks": blocks}
    return networks.GPT(text()[1], **size)


def task(network: str, seed: int, split: str) -> Task:
    """The "train" or the "test" split: moved and noisy digits, so that a loss does not come to
    nothing, of three quarters of the images or of the others; windows of the first nine tenths of
    the text or of the last."""
    if network == "GPT":
        return Text(seed, split, context=CONTEXT)
    return (Digits if network == "ResMLP" else Images)(seed, split)


def optimizer(net: modular.Module, method: str, lr: float) -> torch.optim.Optimizer:
    """Plain rates are those of the paper's parametrisation."""
    name = method.removeprefix("normed ")
    groups: Any = net.parameters()
    if method == name:
        groups = paper_groups(net, lr, optimizer=name.lower())
    base: torch.optim.Optimizer
    if name == "Adam":
        base = torch.optim.Adam(groups, lr, betas=(0.9, 0.99))
    else:
        base = torch.optim.SGD(groups, lr, momentum=0.9, dampening=0.9)
    return base if method == name else Normed(base, net, masses=modular.masses(net))


def paper_groups(net: modular.Module, lr: float, *, optimizer: str) -> list[dict[str, Any]]:
    """Return parameter groups by which plain Adam or SGD makes the steps of the paper's baselines.

    There a layer multiplies by its scale s in the forward pass. A gradient is then s times as
    large, and what it changes counts s times: the rate of SGD is s^2 lr, that of Adam s lr. s is
    sqrt(fan_out / fan_in) of a linear layer, sqrt(width) of an embedding, sqrt(c_out / c_in) / k^2
    of a convolution.

    Source: MN, appendix B.1.

    >>> net = modular.Linear(64, 16) @ modular.Embed(10, 64)
    >>> [(group["name"], group["lr"]) for group in paper_groups(net, 0.1, optimizer="sgd")]
    [('0.embedding.weight', 6.4), ('1.linear.weight', 0.025)]
    """
    power = 2 if optimizer == "sgd" else 1
    return [
        {"params": [layer.weight], "name": f"{name}.weight", "lr": lr * scale_of(layer) ** power}
        for name, layer in net.named_modules()
        if isinstance(layer, nn.Linear | nn.Embedding | nn.Conv2d)
    ]


def scale_of(layer: nn.Linear | nn.Embedding | nn.Conv2d) -> float:
    if isinstance(layer, nn.Embedding):
        return sqrt(layer.embedding_dim)
    fan_out, fan_in, *kernel = layer.weight.shape
    return sqrt(fan_out / fan_in) / prod(kernel)


@torch.no_grad()
def final_loss(net: modular.Module, network: str, seed: int, split: str) -> float | None:
    data = task(network, 1000 + seed, split)
    x, y = data.batch(EVALUATED[network])
    return training.finite(data.loss(net(x), y).item())


def transfers(rows: list[Row], *by: str) -> Row:
    """For each value of `by` how each method's best rate moves: that of the means, and "estimates"
    over the seeds."""
    by_group = {}
    for group in dict.fromkeys(tuple(row[name] for name in by) for row in rows):
        group_rows = select(rows, **dict(zip(by, group, strict=True)))
        transfers_of_methods = transfer(group_rows)
        for method, method_transfer in transfers_of_methods.items():
            moves = moved_by_seed(select(group_rows, method=method))
            method_transfer["estimates"] = {"moved": student(moves)}
        by_group[", ".join(group)] = transfers_of_methods
    return by_group


def train(network: str, axis: str, method: str, size: int, lr: float, seed: int, steps: int) -> Row:
    """The losses at the end on new samples of both parts, None where they are not finite."""
    torch.manual_seed(seed)
    net = build(network, **{**BASE[network], axis: size})
    data = task(network, seed, "train")

    def loss(step: int) -> Tensor:
        x, y = data.batch(SAMPLES[network])
        return data.loss(net(x), y)

    descent = optimizer(net, method, lr)
    if not training.descend(descent, loss, steps, schedule="linear"):
        return {"loss": None, "test": None}
    return {
        "loss": final_loss(net, network, seed, "train"),
        "test": final_loss(net, network, seed, "test"),
    }


def extra_move(rows: list[Row], axis: str, network: str, kind: str) -> Estimate:
    """By how many factors of 2 more the optimum of the plain method moves than that of the normed
    one, both without their signs."""
    group = select(rows, axis=axis, network=network)
    plain = moved_by_seed(select(group, method=kind))
    normed = moved_by_seed(select(group, method=f"normed {kind}"))
    return differences([*map(abs, plain)], [*map(abs, normed)])


def losses(rows: list[Row], network: str, kind: str) -> list[Row]:
    """For each size and set the log of the normed loss over the plain one, each at its best
    rate."""
    pair = [(network, f"normed {kind}"), (network, kind)]
    estimates = []
    sizes = dict.fromkeys((row["axis"], row["size"]) for row in select(rows, network=network))
    for (axis, size), loss in product(sizes, ("loss", "test")):
        at_size = select(rows, axis=axis, size=size, network=network)
        normed = tuned(select(at_size, method=f"normed {kind}"), loss)
        plain = tuned(select(at_size, method=kind), loss)
        split = "train" if loss == "loss" else "test"
        where = {"pair": pair, "axis": axis, "size": size, "set": split}
        estimates.append({**where, **student(log_ratios(normed, plain))})
    return estimates


def comparisons(rows: list[Row]) -> dict[str, Any]:
    """Network -> optimizer -> axis -> by how much more the plain one's rate moves than the normed
    one's; the losses of normed over plain at every size."""
    axes = values(rows, "axis")
    moves: dict[str, dict[str, dict[str, Estimate]]] = {}
    loss_ratios = []
    for network in values(rows, "network"):
        moves[network] = {}
        for kind in ("Adam", "SGD"):
            moves[network][kind] = {axis: extra_move(rows, axis, network, kind) for axis in axes}
            loss_ratios += losses(rows, network, kind)
    return {"transfer": moves, "losses": loss_ratios}


# ---- what the pages show -------------------------------------------------------------------------


def moved(result: Row, network: str) -> dict[str, list[Estimate]]:
    """Method -> by how much its best rate moves over width, and over depth."""
    over_width = result["transfer"][f"{network}, width"]
    over_depth = result["transfer"][f"{network}, blocks"]
    moves = {}
    for method in ("normed Adam", "normed SGD", "Adam", "SGD"):
        moves[method] = [over[method]["estimates"]["moved"] for over in (over_width, over_depth)]
    return moves


def transferred(network: str, figure: str) -> Claim:
    def test(result: Row) -> tuple[Holds, str]:
        moves = moved(result, network)
        holds = []
        for estimate in (*moves["normed Adam"], *moves["normed SGD"]):
            holds.append(within(estimate, 1.0))
        ranges = []
        for axis, sizes in SIZES[network].items():
            ranges.append(f"{axis} {sizes[0]} to {sizes[-1]}")
        factors = []
        for method, estimates in moves.items():
            factors.append(f"{method} {' and '.join(map(number, estimates))}")
        return holds, (
            f"over {', and '.join(ranges)}, the best rate moves by these factors of 2: "
            f"{'; '.join(factors)} ({result['setting']['steps']} steps); successful: less than one"
        )

    return Claim(
        figure,
        f"normed rates transfer across width and depth: {network}",
        '"normed optimization, with both Adam and SGD as the base optimizer, allows for successful '
        f'learning rate transfer across width and depth": {network}',
        test,
    )


def extra_moves(result: Row, method: str) -> dict[str, Estimate]:
    """Network -> by how much more the plain method's rate moves over width."""
    moves = result["comparisons"]["transfer"]
    return {network: by_method[method]["width"] for network, by_method in moves.items()}


def over_sizes(name: str, short: str, words: str, limit: float) -> Claim:
    """Normed against plain at every size."""

    def test(result: Row) -> tuple[Holds, str]:
        rows = [row for row in result["comparisons"]["losses"] if row["pair"][1][1] == name]
        holds = [below(row, log(limit)) for row in rows]
        ratios = [exp(row["value"]) for row in rows]
        return holds, (
            f"in {holds.count(True)} of {len(holds)} comparisons its loss is below {limit:g} "
            f"of {name}'s, in {holds.count(False)} above, in {holds.count(None)} undecided; "
            f"it has {min(ratios):.2f} to {max(ratios):.2f} of it "
            f"({result['setting']['steps']} steps)"
        )

    words = f"normed {name} {words}: {len(SIZES)} networks, over width and depth"
    return Claim("MN D.5, 9-12", short, words, test)


CLAIMS = [
    transferred("GPT", "MN 1"),
    transferred("ResMLP", "MN 4"),
    transferred("ResNet", "MN 4"),
    Claim(
        "MN D.5",
        "normed Adam transfers better across width than Adam",
        'normed Adam exhibits "significantly better transfer across width" than Adam',
        lambda result: (
            [*map(above, extra_moves(result, "Adam").values())],
            "Adam's best rate moves by this many factors of 2 more: "
            f"{listed(extra_moves(result, 'Adam'), number)}; "
            "SGD's, of which the paper says nothing, than "
            f"normed SGD's: {listed(extra_moves(result, 'SGD'), number)}",
        ),
    ),
    over_sizes(
        "Adam",
        "normed Adam matches or outperforms Adam at every size",
        '"matches or outperforms unnormed Adam in both test and training loss"',
        MATCHES,
    ),
    over_sizes(
        "SGD",
        "normed SGD outperforms SGD at every size",
        '"consistently significantly outperforms ordinary SGD"',
        1.0,
    ),
]


def numbers(result: Row) -> dict[str, str]:
    """By which factor plain Adam's best rate falls over width."""
    factors = {}
    for name, network in (("mn.mlp", "ResMLP"), ("mn.conv", "ResNet"), ("mn.gpt", "GPT")):
        over_width, _ = moved(result, network)["Adam"]
        factors[name] = f"{2 ** -over_width['value']:.1f}"
    return factors


def tabulate(result: Row) -> str:
    """log2 of the best rate at each size. In brackets: the loss of the largest size at the smallest
    one's best rate, over its loss at its own."""
    lines = []
    for setup, by_method in result["transfer"].items():
        sizes = ", ".join(by_method["Adam"]["optima"])
        cells = [f"{setup} {sizes}"]
        for method in METHODS:
            optima = " ".join(f"{rate:+.1f}" for rate in by_method[method]["optima"].values())
            cost = by_method[method]["cost"]
            words = "diverges" if cost is None else f"{cost:.2f}x"
            cells.append(f"{optima} ({words})")
        lines.append(cells)
    return table(["", *METHODS], lines)


EXPERIMENT = Experiment(
    name="papers/mn_transfer",
    about=__doc__,
    numbers=numbers,
    tables={"transfer": tabulate},
    claims=CLAIMS,
    place="results/modular_norm.md#transfer-over-width-and-depth",
    run=train,
    axes={
        "network": [*SIZES],
        "axis": ["width", "blocks"],
        "method": METHODS,
        "size": lambda job: SIZES[job["network"]][job["axis"]],
    },
    rates=Search(lambda job: 2.0 ** STARTS[job["network"]][job["method"]]),
    sizes={"steps": 50},
    note={"base": BASE, "samples": SAMPLES, "data": "digits, moved, noisy; pydoc topics"},
    smoke={"steps": 2, "axis": ["width"], "size": [8]},
    analyse=lambda rows: {
        "transfer": transfers(rows, "network", "axis"),
        "comparisons": comparisons(rows),
    },
)

if __name__ == "__main__":
    EXPERIMENT.main()
