"""Does the best learning rate stay where it is when a GPT's context gets longer? MN figure 8.

    python -m benchmarks.papers.mn_context            # results/papers/mn_context.{json,png}
    python -m benchmarks.papers.mn_context --smoke    # seconds

"We report good transfer of the optimal learning rate from small contexts to long contexts"
(appendix D.7, normed training of GPTs on OpenWebText). Here: the GPT of `mn_tasks` (32 features, 3
blocks, characters of pydoc's texts), normed Adam, contexts of 8, 32 and 128, 8 windows a batch,
100 steps, 3 seeds. Rates go by factors of 2 from the best of the context before until the best has
both its neighbours; optima lie between, on a parabola, for each seed. Fixed before the runs: the
transfer is good if from the shortest context to the longest the optimum moves by less than a factor
of 2.
"""

import torch

from benchmarks.harness import figures
from benchmarks.harness.experiment import Experiment, Row, Search
from benchmarks.harness.statistics import moves, transfer
from benchmarks.papers import mn_tasks

METHOD = "normed Adam"
CONTEXTS = [8, 32, 128]
SIZE = {"width": 32, "blocks": 3}
WINDOWS = 8


def train(method: str, size: int, lr: float, seed: int, steps: int) -> Row:
    torch.manual_seed(seed)
    net = mn_tasks.build("GPT", **SIZE, context=size)
    options = {"steps": steps, "size": WINDOWS, "seed": seed, "context": size}
    return {"loss": mn_tasks.train(net, "GPT", method, lr, **options)}


EXPERIMENT = Experiment(
    name="papers/mn_context",
    about=__doc__,
    run=train,
    axes={"method": [METHOD], "size": CONTEXTS},
    rates=Search("size", start=lambda job: 1.0),
    sizes={"steps": 100},
    note={"contexts": CONTEXTS, "windows": WINDOWS, **SIZE},
    smoke={"steps": 2, "size": CONTEXTS[:2]},
    analyse=lambda rows: {"transfer": transfer(rows), "estimates": moves(rows)},
    draw=lambda result: figures.rates(result["rows"], panel=["method"], line=["size"]),
)

if __name__ == "__main__":
    EXPERIMENT.main()
