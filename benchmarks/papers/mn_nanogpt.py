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

from typing import Any

import torch
from torch import nn

from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row, Search
from benchmarks.harness.models import NanoGPT
from benchmarks.harness.statistics import values
from benchmarks.harness.tasks import text
from benchmarks.papers import mn_tasks
from benchmarks.papers.mn_transfer import better, losses

SIZES = {"width": [32, 128], "blocks": [1, 6]}
BASE = {"width": 32, "blocks": 3}
STARTS = {"GPT": 2.0**-6, "nanoGPT": 2.0**-8}  # rates from which the search goes
METHOD, WINDOWS = "Adam", 8


def train(network: str, method: str, axis: str, size: int, lr: float, seed: int, steps: int) -> Row:
    torch.manual_seed(seed)
    shape = {**BASE, axis: size}
    net: nn.Module
    if network == "GPT":
        net = mn_tasks.build("GPT", **shape)
    else:
        net = NanoGPT(text()[1], context=mn_tasks.CONTEXT, **shape)
    found = mn_tasks.fit(net, "GPT", method, lr, steps=steps, size=WINDOWS, seed=seed)
    return {"loss": found["train"], "test": found["test"]}


def comparisons(rows: list[Row]) -> dict[str, Any]:
    """By how much more nanoGPT's rate moves than the GPT's, and the GPT's losses over nanoGPT's."""
    pair = ("GPT", METHOD), ("nanoGPT", METHOD)
    return {
        "transfer": {axis: better(rows, axis, *pair) for axis in values(rows, "axis")},
        "losses": losses(rows, *pair),
    }


EXPERIMENT = Experiment(
    name="papers/mn_nanogpt",
    about=__doc__,
    run=train,
    axes={
        "network": [*STARTS],
        "method": [METHOD],
        "axis": [*SIZES],
        "size": lambda job: SIZES[job["axis"]],
    },
    rates=Search("size", start=lambda job: STARTS[job["network"]]),
    sizes={"steps": 120},
    note={"windows": WINDOWS, "base": BASE, "data": "pydoc topics"},
    smoke={"steps": 2, "axis": ["width"], "size": [8]},
    analyse=lambda rows: {
        "transfer": mn_tasks.transfers(rows, "network", "axis"),
        "comparisons": comparisons(rows),
    },
    draw=lambda result: figures.rates(result["rows"], panel=["network", "axis"], line=["size"]),
)

if __name__ == "__main__":
    EXPERIMENT.main()
